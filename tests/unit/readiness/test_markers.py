"""Markers, whoever made them: heard once, kept until then, and answered where their maker will look."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from lockstep.kernel.errors import LostClaim
from lockstep.readiness import stream
from lockstep.readiness.model import (
    Budgets,
    Key,
    Reason,
    RunStatus,
    SchedulePlan,
    TraitPlan,
)
from lockstep.readiness.store import Marker
from lockstep.readiness.table import Put
from tests.unit.readiness.builders import DAY, KEY, NOW
from tests.unit.readiness.world import World, pipeline, trait

LONG_AGO = KEY._replace(date=date(2019, 2, 28))


def _by_hand(world: World, sort_key: str, *, name: str = "sales", **attributes: Any) -> None:
    world.table.write([Put({"PK": f"MARKER#{name}", "SK": sort_key, **attributes})])


def _sweep_and_tick(world: World, seconds: float = 31) -> Any:
    found, _ = world.driver.sweep(0, 100)
    return world.tick(*found, seconds=seconds)


def _left(world: World) -> list[Marker]:
    return world.store.markers("sales", world.clock.now()).markers


def _refusals(world: World, name: str = "sales") -> list[str]:
    events = world.store.events(name, world.clock.now(), limit=500)
    return [event["message"] for event in events if event["kind"] == "MARKER_REFUSED"]


@pytest.mark.parametrize("attributes", [{}, {"requestedAt": "2026-03-10T07:59:00Z"}, {"requestedAt": 1773129540}])
def test_a_marker_made_by_hand_for_a_date_years_ago_is_run(attributes: dict[str, Any]):
    """Guards backfill by marker: no date is too old, and nobody must know our form of a timestamp."""
    world = World(pipeline())
    _by_hand(world, "2019-02-28#daily", **attributes)
    _sweep_and_tick(world)
    assert (world.state(LONG_AGO).status, world.state(LONG_AGO).reason) == (RunStatus.RUNNING, Reason.MARKER)
    assert _left(world) == []


def test_a_marker_that_a_full_tick_had_no_time_for_is_kept_until_it_is_heard():
    """Guards the wish itself: a tick that dropped what it had not looked at would lose an old date for ever."""
    world = World(*(pipeline(f"p{number}") for number in range(5)), pipeline())
    world.driver = world.new_driver(executions=1)
    _by_hand(world, "2019-02-28#daily", requestedAt="2026-03-10T08:00:00Z")
    for _ in range(4):
        _sweep_and_tick(world, seconds=1)
        assert len(_left(world)) == 1
    for _ in range(4):
        _sweep_and_tick(world, seconds=1)
    assert _left(world) == []
    assert world.state(LONG_AGO).status is RunStatus.RUNNING


def test_a_marker_is_kept_when_another_driver_moves_the_execution_meanwhile(monkeypatch: pytest.MonkeyPatch):
    world = World(pipeline())
    world.tick()
    world.jobs.end()
    world.tick(seconds=31)
    marker = Marker(KEY, "late-data:file-7", world.clock.now())
    world.store.put_marker(marker)

    def lost(*_: object) -> None:
        raise LostClaim("it was moved by another driver.", unit=str(KEY))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", lost)
        world.tick(marker)
    assert _left(world) == [marker._replace(stamp="2026-03-10T08:00:31.000000Z")]
    _sweep_and_tick(world)
    assert (world.state(KEY).generation, _left(world)) == (1, [])


@pytest.mark.parametrize(
    ("sort_key", "words"),
    [
        ("yesterday#daily", "date: must be YYYY-MM-DD"),
        ("20190228#daily", "date: must be YYYY-MM-DD"),
        ("2019-02-29#daily", "date: must be YYYY-MM-DD"),
        ("2019-02-28", "its sort key must be 2019-02-28#daily"),
        ("2019-02-28#", "schedule: lower-case letters"),
    ],
)
def test_a_marker_that_names_no_execution_is_refused_aloud_and_stops_no_other(sort_key: str, words: str):
    world = World(pipeline())
    _by_hand(world, sort_key)
    _by_hand(world, "2019-02-28#daily")
    _sweep_and_tick(world)
    assert [words in refusal for refusal in _refusals(world)] == [True]
    assert world.state(LONG_AGO).status is RunStatus.RUNNING
    assert world.store.markers("sales", world.clock.now()) == ([], {})


def test_a_stream_record_of_such_a_marker_is_left_to_the_sweep():
    def record(sort_key: str) -> dict[str, Any]:
        image = {"PK": {"S": "MARKER#sales"}, "SK": {"S": sort_key}}
        return {"eventName": "INSERT", "dynamodb": {"NewImage": image}}

    assert stream.marker_of(record("yesterday")) is None
    assert stream.marker_of(record("2019-02-28#daily")) == Marker(LONG_AGO, "marker")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (KEY._replace(schedule="h07"), "there is no schedule h07"),
        (KEY._replace(date=DAY + timedelta(days=900)), "its time comes only at 2028-08-26 00:00 UTC"),
        (Key("nobody", DAY, "daily"), "there is no such pipeline"),
    ],
)
def test_a_marker_that_leads_to_nothing_says_why_in_the_event_log(key: Key, words: str):
    world = World(pipeline())
    report = world.tick(Marker(key, "by-hand", NOW))
    assert words in report.refused[0]
    assert words in _refusals(world, key.pipeline)[0]


def test_a_marker_of_a_coming_execution_waits_for_its_time():
    """Guards the schedule: a file that is early must not start what is promised for later."""
    world = World(pipeline(schedules=(SchedulePlan("evening", "18:00"),), watched=False))
    key = Key("sales", DAY, "evening")
    world.tick(Marker(key, "early-file", NOW))
    world.ticks(3, seconds=3 * 3600)
    assert (world.state(key).status, world.jobs.starts) == (RunStatus.PENDING, [])
    world.tick(seconds=3700)
    assert (world.state(key).status, world.state(key).started_at.hour) == (RunStatus.RUNNING, 18)


def test_a_person_may_run_a_coming_execution_now():
    world = World(pipeline(schedules=(SchedulePlan("evening", "18:00"),)))
    assert world.control.run(Key("sales", DAY, "evening")).status is RunStatus.RUNNING


def test_downstream_pipelines_are_woken_one_after_the_other():
    """Guards cascade.delayBetween: the delay must also hold for an execution that the marker itself opens."""
    below = [
        pipeline(name, TraitPlan("up", True, "builtin:upstream-job-log", {"upstreamPipeline": "sales"}), watched=False)
        for name in ("gold-a", "gold-b")
    ]
    world = World(pipeline(cascade_delay=timedelta(minutes=10)), *below)
    world.jobs.finish_at_once = True
    world.tick()
    _sweep_and_tick(world, seconds=1)
    first, second = Key("gold-a", DAY), Key("gold-b", DAY)
    assert (world.state(first).status, world.state(second).status) == (RunStatus.COMPLETED, RunStatus.PENDING)
    world.tick(seconds=601)
    assert world.state(second).status is RunStatus.COMPLETED


def test_downstream_of_another_schedule_is_not_woken():
    hourly = pipeline(
        "hourly",
        TraitPlan("up", True, "builtin:upstream-job-log", {"upstreamPipeline": "sales"}),
        schedules=(SchedulePlan("h07", "07:00"),),
    )
    world = World(pipeline(), hourly)
    assert world.plans["sales"].downstream == ()


def test_the_same_late_arrival_told_twice_is_one_rerun():
    """Guards a stream that is read anew and a marker that was left behind: neither is new data."""
    world = World(pipeline(budgets=Budgets(late_data=3)))
    world.jobs.finish_at_once = True
    world.tick()
    told = Marker(KEY, "late-data:file-7", world.clock.now())
    for _ in range(3):
        world.store.put_marker(told)
        world.tick(told, seconds=31)
        assert _left(world) == [], "heard, also when it brings nothing new"
    assert world.state(KEY).generation == 1
    world.tick(told._replace(at=world.clock.now()), seconds=31)
    assert world.state(KEY).generation == 2
    assert world.pager.alerts == []


def test_late_data_without_a_timestamp_is_new_each_time():
    world = World(pipeline(budgets=Budgets(late_data=3)))
    world.jobs.finish_at_once = True
    world.tick()
    for _ in range(2):
        _by_hand(world, f"{DAY}#daily", source="late-data")
        _sweep_and_tick(world)
    assert world.state(KEY).generation == 2


def test_a_sweep_that_is_out_of_time_goes_on_where_it_stopped():
    world = World(*(pipeline(f"p{number}", trait()) for number in range(4)))
    for number in range(4):
        _by_hand(world, "2019-02-28#daily", name=f"p{number}")
    assert world.driver.sweep(0, 100, until=world.clock.monotonic()) == ([], 0)
    found, place = world.driver.sweep(3, 2)
    assert ([marker.key.pipeline for marker in found], place) == (["p3", "p0"], 1)
    assert World().driver.sweep(0, 25) == ([], 0)


def test_markers_are_heard_in_the_order_in_which_they_were_made():
    world = World(pipeline(watched=False))
    world.driver = world.new_driver(executions=1)
    days = [date(2020, 1, 3), date(2020, 1, 1), date(2020, 1, 2)]
    for minute, day in enumerate(days):
        world.store.put_marker(Marker(KEY._replace(date=day), "by-hand", datetime(2026, 3, 10, 7, minute, tzinfo=UTC)))
    for _ in days:
        _sweep_and_tick(world, seconds=1)
    states = [world.state(KEY._replace(date=day)) for day in days]
    assert [state.opened_at for state in states] == sorted(state.opened_at for state in states)
