"""The window worker: takes a lane, stages many windows ahead, and commits them one by one.

What belongs here: the order of I/O that the rules ask for, and what happens when a step fails. What does not: the rules
(rules.py), SQL (store.py), queue rows (ledger.py), Spark tasks (staging.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LockstepError, LostClaim, Terminal, Transient
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.kernel.lease import Heartbeat
from lockstep.kernel.logs import get_logger
from lockstep.kernel.retry import RetryPolicy
from lockstep.warehouse.model import vault_schema
from lockstep.windows import epochs, rules
from lockstep.windows.ledger import WindowLedger
from lockstep.windows.model import QueueRow, Window, WindowKind, WindowStatus
from lockstep.windows.prepare import Preparer
from lockstep.windows.sink import Sink
from lockstep.windows.store import Applied, Claim, Lane, Staged

_log = get_logger(__name__)

Progress = Callable[[Applied], None]
Refetch = Callable[[QueueRow], bool]
"""Asks the source for a window once more; True if the queue row points at other raw files now."""
Alarm = Callable[[Window, int, LockstepError], None]
"""Tells people that a window failed, under which fence and why."""
_REPAIR_BACK = timedelta(days=2)  # more windows than a mirror can be behind


@dataclass(frozen=True)
class DrainPolicy:
    """How much one drain takes on. The first batch is small, so that the first commit comes soon."""

    ttl: float = 60.0
    first_batch: int = 16
    batch: int = 96
    max_windows: int = 4000
    max_seconds: float = 1500.0
    mirror_seconds: float = 0.3
    retry: RetryPolicy = field(
        default_factory=lambda: RetryPolicy(max_attempts=4, base_seconds=0.5, cap_seconds=10, budget_seconds=60)
    )


@dataclass
class DrainReport:
    """What a drain did and why it ended."""

    vault: str
    applied: int = 0
    rows: int = 0
    watermark: datetime | None = None
    reason: str = "nothing to apply"
    stopped_before: Window | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"waited": 0.0, "commit": 0.0})
    """How long commits took, and how long they waited for windows to be staged."""


@dataclass(frozen=True)
class Outside:
    """Whom a worker may turn to besides its stores: the source of a window, and the people who look after it."""

    refetch: Refetch | None = None
    alarm: Alarm | None = None


class WindowFailed(Terminal):
    """The run's own window cannot be applied: it is FAILED, and its lane waits for a person."""


class Beat(Protocol):
    """What a drain asks between steps: whether the lane is still its own."""

    def check(self) -> None:
        """Raise `LostClaim` if it is not."""
        ...


