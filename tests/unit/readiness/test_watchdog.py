"""The watchdog: what did not happen is noticed once, on its own clock, and its own failures are noticed too."""

from __future__ import annotations

from datetime import timedelta

from lockstep.readiness.model import MonitorPlan, RunStatus, SchedulePlan
from tests.unit.readiness.builders import DAY, KEY, NOW
from tests.unit.readiness.world import World, pipeline

SOON = SchedulePlan("daily", "08:00")


def test_a_schedule_that_nobody_opened_is_missed_once():
    """Guards silence: no marker, no driver, no execution, and so no check that passes through one."""
    world = World(pipeline(schedules=(SOON,)))
    world.clock.advance(20 * 60)
    assert world.watchdog.check().raised == [f"sales:daily:{DAY}:schedule_missed"]
    world.clock.advance(60)
    assert world.watchdog.check().raised == []
    assert world.pager.kinds == ["schedule_missed"]


def test_old_misses_stay_silent_after_a_deployment():
    world = World(pipeline(schedules=(SOON,)))
    world.clock.advance(10 * 3600)
    assert world.watchdog.check().raised == []


def test_a_watchdog_that_was_away_looks_back_to_its_last_round():
    world = World(pipeline(schedules=(SOON,)))
    world.watchdog.check()
    world.clock.advance(3 * 3600)
    assert world.watchdog.check().raised == [f"sales:daily:{DAY}:schedule_missed"]


def test_an_opened_execution_is_not_missed():
    world = World(pipeline(schedules=(SOON,)))
    world.tick()
    world.clock.advance(20 * 60)
    assert [kind for kind in world.watchdog.check().raised if "missed" in kind] == []


def test_a_run_that_nobody_hears_of_is_stuck_and_a_silent_driver_is_told():
    world = World(pipeline(schedules=(SOON,)))
    world.tick()
    world.clock.advance(45 * 60)
    kinds = {raised.rsplit(":", 1)[1] for raised in world.watchdog.check().raised}
    assert kinds == {"stuck_run", "driver_silent"}
    world.clock.advance(60)
    assert world.watchdog.check().raised == []


def test_an_evaluation_that_does_not_happen_is_stalled():
    world = World(pipeline(schedules=(SOON,)))
    world.read(500)
    world.tick()
    world.clock.advance(16 * 60)
    assert "evaluation_stalled" in {raised.rsplit(":", 1)[1] for raised in world.watchdog.check().raised}


def test_monitoring_ends_although_no_driver_passes_by():
    world = World(pipeline(schedules=(SOON,), monitor=MonitorPlan(True, timedelta(hours=1))))
    world.tick()
    world.jobs.end()
    world.tick(seconds=31)
    assert world.state(KEY).status is RunStatus.COMPLETED_MONITORING
    world.clock.advance(2 * 3600)
    world.watchdog.check()
    assert world.state(KEY).status is RunStatus.COMPLETED


def test_a_check_that_fails_is_said_aloud_and_stops_no_other(monkeypatch):
    """Guards the safety net itself: it must not fail in silence."""
    world = World(pipeline(schedules=(SOON,)))
    world.clock.advance(20 * 60)
    monkeypatch.setattr(world.watchdog, "_stuck", lambda *_: 1 / 0)
    found = world.watchdog.check()
    assert list(found.broken) == ["stuck"]
    kinds = sorted(raised.rsplit(":", 1)[1] for raised in found.raised)
    assert kinds == ["schedule_missed", "watchdog_degraded"]
    assert world.store.last_beat("watchdog", world.clock.now()) is None


def test_a_watchdog_beats_only_when_all_is_well():
    world = World(pipeline(schedules=(SOON,)))
    world.watchdog.check()
    assert world.store.last_beat("watchdog", NOW) == NOW
