"""What a person may do to a lane: retry, skip, rebaseline, replay, look back, verify, rebuild the queue. All audited.

What belongs here: checks before a deed, the deed, the audit row. What does not: words for the terminal
(operations_cli.py). Each deed takes the lane like a worker does, so none can collide with a drain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from lockstep.kernel.errors import InvalidInput, LockstepError, Transient
from lockstep.kernel.lease import Lease
from lockstep.warehouse.model import vault_schema
from lockstep.windows import rules
from lockstep.windows.model import (
    FIRST_EPOCH,
    QueueRow,
    Window,
    WindowKind,
    WindowStatus,
    stoptime,
)
from lockstep.windows.queue import WindowQueue
from lockstep.windows.raw import RawStore
from lockstep.windows.store import BEGINNING, Applied, Claim, Lane
from lockstep.windows.verify import count_problems, find_gaps

if TYPE_CHECKING:
    from lockstep.windows.sink import Sink
    from lockstep.windows.worker import WindowWorker


@dataclass(frozen=True)
class Doer:
    """Who does it and why; both are written down."""

    actor: str
    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise InvalidInput("a reason is needed: it is kept in the audit.", next_step="give --reason.")


def retry(worker: WindowWorker, window: Window, doer: Doer) -> None:
    """Set a FAILED window READY. Its lane goes on by itself."""
    lane = _lane(worker, window.vault)
    worker.store.audit("retry", window.vault, actor=doer.actor, reason=doer.reason, stop=window.stop)
    if not worker.ledger.ready(window, fence=lane.fence, was=WindowStatus.FAILED):
        row = worker.ledger.get(window)
        raise InvalidInput(
            f"it is {row.status if row else 'not in the queue'}, not FAILED.",
            unit=str(window),
            next_step="only a FAILED window can be retried.",
        )


def skip(worker: WindowWorker, vault: str, to: datetime, doer: Doer, *, accept_gap: bool) -> None:
    """Move the watermark over a FAILED window or a hole. The data of that stretch is missing then, on record."""
    if not accept_gap:
        raise InvalidInput(
            "skipping leaves the warehouse without that stretch.", unit=vault, next_step="say --accept-gap if so."
        )
    with _held(worker, vault) as claim:
        rows = worker.ledger.pending(vault, claim.watermark)
        decision = rules.next_step(claim.watermark, rows, worker.clock.now())
        allowed = _skippable(decision)
        if to != allowed:
            raise InvalidInput(
                f"the watermark cannot be moved to {stoptime(to)}.",
                unit=vault,
                next_step=f"it can be moved to {stoptime(allowed)}." if allowed else "nothing blocks the lane.",
            )
        detail = {"from": stoptime(claim.watermark), "to": stoptime(to)}
        worker.store.audit("skip", vault, actor=doer.actor, reason=doer.reason, stop=to, detail=detail)
        worker.store.skip(claim, claim.watermark, to)


def rebaseline(worker: WindowWorker, vault: str, doer: Doer, *, stop: datetime | None = None) -> Claim:
    """Load a full archive, the newest by default, and go on from its own stop time in a new epoch."""
    fulls = worker.ledger.pending(vault, None, kind=WindowKind.FULL)
    wanted = [row for row in fulls if stop is None or row.window.stop == stop]
    if not wanted:
        raise InvalidInput(
            "no such full archive is in the queue.",
            unit=vault,
            next_step="fetch one: `lockstep windows produce --full`.",
        )
    full = wanted[-1]
    worker.store.open_lane(vault, FIRST_EPOCH, BEGINNING, f"full load {full.window.stoptime}")
    with _held(worker, vault) as claim:
        worker.store.audit("rebaseline", vault, actor=doer.actor, reason=doer.reason, stop=full.window.stop)
        return worker.load_full(claim, full)


def begin(worker: WindowWorker, vault: str, at: datetime, doer: Doer) -> None:
    """Begin a vault's chain without a full load: what was before `at` is not in the warehouse."""
    if not worker.store.open_lane(vault, FIRST_EPOCH, at, f"begun at {stoptime(at)} without a full load"):
        raise InvalidInput("the vault has begun already.", unit=vault, next_step="use rebaseline or replay.")
    worker.store.audit("begin", vault, actor=doer.actor, reason=doer.reason, stop=at)


def replay(worker: WindowWorker, vault: str, start: datetime, doer: Doer) -> int:
    """Apply everything from `start` again, in a new epoch. Rows converge to what they are; nothing is dropped."""
    with _held(worker, vault) as claim:
        known = worker.store.history(vault)
        if not any(one.start == start for one in known):
            raise InvalidInput(
                f"no applied window starts at {stoptime(start)}.", unit=vault, next_step="see `lockstep windows list`."
            )
        worker.store.audit("replay", vault, actor=doer.actor, reason=doer.reason, stop=start)
        epoch = worker.store.rewind(claim, start, f"replay from {stoptime(start)}")
        rows = worker.ledger.pending(vault, start)
        worker.ledger.repair(rows, set(), start, claim.fence)
        return epoch