class WindowWorker:
    """Applies windows of any vault. Holds no state between drains."""

    def __init__(
        self,
        store: Sink,
        ledger: WindowLedger,
        preparer: Preparer,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        policy: DrainPolicy | None = None,
        outside: Outside | None = None,
    ) -> None:
        self.store = store
        self.ledger = ledger
        self.preparer = preparer
        self.clock = clock or SystemClock()
        self.ids = ids or SystemIds()
        self.policy = policy or DrainPolicy()
        self._outside = outside or Outside()

    def drain(
        self,
        vault: str,
        *,
        own: datetime | None = None,
        by_hand: bool = False,
        progress: Progress | None = None,
        actor: str = "lockstep",
    ) -> DrainReport:
        """Apply consecutive windows until the lane is empty or blocked, each in its own transaction.

        Args:
            vault: Whose lane.
            own: Stop of the window that this run is for; by default the next one. Only its failure is the run's.
            by_hand: A person asked for `own`: it is tried even if it is FAILED.
            progress: Called after each commit.
            actor: Who is written into the audit.

        Raises:
            WindowFailed: `own` cannot be applied; it is FAILED now.
            LostClaim: A newer worker has the lane; this one has changed nothing since.
        """
        lane, full = self._opened(vault)
        if lane is None:
            return DrainReport(vault, reason=str(rules.Blocked(rules.BlockReason.BASELINE, None)))
        with self.held(vault) as claimed:
            if claimed is None:
                return DrainReport(vault, reason="a live worker holds the lane")
            claim, beat = claimed
            if full is not None and claim.watermark == full.window.start:
                if full.status is WindowStatus.FAILED and not by_hand:
                    return DrainReport(vault, reason=str(rules.Blocked(rules.BlockReason.FAILED, full.window)))
                claim = self.load_full(claim, full)
            epochs.append_logs(self, claim)
            return _Drain(self, claim, beat, own, progress or (lambda _: None)).run(by_hand=by_hand, actor=actor)

    @contextmanager
    def held(self, vault: str) -> Iterator[tuple[Claim, Heartbeat] | None]:
        """Hold the lane for the block, with a heartbeat; None if somebody else does."""
        claim = self.store.claim(vault, self.ids.new_id(), self.policy.ttl)
        if claim is None:
            yield None
            return
        crash_point("windows.lane.after_claim")
        try:
            with Heartbeat(self.store, claim.lease, every=self.policy.ttl / 6) as beat:
                yield claim, beat
        finally:
            with suppress(LockstepError):  # a lease that cannot be given back runs out by itself
                self.preparer.drop_stages(claim)
                self.store.release(claim.lease)

    def load_full(self, claim: Claim, row: QueueRow) -> Claim:
        """Load a full archive; if that cannot be done it is FAILED and the lane stays where it is."""
        try:
            return epochs.load_full(self, claim, self.as_offered(row))
        except LostClaim:
            raise
        except LockstepError as error:
            self.fail(claim, row.window, error)
            raise WindowFailed(error.what, unit=str(row.window), next_step="fix the cause and retry it.") from error

    def as_offered(self, row: QueueRow) -> QueueRow:
        """The row, pointing at what the source offers now if the window failed before and was published anew.

        A source that cannot be asked costs a warning: the raw files that we have may be sound, the cause elsewhere.
        """
        if self._outside.refetch is None or row.last_error is None:
            return row
        try:
            replaced = self._outside.refetch(row)
        except LockstepError as error:
            _log.warning("the source was not asked again", window=str(row.window), error=str(error))
            return row
        _log.info("asked the source again", window=str(row.window), replaced=replaced)
        return (self.ledger.get(row.window) or row) if replaced else row

    def fail(self, claim: Claim, window: Window, error: LockstepError) -> None:
        """Show a failure everywhere people look: queue row, audit, log, alert. Nothing here may hide the failure."""
        self.ledger.failed(window, fence=claim.fence, error=str(error))
        self.store.audit("failed", window.vault, actor="lockstep", stop=window.stop, reason=error.what[:500])
        _log.error("window failed", window=str(window), error=str(error))
        if self._outside.alarm is None:
            return
        try:
            self._outside.alarm(window, claim.fence, error)
        except Exception as problem:  # whatever an alert does wrong, the failure itself must be reported
            _log.warning("no alert could be raised", window=str(window), error=str(problem))

    def _opened(self, vault: str) -> tuple[Lane | None, QueueRow | None]:
        """The lane, begun at its newest full load if it has not begun yet: that row is then still to be loaded."""
        lane = self.store.lane(vault)
        if lane is not None and lane.has_begun:
            return lane, None
        fulls = self.ledger.pending(vault, None, kind=WindowKind.FULL)
        if not fulls:
            return lane, None
        full = fulls[-1]
        self.store.open_lane(vault, full.window.epoch, full.window.start, f"full load {full.window.stoptime}")
        return self.store.lane(vault), full


