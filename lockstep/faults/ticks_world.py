"""Ticks in a simulated world: the real intake, sweep, dispatches, queue, rules and silver worker on parts in memory.

What belongs here: bronze's and silver's ledgers as transactions leave them, a silver table, agents, and who does what
when. What does not: faults (schedule.py), judgement (checker.py), Spark and SQL, which have tests on the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, cast

from lockstep.faults.checker import Effect, Stores, Unit
from lockstep.faults.history import History, Outcome, Verb
from lockstep.faults.parts import MemoryDynamo, MemoryQueue, aws_unreachable
from lockstep.faults.schedule import Actor, Bound, SimulatedTime, World, unreachable
from lockstep.kernel.clock import Clock
from lockstep.kernel.errors import LockstepError, LostClaim, Terminal
from lockstep.kernel.ids import SeededIds
from lockstep.kernel.lease import Lease
from lockstep.ticks import rules as chain_rules
from lockstep.ticks.model import QUEUE, SCHEMA_VERSION, SILVER_DISPATCHED, Mode, TableCommit, Tick, TickState
from lockstep.ticks.silver import operations, rules
from lockstep.ticks.silver.dispatch import DispatchTable
from lockstep.ticks.silver.intake import Intake, sweep
from lockstep.ticks.silver.model import LEASE_SECONDS, Applied, DispatchState, Lane, TableState
from lockstep.ticks.silver.queue import TickQueue, message_of
from lockstep.ticks.silver.store import Actor as Person
from lockstep.ticks.silver.tables import Step
from lockstep.ticks.silver.worker import Settler, SilverWorker

PROJECT = "00000000-0000-7000-8000-000000000001"
ORG = "acme"
_TABLE = "orders"
_PERSON = Person("operator", "the tick was put right")


@dataclass
class MemoryLeases:
    """Leases with fences."""

    time: SimulatedTime
    lanes: dict[str, tuple[str | None, int, float]] = field(default_factory=dict)

    def acquire(self, lane: str, owner: str, ttl: float) -> Lease | None:
        """Take the lane if it is free or its lease ran out."""
        held, fence, until = self.lanes.get(lane, (None, 0, 0.0))
        if held is not None and until > self.time.monotonic():
            return None
        self.lanes[lane] = (owner, fence + 1, self.time.monotonic() + ttl)
        return Lease(lane, owner, fence + 1, ttl, self.time.now() + timedelta(seconds=ttl))

    def renew(self, lease: Lease) -> Lease:
        """Extend it, or say that it is lost."""
        self.guard(lease)
        self.lanes[lease.lane] = (lease.owner, lease.fence, self.time.monotonic() + lease.ttl)
        return lease

    def release(self, lease: Lease) -> bool:
        """Give it back, if it is still ours."""
        if self.lanes[lease.lane][:2] != (lease.owner, lease.fence):
            return False
        self.lanes[lease.lane] = (None, lease.fence, 0.0)
        return True

    def guard(self, lease: Lease) -> None:
        """Prove it."""
        if self.lanes[lease.lane][:2] != (lease.owner, lease.fence):
            raise LostClaim(f"fence {lease.fence} is no longer the newest.", unit=lease.lane)


@dataclass
class MemoryTicks:
    """Bronze's ledger: a chain of committed ticks per project, each committed together with its message."""

    time: SimulatedTime
    committed_ticks: list[Tick] = field(default_factory=list)
    outbox: list[str] = field(default_factory=list)

    def commit(self, tick_id: str, prev: str | None) -> str:
        """Commit a tick once; a repeat finds it committed."""
        if self.committed(tick_id) is not None:
            return tick_id
        head = self.committed_ticks[-1].tick_id if self.committed_ticks else None
        state = TickState.COMMITTED if prev is not None and self.committed(prev) else None
        place = chain_rules.next_in_chain(len(self.committed_ticks), head, prev, state)
        if not isinstance(place, chain_rules.Append):
            raise Terminal("the tick cannot follow.", unit=tick_id)
        now = self.time.now()
        self.committed_ticks.append(
            Tick(
                PROJECT, tick_id, ORG, TickState.COMMITTED, 1, 1, now, now,
                manifest=_manifest(tick_id), mode=Mode.DELTA, dt="20260105", sequence=place.sequence,
                commits=(TableCommit(_TABLE, place.sequence, f"k/{place.sequence}", "etag", 1),), committed_at=now,
            )
        )  # fmt: skip
        self.outbox.append(tick_id)
        return tick_id

    def committed(self, tick_id: str) -> Tick | None:
        """A committed tick."""
        return next((one for one in self.committed_ticks if one.tick_id == tick_id), None)

    def sent(self, tick_id: str) -> None:
        """Its message left."""
        with suppress(ValueError):
            self.outbox.remove(tick_id)


