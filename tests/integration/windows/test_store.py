"""The one transaction of a window, called as a worker calls it: what must undo it, undoes all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.kernel.errors import LostClaim, Terminal
from lockstep.windows.store import Claim, Staged
from tests.windows_lane import LaneUnderTest
from tests.windows_world import expected, warehouse_rows

pytestmark = pytest.mark.stack


def _claim(lane: LaneUnderTest, ttl: float = 30.0) -> Claim:
    claim = lane.store().claim(lane.vault, "me", ttl)
    assert claim is not None
    return claim


def _staged(lane: LaneUnderTest, claim: Claim, number: int = 0) -> Staged:
    rows = lane.worker().ledger.pending(lane.vault, None)[number : number + 1]
    (staged,) = lane.worker().preparer.prepare(claim, rows)
    assert isinstance(staged, Staged)
    return staged


def _assert_untouched(lane: LaneUnderTest) -> None:
    assert lane.history() == []
    assert all(not rows for rows in warehouse_rows(lane.dsn, f"vault_{lane.vault}").values())
    known = lane.store().lane(lane.vault)
    assert known is not None
    assert known.watermark == lane.world.start


def test_a_fence_that_was_passed_changes_nothing_even_where_epoch_and_watermark_still_fit(lane: LaneUnderTest):
    """Guards the moment between a takeover and its first commit: only the fence tells the two workers apart."""
    lane.world.publish(1)
    old = _claim(lane, ttl=0.001)
    staged = _staged(lane, old)
    _claim(lane)
    stolen = replace(old, fence=old.fence + 1)  # a worker that lies about its number still has the old owner's name
    for claim in (old, stolen):
        with pytest.raises(LostClaim):
            lane.store().apply(claim, staged, f"vault_{lane.vault}")
        _assert_untouched(lane)


def test_a_window_that_does_not_start_at_the_watermark_changes_nothing(lane: LaneUnderTest):
    lane.world.publish(2)
    claim = _claim(lane)
    with pytest.raises(LostClaim):
        lane.store().apply(claim, _staged(lane, claim, 1), f"vault_{lane.vault}")
    _assert_untouched(lane)


def test_rows_that_are_missing_in_staging_undo_the_window(lane: LaneUnderTest):
    """Guards unlogged tables: after a crash of the server they are empty, which looks like a window without rows."""
    lane.world.publish(1)
    claim = _claim(lane)
    staged = _staged(lane, claim)
    lane.warehouse(f'DELETE FROM "{staged.schema}"."site__v" RETURNING 1')  # noqa: S608
    with pytest.raises(Terminal, match="site__v: 0 rows are staged"):
        lane.store().apply(claim, staged, f"vault_{lane.vault}")
    _assert_untouched(lane)


def test_a_store_goes_on_after_a_window_that_was_undone(lane: LaneUnderTest):
    """Guards the pipeline: what an undone window left in it must not reach the next one."""
    lane.world.publish(2)
    claim, store = _claim(lane), lane.store()
    first, second = _staged(lane, claim), _staged(lane, claim, 1)
    with pytest.raises(LostClaim):
        store.apply(claim, second, f"vault_{lane.vault}")
    for staged in (first, second):
        store.apply(claim, staged, f"vault_{lane.vault}")
    lane.assert_prefix()
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}") == expected(lane.world.oracle)
