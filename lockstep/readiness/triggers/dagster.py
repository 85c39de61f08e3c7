"""The Dagster trigger: launches a job or assets through the webserver's GraphQL address and finds its run by token.

What belongs here: the queries and what Dagster's answers mean. What does not: Dagster itself, which this package must
not import. The same client answers the builtins about assets and checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import httpx

from lockstep.kernel.errors import Transient
from lockstep.readiness.model import Category, Key, Polled, PollOutcome, Started, StartFailed, StartUnknown
from lockstep.readiness.safety import fill_in
from lockstep.readiness.triggers.base import Job, StartAnswer

TOKEN_TAG: Final = "lockstep/readiness-run"  # noqa: S105  # the name of a run tag
ASSET_JOB: Final = "__ASSET_JOB"

_RUNS = """
query Runs($tags: [ExecutionTag!]!) {
  runsOrError(filter: {tags: $tags}, limit: 1) {
    __typename ... on Runs { results { runId status } } ... on PythonError { message }
  }
}"""
_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchPipelineExecution(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on RunConfigValidationInvalid { errors { message } }
    ... on PipelineNotFoundError { message }
    ... on InvalidSubsetError { message }
    ... on UnauthorizedError { message }
    ... on ConflictingExecutionParamsError { message }
    ... on PythonError { message }
  }
}"""
_RUN = """
query Run($id: ID!) { runOrError(runId: $id) { __typename ... on Run { status } ... on PythonError { message } } }"""
_TERMINATE = """
mutation Stop($id: String!) {
  terminateRun(runId: $id, terminatePolicy: SAFE_TERMINATE) {
    __typename ... on TerminateRunFailure { message } ... on PythonError { message }
  }
}"""
_ASSET = """
query Asset($asset: AssetKeyInput!, $partitions: [String!]) {
  assetOrError(assetKey: $asset) {
    __typename ... on Asset { assetMaterializations(partitions: $partitions, limit: 1) { timestamp partition } }
  }
}"""
_CHECK = """
query Check($asset: AssetKeyInput!, $check: String!) {
  assetCheckExecutions(assetKey: $asset, checkName: $check, limit: 1) { status timestamp evaluation { success } }
}"""

_IN_FLIGHT = frozenset({"QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING", "MANAGED"})
_REFUSALS = frozenset(
    {"RunConfigValidationInvalid", "PipelineNotFoundError", "InvalidSubsetError", "UnauthorizedError"}
)


class DagsterGraph:
    """Questions to one webserver."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = f"{url.rstrip('/')}/graphql"

    def ask(self, query: str, timeout: float = 30.0, **variables: Any) -> Mapping[str, Any]:
        """The data of an answer; `Transient` if the webserver could not give one."""
        response = self._client.post(self._url, json={"query": query, "variables": variables}, timeout=timeout)
        response.raise_for_status()
        body = response.json()
        if body.get("errors"):
            raise Transient(f"Dagster refused the query: {body['errors'][0].get('message')}")
        data: Mapping[str, Any] = body["data"]
        return data

    def find(self, token: str, timeout: float = 30.0) -> Mapping[str, Any] | None:
        """The run that carries the token."""
        found = self.ask(_RUNS, timeout, tags=[{"key": TOKEN_TAG, "value": token}])["runsOrError"]
        if found["__typename"] != "Runs":
            raise Transient(f"Dagster could not list runs: {found.get('message', found['__typename'])}")
        return found["results"][0] if found["results"] else None

    def asset_freshness(self, config: Mapping[str, Any], key: Key, now: datetime) -> dict[str, Any]:
        """Age of an asset's latest materialization; of one partition if the configuration names it."""
        partition = fill_in(config.get("partition"), {"date": key.date.isoformat(), "scheduleID": key.schedule})
        asset = {"path": str(config["asset"]).split("/")}
        answer = self.ask(_ASSET, asset=asset, partitions=[partition] if partition else None)["assetOrError"]
        events = answer.get("assetMaterializations") or []
        if not events:
            return {"ageSeconds": None}
        at = float(events[0]["timestamp"]) / 1000
        return {"ageSeconds": max(0.0, now.timestamp() - at), "partition": events[0]["partition"]}

    def check_result(self, config: Mapping[str, Any], _: Key, __: datetime) -> dict[str, Any]:
        """Whether an asset check's latest execution succeeded."""
        asset = {"path": str(config["asset"]).split("/")}
        found = self.ask(_CHECK, asset=asset, check=str(config["check"]))["assetCheckExecutions"]
        if not found:
            return {"success": None}
        evaluation = found[0]["evaluation"]
        return {"success": bool(evaluation and evaluation["success"]), "status": found[0]["status"]}


