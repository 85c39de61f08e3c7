"""What people and programs may ask of the readiness plane: look, run, rerun, replay, backfill, cancel, report, push.

What belongs here: requests on named executions, the same for HTTP, command line and Dagster. What does not: the words
of those doors, and any rule (rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple

from lockstep.kernel.errors import InvalidInput, LockstepError, LostClaim
from lockstep.readiness import rules, timing, verdict
from lockstep.readiness.model import (
    FACTS,
    Callback,
    CancelRequested,
    Category,
    Emit,
    Evaluated,
    Event,
    Execution,
    IllegalTransition,
    Key,
    Plan,
    Readiness,
    Reason,
    RerunRequested,
    RunStatus,
    Tick,
    TraitResult,
    TraitStatus,
    Woken,
)
from lockstep.readiness.plane import Plane
from lockstep.readiness.store import Marker, slot_key
from lockstep.readiness.worker import Driver

DEFAULT_PUSH_TTL = timedelta(hours=1)
LONGEST_BACKFILL = 366
_TRIES = 3


class NotReady(LockstepError):
    """The pipeline was asked to run and is not ready; the wish is kept and it runs when it is."""

    def __init__(self, state: Execution) -> None:
        self.state = state
        blocking = state.readiness.blocking if state.readiness else ()
        super().__init__(
            f"not ready: {', '.join(blocking) or 'not evaluated yet'}.",
            unit=str(state.key),
            next_step="it runs by itself as soon as it is ready.",
        )

    @property
    def blocking(self) -> tuple[str, ...]:
        """The traits in the way."""
        return self.state.readiness.blocking if self.state.readiness else ()


class NotFound(LockstepError):
    """There is no such thing."""


class Backfilled(NamedTuple):
    """What a backfill accepted, and what it left out, with the reason."""

    opened: tuple[Key, ...]
    skipped: Mapping[str, str]


class Rehearsal(NamedTuple):
    """What would become of an execution, and the events that it would leave behind."""

    state: Execution
    events: tuple[Emit, ...]


class Control:
    """Requests. Thread-safe."""

    def __init__(self, plane: Plane, driver: Driver) -> None:
        self.store = plane.store
        self._plane = plane
        self._driver = driver
        self._clock = plane.clock

    def now(self) -> datetime:
        """The plane's time."""
        return self._clock.now()

    def plan(self, pipeline: str) -> Plan:
        """The pipeline's plan, or `NotFound`."""
        plan = self._plane.plan(pipeline)
        if plan is None:
            raise NotFound("there is no such pipeline.", unit=pipeline, next_step="see the list of pipelines.")
        return plan

    def key(self, pipeline: str, day: date | None, schedule: str | None) -> Key:
        """An execution; without a date the one whose time it is, of the schedule or of all schedules."""
        plan = self.plan(pipeline)
        chosen = [known for known in plan.schedules if schedule in (None, known.name)]
        if not chosen or (day is not None and len(chosen) > 1):
            raise InvalidInput(
                f"there is no schedule {schedule}." if schedule else "it has several schedules.",
                unit=pipeline,
                next_step=f"name one of {', '.join(known.name for known in plan.schedules)}.",
            )
        return timing.current_key(plan, chosen, self.now()) if day is None else Key(pipeline, day, chosen[0].name)

    def execution(self, key: Key) -> Execution | None:
        """The execution as it is."""
        return self.store.load(key, self.plan(key.pipeline), self.now())

    def evaluate(self, key: Key) -> Readiness:
        """Ask every evaluator now, keep the answers, change no execution."""
        plan, now = self.plan(key.pipeline), self.now()
        state = self.execution(key) or Execution(plan, key, now, now, rules.run_id_of(key, 0, 1))
        stored = self.store.traits(key.pipeline, key, [trait.type for trait in plan.traits], now)
        results = self._plane.runner.evaluate(state, stored, fresh=True)
        asked = [result for result in results if not result.pushed]
        self.store.put_traits(key.pipeline, key, asked, now)
        readiness = verdict.judge(plan, results, self.now())
        self.store.put_readiness(key, readiness, now)
        return readiness

    def check(self, key: Key) -> Readiness:
        """The verdict over stored answers only; what is missing or expired is STALE."""
        plan, now = self.plan(key.pipeline), self.now()
        stored = self.store.traits(key.pipeline, key, [trait.type for trait in plan.traits], now)
        return verdict.judge(plan, list(stored.values()), now)

    def rehearse(self, key: Key) -> Rehearsal:
        """What `run` would decide now, with real evaluators; nothing is written and nothing started.

        Raises:
            IllegalTransition: As `run` would.
        """
        now, plan = self.now(), self.plan(key.pipeline)._replace(dry_run=True)
        known = self.execution(key)
        state = rules.open_execution(plan, key, now, Reason.MANUAL).state if known is None else known
        state = self._waiting(state)._replace(plan=plan, dry_run=True)
        stored = self.store.traits(key.pipeline, key, [trait.type for trait in plan.traits], now)
        results = self._plane.runner.evaluate(state, stored)
        after, effects = rules.step(state, Evaluated(state.run_id, results), self.now())
        return Rehearsal(after, tuple(effect for effect in effects if isinstance(effect, Emit)))

    def _waiting(self, state: Execution) -> Execution:
        if state.status is not RunStatus.PENDING:
            raise IllegalTransition(
                f"it is {state.status} already.", unit=str(state.key), next_step="use rerun to run it once more."
            )
        return state

    def run(self, key: Key) -> Execution:
        """Look at an execution now and start it if it is ready.

        Raises:
            NotReady: It waits; it stays open and runs when it is ready.
            IllegalTransition: It has run already, is running, or the date is excluded.
        """
        state = self._waiting(self.execution(key) or self._open(key, Reason.MANUAL))
        return self._ready_or_raise(self._request(state, Woken("manual"), Tick()))

    def rerun(self, key: Key, reason: Reason, why: str, rerun_id: str | None = None) -> Execution:
        """Run an execution once more, within the budget of the reason."""
        state = self.execution(key)
        if state is None:
            raise NotFound("it has never run.", unit=str(key), next_step="use run, or backfill for past dates.")
        request = RerunRequested(rerun_id or f"{reason.value}-{self._plane.ids.new_id()}", reason, why)
        return self._ready_or_raise(self._request(state, request, Tick()))

    def backfill(self, pipeline: str, first: date, last: date, schedule: str | None, why: str) -> Backfilled:
        """Open past dates. Completed ones are left alone; failed and cancelled ones use their backfill budget."""
        if not first <= last or (last - first).days >= LONGEST_BACKFILL:
            raise InvalidInput(f"choose 1 to {LONGEST_BACKFILL} days, the first not after the last.", unit=pipeline)
        plan, opened, skipped = self.plan(pipeline), [], {}
        names = [schedule] if schedule else [known.name for known in plan.schedules]
        for offset in range((last - first).days + 1):
            for name in names:
                key = self.key(pipeline, first + timedelta(days=offset), name)
                try:
                    self._backfill_one(key, why)
                    opened.append(key)
                except LockstepError as refusal:
                    skipped[str(key)] = refusal.what
        return Backfilled(tuple(opened), skipped)

    def _backfill_one(self, key: Key, why: str) -> None:
        state = self.execution(key)
        if state is None:
            self._open(key, Reason.BACKFILL)
            return
        if state.status.is_success:
            raise IllegalTransition("it has completed already.", unit=str(key))
        self._write(state, RerunRequested(f"backfill-{self._plane.ids.new_id()}", Reason.BACKFILL, why))

    def cancel(self, key: Key, why: str) -> Execution:
        """Stop an execution; a running job is asked to stop and the execution ends when it has."""
        return self._request(self._existing(key), CancelRequested(why))

    def complete(self, run_id: str, *, success: bool, message: str = "", category: Category | None = None) -> Execution:
        """A job reports its end. Raises `IllegalTransition` if its run is not waiting for that."""
        run = self.store.run(run_id, self.now())
        if run is None:
            raise NotFound("there is no such run.", unit=run_id)
        key = slot_key(run["pipelineId"], f"{run['date']}#{run['scheduleId']}")
        return self._request(self._existing(key), Callback(run_id, success, message, category), Tick())

    def push(
        self,
        pipeline: str,
        trait: str,
        status: TraitStatus,
        *,
        value: Mapping[str, Any] | None = None,
        reason: str = "",
        ttl: timedelta | None = None,
        key: Key | None = None,
    ) -> TraitResult:
        """Tell a trait's answer from outside. It goes before the evaluator until it expires, and it always expires."""
        self.plan(pipeline)
        if status not in (TraitStatus.PASS, TraitStatus.FAIL):
            raise InvalidInput("a push says PASS or FAIL.", unit=f"{pipeline}/{trait}")
        now = self.now()
        result = TraitResult(
            trait, status, reason, value or {}, None, now, now + (ttl or DEFAULT_PUSH_TTL), pushed=True
        )
        self.store.put_traits(pipeline, key, [result], now)
        named = key or self.key(pipeline, None, None)
        self.store.append(named, Emit("TRAIT_PUSHED", f"{trait}: {status.value}", None, dict(value or {})), now)
        if key is not None:
            self.store.put_marker(Marker(key, f"push:{trait}", now))
        return result

    def mark(self, key: Key, source: str) -> None:
        """Ask for a look by marker, as other systems do."""
        self.plan(key.pipeline)
        self.store.put_marker(Marker(key, source, self.now()))

    def _existing(self, key: Key) -> Execution:
        state = self.execution(key)
        if state is None:
            raise NotFound("there is no such execution.", unit=str(key))
        return state

    def _open(self, key: Key, reason: Reason) -> Execution:
        now = self.now()
        state, effects = rules.open_execution(self.plan(key.pipeline), key, now, reason)
        try:
            return self.store.commit(None, state, [fact for fact in effects if isinstance(fact, FACTS)], now)
        except LostClaim:
            return self._existing(key)

    def _write(self, state: Execution, event: Event) -> Execution:
        """Record a request without carrying its actions out: the next tick does."""
        now = self.now()
        after, effects = rules.step(state, event, now)
        return self.store.commit(state, after, [fact for fact in effects if isinstance(fact, FACTS)], now)

    def _request(self, state: Execution, event: Event, *then: Event) -> Execution:
        """A request meets whoever else is at work: load again and repeat it, a few times."""
        for last in (False,) * (_TRIES - 1) + (True,):
            try:
                return self._driver.request(state, event, then)
            except LostClaim:
                if last:
                    raise
                state = self._existing(state.key)
        raise AssertionError("unreachable: the last round returns or raises")

    def _ready_or_raise(self, state: Execution) -> Execution:
        if state.status is RunStatus.PENDING and state.failure is None:
            raise NotReady(state)
        return state
