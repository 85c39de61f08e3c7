"""The commit of a tick: the order of its steps, from the manifest to the message, with a fence in every one.

What belongs here: who is asked in which order, and what a failure leaves behind. What does not: rules (rules.py), SQL
(store.py), Spark (bronze.py), HTTP (services/ingest).
"""

from __future__ import annotations

import contextvars
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LockstepError, LostClaim, Transient
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.kernel.lease import Heartbeat, Lease, LeaseStore
from lockstep.kernel.logs import get_logger
from lockstep.kernel.relay import Relay
from lockstep.ticks import bronze, messages, rules
from lockstep.ticks.diagnose import explain_failure
from lockstep.ticks.errors import InFlight, NoSuch, Undelivered
from lockstep.ticks.model import ANY_SIZE, Limits, Manifest, Project, TableCommit, TableSpec, Tick, TickState
from lockstep.ticks.parts import PartObjects
from lockstep.ticks.rules import InvalidManifest
from lockstep.ticks.store import Begun, Done, TickStore, lane_of, other_manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LANE_TTL = 15.0
"""Seconds that the lane of a dead replica stays closed."""

DELIVERY_SECONDS = 10.0
_LANE_POLL = 0.05
_LANE_POLL_MOST = 0.5
_DELIVERY_POLL = 0.05
_TABLES_AT_ONCE = 4

_log = get_logger(__name__)


class SparkGate(Protocol):
    """A warm session that outlives any one call."""

    def session(self) -> SparkSession:
        """The session, opened if there is none. Raises `Transient`."""
        ...

    def doubt(self, error: BaseException) -> None:
        """Told after a failure: a session whose server is gone is dropped, the next call opens a new one."""
        ...


Observer = Callable[[str, float], None]
"""Told after each phase of a commit: `lane`, `bronze`, `state` or `deliver`, and its seconds."""


class Finalized(NamedTuple):
    """The answer to a finalize. `replayed`: the tick was committed before and the answer is the first one."""

    result: Mapping[str, Any]
    replayed: bool


@dataclass(frozen=True)
class Plant:
    """What a committer works with."""

    store: TickStore
    leases: LeaseStore
    parts: PartObjects
    s3: Any
    lake: str
    spark: SparkGate
    relay: Relay
    limits: Limits