def as_of(worker: WindowWorker, vault: str, at: datetime, schema: str) -> int:
    """Build the vault's tables as they were at `at`, from raw files, in a schema of their own. Returns the windows."""
    chain = _chain(worker, vault, at)
    worker.store.renew_schema(schema)
    claim = _reader(f"{vault}~{worker.ids.new_id()[-12:]}", worker.clock.now())
    try:
        for start in range(0, len(chain), worker.policy.batch):
            _fill(worker, claim, chain[start : start + worker.policy.batch], schema)
    finally:
        worker.preparer.drop_stages(claim)
    return len(chain)


def verify(worker: WindowWorker, vault: str) -> list[str]:
    """Prove the lane: chain, counts, and every row of every table against a rebuild from raw files."""
    lane = _lane(worker, vault)
    history = worker.store.history(vault, epoch=lane.epoch)
    problems = find_gaps(history, lane.watermark) + count_problems(worker, vault)
    scratch = f"verify:{vault}:{lane.fence}"
    try:
        as_of(worker, vault, lane.watermark, scratch)
        return problems + _differences(worker.store, vault_schema(vault), scratch)
    finally:
        worker.store.drop_schemas(scratch)


def rebuild_queue(worker: WindowWorker, raw: RawStore, queue: WindowQueue, vault: str, doer: Doer) -> tuple[int, int]:
    """Write queue rows that are missing, from the manifests in the bucket and the sink's ledger.

    Returns how many rows were added and how many were put right.
    """
    added = 0
    for manifest, checksum in raw.manifests(vault):
        added += queue.add_ready(manifest.window, checksum)
    lane = worker.store.lane(vault)
    repaired = 0
    if lane is not None:
        worker.store.audit("rebuild-queue", vault, actor=doer.actor, reason=doer.reason)
        for kind in WindowKind:
            kinds = (kind.value,) if kind is not WindowKind.INCREMENTAL else ("incremental",)
            applied = {one.stop for one in worker.store.history(vault, kinds=kinds) if one.stop <= lane.watermark}
            rows = worker.ledger.pending(vault, None, kind=kind)
            repaired += worker.ledger.repair(rows, applied, lane.watermark, lane.fence)
    return added, repaired


def _skippable(decision: rules.Decision) -> datetime | None:
    if not isinstance(decision, rules.Blocked) or decision.window is None:
        return None
    if decision.reason is rules.BlockReason.FAILED:
        return decision.window.stop
    return decision.window.start if decision.reason is rules.BlockReason.GAP else None


def _chain(worker: WindowWorker, vault: str, at: datetime) -> list[Applied]:
    """The newest full load up to `at` and what was applied after it, each window once, in order."""
    full = worker.store.history(vault, kinds=("full",), until=at)
    base = max(full, key=lambda one: (one.epoch, one.stop)) if full else None
    after = worker.store.history(vault, after=base.stop if base else None, until=at, kinds=("incremental",))
    newest = {one.stop: one for one in after}  # of two epochs the later one
    return [*([base] if base else []), *(newest[stop] for stop in sorted(newest))]


def _fill(worker: WindowWorker, claim: Claim, chain: list[Applied], schema: str) -> None:
    rows = []
    for one in chain:
        window = Window(one.vault, one.start, one.stop, kind=WindowKind(one.kind))
        rows.append(QueueRow(window, WindowStatus.APPLIED, window.prefix, one.sha256))
    for staged in worker.preparer.prepare(claim, rows, schema=schema):
        if isinstance(staged, LockstepError):
            raise staged
        worker.store.fill(staged, schema)


def _differences(store: Sink, live: str, rebuilt: str) -> list[str]:
    problems = []
    present, wanted = store.tables(live), store.tables(rebuilt)
    for name, table in sorted(wanted.items()):
        if name not in present:
            problems.append(f"{name}: missing in the warehouse")
            continue
        for more, less, words in ((live, rebuilt, "more"), (rebuilt, live, "missing or different")):
            found = store.only_in(more, less, table)
            if found:
                problems.append(f"{name}: {found} rows {words} in the warehouse")
    return problems


@contextmanager
def _held(worker: WindowWorker, vault: str) -> Iterator[Claim]:
    _lane(worker, vault)
    with worker.held(vault) as claimed:
        if claimed is None:
            raise Transient("a live worker holds the lane.", unit=vault, next_step="try again when it is done.")
        yield claimed[0]


def _lane(worker: WindowWorker, vault: str) -> Lane:
    lane = worker.store.lane(vault)
    if lane is None:
        raise InvalidInput("the vault has not begun.", unit=vault, next_step="load its full archive, or `begin`.")
    return lane


def _reader(name: str, now: datetime) -> Claim:
    """A claim in name only: it names staging and owns no lane, so nothing can be applied with it."""
    return Claim(Lease(name, "reader", 0, 1.0, now), 0, now, name, 0)
