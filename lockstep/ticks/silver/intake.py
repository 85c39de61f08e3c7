"""From messages to groups: what one pass over the queue hands to runs, and the sweep that makes lost messages anew.

What belongs here: receiving, looking into the ledger, dispatching, hiding and deleting. What does not: Dagster, which
only turns groups into runs. Messages are hints: a group is the chain that the ledger says comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LockstepError
from lockstep.kernel.logs import get_logger
from lockstep.ticks.model import Tick
from lockstep.ticks.silver import rules
from lockstep.ticks.silver.dispatch import DispatchTable
from lockstep.ticks.silver.model import DISPATCH_SECONDS, Lane
from lockstep.ticks.silver.queue import Received, TickQueue, message_of
from lockstep.ticks.silver.store import SilverStore
from lockstep.ticks.silver.worker import Settler

_log = get_logger(__name__)

MOST_MESSAGES = 100
MOST_TICKS = 50
UNREADABLE_SECONDS = 60
BUSY_SECONDS = 30


class Group(NamedTuple):
    """Ticks of one project for one run, in order. `attempt` is that of the first; above 1 it stands alone."""

    lane: Lane
    ticks: tuple[Tick, ...]
    attempt: int
    trace_id: str | None

    @property
    def tick_ids(self) -> tuple[str, ...]:
        """The list that the run is given."""
        return tuple(tick.tick_id for tick in self.ticks)


@dataclass
class Pass:
    """What one pass over the queue found and did."""

    groups: list[Group] = field(default_factory=list)
    received: int = 0
    deleted: int = 0
    waiting: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)  # projects to look at again before a message of theirs comes back
    errors: list[Exception] = field(default_factory=list)


class Intake:
    """One deployment's door from the queue to runs."""

    def __init__(
        self, store: SilverStore, dispatches: DispatchTable, queue: TickQueue, *, clock: Clock | None = None
    ) -> None:
        self._store = store
        self._dispatches = dispatches
        self._queue = queue
        self._clock = clock or SystemClock()
        self._settler = Settler(dispatches, queue, self._clock)

    def look(
        self,
        is_busy: Callable[[Lane], bool],
        also: Iterable[str] = (),
        *,
        seconds: float = 25.0,
        most: int = MOST_MESSAGES,
    ) -> Pass:
        """Receive what is there, within bounds, and dispatch what may run.

        Args:
            is_busy: Whether a run of this lane is queued or at work; then nothing is dispatched for it.
            also: Projects to look at even without a message: the `later` of the pass before. Their messages are hidden
                for minutes, but their lane may be free the moment its run ends.
            seconds: How long to go on receiving.
            most: How many messages at most.
        """
        done = Pass()
        by_project: dict[str, list[Received]] = {project: [] for project in also}
        for one in self._receive(seconds, most):
            done.received += 1
            if one.message is None:
                self._leave(done, one, one.problem or "unreadable")
            else:
                by_project.setdefault(one.message.project_id, []).append(one)
        for project_id, messages in by_project.items():
            try:
                self._project(project_id, messages, is_busy, done)
            except InvalidInput as refusal:
                for one in messages:
                    self._leave(done, one, str(refusal))
            except LockstepError as error:  # one project must not stop the others; its messages come back
                _log.error("project not looked at", project=project_id, error=str(error))
                done.errors.append(error)
                done.later.append(project_id)
        if done.errors and len(done.errors) == len(by_project):
            raise done.errors[0]
        return done

    def _receive(self, seconds: float, most: int) -> list[Received]:
        deadline = self._clock.monotonic() + seconds
        found: list[Received] = []
        while len(found) < most and self._clock.monotonic() < deadline:
            batch = self._queue.receive()
            found += batch
            if not batch:
                break
        return found

    def _project(self, project_id: str, messages: list[Received], is_busy: Callable[[Lane], bool], done: Pass) -> None:
        lane = self._store.lane(project_id)
        waiting = self._drop_finished(messages, done) if messages else []
        if is_busy(lane):
            self._hide(waiting, done, "its lane is at work", BUSY_SECONDS)
            done.later.append(project_id)
            return
        plan = self._store.plan(lane, limit=MOST_TICKS)
        crash_point("silver.intake.before_dispatch")
        group = self._dispatch(lane, plan.ready, waiting)
        crash_point("silver.intake.dispatched")
        if plan.ready:
            done.later.append(project_id)
        if group is not None:
            done.groups.append(group)
            rest = [one for one in waiting if _tick(one) not in group.tick_ids]
            self._hide(rest, done, "its turn comes later", BUSY_SECONDS)
        elif plan.why is not None:
            self._hide(waiting, done, f"the lane is {plan.why} {plan.at}".strip(), rules.HIDDEN_SECONDS)
        else:
            self._hide(waiting, done, "an attempt is under way, or its pause is not over", BUSY_SECONDS)

    def _drop_finished(self, messages: list[Received], done: Pass) -> list[Received]:
        """Delete messages of ticks that are in silver. A worker that died right after its commit gets its DONE here."""
        there = self._store.applied(_tick(one) for one in messages)
        gone = [one for one in messages if _tick(one) in there]
        self._settler.settle(there.values())
        self._queue.delete([one.receipt_handle for one in gone])
        done.deleted += len(gone)
        return [one for one in messages if one not in gone]

    def _dispatch(self, lane: Lane, ready: tuple[Tick, ...], messages: list[Received]) -> Group | None:
        now = self._clock.now()
        until = now + timedelta(seconds=DISPATCH_SECONDS)
        handles = {_tick(one): one.receipt_handle for one in messages}
        taken: list[Tick] = []
        attempts: list[int] = []
        for tick in ready:
            row = self._dispatches.take(
                tick.tick_id, lane, now=now, until=until, receipt_handle=handles.get(tick.tick_id)
            )
            if row is None:
                break
            taken.append(tick)
            attempts.append(row.attempt)
            if row.attempt > 1:
                break  # tried before: it ends its group, and begins the next one alone
        if not taken:
            return None
        trace_id = next((one.trace_id for one in messages if one.trace_id), None)
        return Group(lane, tuple(taken), attempts[0], trace_id)

    def _leave(self, done: Pass, one: Received, problem: str) -> None:
        """Not ours to delete: after its last receive SQS moves it to the dead letters, where people see it."""
        _log.error("message not understood", message=one.message_id, problem=problem)
        done.waiting.append(f"{one.message_id}: {problem}")
        self._queue.hide([one.receipt_handle], UNREADABLE_SECONDS)

    def _hide(self, messages: list[Received], done: Pass, why: str, base: int) -> None:
        for one in messages:
            done.waiting.append(f"{_tick(one)}: {why}")
            self._queue.hide([one.receipt_handle], rules.hidden_seconds(one.receives, base))


