"""The driver: finds what is due, steps it, writes, then carries the actions out, in that order, within bounds.

What belongs here: the order of I/O. What does not: any decision (rules.py). Any number of drivers may run: a write that
comes second is lost, and its driver lets go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
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
from lockstep.readiness.store import Marker, slot_key

LATE_DATA = "late-data"
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
    known: Execution | None = None
    old: Execution | None = None
    stored: Traits | None = None

    @property
    def waiting_since(self) -> datetime:
        """The longest waiting goes first; what was never looked at goes before all others."""
        state = self.known
        return datetime.min.replace(tzinfo=UTC) if state is None else state.next_at or state.opened_at


class Driver:
    """Steps executions."""

    def __init__(self, plane: Plane, limits: Limits | None = None) -> None:
        self._plane = plane
        self._store = plane.store
        self._clock = plane.clock
        self._limits = limits or Limits()

    # --- a tick ------------------------------------------------------------------------------------------------

    def tick(self, markers: Collection[Marker] = ()) -> Report:
        """Look at everything that is due: schedules, open executions and these markers. Bounded in time and number."""
        deadline = self._clock.monotonic() + self._limits.seconds
        report, now, plans = Report(), self._clock.now(), self._plane.plans()
        wanted = self._wanted(plans, markers, now, report)
        states = self._store.load_many({key: plans[key.pipeline] for key in wanted}, now)
        work = self._prepare(wanted, states, plans, now, report)
        report.left_over = max(0, len(work) - self._limits.executions)
        self._work_through(work[: self._limits.executions], deadline, report)
        for marker in markers:
            if str(marker.key) not in report.failures:
                self._store.drop_marker(marker)
        self._store.beat("driver", now, timedelta(days=1))
        return report

    def _wanted(
        self, plans: Mapping[str, Plan], markers: Collection[Marker], now: datetime, report: Report
    ) -> dict[Key, list[Marker]]:
        """Every execution worth a look, and the markers that ask for it."""
        wanted: dict[Key, list[Marker]] = {}
        for plan in plans.values():
            if plan.watched:
                for key in timing.due_keys(plan, now, self._limits.lookback_days):
                    wanted[key] = []
        for entry in self._store.registered(now):
            for slot in entry.open if entry.pipeline in plans else ():
                wanted.setdefault(slot_key(entry.pipeline, slot), [])
        for marker in markers:
            if marker.key.pipeline in plans:
                wanted.setdefault(marker.key, []).append(marker)
            else:
                report.refused.append(f"{marker.key}: there is no such pipeline")
        return wanted

    def _prepare(
        self,
        wanted: Mapping[Key, list[Marker]],
        states: Mapping[Key, Execution],
        plans: Mapping[str, Plan],
        now: datetime,
        report: Report,
    ) -> list[_Work]:
        """What must be stepped, the longest waiting first; stored answers are fetched for all of them together."""
        todo: list[_Work] = []
        for key, markers in wanted.items():
            report.looked_at += 1
            state, events = states.get(key), (*_marker_events(markers, key), Tick())
            if state is None or _is_rehearsal(state):
                if markers or self._is_due(plans[key.pipeline], key, now):  # else a stale hint of the index
                    todo.append(_Work(key, plans[key.pipeline], events, markers, old=state))
            elif self._has_work(state, events, now):
                todo.append(_Work(key, state.plan, events, markers, known=state))
        todo.sort(key=lambda entry: entry.waiting_since)
        asked = (entry.known for entry in todo if entry.known is not None and _will_evaluate(entry.known))
        types = {state.key: [trait.type for trait in state.plan.traits] for state in asked}
        stored = self._store.traits_many(types, now) if types else {}
        return [entry._replace(stored=stored.get(entry.key)) for entry in todo]

    def _is_due(self, plan: Plan, key: Key, now: datetime) -> bool:
        schedule = plan.schedule(key.schedule)
        if schedule is None or not plan.watched or plan.exclusions.excludes(key.date):
            return False
        oldest = timing.local_date(now, schedule.timezone) - timedelta(days=self._limits.lookback_days)
        return key.date >= oldest and timing.activation(schedule, key.date) <= now

    def _open(self, entry: _Work, report: Report) -> Execution | None:
        now, reason = self._clock.now(), Reason.MARKER if entry.markers else Reason.SCHEDULE
        try:
            state, facts = rules.open_execution(entry.plan, entry.key, now, reason)
        except IllegalTransition as refusal:
            report.refused.append(str(refusal))
            self._store.append(entry.key, Emit("MARKER_REFUSED", str(refusal)), now)
            return None
        opened = self._store.commit(entry.old, state, [fact for fact in facts if isinstance(fact, FACTS)], now)
        report.opened += 1
        return opened

    def _has_work(self, state: Execution, events: tuple[Event, ...], now: datetime) -> bool:
        for event in events:
            after, effects = rules.step(state, event, now)
            if after is not state or effects:
                return True
        return False

    def _work_through(self, work: list[_Work], deadline: float, report: Report) -> None:
        def one(entry: _Work) -> None:
            if self._clock.monotonic() >= deadline:
                report.left_over += 1
                return
            try:
                state = entry.known or self._open(entry, report)
                if state is None:
                    return
                after = self.drive(state, entry.events, entry.stored)
                report.stepped += 1
                if after.version != state.version:
                    report.moved.append((state, after))
            except LostClaim:
                return  # another driver has it
            except Exception as error:
                self._note_failure(entry.key, error, report)

        if self._limits.threads <= 1 or len(work) <= 1:
            for entry in work:
                one(entry)
            return
        with ThreadPoolExecutor(self._limits.threads, thread_name_prefix="readiness") as pool:
            for _ in pool.map(one, work):
                continue

    def _note_failure(self, key: Key, error: Exception, report: Report) -> None:
        # One pipeline's trouble stays its own; the tick tells it in its report and in the log.
        report.failures[str(key)] = f"{type(error).__name__}: {error}"[:300]
        _log.error("execution not stepped", execution=str(key), error=str(error))

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


def _marker_events(markers: list[Marker], key: Key) -> tuple[Event, ...]:
    events: list[Event] = []
    for marker in markers:
        if marker.source.startswith(LATE_DATA):
            when = marker.at.isoformat() if marker.at else ""
            events.append(LateData(f"late-{key.pipeline}-{key.date}-{key.schedule}-{when}", marker.source))
        events.append(Woken(marker.source, marker.not_before))
    return tuple(events)


def _is_rehearsal(state: Execution) -> bool:
    """A finished dry run of a pipeline that is real by now: its date has not run yet."""
    return state.dry_run and not state.plan.dry_run and state.status.is_terminal


def _will_evaluate(state: Execution) -> bool:
    return not state.status.is_terminal and not state.status.is_live
