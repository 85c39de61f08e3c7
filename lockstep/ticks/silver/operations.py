"""What a person may do to silver and its queue: replay, skip, status, reconcile, redrive. All audited.

What belongs here: checks before a deed, the deed, the audit row. What does not: words for the terminal
(operations_cli.py), what is forgotten (retention.py), and clients, which are given. None of these can lose or double a
tick: the ledger decides. Only a skip leaves one out, and it is kept on record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

from lockstep.kernel.clock import Clock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput
from lockstep.ticks.model import Tick
from lockstep.ticks.silver.dispatch import DispatchTable
from lockstep.ticks.silver.intake import Swept, sweep
from lockstep.ticks.silver.model import DispatchState, Lane
from lockstep.ticks.silver.queue import Depth, Received, TickQueue, message_of
from lockstep.ticks.silver.store import Actor, Backlog, SilverStore, Skipped

_MOST_DEAD = 1000


class Parts(Protocol):
    """What silver works with, opened; see resources/silver.py."""

    @property
    def store(self) -> SilverStore:
        """The ledger."""

    @property
    def dispatches(self) -> DispatchTable:
        """Who works on what."""

    @property
    def queue(self) -> TickQueue:
        """The work queue."""

    @property
    def dead_letters(self) -> TickQueue:
        """What was given up."""

    @property
    def clock(self) -> Clock:
        """The time."""

    def keeps_bronze_of(self, tick: Tick) -> bool:
        """Whether the tick can still be read as it was committed."""


class Status(NamedTuple):
    """The way from bronze to silver at a glance."""

    queue: Depth
    dead: Depth
    lag_seconds: float
    waiting_ticks: int
    lanes: tuple[Backlog, ...]
    skipped: tuple[Skipped, ...]


class Redriven(NamedTuple):
    """What became of the dead letters."""

    sent: tuple[str, ...]
    finished: tuple[str, ...]
    unreadable: int


def replay_ticks(
    parts: Parts, tick_ids: Sequence[str], actor: Actor, *, enqueue: bool = True, named: bool = True
) -> list[Lane]:
    """Let these ticks, and because order is kept every later one of their projects, be applied again.

    Each project's lane goes back to its earliest tick of the list, in a new generation, in one transaction with the
    audit; then the tick is enqueued, unless the caller applies it itself. A death before the message is mended by the
    sweep. Data is not touched here. A skipped tick that somebody `named` is applied too; others stay skipped.

    Raises:
        InvalidInput: A tick is not committed, or its commit is no longer kept: the lane would go back to it and stay
            there. Nothing was changed.
    """
    _want_reason(actor)
    found = {tick_id: parts.store.ticks.committed(tick_id) for tick_id in tick_ids}
    unknown = sorted(tick_id for tick_id, tick in found.items() if tick is None)
    if unknown or not found:
        raise InvalidInput("only committed ticks can be replayed.", problems=unknown or ["no tick was found"])
    first = earliest(tick for tick in found.values() if tick is not None)
    gone = [tick.tick_id for tick in first if not parts.keeps_bronze_of(tick)]
    if gone:
        raise InvalidInput(
            "bronze no longer keeps the commits of these ticks.",
            problems=gone,
            next_step="replay from a later one, or write them again first: materialize them in bronze_ticks.",
        )
    lifted = tuple(found) if named else ()
    return [_replay(parts, tick, actor, lifted, enqueue=enqueue) for tick in first]


def skip_tick(parts: Parts, tick_id: str, actor: Actor, *, accept_gap: bool) -> Lane:
    """Let a project go on without the tick that stopped it. Silver lacks its rows then, on record.

    The decision, the audit and the end of the stop are one transaction; then the tick is enqueued. The worker that gets
    it takes back what attempts at it left in silver, moves the watermark over it and goes on with the ticks behind it.

    Raises:
        InvalidInput: The gap is not accepted, or the tick stops nothing. Nothing was changed.
    """
    if not accept_gap:
        raise InvalidInput(
            "skipping leaves silver without the rows of that tick.", unit=tick_id, next_step="say --accept-gap if so."
        )
    _want_reason(actor)
    tick = parts.store.ticks.committed(tick_id)
    lane = parts.store.lane(tick.project_id) if tick is not None else None
    if tick is None or lane is None or lane.parked != tick_id:
        raise InvalidInput(
            "only a tick that stops its project can be skipped.",
            unit=tick_id,
            next_step=f"the project is stopped by {lane.parked}."
            if lane is not None and lane.parked
            else "see `lockstep ticks status` for parked ticks.",
        )
    lane = parts.store.skip(lane, tick, actor)
    crash_point("silver.skip.recorded")
    parts.queue.send([message_of(tick, parts.clock.now())])
    return lane


def _want_reason(actor: Actor) -> None:
    if not actor.reason.strip():
        raise InvalidInput("a reason is needed: it is kept in the audit.", next_step="give --reason.")


def ticks_between(
    parts: Parts, start: datetime | None, end: datetime | None, *, project_id: str | None = None
) -> list[str]:
    """The first tick of each project, or of one, that bronze committed in that stretch.

    Raises:
        InvalidInput: There is none.
    """
    found = parts.store.first_committed(start, end, project_id=project_id)
    if not found:
        raise InvalidInput("no tick was committed then.", next_step="see `lockstep ticks status`, widen the range.")
    return found


def instant(text: str | None) -> datetime | None:
    """A day or an instant as a person writes it; without a zone it is UTC. Raises `InvalidInput`."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no instant.", next_step="write 2026-05-07 or 2026-05-07T12:00:00Z.") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def earliest(ticks: Iterable[Tick]) -> list[Tick]:
    """The first tick of each project."""
    first: dict[str, Tick] = {}
    for tick in ticks:
        known = first.get(tick.project_id)
        if known is None or (tick.sequence or 0) < (known.sequence or 0):
            first[tick.project_id] = tick
    return [first[project] for project in sorted(first)]


