"""Gold on real Delta tables: a day is a function of its ticks, sessions survive late and repeated ticks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from lockstep.idempotency import proxy
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import LostClaim
from lockstep.ticks.model import Mode
from lockstep.ticks.silver.gold import Gold, daily_rows
from lockstep.ticks.silver.model import Applied
from lockstep.ticks.silver.report import KEPT_FOR, SESSIONS, Report
from tests.silver_world import World

pytestmark = pytest.mark.stack

NOON = datetime(2026, 5, 7, 12, tzinfo=UTC)


def _applied(sequence: int, at: datetime, project: str = "p1") -> Applied:
    return Applied(
        "acme", project, f"{project}-{sequence}", sequence, 1, Mode.DELTA, "20260507", 10, 1,
        at + timedelta(seconds=30), at, {"orders": 10},
    )  # fmt: skip


def test_a_day_is_made_anew_from_its_ticks_and_a_repeat_changes_nothing(world: World):
    gold, day = Gold(world.spark, world.lake), NOON.date()
    ticks = [_applied(1, NOON), _applied(2, NOON + timedelta(hours=1)), _applied(1, NOON, "p2")]
    assert gold.load_day(day, ticks) == 2
    assert gold.load_day(day, ticks) == 0
    moved = [*ticks, replace(_applied(3, NOON + timedelta(hours=2)), generation=2)]
    assert gold.load_day(day, moved) == 2
    rows = world.spark.read.format("delta").load(gold.daily.path).orderBy("project_id").collect()
    assert [(one.project_id, one.ticks, one.replayed_ticks, one.rows) for one in rows] == [
        ("p1", 3, 1, 30),
        ("p2", 1, 0, 10),
    ]
    assert daily_rows(reversed(moved)) == daily_rows(moved)


def test_sessions_grow_join_and_ignore_repeats(world: World):
    """Guards analysts' keys: a late tick that joins two sessions leaves no orphan and renames nothing."""
    gold = Gold(world.spark, world.lake)
    gold.fold_sessions([_applied(1, NOON, "s"), _applied(3, NOON + timedelta(minutes=100), "s")])
    read = world.spark.read.format("delta").load(gold.sessions).where("user = 's'")
    first = min(read.collect(), key=lambda one: one.first)
    assert read.count() == 2
    gold.fold_sessions([_applied(2, NOON + timedelta(minutes=50), "s"), _applied(1, NOON, "s")])
    (joined,) = world.spark.read.format("delta").load(gold.sessions).where("user = 's'").collect()
    assert (joined.key, joined.events) == (first.key, 3)


def test_the_report_holds_what_gold_holds_and_a_repeat_changes_nothing(world: World):
    """Guards readers with SQL: a day is replaced, the name is always there, one move for each version of gold."""
    gold, day = Gold(world.spark, world.lake), NOON.date()
    report = Report(world.spark, gold, world.dsn)
    gold.load_day(day, [_applied(1, NOON, "r"), _applied(1, NOON, "r2")])
    gold.fold_sessions([_applied(1, NOON, "r")])
    first = report.publish([day], run="one", now=NOON)
    assert first.day_rows == {day: 2}
    again = report.publish([day], run="two", now=NOON)
    assert again == first
    gold.load_day(day, [_applied(number, NOON, "r") for number in (1, 2, 3)])
    gold.fold_sessions([_applied(2, NOON + timedelta(minutes=5), "r")])
    second = report.publish([day], run="three", now=NOON)
    assert second.sessions != first.sessions
    assert world.ask("SELECT project_id, ticks, rows FROM ticks_report.daily WHERE day = %s", day) == [("r", 3, 30)]
    shown = world.ask("SELECT ticks, first FROM ticks_report.agent_sessions WHERE project_id = 'r'")
    assert shown == [(2, NOON)]
    with world.source.connection() as connection:
        assert [one.name for one in proxy.moves(connection, SESSIONS)] == [second.sessions, first.sessions]


def test_an_older_gold_never_replaces_a_newer_one_in_the_report(world: World):
    gold, day = Gold(world.spark, world.lake), NOON.date() + timedelta(days=1)
    gold.load_day(day, [_applied(1, NOON + timedelta(days=1), "old")])
    Report(world.spark, gold, world.dsn).publish_day(day, run="one")
    world.ask("UPDATE idempotency.ledger SET generation = generation + 10 WHERE unit = %s RETURNING 1", day.isoformat())
    with pytest.raises(LostClaim, match="was applied; nothing was changed"):
        Report(world.spark, gold, world.dsn).publish_day(day, run="two")


def test_what_a_dead_report_left_staged_goes_with_a_later_one(world: World):
    """Guards the database: a driver that dies between staging and publishing leaves its rows."""
    gold, day = Gold(world.spark, world.lake), NOON.date() + timedelta(days=2)
    staged = "SELECT name FROM idempotency.staging WHERE run = 'dies'"
    report = Report(world.spark, gold, world.dsn)
    gold.load_day(day, [_applied(1, NOON + timedelta(days=2), "dead")])
    with pytest.raises(CrashInjected), armed("transactional.driver.staged", "raise"):
        report.publish_day(day, run="dies")
    ((name,),) = world.ask(staged)
    report.publish([], run="soon", now=datetime.now(UTC))
    assert world.ask(staged) == [(name,)], "it may still be at work"
    report.publish([day], run="later", now=datetime.now(UTC) + KEPT_FOR + timedelta(minutes=1))
    assert world.ask(staged) == []
    assert world.ask("SELECT to_regclass(%s)", f"idempotency.{name}") == [(None,)]
