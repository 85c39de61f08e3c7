"""Retries: bounded in number, time and total load, and only for what may heal."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import InvalidInput, LostClaim, Terminal, Transient
from lockstep.kernel.retry import RetryBudget, RetryPolicy

policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 8),
    base_seconds=st.floats(0, 2),
    cap_seconds=st.floats(2, 30),
    budget_seconds=st.floats(0, 60),
    jitter=st.sampled_from(["full", "none"]),
)


def failing(times: int, error: Callable[[], Exception]) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def act() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error()
        return "done"

    return act, calls


def test_a_transient_error_is_tried_again_until_it_heals() -> None:
    act, calls = failing(2, lambda: Transient("busy"))
    assert RetryPolicy().call(act, clock=FakeClock(), random=random.Random(1)) == "done"
    assert len(calls) == 3


@pytest.mark.parametrize("error", [Terminal("bad"), LostClaim("newer"), InvalidInput("no"), KeyError("bug")])
def test_nothing_else_is_ever_repeated(error: Exception) -> None:
    """Repeating a terminal call burns the budget; repeating after a lost claim fights the new owner."""

    def raise_it() -> Exception:
        return error

    act, calls = failing(9, raise_it)
    with pytest.raises(type(error)):
        RetryPolicy().call(act, clock=FakeClock())
    assert len(calls) == 1


def test_a_classifier_may_admit_foreign_errors() -> None:
    act, calls = failing(1, lambda: TimeoutError("slow"))
    policy = RetryPolicy()
    assert policy.call(act, clock=FakeClock(), classify=lambda e: isinstance(e, TimeoutError)) == "done"
    assert len(calls) == 2


def test_the_last_error_itself_is_raised_with_the_attempts_noted() -> None:
    """A wrapper error would hide the type that callers branch on."""
    act, _ = failing(9, lambda: Transient("busy", unit="queue"))
    with pytest.raises(Transient, match="queue: busy") as caught:
        RetryPolicy(max_attempts=3).call(act, clock=FakeClock())
    assert caught.value.__notes__ == ["gave up after attempt 3 of 3"]


def test_a_server_that_asks_for_time_gets_it() -> None:
    act, _ = failing(1, lambda: Transient("busy", retry_after=40))
    clock = FakeClock()
    RetryPolicy(base_seconds=0.1, cap_seconds=1).call(act, clock=clock)
    assert clock.sleeps == [40]


def test_a_wait_that_would_pass_the_budget_is_not_begun() -> None:
    act, calls = failing(9, lambda: Transient("busy", retry_after=61))
    clock = FakeClock()
    with pytest.raises(Transient) as caught:
        RetryPolicy(budget_seconds=60).call(act, clock=clock)
    assert (clock.sleeps, len(calls)) == ([], 1)
    assert "budget" in caught.value.__notes__[0]


@given(policies, st.integers(0, 2**32))
def test_no_call_exceeds_its_attempts_or_its_budget(policy: RetryPolicy, seed: int) -> None:
    act, calls = failing(99, lambda: Transient("busy"))
    clock = FakeClock()
    with pytest.raises(Transient):
        policy.call(act, clock=clock, random=random.Random(seed))
    assert len(calls) <= policy.max_attempts
    assert clock.monotonic() <= policy.budget_seconds
    assert all(wait <= policy.cap_seconds for wait in clock.sleeps)


@given(policies, st.integers(1, 10_000), st.integers(0, 2**32))
def test_a_delay_is_never_negative_nor_above_the_cap(policy: RetryPolicy, attempt: int, seed: int) -> None:
    assert 0 <= policy.delay(attempt, random=random.Random(seed)) <= policy.cap_seconds


def test_time_spent_inside_the_call_counts_against_the_budget() -> None:
    clock = FakeClock()

    def slow() -> None:
        clock.advance(50)
        raise Transient("busy")

    with pytest.raises(Transient):
        RetryPolicy(max_attempts=9, base_seconds=0, cap_seconds=0, budget_seconds=60).call(slow, clock=clock)
    assert clock.monotonic() == 100


def test_an_outage_does_not_multiply_the_load() -> None:
    """Without a shared budget a hundred callers would send five hundred requests to a dead service."""
    budget, sent = RetryBudget(capacity=10), 0

    def act() -> None:
        nonlocal sent
        sent += 1
        raise Transient("down")

    for _ in range(100):
        with pytest.raises(Transient):
            RetryPolicy(max_attempts=5).call(act, clock=FakeClock(), budget=budget)
    assert sent == 110


def test_the_budget_recovers_with_successes_up_to_its_capacity() -> None:
    budget = RetryBudget(capacity=2, refill_per_success=0.5)
    assert budget.take()
    assert budget.take()
    assert not budget.take()
    for _ in range(10):
        RetryPolicy().call(lambda: "fine", clock=FakeClock(), budget=budget)
    assert budget.tokens == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetryPolicy(max_attempts=0),
        lambda: RetryPolicy(base_seconds=5, cap_seconds=1),
        lambda: RetryPolicy(budget_seconds=-1),
        lambda: RetryBudget(capacity=0),
    ],
)
def test_an_impossible_policy_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput):
        make()
