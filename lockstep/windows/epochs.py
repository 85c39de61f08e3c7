"""Epochs: full loads into new tables, swapped in together with the watermark, and log archives as keyed appends.

What belongs here: what moves outside the chain of incrementals. What does not: the chain itself (worker.py). Old tables
are kept under the name of their epoch; nothing is dropped automatically.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LockstepError, Terminal, Transient
from lockstep.kernel.logs import get_logger
from lockstep.warehouse.model import vault_schema
from lockstep.windows.model import QueueRow, WindowKind, WindowStatus
from lockstep.windows.store import Applied, Claim, Staged

if TYPE_CHECKING:
    from lockstep.windows.worker import WindowWorker

_log = get_logger(__name__)


def load_full(worker: WindowWorker, claim: Claim, row: QueueRow) -> Claim:
    """Load a full archive beside the live tables, then swap tables, epoch and watermark in one transaction."""
    worker.ledger.processing(
        row, fence=claim.fence, owner=claim.lease.owner, lease_until=claim.lease.lease_until, attempt=True
    )
    applied = worker.policy.retry.call(lambda: _load_full_once(worker, claim, row), clock=worker.clock)
    worker.ledger.applied([row.window], fence=claim.fence)
    _log.info("full load in place", window=str(row.window), epoch=applied.epoch, rows=applied.rows)
    return replace(claim, epoch=applied.epoch, watermark=applied.stop)


def _load_full_once(worker: WindowWorker, claim: Claim, row: QueueRow) -> Applied:
    """One attempt. It begins with empty tables, whatever the one before it left."""
    fresh, live = f"next:{claim.vault}:{claim.fence}", vault_schema(claim.vault)
    worker.store.drop_schemas(f"next:{claim.vault}:")  # half-filled by an attempt that died; nobody ever read them
    worker.store.renew_schema(fresh)
    staged = _staged(worker, claim, row, fresh)
    counts = worker.store.fill(staged, fresh)
    crash_point("windows.full.after_fill")
    old = f"{live}_epoch_{claim.epoch}_{claim.fence}"
    try:
        return worker.store.swap(claim, staged, counts, (fresh, live, old))
    except Transient:
        found = worker.store.find(claim.vault, staged.load_id(claim.fence))
        if found is None:
            raise
        return found


def append_logs(worker: WindowWorker, claim: Claim) -> list[Applied]:
    """Apply waiting log archives. A log that fails is FAILED by itself: the chain of incrementals does not wait."""
    schema, done = f"{vault_schema(claim.vault)}_logs", []
    rows = worker.ledger.pending(claim.vault, None, kind=WindowKind.LOG)
    waiting = [row for row in rows if row.status in (WindowStatus.READY, WindowStatus.PROCESSING)]
    for row in waiting:
        try:
            known = worker.store.history(claim.vault, kinds=("log",), until=row.window.stop)
            if not any(one.stop == row.window.stop for one in known):
                staged = _staged(worker, claim, worker.as_offered(row), schema)
                done.append(worker.store.append(claim, staged, schema))
            worker.ledger.applied([row.window], fence=claim.fence)
        except Terminal as error:
            worker.fail(claim, row.window, error)
    return done


def _staged(worker: WindowWorker, claim: Claim, row: QueueRow, schema: str) -> Staged:
    def attempt() -> Staged:
        (staged,) = worker.preparer.prepare(claim, [row], schema=schema)
        if isinstance(staged, LockstepError):
            raise staged
        return staged

    return worker.policy.retry.call(attempt, clock=worker.clock)