class DagsterTrigger:
    """Runs of one Dagster. A run is tagged with its token, and looked for before every launch."""

    def __init__(self, graph: DagsterGraph) -> None:
        self._graph = graph

    def start(self, job: Job) -> StartAnswer:
        """Launch, unless a run with the token is there already."""
        try:
            found = self._graph.find(job.token, job.timeout)
        except (httpx.HTTPError, Transient) as error:  # nothing was sent that could start anything
            return StartFailed(job.token, Category.TRANSIENT, f"Dagster is not reached: {error}"[:300])
        if found is not None:
            return Started(job.token, {"dagster_run_id": found["runId"]})
        try:
            answer = self._graph.ask(_LAUNCH, job.timeout, params=_parameters(job))["launchPipelineExecution"]
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return StartFailed(job.token, Category.TRANSIENT, f"Dagster is not reached: {error}"[:300])
        except (httpx.HTTPError, Transient) as error:
            return StartUnknown(job.token, f"{type(error).__name__}: {error}"[:300])
        return self._judge(job, answer)

    def _judge(self, job: Job, answer: Mapping[str, Any]) -> StartAnswer:
        kind = answer["__typename"]
        if kind == "LaunchRunSuccess":
            return Started(job.token, {"dagster_run_id": answer["run"]["runId"]})
        words = answer.get("message") or "; ".join(error["message"] for error in answer.get("errors", []))
        category = Category.PERMANENT if kind in _REFUSALS else Category.TRANSIENT
        return StartFailed(job.token, category, f"{kind}: {words}"[:300])

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """The run's status; one that Dagster may add later is unknown, not failed."""
        answer = self._graph.ask(_RUN, id=handle["dagster_run_id"])["runOrError"]
        status = answer.get("status", answer["__typename"])
        if status in _IN_FLIGHT:
            return Polled(job.token, PollOutcome.RUNNING)
        words = f"Dagster says {status}"
        if status == "SUCCESS":
            return Polled(job.token, PollOutcome.SUCCEEDED)
        if status == "FAILURE":
            return Polled(job.token, PollOutcome.FAILED, Category.TRANSIENT, words)
        if status == "CANCELED":
            return Polled(job.token, PollOutcome.CANCELLED, None, words)
        return Polled(job.token, PollOutcome.UNKNOWN, None, words)

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Terminate, then look."""
        self._graph.ask(_TERMINATE, id=handle["dagster_run_id"])
        return self.status(job, handle).outcome not in (PollOutcome.RUNNING, PollOutcome.UNKNOWN)


def _parameters(job: Job) -> dict[str, Any]:
    options = job.options
    tags = {
        **options["tags"],
        TOKEN_TAG: job.token,
        "lockstep/pipeline": job.key.pipeline,
        "lockstep/attempt": str(job.attempt),
    }
    if options["partition"]:
        tags["dagster/partition"] = options["partition"]
    selector: dict[str, Any] = {
        "repositoryLocationName": options["location"],
        "repositoryName": options["repository"],
        "jobName": options["job"] or ASSET_JOB,
    }
    if options["assets"]:
        selector["assetSelection"] = [{"path": asset.split("/")} for asset in options["assets"]]
    return {
        "selector": selector,
        "runConfigData": options["run_config"],
        "mode": "default",
        "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
    }
