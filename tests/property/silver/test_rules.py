"""Order as a property: whatever arrives in whatever order, each lane applies 1, 2, 3 … and nothing twice."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from lockstep.ticks.model import Tick, TickState
from lockstep.ticks.silver import rules
from lockstep.ticks.silver.model import Lane

NOW = datetime(2026, 5, 7, 12, tzinfo=UTC)


def _tick(sequence: int) -> Tick:
    return Tick("p", f"t{sequence}", "acme", TickState.COMMITTED, 1, 0, NOW, NOW, sequence=sequence)


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(0, 20))
def test_a_plan_is_the_unbroken_run_after_the_watermark(seen: list[int], watermark: int):
    plan = rules.plan(Lane("acme", "p", watermark), [_tick(one) for one in seen])
    found = [one.sequence for one in plan.ready]
    wanted = []
    while watermark + len(wanted) + 1 in seen:
        wanted.append(watermark + len(wanted) + 1)
    assert found == wanted
    assert (plan.why is None) == bool(wanted)


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(1, n + 1)))), st.data())
def test_any_arrival_any_death_and_any_replay_end_in_every_tick_applied_in_order(
    case: tuple[int, list[int]], data: st.DataObject
):
    """A worker takes any prefix of the plan and dies; a person may rewind; then everything is still in order."""
    count, arrival = case
    lane, applied, committed, rewinds = Lane("acme", "p"), [], [], 0
    for number in arrival:
        committed.append(_tick(number))
        ready = rules.plan(lane, committed).ready
        for tick in ready[: data.draw(st.integers(0, len(ready)))]:
            applied.append(tick.sequence)
            lane = lane._replace(watermark=int(tick.sequence or 0))
        if lane.watermark and data.draw(st.booleans()):
            back = data.draw(st.integers(0, lane.watermark - 1))
            lane = lane._replace(watermark=back, generation=lane.generation + 1)
            applied, rewinds = applied[: applied.index(back) + 1] if back in applied else [], rewinds + 1
    for tick in rules.plan(lane, committed).ready:
        applied.append(tick.sequence)
    assert applied == list(range(1, count + 1))
    assert lane.generation == rewinds + 1
