"""Which window may be applied next: every branch of the rule, by example."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from lockstep.windows import rules
from lockstep.windows.model import QueueRow, Window, WindowKind, WindowStatus
from lockstep.windows.rules import Apply, Blocked, BlockReason, Idle

START = datetime(2026, 3, 1, tzinfo=UTC)
STEP = timedelta(minutes=15)
NOW = START + timedelta(days=1)


def _row(number: int, status: WindowStatus = WindowStatus.READY, **changes: object) -> QueueRow:
    window = Window("v", START + number * STEP, START + (number + 1) * STEP)
    return replace(QueueRow(window, status, window.prefix, "c"), **changes)  # type: ignore[arg-type]


def test_the_earliest_ready_window_at_the_watermark_is_applied():
    rows = [_row(2), _row(0), _row(1)]
    assert rules.next_step(START, rows, NOW) == Apply(rows[1])


def test_ready_is_not_allowed_to_process_behind_a_failed_window():
    rows = [_row(0, WindowStatus.FAILED), _row(1)]
    assert rules.next_step(START, rows, NOW) == Blocked(BlockReason.FAILED, rows[0].window)
    assert rules.consecutive(START, rows, 10) == []


def test_a_hole_in_the_chain_blocks_even_though_the_next_window_is_ready():
    """Guards the hole in the plain rule: a window that was never enqueued is invisible to it."""
    rows = [_row(1), _row(2)]
    assert rules.next_step(START, rows, NOW) == Blocked(BlockReason.GAP, rows[0].window)


def test_a_window_that_overlaps_the_watermark_is_not_applied():
    assert rules.next_step(START + STEP / 3, [_row(0)], NOW) == Blocked(BlockReason.GAP, _row(0).window)


def test_a_live_worker_is_not_disturbed_and_a_dead_one_is_replaced():
    alive = _row(0, WindowStatus.PROCESSING, lease_until=NOW + timedelta(seconds=1))
    dead = _row(0, WindowStatus.PROCESSING, lease_until=NOW)
    lost = _row(0, WindowStatus.PROCESSING)
    assert rules.next_step(START, [alive], NOW) == Blocked(BlockReason.LEASED, alive.window)
    assert rules.next_step(START, [dead], NOW) == Apply(dead, takeover=True)
    assert rules.next_step(START, [lost], NOW) == Apply(lost, takeover=True)


def test_a_lane_that_the_sink_says_is_held_is_left_alone():
    assert rules.next_step(START, [_row(0)], NOW, lease_until=NOW + STEP) == Blocked(BlockReason.LEASED, _row(0).window)
    assert rules.next_step(START, [_row(0)], NOW, lease_until=NOW) == Apply(_row(0))


def test_applied_windows_and_windows_below_the_watermark_decide_nothing():
    rows = [_row(0, WindowStatus.FAILED), _row(1, WindowStatus.APPLIED)]
    assert rules.next_step(START + STEP, rows, NOW) == Idle()


def test_an_applied_mark_that_the_sink_does_not_know_leaves_a_hole_and_blocks():
    """Guards against a hand-edited status: the window behind it must not be applied without it."""
    rows = [_row(0, WindowStatus.APPLIED), _row(1)]
    assert rules.next_step(START, rows, NOW) == Blocked(BlockReason.GAP, rows[1].window)


def test_full_and_log_archives_are_no_part_of_the_chain():
    window = replace(_row(0).window, kind=WindowKind.FULL)
    assert rules.next_step(START, [replace(_row(0), window=window)], NOW) == Idle()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_drain_takes_consecutive_windows_up_to_its_limit(limit: int):
    rows = [_row(number) for number in range(3)]
    assert rules.consecutive(START, rows, limit) == rows[:limit]


def test_a_drain_stops_at_a_hole():
    assert rules.consecutive(START, [_row(0), _row(2)], 10) == [_row(0)]


def _full(stop: int, status: WindowStatus = WindowStatus.READY) -> QueueRow:
    window = Window("v", START - timedelta(days=9000), START + stop * STEP, kind=WindowKind.FULL)
    return QueueRow(window, status, window.prefix, "c")


def test_a_vault_without_a_full_load_does_not_begin_at_whatever_row_came_first():
    """Guards against rows in any order: a chain that began too late would miss what was before, for ever."""
    assert rules.baseline([], [_row(3)]) == Blocked(BlockReason.BASELINE, None)


def test_the_newest_full_load_decides_where_a_vault_begins():
    rows = [_row(number) for number in range(5)]
    assert rules.baseline([_full(0), _full(2)], rows) == Apply(rows[2])
    assert rules.baseline([_full(0), _full(2, WindowStatus.FAILED)], rows) == Blocked(
        BlockReason.FAILED, _full(2).window
    )
    assert rules.baseline([_full(5)], rows) == Idle()


def test_every_reason_says_what_holds_the_lane():
    assert "missing" in str(Blocked(BlockReason.GAP, _row(1).window))
    assert "FAILED" in str(Blocked(BlockReason.FAILED, _row(1).window))
    assert "full load" in str(Blocked(BlockReason.BASELINE, None))
    assert "live worker" in str(Blocked(BlockReason.LEASED, None))
