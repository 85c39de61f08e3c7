"""Any interleaving of drivers, duplicates, crashes and slow answers, over the pure reducer and a compare-and-set cell.

The oracle is a job service that accepts a token once. Guarded: at most one live job per execution, attempts within
the limit, every alert raised once, and a due pipeline that ends once the faults stop.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from lockstep.readiness import rules
from lockstep.readiness.model import (
    FACTS,
    Action,
    Budgets,
    CancelAnswered,
    CancelRequested,
    CancelRun,
    Category,
    DeliverAlerts,
    Delivered,
    DriftRule,
    Emit,
    Evaluate,
    Evaluated,
    Event,
    IllegalTransition,
    LateData,
    MonitorPlan,
    Polled,
    PollOutcome,
    PollRun,
    Reason,
    RerunRequested,
    RetryPlan,
    RunMoved,
    SlaPlan,
    Started,
    StartFailed,
    StartRun,
    StartUnknown,
    Tick,
    Woken,
)
from tests.unit.readiness.builders import NOW, answers, opened, plan

PLAN = plan(
    retry=RetryPlan(max_attempts=3, backoff_seconds=30),
    sla=SlaPlan(
        evaluation="08:30", completion="10:00", validation_timeout=timedelta(hours=6), at_risk_lead=timedelta(0)
    ),
    monitor=MonitorPlan(True, timedelta(hours=1), (DriftRule("fresh", "n"),)),
    budgets=Budgets(manual=2, drift=1, late_data=1),
    run_timeout=timedelta(hours=1),
)


class Jobs:
    """A job service that is honest about tokens: one token, one job."""

    def __init__(self) -> None:
        self.state: dict[str, str] = {}
        self.most_live = 0

    def start(self, token: str) -> None:
        self.state.setdefault(token, "running")
        self.most_live = max(self.most_live, sum(state == "running" for state in self.state.values()))


class Interleavings(RuleBasedStateMachine):
    """Actors load the cell, decide, lose or win the write, and carry actions that may die or come back late."""

    actions = Bundle("actions")
    answers_ = Bundle("answers")

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.cell = opened(PLAN)
        self.jobs = Jobs()
        self.raised: Counter[str] = Counter()
        self.last_status: dict[str, str] = {}

    def _write(self, base, event: Event) -> list[Action]:
        """One actor's step on what it had loaded; the write is lost if the cell has moved on."""
        try:
            state, effects = rules.step(base, event, self.now)
        except IllegalTransition:
            return []
        if state is not base:
            if base.version != self.cell.version:
                return []
            self.cell = state._replace(version=base.version + 1)
            for effect in effects:
                self._record(effect)
        return [effect for effect in effects if not isinstance(effect, FACTS)]

    def _record(self, effect) -> None:
        if isinstance(effect, Emit) and effect.kind == "ALERT":
            self.raised[effect.details["alertId"]] += 1
        if isinstance(effect, RunMoved):
            assert self.last_status.get(effect.run_id, "PENDING") == effect.path[0]
            self.last_status[effect.run_id] = effect.path[-1]

    @rule(target=actions, stale=st.booleans(), event=st.sampled_from([Tick(), Woken(), Woken("duplicate")]))
    def look(self, stale: bool, event: Event):
        # Two actors decide on the same version: the second one's write must be lost.
        base, found = self.cell, self._write(self.cell, event)
        if stale:
            found = found + self._write(base, event)
        return tuple(found)

    @rule(target=answers_, carried=consumes(actions), outcome=st.integers(0, 6))
    def carry_out(self, carried, outcome: int):
        return tuple(answer for action in carried if (answer := self._do(action, outcome)) is not None)

    def _do(self, action: Action, outcome: int) -> Event | None:
        if isinstance(action, Evaluate):
            fresh = ("PASS", "PASS", "PASS", "PASS", "FAIL", "ERROR", "FAIL")[outcome]
            return Evaluated(action.run_id, answers(fresh, n=0 if outcome else 1))
        if isinstance(action, StartRun):
            return self._start(action, outcome)
        if isinstance(action, PollRun):
            return self._poll(action.run_id, outcome)
        if isinstance(action, CancelRun):
            if self.jobs.state.get(action.run_id) == "running" and outcome < 4:
                self.jobs.state[action.run_id] = "cancelled"
            return CancelAnswered(action.run_id, stopped=self.jobs.state.get(action.run_id) != "running")
        assert isinstance(action, DeliverAlerts)
        return Delivered(frozenset(alert.id for alert in action.alerts))

    def _start(self, action: StartRun, outcome: int) -> Event:
        if outcome == 5:  # also of a token that is known: this request did nothing, an earlier one may have
            return StartFailed(action.run_id, Category.TRANSIENT, "refused")
        self.jobs.start(action.run_id)
        return (
            StartUnknown(action.run_id, "answer lost")
            if outcome == 4
            else Started(action.run_id, {"id": action.run_id})
        )

    def _poll(self, run_id: str, outcome: int) -> Event:
        if outcome == 4:
            return Polled(run_id, PollOutcome.UNKNOWN)
        if self.jobs.state.get(run_id) == "running" and outcome in (0, 1):
            self.jobs.state[run_id] = "succeeded" if outcome == 0 else "failed"
        return Polled(run_id, PollOutcome(self.jobs.state.get(run_id, "unknown")), Category.TRANSIENT)

    @rule(target=actions, given=consumes(answers_))
    def come_back(self, given):
        found: list[Action] = []
        for event in given:
            found += self._write(self.cell, event)
        return tuple(found)

    @rule(carried=consumes(actions))
    def die_before_acting(self, carried):
        """A driver is killed between its write and its action."""

    @rule(given=consumes(answers_))
    def die_before_reporting(self, given):
        """A driver is killed after acting, before it wrote the answer."""

    @rule(target=actions, number=st.integers(0, 3), kind=st.sampled_from(["cancel", "rerun", "late"]))
    def ask(self, number: int, kind: str):
        events = {
            "cancel": CancelRequested("by hand"),
            "rerun": RerunRequested(f"r{number}", Reason.MANUAL),
            "late": LateData(f"l{number}"),
        }
        return tuple(self._write(self.cell, events[kind]))

    @rule(
        outcome=st.sampled_from([0, 2, 2, 3, 1, 4, 5, 6]), lives=st.integers(1, 6), minutes=st.sampled_from([0, 1, 2])
    )
    def drive(self, outcome: int, lives: int, minutes: int) -> None:
        """An ordinary round of a driver that dies after some of its steps; often it lives to the end."""
        self.now += timedelta(minutes=minutes)
        todo = self._write(self.cell, Tick())
        while todo and lives > 1:
            answer = self._do(todo.pop(0), outcome)
            lives -= 1
            if lives > 1 and answer is not None:
                todo += self._write(self.cell, answer)
            lives -= 1

    @rule(minutes=st.sampled_from([1, 1, 5, 30, 120]))
    def wait(self, minutes: int) -> None:
        self.now += timedelta(minutes=minutes)

    @invariant()
    def at_most_one_job_is_alive(self) -> None:
        live = [token for token, state in self.jobs.state.items() if state == "running"]
        given_up = [token for token in live if token != self.cell.run_id]
        # A job whose cancel could not be confirmed five times, or a start given up, is said aloud and not repeated.
        assert len(live) - len(given_up) <= 1
        if given_up:
            assert any(kind.startswith(("cancel_unconfirmed", "pipeline_failed")) for kind in self.cell.alerted)

    @invariant()
    def counts_stay_within_their_limits(self) -> None:
        assert self.cell.attempt <= PLAN.retry.max_attempts
        assert all(count == 1 for count in self.raised.values())
        assert self.cell.reruns.get("manual", 0) <= 2

    @precondition(lambda self: len(self.last_status) < 12)
    @rule()
    def calm(self) -> None:
        """When the faults stop, what is due ends: nothing waits for ever."""
        for _ in range(200):
            self.now += timedelta(minutes=1)
            todo = self._write(self.cell, Tick())
            while todo:
                answer = self._do(todo.pop(0), 0)
                todo += [] if answer is None else self._write(self.cell, answer)
            if not self.cell.is_open:
                break
        assert not self.cell.is_open, self.cell.status


Interleavings.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None, derandomize=True)
TestInterleavings = Interleavings.TestCase
