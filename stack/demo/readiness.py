"""Readiness: a mart that may run only when both vaults are through, and a warning when its deadline comes near.

What belongs here: the plot and what is claimed of it. What does not: the windows it waits for (windows.py).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lockstep.faults import oracle
from lockstep.kernel.errors import Terminal
from lockstep.readiness.triggers.dagster import TOKEN_TAG
from lockstep.vaultsim.model import VaultState
from lockstep.vaultsim.packing import world_of
from stack.demo.stage import Stage

SCENE = "readiness"
_JOB = "windows_mart_job"
_DEADLINE, _LEAD = "20m", "19m45s"  # the warning comes at once, the deadline itself never does
_SLACK = timedelta(minutes=14)  # less than a window: a vault that is one window behind does not pass
_RUNS = """
query Runs($tags: [ExecutionTag!]!) {
  runsOrError(filter: {tags: $tags}) { ... on Runs { results { runId jobName status startTime } } }
}"""
_MART = "SELECT day, object, windows, upserted, deleted FROM mart.vault_activity WHERE vault = %s"
_WINDOWS = """
SELECT min(start), max(applied_at) FROM windows.applied_window AS w JOIN windows.apply_control AS c USING (vault, epoch)
 WHERE vault = %s AND kind = 'incremental'"""


def play(stage: Stage) -> None:
    """The scene."""
    stage.say(SCENE, "waiting for the vaults to publish")
    targets = stage.wait(lambda: _settled(stage), "the backlog of the windows scene")
    if not targets.value:
        raise Terminal("the windows scene published nothing that a mart could wait for.", next_step="see its claims.")
    name = f"demo-mart-{stage.token}"
    now = datetime.now(UTC)
    stage.links["what happened to the gated mart"] = f"{stage.url('readiness')}/api/pipelines/{name}/events"
    ended: Mapping[str, Any] | None = None
    try:
        with _file(pipeline(name, targets.value, now)) as path:
            stage.command(SCENE, "readiness", "register", str(path))
        _see_the_warning(stage, name)
        ended = stage.wait(lambda: _ended(stage, name), f"the end of {name}")
        _examine(stage, name, ended, targets.value)
    finally:
        _tidy(stage, name, now, waits=ended is None)


def pipeline(name: str, targets: Mapping[str, datetime], now: datetime) -> dict[str, Any]:
    """A mart that waits until both vaults have come to where they will stand, for today, from this minute on."""

    def through(vault: str) -> dict[str, Any]:
        limit = (now - targets[vault] + _SLACK).total_seconds()
        return {"evaluator": "builtin:window-watermark-lag", "config": {"vault": vault, "maxLagSeconds": round(limit)}}

    first, second = targets
    return {
        "name": name,
        "archetype": "batch-ingestion",
        "owner": "team:lockstep",
        "traits": {
            "source-freshness": through(first),
            "upstream-dependency": through(second),
            "resource-availability": {"evaluator": "builtin:table-reachable"},
        },
        "trigger": {"type": "dagster", "job": _JOB},
        "sla": {"evaluationDeadline": _DEADLINE, "timezone": "UTC", "atRiskLeadTime": _LEAD},
        "watch": {"interval": "5s", "pollInterval": "5s"},
        "schedules": [{"name": "daily", "after": f"{now:%H:%M}", "timezone": "UTC"}],
    }


def _settled(stage: Stage) -> Any:
    return stage.backlog if stage.backlog.settled else None


@contextmanager
def _file(data: Mapping[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lockstep-demo-") as folder:
        path = Path(folder) / "pipeline.yaml"
        path.write_text(json.dumps(data))  # JSON is YAML
        yield path


def _see_the_warning(stage: Stage, name: str) -> None:
    stage.say(SCENE, "the mart is asked for; its inputs are not there")
    try:
        warning = stage.wait(lambda: _events(stage, name, "SLA_AT_RISK"), "the SLA warning", 90.0)[0]
        stage.say(SCENE, f"SLA at risk: the {warning['message']} deadline is near")
        # The warning may come before the first verdict; the operator comes only after this scene has called.
        execution = stage.wait(lambda: _judged(stage, name), "the first verdict about the mart", 60.0)
        blocking = execution["readiness"]["blocking"]
        stage.claim_that(
            SCENE,
            "the SLA warning comes while the mart waits for a vault",
            "PENDING, blocked",
            f"{execution['status']}, blocked by {', '.join(blocking) or 'nothing'}",
            execution["status"] == "PENDING" and bool(blocking),
        )
        stage.warned.tell(datetime.now(UTC))
    finally:
        stage.warned.give_up()  # the operator comes without a warning too


def _judged(stage: Stage, name: str) -> Mapping[str, Any] | None:
    (execution,) = stage.get("readiness", f"/api/pipelines/{name}/runlogs")
    return execution if execution["readiness"] else None


def _events(stage: Stage, name: str, kind: str) -> list[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = stage.get("readiness", f"/api/pipelines/{name}/events", params={"limit": 500})
    return [event for event in found if event["kind"] == kind]


def _ended(stage: Stage, name: str) -> Mapping[str, Any] | None:
    executions = stage.get("readiness", f"/api/pipelines/{name}/runlogs")
    execution: Mapping[str, Any] = executions[0] if executions else {"status": "not opened", "readiness": None}
    blocking = ", ".join((execution["readiness"] or {}).get("blocking", ()))
    stage.say(SCENE, f"the mart: {execution['status']}{' by ' + blocking if blocking else ''}")
    return execution if execution["status"] in ("COMPLETED", "FAILED", "CANCELLED") else None


def _tidy(stage: Stage, name: str, day: datetime, *, waits: bool) -> None:
    """The pipeline was only for today. One that still waits is cancelled first."""
    if waits:
        stage.run_quietly("readiness", "cancel", name, "--date", f"{day:%Y-%m-%d}", "--reason", "demo")
    stage.run_quietly("readiness", "unregister", name)


# --- claims ----------------------------------------------------------------------------------------------------------


def _examine(stage: Stage, name: str, ended: Mapping[str, Any], targets: Mapping[str, datetime]) -> None:
    counts = {kind: len(_events(stage, name, kind)) for kind in ("SLA_AT_RISK", "TRIGGER_FIRED", "SLA_BREACHED")}
    words = "one warning, one start, no breach"
    stage.claim(SCENE, words, {"SLA_AT_RISK": 1, "TRIGGER_FIRED": 1, "SLA_BREACHED": 0}, counts)
    tags = [{"key": TOKEN_TAG, "value": ended["runId"]}]
    runs = stage.graph.ask(_RUNS, tags=tags)["runsOrError"]["results"]
    shown = [f"{run['jobName']} {run['status']}" for run in runs]
    stage.claim(SCENE, "the mart ran once, as a Dagster run", [f"{_JOB} SUCCESS"], shown)
    if runs:
        stage.links["the run of the gated mart"] = f"{stage.url('dagster')}/runs/{runs[0]['runId']}"
    for vault in targets:
        _examine_vault(stage, vault, runs[0]["startTime"] if runs else None)


def _examine_vault(stage: Stage, vault: str, started: float | None) -> None:
    with stage.reading("LOCKSTEP_WAREHOUSE_DSN") as connection:
        first, newest = connection.execute(_WINDOWS, (vault,)).fetchone() or (None, None)
        lines = {(day, name): tuple(counts) for day, name, *counts in connection.execute(_MART, (vault,)).fetchall()}
    if first is None or started is None:
        raise Terminal("there is nothing to compare.", unit=f"mart of vault {vault}", next_step="see the other claims.")
    words = f"vault {vault}: the mart began after its last window was committed"
    stage.claim_that(
        SCENE, words, "run after commit", f"{started - newest.timestamp():+.1f} s", started > newest.timestamp()
    )
    state = VaultState.model_validate(stage.get("vault", f"/_control/vaults/{vault}"))
    config = state.config
    begin = config.index_of(first) + 1
    expected = oracle.expected_activity(world_of(state), begin, state.published - 1, config.stop_of)
    words = f"vault {vault}: the mart counts the simulator's changes by day and object"
    found = f"{len(lines)} lines, {sum(line[1] + line[2] for line in lines.values())} changes"
    wanted = f"{len(expected)} lines, {sum(line[1] + line[2] for line in expected.values())} changes"
    stage.claim_that(SCENE, words, wanted, found, lines == expected)
