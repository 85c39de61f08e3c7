"""Evaluators behind HTTP: POST the question, read the answer, try again on 429 and 5xx inside the trait's timeout.

What belongs here: one question over the wire. What does not: which addresses may be called; the client's transport
decides (safety.py).
"""

from __future__ import annotations

import httpx

from lockstep.kernel.clock import Clock
from lockstep.readiness.evaluators.answer import MAX_ANSWER_BYTES, Question, failed, parse
from lockstep.readiness.model import Category, TraitResult
from lockstep.readiness.safety import Forbidden

TRIES = 3
FIRST_WAIT_SECONDS = 0.5
_RETRIED = frozenset({429, 500, 502, 503, 504})


class HttpEvaluator:
    """Asks an address."""

    def __init__(self, client: httpx.Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock

    def evaluate(self, question: Question, address: str) -> TraitResult:
        """The answer, or an ERROR with its category. Never longer than the trait's timeout."""
        deadline = self._clock.monotonic() + question.trait.timeout
        wait = FIRST_WAIT_SECONDS
        for attempt in range(1, TRIES + 1):
            result, again = self._ask(question, address, deadline)
            left = deadline - self._clock.monotonic()
            if not again or attempt == TRIES or left <= wait:
                return result
            self._clock.sleep(wait)
            wait *= 2
        raise AssertionError("unreachable: the last try returns")

    def _ask(self, question: Question, address: str, deadline: float) -> tuple[TraitResult, bool]:
        left = deadline - self._clock.monotonic()
        try:
            status, body = self._post(address, question, max(left, 0.001), deadline)
        except httpx.TimeoutException:
            words = f"EVALUATOR_TIMEOUT: no answer within {question.trait.timeout} s"
            return failed(question, Category.TIMEOUT, words), False
        except Forbidden as error:
            return failed(question, Category.PERMANENT, f"EVALUATOR_HTTP_ERROR: {error}"), False
        except httpx.HTTPError as error:
            return failed(question, Category.TRANSIENT, f"EVALUATOR_HTTP_ERROR: {type(error).__name__}"), True
        if status >= 300:
            healing = status >= 500 or status == 429
            category = Category.TRANSIENT if healing else Category.PERMANENT
            return failed(question, category, f"EVALUATOR_HTTP_ERROR: status {status}"), status in _RETRIED
        return parse(question, body), False

    def _post(self, address: str, question: Question, left: float, deadline: float) -> tuple[int, bytes]:
        """Read no more than an answer may have, and no longer than the deadline: a slow drip is a timeout too."""
        body = b""
        with self._client.stream("POST", address, json=question.body(), timeout=left) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    break
                if self._clock.monotonic() > deadline:
                    raise httpx.ReadTimeout("the answer drips")
            return response.status_code, body
