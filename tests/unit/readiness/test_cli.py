"""Every command of `lockstep readiness`: what it does, what it says, what it says to a program, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.kernel.errors import InvalidInput, LockstepError
from lockstep.readiness import cli, config
from lockstep.readiness.catalogue import Catalogue
from lockstep.readiness.control import Control, NotFound
from lockstep.readiness.model import ExclusionPlan, IllegalTransition, RetryPlan, RunStatus, SchedulePlan
from resources.readiness import Deployment
from tests.unit.readiness.builders import DAY, KEY
from tests.unit.readiness.world import World, pipeline, trait

DATE = DAY.isoformat()
ONLY_TODAY = ExclusionPlan(dates=frozenset({DAY - timedelta(days=1)}))

Call = Callable[..., Any]


@pytest.fixture
def world() -> World:
    return World(pipeline("sales", trait("fresh"), exclusions=ONLY_TODAY, retry=RetryPlan(max_attempts=1)))


class _Catalogue(Catalogue):
    def __init__(self, world: World) -> None:
        super().__init__(config.Registry({}, {}, {}, {}), world.store, world.clock)
        self._world = world

    def plans(self) -> Any:
        return self._world.plans


@pytest.fixture
def call(world: World, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command on the world; returns its words, or its JSON if that was asked for."""
    parts = (world.driver, world.control, world.watchdog)
    deployment = Deployment(world.plane, _Catalogue(world), *parts, dynamodb=None, table="")
    monkeypatch.setattr(cli, "_deployment", lambda: deployment)

    def run(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(cli.app, arguments)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return json.loads(done.output) if "--json" in arguments else done.output

    return run


def _complete(world: World) -> None:
    world.jobs.finish_at_once = True
    world.tick()
    assert world.state(KEY).status is RunStatus.COMPLETED


def test_status_is_a_table_of_the_latest_executions(call: Call, world: World):
    assert "never opened" in call("status")
    world.read(500)
    world.tick()
    title, row = call("status", "sales").splitlines()
    assert title.split() == ["pipeline", "date", "schedule", "status", "try", "blocking", "updated"]
    assert row.split() == ["sales", DATE, "daily", "PENDING", "0.1", "fresh", DATE, "08:00:00"]
    (row,) = call("status", "--json")
    assert (row["pipelineId"], row["status"], row["readiness"]["blocking"]) == ("sales", "PENDING", ["fresh"])


def test_evaluate_asks_every_evaluator_and_its_exit_code_is_the_verdict(call: Call, world: World):
    assert f"sales/{DATE}/daily: READY" in call("evaluate", "sales")
    world.read(500)
    words = call("evaluate", "sales", "--date", DATE, code=1)
    assert "500 s behind, 100 s allowed" in words
    found = call("evaluate", "sales", "--json", code=1)
    assert (found["status"], found["blocking"], found["traits"][0]["status"]) == ("NOT_READY", ["fresh"], "FAIL")
    world.read(OSError("[errno 5] broken"))
    assert "OSError: [errno 5] broken" in call("evaluate", "sales", code=1), "brackets are no markup"


def test_run_really_starts_and_a_second_one_is_refused_with_the_reason(call: Call, world: World):
    assert "RUNNING" in call("run", "sales")
    assert len(world.jobs.starts) == 1
    with pytest.raises(IllegalTransition, match=r"RUNNING already\..*use rerun"):
        call("run", "sales")


def test_run_keeps_the_wish_of_a_pipeline_that_is_not_ready(call: Call, world: World):
    world.read(500)
    assert call("run", "sales", code=1) == f"sales/{DATE}/daily waits: fresh. It runs by itself as soon as it may.\n"
    assert call("run", "sales", "--json", code=1)["status"] == "PENDING"
    world.read(0)
    world.tick(seconds=31)
    assert world.state(KEY).status is RunStatus.RUNNING


def test_a_dry_run_decides_the_same_and_changes_nothing(call: Call, world: World):
    """Guards the promise of a rehearsal: no job, no row, no event, no stored answer."""
    before = dict(world.table._items)
    assert "is ready and would start now" in call("run", "sales", "--dry-run")
    told = call("run", "sales", "--dry-run", "--json")
    assert (told["wouldStart"], told["events"][-2]["kind"]) == (True, "DRY_RUN_WOULD_TRIGGER")
    world.read(500)
    words = call("run", "sales", "--dry-run", code=1)
    assert "would not start" in words
    assert "fresh says not yet (500 s behind, 100 s allowed)" in words
    assert (world.table._items, world.jobs.starts, world.pager.alerts) == (before, [], [])
    world.read(0)
    world.tick()
    with pytest.raises(IllegalTransition, match="RUNNING already"):
        call("run", "sales", "--dry-run")


def test_rerun_and_replay_run_again_within_their_own_budgets(call: Call, world: World):
    _complete(world)
    assert "COMPLETED" in call("rerun", "sales", "--date", DATE, "--reason", "fixed a bug")
    again = call("replay", "sales", "--date", DATE, "--reason", "new schema", "--json")
    assert (again["generation"], again["reruns"]) == (2, {"manual": 1, "replay": 1})
    assert len(world.jobs.starts) == 3
    with pytest.raises(NotFound, match="never run"):
        call("rerun", "sales", "--date", "2026-03-09", "--reason", "x")


def test_backfill_opens_what_never_ran_and_says_what_it_left_out(call: Call, world: World):
    _complete(world)
    done = call("backfill", "sales", "--from", "2026-03-07", "--to", DATE, "--reason", "gap", "--json")
    assert [key["date"] for key in done["opened"]] == ["2026-03-07", "2026-03-08"]
    assert set(done["skipped"]) == {"sales/2026-03-09/daily", f"sales/{DATE}/daily"}
    words = call("backfill", "sales", "--from", "2026-03-09", "--to", DATE, "--reason", "gap")
    assert "0 opened, 2 left out" in words
    assert "excluded by the pipeline's calendar" in words


def test_cancel_stops_the_job_and_says_when_there_is_nothing_to_stop(call: Call, world: World):
    world.tick()
    assert "CANCELLED" in call("cancel", "sales", "--date", DATE, "--reason", "wrong input")
    assert len(world.jobs.cancels) == 1
    with pytest.raises(IllegalTransition, match="nothing left to stop"):
        call("cancel", "sales", "--date", DATE, "--reason", "again")


def test_explain_says_why_it_is_not_running_and_what_would_make_it_run(call: Call, world: World):
    assert "nobody has opened it" in call("explain", "sales")
    world.read(500)
    world.tick()
    words = call("explain", "sales")
    assert "fresh says not yet (500 s behind, 100 s allowed). It runs when this passes" in words
    assert f"`lockstep readiness push sales fresh PASS --date {DATE} --schedule daily` says so by hand" in words
    assert "looked at again in 30 s" in words
    world.clock.advance(600)
    assert "is the readiness sensor awake?" in call("explain", "sales")
    told = call("explain", "sales", "--date", "2026-03-09", "--json")
    assert told["explanation"][0].startswith("2026-03-09 is excluded by its calendar")
    world.read(0)
    world.tick()
    assert "is running" in call("explain", "sales")
    world.jobs.end("failed")
    world.tick(seconds=31)
    assert "`lockstep readiness rerun sales --date 2026-03-10" in call("explain", "sales")


def test_the_advice_of_explain_works(call: Call, world: World):
    """Guards the words themselves: a command that is advised must exist and do what is said."""
    world.read(500)
    world.tick()
    advised = call("explain", "sales").split("`")[1]
    assert f"fresh is PASS for sales/{DATE}/daily, for 3600 s" in call(*advised.split()[2:])
    world.tick(seconds=31)
    assert world.state(KEY).status is RunStatus.RUNNING


def test_a_push_for_every_execution_goes_before_what_an_evaluator_has_said(call: Call, world: World):
    world.read(500)
    world.tick()
    assert "fresh is PASS for every execution of sales" in call("push", "sales", "fresh", "PASS")
    world.tick(seconds=31)
    assert world.state(KEY).status is RunStatus.RUNNING


def test_push_tells_an_answer_for_one_execution_or_for_all(call: Call, world: World):
    world.read(500)
    told = call("push", "sales", "fresh", "PASS", "--date", DATE, "--value", '{"rows": 7}', "--ttl", "60", "--json")
    assert (told["status"], told["value"], told["pushed"]) == ("PASS", {"rows": 7}, True)
    call("evaluate", "sales")
    world.clock.advance(61)
    call("evaluate", "sales", code=1)
    for wrong in (("MAYBE",), ("PASS", "--value", "[1]"), ("PASS", "--value", "{")):
        with pytest.raises(InvalidInput):
            call("push", "sales", "fresh", *wrong)


def test_events_are_the_history_oldest_first(call: Call, world: World):
    _complete(world)
    lines = call("events", "sales").splitlines()
    assert [line.split()[4] for line in lines[1:]] == [
        "EXECUTION_OPENED",
        "READINESS_CHECKED",
        "TRIGGER_FIRED",
        "PIPELINE_COMPLETED",
    ]
    assert [event["kind"] for event in call("events", "sales", "--limit", "1", "--json")] == ["PIPELINE_COMPLETED"]
    assert call("events", "sales", "--date", "2026-03-08", "--json") == []
    world.plane.alerts.raise_now("windows.window_failed", "error", "1001/0015", "the checksum differs")
    assert "the checksum differs" in call("events", "windows")


def test_tick_drives_what_is_due_and_hears_markers(call: Call, world: World):
    world.control.mark(KEY._replace(date=DAY - timedelta(days=400)), "by-hand")
    done = call("tick", "--json")
    assert (done["opened"], done["stepped"], done["failures"]) == (2, 2, {})
    assert "0 opened" in call("tick")


def test_watchdog_makes_one_round(call: Call, world: World):
    world.plans["sales"] = world.plans["sales"]._replace(schedules=(SchedulePlan("daily", "08:00"),))
    world.clock.advance(20 * 60)
    assert call("watchdog", "--json") == {"raised": [f"sales:daily:{DATE}:schedule_missed"], "broken": {}}
    assert "0 alerts raised" in call("watchdog")


def test_several_schedules_need_a_name_for_a_date_and_none_for_now(call: Call, world: World):
    hours = tuple(SchedulePlan(f"h{hour:02}", f"{hour:02}:00") for hour in range(24))
    world.plans["sales"] = world.plans["sales"]._replace(schedules=hours)
    assert f"sales/{DATE}/h08: READY" in call("evaluate", "sales")
    with pytest.raises(InvalidInput, match="name one of h00"):
        call("evaluate", "sales", "--date", DATE)
    with pytest.raises(InvalidInput, match="no schedule noon"):
        call("evaluate", "sales", "--schedule", "noon")
    assert f"sales/{DATE}/h03: READY" in call("evaluate", "sales", "--date", DATE, "--schedule", "h03")


@pytest.mark.parametrize("command", ["status", "evaluate", "run", "explain"])
def test_an_unknown_pipeline_is_a_sentence(call: Call, command: str):
    with pytest.raises(NotFound, match="there is no such pipeline"):
        call(command, "nobody")


@pytest.mark.parametrize("day", ["2026-02-30", "10.3.2026", "today"])
def test_a_date_that_is_none_is_refused(call: Call, day: str):
    with pytest.raises(LockstepError, match="YYYY-MM-DD"):
        call("explain", "sales", "--date", day)


def test_validate_counts_what_is_there_and_lists_every_problem(call: Call, tmp_path: Path):
    assert call("validate").startswith("valid: ")
    assert call("validate", "--json")["valid"] is True
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "x.yaml").write_text(
        "name: x\narchetype: batch-ingestion\ntrigger: {type: gate}\nspeed: 3\n"
    )
    with pytest.raises(InvalidInput) as refused:
        call("validate", str(tmp_path))
    assert "x.yaml:4" in str(refused.value)


