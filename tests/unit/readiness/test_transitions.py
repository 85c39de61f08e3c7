"""The lifecycle by exhaustive search: every event in every reachable situation, compared with the declared tables."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from lockstep.readiness import rules
from lockstep.readiness.model import (
    EXECUTION_MOVES,
    RUN_MOVES,
    Budgets,
    Callback,
    CancelAnswered,
    CancelRequested,
    Category,
    Delivered,
    DriftRule,
    Evaluated,
    Event,
    Execution,
    IllegalTransition,
    LateData,
    MonitorPlan,
    Polled,
    PollOutcome,
    Reason,
    RerunRequested,
    RetryPlan,
    RunMoved,
    RunStatus,
    SlaPlan,
    Started,
    StartFailed,
    StartUnknown,
    Tick,
    TriggerPlan,
    Woken,
)
from tests.unit.readiness.builders import NOW, answers, opened, plan

_WAITS = (timedelta(0), timedelta(minutes=2), timedelta(hours=5))


def _plans() -> Iterator:
    small = Budgets(manual=1, replay=1, backfill=0, drift=1, late_data=1)
    retry = RetryPlan(max_attempts=2, backoff_seconds=30)
    sla = SlaPlan(validation_timeout=timedelta(hours=3))
    for monitor in (MonitorPlan(), MonitorPlan(True, timedelta(hours=2), (DriftRule("fresh", "n"),))):
        for dry, resumable in ((False, True), (False, False), (True, True)):
            trigger = TriggerPlan("http", resumable=resumable)
            yield plan(monitor=monitor, dry_run=dry, trigger=trigger, retry=retry, budgets=small, sla=sla)


def _events(state: Execution) -> Iterator[Event]:
    run = state.run_id
    yield Tick()
    yield Woken()
    for fresh, n in (("PASS", 1), ("PASS", 5), ("FAIL", 1), ("ERROR", 1)):
        yield Evaluated(run, answers(fresh, n=n))
    yield Started(run, {"id": "j"})
    yield Started(run, {"id": "j"}, finished=True)
    yield StartFailed(run, Category.TRANSIENT, "no")
    yield StartFailed(run, Category.PERMANENT, "no")
    yield StartUnknown(run, "lost")
    for outcome in PollOutcome:
        yield Polled(run, outcome)
    yield Callback(run, success=True)
    yield Callback(run, success=False)
    yield CancelRequested("why")
    yield CancelAnswered(run, stopped=True)
    yield CancelAnswered(run, stopped=False)
    yield RerunRequested(f"r{state.generation}", Reason.MANUAL)
    yield LateData(f"l{state.generation}")
    yield Delivered(frozenset(alert.id for alert in state.outbox))
    yield Polled("another-run", PollOutcome.FAILED)
    yield Started("another-run", {"id": "x"})


def _shape(state: Execution, now: datetime) -> tuple:
    """What distinguishes situations, times left out."""
    readiness = state.readiness.status if state.readiness else None
    cancel = (state.cancel.by_timeout, state.cancel.tries) if state.cancel else None
    due = None if state.next_at is None else state.next_at <= now
    return (
        *(state.status, state.attempt, state.generation, readiness, cancel, state.late_data, due),
        state.baseline is None,
        sum(state.reruns.values()),
        state.dry_run,
        state.started_at <= now,
    )


def _explore() -> tuple[set[tuple[RunStatus, RunStatus]], set[tuple[RunStatus, RunStatus]], list[Execution]]:
    moves, hops, seen_states = set(), set(), []
    for the_plan in _plans():
        start = opened(the_plan)
        todo, seen = [(start, NOW, {})], {_shape(start, NOW)}
        while todo:
            state, now, runs = todo.pop()
            seen_states.append(state)
            for event in _events(state):
                for wait in _WAITS:
                    later = now + wait
                    try:
                        reached, effects = rules.step(state, event, later)
                    except IllegalTransition:
                        continue
                    moves.add((state.status, reached.status))
                    ends = dict(runs)
                    for effect in effects:
                        if isinstance(effect, RunMoved):
                            assert rules.is_legal_path(effect.path), (event, effect)
                            assert ends.get(effect.run_id, RunStatus.PENDING) is effect.path[0], (event, effect)
                            ends[effect.run_id] = effect.path[-1]
                            hops.update(zip(effect.path, effect.path[1:], strict=False))
                    shape = _shape(reached, later)
                    if shape not in seen and reached.generation <= 1:
                        seen.add(shape)
                        todo.append((reached, later, ends))
    return moves, hops, seen_states


@pytest.fixture(scope="module")
def explored():
    return _explore()


def test_exactly_the_declared_moves_of_an_execution_happen(explored):
    """Guards the table in both directions: no move outside it, and none in it that cannot happen."""
    moves, _, _ = explored
    declared = {(before, after) for before, afters in EXECUTION_MOVES.items() for after in afters}
    assert moves == declared


def test_runs_walk_only_legal_hops_and_continue_where_they_were(explored):
    """Guards the run ledger: `_explore` also insists that each path starts where the run's last one ended."""
    _, hops, _ = explored
    declared = {(before, after) for before, afters in RUN_MOVES.items() for after in afters}
    never = {
        (RunStatus.PENDING, RunStatus.CANCELLED),  # a run's row is made when it is claimed
        (RunStatus.COMPLETED_MONITORING, RunStatus.FAILED),  # drift is a rerun, not a failure of a good run
    }
    assert hops == declared - never


def test_attempts_and_budgets_hold_in_every_reachable_state(explored):
    """Guards against a path that counts tries twice, or not at all."""
    _, _, states = explored
    assert len(states) > 500
    for state in states:
        assert 1 <= state.attempt <= state.plan.retry.max_attempts
        assert all(used <= state.plan.budgets.allowed(Reason(reason)) for reason, used in state.reruns.items())


def test_nothing_is_started_in_a_dry_run(explored):
    """Guards dry runs through every path: evaluation, retry, rerun, late data, cancel."""
    _, _, states = explored
    live = [state for state in states if state.dry_run and (state.status.is_live or state.outbox or state.handle)]
    assert live == []
