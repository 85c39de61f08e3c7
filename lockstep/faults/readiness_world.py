"""Readiness in a simulated world: the real driver, store, rules, requests and watchdog on a table in memory.

What belongs here: a place where jobs run, a stream that tells of markers, a pager, and who does what when. What does
not: faults (schedule.py), judgement (checker.py), evaluators and triggers on the wire, which have tests of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import Any

from lockstep.faults.checker import Limit, Stores
from lockstep.faults.history import History, Outcome, Verb
from lockstep.faults.parts import Item, MemoryDynamo, aws_unreachable
from lockstep.faults.readiness_ledger import Ledger, status_in, unit_of
from lockstep.faults.schedule import Actor, Bound, World, unreachable
from lockstep.kernel.errors import LockstepError, LostClaim
from lockstep.kernel.ids import SeededIds
from lockstep.readiness import timing
from lockstep.readiness.alerts import Dispatcher
from lockstep.readiness.control import Control, NotFound, NotReady
from lockstep.readiness.evaluators.answer import Question
from lockstep.readiness.evaluators.builtin import Builtins
from lockstep.readiness.evaluators.runner import Runner, _Asked
from lockstep.readiness.model import (
    Alert,
    Budgets,
    Category,
    DriftRule,
    IllegalTransition,
    Key,
    MonitorPlan,
    Plan,
    Polled,
    PollOutcome,
    Reason,
    RetryPlan,
    SlaPlan,
    Started,
    StartFailed,
    TraitPlan,
    TriggerPlan,
)
from lockstep.readiness.plane import Plane
from lockstep.readiness.store import Marker, Store, read_marker
from lockstep.readiness.table import DynamoTable
from lockstep.readiness.triggers.base import Job, StartAnswer, Triggers
from lockstep.readiness.watchdog import Watchdog
from lockstep.readiness.worker import Driver, Limits

TABLE = "readiness"
_TRIES = 4
_PIPELINES_PER_SWEEP = 25
_READY, _NOT_READY = 0, 500
_FRESH = TraitPlan("fresh", True, "builtin:tick-lag", {"maxLagSeconds": 100}, 0, 5)
_UPSTREAM = TraitPlan("upstream", True, "builtin:upstream-job-log", {"upstreamPipeline": "load"}, 0, 5)
_BUDGETS = Budgets(manual=1, drift=1, late_data=1)
_RETRY = RetryPlan(max_attempts=3, backoff_seconds=30)
PLANS: Mapping[str, Plan] = {
    "load": Plan(
        "load",
        (_FRESH,),
        TriggerPlan("http"),
        retry=_RETRY,
        sla=SlaPlan(evaluation="00:10", completion="00:40", at_risk_lead=timedelta(minutes=5)),
        budgets=_BUDGETS,
        run_timeout=timedelta(minutes=4),
        downstream=("mart",),
    ),
    "mart": Plan(
        "mart",
        (_UPSTREAM, _FRESH._replace(ttl=60)),
        TriggerPlan("http"),
        retry=_RETRY._replace(categories=frozenset({Category.TRANSIENT})),
        sla=SlaPlan(validation_timeout=timedelta(minutes=10)),
        monitor=MonitorPlan(True, timedelta(minutes=3), (DriftRule("fresh", "rows"),)),
        budgets=_BUDGETS,
    ),
}
"""A pipeline with deadlines and a run timeout, and one that waits for it and is watched after its success."""


@dataclass
class _Running:
    """A job that was started. `late`: its run had been given up by then, so whoever started it must stop it."""

    key: Key
    late: bool
    ends_at: float
    outcome: PollOutcome
    category: Category = Category.TRANSIENT


@dataclass
class MemoryJobs:
    """A place where jobs run: one token is one job. It may refuse to take one, and says so."""

    world: World
    ledger: Any
    """Asked which run an execution is in, by nobody's hand: a look from above, not a step."""
    refusals: float = 0.25
    lengths: tuple[int, ...] = (1, 30, 300, 900)
    fails: Callable[[Key], bool] | None = None
    """Whether a job that is started now will fail; None leaves it to chance."""
    jobs: dict[str, _Running] = field(default_factory=dict)
    starts: list[str] = field(default_factory=list)
    overlaps: Counter[Key] = field(default_factory=Counter)

    def start(self, job: Job) -> StartAnswer:
        """Start it, unless the token is known."""
        chance = self.world.random
        if chance.random() < self.refusals:
            return StartFailed(job.token, Category.TRANSIENT, "429")
        if not self._knows(job.token):
            late = self.ledger(job.key) != job.token
            others = [one for one in self.jobs.values() if one.key == job.key and not one.late and self._is_alive(one)]
            self.overlaps[job.key] += bool(others) and not late
            ends_at = self.world.time.monotonic() + chance.choice(self.lengths)
            self.jobs[job.token] = _Running(job.key, late, ends_at, *self._fate(job.key))
            self.starts.append(job.token)
        return Started(job.token, {"job": job.token})

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """What it says."""
        one = self.jobs[handle["job"]]
        outcome = PollOutcome.RUNNING if self._is_alive(one) else one.outcome
        return Polled(job.token, outcome, one.category, "the job says so")

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Stop it, if it runs."""
        one = self.jobs[handle["job"]]
        if self._is_alive(one):
            one.outcome, one.ends_at = PollOutcome.CANCELLED, self.world.time.monotonic()
        return True

    def calm_down(self) -> None:
        """Take every job, and let none take long."""
        self.refusals, self.lengths = 0.0, (1, 30)
        for one in self.jobs.values():
            one.ends_at = min(one.ends_at, self.world.time.monotonic() + 300)

    def ended(self) -> dict[str, bool]:
        """Whether they went well, of those that have ended by themselves."""
        return {
            token: one.outcome is PollOutcome.SUCCEEDED
            for token, one in self.jobs.items()
            if not self._is_alive(one) and one.outcome is not PollOutcome.CANCELLED
        }

    def outcome(self, token: str) -> str:
        """How it is, in the end."""
        one = self.jobs.get(token)
        if one is None:
            return "never started"
        return "running" if self._is_alive(one) else one.outcome.value

    def _fate(self, key: Key) -> tuple[PollOutcome, Category]:
        if self.fails is not None:
            return PollOutcome.FAILED if self.fails(key) else PollOutcome.SUCCEEDED, Category.TRANSIENT
        chance = self.world.random
        outcome = chance.choice((PollOutcome.SUCCEEDED,) * 3 + (PollOutcome.FAILED,))
        return outcome, chance.choice((Category.TRANSIENT, Category.TRANSIENT, Category.PERMANENT))

    def _knows(self, token: str) -> bool:
        return token in self.jobs

    def _is_alive(self, one: _Running) -> bool:
        return one.ends_at > self.world.time.monotonic()


@dataclass
class Pager:
    """Takes alerts."""

    told: set[str] = field(default_factory=set)

    def send(self, alert: Alert) -> None:
        """Remember it."""
        self.told.add(alert.id)


class _Evaluators(Runner):
    """The real runner, its questions asked in the actor's own thread: a second one would not be the seed's."""

    def _begin(self, question: Question) -> _Asked:
        asked = _Asked(question, 0.0)
        asked.answer(self._guarded(question))
        return asked


class ReadinessWorld:
    """Pipelines, one table, and everybody who touches them."""

    def __init__(self, world: World, history: History, plans: Mapping[str, Plan] = PLANS) -> None:
        self.world = world
        self.history = history
        self.plans = plans
        self.dynamo = MemoryDynamo({TABLE: ("PK", "SK")}, self._seen, {"GSI1": "GSI1SK"})
        self.ids = SeededIds(world.seed)
        self.store = Store(DynamoTable(self.dynamo), self.ids)  # type: ignore[arg-type]  # the same, in memory
        self.jobs = MemoryJobs(world, self._run_of)
        self.pager = Pager()
        self.reading = {"lagSeconds": _READY, "rows": 1}
        self.late: set[Key] = set()
        """Executions whose input is not there yet, whatever the reading of the others is."""
        self.stream: list[Marker] = []
        self.writes: list[tuple[str, int]] = []
        self.is_calm = False
        self._asked = 0
        for plan in plans.values():
            self.store.register(plan.pipeline, {}, origin="simulation", since=timing.first_starts(plan, self._now()))

    def plane(self, actor: Actor) -> Plane:
        """The real plane, on parts as this actor reaches them."""
        reach = self._bound
        table = DynamoTable(reach(actor, "ledger", self.dynamo, aws_unreachable), sleep=actor.clock.sleep)
        store = Store(table, self.ids)

        def probe(config: Mapping[str, Any], key: Key, now: datetime) -> Mapping[str, Any]:
            return self.world.call(actor, "evaluator.ask", lambda: self._reading(key), unreachable)

        return Plane(
            store,
            lambda: self.plans,
            self.plans.get,
            _Evaluators(actor.clock, Builtins(store, {"tick-lag": probe})),
            Triggers({"http": reach(actor, "jobs", self.jobs, unreachable)}),
            Dispatcher([reach(actor, "pager", self.pager, unreachable)], actor.clock),
            actor.clock,
            self.ids,
        )

    # --- who acts -------------------------------------------------------------------------------------------------

    def drive(self, actor: Actor) -> None:
        """A driver: a few ticks, with what the stream told and, now and then, what a sweep found."""
        driver, chance = Driver(self.plane(actor), Limits(threads=1)), self.world.random
        for last in (False,) * chance.randint(0, 1) + (True,):
            with suppress(LockstepError):
                markers = self._told()
                if chance.random() < 0.5:
                    markers += driver.sweep(0, _PIPELINES_PER_SWEEP)[0]
                driver.tick(markers)
            if not last:
                self.world.hang(chance.choice((1, 31, 61)))

    def watch(self, actor: Actor) -> None:
        """The watchdog's round."""
        Watchdog(self.plane(actor)).check()

    def mark(self, actor: Actor) -> None:
        """A system that has new input says so until it is answered; some of it comes after the job has read."""
        for _ in range(3):
            key, source = self._some_key(), self.world.random.choice(("external", "late-data:file"))
            self.mark_one(actor, key, source)

    def mark_one(self, actor: Actor, key: Key, source: str = "external") -> None:
        """One marker, until it is answered."""
        self._ask(actor, unit_of(key), unit_of(key), lambda control: control.mark(key, source))

    def report(self, actor: Actor) -> None:
        """Jobs that have ended say so themselves, some of them twice."""
        control = self._control(actor)
        for token, success in self.jobs.ended().items():
            if self.world.random.random() < 0.8:
                with suppress(LockstepError):
                    control.complete(token, success=success)

    def operate(self, actor: Actor) -> None:
        """A person runs, reruns or cancels something, at whatever moment."""
        deed, key = self.world.random.choice(("run", "rerun", "rerun", "rerun", "cancel")), self._some_key()
        self._asked += 1
        if deed == "cancel":
            with suppress(LockstepError):
                self._control(actor).cancel(key, "by hand")
        elif deed == "run":
            self._ask(actor, f"run-{self._asked}", unit_of(key), lambda control: control.run(key))
        else:
            name = f"rerun-{self._asked}"
            key = self.world.random.choice(
                [one.key for one in self.ledger().executions() if one.status.is_terminal] or [key]
            )
            self._ask(actor, name, name, lambda control: control.rerun(key, Reason.MANUAL, "by hand", name))

    def look(self, actor: Actor) -> None:
        """Somebody reads how the executions are, each in the generation that it is in."""
        control = self._control(actor)
        for state in list(self.ledger().executions()):
            unit = unit_of(state.key, state.generation)
            begun = self.history.invoke(actor.name, Verb.READ, unit, at=self.world.time.monotonic())
            try:
                found = control.execution(state.key)
            except LockstepError:
                self.history.end(begun, Outcome.INFO)
                continue
            status = status_in(found, state.generation) if found else None
            words = status.value if status else "UNKNOWN"
            self.history.end(begun, Outcome.OK, unit=unit, state=words, terminal=bool(status and status.is_terminal))

    def change_input(self) -> None:
        """What the evaluators find is another thing from now on: not there yet, there, or more than before."""
        chance = self.world.random
        self.reading["lagSeconds"] = chance.choice((_READY, _READY, _NOT_READY))
        self.reading["rows"] += chance.choice((0, 0, 10))

    def calm_down(self) -> None:
        """Inputs are there, and stay; nobody refuses anything, and jobs end soon."""
        self.is_calm, self.reading["lagSeconds"] = True, _READY
        self.jobs.calm_down()

    # --- what is left ---------------------------------------------------------------------------------------------

    def is_settled(self) -> bool:
        """Whether every execution has ended, every marker was heard, and every alert told."""
        ledger = self.ledger()
        return not ledger.left() and not self.stream and set(ledger.alerts()) <= self.pager.told

    def stores(self) -> Stores:
        """What is there in the end, as the checker reads it."""
        found = self.ledger().stores(self.jobs.starts, self.jobs.outcome, self.pager.told)
        found.writes += self.writes
        for key, count in self.jobs.overlaps.items():
            found.limits.append(Limit(str(key), "jobs were started beside one that was alive", count, 0))
        return found

    def ledger(self) -> Ledger:
        """The table as it is; nobody's step."""
        return Ledger(self.dynamo.tables[TABLE].values(), self.plans)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _told(self) -> list[Marker]:
        """What the stream tells: some of it never, some of it twice, in any order."""
        chance = self.world.random
        told, self.stream = self.stream, []
        if self.is_calm:
            return told
        lost = [one for one in told if chance.random() < 0.2]
        self.stream = [one for one in told if chance.random() < 0.2]
        self.world.faults["message lost"] += len(lost)
        self.world.faults["message repeated and reordered"] += len(self.stream)
        heard = [one for one in told if one not in lost]
        chance.shuffle(heard)
        return heard

    def _ask(self, actor: Actor, name: str, unit: str, wish: Any) -> None:
        """One wish under one name, told until it is answered."""
        control = self._control(actor)
        for _ in range(_TRIES):
            begun = self.history.invoke(actor.name, Verb.WRITE, name, at=self.world.time.monotonic())
            try:
                wish(control)
            except NotReady:
                pass  # kept: it runs as soon as it is ready
            except (IllegalTransition, NotFound, LostClaim):
                self.history.end(begun, Outcome.FAIL)
                return
            except LockstepError:
                self.history.end(begun, Outcome.INFO)
                continue
            self.history.end(begun, Outcome.OK, unit=unit)
            return

    def _control(self, actor: Actor) -> Control:
        plane = self.plane(actor)
        return Control(plane, Driver(plane, Limits(threads=1)))

    def _some_key(self) -> Key:
        chance = self.world.random
        return Key(chance.choice(sorted(self.plans)), _day(self.world) - timedelta(days=chance.choice((0, 0, 0, 1))))

    def _reading(self, key: Key) -> dict[str, int]:
        return {**self.reading, "lagSeconds": _NOT_READY} if key in self.late else dict(self.reading)

    def _run_of(self, key: Key) -> str | None:
        state = self.store.load(key, self.plans[key.pipeline], self._now())
        return state.run_id if state is not None else None

    def _now(self) -> datetime:
        return self.world.time.now()

    def _seen(self, _: str, item: Item) -> None:
        pk, sk = item["PK"]["S"], item["SK"]["S"]
        if sk.startswith("RUNLOG#"):
            self.writes.append((f"{pk}/{sk}", int(item["version"]["N"])))
        elif pk.startswith("MARKER#"):
            self.stream.append(read_marker({name: next(iter(value.values())) for name, value in item.items()}))

    def _bound(self, actor: Actor, name: str, part: Any, lost: Any) -> Any:
        return Bound(self.world, actor, name, part, lost=lost, plain=("exceptions",))


def _day(world: World) -> date:
    return world.time.now().date()