def _replay(parts: Parts, tick: Tick, actor: Actor, no_longer_skipped: Sequence[str], *, enqueue: bool) -> Lane:
    lane = parts.store.lane(tick.project_id)
    lane = parts.store.rewind(lane, tick, actor, no_longer_skipped=no_longer_skipped)
    crash_point("silver.replay.rewound")
    if enqueue:
        nearest = parts.store.plan(lane, limit=1).ready
        parts.queue.send([message_of(one, parts.clock.now()) for one in nearest])
    return lane


def status(parts: Parts, *, limit: int = 50) -> Status:
    """Depths of both queues, every lane that is behind, the one that waits longest first, and what was skipped."""
    lanes = parts.store.backlog(limit=limit)
    now = parts.clock.now()
    lag = max(((now - one.oldest).total_seconds() for one in lanes if one.oldest is not None), default=0.0)
    return Status(
        queue=parts.queue.depth(),
        dead=parts.dead_letters.depth(),
        lag_seconds=max(0.0, lag),
        waiting_ticks=sum(one.waiting for one in lanes),
        lanes=tuple(lanes),
        skipped=tuple(parts.store.skipped(limit=limit)),
    )


class Reconciled(NamedTuple):
    """What a reconciliation found and did."""

    swept: Swept
    not_said: tuple[str, ...]
    parked: tuple[str, ...]


def reconcile(parts: Parts, actor: Actor, *, since: timedelta = timedelta(days=1)) -> Reconciled:
    """Make the control plane agree with the ledger: enqueue what is committed and not in silver, at once.

    Ticks that are in silver and are not DONE in DynamoDB are enqueued too: a worker says DONE for them.
    """
    now = parts.clock.now()
    swept = sweep(
        parts.store,
        parts.dispatches,
        parts.queue,
        clock=parts.clock,
        older_than=timedelta(0),
        again_after=timedelta(0),
        most_lanes=10_000,
        ticks_per_lane=100,
    )
    unsaid = not_said(parts, now - since)
    found = [parts.store.ticks.committed(tick_id) for tick_id in unsaid]
    parts.queue.send([message_of(tick, now) for tick in found if tick is not None])
    parked = tuple(lane.parked for lane in parts.store.behind() if lane.parked is not None)
    details: dict[str, Any] = {"enqueued": len(swept.enqueued), "not_said": len(unsaid), "parked": list(parked)}
    parts.store.audit(actor, "ticks-reconcile", "silver", details)
    return Reconciled(swept, unsaid, parked)


def not_said(parts: Parts, since: datetime) -> tuple[str, ...]:
    """Ticks that are in silver since then and whose DONE is missing: their worker died just before it."""
    applied = {one.tick_id: one for one in parts.store.applied_since(since)}
    rows = parts.dispatches.get_all(applied, parts.clock.now())
    return tuple(
        tick_id
        for tick_id, one in sorted(applied.items())
        if (row := rows.get(tick_id)) is None or row.state is not DispatchState.DONE or row.generation < one.generation
    )


def redrive(parts: Parts, actor: Actor, *, most: int = _MOST_DEAD) -> Redriven:
    """Give dead letters another life: those of finished ticks are dropped, the others go back to the queue.

    A message is deleted from the dead letters only after the queue has it. What cannot be read stays where it is.
    """
    sent: list[str] = []
    finished: list[str] = []
    unreadable = 0
    while len(sent) + len(finished) + unreadable < most and (batch := parts.dead_letters.receive(hidden=120)):
        mine = [one for one in batch if one.message is not None]
        unreadable += len(batch) - len(mine)
        there = parts.store.applied(one.message.tick_id for one in mine if one.message)
        again = [one for one in mine if one.message and one.message.tick_id not in there]
        parts.queue.send_again(again)
        crash_point("silver.redrive.sent")
        parts.dead_letters.delete([one.receipt_handle for one in mine])
        sent += _names(again)
        finished += _names(one for one in mine if one not in again)
    details = {"sent": len(sent), "finished": len(finished), "unreadable": unreadable}
    parts.store.audit(actor, "ticks-redrive-dlq", parts.dead_letters.name, details)
    return Redriven(tuple(sent), tuple(finished), unreadable)


def _names(received: Iterable[Received]) -> list[str]:
    return [one.message.tick_id for one in received if one.message is not None]
