"""Looking at all traits of an execution at once: what is still valid is reused, the rest is asked for in parallel.

What belongs here: choice of transport, bounds on time and on hanging threads, expiry of answers. What does not: what
the answers add up to (verdict.py), where they are kept (store.py).

A stored PASS with a TTL is reused until it ends; a FAIL or ERROR never is, so readiness is noticed at once. A pushed
answer goes before the evaluator for as long as it is valid. A trait without an evaluator can only be pushed.
"""

from __future__ import annotations

import contextvars
import importlib
import threading
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from lockstep.kernel.clock import Clock
from lockstep.kernel.logs import get_logger
from lockstep.readiness.evaluators.answer import Question, failed, from_mapping
from lockstep.readiness.evaluators.breaker import Breaker
from lockstep.readiness.evaluators.builtin import Builtins
from lockstep.readiness.evaluators.http import HttpEvaluator
from lockstep.readiness.evaluators.process import ProcessEvaluator
from lockstep.readiness.model import Category, Execution, RunStatus, TraitPlan, TraitResult, TraitStatus

MOST_AT_ONCE = 64
GRACE_SECONDS = 2.0  # a transport ends by itself at the timeout; this is for those that do not

_log = get_logger(__name__)


class Runner:
    """Answers traits. Thread-safe; `allowed_modules` are the prefixes that `python:` evaluators may come from."""

    def __init__(
        self,
        clock: Clock,
        builtins: Builtins,
        *,
        http: HttpEvaluator | None = None,
        process: ProcessEvaluator | None = None,
        allowed_modules: Collection[str] = (),
        most_at_once: int = MOST_AT_ONCE,
    ) -> None:
        self._clock = clock
        self._builtins = builtins
        self._http = http
        self._process = process
        self._allowed_modules = tuple(allowed_modules)
        self._slots = threading.BoundedSemaphore(most_at_once)
        self.breaker = Breaker(clock)

    def evaluate(
        self, state: Execution, stored: Mapping[str, TraitResult], *, fresh: bool = False
    ) -> tuple[TraitResult, ...]:
        """Every trait of the execution, within its timeout. `fresh` asks again also where a PASS is still valid.

        After success the watched values must be today's, so a stored PASS is not reused then.
        """
        now = self._clock.now()
        fresh = fresh or state.status is RunStatus.COMPLETED_MONITORING
        waiting: list[_Asked] = []
        found: dict[str, TraitResult] = {}
        for trait in state.plan.traits:
            known = stored.get(trait.type)
            if known is not None and _reusable(known, now, fresh=fresh):
                found[trait.type] = known
            elif trait.evaluator is None:
                found[trait.type] = known or TraitResult(
                    trait.type, TraitStatus.STALE, "waiting for a push", {}, None, now
                )
            else:
                waiting.append(self._begin(Question(state.key, trait, now)))
        for asked in waiting:
            found[asked.question.trait.type] = self._finish(asked)
        return tuple(found[trait.type] for trait in state.plan.traits)

    def is_answered(self, state: Execution, stored: Mapping[str, TraitResult]) -> bool:
        """Whether every trait has a stored answer that may be reused: then nobody needs to be asked."""
        now, fresh = self._clock.now(), state.status is RunStatus.COMPLETED_MONITORING
        return all(
            trait.evaluator is None
            or ((known := stored.get(trait.type)) is not None and _reusable(known, now, fresh=fresh))
            for trait in state.plan.traits
        )

    def _begin(self, question: Question) -> _Asked:
        asked = _Asked(question, self._clock.monotonic() + question.trait.timeout + GRACE_SECONDS)
        if not self._slots.acquire(blocking=False):
            asked.answer(failed(question, Category.TRANSIENT, "too many evaluators hang already"))
            return asked
        run = contextvars.copy_context().run

        def work() -> None:
            try:
                asked.answer(self._guarded(question))
            finally:
                self._slots.release()

        threading.Thread(target=run, args=(work,), name=f"trait {question.trait.type}", daemon=True).start()
        return asked

    def _finish(self, asked: _Asked) -> TraitResult:
        result = asked.wait(self._clock)
        if result is None:
            words = f"EVALUATOR_TIMEOUT: no answer within {asked.question.trait.timeout} s"
            result = failed(asked.question, Category.TIMEOUT, words)
        if self.breaker.record(str(asked.question.trait.evaluator), result):
            _log.warning("evaluator left alone for a while", evaluator=asked.question.trait.evaluator)
        return _with_expiry(result, asked.question.trait, self._clock.now())

    def _guarded(self, question: Question) -> TraitResult:
        evaluator = str(question.trait.evaluator)
        if not self.breaker.allows(evaluator):
            return failed(question, Category.TRANSIENT, "circuit breaker open")
        try:
            return self._answer(question, evaluator)
        except Exception as error:  # an evaluator of any kind may raise anything; it is an answer like any other
            return failed(question, Category.EVALUATOR_CRASH, f"EVALUATOR_ERROR: {type(error).__name__}: {error}")

    def _answer(self, question: Question, evaluator: str) -> TraitResult:
        if evaluator.startswith("builtin:"):
            return self._builtins.evaluate(question, evaluator.removeprefix("builtin:"))
        if evaluator.startswith(("http://", "https://")) and self._http is not None:
            return self._http.evaluate(question, evaluator)
        if evaluator.startswith("python:"):
            return self._call(question, evaluator)
        if evaluator.startswith("./") and self._process is not None:
            return self._process.evaluate(question, evaluator)
        return failed(question, Category.PERMANENT, f"{evaluator.partition(':')[0]} evaluators are not enabled here")

    def _call(self, question: Question, evaluator: str) -> TraitResult:
        _, module, name = evaluator.split(":")
        if not module.startswith(self._allowed_modules) or not self._allowed_modules:
            return failed(question, Category.PERMANENT, f"functions of {module} are not allowed here")
        function: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
        return from_mapping(question, function(question.body()))


class _Asked:
    """A question under way, and its answer once there is one."""

    def __init__(self, question: Question, deadline: float) -> None:
        self.question = question
        self._deadline = deadline
        self._done = threading.Event()
        self._result: TraitResult | None = None

    def answer(self, result: TraitResult) -> None:
        self._result = result
        self._done.set()

    def wait(self, clock: Clock) -> TraitResult | None:
        self._done.wait(max(0.0, self._deadline - clock.monotonic()))
        return self._result


def _reusable(result: TraitResult, now: datetime, *, fresh: bool) -> bool:
    if result.expires_at is not None and now >= result.expires_at:
        return False
    # Without a TTL nobody has promised that the answer stays true: it is shown, but asked for again.
    return result.pushed or (result.status is TraitStatus.PASS and result.expires_at is not None and not fresh)


def _with_expiry(result: TraitResult, trait: TraitPlan, now: datetime) -> TraitResult:
    expires = now + timedelta(seconds=trait.ttl) if trait.ttl else None
    return result._replace(evaluated_at=now, expires_at=expires)
