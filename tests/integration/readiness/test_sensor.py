"""The Dagster doors over the real table: one tick of the sensor, and what Dagster shows of it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from datetime import date, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from typer.testing import CliRunner

from lockstep.kernel.clock import SystemClock
from lockstep.kernel.settings import load_settings
from lockstep.readiness import cli
from lockstep.readiness.model import Key, RunStatus
from platform_assets.definitions import defs
from platform_assets.readiness import EXECUTION_CHECK, asset_name, key_of, partition_of, plans
from resources.readiness import Deployment, build_alerts
from resources.readiness_plane import ReadinessResource
from sensors.readiness import readiness_sensor
from tests.integration.readiness.tables import table_named

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def readiness(stack: Any) -> Iterator[ReadinessResource]:
    """A table of its own: the stack's daemon steps whatever is due in the shared one, and would be quicker."""
    name = f"test-readiness-{secrets.token_hex(4)}"
    with table_named(stack, name):
        yield ReadinessResource(table=name)


@pytest.fixture
def deployment(readiness: ReadinessResource) -> Deployment:
    return readiness.deployment()


@lru_cache(maxsize=1)
def _repository() -> Any:
    return defs.get_repository_def()


def _tick(readiness: ReadinessResource, cursor: str | None = None) -> dg.SensorResult:
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(
            instance=instance,
            cursor=cursor,
            repository_def=_repository(),
            resources={"readiness": readiness},
        )
        result = readiness_sensor(context)
    assert isinstance(result, dg.SensorResult)
    return result


def _status(deployment: Deployment, key: Key) -> RunStatus | None:
    return deployment.store.status(key, deployment.clock.now())


def test_a_fresh_deployment_opens_the_current_executions_and_a_marker_of_long_ago(
    readiness: ReadinessResource, deployment: Deployment, dynamodb: Any
):
    """Guards the tie of stream, sensor, driver and assets, with a marker as a person would put it: key and no more.

    A completed execution is a green partition, reported once; what was not asked for stays closed.
    """
    plan = next(plan for plan in plans if plan.pipeline == "ticks-silvered")
    key = Key(plan.pipeline, date(2026, 1, 2), "h17")
    item = {"PK": {"S": f"MARKER#{key.pipeline}"}, "SK": {"S": "2026-01-02#h17"}}
    dynamodb.put_item(TableName=readiness.table, Item=item)
    first = _tick(readiness)
    second = _tick(readiness, first.cursor)
    assert _status(deployment, key) is RunStatus.COMPLETED
    events = [*first.asset_events, *second.asset_events]
    green = [(event.asset_key, event.partition) for event in events if isinstance(event, dg.AssetMaterialization)]
    assert green.count((dg.AssetKey(asset_name(plan.pipeline)), partition_of(plan, key))) == 1
    checks = {event.check_name for event in events if isinstance(event, dg.AssetCheckEvaluation)}
    assert {"progress_check", EXECUTION_CHECK} <= checks
    now = deployment.clock.now()
    opened = {one.pipeline: deployment.store.executions(one.pipeline, now) for one in plans if one.watched}
    current = {one.pipeline: int(one.catch_up != timedelta(0)) for one in plans if one.watched}
    assert {name: len(rows) for name, rows in opened.items()} == current | {"ticks-silvered": 2}
    assert "MARKER" not in str(dynamodb.get_item(TableName=readiness.table, Key=item).get("Item", ""))
    assert _tick(readiness, "not a cursor").skip_reason is not None


def test_a_marker_that_names_nothing_is_answered_in_the_event_log(
    readiness: ReadinessResource, deployment: Deployment, dynamodb: Any
):
    item = {"PK": {"S": "MARKER#exports-drained"}, "SK": {"S": "last-tuesday"}}
    dynamodb.put_item(TableName=readiness.table, Item=item)
    _tick(readiness)
    events = deployment.store.events("exports-drained", deployment.clock.now())
    assert [event["details"]["sortKey"] for event in events if event["kind"] == "MARKER_REFUSED"] == ["last-tuesday"]


def test_the_commands_work_on_the_real_table(deployment: Deployment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "_deployment", lambda: deployment)
    done = CliRunner().invoke(
        cli.app,
        [
            "backfill",
            "exports-drained",
            "--from=2026-02-01",
            "--to=2026-02-01",
            "--schedule=h03",
            "--reason=gap",
            "--json",
        ],
    )
    assert json.loads(done.output)["opened"][0]["scheduleId"] == "h03"
    for command in (["status"], ["events", "exports-drained"], ["explain", "exports-drained"], ["tick"], ["watchdog"]):
        done = CliRunner().invoke(cli.app, command)
        assert done.exit_code == 0, done.output
    assert _status(deployment, Key("exports-drained", date(2026, 2, 1), "h03")) is RunStatus.COMPLETED


def test_an_alert_of_another_pipeline_reaches_its_file_and_the_event_log(
    readiness: ReadinessResource, deployment: Deployment, tmp_path: Path
):
    """Guards the door on the real table: recorded once, sent once, and nothing left to deliver."""
    place = tmp_path / "alerts.jsonl"
    door = build_alerts(load_settings(readiness_alert_file=place), table=readiness.table)
    assert door.raise_now("windows.window_failed", "error", "1001/2026-03-10T00:15", "the checksum differs")
    assert not door.raise_now("windows.window_failed", "error", "1001/2026-03-10T00:15", "the checksum differs")
    (line,) = place.read_text().splitlines()
    assert json.loads(line)["details"] == {"unit": "1001/2026-03-10T00:15"}
    now = deployment.clock.now()
    assert [event["message"] for event in deployment.store.events("windows", now)] == ["the checksum differs"]
    assert [entry.undelivered for entry in deployment.store.registered(now) if entry.pipeline == "windows"] == [()]


def test_partitions_and_executions_name_each_other():
    for plan in plans:
        key = Key(plan.pipeline, SystemClock().now().date(), plan.schedules[-1].name)
        assert key_of(plan, partition_of(plan, key)) == key


def test_materializing_asks_the_pipeline_and_a_second_time_says_that_it_ran(readiness: ReadinessResource):
    """Guards the button in the UI: a date that has run is refused with the reason, visibly."""
    plan = next(plan for plan in plans if plan.pipeline == "ticks-silvered")
    key = Key(plan.pipeline, date(2026, 1, 1) + timedelta(days=secrets.randbelow(300)), "h23")
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
