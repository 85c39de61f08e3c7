"""What Dagster is told about a tick can be stored."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from dagster import serialize_value

from lockstep.ticks.model import Mode, TableCommit, Tick, TickState
from lockstep.ticks.silver.model import Applied, Lane
from platform_assets.tick_events import bronze_event, silver_event
from sensors.ticks import Group, build_run_request, lane_tag

NOW = datetime(2026, 5, 7, 12, tzinfo=UTC)
TICK = Tick(
    "p", "t1", "acme", TickState.COMMITTED, 1, 0, NOW, NOW, mode=Mode.FULL, sequence=4, committed_at=NOW,
    result={"rows_replaced": 2}, commits=(TableCommit("orders", 3, "bronze/p/orders/x.json", "etag", 5),),
)  # fmt: skip


def test_events_of_both_layers_are_made_of_plain_values():
    """Guards a report that fails after its tick is committed: Dagster stores no enums of ours."""
    applied = Applied("acme", "p", "t1", 4, 1, Mode.FULL, "20260507", 5, 7, NOW, NOW, {"orders": 5})
    skipped = replace(applied, rows=0, tables={}, skipped="a broken export")
    for event in (bronze_event(TICK), silver_event(applied), silver_event(skipped)):
        assert event.partition == "t1"
        assert "t1" in serialize_value(event)
    assert silver_event(skipped).metadata["skipped"].value == "a broken export"
    assert "skipped" not in silver_event(applied).metadata


def test_a_run_has_one_key_per_attempt_and_generation_and_stands_in_its_lane():
    """Guards the retry: a run key that was used is used up, also by a failed run."""
    lane = Lane("acme", "p", 3, 2)
    alone = build_run_request(Group(lane, (TICK,), 2, None))
    many = build_run_request(Group(lane, (TICK, replace(TICK, tick_id="t2")), 1, "a" * 32))
    again = build_run_request(Group(lane._replace(generation=3), (TICK,), 2, None))
    assert len({alone.run_key, many.run_key, again.run_key}) == 3
    assert (alone.partition_key, many.partition_key) == ("t1", "t1")
    assert many.tags["lockstep/lane"] == lane_tag(lane)
    assert many.tags["lockstep/trace"] == "a" * 32
