"""How long things are kept: ticks that waited for weeks are applied, files go only when nothing can go back to them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lockstep.idempotency import delta
from lockstep.kernel.errors import InvalidInput
from lockstep.ticks.silver import operations, retention
from lockstep.ticks.silver.store import Actor
from lockstep.ticks.silver.tables import table_path
from tests.silver_world import Planned, Project, World, row

pytestmark = pytest.mark.stack

ACTOR = Actor("test", "retention")


def _keep_nothing(world: World, path: str) -> None:
    """As if every version but the newest were older than the table's retention."""
    no_time = "'delta.deletedFileRetentionDuration' = 'interval 0 hours'"
    world.spark.sql(f"ALTER TABLE {delta.quoted(path)} SET TBLPROPERTIES ({no_time})").collect()


def _files(world: World, path: str) -> set[str]:
    prefix = path.removeprefix(f"s3a://{world.lake}/")
    found = world.s3.list_objects_v2(Bucket=world.lake, Prefix=prefix).get("Contents", ())
    return {one["Key"] for one in found if one["Key"].endswith(".parquet") and "_delta_log" not in one["Key"]}


def _merged_twice(world: World) -> Project:
    project = world.project()
    world.commit(project, Planned({"orders": [row(1, "a"), row(2, "b")]}), Planned({"orders": [row(1, "c")]}))
    world.drain(project)
    return project


def test_a_tick_that_bronze_committed_longer_ago_than_delta_lets_anybody_read_is_applied(world: World):
    """Guards projects that stood still for weeks: Delta refuses versions beyond a week, though nothing is missing."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1, "a")]}))
    world.commit(project, Planned({"orders": [row(1, "b"), row(2, "c")]}))
    _keep_nothing(world, f"s3a://{world.lake}/bronze/{project.project_id}/orders")
    world.drain(project)
    assert world.states(project) == ["DONE", "DONE"]
    world.assert_equals_oracle(project)


def test_vacuum_leaves_whatever_a_replay_can_go_back_to(world: World):
    project = _merged_twice(world)
    path = table_path(world.lake, project.project_id, "orders")
    before = _files(world, path)
    done = retention.vacuum_tables(world, world.spark, world.lake, ACTOR, project_id=project.project_id)
    assert done.tables == (f"s3a://{world.lake}/bronze/{project.project_id}/orders", path)
    assert _files(world, path) == before
    operations.replay_ticks(world, project.ticks[:1], ACTOR)
    world.drain(project)
    world.assert_equals_oracle(project)
    audited = world.ask("SELECT details ->> 'days' FROM ticks.audit WHERE subject = %s", project.project_id)
    assert ("30",) in audited


def test_vacuum_deletes_the_files_that_merges_replaced_and_a_replay_to_them_says_so(world: World):
    project = _merged_twice(world)
    path = table_path(world.lake, project.project_id, "orders")
    before = _files(world, path)
    with delta.settings(world.spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        delta.vacuum(world.spark, path, keep=timedelta(0))
    assert _files(world, path) < before
    world.assert_equals_oracle(project)
    operations.replay_ticks(world, project.ticks[1:], ACTOR)
    held = world.silver(project, "orders")
    report = world.drain(project)
    assert report.parked
    assert "no longer restores version" in report.reason
    assert world.silver(project, "orders") == held


def test_fewer_days_than_a_replay_goes_back_are_refused_before_anything_is_touched(world: World):
    project = _merged_twice(world)
    with pytest.raises(InvalidInput, match="29 days") as refused:
        retention.vacuum_tables(world, world.spark, world.lake, ACTOR, days=29, project_id=project.project_id)
    assert "--days 30" in str(refused.value.next_step)
    assert world.ask("SELECT 1 FROM ticks.audit WHERE subject = %s", project.project_id) == []