@dataclass
class MemorySilver:
    """Silver's ledger: a watermark per project, moved only under the lane's lease."""

    time: SimulatedTime
    leases: MemoryLeases
    ticks: MemoryTicks
    row: Lane = field(default_factory=lambda: Lane(ORG, PROJECT))
    states: dict[int, TableState] = field(default_factory=dict)
    done: dict[str, Applied] = field(default_factory=dict)
    hinted_at: datetime | None = None
    writes: list[tuple[str, int]] = field(default_factory=list)

    def lane(self, project_id: str) -> Lane:
        """The lane."""
        return self.row

    def open(self, lane: Lane) -> None:
        """It is open."""

    def plan(self, lane: Lane, *, limit: int = 100) -> rules.Plan:
        """What may be applied now, by the real rule."""
        return rules.plan(lane, self.ticks.committed_ticks[lane.watermark : lane.watermark + limit])

    def before(self, tick: Tick, table: str) -> TableState | None:
        """The table before this tick."""
        known = [number for number in self.states if number < (tick.sequence or 0)]
        return self.states[max(known)] if known else None

    def was_applied(self, tick: Tick, table: str) -> bool:
        """Whether this tick or a later one was applied in an earlier generation."""
        return any(number >= (tick.sequence or 0) for number in self.states)

    def complete(self, lease: Lease, lane: Lane, tick: Tick, states: list[TableState]) -> Lane:
        """Move the watermark over the tick, if the lease and the lane are as the worker believes."""
        self._guard(lease, lane, tick)
        self.writes.append((lane.name, lease.fence))
        self.row = self.row._replace(watermark=int(tick.sequence or 0), parked=None)
        self.states |= {one.sequence: one for one in states}
        now = self.time.now()
        self.done[tick.tick_id] = Applied(
            ORG, PROJECT, tick.tick_id, int(tick.sequence or 0), lane.generation, Mode.DELTA, "20260105", 1,
            lease.fence, now, now, {},
        )  # fmt: skip
        return self.row

    def fail(self, lease: Lease, lane: Lane, tick: Tick, error: str, *, parks: bool) -> None:
        """Keep a failure; `parks` stops the lane."""
        self._guard(lease, lane, tick)
        self.writes.append((lane.name, lease.fence))
        self.row = self.row._replace(parked=tick.tick_id if parks else None)

    def is_skipped(self, tick: Tick) -> bool:
        """Nobody skips here: a person mends what is wrong."""
        return False

    def rewind(self, lane: Lane, tick: Tick, actor: Person, *, no_longer_skipped: Sequence[str] = ()) -> Lane:
        """Go back to before a tick, in a new generation."""
        if lane.generation != self.row.generation:
            raise rules.overtaken(tick.tick_id)
        back = min(self.row.watermark, int(tick.sequence or 0) - 1)
        self.row = self.row._replace(watermark=back, generation=lane.generation + 1, parked=None)
        return self.row

    def applied(self, tick_ids: Iterable[str]) -> dict[str, Applied]:
        """Those that are in silver."""
        wanted = set(tick_ids)
        return {name: one for name, one in self.done.items() if name in wanted and one.sequence <= self.row.watermark}

    def applied_since(self, since: datetime) -> list[Applied]:
        """What was applied after that instant."""
        return [one for one in self.done.values() if one.applied_at > since and one.sequence <= self.row.watermark]

    def behind(self) -> list[Lane]:
        """The lane, if it is behind."""
        return [self.row] if self.row.watermark < len(self.ticks.committed_ticks) else []

    def audit(self, actor: Person, action: str, subject: str, details: dict[str, Any]) -> None:
        """Nobody reads it here."""

    def forgotten(self, *, committed: datetime, now: datetime, again_after: timedelta, limit: int) -> list[Lane]:
        """The lane, if its next tick has waited and nobody was told."""
        waiting = self.ticks.committed_ticks[self.row.watermark :]
        due = bool(waiting) and (waiting[0].committed_at or committed) <= committed and self.row.parked is None
        return [self.row] if due and not self._was_hinted(now, again_after) else []

    def may_hint(self, lane: Lane, *, now: datetime, again_after: timedelta) -> bool:
        """Whether this sweep is the first in a while."""
        if self._was_hinted(now, again_after):
            return False
        self.hinted_at = now
        return True

    def _was_hinted(self, now: datetime, again_after: timedelta) -> bool:
        return self.hinted_at is not None and now - again_after <= self.hinted_at <= now + again_after

    def _guard(self, lease: Lease, lane: Lane, tick: Tick) -> None:
        self.leases.guard(lease)
        if (self.row.watermark, self.row.generation) != (int(tick.sequence or 0) - 1, lane.generation):
            raise rules.overtaken(tick.tick_id)


