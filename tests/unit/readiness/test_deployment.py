"""A pipeline's first day: what a deployment opens, what it leaves alone, and what a long absence catches up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import InvalidInput
from lockstep.readiness import config, timing
from lockstep.readiness.catalogue import API, FILE, Catalogue
from lockstep.readiness.model import Plan, SchedulePlan
from lockstep.readiness.store import Store
from lockstep.readiness.table import MemoryTable
from tests.unit.readiness.world import World, pipeline

HOURLY = tuple(SchedulePlan(f"h{hour:02}", f"{hour:02}:05") for hour in range(24))
AT = datetime(2026, 3, 10, 10, 20, tzinfo=UTC)


def _opened(world: World, name: str = "sales") -> list[str]:
    rows = world.store.executions(name, world.clock.now(), limit=200)
    return sorted(f"{row['date']} {row['scheduleId']}" for row in rows)


def test_a_new_hourly_pipeline_begins_with_the_hour_in_which_it_is_deployed():
    """Guards the first minutes of a deployment: a whole day of gates that nobody asked for is noise."""
    world = World(pipeline(schedules=HOURLY), now=AT)
    world.ticks(3)
    assert _opened(world) == ["2026-03-10 h10"]
    world.tick(seconds=3600)
    assert _opened(world) == ["2026-03-10 h10", "2026-03-10 h11"]


def test_a_new_daily_pipeline_runs_today():
    world = World(pipeline(schedules=(SchedulePlan("daily", "03:00"),)), now=AT)
    world.tick()
    assert _opened(world) == ["2026-03-10 daily"]
    early = World(pipeline(schedules=(SchedulePlan("daily", "18:00"),)), now=AT)
    early.tick()
    assert _opened(early) == ["2026-03-09 daily"], "yesterday's is the one whose time it is until 18:00"


def test_catch_up_begins_as_far_back_as_is_configured():
    world = World(pipeline(schedules=HOURLY, catch_up=timedelta(hours=3)), now=AT)
    world.tick()
    assert _opened(world) == ["2026-03-10 h08", "2026-03-10 h09", "2026-03-10 h10"]
    days = World(pipeline(schedules=(SchedulePlan("daily", "03:00"),), catch_up=timedelta(days=3)), now=AT)
    days.tick()
    assert _opened(days) == ["2026-03-08 daily", "2026-03-09 daily", "2026-03-10 daily"]


def test_a_catch_up_of_nothing_begins_with_the_next_execution():
    """Guards the first minute of a fresh platform: nightly jobs of a night before it keep its queue busy."""
    daily = World(pipeline(schedules=(SchedulePlan("daily", "11:00"),), catch_up=timedelta(0)), now=AT)
    daily.tick()
    assert _opened(daily) == []
    daily.tick(seconds=3600)
    assert _opened(daily) == ["2026-03-10 daily"]


def test_what_was_due_while_nobody_drove_is_opened_afterwards():
    """Guards an outage: the beginning of a pipeline is when it was deployed, not when the driver came back."""
    world = World(pipeline(schedules=HOURLY), now=AT)
    world.tick()
    world.tick(seconds=3 * 3600)
    assert _opened(world) == [f"2026-03-10 h{hour}" for hour in (10, 11, 12, 13)]


def test_what_was_before_the_deployment_is_not_missed():
    world = World(pipeline(schedules=HOURLY), now=AT)
    world.tick()
    world.watchdog.check()
    assert world.pager.kinds == []


def test_a_pipeline_that_is_in_no_table_yet_begins_now():
    plan = pipeline(schedules=HOURLY)
    since = timing.first_starts(plan, AT)
    assert since["h10"] == datetime(2026, 3, 10, 10, 5, tzinfo=UTC)
    assert {moment for name, moment in since.items() if name != "h10"} == {AT}


def test_schedules_of_the_same_minute_begin_together():
    both = pipeline(schedules=(SchedulePlan("eu", "06:00"), SchedulePlan("us", "06:00"), SchedulePlan("late", "22:00")))
    world = World(both, now=AT)
    world.tick()
    assert _opened(world) == ["2026-03-10 eu", "2026-03-10 us"]


# --- the table's copy ---

ARCHETYPE = "name: a\nrequiredTraits: [{type: t}]\n"
PIPELINE = "name: sales\narchetype: a\ntraits: {t: {}}\ntrigger: {type: gate}\nschedules: "
BODY: dict[str, Any] = {"name": "pushed", "archetype": "a", "traits": {"t": {}}, "trigger": {"type": "gate"}}


def _catalogue(folder: Path, store: Store, clock: FakeClock, schedules: str | None) -> Catalogue:
    for kind, text in {"archetypes": ARCHETYPE, "pipelines": schedules and PIPELINE + schedules}.items():
        (folder / kind).mkdir(exist_ok=True)
        place = folder / kind / "it.yaml"
        place.write_text(text) if text else place.unlink(missing_ok=True)
    return Catalogue(config.load([folder]), store, clock)


def _since(store: Store, clock: FakeClock) -> dict[str, datetime]:
    (entry,) = store.registered(clock.now())
    return dict(entry.since)


def test_a_schedule_that_is_added_later_begins_later_and_the_old_ones_keep_their_beginning(tmp_path: Path):
    clock = FakeClock(AT)
    store = Store(MemoryTable())
    daily, hourly = "[{name: daily, after: '03:00'}]", "[{name: daily, after: '03:00'}, {every: hour}]"
    assert _catalogue(tmp_path, store, clock, daily).sync() == ["sales"]
    assert _since(store, clock) == {"daily": datetime(2026, 3, 10, 3, tzinfo=UTC)}
    clock.advance(3 * 86400)
    again = _catalogue(tmp_path, store, clock, hourly)
    assert again.sync() == ["sales"]
    found = _since(store, clock)
    assert found["daily"] == datetime(2026, 3, 10, 3, tzinfo=UTC)
    assert (found["h10"], found["h11"]) == (datetime(2026, 3, 13, 10, tzinfo=UTC), clock.now())
    clock.advance(61)
    assert again.sync() == [], "nothing has changed"


def test_bringing_the_table_up_to_date_is_bounded_and_goes_on_next_time(tmp_path: Path):
    clock, store = FakeClock(AT), Store(MemoryTable())
    catalogue = _catalogue(tmp_path, store, clock, "[{every: hour}]")
    assert catalogue.sync(until=clock.monotonic()) == []
    assert catalogue.sync(until=clock.monotonic() + 1) == ["sales"]


def test_a_pipeline_whose_file_is_gone_is_gone_and_one_of_the_api_stays(tmp_path: Path):
    clock, store = FakeClock(AT), Store(MemoryTable())
    first = _catalogue(tmp_path, store, clock, "[{every: hour}]")
    first.sync()
    first.register(BODY)
    assert set(_catalogue(tmp_path, store, clock, None).plans()) == {"pushed"}
    assert {entry.pipeline: entry.origin for entry in store.registered(AT)} == {"sales": FILE, "pushed": API}


def test_a_replica_knows_at_once_what_another_has_taken_changed_and_removed(tmp_path: Path):
    """Guards clients behind a load balancer: the next request after a registration may reach the other replica."""
    clock, store = FakeClock(AT), Store(MemoryTable())
    one, other = (_catalogue(tmp_path, store, clock, "[{every: hour}]") for _ in range(2))
    assert other.plan("pushed") is None and set(other.plans()) == {"sales"}
    one.register(BODY)
    taken = other.plan("pushed")
    assert taken is not None and set(other.plans()) == {"sales"}, "the list is read anew every few seconds only"
    one.register({**BODY, "trigger": {"type": "gate"}, "schedules": [{"every": "hour"}]})
    changed = other.plan("pushed")
    assert changed is not None and len(changed.schedules) > len(taken.schedules)
    one.unregister("pushed")
    assert other.plan("pushed") is None


def test_a_registration_that_cannot_be_read_is_no_pipeline_and_stops_nobody(tmp_path: Path):
    clock, store = FakeClock(AT), Store(MemoryTable())
    catalogue = _catalogue(tmp_path, store, clock, "[{every: hour}]")
    store.register("broken", {"name": "broken", "archetype": "none"}, origin=API)
    assert catalogue.plan("broken") is None and set(catalogue.plans()) == {"sales"}
    assert catalogue.plan("sales") == catalogue.plans()["sales"]


def test_catch_up_is_configured_as_a_duration_of_at_most_a_month(tmp_path: Path):
    clock, store = FakeClock(AT), Store(MemoryTable())
    plan: Plan = _catalogue(tmp_path, store, clock, "[{every: hour}]\nwatch: {catchUp: 6h}").registry.plan("sales")
    assert plan.catch_up == timedelta(hours=6)
    none: Plan = _catalogue(tmp_path, store, clock, "[{every: hour}]\nwatch: {catchUp: 0s}").registry.plan("sales")
    assert none.catch_up == timedelta(0)
    with pytest.raises(InvalidInput, match="backfill"):
        _catalogue(tmp_path, store, clock, "[{every: hour}]\nwatch: {catchUp: 60d}")