def test_export_asl_writes_the_machine(call: Call, tmp_path: Path):
    assert "statemachine.asl.json" in call("export-asl", str(tmp_path))


@pytest.fixture
def catalogue(world: World, monkeypatch: pytest.MonkeyPatch) -> Catalogue:
    """The shipped configuration over the world's store, as `register` and `unregister` see it."""
    found = Catalogue(config.load([config.shipped_folder()]), world.store, world.clock)
    plane = replace(world.plane, plans=found.plans, plan=found.plan)
    control = Control(plane, world.driver)
    deployment = Deployment(plane, found, world.driver, control, world.watchdog, dynamodb=None, table="")
    monkeypatch.setattr(cli, "_deployment", lambda: deployment)
    return found


def test_a_pipeline_is_registered_from_a_file_and_removed_by_its_name(catalogue: Catalogue, tmp_path: Path):
    path = tmp_path / "gate.yaml"
    path.write_text(
        "name: gate\narchetype: platform-gate\ntraits: {progress: {evaluator: 'builtin:table-reachable'}}\n"
        "trigger: {type: gate}\nschedules: [{name: daily, after: '03:00', timezone: UTC}]\n"
    )
    said = CliRunner().invoke(cli.app, ["register", str(path), "--json"])
    assert (said.exit_code, json.loads(said.output)) == (0, {"pipelineId": "gate"})
    assert "gate" in catalogue.plans()
    assert CliRunner().invoke(cli.app, ["unregister", "gate"]).exit_code == 0
    assert "gate" not in catalogue.plans()


@pytest.mark.parametrize("text", ["[1, 2]", "name: [", "name: gate\narchetype: none\n"])
def test_a_file_that_is_no_pipeline_is_refused_and_nothing_changes(catalogue: Catalogue, tmp_path: Path, text: str):
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    done = CliRunner().invoke(cli.app, ["register", str(path)])
    assert isinstance(done.exception, InvalidInput)
    assert done.exception.problems
    assert "gate" not in catalogue.plans()
