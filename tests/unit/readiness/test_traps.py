"""The traps that caught the designs before this one, one named test each (numbers as in the design's reference)."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.readiness import config, rules
from lockstep.readiness.model import (
    Budgets,
    Category,
    DriftRule,
    ExclusionPlan,
    IllegalTransition,
    Key,
    MonitorPlan,
    Polled,
    PollOutcome,
    Reason,
    RetryPlan,
    RunStatus,
    SchedulePlan,
    SlaPlan,
    Started,
    TraitPlan,
    TraitStatus,
    TriggerPlan,
)
from lockstep.readiness.store import Marker
from tests.unit.readiness.builders import DAY, KEY, NOW, after, evaluated, opened, plan, running
from tests.unit.readiness.world import World, pipeline, trait

ONLY_TODAY = ExclusionPlan(dates=frozenset({DAY - timedelta(days=1)}))


def _world(**changes) -> World:
    return World(pipeline(**{"exclusions": ONLY_TODAY, **changes}))


def _completed(world: World) -> None:
    world.tick()
    world.jobs.end()
    world.tick(seconds=31)
    assert world.state(KEY).status.is_success


def test_trap_01_attempts_belong_to_one_writer_and_reach_their_maximum():
    world = _world(retry=RetryPlan(max_attempts=3, backoff_seconds=1))
    for _ in range(8):
        world.tick(seconds=31)
        world.jobs.end("failed")
    assert (world.state(KEY).status, world.state(KEY).attempt, len(world.jobs.starts)) == (RunStatus.FAILED, 3, 3)
    assert [line.attempt for line in world.state(KEY).history] == [1, 2, 3]


def test_trap_02_a_lock_is_given_back_by_its_owner_and_can_be_taken_at_once():
    world = _world()
    world.read(500)
    world.tick()
    assert world.store.holder("eval:sales:daily", world.clock.now()) is None
    assert world.store.acquire("eval:sales:daily", "next", timedelta(minutes=5), world.clock.now())
    assert not world.store.release("eval:sales:daily", "somebody else")


def test_trap_03_a_lock_that_expires_in_a_long_run_does_not_let_a_second_one_in():
    world = _world()
    world.tick()
    for _ in range(20):
        world.tick(Marker(KEY, "again", world.clock.now()), seconds=600)
    assert (world.state(KEY).status, len(world.jobs.starts)) == (RunStatus.RUNNING, 1)


def test_trap_04_a_run_over_midnight_and_a_replay_of_a_past_date_touch_only_their_own_row():
    world = World(pipeline(exclusions=ONLY_TODAY), now=datetime(2026, 3, 10, 23, 59, 40, tzinfo=UTC))
    world.tick()
    world.jobs.end()
    world.tick(seconds=60)
    assert world.clock.now().date() == date(2026, 3, 11)
    assert world.state(KEY).status is RunStatus.COMPLETED
    world.jobs.end()
    world.tick(seconds=31)
    tomorrow = KEY._replace(date=date(2026, 3, 11))
    before = world.state(tomorrow)
    world.clock.advance(3 * 86400)
    world.control.rerun(KEY, Reason.REPLAY, "old day")
    assert world.state(KEY).generation == 1
    assert world.state(tomorrow) == before


def test_trap_05_a_marker_of_yesterdays_last_hour_is_taken_with_its_own_date():
    late = pipeline(schedules=(SchedulePlan("h23", "23:00"),))
    world = World(late, now=datetime(2026, 3, 11, 0, 1, tzinfo=UTC))
    world.plans["sales"] = world.plans["sales"]._replace(watched=False)
    key = Key("sales", DAY, "h23")
    world.tick(Marker(key, "external", NOW))
    assert world.state(key).status is RunStatus.RUNNING
    week_ago = key._replace(date=DAY - timedelta(days=7))
    world.tick(Marker(week_ago, "backfill", NOW))
    assert world.state(week_ago).status is RunStatus.RUNNING


def test_trap_06_a_hiccup_of_the_status_call_is_unknown_and_starts_nothing():
    world = _world()
    world.tick()
    world.jobs.unreadable = True
    world.ticks(10)
    assert (world.state(KEY).status, world.state(KEY).unknown_polls) == (RunStatus.RUNNING, 10)
    assert world.pager.kinds == ["status_unknown"]
    world.jobs.unreadable = False
    world.jobs.end()
    world.tick(seconds=31)
    assert (world.state(KEY).status, len(world.jobs.starts)) == (RunStatus.COMPLETED, 1)


def test_trap_07_the_validation_timeout_counts_from_the_executions_own_start():
    world = _world(sla=SlaPlan(validation_timeout=timedelta(minutes=45)), retry=RetryPlan(max_attempts=1))
    world.read(500)
    world.tick()
    world.tick(seconds=44 * 60)
    assert world.state(KEY).status is RunStatus.PENDING
    world.tick(seconds=61)
    assert world.state(KEY).status is RunStatus.FAILED
    assert world.state(KEY).failure.category is Category.TIMEOUT


def test_trap_08_deadlines_fire_without_data_without_a_driver_and_for_a_hung_job():
    world = _world(sla=SlaPlan(evaluation="08:10", completion="09:00"))
    world.read(500)
    world.tick()
    world.clock.advance(15 * 60)
    world.watchdog.check()
    assert world.pager.kinds[0] == "evaluation_sla_breach"
    world.read(0)
    world.tick()
    assert world.state(KEY).status is RunStatus.RUNNING
    world.clock.advance(3600)
    world.watchdog.check()
    assert world.pager.kinds.count("completion_sla_breach") == 1


def test_trap_09_a_failed_execution_can_run_again_under_a_name_of_its_own():
    world = _world(retry=RetryPlan(max_attempts=1))
    world.tick()
    world.jobs.end("failed")
    world.tick(seconds=31)
    world.control.rerun(KEY, Reason.MANUAL, "fixed")
    assert len(set(world.jobs.starts)) == 2


def test_trap_10_drift_compares_a_baseline_in_a_named_field_and_zero_is_a_value():
    watch = MonitorPlan(True, timedelta(hours=2), (DriftRule("fresh", "rows", 5),))
    world = _world(monitor=watch, budgets=Budgets(drift=1))
    world.read({"lagSeconds": 0, "rows": 0})
    _completed(world)
    world.ticks(2)
    world.read({"lagSeconds": 999, "rows": 5})  # stale by now, which is natural, and within the threshold
    world.ticks(2)
    assert world.state(KEY).status is RunStatus.COMPLETED_MONITORING
    world.read({"lagSeconds": 0, "rows": 6})
    world.tick(seconds=31)
    assert "MONITORING_DRIFT_DETECTED" in world.kinds(KEY)
    assert (world.state(KEY).generation, world.state(KEY).reason) == (1, Reason.DRIFT)


def test_trap_11_a_finished_date_is_not_armed_again_by_expiry():
    world = _world()
    _completed(world)
    world.clock.advance(400 * 86400)
    world.plans["sales"] = world.plans["sales"]._replace(watched=False)
    world.tick(Marker(KEY, "old", world.clock.now()))
    assert (world.state(KEY).status, len(world.jobs.starts)) == (RunStatus.COMPLETED, 1)


def test_trap_12_every_failure_is_visible_as_one():
    world = _world(trigger=TriggerPlan("glue"))
    world.tick()
    assert world.state(KEY).status is RunStatus.FAILED
    assert "not enabled" in world.state(KEY).failure.message
    assert {"TRIGGER_FAILED", "PIPELINE_FAILED", "ALERT"} <= set(world.kinds(KEY))


def test_trap_13_nothing_fails_open(tmp_path: Path):
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "x.yaml").write_text("name: x\narchetype: none\ntrigger: {type: gate}\n")
    with pytest.raises(InvalidInput):
        config.load([tmp_path])
    with pytest.raises(InvalidInput):
        list(rules.timing.due_keys(plan(schedules=(SchedulePlan("a", "soon"),)), NOW))


def test_trap_14_a_named_calendar_excludes(tmp_path: Path):
    for kind, text in {
        "archetypes": "name: a\nrequiredTraits: [{type: t}]\n",
        "calendars": "name: holidays\ndates: ['2026-03-10']\n",
        "pipelines": "name: sales\narchetype: a\ntraits: {t: {}}\ntrigger: {type: gate}\n"
        "exclusions: {calendar: holidays}\n",
    }.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "it.yaml").write_text(text)
    the_plan = config.load([tmp_path]).plan("sales")
    assert DAY not in {key.date for key in rules.timing.due_keys(the_plan, NOW)}
    with pytest.raises(IllegalTransition, match="excluded"):
        rules.open_execution(the_plan, KEY, NOW, Reason.REPLAY)


def test_trap_15_a_rerun_while_running_is_refused():
    world = _world()
    world.tick()
    with pytest.raises(IllegalTransition, match="duplicate"):
        world.control.rerun(KEY, Reason.MANUAL, "impatient")
    assert world.jobs.most_alive == 1


def test_trap_16_answers_of_an_earlier_try_do_not_decide_the_next_one():
    state = running()
    first = state.run_id
    state = after(state, Polled(first, PollOutcome.FAILED, Category.TRANSIENT))
    later = NOW + timedelta(minutes=5)
    state = after(state, evaluated(state), now=later)
    state = after(state, Started(state.run_id, {"id": "job-2"}), now=later)
    again = after(state, Polled(first, PollOutcome.FAILED, Category.TRANSIENT), now=later)
    assert again == state
    assert (again.attempt, again.status) == (2, RunStatus.RUNNING)
    with pytest.raises(IllegalTransition):
        rules.step(state, rules.Callback(first, True), later)


def test_trap_17_a_rerun_is_recorded_in_the_write_that_accepts_it():
    world = _world()
    _completed(world)
    stale = world.state(KEY)
    world.control.rerun(KEY, Reason.MANUAL, "one", rerun_id="r1")
    with pytest.raises(Exception, match="moved by another"):
        world.control._write(stale, rules.RerunRequested("r2", Reason.MANUAL, "two"))
    assert [rerun["rerunId"] for rerun in world.store.reruns(world.clock.now())] == ["r1"]


def test_trap_18_no_event_without_its_state_and_none_twice():
    world = _world()
    _completed(world)
    kinds = world.kinds(KEY)
    assert kinds.count("TRIGGER_FIRED") == kinds.count("PIPELINE_COMPLETED") == 1
    stale = opened(world.plans["sales"])
    with pytest.raises(Exception, match="moved by another"):
        world.store.commit(stale, stale, [rules.Emit("GHOST")], world.clock.now())
    assert "GHOST" not in world.kinds(KEY)


def test_trap_19_a_pushed_answer_goes_before_the_evaluator_until_it_expires():
    world = _world()
    world.read(500)
    world.control.push("sales", "fresh", TraitStatus.PASS, ttl=timedelta(minutes=5), key=KEY)
    assert world.control.evaluate(KEY).status == "READY"
    assert world.asked == []
    world.clock.advance(301)
    assert world.control.check(KEY).blocking == ("fresh (STALE)",)
    assert world.control.evaluate(KEY).blocking == ("fresh",)


def test_trap_20_the_readiness_rule_holds_wherever_it_is_asked():
    names = ("a", "b", "c", "d")
    majority = config.ReadinessRule("majority-pass")
    world = World(pipeline("sales", *(trait(name) for name in names), rule=majority, exclusions=ONLY_TODAY))
    for name in names[:2]:
        world.read(500, trait=name)
    assert world.control.evaluate(KEY).status == "NOT_READY", "two of four are no majority"
    world.tick()
    assert world.state(KEY).status is RunStatus.PENDING
    world.read(0, trait="a")
    assert world.control.evaluate(KEY).status == "READY"
    world.tick(seconds=31)
    assert world.state(KEY).status is RunStatus.RUNNING


def test_trap_21_one_alert_per_breach_and_none_for_what_is_long_past():
    world = _world(sla=SlaPlan(evaluation="08:10", at_risk_lead=timedelta(minutes=5)))
    world.read(500)
    for _ in range(30):
        world.tick(seconds=60)
        world.watchdog.check()
    assert world.pager.kinds == ["evaluation_sla_at_risk", "evaluation_sla_breach"]
    fresh_deploy = World(pipeline(sla=SlaPlan(evaluation="02:00"), exclusions=ONLY_TODAY))
    fresh_deploy.read(500)
    fresh_deploy.ticks(5)
    assert fresh_deploy.pager.kinds == []


@pytest.mark.parametrize("hour", range(0, 24, 3))
def test_trap_22_the_same_at_every_hour(hour: int):
    start = datetime(2026, 3, 10, hour, 59, tzinfo=UTC)
    schedule = SchedulePlan("at", f"{hour:02}:59", deadline="30m")
    world = World(pipeline(schedules=(schedule,), exclusions=ONLY_TODAY), now=start)
    key = Key("sales", DAY, "at")
    world.read(500)
    world.tick()
    world.tick(seconds=1801)
    assert world.pager.kinds == ["evaluation_sla_breach"]
    world.read(0)
    world.tick(seconds=31)
    assert world.state(key).status is RunStatus.RUNNING


def test_trap_23_configuration_reads_no_environment_and_runs_no_shell():
    for value in ("${AWS_SECRET_ACCESS_KEY}", "$HOME", "${unclosed"):
        with pytest.raises(ValueError, match="not a template variable"):
            config.check_templates({"headers": {"a": value}}, "trigger")
    with pytest.raises(ValueError, match="shell"):
        config.check_argv(["/bin/sh", "-c", "id"])
    config.check_templates({"body": "run ${date} for 5$"}, "trigger")


def test_trap_24_lists_are_read_from_the_truth():
    world = _world()
    _completed(world)
    (run,) = world.store.runs("sales", world.clock.now())
    world.table._items[("PIPELINE#sales", f"RUN#{run['runId']}")]["status"] = "RUNNING"
    assert world.store.runs("sales", world.clock.now()) == [run]


def test_trap_25_the_clock_alone_starts_a_pipeline():
    world = _world()
    world.tick()
    assert world.state(KEY).reason is Reason.SCHEDULE
    assert len(world.jobs.starts) == 1


def test_trap_26_both_spellings_and_all_template_variables_are_understood():
    from lockstep.readiness.evaluators.answer import Question
    from lockstep.readiness.safety import TEMPLATE_VARIABLES

    body = Question(KEY, TraitPlan("fresh"), NOW).body()
    assert body["pipelineId"] == body["pipelineID"] == "sales"
    assert set(TEMPLATE_VARIABLES) >= {"date", "hour", "scheduleID", "pipelineID"}
