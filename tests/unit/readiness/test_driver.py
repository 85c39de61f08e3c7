"""The driver over the in-memory table: order of I/O, deaths in between, two drivers, alerts that always arrive."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import date, timedelta

import pytest

from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import LostClaim
from lockstep.readiness.model import (
    Category,
    Evaluated,
    ExclusionPlan,
    IllegalTransition,
    Key,
    MonitorPlan,
    Reason,
    RetryPlan,
    RunStatus,
    SchedulePlan,
    SlaPlan,
    Tick,
    TraitResult,
    TraitStatus,
    TriggerPlan,
)
from lockstep.readiness.store import Marker
from tests.faults.modes import FAILS, HANGS, meet
from tests.unit.readiness.builders import DAY, KEY, NOW
from tests.unit.readiness.world import World, pipeline, trait

YESTERDAY = Key("sales", DAY - timedelta(days=1), "daily")


def _world(*plans, **options) -> World:
    world = World(*(plans or (pipeline(),)), **options)
    for plan in plans or (pipeline(),):  # yesterday is over: the tests look at one date
        world.plans[plan.pipeline] = world.plans[plan.pipeline]._replace(
            exclusions=ExclusionPlan(dates=frozenset({DAY - timedelta(days=1)}))
        )
    return world


def test_a_ready_pipeline_runs_once_and_completes():
    world = _world()
    world.tick()
    assert world.state(KEY).status is RunStatus.RUNNING
    world.jobs.end()
    world.tick(seconds=31)
    assert world.state(KEY).status is RunStatus.COMPLETED
    world.ticks(3, seconds=600)
    assert len(world.jobs.starts) == 1
    assert world.kinds(KEY) == ["EXECUTION_OPENED", "READINESS_CHECKED", "TRIGGER_FIRED", "PIPELINE_COMPLETED"]


def test_a_pipeline_waits_until_it_is_ready_and_says_so_once():
    world = _world()
    world.read(500)
    world.ticks(4)
    assert world.state(KEY).readiness.blocking == ("fresh",)
    world.read(10)
    world.tick(seconds=31)
    assert world.kinds(KEY).count("READINESS_CHECKED") == 2
    assert len(world.jobs.starts) == 1


@pytest.mark.parametrize(
    "point",
    [
        "readiness.commit.before",
        "readiness.commit.before_copies",
        "readiness.evaluate.before",
        "readiness.evaluate.after",
        "readiness.start.before",
        "readiness.start.after",
    ],
)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_driver_that_dies_anywhere_costs_time_and_never_a_second_job(point: str, nth: int):
    """Guards every step boundary: the next driver finishes what the dead one began."""
    world = _world(pipeline(trigger=TriggerPlan("http", timeout=30)))
    with armed(point, "raise", nth=nth) as charge:
        for _ in range(4):
            try:
                world.tick(seconds=31)
            except CrashInjected:
                break
    for _ in range(8):
        world.tick(seconds=61)
        world.jobs.end()
    assert world.state(KEY).status is RunStatus.COMPLETED
    assert len(world.jobs.starts) == 1
    assert charge.fired or nth > 1
    (run,) = world.store.runs("sales", world.clock.now())
    assert run["status"] == "COMPLETED"


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@pytest.mark.parametrize(
    "point",
    [
        "readiness.commit.before",
        "readiness.commit.before_copies",
        "readiness.evaluate.before",
        "readiness.evaluate.after",
        "readiness.start.before",
        "readiness.start.after",
        "readiness.alert.before",
        "readiness.alert.after",
    ],
)
def test_a_driver_that_fails_or_sleeps_anywhere_never_causes_a_second_job_or_a_silent_alert(point: str, mode: str):
    """While it sleeps beyond every lease, another driver does its work; then it wakes up and goes on."""
    world = _world(pipeline(trigger=TriggerPlan("http", timeout=30), sla=SlaPlan(evaluation="08:10")))
    world.read(500)
    other = world.new_driver()

    def victim() -> None:
        world.driver.tick([])
        world.clock.advance(660)
        world.driver.tick([])  # the alert
        world.read(0)
        world.clock.advance(31)
        world.driver.tick([])  # the start

    def rival() -> None:
        world.clock.advance(1000)
        assert not other.tick([]).failures

    meet(point, mode, victim, rival)
    world.read(0)
    for _ in range(8):
        world.tick(seconds=61)
        world.jobs.end()
    assert world.state(KEY).status is RunStatus.COMPLETED
    assert len(world.jobs.starts) == 1
    assert set(world.pager.kinds) == {"evaluation_sla_breach"}
    assert world.kinds(KEY).count("ALERT") == 1


def test_a_lost_answer_is_repeated_with_the_same_token():
    world = _world()
    world.jobs.lose_answers = 2
    world.tick()
    assert world.state(KEY).status is RunStatus.TRIGGERING
    world.ticks(4)
    assert world.state(KEY).status is RunStatus.RUNNING
    assert len(world.jobs.starts) == 1


def test_a_repeated_start_that_is_refused_does_not_run_a_second_job_beside_the_first():
    """Guards against believing a refusal: this request did nothing, but the one whose answer was lost did."""
    world = _world()
    world.jobs.lose_answers = 1
    world.tick()
    world.jobs.refuse = Category.TRANSIENT
    world.ticks(4)
    assert (world.state(KEY).status, world.state(KEY).attempt) == (RunStatus.TRIGGERING, 1)
    world.jobs.refuse = None
    world.ticks(2)
    assert world.state(KEY).status is RunStatus.RUNNING
    assert len(world.jobs.starts) == 1


def test_a_repeated_start_that_is_refused_for_good_is_left_to_a_person():
    world = _world()
    world.jobs.lose_answers = 1
    world.tick()
    world.jobs.refuse = Category.PERMANENT
    world.ticks(3)
    state = world.state(KEY)
    assert state.status is RunStatus.FAILED
    assert "nobody knows whether the job was started" in state.failure.message
    assert len(world.jobs.starts) == 1


def test_a_first_start_that_is_refused_is_tried_again():
    world = _world()
    world.jobs.refuse = Category.TRANSIENT
    world.tick()
    assert (world.state(KEY).status, world.state(KEY).attempt) == (RunStatus.PENDING, 2)


@pytest.mark.parametrize("moment", ["waiting", "starting", "running", "retrying", "watching"])
def test_a_driver_whose_clock_ran_ahead_holds_an_execution_no_longer_than_its_plan(moment: str):
    """Guards against waits that were written by a wrong clock: everybody else would wait until it is right."""
    world = _world(pipeline(monitor=MonitorPlan(True, timedelta(minutes=10))))
    world.read(500 if moment == "waiting" else 0)
    world.jobs.lose_answers = int(moment == "starting")
    if moment in ("retrying", "watching"):
        world.tick()
        world.jobs.end("failed" if moment == "retrying" else "succeeded")
    world.clock.jump(7200)
    world.tick()
    before = world.state(KEY)
    world.clock.jump(-7200)
    world.tick()
    assert "CLOCKS_DISAGREE" in world.kinds(KEY)
    world.read(0)
    for _ in range(3):
        world.tick(seconds=61)
        world.jobs.end()
    assert world.state(KEY).version > before.version + 1
    world.ticks(15, seconds=61)
    assert world.state(KEY).status is RunStatus.COMPLETED


def test_an_execution_that_a_wrong_clock_opened_begins_now():
    world = _world()
    world.clock.jump(7200)
    world.control._open(KEY, Reason.SCHEDULE)
    world.clock.jump(-7200)
    world.ticks(2)
    assert world.state(KEY).status is RunStatus.RUNNING


def test_an_execution_of_tomorrow_still_waits_for_its_time():
    world = _world()
    tomorrow = Key("sales", DAY + timedelta(days=1), "daily")
    world.tick(Marker(tomorrow, "external", NOW))
    before = world.state(tomorrow)
    world.ticks(3)
    assert world.state(tomorrow).started_at == before.started_at
    assert "CLOCKS_DISAGREE" not in world.kinds(tomorrow)


def test_a_start_that_cannot_be_repeated_is_left_to_a_person():
    """Guards against running a command twice because its first answer was lost."""
    world = _world(pipeline(trigger=TriggerPlan("http", resumable=False)))
    world.jobs.lose_answers = 1
    world.tick()
    assert world.state(KEY).status is RunStatus.FAILED
    world.ticks(5, seconds=3600)
    assert len(world.jobs.starts) == 1
    assert world.pager.kinds == ["pipeline_failed"]


def test_two_drivers_on_the_same_version_start_one_job():
    world = _world()
    first, second = world.new_driver(), world.new_driver()
    state = world.control._open(KEY, Reason.SCHEDULE)
    first.drive(state, [Tick()])
    with pytest.raises(LostClaim):
        second.drive(state, [Tick()])
    assert world.jobs.most_alive == 1
    assert len(world.jobs.starts) == 1


def test_a_verdict_that_comes_too_late_does_not_undo_what_another_driver_has_started():
    """Guards the write by version: this write touches no run, so nothing else would stop it."""
    world = _world()
    stale = world.control._open(KEY, Reason.SCHEDULE)
    world.tick()
    assert world.state(KEY).status is RunStatus.RUNNING
    too_late = Evaluated(stale.run_id, (TraitResult("fresh", TraitStatus.FAIL, "not yet"),))
    with pytest.raises(LostClaim):
        world.new_driver().drive(stale, [too_late])
    assert world.state(KEY).status is RunStatus.RUNNING


def test_one_broken_pipeline_does_not_stop_the_others():
    world = _world(pipeline("bad", trigger=TriggerPlan("http")), pipeline("good"))
    world.read(RuntimeError("boom"), pipeline="bad")
    report = world.tick()
    assert report.stepped == 2
    assert world.state(KEY._replace(pipeline="good")).status is RunStatus.RUNNING
    assert world.state(KEY._replace(pipeline="bad")).readiness.status == "ERROR"


def test_a_failed_job_is_tried_again_after_its_backoff_and_not_before():
    world = _world(pipeline(retry=RetryPlan(max_attempts=3, backoff_seconds=60, multiplier=2)))
    world.tick()
    world.jobs.end("failed")
    world.tick(seconds=31)
    assert (world.state(KEY).attempt, world.state(KEY).status) == (2, RunStatus.PENDING)
    world.tick(Marker(KEY, "impatient", world.clock.now()), seconds=30)
    assert len(world.jobs.starts) == 1, "a marker does not shorten the backoff"
    world.tick(seconds=31)
    assert len(world.jobs.starts) == 2
    for _ in range(2):
        world.jobs.end("failed")
        world.tick(seconds=31)
        world.tick(seconds=300)
    assert world.state(KEY).status is RunStatus.FAILED
    assert len(world.jobs.starts) == 3
    assert world.pager.kinds == ["pipeline_failed"]
    assert "RETRY_EXHAUSTED" in world.kinds(KEY)


def test_a_refusal_that_is_permanent_is_not_repeated():
    world = _world()
    world.jobs.refuse = Category.PERMANENT
    world.ticks(5, seconds=600)
    assert (world.state(KEY).status, world.state(KEY).attempt) == (RunStatus.FAILED, 1)


def test_a_cancelled_run_ends_when_the_job_has_stopped():
    world = _world()
    world.tick()
    world.jobs.unreadable = True
    state = world.control.cancel(KEY, "wrong input")
    assert state.status is RunStatus.RUNNING
    with pytest.raises(IllegalTransition, match="duplicate"):
        world.control.rerun(KEY, Reason.MANUAL, "now")
    world.jobs.unreadable = False
    world.tick(seconds=31)
    assert world.state(KEY).status is RunStatus.CANCELLED
    assert set(world.jobs.state.values()) == {"cancelled"}


def _running_for_hours() -> World:
    world = _world(pipeline(run_timeout=timedelta(hours=1)))
    world.tick()
    world.clock.advance(3 * 3600)
    return world


@pytest.mark.parametrize("unreadable", [0, 4])
def test_a_job_that_ended_well_while_no_driver_looked_is_not_run_again(unreadable: int):
    """Its time was judged before it was asked: a driver that came back late stopped it, and ran it once more."""
    world = _running_for_hours()
    world.jobs.end()
    world.jobs.unreadable = True
    world.ticks(unreadable)
    world.jobs.unreadable = False
    world.ticks(4, seconds=600)
    assert (world.state(KEY).status, len(world.jobs.starts)) == (RunStatus.COMPLETED, 1)
    assert (world.jobs.cancels, world.pager.kinds) == ([], [])


def test_a_job_that_says_that_it_still_runs_is_stopped_when_its_time_is_over():
    world = _running_for_hours()
    world.tick()
    assert (world.jobs.cancels, world.pager.kinds) == (world.jobs.starts, ["run_timeout"])
    assert world.state(KEY).failure.category is Category.TIMEOUT
    world.ticks(2)
    assert (world.state(KEY).attempt, len(world.jobs.starts)) == (2, 2)


def test_a_job_of_which_nobody_can_say_anything_is_given_up_when_its_time_is_over():
    world = _running_for_hours()
    world.jobs.unreadable = True
    world.ticks(12)
    assert (world.state(KEY).status, len(world.jobs.starts)) == (RunStatus.FAILED, 1)
    assert world.pager.kinds == ["status_unknown", "run_timeout", "pipeline_failed"]


def test_an_alert_reaches_the_pager_although_its_driver_died_or_the_pager_was_down():
    """Guards alerts between the ledger and the sink: they wait in the execution until somebody took them."""
    world = _world(pipeline(sla=SlaPlan(evaluation="08:10")))
    world.read(500)
    world.tick()
    with armed("readiness.alert.before", "raise"), pytest.raises(CrashInjected):
        world.tick(seconds=660)
    assert world.pager.alerts == []
    world.pager.broken = True
    world.tick(seconds=31)
    world.pager.broken = False
    world.ticks(5)
    assert world.pager.kinds == ["evaluation_sla_breach"]
    assert [event for event in world.kinds(KEY) if event == "ALERT"] == ["ALERT"]


def test_a_slow_evaluator_is_not_asked_twice_at_the_same_time():
    world = _world()
    world.store.acquire("eval:sales:daily", "somebody", timedelta(minutes=2), world.clock.now())
    world.tick()
    assert world.asked == []
    world.tick(seconds=180)
    assert len(world.asked) == 1


def test_a_stored_pass_is_reused_until_it_expires_and_a_fail_never_is():
    """Guards trap 19: what the TTL means is decided, and the same everywhere."""
    world = _world(pipeline("sales", trait("fresh", ttl=300), trait("room", ttl=300)))
    world.read(500, trait="room")
    world.ticks(3)
    assert world.asked.count(("sales", "fresh")) == 1
    assert world.asked.count(("sales", "room")) == 3
    world.ticks(10)
    assert world.asked.count(("sales", "fresh")) == 2


def test_an_excluded_date_is_dormant_and_a_marker_for_it_is_refused_aloud():
    world = _world(pipeline())
    world.plans["sales"] = world.plans["sales"]._replace(
        exclusions=ExclusionPlan(dates=frozenset({DAY, YESTERDAY.date}))
    )
    world.tick()
    report = world.tick(Marker(KEY, "external", NOW))
    assert "excluded" in report.refused[0]
    assert world.kinds(KEY) == ["MARKER_REFUSED"]
    assert world.store.status(KEY, NOW) is None


def test_a_marker_for_an_unknown_pipeline_is_refused_aloud():
    world = _world()
    report = world.tick(Marker(Key("nobody", DAY), "external", NOW))
    assert "no such pipeline" in report.refused[0]


def test_a_marker_for_a_pipeline_that_was_registered_a_second_ago_is_not_refused():
    """Guards the first wish: the list of all pipelines is seconds old, and a refused marker never comes back."""
    world = _world()
    world.plane = replace(world.plane, plan={"young": pipeline("young")}.get)
    report = world.new_driver().tick([Marker(Key("young", DAY, "daily"), "external", NOW)])
    assert report.refused == []
    assert [row["date"] for row in world.store.executions("young", NOW, limit=5)] == [DAY.isoformat()]


def test_duplicate_markers_change_nothing():
    world = _world()
    for _ in range(3):
        world.tick(Marker(KEY, "external", NOW), Marker(KEY, "external", NOW))
    assert len(world.jobs.starts) == 1


def test_a_tick_is_bounded_and_the_rest_comes_next_time():
    plans = [pipeline(f"p{number:02}") for number in range(10)]
    world = _world(*plans)
    world.driver = world.new_driver(executions=4)
    assert (world.tick().left_over, len(world.jobs.starts)) == (6, 4)
    world.tick()
    world.tick()
    assert len(world.jobs.starts) == 10


def test_many_threads_step_many_pipelines():
    plans = [pipeline(f"p{number:02}") for number in range(20)]
    world = _world(*plans, threads=4)
    world.tick()
    assert len(world.jobs.starts) == 20


def test_a_rehearsal_runs_nothing_and_the_same_date_runs_for_real_afterwards():
    world = _world(pipeline(dry_run=True))
    world.tick()
    assert world.state(KEY).status is RunStatus.COMPLETED
    assert "DRY_RUN_WOULD_TRIGGER" in world.kinds(KEY)
    assert world.jobs.starts == []
    world.plans["sales"] = world.plans["sales"]._replace(dry_run=False)
    world.tick(seconds=31)
    assert len(world.jobs.starts) == 1


def test_an_old_open_execution_is_found_by_its_pipeline_and_not_by_its_date():
    """Guards long runs: ten days later nothing but the index of open executions remembers it."""
    world = _world()
    world.tick()
    world.plans["sales"] = world.plans["sales"]._replace(
        schedules=(SchedulePlan("other"),), run_timeout=timedelta(days=30)
    )
    world.clock.advance(10 * 86400)
    world.jobs.end()
    world.tick()
    assert world.state(KEY).status is RunStatus.COMPLETED
    assert KEY.date == date(2026, 3, 10)


def test_an_evaluator_that_hangs_holds_its_own_execution_and_neither_the_tick_nor_the_others():
    """Guards the bound of a tick: Dagster gives one up after a minute, and with it everything that it had to tell."""
    world = _world(pipeline("slow"), pipeline("quick"), threads=4)
    go_on, slow, quick = threading.Event(), Key("slow", DAY), Key("quick", DAY)
    world.readings[("slow", "fresh")] = go_on
    report = world.driver.tick(until=world.clock.monotonic() + 0.5)
    assert not go_on.is_set(), "the tick came back although nobody answered"
    assert ([after.key for _, after in report.moved], report.left_over) == ([quick], 1)
    told = Marker(slow, "external", NOW)
    world.store.put_marker(told)
    report = world.driver.tick([told], until=world.clock.monotonic() + 0.5)
    assert report.left_over == 0, "it is left to its thread"
    assert len(world.store.markers("slow", NOW).markers) == 1, "and what asks for it meanwhile is still to be heard"
    assert world.asked.count(("slow", "fresh")) == 1
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("readiness"):
            thread.join(30)
    assert world.state(slow).status is RunStatus.RUNNING
    report = world.driver.tick(until=world.clock.monotonic() + 5)
    assert slow in [after.key for _, after in report.moved], "the next tick reports it"


def test_rows_that_are_known_to_be_opened_are_not_read_again_and_again():
    """Guards the cost of a tick: a thousand hourly pipelines have 24,000 finished rows a day."""
    world = World(pipeline(schedules=tuple(SchedulePlan(f"h{hour:02}", f"{hour:02}:00") for hour in range(24))))
    world.jobs.finish_at_once = True
    world.tick(seconds=6 * 3600)
    world.tick()
    assert world.tick(seconds=31).looked_at == 0
    lost = world.store.load(Key("sales", DAY, "h14"), world.plans["sales"], world.clock.now())
    assert lost.status is RunStatus.COMPLETED
    assert world.tick(seconds=301).looked_at == 7, "every few minutes all are, because the index is a hint"
