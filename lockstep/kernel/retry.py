"""Bounded retries with backoff and jitter, and a budget that many callers share.

What belongs here: when to try again and how long to wait. What does not: what is transient; errors say so by
type, and foreign errors by a classifier that the caller passes.
"""

from __future__ import annotations

import random as random_module
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import tenacity

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import InvalidInput, Transient

T = TypeVar("T")
Classifier = Callable[[BaseException], bool]
Jitter = Literal["full", "none"]

_system_random = random_module.SystemRandom()


class RetryBudget:
    """A token bucket for retries, shared by every caller of one dependency.

    A first try is always free. Each retry takes a token, each success gives a fraction back, so that during
    an outage the load on the dependency stays near the number of first tries instead of being multiplied by
    `max_attempts`.
    """

    def __init__(self, capacity: float = 20, refill_per_success: float = 0.1) -> None:
        if capacity < 1 or refill_per_success < 0:
            raise InvalidInput("a retry budget needs room for at least one retry and a refill of zero or more.")
        self._capacity = float(capacity)
        self._refill = refill_per_success
        self._tokens = float(capacity)
        self._lock = threading.Lock()

    @property
    def tokens(self) -> float:
        """Retries left right now."""
        with self._lock:
            return self._tokens

    def take(self) -> bool:
        """Take the token of one retry; False means that this caller must give up."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def give_back(self) -> None:
        """Record a success."""
        with self._lock:
            self._tokens = min(self._capacity, self._tokens + self._refill)


@dataclass(frozen=True)
class RetryPolicy:
    """How often, how long apart and for how long in total. Immutable, so one may be shared as a constant.

    Attributes:
        max_attempts: Tries in all, the first included.
        base_seconds: Upper bound of the first wait; doubles with each attempt.
        cap_seconds: Upper bound of any wait that the server did not ask for.
        budget_seconds: No wait may end later than this after the first try began.
        jitter: `full` waits a random time up to the bound, so that callers do not return in step.
    """

    max_attempts: int = 5
    base_seconds: float = 0.2
    cap_seconds: float = 20.0
    budget_seconds: float = 60.0
    jitter: Jitter = "full"

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.base_seconds < 0 or self.cap_seconds < self.base_seconds:
            raise InvalidInput("a retry policy needs one attempt or more and 0 <= base_seconds <= cap_seconds.")
        if self.budget_seconds < 0:
            raise InvalidInput("a retry policy needs a budget of zero seconds or more.")

    def delay(self, attempt: int, *, random: random_module.Random | None = None) -> float:
        """Seconds to wait after the failure of try number `attempt`, counted from one."""
        bound = min(self.cap_seconds, self.base_seconds * 2.0 ** min(attempt - 1, 60))
        return bound if self.jitter == "none" else (random or _system_random).uniform(0, bound)

    def call(
        self,
        function: Callable[[], T],
        *,
        clock: Clock | None = None,
        random: random_module.Random | None = None,
        classify: Classifier | None = None,
        budget: RetryBudget | None = None,
    ) -> T:
        """Call until it succeeds, fails for good, or the policy is spent; then raise the last error itself.

        Only `Transient` is retried, and what `classify` recognises. `retry_after` is honoured even beyond
        `cap_seconds`, but never beyond the budget: the call then ends at once instead of waiting in vain.
        The error carries a note with the number of attempts.
        """
        clock = clock or SystemClock()
        plan = _Plan(self, clock, random, classify or _never, budget)
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(plan.worth_retrying),
            wait=plan.wait,
            stop=plan.stop,
            sleep=clock.sleep,
            reraise=True,
        )
        try:
            result = attempts(function)
        except Exception as error:
            error.add_note(f"gave up after attempt {plan.attempt} of {self.max_attempts}{plan.why}")
            raise
        if budget is not None:
            budget.give_back()
        return result


class _Plan:
    """The decisions of one call. tenacity asks `wait` first, so the wait is known when `stop` decides."""

    def __init__(
        self,
        policy: RetryPolicy,
        clock: Clock,
        random: random_module.Random | None,
        classify: Classifier,
        budget: RetryBudget | None,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._random = random
        self._classify = classify
        self._budget = budget
        self._deadline = clock.monotonic() + policy.budget_seconds
        self.attempt = 1
        self.why = ""

    def worth_retrying(self, error: BaseException) -> bool:
        return isinstance(error, Transient) or self._classify(error)

    def wait(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = getattr(error, "retry_after", None)
        delay = self._policy.delay(state.attempt_number, random=self._random)
        return max(delay, float(asked)) if isinstance(asked, int | float) else delay

    def stop(self, state: tenacity.RetryCallState) -> bool:
        self.attempt = state.attempt_number
        if state.attempt_number >= self._policy.max_attempts:
            return True
        if self._clock.monotonic() + state.upcoming_sleep > self._deadline:
            self.why = f": the next wait would pass the budget of {self._policy.budget_seconds:g} s"
            return True
        if self._budget is not None and not self._budget.take():
            self.why = ": the shared retry budget is spent"
            return True
        return False


def _never(_: BaseException) -> bool:
    return False
