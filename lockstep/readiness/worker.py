"""The driver: finds what is due, steps it, writes, then carries the actions out, in that order, within bounds.

What belongs here: the order of I/O. What does not: any decision (rules.py). Any number of drivers may run: a write that
comes second is lost, and its driver lets go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import NamedTuple

from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LostClaim
from lockstep.kernel.logs import get_logger
from lockstep.readiness import rules, timing
from lockstep.readiness.evaluators.runner import GRACE_SECONDS
from lockstep.readiness.model import (
    FACTS,
    Action,
    CancelAnswered,
    CancelRun,
    Delivered,
    Emit,
    Evaluate,
    Evaluated,
    Event,
    Execution,
    Fact,
    IllegalTransition,
    Key,
    LateData,
    Plan,
    Polled,
    PollRun,
    Reason,
    Started,
    StartFailed,
    StartRun,
    StartUnknown,
    Step,
    Tick,
    TraitResult,
    Woken,
)
from lockstep.readiness.plane import Plane
from lockstep.readiness.store import Marker, Registered, slot_key

LATE_DATA = "late-data"
READ_ALL_SECONDS = 300.0
_MOST_EVENTS_PER_EXECUTION = 16
_ANSWERS = (Started, StartFailed, StartUnknown, Polled, CancelAnswered, Delivered)

_log = get_logger(__name__)

Traits = Mapping[str, TraitResult]


@dataclass(frozen=True)
class Limits:
    """Bounds of one tick."""

    seconds: float = 40.0
    executions: int = 2000
    threads: int = 8
    lookback_days: int = 1


@dataclass
class Report:
    """What a tick did."""

    looked_at: int = 0
    stepped: int = 0
    opened: int = 0
    left_over: int = 0
    refused: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    moved: list[tuple[Execution, Execution]] = field(default_factory=list)


class _Work(NamedTuple):
    """An execution to step. One that is not `known` must be opened first, over `old` if there is one."""

    key: Key
    plan: Plan
    events: tuple[Event, ...]
    markers: list[Marker]
    waiting_since: datetime
    known: Execution | None = None
    old: Execution | None = None
    stored: Traits | None = None


class _Outcome(NamedTuple):
    """What came of one piece of work. Made by a thread, read by the tick, or by the next one if it came late."""

    key: Key
    settled: bool  # whether its markers have been heard
    opened: bool = False
    stepped: bool = False
    moved: tuple[Execution, Execution] | None = None
    refused: str | None = None
    failure: str | None = None


class Driver:
    """Steps executions. One tick at a time per driver; any number of drivers."""

    def __init__(self, plane: Plane, limits: Limits | None = None) -> None:
        self._plane = plane
        self._store = plane.store
        self._clock = plane.clock
        self._limits = limits or Limits()
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._busy: set[Key] = set()
        self._opened: set[Key] = set()
        self._read_all_at = 0.0

    # --- a tick ------------------------------------------------------------------------------------------------

    def tick(self, markers: Collection[Marker] = (), until: float | None = None) -> Report:
        """Look at everything that is due: schedules, open executions and these markers.

        Bounded in number, and in time by `until`, an instant of the monotonic clock. What an evaluator or a trigger
        has not answered by then goes on in its thread; its execution is left to it, and the next tick reports it.
        """
        deadline = self._clock.monotonic() + self._limits.seconds if until is None else until
        report, now, plans = Report(), self._clock.now(), self._plans(markers)
        wanted, due = self._wanted(plans, markers, now, report)
        states = self._store.load_many({key: plans[key.pipeline] for key in wanted}, now)
        self._opened |= {key for key in due if key in states and not _is_rehearsal(states[key])}
        busy = frozenset(self._busy)
        self._collect(report)  # what threads of earlier ticks have found; who is not busy now has told it by now
        idle = {key: asking for key, asking in wanted.items() if key not in busy}
        work = self._prepare(idle, due, states, plans, now)
        self._work_through(work[: self._limits.executions], deadline)
        outcomes = self._collect(report)
        asked = {entry.key for entry in work}
        report.looked_at, report.left_over = len(wanted), len(asked - outcomes.keys())
        heard = {key for key in asked & outcomes.keys() if outcomes[key].settled}
        self._settle(markers, heard | (idle.keys() - asked), plans)
        self._store.beat("driver", now, timedelta(days=1))
        return report

    def sweep(self, start: int, most: int, until: float | None = None) -> tuple[list[Marker], int]:
        """Markers that the stream never told, of some pipelines at a time; returns also where to go on.

        One that cannot be read is refused in the pipeline's event log and taken away: it must not stop the others.
        """
        names, now = sorted(self._plane.plans()), self._clock.now()
        found: list[Marker] = []
        for offset in range(min(most, len(names))):
            if until is not None and self._clock.monotonic() >= until:
                return found, start + offset
            name = names[(start + offset) % len(names)]
            swept = self._store.markers(name, now)
            found += swept.markers
            for sort_key, words in swept.unreadable.items():
                _log.warning("marker refused", pipeline=name, marker=sort_key, reason=words)
                self._store.refuse_marker(name, sort_key, words, now)
        return found, (start + min(most, len(names))) % max(1, len(names))

    def _plans(self, markers: Collection[Marker]) -> Mapping[str, Plan]:
        """All plans. One that only a marker knows may be seconds old: it is asked for before it is called unknown."""
        plans = self._plane.plans()
        unknown = {marker.key.pipeline for marker in markers} - plans.keys()
        found = {name: plan for name in sorted(unknown) if (plan := self._plane.plan(name)) is not None}
        return {**plans, **found} if found else plans

    def _wanted(
        self, plans: Mapping[str, Plan], markers: Collection[Marker], now: datetime, report: Report
    ) -> tuple[dict[Key, list[Marker]], dict[Key, Plan]]:
        """Every execution worth a look with the markers that ask for it; and those that the schedules want."""
        entries = {entry.pipeline: entry for entry in self._store.registered(now)}
        due = self._due(plans, entries, now)
        # An execution that was seen opened is looked at for as long as the index has it as open, and not by its date:
        # a thousand hourly pipelines have 24,000 rows a day that nobody needs to read. The index is a hint, so
        # every few minutes all rows are read.
        self._opened &= due.keys()
        if self._clock.monotonic() - self._read_all_at >= READ_ALL_SECONDS:
            self._opened, self._read_all_at = set(), self._clock.monotonic()
        wanted: dict[Key, list[Marker]] = {key: [] for key in due if key not in self._opened}
        for name, entry in entries.items():
            for slot in sorted(entry.open) if name in plans else ():
                wanted.setdefault(slot_key(name, slot), [])
        for marker in markers:
            if marker.key.pipeline in plans:
                wanted.setdefault(marker.key, []).append(marker)
            else:
                self._refuse(marker.key, f"{marker.key}: there is no such pipeline", report)
        return wanted, due

    def _due(self, plans: Mapping[str, Plan], entries: Mapping[str, Registered], now: datetime) -> dict[Key, Plan]:
        due: dict[Key, Plan] = {}
        for plan in plans.values():
            if plan.watched:
                entry = entries.get(plan.pipeline)
                since = entry.since if entry is not None and entry.since else timing.first_starts(plan, now)
                due |= dict.fromkeys(timing.due_keys(plan, now, self._limits.lookback_days, since), plan)
        return due

    def _prepare(
        self,
        wanted: Mapping[Key, list[Marker]],
        due: Collection[Key],
        states: Mapping[Key, Execution],
        plans: Mapping[str, Plan],
        now: datetime,
    ) -> list[_Work]:
        """What must be stepped, the longest waiting first; stored answers are fetched for all of them together."""
        todo: list[_Work] = []
        for key, markers in wanted.items():
            state, events = states.get(key), (*_marker_events(markers, key, now), Tick())
            if state is None or _is_rehearsal(state):
                if markers or key in due:  # else a stale hint of the index
                    since = _asked_since(plans[key.pipeline], key, markers)
                    todo.append(_Work(key, plans[key.pipeline], events, markers, since, old=state))
            elif self._has_work(state, events, now):
                todo.append(_Work(key, state.plan, events, markers, state.next_at or state.opened_at, known=state))
        todo.sort(key=lambda entry: entry.waiting_since)
        asked = (entry.known for entry in todo if entry.known is not None and _will_evaluate(entry.known))
        types = {state.key: [trait.type for trait in state.plan.traits] for state in asked}
        stored = self._store.traits_many(types, now) if types else {}
        return [entry._replace(stored=stored.get(entry.key)) for entry in todo]

    def _has_work(self, state: Execution, events: tuple[Event, ...], now: datetime) -> bool:
        for event in events:
            after, effects = rules.step(state, event, now)
            if after is not state or effects:
                return True
        return False

    def _work_through(self, work: list[_Work], deadline: float) -> None:
        if self._limits.threads <= 1:
            for entry in work:
                if self._clock.monotonic() < deadline:
                    self._one(entry)
            return
        pool = ThreadPoolExecutor(self._limits.threads, thread_name_prefix="readiness")
        waiting = [pool.submit(self._one, entry) for entry in work]
        wait(waiting, timeout=max(0.0, deadline - self._clock.monotonic()))
        # What has begun goes on; a hanging evaluator must not hold the tick, nor the threads of the next one.
        pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, entry: _Work) -> None:
        self._busy.add(entry.key)
        try:
            self._outcomes.put(self._outcome(entry))
        finally:
            self._busy.discard(entry.key)

    def _outcome(self, entry: _Work) -> _Outcome:
        try:
            return self._step(entry)
        except LostClaim:
            return _Outcome(entry.key, settled=False)  # another driver has it; the markers are still to be heard
        except Exception as error:
            # One pipeline's trouble stays its own; the tick tells it in its report and in the log.
            _log.error("execution not stepped", execution=str(entry.key), error=str(error))
            return _Outcome(entry.key, settled=False, failure=f"{type(error).__name__}: {error}"[:300])

    def _step(self, entry: _Work) -> _Outcome:
        state = entry.known
        if state is None:
            try:
                state = self._open(entry)
            except IllegalTransition as refusal:
                self._store.append(entry.key, Emit("MARKER_REFUSED", str(refusal)), self._clock.now())
                return _Outcome(entry.key, settled=True, refused=str(refusal))
        after = self.drive(state, entry.events, entry.stored)
        moved = (state, after) if after.version != state.version else None
        return _Outcome(entry.key, settled=True, opened=entry.known is None, stepped=True, moved=moved)

    def _open(self, entry: _Work) -> Execution:
        now, reason = self._clock.now(), Reason.MARKER if entry.markers else Reason.SCHEDULE
        delays = [marker.not_before for marker in entry.markers]
        # One marker that asks for no delay goes before others that do.
        not_before = min((moment for moment in delays if moment), default=None) if all(delays) else None
        state, effects = rules.open_execution(entry.plan, entry.key, now, reason, not_before)
        return self._store.commit(entry.old, state, [fact for fact in effects if isinstance(fact, FACTS)], now)

    def _collect(self, report: Report) -> dict[Key, _Outcome]:
        """Put what the threads have found so far into the report."""
        outcomes: dict[Key, _Outcome] = {}
        for _ in range(self._outcomes.qsize()):
            outcome = self._outcomes.get_nowait()
            outcomes[outcome.key] = outcome
            report.stepped += outcome.stepped
            report.opened += outcome.opened
            if outcome.moved is not None:
                report.moved.append(outcome.moved)
            if outcome.refused is not None:
                report.refused.append(outcome.refused)
            if outcome.failure is not None:
                report.failures[str(outcome.key)] = outcome.failure
        return outcomes

    def _settle(self, markers: Collection[Marker], settled: Collection[Key], plans: Mapping[str, Plan]) -> None:
        """Take away the markers that were heard. The others stay, and the sweep brings them again."""
        for marker in markers:
            if marker.key in settled or marker.key.pipeline not in plans:
                self._store.drop_marker(marker)

    def _refuse(self, key: Key, words: str, report: Report) -> None:
        """Say aloud that a marker leads to nothing, where whoever made it will look."""
        report.refused.append(words)
        self._store.append(key, Emit("MARKER_REFUSED", words), self._clock.now())

    # --- one execution -----------------------------------------------------------------------------------------

    def drive(self, state: Execution, events: Iterable[Event], stored: Traits | None = None) -> Execution:
        """Apply the events, and what their actions answer, until nothing is left to do now.

        Raises:
            LostClaim: Another driver moved the execution meanwhile.
            IllegalTransition: A request did not fit the state.
        """
        todo = deque(events)
        for _ in range(_MOST_EVENTS_PER_EXECUTION):
            if not todo:
                break
            state, actions = self._apply(state, todo.popleft())
            todo.extend(self._answers(state, actions, stored))
        return state

    def request(self, state: Execution, event: Event, then: Iterable[Event] = ()) -> Execution:
        """Apply one request, then carry on as far as possible now.

        Raises:
            LostClaim: The request itself was not written; nothing happened. Once it is, losing the execution to
                another driver is no failure: that one carries on.
        """
        state, actions = self._apply(state, event)
        try:
            return self.drive(state, [*self._answers(state, actions, None), *then])
        except LostClaim:
            return self._store.load(state.key, state.plan, self._clock.now()) or state

    def _answers(self, state: Execution, actions: Iterable[Action], stored: Traits | None) -> list[Event]:
        answers = (self._act(state, action, stored) for action in actions)
        return [answer for answer in answers if answer is not None]

    def _apply(self, state: Execution, event: Event) -> tuple[Execution, list[Action]]:
        """Step and write. An answer about something already done is not lost with the write: it is applied anew."""
        for last in (False, False, True):
            now = self._clock.now()
            try:
                after, actions = self._commit(state, rules.step(state, event, now), now)
                self._show(state, after, now)
                return after, actions
            except LostClaim:
                if last or not isinstance(event, _ANSWERS):
                    raise
                state = self._store.load(state.key, state.plan, now) or state
        raise AssertionError("unreachable: the last round returns or raises")

    def _show(self, before: Execution, after: Execution, now: datetime) -> None:
        """Refresh what people see when the verdict is a new one."""
        new = after.readiness
        if new is not None and (before.readiness is None or before.readiness.signature != new.signature):
            self._store.put_readiness(after.key, new, now)

    def _commit(self, before: Execution, step: Step, now: datetime) -> tuple[Execution, list[Action]]:
        facts: list[Fact] = [effect for effect in step.effects if isinstance(effect, FACTS)]
        actions: list[Action] = [effect for effect in step.effects if not isinstance(effect, FACTS)]
        if step.state is before and not facts:
            return before, actions
        return self._store.commit(before, step.state, facts, now), actions

    def _act(self, state: Execution, action: Action, stored: Traits | None) -> Event | None:
        if isinstance(action, Evaluate):
            return self._evaluate(state, action, stored)
        if isinstance(action, StartRun):
            crash_point("readiness.start.before")
            answer = self._plane.triggers.start(state, resume=action.resume)
            crash_point("readiness.start.after")
            return answer
        if isinstance(action, PollRun):
            return self._plane.triggers.status(state, action.run_id, action.handle)
        if isinstance(action, CancelRun):
            return CancelAnswered(action.run_id, self._plane.triggers.cancel(state, action.run_id, action.handle))
        crash_point("readiness.alert.before")
        delivered = self._plane.dispatcher.dispatch(action.alerts)
        crash_point("readiness.alert.after")
        return Delivered(delivered) if delivered else None

    def _evaluate(self, state: Execution, action: Evaluate, stored: Traits | None) -> Event | None:
        """Ask what must be asked. The lock only saves double work: the write afterwards decides by version."""
        now = self._clock.now()
        if stored is None:
            stored = self._store.traits(state.key.pipeline, state.key, [one.type for one in state.plan.traits], now)
        if self._plane.runner.is_answered(state, stored):
            return Evaluated(action.run_id, self._plane.runner.evaluate(state, stored))
        name, owner = f"eval:{state.key.pipeline}:{state.key.schedule}", self._plane.ids.new_id()
        slowest = max((trait.timeout for trait in state.plan.traits), default=0)
        if not self._store.acquire(name, owner, timedelta(seconds=slowest + GRACE_SECONDS + 30), now):
            return None  # somebody is asking at this moment
        try:
            crash_point("readiness.evaluate.before")
            results = self._plane.runner.evaluate(state, stored)
            crash_point("readiness.evaluate.after")
            asked = [result for result in results if not result.pushed and stored.get(result.trait) is not result]
            self._store.put_traits(state.key.pipeline, state.key, asked, now)
        finally:
            self._store.release(name, owner)
        return Evaluated(action.run_id, results)


def _marker_events(markers: list[Marker], key: Key, now: datetime) -> tuple[Event, ...]:
    events: list[Event] = []
    for marker in markers:
        if marker.source.startswith(LATE_DATA):
            at = marker.at or now
            late = f"late-{key.pipeline}-{key.date}-{key.schedule}-{at.isoformat()}"
            events.append(LateData(late, marker.source, at))
        events.append(Woken(marker.source, marker.not_before))
    return tuple(events)


def _asked_since(plan: Plan, key: Key, markers: list[Marker]) -> datetime:
    """When an execution that is not open yet was asked for; its queue place."""
    if markers:
        return min(marker.at or datetime.min.replace(tzinfo=UTC) for marker in markers)
    schedule = plan.schedule(key.schedule)
    return timing.activation(schedule, key.date) if schedule else datetime.min.replace(tzinfo=UTC)


def _is_rehearsal(state: Execution) -> bool:
    """A finished dry run of a pipeline that is real by now: its date has not run yet."""
    return state.dry_run and not state.plan.dry_run and state.status.is_terminal


def _will_evaluate(state: Execution) -> bool:
    return not state.status.is_terminal and not state.status.is_live
