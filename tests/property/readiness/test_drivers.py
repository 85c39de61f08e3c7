"""Two real drivers over one table: any order of ticks, duplicate markers, deaths, held locks and slow evaluators.

The reducer alone is searched in test_interleavings.py; here the order of I/O is, with its locks, traits and outbox.
Guarded: at most one live job, attempts within the limit, every alert recorded once, and an end when the faults stop.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lockstep.kernel.crash import CrashInjected, armed, hanging_by
from lockstep.kernel.errors import LockstepError
from lockstep.readiness.model import Budgets, Reason, RetryPlan, SlaPlan
from lockstep.readiness.store import Marker
from tests.unit.readiness.builders import KEY
from tests.unit.readiness.world import World, pipeline, trait

POINTS = (
    "readiness.commit.before",
    "readiness.commit.before_copies",
    "readiness.evaluate.before",
    "readiness.evaluate.after",
    "readiness.start.before",
    "readiness.start.after",
    "readiness.alert.before",
    "readiness.alert.after",
)
PLAN = pipeline(
    "sales",
    trait("fresh"),
    trait("cached", ttl=600),
    retry=RetryPlan(max_attempts=3, backoff_seconds=30),
    sla=SlaPlan(evaluation="08:30", completion="12:00", at_risk_lead=timedelta(minutes=5)),
    budgets=Budgets(manual=2, late_data=1),
    run_timeout=timedelta(hours=6),
)
_SECONDS = st.sampled_from([0, 1, 31, 61, 400])


class Drivers(RuleBasedStateMachine):
    """A world with two drivers, its watchdog, and everything that may go wrong around them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(PLAN)
        self.drivers = [self.world.driver, self.world.new_driver()]
        self.reruns = 0

    def _tick(self, number: int, *markers: Marker, seconds: float = 0) -> None:
        self.world.clock.advance(seconds)
        report = self.drivers[number].tick(markers)
        assert not report.failures, report.failures

    @rule(number=st.integers(0, 1), seconds=_SECONDS)
    def tick(self, number: int, seconds: int) -> None:
        self._tick(number, seconds=seconds)

    @rule(number=st.integers(0, 1), point=st.sampled_from(POINTS), nth=st.integers(1, 3), seconds=_SECONDS)
    def die(self, number: int, point: str, nth: int, seconds: int) -> None:
        """A driver is killed somewhere in its tick; a new one takes its place."""
        try:
            with armed(point, "raise", nth=nth):
                self._tick(number, seconds=seconds)
        except CrashInjected:
            self.drivers[number] = self.world.new_driver()

    @rule(number=st.integers(0, 1), point=st.sampled_from(POINTS), nth=st.integers(1, 3), seconds=_SECONDS)
    def fail(self, number: int, point: str, nth: int, seconds: int) -> None:
        """Something that a driver uses fails in its tick; the same driver goes on with the next."""
        with armed(point, "error", nth=nth):
            self.world.clock.advance(seconds)
            self.drivers[number].tick([])

    @rule(number=st.integers(0, 1), point=st.sampled_from(POINTS), nth=st.integers(1, 3), seconds=_SECONDS)
    def hang(self, number: int, point: str, nth: int, seconds: int) -> None:
        """A driver sleeps in its tick, beyond every lease; the other one goes on, then the sleeper does."""
        with armed(point, "hang", nth=nth), hanging_by(lambda _: self._tick(1 - number, seconds=1000)):
            self._tick(number, seconds=seconds)

    @rule(copies=st.integers(1, 3), source=st.sampled_from(["external", "late-data:file"]), number=st.integers(0, 1))
    def mark(self, copies: int, source: str, number: int) -> None:
        marker = Marker(KEY, source, self.world.clock.now())
        self.world.store.put_marker(marker)
        for _ in range(copies):
            self._tick(number, marker)

    @rule(minutes=st.integers(1, 10))
    def lock_is_held_by_the_dead(self, minutes: int) -> None:
        """Whoever held the lock is gone: it must expire, and nothing else may be believed of it."""
        now = self.world.clock.now()
        self.world.store.acquire("eval:sales:daily", f"dead-{now}", timedelta(minutes=minutes), now)

    @rule(seconds=st.sampled_from([10, 120, 1000]), number=st.integers(0, 1), answer=st.sampled_from([0, 500]))
    def evaluator_is_slow(self, seconds: int, number: int, answer: float) -> None:
        """While one driver waits for an answer, time passes, its lock may expire, and the other driver ticks."""

        def slow() -> float:
            self.world.read(0)  # once: the other driver's own question is answered at once
            self.world.clock.advance(seconds)
            self._tick(1 - number)
            return answer

        self.world.read(slow)
        self._tick(number, seconds=31)
        self.world.read(0)

    @rule(value=st.sampled_from([0, 0, 500, OSError("away")]))
    def reading(self, value: object) -> None:
        self.world.read(value)

    @rule(outcome=st.sampled_from(["succeeded", "failed"]))
    def job_ends(self, outcome: str) -> None:
        self.world.jobs.end(outcome)

    @rule(answers=st.integers(0, 2), unreadable=st.booleans(), pager=st.booleans())
    def wire(self, answers: int, unreadable: bool, pager: bool) -> None:
        """Answers get lost, statuses cannot be read, the pager is down."""
        self.world.jobs.lose_answers, self.world.jobs.unreadable = answers, unreadable
        self.world.pager.broken = pager

    @rule(kind=st.sampled_from(["rerun", "cancel", "run"]))
    def ask(self, kind: str) -> None:
        control = self.world.control
        self.reruns += 1
        requests = {
            "rerun": lambda: control.rerun(KEY, Reason.MANUAL, "by hand", f"r{self.reruns}"),
            "cancel": lambda: control.cancel(KEY, "by hand"),
            "run": lambda: control.run(KEY),
        }
        try:
            requests[kind]()
        except LockstepError:
            return  # refused with a reason; nothing may have changed

    @rule()
    def watch(self) -> None:
        assert not self.world.watchdog.check().broken

    @invariant()
    def one_job_at_a_time_and_counts_within_limits(self) -> None:
        given_up = {"cancel_unconfirmed", "pipeline_failed", "run_timeout"}
        state = self.world.store.load(KEY, self.world.plans["sales"], self.world.clock.now())
        alerted = {kind.split("_g")[0] for kind in state.alerted} if state else set()
        # A job that could not be seen to stop is said aloud; only then may another be alive beside it.
        assert self.world.jobs.most_alive <= 1 or alerted & given_up
        assert state is None or (state.attempt <= 3 and state.reruns.get("manual", 0) <= 2)

    @invariant()
    def every_alert_is_recorded_once(self) -> None:
        events = self.world.store.events("sales", self.world.clock.now(), limit=5000)
        raised = Counter(event["details"]["alertId"] for event in events if event["kind"] == "ALERT")
        assert all(count == 1 for count in raised.values()), raised

    def teardown(self) -> None:
        """When the faults stop, what is due ends, and every alert has reached the pager."""
        world = self.world
        world.jobs.lose_answers, world.jobs.unreadable, world.pager.broken = 0, False, False
        world.read(0)
        world.clock.advance(120)  # a broken pager is left alone for a minute
        for _ in range(60):
            self._tick(0, seconds=61)
            world.jobs.end()
            world.watchdog.check()
        state = world.state(KEY)
        assert not state.is_open, state
        events = world.store.events("sales", world.clock.now(), limit=5000)
        raised = {event["details"]["alertId"] for event in events if event["kind"] == "ALERT"}
        assert raised <= {alert.id for alert in world.pager.alerts}


Drivers.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
TestDrivers = Drivers.TestCase
