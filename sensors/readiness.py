"""The readiness sensor: reads markers, lets the driver step what is due, and tells Dagster what came of it.

What belongs here: one bounded tick and its report as asset events. What does not: any decision (lockstep/readiness).
No run is requested: a pipeline's job is started by its trigger, and nothing here waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import dagster as dg
from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.errors import Transient
from lockstep.readiness import stream
from lockstep.readiness.model import Execution, Plan, Readiness, RunStatus
from lockstep.readiness.store import Marker
from lockstep.readiness.worker import Report
from platform_assets.readiness import asset_name, check_results, describe, outcome_result, partition_of, plans
from resources.readiness_plane import ReadinessResource

MAX_CHECK_EVENTS = 200  # each costs a write; outcomes are never left out
SWEPT_PER_TICK = 25
TICK_SECONDS = 40.0  # Dagster gives up on a tick after sixty
HINT_SECONDS = 8.0  # of which the stream, and then the sweep, may take so much

_PLANS = {plan.pipeline: plan for plan in plans}
Event = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation


@dg.sensor(
    name="readiness_sensor",
    minimum_interval_seconds=10,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Steps what is due: evaluates, starts, polls, alerts. Markers wake it, a sweep misses none.",
)
def readiness_sensor(context: dg.SensorEvaluationContext, readiness: ReadinessResource) -> dg.SensorResult:
    """One bounded tick."""
    deployment = readiness.deployment()
    clock, started = deployment.clock, deployment.clock.monotonic()
    deployment.catalogue.sync(started + HINT_SECONDS)
    place = _read_cursor(context.cursor)
    markers, place["stream"] = _from_stream(context, readiness, place.get("stream"), started + HINT_SECONDS)
    until = clock.monotonic() + HINT_SECONDS
    swept, place["sweep"] = deployment.driver.sweep(_number(place.get("sweep")), SWEPT_PER_TICK, until)
    report = deployment.driver.tick(_latest([*markers, *swept]), started + TICK_SECONDS)
    for refusal in report.refused:
        context.log.warning("refused: %s", refusal)
    for key, error in report.failures.items():
        context.log.error("%s: %s", key, error)
    if report.failures and not report.stepped:
        raise Transient(f"none of {len(report.failures)} executions could be stepped.", next_step="see the tick's log.")
    words = (
        f"{report.looked_at} looked at, {report.opened} opened, {report.stepped} stepped, {report.left_over} left over"
    )
    return dg.SensorResult(skip_reason=words, cursor=json.dumps(place), asset_events=_events(report))


def _read_cursor(cursor: str | None) -> dict[str, Any]:
    """A cursor that cannot be read starts anew: it is a hint."""
    try:
        place = json.loads(cursor or "{}")
    except ValueError:
        return {}
    return place if isinstance(place, dict) else {}


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _from_stream(
    context: dg.SensorEvaluationContext, readiness: ReadinessResource, cursor: Any, until: float
) -> tuple[list[Marker], str | None]:
    deployment = readiness.deployment()
    try:
        found = stream.read(
            readiness.streams(), deployment.stream_arn(), cursor, lambda: deployment.clock.monotonic() < until
        )
    except (ClientError, BotoCoreError, Transient) as error:
        context.log.warning("stream not read, the sweep goes on: %s", error)
        return [], cursor
    return found.markers, found.cursor


def _latest(markers: list[Marker]) -> list[Marker]:
    """One marker per execution and source: the stream tells some that the sweep finds too."""
    return list({(marker.key, marker.source): marker for marker in markers}.values())


def _events(report: Report) -> list[Event]:
    """Every outcome, and the traits of what has a new verdict."""
    outcomes: list[Event] = []
    answers: list[Event] = []
    for before, after in report.moved:
        plan = _PLANS.get(after.key.pipeline)
        if plan is None:
            continue  # registered through the API: it has no asset until it is in a file
        outcomes += _outcome(plan, before, after)
        if after.readiness is not None and (
            before.readiness is None or before.readiness.signature != after.readiness.signature
        ):
            answers += _answers(plan, after.readiness)
    return [*outcomes, *answers[:MAX_CHECK_EVENTS]]


def _answers(plan: Plan, readiness: Readiness) -> Iterator[Event]:
    for result in check_results(plan, readiness):
        yield _evaluation(plan, result)


def _evaluation(plan: Plan, result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    return dg.AssetCheckEvaluation(
        asset_key=dg.AssetKey(asset_name(plan.pipeline)),
        check_name=str(result.check_name),
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=result.metadata,
    )


def _outcome(plan: Plan, before: Execution, after: Execution) -> Iterator[Event]:
    """What an execution has become: green when it is done, red by its check when it is over without that."""
    if after.dry_run:
        return
    asset, partition, metadata = asset_name(plan.pipeline), partition_of(plan, after.key), describe(after)
    if after.status.is_success and not before.status.is_success:
        yield dg.AssetMaterialization(asset_key=asset, partition=partition, metadata=metadata)
        yield _evaluation(plan, outcome_result(plan, after))
    elif after.status in (RunStatus.FAILED, RunStatus.CANCELLED) and not before.status.is_terminal:
        words = f"{after.key} {after.status.value.lower()}"
        yield dg.AssetObservation(asset_key=asset, partition=partition, description=words, metadata=metadata)
        yield _evaluation(plan, outcome_result(plan, after))


sensors = [readiness_sensor]
