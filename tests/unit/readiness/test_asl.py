"""The Step Functions form: a definition without dead ends, and the same event history as the driver's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lockstep.kernel.errors import Transient
from lockstep.readiness import asl
from lockstep.readiness.handlers import Handlers
from lockstep.readiness.model import (
    DriftRule,
    ExclusionPlan,
    MonitorPlan,
    Plan,
    RetryPlan,
    RunStatus,
    SlaPlan,
)
from lockstep.readiness.table import MemoryTable, Table
from tests.unit.readiness.builders import DAY, KEY, NOW
from tests.unit.readiness.interpreter import Ended, Interpreter
from tests.unit.readiness.world import World, pipeline

MACHINE = asl.machine()
STATES: dict[str, Any] = MACHINE["States"]
INPUT = {"pipelineID": "sales", "scheduleID": "daily", "date": DAY.isoformat(), "markerSource": "test"}


def _nexts(state: dict[str, Any]) -> set[str]:
    found = {state[name] for name in ("Next", "Default") if name in state}
    found |= {choice["Next"] for choice in state.get("Choices", [])}
    return found | {catch["Next"] for catch in state.get("Catch", [])}


def test_every_state_is_reachable_and_every_transition_leads_somewhere():
    seen, todo = set(), ["InitDefaults"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += _nexts(STATES[name])
    assert seen == set(STATES)


def test_every_task_retries_and_catches_and_every_choice_has_a_default_that_fails():
    for name, state in STATES.items():
        if state["Type"] in ("Task", "Map"):
            assert state["Retry"], name
            assert state["Catch"], name
        if state["Type"] == "Choice":
            assert state["Default"].startswith("UnknownAnswer"), name
    for start in ("UnknownAnswer", "UnknownAnswerUnlocked", "AlertError"):
        ends, todo, seen = set(), [start], set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            if not _nexts(STATES[name]):
                ends.add(STATES[name]["Type"])
            todo += _nexts(STATES[name])
        assert ends == {"Fail"}, start


def test_the_steps_of_the_document_are_all_there():
    steps = "InitDefaults CheckExclusion AcquireLock CheckRunLog ResolvePipeline EvaluateTraits CheckEvaluationSLA"
    steps += " CheckValidationTimeout CheckReadiness TriggerPipeline PollRunStatus CheckCompletionSLA LogResult"
    steps += " ReleaseLock CheckDrift AlertError"
    assert set(steps.split()) <= set(STATES)
    actions = {state["Parameters"].get("action") for state in STATES.values() if state["Type"] == "Task"}
    assert len(actions - {None}) == 12


def test_the_export_is_valid_json_and_python(tmp_path: Path):
    written = asl.export(tmp_path)
    assert json.loads((tmp_path / "statemachine.asl.json").read_text())["StartAt"] == "InitDefaults"
    programs = [str(path) for path in written if path.suffix == ".py"]
    assert len(programs) == 5
    done = subprocess.run([sys.executable, "-m", "py_compile", *programs], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# --- run ---


def machine_run(world: World, on_wait: Callable[[str], None] = lambda _: None) -> Ended:
    handlers = Handlers(world.plane)
    tasks = {
        asl.ORCHESTRATOR: handlers.orchestrator,
        asl.EVALUATOR: handlers.evaluator,
        asl.TRIGGER: handlers.trigger,
        asl.RUN_CHECKER: handlers.run_checker,
    }
    interpreter = Interpreter(MACHINE, tasks, world.clock)
    interpreter.on_wait = on_wait
    return interpreter.run(dict(INPUT))


def _plan(**changes: Any) -> Plan:
    only_today = ExclusionPlan(dates=frozenset({DAY - timedelta(days=1)}))
    return pipeline(**{"exclusions": only_today, "retry": RetryPlan(max_attempts=2, backoff_seconds=30), **changes})


CASES: dict[str, tuple[Plan, Callable[[World], None], Callable[[World, int], None]]] = {
    "ready": (_plan(), lambda world: None, lambda world, _: world.jobs.end()),
    "waits first": (
        _plan(),
        lambda world: world.read(500),
        lambda world, turn: (world.read(0), world.jobs.end())[0] if turn > 1 else None,
    ),
    "fails twice": (_plan(), lambda world: None, lambda world, _: world.jobs.end("failed")),
    "takes too long": (
        _plan(run_timeout=timedelta(minutes=2)),
        lambda world: None,
        lambda world, _: None,
    ),
    "validation timeout": (
        _plan(sla=SlaPlan(validation_timeout=timedelta(minutes=2)), retry=RetryPlan(max_attempts=1)),
        lambda world: world.read(500),
        lambda world, _: None,
    ),
    "broken evaluator": (
        _plan(sla=SlaPlan(validation_timeout=timedelta(minutes=5)), retry=RetryPlan(max_attempts=1)),
        lambda world: world.read(OSError("no")),
        lambda world, _: None,
    ),
    "monitored": (
        _plan(monitor=MonitorPlan(True, timedelta(minutes=3), (DriftRule("fresh", "rows"),))),
        lambda world: world.read({"lagSeconds": 0, "rows": 0}),
        lambda world, _: world.jobs.end(),
    ),
}


def history(world: World) -> list[tuple[str, str]]:
    """Kinds and messages of all events; times and ids left out."""
    events = world.store.events("sales", world.clock.now(), limit=500, newest=False, key=KEY)
    return [(event["kind"], event["message"].split(" until")[0].split("until")[0]) for event in events]


@pytest.mark.parametrize("case", CASES)
def test_both_forms_leave_the_same_event_history(case: str):
    """Guards trap 20: one core, so that the two ways to deploy it cannot drift apart."""
    both_forms_agree(case, MemoryTable(), MemoryTable())


def both_forms_agree(case: str, first: Table, second: Table) -> None:
    plan, prepare, change = CASES[case]
    driven, stepped = World(plan, table=first), World(plan, table=second)
    turns = {"driven": 0, "stepped": 0}
    for world in (driven, stepped):
        prepare(world)

    def wait(_: str) -> None:
        turns["stepped"] += 1
        change(stepped, turns["stepped"])

    ended = machine_run(stepped, wait)
    for _ in range(30):
        driven.tick()
        if not driven.state(KEY).is_open:
            break
        driven.clock.advance(31)
        turns["driven"] += 1
        change(driven, turns["driven"])
    opened = ("EXECUTION_OPENED", "opened by schedule")
    expected = [("EXECUTION_OPENED", "opened by marker") if event == opened else event for event in history(driven)]
    assert history(stepped) == expected
    status = stepped.state(KEY).status
    assert status is driven.state(KEY).status
    assert ended.status == ("FAILED" if status is RunStatus.FAILED else "SUCCEEDED")
    assert stepped.store.holder("eval:sales:daily", stepped.clock.now()) is None, "the lock was given back"


def test_a_completed_execution_and_an_excluded_date_end_well_at_once():
    world = World(_plan())
    machine_run(world, lambda _: world.jobs.end())
    again = machine_run(world)
    assert (again.status, again.last, len(world.jobs.starts)) == ("SUCCEEDED", "Done", 1)
    world.plans["sales"] = world.plans["sales"]._replace(exclusions=ExclusionPlan(dates=frozenset({DAY})))
    assert machine_run(world).last == "Excluded"


def test_a_held_lock_ends_well_and_starts_nothing():
    world = World(_plan())
    world.store.acquire("eval:sales:daily", "other", timedelta(minutes=5), NOW)
    assert (machine_run(world).last, world.jobs.starts) == ("LockHeld", [])


def test_an_error_of_the_machinery_alerts_releases_the_lock_and_is_red(monkeypatch: pytest.MonkeyPatch):
    """Guards trap 12: no path where something broke ends green."""
    world = World(_plan())

    def broken(*_: Any) -> None:
        raise Transient("the table is away")

    monkeypatch.setattr(Handlers, "evaluator", broken)
    ended = machine_run(world)
    assert (ended.status, ended.last) == ("FAILED", "MachineFailed")
    assert world.pager.kinds == ["machine_error"]
    assert world.store.holder("eval:sales:daily", world.clock.now()) is None


def test_the_router_names_executions_so_that_a_repeat_is_dropped_and_a_new_wish_is_not():
    world = World(_plan())
    handlers = Handlers(world.plane)

    def record(moment: str, name: str = "INSERT", pk: str = "MARKER#sales") -> dict[str, Any]:
        image = {"PK": {"S": pk}, "SK": {"S": "2026-03-10#daily"}, "requestedAt": {"S": moment}, "source": {"S": "x"}}
        return {"eventName": name, "dynamodb": {"NewImage": image, "SequenceNumber": "1"}}

    first, second = "2026-03-10T08:00:00.000000Z", "2026-03-10T09:00:00.000000Z"
    records = [
        record(first),
        record(first),
        record(second, "MODIFY"),
        record(first, "REMOVE"),
        record(first, pk="RUN#1"),
    ]
    names = [request.name for request in handlers.stream_router({"Records": records})]
    assert len(names) == 3
    assert len(set(names)) == 2