@dataclass
class MemoryDelta:
    """A silver table whose log refuses a commit under an older fence, and knows the executions that it holds."""

    poison: set[str] = field(default_factory=set)
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def merge(self, step: Step) -> TableState:
        """Merge one tick: once for each wish, never under a stale fence."""
        if step.tick.tick_id in self.poison:
            raise Terminal("the rows cannot be merged.", unit=step.tick.unit)
        sequence = int(step.tick.sequence or 0)
        wish = rules.request(step.tick.tick_id, step.lane.generation)
        fence = rules.delta_fence(step.fence, sequence)
        if all(known != wish for _, known, _ in self.log):
            if any(fence < known for _, _, known in self.log):
                raise LostClaim("the table holds a commit of a newer fence.", unit=step.tick.unit)
            if self.log and self.log[-1][0] == step.tick.tick_id:
                self.log.pop()  # a replay of the newest tick: its rows take the place of themselves
            self.log.append((step.tick.tick_id, wish, fence))
        epoch = rules.epoch_after(Mode.DELTA, sequence, step.lane.generation, step.before)
        return TableState(_TABLE, sequence, epoch, ("id",), len(self.log), 1)


class _Tables:
    """The table as one actor reaches it."""

    def __init__(self, world: World, actor: Actor, delta: MemoryDelta) -> None:
        self._reach = (world, actor, delta)

    def apply(self, step: Step) -> TableState:
        """Check the lease, then commit."""
        world, actor, delta = self._reach
        step.check()
        return world.call(actor, "spark.merge", lambda: delta.merge(step), unreachable)

    def put_back(self, step: Step) -> None:
        """Nobody skips here."""
        raise AssertionError(step.unit)


class _Store(Bound):
    """The ledger as one actor reaches it, its leases and bronze's ticks too."""

    @property
    def leases(self) -> Any:
        """Each lease call is a step."""
        world, actor, _, part, lost, _ = self._bound
        return Bound(world, actor, "lease", part.leases, lost=lost)

    @property
    def ticks(self) -> Any:
        """Each look at bronze is a step."""
        world, actor, _, part, lost, _ = self._bound
        return Bound(world, actor, "ticks", part.ticks, lost=lost)


@dataclass
class _Parts:
    """What an operator works with."""

    store: Any
    dispatches: DispatchTable
    queue: TickQueue
    dead_letters: TickQueue
    clock: Clock

    def keeps_bronze_of(self, tick: Tick) -> bool:
        """Nothing is forgotten here."""
        return True