class Swept(NamedTuple):
    """What a sweep found: lanes that nobody seems to work on, and the ticks whose messages were made anew."""

    lanes: int
    enqueued: tuple[str, ...]


def sweep(
    store: SilverStore,
    dispatches: DispatchTable,
    queue: TickQueue,
    *,
    clock: Clock,
    older_than: timedelta = timedelta(minutes=2),
    again_after: timedelta = timedelta(minutes=2),
    most_lanes: int = 100,
    ticks_per_lane: int = 10,
) -> Swept:
    """Find every committed tick that is not in silver and has no live dispatch, and enqueue it again.

    Bounded: at most `most_lanes` lanes and `ticks_per_lane` ticks of each, the first ones; a run takes the whole chain
    anyway. A lane is not hinted at again before `again_after`, whoever sweeps. Parked lanes wait for a person.
    """
    now = clock.now()
    lanes = store.forgotten(committed=now - older_than, now=now, again_after=again_after, limit=most_lanes)
    enqueued: list[str] = []
    for lane in lanes:
        ready = store.plan(lane, limit=ticks_per_lane).ready
        rows = dispatches.get_all((tick.tick_id for tick in ready), now)
        lost = [tick for tick in ready if rules.may_take(rows.get(tick.tick_id), lane.generation, now)]
        if lost[:1] != list(ready[:1]) or not store.may_hint(lane, now=now, again_after=again_after):
            continue  # somebody is at its first tick, or another sweeper was quicker
        queue.send([message_of(tick, now) for tick in lost])
        enqueued += [tick.tick_id for tick in lost]
    return Swept(len(lanes), tuple(enqueued))


def _tick(received: Received) -> str:
    return received.message.tick_id if received.message is not None else ""
