"""The rule over any queue: whatever the rows say, windows are applied as a gap-free prefix."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from lockstep.windows import rules
from lockstep.windows.model import QueueRow, Window, WindowStatus

START = datetime(2026, 3, 1, tzinfo=UTC)
STEP = timedelta(minutes=15)
NOW = START + timedelta(days=9)

_rows = st.builds(
    lambda number, length, status, lease: QueueRow(
        Window("v", START + number * STEP, START + (number + length) * STEP),
        status,
        "p",
        "c",
        lease_until=NOW + lease * STEP if lease else None,
    ),
    st.integers(0, 8),
    st.integers(1, 2),
    st.sampled_from(WindowStatus),
    st.integers(-1, 1),
)
_queues = st.lists(_rows, max_size=12)


@given(_queues, st.integers(0, 8))
def test_the_rule_only_ever_names_the_earliest_unapplied_window_at_the_watermark(rows: list[QueueRow], at: int):
    """Guards both invariants at once: nothing after a stop, and no hole."""
    watermark = START + at * STEP
    live = [row for row in rows if row.window.stop > watermark and row.status is not WindowStatus.APPLIED]
    decision = rules.next_step(watermark, rows, NOW)
    if not live:
        assert decision == rules.Idle()
        return
    first_stop = min(row.window.stop for row in live)
    assert not isinstance(decision, rules.Idle)
    assert decision.window is not None
    assert decision.window.stop == first_stop
    if isinstance(decision, rules.Apply):
        assert decision.window.start == watermark
        assert decision.row.status in (WindowStatus.READY, WindowStatus.PROCESSING)


@given(_queues, st.integers(0, 8), st.integers(1, 12))
def test_a_drain_is_a_chain_that_begins_at_the_watermark_and_skips_nothing(rows: list[QueueRow], at: int, limit: int):
    """Guards the batch: staging ahead must not widen what the single rule allows."""
    watermark = START + at * STEP
    chain = rules.consecutive(watermark, rows, limit)
    assert len(chain) <= limit
    for row in chain:
        assert row.window.start == watermark
        assert row.status not in (WindowStatus.FAILED, WindowStatus.APPLIED)
        earlier = [
            one
            for one in rows
            if watermark < one.window.stop < row.window.stop and one.status is not WindowStatus.APPLIED
        ]
        assert not earlier
        watermark = row.window.stop
