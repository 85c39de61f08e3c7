"""The walking skeleton, whole: message, sensor, queue, run, Spark, Delta, check, with the real daemon."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from lockstep.kernel.ids import SystemIds
from lockstep.selftest import probe
from lockstep.selftest.model import QUEUE, TABLE, TOKEN_TAG

pytestmark = [pytest.mark.stack, pytest.mark.platform]

DEADLINE_SECONDS = 240


@pytest.fixture
def dagster(stack: Any) -> str:
    return f"http://127.0.0.1:{stack.site().ports['dagster']}"


def _graphql(dagster: str, query: str, **variables: Any) -> dict[str, Any]:
    answer = httpx.post(f"{dagster}/graphql", json={"query": query, "variables": variables}, timeout=30)
    answer.raise_for_status()
    body = answer.json()
    assert not body.get("errors"), body
    return body["data"]


def test_a_message_becomes_checked_rows(sqs: Any, dagster: str):
    """Guards everything at once: if this passes, every part is wired to every other."""
    sent_at = time.time()
    token = probe.submit(sqs, rows=500)
    result = probe.await_result(dagster, token, sent_at=sent_at, timeout=DEADLINE_SECONDS)
    assert list(result.steps) == ["sensor", "queue", "run", "check"]
    assert "500 of 500" in result.detail


_RUNS = """
query Runs($tags: [ExecutionTag!]!) {
  runsOrError(filter: {tags: $tags}) { ... on Runs { results { status } } }
}
"""


def test_the_same_message_sent_again_runs_once(sqs: Any, dagster: str):
    """Guards exactly-once: SQS may deliver a message any number of times."""
    token = SystemIds().new_id()
    url = sqs.get_queue_url(QueueName=QUEUE)["QueueUrl"]
    sent_at = time.time()
    for _ in range(3):
        sqs.send_message(QueueUrl=url, MessageBody=json.dumps({"id": token, "rows": 5}))
    probe.await_result(dagster, token, sent_at=sent_at, timeout=DEADLINE_SECONDS)
    runs = _graphql(dagster, _RUNS, tags=[{"key": TOKEN_TAG, "value": token}])["runsOrError"]["results"]
    assert [run["status"] for run in runs] == ["SUCCESS"]


_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchPipelineExecution(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
  }
}
"""
_RUN = "query Run($id: ID!) { runOrError(runId: $id) { ... on Run { status startTime endTime } } }"


def _launch_by_hand(dagster: str, token: str) -> str:
    selector = {
        "repositoryLocationName": "lockstep",
        "repositoryName": "__repository__",
        "jobName": "__ASSET_JOB",
        "assetSelection": [{"path": [TABLE]}],
        "assetCheckSelection": [],
    }
    config = {"ops": {TABLE: {"config": {"id": token, "rows": 3}}}}
    params = {"selector": selector, "runConfigData": config, "mode": "default"}
    launched = _graphql(dagster, _LAUNCH, params=params)["launchPipelineExecution"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    return launched["run"]["runId"]


def test_runs_launched_by_hand_keep_to_their_lane(dagster: str):
    """Guards the pool: tags do not reach such runs, and two of them at once would be two writers."""
    ids = [_launch_by_hand(dagster, f"hand-{number}") for number in range(2)]
    runs = [_finished(dagster, run_id) for run_id in ids]
    assert [run["status"] for run in runs] == ["SUCCESS", "SUCCESS"]
    first, second = sorted(runs, key=lambda run: run["startTime"])
    assert second["startTime"] >= first["endTime"]


def _finished(dagster: str, run_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        run = _graphql(dagster, _RUN, id=run_id)["runOrError"]
        if run["endTime"] is not None:
            return run
        time.sleep(0.5)
    pytest.fail(f"run {run_id} did not finish within {DEADLINE_SECONDS} s")


_LOCATION = """
query { workspaceOrError { ... on Workspace { locationEntries { name loadStatus
  locationOrLoadError { __typename ... on RepositoryLocation { repositories { sensors {
    name sensorState { status } } } } ... on PythonError { message } } } } } }
"""


def test_the_workspace_loads_and_its_sensors_are_awake(dagster: str):
    """Guards the tie between workspace file, code server and webserver: a typo leaves an empty UI."""
    (entry,) = _graphql(dagster, _LOCATION)["workspaceOrError"]["locationEntries"]
    assert (entry["name"], entry["loadStatus"]) == ("lockstep", "LOADED")
    (repository,) = entry["locationOrLoadError"]["repositories"]
    states = {sensor["name"]: sensor["sensorState"]["status"] for sensor in repository["sensors"]}
    assert states["selftest_sensor"] == "RUNNING"
