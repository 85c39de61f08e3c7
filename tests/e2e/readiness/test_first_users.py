"""The other pipelines as users of readiness, on the whole stack: marker, stream, sensor, evaluator, Dagster run, asset.

Nothing here ticks: the daemon's own sensor does everything after the marker.
"""

from __future__ import annotations

import secrets
import time
from datetime import date, timedelta
from typing import Any

import httpx
import pytest

from lockstep.kernel.settings import load_settings
from lockstep.readiness.model import Key, RunStatus, TraitStatus
from lockstep.readiness.store import slot_key
from lockstep.readiness.triggers.dagster import TOKEN_TAG, DagsterGraph
from platform_assets.readiness import asset_name
from resources.readiness import Deployment, build_deployment

pytestmark = [pytest.mark.stack, pytest.mark.platform]

DEADLINE_SECONDS = 240
_JOB = """
query Job($tags: [ExecutionTag!]!) {
  runsOrError(filter: {tags: $tags}) { ... on Runs { results { jobName status } } }
}"""


@pytest.fixture
def deployment(stack: Any) -> Deployment:
    return build_deployment(load_settings())


@pytest.fixture
def graph(stack: Any) -> DagsterGraph:
    return DagsterGraph(httpx.Client(timeout=60), stack.site().environment["LOCKSTEP_DAGSTER_URL"])


def _wait(deployment: Deployment, key: Key) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (status := deployment.store.status(key, deployment.clock.now())) is not RunStatus.COMPLETED:
        told = deployment.store.events(key.pipeline, deployment.clock.now(), key=key)
        assert status is None or not status.is_terminal, told
        assert time.monotonic() < deadline, (status, told)
        time.sleep(1)
    rows = deployment.store.executions(key.pipeline, deployment.clock.now(), limit=500)
    return next(row for row in rows if slot_key(key.pipeline, f"{row['date']}#{row['scheduleId']}") == key)


def test_a_marker_becomes_a_run_of_the_pipelines_own_job_and_a_green_partition(
    deployment: Deployment, graph: DagsterGraph, dynamodb: Any
):
    """Guards the gate in front of exports and of the windows mart: asked for, evaluated, started once, followed.

    Exports are ready by their own ledger; for the windows, whose vaults may have no data here, somebody pushes.
    """
    day = date(2026, 1, 1) + timedelta(days=secrets.randbelow(200))
    exports, windows = Key("exports-daily", day), Key("windows-mart", day)
    item = {"PK": {"S": f"MARKER#{exports.pipeline}"}, "SK": {"S": f"{day}#daily"}}
    dynamodb.put_item(TableName="readiness", Item=item)
    deployment.control.push("windows-mart", "inputs-complete", TraitStatus.PASS, key=windows)
    for key, job in ((exports, "export_housekeeping_job"), (windows, "windows_mart_job")):
        row = _wait(deployment, key)
        assert (row["reason"], row["attemptNumber"]) == ("marker", 1)
        found = graph.ask(_JOB, tags=[{"key": TOKEN_TAG, "value": row["runId"]}])["runsOrError"]["results"]
        assert found == [{"jobName": job, "status": "SUCCESS"}], "one run, of the right job"
        run = deployment.store.run(row["runId"], deployment.clock.now())
        assert (run["status"], bool(run["metadata"]["dagster_run_id"])) == ("COMPLETED", True)
        kinds = {event["kind"] for event in deployment.store.events(key.pipeline, deployment.clock.now(), key=key)}
        assert {"EXECUTION_OPENED", "READINESS_CHECKED", "TRIGGER_FIRED", "PIPELINE_COMPLETED"} <= kinds
        _partition_turns_green(graph, key, deployment)


def _partition_turns_green(graph: DagsterGraph, key: Key, deployment: Deployment) -> None:
    """The sensor reports at the end of its tick, a moment after the ledger has it."""
    config = {"asset": asset_name(key.pipeline), "partition": key.date.isoformat()}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while graph.asset_freshness(config, key, deployment.clock.now())["ageSeconds"] is None:
        assert time.monotonic() < deadline, f"{config} was never materialized"
        time.sleep(1)
