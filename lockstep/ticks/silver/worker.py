"""The silver worker: takes a project's lane, applies committed ticks in their order, and says DONE when they are in.

What belongs here: the order of the steps and what each failure means. What does not: decisions (rules.py), SQL
(store.py), DynamoDB (dispatch.py), Spark (tables.py). Every step may be repeated after a death anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LockstepError, LostClaim, Terminal, Transient
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.kernel.lease import Heartbeat, Lease, LeaseStore
from lockstep.kernel.logs import get_logger
from lockstep.ticks.diagnose import first_line
from lockstep.ticks.model import TableSpec, Tick
from lockstep.ticks.silver import rules
from lockstep.ticks.silver.dispatch import DispatchTable
from lockstep.ticks.silver.model import LEASE_SECONDS, MAX_ATTEMPTS, Applied, Dispatch, DispatchState, Lane, TableState
from lockstep.ticks.silver.queue import TickQueue
from lockstep.ticks.silver.store import SilverStore
from lockstep.ticks.silver.tables import Step, manifest_of

_log = get_logger(__name__)

HIDE_EVERY_SECONDS = 60.0
_LANE_POLL_SECONDS = 1.0


class Tables(Protocol):
    """What applies one table of a tick."""

    def apply(self, step: Step) -> TableState:
        """Bring the table up to its tick; safe to repeat."""
        ...

    def put_back(self, step: Step) -> None:
        """Bring the table back to where it was before its tick; safe to repeat."""
        ...


@dataclass
class Report:
    """What one drain did. `reason` says why it ended."""

    project_id: str
    applied: list[Applied] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    failed: str | None = None
    parked: bool = False
    error: LockstepError | None = None
    reason: str = ""


class SilverWorker:
    """Applies ticks. Clients are given; the clock and the ids too."""

    def __init__(
        self,
        store: SilverStore,
        dispatches: DispatchTable,
        queue: TickQueue,
        tables: Tables,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.store = store
        self.dispatches = dispatches
        self.queue = queue
        self._tables = tables
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds()
        self._ttl = lease_seconds
        self._settler = Settler(dispatches, queue, self._clock)

    def drain(
        self,
        project_id: str,
        wanted: Collection[str] | None = None,
        *,
        run_id: str,
        progress: Callable[[Applied], None] = lambda applied: None,
        seconds: float = 600.0,
        patience: float = 0.0,
    ) -> Report:
        """Apply the project's committed ticks in order, those in `wanted` only if it is given.

        Ends before the first tick that is not wanted, at the first that fails, or when the time is used up. What was
        applied until then stays, and is said to be DONE one by one. `patience` is how long to wait for the lane.

        Raises:
            LostClaim: The lane was taken over. What was completed before stays; nothing else was changed.
        """
        report = Report(project_id)
        deadline = self._clock.monotonic() + seconds
        with self._held(self.store.lane(project_id), run_id, patience) as held:
            if held is None:
                report.reason = "another worker has the lane"
                return report
            self._settle(wanted or (), report)
            while (tick := self._next(held, wanted, report)) is not None:
                if self._clock.monotonic() > deadline:
                    report.reason = "the time is used up"
                    break
                if not self._one(held, tick, report, progress):
                    break
        return report

    @contextmanager
    def _held(self, lane: Lane, run_id: str, patience: float) -> Iterator[_Held | None]:
        lease = self._acquire(lane, run_id, patience)
        if lease is None:
            yield None
            return
        try:
            self.store.open(lane)
            held = _Held(self, lease, self.store.lane(lane.project_id), run_id)
            with Heartbeat(held, lease, clock=self._clock) as beat:
                held.check = beat.check
                yield held
        finally:
            self.store.leases.release(lease)

    def _acquire(self, lane: Lane, run_id: str, patience: float) -> Lease | None:
        give_up = self._clock.monotonic() + patience
        while True:
            owner = f"{run_id}:{self._ids.new_id()}"
            lease = self.store.leases.acquire(lane.name, owner, self._ttl)
            if lease is not None or self._clock.monotonic() >= give_up:
                return lease
            self._clock.sleep(_LANE_POLL_SECONDS)

    def _next(self, held: _Held, wanted: Collection[str] | None, report: Report) -> Tick | None:
        if held.waiting and held.waiting[0].sequence == held.lane.watermark + 1:
            plan = rules.Plan(tuple(held.waiting))
        else:
            plan = self.store.plan(held.lane)
        held.waiting = list(plan.ready)
        if not plan.ready:
            report.reason = f"{plan.why} {plan.at}".strip()
            report.parked = plan.why is rules.Why.PARKED
            return None
        if wanted is not None and plan.ready[0].tick_id not in wanted:
            report.reason = f"{plan.ready[0].tick_id} is not part of this run"
            return None
        return held.waiting.pop(0)

    def _one(self, held: _Held, tick: Tick, report: Report, progress: Callable[[Applied], None]) -> bool:
        """Apply one tick; False if the lane stops here."""
        crash_point("silver.tick.before_claim")
        held.row = self._claim(held, tick)
        crash_point("silver.tick.claimed")
        try:
            self._refuse_spent(held.row, tick)
            held.lane = self._pass_over(held, tick) if self.store.is_skipped(tick) else self._bring_in(held, tick)
        except LostClaim:
            raise
        except Exception as error:  # whatever Spark or a driver throws must be counted, or it is tried for ever
            self._fail(held, tick, error, report)
            return False
        crash_point("silver.tick.completed")
        row, held.row = held.row, None
        self._settler.say_done(row)
        done = self.store.applied([tick.tick_id])[tick.tick_id]
        report.applied.append(done)
        progress(done)
        return True

    def _bring_in(self, held: _Held, tick: Tick) -> Lane:
        states = []
        for spec in manifest_of(tick).tables:
            states.append(self._tables.apply(self._step(held, tick, spec)))
            crash_point("silver.tick.table_applied")
        crash_point("silver.tick.before_complete")
        return self.store.complete(held.lease, held.lane, tick, states)

    def _pass_over(self, held: _Held, tick: Tick) -> Lane:
        """Go on without the tick: what attempts at it left in some of its tables goes away too."""
        specs = manifest_of(tick).tables
        for spec in specs:
            self._tables.put_back(self._step(held, tick, spec))
        names = [spec.name for spec in specs]
        return self.store.pass_over(held.lease, held.lane, tick, names)

    def _step(self, held: _Held, tick: Tick, spec: TableSpec) -> Step:
        return Step(
            tick=tick,
            spec=spec,
            lane=held.lane,
            before=self.store.before(tick, spec.name),
            must_go_back=self.store.was_applied(tick, spec.name),
            fence=held.lease.fence,
            check=held.check,
        )

    def _claim(self, held: _Held, tick: Tick) -> Dispatch:
        """RUNNING in our name: the dispatch that waits for us, or a new attempt taken from whoever had the last one."""
        now = self._clock.now()
        until = now + timedelta(seconds=self._ttl)
        row = self.dispatches.get_all([tick.tick_id], now).get(tick.tick_id)
        fresh = row is not None and row.generation == held.lane.generation and row.state is DispatchState.DISPATCHING
        if row is None or not fresh:
            handle = row.receipt_handle if row is not None else None
            row = self.dispatches.take(
                tick.tick_id, held.lane, now=now, until=until, receipt_handle=handle, fence=held.lease.fence
            )
        if row is None:
            raise rules.overtaken(tick.tick_id)
        return self.dispatches.start(row, run_id=held.run_id, now=now, until=until)

    def _refuse_spent(self, row: Dispatch, tick: Tick) -> None:
        if row.attempt > MAX_ATTEMPTS:
            raise Terminal(
                f"{MAX_ATTEMPTS} attempts ended without a result: their workers died or lost their lease.",
                unit=tick.unit,
                next_step=f"see the runs of the tick, then `lockstep silver replay --tick {tick.tick_id}`, or `skip`.",
            )

    def _fail(self, held: _Held, tick: Tick, error: Exception, report: Report) -> None:
        """Count the attempt. What cannot heal, and what failed too often, parks the lane in sight of everybody."""
        if held.row is None:
            raise error
        now = self._clock.now()
        final = isinstance(error, Terminal | InvalidInput)
        parks = final or held.row.attempt >= MAX_ATTEMPTS
        words = str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {first_line(error)}"
        _log.warning("tick failed", tick=tick.tick_id, attempt=held.row.attempt, parks=parks, error=words)
        _log.debug("tick failed", tick=tick.tick_id, exc_info=error)
        self.store.fail(held.lease, held.lane, tick, words, parks=parks)
        crash_point("silver.tick.failure_recorded")
        retry = rules.retry_at(held.row.attempt, now)
        row, held.row = held.row, None
        self.dispatches.fail(row, words, now=now, retry_at=retry)
        if row.receipt_handle is not None and not parks:
            self._show_message(row.receipt_handle, (retry - now).total_seconds())
        report.failed, report.parked, report.reason = tick.tick_id, parks, words
        report.error = error if isinstance(error, LockstepError) else Transient(words, unit=tick.unit)

    def _settle(self, wanted: Collection[str], report: Report) -> None:
        """Say DONE for wanted ticks that are in silver and whose worker died before it could say so."""
        there = self.store.applied(wanted) if wanted else {}
        report.already = sorted(there)
        self._settler.settle(there.values())

    def _show_message(self, receipt_handle: str, seconds: float) -> None:
        """Let the message come back when the next attempt may begin: it is what wakes the sensor."""
        try:
            self.queue.hide([receipt_handle], round(seconds))
        except LockstepError as error:
            _log.warning("message comes back late", error=str(error))


class Settler:
    """Says DONE for ticks that are in silver, then deletes their messages. The ledger has them; this is its picture."""

    def __init__(self, dispatches: DispatchTable, queue: TickQueue, clock: Clock) -> None:
        self._dispatches = dispatches
        self._queue = queue
        self._clock = clock

    def settle(self, applied: Collection[Applied]) -> int:
        """Write each DONE that is missing. Returns how many."""
        rows = self._dispatches.get_all((one.tick_id for one in applied), self._clock.now())
        written = 0
        for one in applied:
            row = rows.get(one.tick_id)
            if row is not None and row.is_done and row.generation >= one.generation:
                continue
            now = self._clock.now()
            lane = Lane(one.org_id, one.project_id, one.sequence, one.generation)
            handle = row.receipt_handle if row is not None else None
            taken = self._dispatches.take(one.tick_id, lane, now=now, until=now, receipt_handle=handle, fence=one.fence)
            written += taken is not None and self.say_done(taken)
        return written

    def say_done(self, row: Dispatch) -> bool:
        """DONE, then the message. The ledger has the tick already, so a failure here is mended by the next look."""
        try:
            done = self._dispatches.done(row, now=self._clock.now())
        except (LostClaim, Transient) as error:
            _log.warning("DONE not written yet", tick=row.tick_id, error=str(error))
            return False
        crash_point("silver.tick.done")
        if done.receipt_handle is not None:
            self._forget(done.receipt_handle, row.tick_id)
        return True

    def _forget(self, receipt_handle: str, tick_id: str) -> None:
        try:
            self._queue.delete([receipt_handle])
        except LockstepError as error:
            _log.warning("message not deleted yet", tick=tick_id, error=str(error))


class _Held:
    """A lane in our hands: its lease, the tick under work, and a heartbeat that keeps all three places alive."""

    def __init__(self, worker: SilverWorker, lease: Lease, lane: Lane, run_id: str) -> None:
        self._worker = worker
        self.lease = lease
        self.lane = lane
        self.run_id = run_id
        self.row: Dispatch | None = None
        self.waiting: list[Tick] = []
        self.check: Callable[[], None] = lambda: None
        self._hidden_at = float("-inf")

    def renew(self, lease: Lease) -> Lease:
        """Called by the heartbeat: the lease first, then the dispatch and the message of the tick under work."""
        renewed = self._leases.renew(lease)
        row = self.row
        if row is not None:
            self._keep(row)
        return renewed

    @property
    def _leases(self) -> LeaseStore:
        return self._worker.store.leases

    def _keep(self, row: Dispatch) -> None:
        clock = self._worker._clock
        now = clock.now()
        try:
            self._worker.dispatches.beat(row, now=now, until=now + timedelta(seconds=self.lease.ttl))
            if row.receipt_handle is not None and clock.monotonic() - self._hidden_at > HIDE_EVERY_SECONDS:
                self._hidden_at = clock.monotonic()
                self._worker.queue.hide([row.receipt_handle], rules.HIDDEN_SECONDS)
        except LockstepError as error:
            # Neither decides anything: the lease does. A dispatch that looks dead is taken by whoever has the lease.
            _log.warning("dispatch not kept alive", tick=row.tick_id, error=str(error))
