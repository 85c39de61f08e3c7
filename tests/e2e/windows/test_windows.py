"""Windows whole, with the real daemon: queue row, stream, sensor, run, Spark, warehouse, partitions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from lockstep.kernel import postgres
from lockstep.kernel.settings import PROJECT_ROOT
from lockstep.windows.store import WindowStore
from platform_assets.window_events import partition_of
from tests.windows_lane import LaneUnderTest
from tests.windows_world import Files, World, as_csv, warehouse_rows

pytestmark = [pytest.mark.stack, pytest.mark.platform]

VAULT = "1001"
DEADLINE_SECONDS = 240

_STATUSES = """
query Statuses($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) { ... on AssetNode { assetPartitionStatuses {
    ... on TimePartitionStatuses { ranges { startKey endKey status } } } } }
}
"""
_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchPipelineExecution(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } }
}
"""


@pytest.fixture
def dagster(stack: Any) -> str:
    return f"http://127.0.0.1:{stack.site().ports['dagster']}"


@pytest.fixture
def lane(stack: Any) -> LaneUnderTest:
    """The lane of a vault that the platform itself knows; a stack that was kept goes on where it stood."""
    dsn = stack.site().environment["LOCKSTEP_WAREHOUSE_DSN"]
    store = WindowStore(partial(postgres.connect, dsn, application_name="windows-e2e"))
    known = store.lane(VAULT)
    store.close()
    start = known.watermark if known else datetime(2026, 1, 2, tzinfo=UTC)
    world = World(boto3.client("s3"), "raw-ddapi", boto3.client("dynamodb"), "ddapi_queue", vault=VAULT, start=start)
    return LaneUnderTest(dsn, world).open()


def _graphql(dagster: str, query: str, **variables: Any) -> dict[str, Any]:
    answer = httpx.post(f"{dagster}/graphql", json={"query": query, "variables": variables}, timeout=30)
    answer.raise_for_status()
    body = answer.json()
    assert not body.get("errors"), body
    return body["data"]


def _colours(dagster: str, keys: list[str]) -> list[str]:
    """What the UI shows for each partition."""
    data = _graphql(dagster, _STATUSES, key={"path": [f"vault_{VAULT}", "applied_windows"]})
    ranges = data["assetNodeOrError"]["assetPartitionStatuses"]["ranges"]

    def colour(key: str) -> str:
        return next((one["status"] for one in ranges if one["startKey"] <= key <= one["endKey"]), "MISSING")

    return [colour(key) for key in keys]


def _wait(until: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not until():
        assert time.monotonic() < deadline, what
        time.sleep(1)


def test_a_poison_window_in_a_backlog_is_the_only_red_one_and_healing_it_turns_all_green(
    lane: LaneUnderTest, dagster: str
):
    """Guards what support sees at 3 a.m.: green, one red, missing; one click; all green."""
    world = lane.world
    held = world.publish(12, enqueue=False)
    row = world.row("study__v", 1, budget__c="no number")
    poison = world.add(Files({"study__v": [row]}), enqueue=False)
    held += [poison, *world.publish(7, enqueue=False)]
    world.enqueue(reversed(held))  # the last row comes first: nothing may start before the first is there
    keys = [partition_of(one.start) for one in world.windows]

    wanted = ["MATERIALIZED"] * 12 + ["FAILED"] + ["MISSING"] * 7
    _wait(lambda: _colours(dagster, keys) == wanted, "twelve green, one red, seven missing")
    assert world.statuses() == ["APPLIED"] * 12 + ["FAILED"] + ["READY"] * 7

    row["budget__c"] = "7"
    world.rewrite(poison, "study__v", as_csv(list(world.columns["study__v"]), [row]))
    _launch(dagster, partition_of(poison.start))
    _wait(lambda: _colours(dagster, keys) == ["MATERIALIZED"] * 20, "all green after one click")
    _wait(lambda: set(world.statuses()) == {"APPLIED"}, "every row applied")
    held_rows = warehouse_rows(lane.dsn, f"vault_{VAULT}")["study__v"]
    assert set(world.oracle["study__v"]) <= set(held_rows)
    store = lane.store()
    assert [one.stop for one in store.history(VAULT)][-20:] == [one.stop for one in world.windows]
    store.close()


@pytest.fixture
def second_daemon(stack: Any, tmp_path: Path) -> Iterator[Path]:
    """Another dagster-daemon on the same instance, as a mistake in a deployment would start it. Gives its log."""
    log = tmp_path / "daemon.log"
    command = [str(Path(sys.executable).with_name("dagster-daemon")), "run", "--workspace", "workspace.yaml"]
    environment = {**os.environ, **stack.site().environment}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=PROJECT_ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT)
        yield log
        process.terminate()
        process.wait(60)


def test_two_daemons_on_one_instance_apply_every_window_once(lane: LaneUnderTest, dagster: str, second_daemon: Path):
    """Guards the lane, not Dagster: with two daemons, both sensors may ask; pool, lease and fence let one in."""
    _wait(lambda: b"SensorDaemon" in second_daemon.read_bytes(), "the second daemon's sensors run")
    before = len(lane.history())
    for count in (3, 2):
        windows = lane.world.publish(count, enqueue=False)
        lane.world.enqueue(reversed(windows))
        _wait(lambda: set(lane.world.statuses()) == {"APPLIED"}, "every row applied")
    applied = lane.history()[before:]
    assert [one.stop for one in applied] == [one.stop for one in lane.world.windows]
    keys = [partition_of(one.start) for one in lane.world.windows]
    _wait(lambda: _colours(dagster, keys) == ["MATERIALIZED"] * 5, "all green")


def _launch(dagster: str, partition: str) -> None:
    selector = {
        "repositoryLocationName": "lockstep",
        "repositoryName": "__repository__",
        "jobName": "__ASSET_JOB",
        "assetSelection": [{"path": [f"vault_{VAULT}", "applied_windows"]}],
        "assetCheckSelection": [],
    }
    tags = [{"key": "dagster/partition", "value": partition}]
    params = {"selector": selector, "mode": "default", "executionMetadata": {"tags": tags}}
    answer = _graphql(dagster, _LAUNCH, params=params)["launchPipelineExecution"]
    assert answer["__typename"] == "LaunchRunSuccess", answer