class Committer:
    """Commits ticks, one at a time for each organisation, whatever the number of replicas."""

    def __init__(
        self,
        plant: Plant,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        observe: Observer | None = None,
        stopping: threading.Event | None = None,
        parallel: int = 4,
    ) -> None:
        """Nothing is opened here.

        Args:
            plant: What to work with.
            clock: Where time comes from.
            ids: Where names of attempts come from.
            observe: Told the seconds of each phase.
            stopping: Once set, a finalize that still waits for its lane gives up.
            parallel: Ticks that are written at the same time. Waiting for a lane takes none of these places, so no
                organisation waits for another one's lane.
        """
        self._plant = plant
        self._slots = threading.BoundedSemaphore(parallel)
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds(self._clock)
        self._observe = observe or (lambda *_: None)
        self._stopping = stopping or threading.Event()

    def finalize(self, project: Project, tick_id: str, body: Any) -> Finalized:
        """Commit the tick that the manifest describes, and return when its messages have left.

        Safe to repeat after any failure: nothing is acknowledged before the transaction, and after it the same
        manifest gets the same answer.

        Raises:
            InvalidManifest: It cannot be committed like this.
            PartsMissing: Parts must be put first.
            InFlight, NotYet, Undelivered: Ask again later.
            Transient: A part of the platform is away; nothing was acknowledged.
        """
        known = self._plant.store.find(project.project_id, tick_id)
        if known is not None and known.state is TickState.COMMITTED:
            # The first answer is for ever: it is not judged again by limits that are lower today.
            manifest = _parse(project, tick_id, body, ANY_SIZE)
            if known.manifest_sha256 != manifest.sha256:
                raise other_manifest(tick_id)
            return self._replay(known)
        manifest = self._read(project, tick_id, body)
        try:
            with self._lane(project.org_id) as (lease, heartbeat):
                begun = self._plant.store.begin(project, manifest, lease, self._plant.leases)
                if isinstance(begun, Begun):
                    tick, strays = self._commit(begun, heartbeat)
        except InvalidManifest as error:
            if error.error_class != "ManifestConflict":
                self._plant.store.refuse(project, tick_id, error)
            raise
        except LostClaim:
            self._heal(project.project_id, {tick_id})
            raise
        if isinstance(begun, Done):
            return self._replay(begun.tick)
        with self._timed("deliver"):
            self._send(tick)
        self._heal(project.project_id, strays - {tick_id})
        crash_point("ticks.finalize.before_answer")
        return Finalized(tick.result or {}, replayed=False)

    def reingest(self, project_id: str, tick_id: str) -> Tick:
        """Write a committed tick again from its stored parts: the same rows, in a new commit.

        Its sequence, its answer and its message stay; `bronze_committed` gets the new commit.

        Raises:
            NoSuch: The project has no committed tick of this id.
            Terminal: Its parts are no longer there.
        """
        tick = self._plant.store.find(project_id, tick_id)
        if tick is None or tick.state is not TickState.COMMITTED or tick.manifest is None:
            raise NoSuch("there is no such committed tick.", unit=f"tick {tick_id}")
        manifest = rules.parse_manifest(
            dict(tick.manifest), org_id=tick.org_id, project_id=project_id, tick_id=tick_id, limits=ANY_SIZE
        )
        with self._lane(tick.org_id) as (lease, heartbeat):
            begun = self._plant.store.begin_again(tick, manifest, lease, self._plant.leases)
            commits, _ = self._write(begun, heartbeat)
            now = self._plant.store.now()
            row = messages.audit_row(
                manifest,
                commits[-1],
                tick.result or {},
                sequence=begun.place.sequence,
                generation=tick.generation + 1,
                now=now,
            )
            again = self._plant.store.commit_again(begun, commits, [row], now=now, leases=self._plant.leases)
        self._send(again)
        return again

    def expire_uploads(self) -> int:
        """Forget uploads that were abandoned, and remove objects that nothing names. Returns how many ticks went."""
        now = self._plant.store.now()
        expired = self._plant.store.expire(idle_for=timedelta(days=self._plant.limits.upload_days), now=now)
        for project_id, tick_id in expired:
            self._sweep(project_id, tick_id, before=now)
        hour = timedelta(hours=1)
        for project_id, tick_id in self._plant.store.settled(now - 2 * hour, now - hour):
            self._sweep(project_id, tick_id, before=now - hour)
        return len(expired)

    def _sweep(self, project_id: str, tick_id: str, *, before: datetime) -> None:
        """Remove what no part names. Asked now: an agent may have begun a forgotten tick anew meanwhile."""
        named = [part.object_key for part in self._plant.store.parts(project_id, tick_id).values()]
        self._plant.parts.sweep(project_id, tick_id, keep=named, before=before)

    def _read(self, project: Project, tick_id: str, body: Any) -> Manifest:
        try:
            manifest = _parse(project, tick_id, body, self._plant.limits)
            rules.check_tables(manifest, project.tables)
        except InvalidManifest as error:
            self._plant.store.refuse(project, tick_id, error)
            raise
        return manifest

    def _commit(self, begun: Begun, heartbeat: Heartbeat) -> tuple[Tick, set[str]]:
        crash_point("ticks.commit.begun")
        try:
            commits, strays = self._write(begun, heartbeat)
            crash_point("ticks.commit.before_transaction")
            now = self._plant.store.now()
            rows = sum(commit.rows for commit in commits)
            result = messages.answer(begun.manifest, rows=rows, replaced=begun.replaced_rows, now=now)
            due = [
                messages.audit_row(
                    begun.manifest, commits[-1], result, sequence=begun.place.sequence, generation=1, now=now
                ),
                messages.completed(begun.manifest, commits[-1], now=now),
            ]
            with self._timed("state"):
                tick = self._plant.store.commit(begun, commits, due, result, now=now, leases=self._plant.leases)
        except LostClaim:
            raise  # a newer attempt has the tick: it is not ours to give back
        except Exception as error:
            self._give_back(begun, error)
            raise
        crash_point("ticks.commit.after_transaction")
        return tick, strays

    def _heal(self, project_id: str, ticks: set[str]) -> None:
        """Write ticks again of which an overtaken attempt may have left a second copy of the rows.

        Readers by tick never see such a copy: they read at the version of the acknowledged commit. It is removed all
        the same, for those who read the newest version. An uncommitted tick is replaced when it is finalized.
        """
        for tick_id in sorted(ticks):
            try:
                tick = self._plant.store.find(project_id, tick_id)
                if tick is not None and tick.state is TickState.COMMITTED:
                    _log.warning("a stray commit is being replaced", project=project_id, tick=tick_id)
                    self.reingest(project_id, tick_id)
            except LockstepError as error:  # the answer does not depend on it
                _log.warning("a stray commit stays for now", project=project_id, tick=tick_id, error=str(error))

    def _give_back(self, begun: Begun, error: Exception) -> None:
        """Open the tick again, unless the commit did go through and only its answer was lost."""
        try:
            self._plant.store.abandon(begun, error if isinstance(error, InvalidManifest) else None)
        except LockstepError as second:  # the next finalize finds a fence without a holder and goes on
            _log.warning("tick not given back", tick=begun.manifest.tick_id, error=str(second))

    def _write(self, begun: Begun, heartbeat: Heartbeat) -> tuple[list[TableCommit], set[str]]:
        """Write every table of the tick, several at once, and prove each commit. Also says whose strays were met."""
        tables = begun.manifest.tables
        heartbeat.check()  # the last moment at which an attempt that was paused can still do no harm
        with self._slots, self._timed("bronze"):
            if len(tables) == 1:
                found = [self._write_table(begun, tables[0])]
            else:
                with ThreadPoolExecutor(min(len(tables), _TABLES_AT_ONCE), thread_name_prefix="bronze") as executor:
                    waiting = [
                        executor.submit(contextvars.copy_context().run, self._write_table, begun, table)
                        for table in tables
                    ]
                    found = [one.result() for one in waiting]
        heartbeat.check()
        return [commit for commit, _ in found], {tick for _, strays in found for tick in strays}

    def _write_table(self, begun: Begun, table: TableSpec) -> tuple[TableCommit, tuple[str, ...]]:
        plant, manifest, target = self._plant, begun.manifest, begun.targets[table.name]
        write = bronze.Write(manifest, table, target.columns, begun.lease.fence, begun.fresh, target.grows)
        sources = {
            spec.file_seq: bronze.Source(plant.parts.address(part.object_key), part.footer)
            for spec in table.parts
            if (part := begun.parts[spec.file_seq]).footer is not None
        }
        try:
            session = plant.spark.session()
            with self._bounded(session, f"{manifest.tick_id}-{table.name}"):
                bronze.write_table(session, plant.lake, write, sources)
        except LockstepError:
            raise
        except Exception as error:
            plant.spark.doubt(error)
            keys = [begun.parts[spec.file_seq].object_key for spec in table.parts]
            raise explain_failure(error, plant.s3, plant.parts.bucket, keys, tick_id=manifest.tick_id) from error
        crash_point("ticks.commit.table_written")
        return self._prove(begun, table, target.version)

    @contextmanager
    def _bounded(self, session: SparkSession, tag: str) -> Iterator[None]:
        """Interrupt what Spark does for the block once it takes too long: nobody may hold a lane for ever."""
        timer = threading.Timer(self._plant.limits.write_seconds, session.interruptTag, [tag])
        timer.daemon = True
        session.addTag(tag)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            session.removeTag(tag)

    def _prove(self, begun: Begun, table: TableSpec, known: int) -> tuple[TableCommit, tuple[str, ...]]:
        """Believe only the log: Delta drops the write of an overtaken attempt in silence."""
        project_id, tick_id = begun.manifest.project_id, begun.manifest.tick_id
        run = bronze.run_of(tick_id, begun.lease.fence)
        found = bronze.find_commit(self._plant.s3, self._plant.lake, project_id, table.name, run=run, after=known)
        if found is None:
            raise LostClaim(f"attempt {begun.attempt} left no commit in {table.name}.", unit=f"tick {tick_id}")
        if found.rows != table.rows:
            raise InvalidManifest(
                "RowCountMismatch",
                f"{table.name} holds {found.rows} rows, its parts' footers say {table.rows}.",
                unit=f"tick {tick_id}",
            )
        key = bronze.commit_key(project_id, table.name, found.version)
        return TableCommit(table.name, found.version, key, found.etag, found.rows), found.strays

    def _replay(self, tick: Tick) -> Finalized:
        if self._plant.store.undelivered(tick):
            self._send(tick)
        return Finalized(tick.result or {}, replayed=True)

    def _send(self, tick: Tick) -> None:
        """Take the tick's messages out, or see another relay do it. Raises `Undelivered`; they leave later then."""
        deadline = self._clock.monotonic() + DELIVERY_SECONDS
        while True:
            report = self._plant.relay.run_once(
                len(tick.outbox_ids), lanes=[messages.outbox_lane(tick.project_id, tick.tick_id)]
            )
            if report.delivered == len(tick.outbox_ids) or self._plant.store.waiting(tick) == 0:
                return
            if report.postponed or report.blocked or self._clock.monotonic() >= deadline:
                raise Undelivered(
                    "the tick is committed, but its messages have not left yet.",
                    unit=tick.unit,
                    next_step="finalize again with the same manifest.",
                    retry_after=2.0,
                )
            self._clock.sleep(_DELIVERY_POLL)

    @contextmanager
    def _lane(self, org_id: str) -> Iterator[tuple[Lease, Heartbeat]]:
        lane = lane_of(org_id)
        with self._timed("lane"):
            lease = self._wait_for(lane)
        try:
            with Heartbeat(self._plant.leases, lease, clock=self._clock) as heartbeat:
                yield lease, heartbeat
        finally:
            self._release(lease)

    def _wait_for(self, lane: str) -> Lease:
        owner = f"{socket.gethostname()}:{os.getpid()}:{self._ids.new_id()}"
        deadline = self._clock.monotonic() + self._plant.limits.lane_wait_seconds
        pause = _LANE_POLL
        while (lease := self._plant.leases.acquire(lane, owner, LANE_TTL)) is None:
            if self._stopping.is_set():
                raise Transient("this replica is stopping.", unit=lane, next_step="ask again.", retry_after=1.0)
            if self._clock.monotonic() >= deadline:
                raise InFlight("other ticks of the organisation are being committed.", unit=lane, retry_after=5.0)
            self._clock.sleep(pause)
            pause = min(pause * 1.5, _LANE_POLL_MOST)
        return lease

    def _release(self, lease: Lease) -> None:
        try:
            self._plant.leases.release(lease)
        except Transient as error:  # it expires by itself; the tick's outcome is decided already
            _log.warning("lane not released", lane=lease.lane, error=str(error))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = self._clock.monotonic()
        try:
            yield
        finally:
            self._observe(phase, self._clock.monotonic() - begun)


def _parse(project: Project, tick_id: str, body: Any, limits: Limits) -> Manifest:
    return rules.parse_manifest(
        body, org_id=project.org_id, project_id=project.project_id, tick_id=tick_id, limits=limits
    )