class TicksWorld:
    """One project: agents that finalize ticks, a relay, a sensor, workers, a sweep, a person."""

    def __init__(self, world: World, history: History) -> None:
        self.world = world
        self.history = history
        self.ticks = MemoryTicks(world.time)
        self.silver = MemorySilver(world.time, MemoryLeases(world.time), self.ticks)
        self.delta = MemoryDelta()
        self.sqs = MemoryQueue(world.time)
        self.dynamo = MemoryDynamo({SILVER_DISPATCHED: ("tick_id",)})
        self.ids = SeededIds(world.seed)
        self._runs = 0

    def finalize(self, actor: Actor, tick_id: str) -> None:
        """An agent asks until it is answered."""
        ticks = Bound(self.world, actor, "ticks", self.ticks, lost=unreachable)
        for _ in range(6):
            begun = self.history.invoke(actor.name, Verb.WRITE, tick_id, at=self.world.time.monotonic())
            try:
                ticks.commit(tick_id, None)
            except LockstepError:
                self.history.end(begun, Outcome.INFO)
                continue
            self.history.end(begun, Outcome.OK, unit=tick_id)
            return

    def relay(self, actor: Actor) -> None:
        """Messages leave the outbox at least once."""
        queue = self._queue(actor)
        ticks = Bound(self.world, actor, "ticks", self.ticks, lost=unreachable)
        with suppress(LockstepError):
            for tick_id in list(self.ticks.outbox):
                tick = self.ticks.committed(tick_id)
                if tick is not None:
                    queue.send([message_of(tick, actor.clock.now())])
                    ticks.sent(tick_id)

    def look(self, actor: Actor) -> None:
        """The sensor: receive, dispatch, and run what was dispatched."""
        parts = self._parts(actor)
        with suppress(LockstepError):
            found = Intake(parts.store, parts.dispatches, parts.queue, clock=actor.clock).look(lambda lane: False)
            for group in found.groups:
                self._runs += 1
                worker = SilverWorker(
                    parts.store,
                    parts.dispatches,
                    parts.queue,
                    _Tables(self.world, actor, self.delta),
                    clock=actor.clock,
                    ids=self.ids,
                    lease_seconds=LEASE_SECONDS,
                )
                worker.drain(PROJECT, group.tick_ids, run_id=f"run-{self._runs}")

    def sweep(self, actor: Actor) -> None:
        """Find what was forgotten."""
        parts = self._parts(actor)
        with suppress(LockstepError):
            sweep(parts.store, parts.dispatches, parts.queue, clock=actor.clock)

    def operate(self, actor: Actor) -> None:
        """A person puts a poisoned tick right and replays it."""
        parked = self.silver.row.parked
        if parked is None:
            return
        self.delta.poison.discard(parked)
        with suppress(LockstepError):
            operations.replay_ticks(self._parts(actor), [parked], _PERSON)

    def housekeep(self, actor: Actor) -> None:
        """What the housekeeping asset does every quarter of an hour: what is in silver is said to be DONE."""
        parts = self._parts(actor)
        with suppress(LockstepError):
            recent = parts.store.applied_since(actor.clock.now() - timedelta(days=1))
            Settler(parts.dispatches, parts.queue, actor.clock).settle(recent)

    def watch(self, actor: Actor) -> None:
        """Somebody reads which ticks are in silver."""
        store = self._parts(actor).store
        for tick in list(self.ticks.committed_ticks):
            begun = self.history.invoke(actor.name, Verb.READ, tick.tick_id, at=self.world.time.monotonic())
            try:
                there = bool(store.applied([tick.tick_id]))
            except LockstepError:
                self.history.end(begun, Outcome.INFO)
                continue
            state = "DONE" if there else "WAITING"
            self.history.end(begun, Outcome.OK, unit=tick.tick_id, state=state, terminal=there)

    def is_settled(self) -> bool:
        """Whether everything committed is in silver, said to be DONE, and no message is left."""
        whole = self.silver.row.watermark == len(self.ticks.committed_ticks)
        return whole and not self.ticks.outbox and all(self._said_done(one) for one in self.ticks.committed_ticks)

    def stores(self) -> Stores:
        """What is there in the end, as the checker reads it."""
        lane = f"silver/{PROJECT}"
        units = []
        for tick in self.ticks.committed_ticks:
            there = int(tick.sequence or 0) <= self.silver.row.watermark
            state = "DONE" if there else "WAITING"
            units.append(Unit(tick.tick_id, state, there and self._said_done(tick), key=tick.tick_id))
        effects = [Effect(lane, tick_id, fence) for tick_id, _, fence in self.delta.log]
        chain = [one.tick_id for one in self.ticks.committed_ticks]
        writes = [*self.silver.writes, *((f"{lane}/log", fence) for _, _, fence in self.delta.log)]
        return Stores(units, {lane: chain}, effects, writes)

    def _said_done(self, tick: Tick) -> bool:
        row = self.dynamo.tables[SILVER_DISPATCHED].get((tick.tick_id,), {})
        return row.get("state") == {"S": DispatchState.DONE.value}

    def _queue(self, actor: Actor) -> TickQueue:
        return TickQueue(Bound(self.world, actor, "sqs", self.sqs, lost=aws_unreachable), QUEUE)

    def _parts(self, actor: Actor) -> _Parts:
        store = _Store(self.world, actor, "silver", self.silver, lost=unreachable)
        client = Bound(self.world, actor, "dynamodb", self.dynamo, lost=aws_unreachable, plain=("exceptions",))
        queue = self._queue(actor)
        return _Parts(cast("Any", store), DispatchTable(client), queue, queue, actor.clock)


def _manifest(tick_id: str) -> dict[str, Any]:
    part = {"file_seq": 1, "sha256": "0" * 64, "bytes": 1, "rows": 1}
    table = {"name": _TABLE, "primary_key": ["id"], "columns": [{"name": "id", "type": "bigint"}], "parquets": [part]}
    return {
        "schema_version": SCHEMA_VERSION,
        "org_id": ORG,
        "project_id": PROJECT,
        "tick_id": tick_id,
        "mode": "delta",
        "dt": "20260105",
        "tables": [table],
    }
