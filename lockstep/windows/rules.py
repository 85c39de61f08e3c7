"""Window rules: which window may be applied next, and how far a drain may go. Pure and total.

What belongs here: decisions from the sink's watermark and the queue's rows. What does not: I/O; see store.py for the
sink, ledger.py for the queue, worker.py for the order of work.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from lockstep.windows.model import QueueRow, Window, WindowKind, WindowStatus


class BlockReason(StrEnum):
    """Why a lane does not advance. None of them is an error: stopping is refusing to advance."""

    GAP = "GAP"
    FAILED = "FAILED"
    LEASED = "LEASED"
    BASELINE = "BASELINE"


class Apply(NamedTuple):
    """This window and no other may be applied now. `takeover`: its last owner died."""

    row: QueueRow
    takeover: bool = False

    @property
    def window(self) -> Window:
        """The window itself."""
        return self.row.window


class Blocked(NamedTuple):
    """The lane waits. `window` is the one that holds it up; for a gap, the first one behind the hole."""

    reason: BlockReason
    window: Window | None

    def __str__(self) -> str:
        if self.reason is BlockReason.GAP:
            return f"the window before {self.window} is missing"
        if self.reason is BlockReason.FAILED:
            return f"{self.window} is FAILED"
        if self.reason is BlockReason.BASELINE:
            return "the vault has no full load to begin with"
        return f"a live worker holds {self.window or 'the lane'}"


class Idle(NamedTuple):
    """Everything known is applied."""


Decision = Apply | Blocked | Idle


def next_step(
    watermark: datetime, rows: Iterable[QueueRow], now: datetime, *, lease_until: datetime | None = None
) -> Decision:
    """The earliest window that is not applied decides, and it must start exactly at the watermark.

    Args:
        watermark: Stop of the last window that the sink has committed.
        rows: The queue's rows; order, duplicates and rows below the watermark do not matter.
        now: The present.
        lease_until: Until when somebody holds the lane in the sink; None if nobody does.
    """
    pending = _pending(watermark, rows)
    if not pending:
        return Idle()
    row = pending[0]
    if lease_until is not None and lease_until > now:
        return Blocked(BlockReason.LEASED, row.window)
    if row.window.start != watermark:
        return Blocked(BlockReason.GAP, row.window)
    if row.status is WindowStatus.FAILED:
        return Blocked(BlockReason.FAILED, row.window)
    if row.status is WindowStatus.PROCESSING:
        alive = row.lease_until is not None and row.lease_until > now
        return Blocked(BlockReason.LEASED, row.window) if alive else Apply(row, takeover=True)
    return Apply(row)


def baseline(fulls: Iterable[QueueRow], rows: Iterable[QueueRow]) -> Decision:
    """What a vault that has not begun waits for, or the window that its newest full load makes the first.

    Without a full load nothing is applied: rows come in any order, and a chain that began at a later one would miss
    what was before it, silently and for ever.
    """
    known = sorted(fulls, key=lambda row: row.window.stop)
    if not known:
        return Blocked(BlockReason.BASELINE, None)
    newest = known[-1]
    if newest.status is WindowStatus.FAILED:
        return Blocked(BlockReason.FAILED, newest.window)
    return next_step(newest.window.stop, rows, newest.window.stop)


def consecutive(watermark: datetime, rows: Iterable[QueueRow], limit: int) -> list[QueueRow]:
    """The windows that one drain may apply, in order, for a worker that holds the lane.

    A row left PROCESSING is a dead worker's, because the lane is ours. FAILED ends the run, and so does a hole.
    """
    chain: list[QueueRow] = []
    for row in _pending(watermark, rows):
        if len(chain) == limit or row.window.start != watermark or row.status is WindowStatus.FAILED:
            break
        chain.append(row)
        watermark = row.window.stop
    return chain


def _pending(watermark: datetime, rows: Iterable[QueueRow]) -> list[QueueRow]:
    """Rows that count, by stop time: an APPLIED row above the watermark is nobody's proof, but never applied again."""
    live = [
        row
        for row in rows
        if row.window.kind is WindowKind.INCREMENTAL
        and row.window.stop > watermark
        and row.status is not WindowStatus.APPLIED
    ]
    return sorted(live, key=lambda row: (row.window.stop, row.window.start))
