"""The Dagster doors over the real table: one tick of the sensor, and what Dagster shows of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import dagster as dg
import pytest

from lockstep.kernel.clock import SystemClock
from lockstep.readiness.model import Key, RunStatus
from platform_assets.definitions import defs
from platform_assets.readiness import asset_name, key_of, partition_of, plans
from resources.readiness_plane import ReadinessResource
from sensors.readiness import readiness_sensor
from stack import provision

pytestmark = pytest.mark.stack


@pytest.fixture
def readiness(dynamodb: Any) -> Iterator[ReadinessResource]:
    """A table of its own: the stack's daemon steps whatever is due in the shared one, and would be quicker."""
    table = next(table for table in provision.TABLES if table.name == "readiness")
    name = f"test-readiness-{secrets.token_hex(4)}"
    dynamodb.create_table(**provision.definition(replace(table, name=name)))
    yield ReadinessResource(table=name)
    dynamodb.delete_table(TableName=name)


def _some_day() -> date:
    """A past date that no earlier run on this table has used."""
    return date(2026, 1, 1) + timedelta(days=secrets.randbelow(300))


def _tick(readiness: ReadinessResource, cursor: str | None = None) -> dg.SensorResult:
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(
            instance=instance,
            cursor=cursor,
            repository_def=defs.get_repository_def(),
            resources={"readiness": readiness},
        )
        result = readiness_sensor(context)
    assert isinstance(result, dg.SensorResult)
    return result


def test_ticks_step_what_is_due_and_report_it_once_as_asset_events(readiness: ReadinessResource):
    """Guards the tie of sensor, driver and assets: a completed execution is a green partition, reported once.

    Several ticks: on an empty table the first ones are busy with the executions of the last day.
    """
    deployment = readiness.deployment()
    plan = next(plan for plan in plans if plan.pipeline == "ticks-silvered")
    key = Key(plan.pipeline, SystemClock().now().date(), "h00")
    deployment.catalogue.sync()
    deployment.control.mark(key, "by-hand")
    events: list[Any] = []
    cursor = None
    for _ in range(12):
        result = _tick(readiness, cursor)
        cursor = result.cursor
        events += result.asset_events
        if deployment.store.status(key, deployment.clock.now()) is RunStatus.COMPLETED:
            break
    assert deployment.store.status(key, deployment.clock.now()) is RunStatus.COMPLETED
    green = [(event.asset_key, event.partition) for event in events if isinstance(event, dg.AssetMaterialization)]
    assert (dg.AssetKey(asset_name(plan.pipeline)), partition_of(plan, key)) in green
    assert len(green) == len(set(green))
    checks = {event.check_name for event in events if isinstance(event, dg.AssetCheckEvaluation)}
    assert "progress_check" in checks
    assert _tick(readiness, "not a cursor").skip_reason is not None


def test_partitions_and_executions_name_each_other():
    for plan in plans:
        key = Key(plan.pipeline, SystemClock().now().date(), plan.schedules[-1].name)
        assert key_of(plan, partition_of(plan, key)) == key


def test_materializing_asks_the_pipeline_and_a_second_time_says_that_it_ran(readiness: ReadinessResource):
    """Guards the button in the UI: a date that has run is refused with the reason, visibly."""
    plan = next(plan for plan in plans if plan.pipeline == "ticks-silvered")
    key = Key(plan.pipeline, _some_day(), "h23")
    wanted = dg.AssetKey(asset_name(plan.pipeline))
    asset = next(one for one in defs.assets if isinstance(one, dg.AssetsDefinition) and wanted in one.keys)

    def press() -> dg.ExecuteInProcessResult:
        with dg.DagsterInstance.ephemeral() as instance:
            return dg.materialize(
                [asset],
                partition_key=partition_of(plan, key),
                resources={"readiness": readiness},
                instance=instance,
                raise_on_error=False,
            )

    assert press().success
    assert not press().success
