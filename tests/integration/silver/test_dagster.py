"""The Dagster doors on real parts: the sensor's requests, a run of a group, a partition by hand, gold and checks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import dagster as dg
import pytest

from jobs.lanes import LANE_TAG
from lockstep.ticks.silver.model import BRONZE_ASSET, SILVER_ASSET
from platform_assets.definitions import build_definitions
from platform_assets.tick_events import tick_partitions
from resources.silver import open_silver
from sensors.ticks import is_busy, lane_tag, ticks_sensor
from tests.silver_world import Planned, World, row

pytestmark = pytest.mark.stack


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def _tick(instance: dg.DagsterInstance, cursor: str | None = None) -> Any:
    return ticks_sensor(dg.build_sensor_context(instance=instance, cursor=cursor))


def _run(instance: dg.DagsterInstance, request: Any, job: str = "silver_ticks_job") -> dg.ExecuteInProcessResult:
    found = build_definitions().resolve_job_def(job)
    return found.execute_in_process(
        run_config=request.run_config,
        partition_key=request.partition_key,
        tags=request.tags,
        instance=instance,
        raise_on_error=False,
    )


def _green(instance: dg.DagsterInstance, asset: str) -> set[str]:
    return set(instance.get_materialized_partitions(dg.AssetKey(asset)))


def test_a_tick_of_the_sensor_asks_for_one_run_per_project_and_the_run_turns_its_ticks_green(
    deployed: World, instance: dg.DagsterInstance
):
    world, project = deployed, deployed.project()
    world.commit(project, Planned({"orders": [row(1)]}), Planned({"orders": [row(None)]}), ago=timedelta(0))
    world.send(*project.ticks)
    answer = _tick(instance)
    (request,) = [one for one in answer.run_requests if one.tags["lockstep/project"] == project.project_id]
    assert request.tags[LANE_TAG] == lane_tag(world.store.lane(project.project_id))
    assert request.partition_key == project.ticks[0]
    assert [one.partition for one in answer.asset_events] == project.ticks
    assert set(project.ticks) <= set(instance.get_dynamic_partitions(str(tick_partitions.name)))
    result = _run(instance, request)
    assert result.success, "a group ends well before the tick that failed"
    assert _green(instance, SILVER_ASSET) == {project.ticks[0]}
    assert not is_busy(instance, world.store.lane(project.project_id))
    assert world.states(project) == ["DONE", "FAILED"]
    assert world.store.lane(project.project_id).parked == project.ticks[1]


def test_a_partition_by_hand_is_red_while_it_fails_and_green_when_it_is_mended(
    deployed: World, instance: dg.DagsterInstance
):
    """Guards the recovery that people know: press Materialize on what is red."""
    world, project = deployed, deployed.project()
    world.commit(project, Planned({"orders": [row(None)]}))
    instance.add_dynamic_partitions(str(tick_partitions.name), project.ticks)
    by_hand = dg.RunRequest(partition_key=project.ticks[0], run_config={})
    assert not _run(instance, by_hand).success
    world.correct(project, project.ticks[0], Planned({"orders": [row(1, "mended")]}))
    assert _run(instance, by_hand).success
    world.assert_equals_oracle(project)
    assert _run(instance, by_hand).success, "a green one too"
    assert world.store.lane(project.project_id).generation == 4
    world.assert_equals_oracle(project)


def test_gold_and_housekeeping_follow_and_the_checks_see_what_is_wrong(deployed: World, instance: dg.DagsterInstance):
    world, project = deployed, deployed.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    world.drain(project)
    world.dead_letters.send([world.message(project.ticks[0])])
    world.dynamodb.delete_item(TableName="silver_dispatched", Key={"tick_id": {"S": project.ticks[0]}})
    instance.add_dynamic_partitions(str(tick_partitions.name), ["gone"])
    kept = (
        build_definitions()
        .resolve_job_def("ticks_housekeeping_job")
        .execute_in_process(instance=instance, raise_on_error=False)
    )
    world.assert_equals_oracle(project)
    assert project.ticks[0] in _green(instance, SILVER_ASSET)
    assert "gone" not in instance.get_dynamic_partitions(str(tick_partitions.name))
    verdicts = {one.check_name: one.passed for one in kept.get_asset_check_evaluations()}
    assert verdicts["dead_letters_check"] is False
    gold = build_definitions().resolve_job_def("ticks_gold_job")
    assert gold.execute_in_process(instance=instance).success
    day = world.store.applied(project.ticks)[project.ticks[0]].committed_at.date().isoformat()
    assert day in _green(instance, "ticks_daily")
    path = f"s3a://{world.lake}/gold/ticks_daily"
    assert world.spark.read.format("delta").load(path).where(f"project_id = '{project.project_id}'").count() == 1
    reported = "SELECT ticks FROM ticks_report.daily WHERE project_id = %s"
    assert world.ask(reported, project.project_id) == [(1,)]
    with open_silver(_settings(), application_name="test") as silver:
        assert silver.dead_letters.depth().total == 1


def _settings() -> Any:
    from lockstep.kernel.settings import load_settings

    return load_settings()


def test_the_asset_keys_are_what_the_events_say():
    keys = build_definitions().resolve_asset_graph().get_all_asset_keys()
    assert {dg.AssetKey(BRONZE_ASSET), dg.AssetKey(SILVER_ASSET)} <= keys