class _Drain:
    """One drain of one lane."""

    def __init__(
        self, worker: WindowWorker, claim: Claim, beat: Beat, own: datetime | None, progress: Progress
    ) -> None:
        self._worker = worker
        self._claim = claim
        self._beat = beat
        self._own = own
        self._progress = progress
        self._watermark = claim.watermark
        self._report = DrainReport(claim.vault, watermark=claim.watermark)
        self._mirror = _Mirror(worker.ledger, claim, every=worker.policy.mirror_seconds)
        self._schema = vault_schema(claim.vault)
        self._started = worker.clock.monotonic()

    def run(self, *, by_hand: bool, actor: str) -> DrainReport:
        rows = self._repaired_rows()
        rows = self._retried_by_hand(rows, actor) if by_hand else rows
        chain = rules.consecutive(self._watermark, rows, self._worker.policy.max_windows)
        if not chain:
            self._report.reason = self._why_not(rows)
            return self._report
        chain[0] = self._worker.as_offered(chain[0])
        if self._own is None:
            self._own = chain[0].window.stop
        self._show_first(chain[0])
        with self._mirror:
            self._through(chain)
        return self._report

    def _through(self, chain: list[QueueRow]) -> None:
        """Stage one batch ahead of the commits, and look for new windows when the chain ends."""
        with ThreadPoolExecutor(1, thread_name_prefix="stage") as ahead:
            upcoming = self._ahead(ahead, chain, first=True)
            while upcoming is not None:
                rows, future = upcoming
                with self._timed("waited"):
                    prepared = future.result()
                chain = chain[len(rows) :]
                upcoming = self._ahead(ahead, chain) if len(prepared) == len(rows) else None
                if not self._commit_all(rows, prepared) or self._spent():
                    break
                if upcoming is None:
                    fresh = self._worker.ledger.pending(self._claim.vault, self._watermark)
                    chain = rules.consecutive(self._watermark, fresh, self._worker.policy.max_windows)
                    upcoming = self._ahead(ahead, chain)
                    self._report.reason = self._why_not(fresh) if not chain else self._report.reason
            if upcoming is not None:
                upcoming[1].cancel()

    def _ahead(
        self, pool: ThreadPoolExecutor, chain: Sequence[QueueRow], *, first: bool = False
    ) -> tuple[Sequence[QueueRow], Future[list[Staged | LockstepError]]] | None:
        policy = self._worker.policy
        rows = chain[: policy.first_batch if first else policy.batch]
        return (rows, pool.submit(self._worker.preparer.prepare, self._claim, rows)) if rows else None

    def _commit_all(self, rows: Sequence[QueueRow], prepared: Sequence[Staged | LockstepError]) -> bool:
        """Commit in order. False if the drain must end before one of them."""
        for row, staged in zip(rows, prepared, strict=False):
            self._beat.check()
            try:
                applied = self._commit(row, staged)
            except LostClaim:
                self._report.reason = "a newer worker has the lane"
                raise
            except LockstepError as error:
                return self._refused(row, error)
            self._committed(row, applied)
        self._worker.preparer.drop_stages(self._claim, [one for one in prepared if isinstance(one, Staged)])
        return True

    def _commit(self, row: QueueRow, staged: Staged | LockstepError) -> Applied:
        """Apply one staged window; try transient failures again, staging anew what was not staged."""
        state: list[Staged | LockstepError] = [staged]

        def attempt() -> Applied:
            self._beat.check()
            if isinstance(state[0], Transient):
                state[:] = self._worker.preparer.prepare(self._claim, [row])
            if isinstance(state[0], LockstepError):
                raise state[0]
            return self._apply(state[0])

        return self._worker.policy.retry.call(attempt, clock=self._worker.clock)

    def _apply(self, staged: Staged) -> Applied:
        try:
            with self._timed("commit"):
                return self._worker.store.apply(self._claim, staged, self._schema)
        except (Transient, LostClaim):
            # The answer may be lost, not the commit: the sink's own ledger tells.
            found = self._worker.store.find(self._claim.vault, staged.load_id(self._claim.fence))
            if found is None:
                raise
            return found

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = self._worker.clock.monotonic()
        try:
            yield
        finally:
            self._report.seconds[name] += self._worker.clock.monotonic() - started

    def _committed(self, row: QueueRow, applied: Applied) -> None:
        self._watermark = applied.stop
        self._report.applied += 1
        self._report.rows += applied.rows
        self._report.watermark = applied.stop
        self._report.reason = "the lane is empty"
        self._mirror.applied(row.window)
        crash_point("windows.drain.after_window")
        self._progress(applied)

    def _refused(self, row: QueueRow, error: LockstepError) -> bool:
        """A further window ends the drain before it; the run's own window is FAILED and raises."""
        window = row.window
        self._mirror.flush()
        self._report.stopped_before = window
        self._report.reason = f"{window} could not be applied: {error.what}"
        if window.stop != self._own:
            _log.warning("drain ends before a window", window=str(window), error=str(error))
            self._worker.ledger.ready(window, fence=self._claim.fence, error=str(error), was=WindowStatus.PROCESSING)
            return False
        self._worker.fail(self._claim, window, error)
        raise WindowFailed(
            error.what,
            unit=str(window),
            next_step=f"fix the cause, then `lockstep windows retry --vault {window.vault} --stop {window.stoptime}`.",
        ) from error

    def _repaired_rows(self) -> list[QueueRow]:
        """The queue's rows, after what the sink knows better was put right."""
        worker, claim = self._worker, self._claim
        rows = worker.ledger.pending(claim.vault, claim.watermark - _REPAIR_BACK)
        # Up to the watermark only: after a replay, earlier epochs hold windows that are to be applied again.
        recent = worker.store.history(claim.vault, after=claim.watermark - _REPAIR_BACK, until=claim.watermark)
        applied = {one.stop for one in recent if one.kind != "gap"}
        if worker.ledger.repair(rows, applied, claim.watermark, claim.fence):
            rows = worker.ledger.pending(claim.vault, claim.watermark)
        crash_point("windows.drain.after_repair")
        return rows

    def _retried_by_hand(self, rows: list[QueueRow], actor: str) -> list[QueueRow]:
        decision = rules.next_step(self._watermark, rows, self._worker.clock.now())
        if not isinstance(decision, rules.Blocked) or decision.reason is not rules.BlockReason.FAILED:
            return rows
        if decision.window is None or decision.window.stop != self._own:
            return rows
        self._worker.store.audit("retry", self._claim.vault, actor=actor, stop=self._own, reason="run started by hand")
        self._worker.ledger.ready(decision.window, fence=self._claim.fence, was=WindowStatus.FAILED)
        return self._worker.ledger.pending(self._claim.vault, self._watermark)

    def _show_first(self, row: QueueRow) -> None:
        lease = self._claim.lease
        self._worker.ledger.processing(
            row, fence=lease.fence, owner=lease.owner, lease_until=lease.lease_until, attempt=True
        )
        crash_point("windows.drain.after_processing")

    def _why_not(self, rows: Sequence[QueueRow]) -> str:
        decision = rules.next_step(self._watermark, rows, self._worker.clock.now())
        return str(decision) if isinstance(decision, rules.Blocked) else "the lane is empty"

    def _spent(self) -> bool:
        policy = self._worker.policy
        late = self._worker.clock.monotonic() - self._started > policy.max_seconds
        if late or self._report.applied >= policy.max_windows:
            self._report.reason = "this drain has done its share; the next one goes on"
            return True
        return False


class _Mirror:
    """Shows commits in the queue from a thread of its own: DynamoDB must not slow the lane, nor stop it."""

    def __init__(self, ledger: WindowLedger, claim: Claim, *, every: float) -> None:
        self._ledger = ledger
        self._every = every
        self._fence = claim.fence
        self._waiting: list[Window] = []
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_flushing, name="queue mirror", daemon=True)

    def __enter__(self) -> _Mirror:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)
        self.flush()

    def applied(self, window: Window) -> None:
        """Remember a committed window."""
        with self._lock:
            self._waiting.append(window)

    def flush(self) -> None:
        """Write what is waiting. A failure is left to the next claim's repair."""
        with self._flushing:
            with self._lock:
                windows, self._waiting = self._waiting, []
            try:
                self._ledger.applied(windows, fence=self._fence)
            except (BotoCoreError, ClientError) as error:
                _log.warning("queue rows not updated, the next drain repairs them", error=str(error))

    def _keep_flushing(self) -> None:
        while not self._stop.wait(self._every):
            self.flush()
