"""Silver's rules: order, who may take a tick, names of commits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from lockstep.idempotency.stateful_rules import Run
from lockstep.ticks.model import Mode, Tick, TickState
from lockstep.ticks.silver import rules
from lockstep.ticks.silver.model import (
    LONGEST_LEASE,
    RETRY_CAP_SECONDS,
    Dispatch,
    DispatchState,
    Lane,
    TableState,
)

NOW = datetime(2026, 5, 7, 12, tzinfo=UTC)
LANE = Lane("acme", "p")


def tick(sequence: int) -> Tick:
    return Tick("p", f"t{sequence}", "acme", TickState.COMMITTED, 1, 0, NOW, NOW, sequence=sequence)


def numbers(plan: rules.Plan) -> list[int | None]:
    return [one.sequence for one in plan.ready]


def test_ticks_that_arrive_in_any_order_are_planned_by_their_numbers():
    assert numbers(rules.plan(LANE, [tick(3), tick(1), tick(2), tick(1)])) == [1, 2, 3]


def test_what_is_applied_is_not_planned_again():
    assert numbers(rules.plan(LANE._replace(watermark=2), [tick(1), tick(2), tick(3)])) == [3]


def test_a_tick_waits_for_the_one_before_it():
    """Guards a later tick that overtakes: it would be merged onto a table that lacks its predecessor."""
    assert rules.plan(LANE, [tick(2), tick(3)]) == rules.Plan((), rules.Why.GAP, "1")


def test_a_parked_tick_stops_its_own_lane_with_its_name():
    assert rules.plan(LANE._replace(parked="t1"), [tick(1), tick(2)]) == rules.Plan((), rules.Why.PARKED, "t1")


def test_a_lane_without_news_is_idle():
    assert rules.plan(LANE, []).why is rules.Why.IDLE


def row(**changes: object) -> Dispatch:
    base = {"state": DispatchState.RUNNING, "generation": 2, "attempt": 1, "lease_until": NOW + timedelta(seconds=1)}
    return Dispatch("t1", "acme", "p", **(base | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "may"),
    [
        (None, True),
        (row(), False),
        (row(lease_until=NOW), True),
        (row(state=DispatchState.DISPATCHING, lease_until=NOW - timedelta(seconds=1)), True),
        (row(state=DispatchState.FAILED), False),
        (row(state=DispatchState.FAILED, lease_until=NOW), True),
        (row(state=DispatchState.DONE, lease_until=NOW), False),
        (row(state=DispatchState.DONE, generation=1, lease_until=NOW), True),
        (row(generation=1), True),
        (row(generation=3, lease_until=NOW), False),
        (row(lease_until=NOW + LONGEST_LEASE), False),
        (row(lease_until=NOW + timedelta(hours=2)), True),
    ],
)
def test_a_tick_may_be_taken_when_nobody_has_it_or_its_holder_is_silent(found: Dispatch | None, may: bool):
    assert rules.may_take(found, 2, NOW) is may


def test_a_fence_rises_with_every_commit_and_with_every_lease():
    """Guards Delta's silent rule: a commit whose number is not above all before it is dropped."""
    order = [rules.delta_fence(lease, number) for lease in (1, 2, 10) for number in (1, 2, 999_999)]
    assert order == sorted(set(order))


def state(sequence: int, epoch: str) -> TableState:
    return TableState("orders", sequence, epoch, ("id",), 7, 1)


def test_a_full_tick_makes_a_new_base_and_delta_ticks_stand_on_it():
    full = rules.epoch_after(Mode.FULL, 4, 2, state(3, "begin"))
    assert full == "full-4-2"
    assert rules.epoch_after(Mode.DELTA, 5, 2, state(4, full)) == full
    assert rules.epoch_after(Mode.DELTA, 1, 1, None) == "begin"


def test_the_first_merge_on_a_base_has_no_predecessor():
    """Guards the stateful merger's chain: an overwrite is no merge, so nothing may name it as one."""
    assert rules.previous_merge(None) is None
    assert rules.previous_merge(state(4, "full-4-1")) is None
    assert rules.previous_merge(state(5, "full-4-1")) == rules.execution(5)
    assert rules.previous_merge(state(3, "begin")) == rules.execution(3)
    assert Run("x", rules.execution(6), rules.execution(5), "r").previous == "000000000005"


def test_retries_and_waits_grow_and_are_bounded():
    waits = [(rules.retry_at(attempt, NOW) - NOW).total_seconds() for attempt in range(1, 12)]
    assert waits == sorted(waits)
    assert waits[0] == rules.RETRY_BASE_SECONDS
    assert waits[-1] == RETRY_CAP_SECONDS
    assert rules.hidden_seconds(1) == rules.HIDDEN_SECONDS
    assert rules.hidden_seconds(50) == rules.LONGEST_HIDDEN_SECONDS <= 12 * 3600
