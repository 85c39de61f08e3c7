"""The assets of ticks: bronze and silver by tick, gold for analysts, and the checks that watch the way between.

What belongs here: doors into lockstep/ticks. What does not: rules, SQL, Spark code, clients.
No `from __future__ import annotations`: Dagster reads the annotations of `config` as real types.
"""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import dagster as dg
from pydantic import Field

from lockstep.kernel.errors import InvalidInput, LockstepError
from lockstep.kernel.settings import load_settings
from lockstep.ticks.silver import operations
from lockstep.ticks.silver.gold import bounds, days_of
from lockstep.ticks.silver.metrics import dead_letter_age
from lockstep.ticks.silver.model import (
    BRONZE_ASSET,
    DAILY_ASSET,
    REPORT_ASSET,
    SESSIONS_ASSET,
    SILVER_ASSET,
    Applied,
)
from lockstep.ticks.silver.report import SCHEMA as REPORT_SCHEMA
from lockstep.ticks.silver.store import Actor
from lockstep.ticks.silver.worker import Report
from platform_assets.tick_events import (
    MOST_PARTITIONS,
    add_partitions,
    bronze_event,
    prune_partitions,
    silver_event,
    silver_metadata,
    tick_partitions,
)
from resources.readiness_plane import AlertsResource, alert_door
from resources.silver import Silver, open_silver
from resources.spark import SparkResource
from resources.ticks import open_committer

OWNERS = ["team:lockstep"]
GOLD_LANE = "ticks_gold"
HOUSEKEEPING_ASSET = "tick_housekeeping"
PATIENCE_SECONDS = 90.0  # longer than a lease: the lane of a worker that was killed is free by then
SHOWN = timedelta(days=30)
UNSAID = timedelta(days=1)
CURSOR = "folded_until"
LATE = timedelta(minutes=15)
VERY_LATE = timedelta(hours=1)
_OVERLAP = timedelta(minutes=10)
_REPORT_AT_ONCE = 500
_LOOK_BACK = 100


@dg.asset(
    name=BRONZE_ASSET,
    partitions_def=tick_partitions,
    group_name="ticks",
    kinds={"spark", "deltalake", "s3"},
    owners=OWNERS,
    description=(
        "One partition per tick, reported when the ingest service has committed it. Materialize a partition by hand to "
        "write the tick again from its stored parts, in a new commit with the same rows."
    ),
)
def bronze_ticks(context: dg.AssetExecutionContext, spark: SparkResource) -> dg.MaterializeResult:
    """Ingest this tick again; silver reads the new commit from then on."""
    settings = load_settings()
    with open_silver(settings, application_name="lockstep-bronze-run") as silver:
        known = silver.store.ticks.committed(context.partition_key)
        if known is None:
            raise dg.Failure(f"no tick {context.partition_key} is committed.", allow_retries=False)
        actor = Actor(f"dagster run {context.run.run_id}", "materialized by hand")
        silver.store.audit(actor, "bronze-reingest", known.tick_id, {"project": known.project_id})
        try:
            with open_committer(settings, spark.spark_session) as committer:
                tick = committer.reingest(known.project_id, known.tick_id)
        except LockstepError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
    return dg.MaterializeResult(metadata=bronze_event(tick).metadata)


day_partitions = dg.DailyPartitionsDefinition(start_date="2025-01-01", timezone="UTC", end_offset=1)


class GroupConfig(dg.Config):
    """The ticks that the sensor dispatched. Empty: the run's own partition is applied again, by hand."""

    project_id: str = ""
    ticks: list[str] = Field(default_factory=list)


@dg.asset(
    name=SILVER_ASSET,
    deps=[BRONZE_ASSET],
    partitions_def=tick_partitions,
    group_name="ticks",
    kinds={"spark", "deltalake", "s3"},
    owners=OWNERS,
    op_tags={"dagster/max_runtime": 3600},
    description=(
        "One partition per tick, green when it is merged into the project's silver tables, in the project's order. The "
        "sensor starts a run for the waiting ticks of one project. Materialize a partition by hand to apply the tick "
        "again: its tables go back to just before it, and every later tick of the project follows."
    ),
)
def silver_ticks(context: dg.AssetExecutionContext, config: GroupConfig, spark: SparkResource) -> dg.MaterializeResult:
    """Apply the dispatched ticks, or replay this partition."""
    with open_silver(load_settings(), application_name="lockstep-silver-run") as silver:
        own = context.partition_key if context.has_partition_key else None
        wanted = set(config.ticks) or None
        if not config.ticks:
            config = GroupConfig(project_id=_rewind(context, silver, own))
        report = _drain(context, silver, config.project_id, wanted, spark, own)
        return _result(silver, report, own)


def _rewind(context: dg.AssetExecutionContext, silver: Silver, own: str | None) -> str:
    """By hand: let the tick be applied again, whatever its state. Returns its project."""
    if own is None:
        raise InvalidInput("choose a partition, or let the sensor start a run.", unit=SILVER_ASSET)
    actor = Actor(f"dagster run {context.run.run_id}", "materialized by hand")
    (lane,) = operations.replay_ticks(silver, [own], actor, enqueue=False)
    return lane.project_id


def _parked_words(error: str) -> str:
    return (
        f"its project is stopped here: {error} Mend it and `lockstep silver replay --tick`, or go on without it: "
        "`lockstep silver skip --tick`."
    )


def _drain(
    context: dg.AssetExecutionContext,
    silver: Silver,
    project_id: str,
    wanted: set[str] | None,
    spark: SparkResource,
    own: str | None,
) -> Report:
    def tell(applied: Applied) -> None:
        add_partitions(context.instance, [applied.tick_id])
        if applied.tick_id != own:
            context.log_event(silver_event(applied))

    try:
        worker = silver.worker(spark.spark_session)
        report = worker.drain(project_id, wanted, run_id=context.run.run_id, progress=tell, patience=PATIENCE_SECONDS)
    except LockstepError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    if report.parked and report.failed:
        door = alert_door(silver.settings)
        door.raise_now("ticks.silver_parked", "error", report.failed, _parked_words(report.reason))
    context.log.info("%s applied, %s already there: %s", len(report.applied), len(report.already), report.reason)
    return report


def _result(silver: Silver, report: Report, own: str | None) -> dg.MaterializeResult:
    """The run's own tick as it stands in the ledger; red if it is not there. A run of many says what it did."""
    if own is not None:
        found = silver.store.applied([own]).get(own)
        if found is None:
            raise dg.Failure(f"{own} is not in silver: {report.reason}", allow_retries=False)
        return dg.MaterializeResult(metadata=silver_metadata(found))
    if not report.applied and not report.already and report.error is not None:
        raise dg.Failure(str(report.error), allow_retries=False) from report.error
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": sum(one.rows for one in report.applied),
            "applied": [one.tick_id for one in report.applied],
            "failed": report.failed or "",
            "reason": report.reason,
        }
    )


@dg.asset(
    name=DAILY_ASSET,
    # Not silver_ticks: Dagster refuses a run without a partition when both ends have partitions of different kinds.
    deps=[HOUSEKEEPING_ASSET],
    partitions_def=day_partitions,
    group_name="ticks",
    kinds={"spark", "deltalake", "s3"},
    owners=OWNERS,
    pool=f"lane_{GOLD_LANE}",
    description=(
        "Ticks, rows and lag by day, organisation and project. Every hour the days whose ticks moved are made anew; "
        "materialize a partition to make that day anew now."
    ),
)
def ticks_daily(context: dg.AssetExecutionContext, spark: SparkResource) -> dg.MaterializeResult:
    """Make the run's day anew, or the days of what was applied since the last run."""
    with open_silver(load_settings(), application_name="lockstep-gold-run") as silver:
        gold = silver.gold(spark.spark_session)
        if context.has_partition_key:
            day = date.fromisoformat(context.partition_key)
            rows = gold.load_day(day, silver.store.applied_of_day(*bounds(day)))
            return dg.MaterializeResult(metadata={"rows_written": rows})
        moved = list(silver.store.applied_pages(_cursor(context, DAILY_ASSET)))
        for day in days_of(moved):
            rows = gold.load_day(day, silver.store.applied_of_day(*bounds(day)))
            context.log_event(
                dg.AssetMaterialization(DAILY_ASSET, partition=day.isoformat(), metadata={"rows_written": rows})
            )
    return _folded(moved, {"days": [day.isoformat() for day in days_of(moved)]})


@dg.asset(
    name=SESSIONS_ASSET,
    deps=[SILVER_ASSET],
    group_name="ticks",
    kinds={"spark", "deltalake", "s3"},
    owners=OWNERS,
    pool=f"lane_{GOLD_LANE}",
    description="When each project's agent was sending: stretches of ticks without a pause of an hour.",
)
def agent_sessions(context: dg.AssetExecutionContext, spark: SparkResource) -> dg.MaterializeResult:
    """Fold what was applied since the last run into the sessions."""
    with open_silver(load_settings(), application_name="lockstep-gold-run") as silver:
        moved = list(silver.store.applied_pages(_cursor(context, SESSIONS_ASSET)))
        changed = silver.gold(spark.spark_session).fold_sessions(moved)
    return _folded(moved, {"sessions_changed": changed})


@dg.asset(
    name=REPORT_ASSET,
    deps=[DAILY_ASSET, SESSIONS_ASSET],
    group_name="ticks",
    kinds={"spark", "postgres"},
    owners=OWNERS,
    pool=f"lane_{GOLD_LANE}",
    metadata={"dagster/relation_identifier": f"lockstep.{REPORT_SCHEMA}.daily"},
    description=(
        "Gold in PostgreSQL: ticks_report.daily has the days, ticks_report.agent_sessions shows the newest sessions. "
        "Each version of gold is carried over once, whole."
    ),
)
def ticks_report(context: dg.AssetExecutionContext, spark: SparkResource) -> dg.MaterializeResult:
    """Carry over the days that moved since the last run, and the sessions."""
    with open_silver(load_settings(), application_name="lockstep-gold-run") as silver:
        moved = list(silver.store.applied_pages(_cursor(context, REPORT_ASSET)))
        report = silver.report(spark.spark_session)
        found = report.publish(days_of(moved), run=context.run.run_id, now=silver.clock.now())
    days = {day.isoformat(): rows for day, rows in found.day_rows.items()}
    return _folded(moved, {"day_rows": days, "sessions_version": found.sessions or ""})


def _cursor(context: dg.AssetExecutionContext, asset: str) -> datetime:
    """Where the last run ended, a little earlier. Only a hint: without it everything is folded again, to no effect."""
    records = context.instance.fetch_materializations(dg.AssetKey(asset), limit=_LOOK_BACK).records
    found = [one.asset_materialization.metadata.get(CURSOR) for one in records if one.asset_materialization]
    newest = next((str(one.value) for one in found if one is not None), None)
    return datetime.fromisoformat(newest) - _OVERLAP if newest else datetime(1970, 1, 1, tzinfo=UTC)


def _folded(moved: list[Applied], metadata: dict[str, Any]) -> dg.MaterializeResult:
    until = {CURSOR: max(one.applied_at for one in moved).isoformat()} if moved else {}
    return dg.MaterializeResult(metadata={**metadata, "ticks": len(moved), **until})


@dg.asset(
    name=HOUSEKEEPING_ASSET,
    deps=[SILVER_ASSET],
    group_name="ticks",
    kinds={"postgres", "dynamodb"},
    owners=OWNERS,
    description="Says DONE where a worker died before it could, reports partitions that were missed, prunes old ones.",
)
def tick_housekeeping(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Make DynamoDB and Dagster agree with the ledger."""
    with open_silver(load_settings(), application_name="lockstep-silver-housekeeping") as silver:
        now = silver.clock.now()
        said = silver.settler().settle(silver.store.applied_since(now - UNSAID))
        recent = silver.store.newest(now - SHOWN, limit=MOST_PARTITIONS)
        known = context.instance.get_materialized_partitions(dg.AssetKey(SILVER_ASSET))
        missing = [one for one in recent if one.tick_id not in known][-_REPORT_AT_ONCE:]
        add_partitions(context.instance, [one.tick_id for one in missing])
        for one in missing:
            context.log_event(silver_event(one))
        waiting = {one.next_tick for one in silver.store.backlog() if one.next_tick}
        pruned = prune_partitions(context.instance, {one.tick_id for one in recent} | waiting)
    return dg.MaterializeResult(metadata={"done_said": said, "reported": len(missing), "partitions_pruned": pruned})


@dg.asset_check(
    asset=SILVER_ASSET, name="dead_letters_check", description="No tick message was given up; their age is told too."
)
def dead_letters_check(alerts: AlertsResource) -> dg.AssetCheckResult:
    """Red while the dead-letter queue holds anything."""
    with open_silver(load_settings(), application_name="lockstep-silver-check") as silver:
        depth, age = silver.dead_letters.depth().total, dead_letter_age(silver.dead_letters, silver.clock.now())
    if depth:
        words = f"{depth} messages were given up, the oldest {age / 3600:.1f} h old; `lockstep ticks redrive-dlq`"
        alerts.door().raise_now("ticks.dead_letters", "error", silver.dead_letters.name, words)
    return dg.AssetCheckResult(
        passed=depth == 0,
        description=f"{depth} dead letters" + (f", the oldest {age / 3600:.1f} h old" if depth else ""),
        metadata={"depth": depth, "oldest_seconds": age},
    )


@dg.asset_check(
    asset=SILVER_ASSET,
    name="silver_lag_check",
    description="Every committed tick reaches silver within 15 minutes; an hour is an error. Parked lanes are named.",
)
def silver_lag_check(alerts: AlertsResource) -> dg.AssetCheckResult:
    """Red while a committed tick waits for too long."""
    with open_silver(load_settings(), application_name="lockstep-silver-check") as silver:
        now = operations.status(silver)
    parked = [one for one in now.lanes if one.lane.parked]
    late = now.lag_seconds > LATE.total_seconds()
    for one in parked:
        alerts.door().raise_now("ticks.silver_parked", "error", str(one.lane.parked), _parked_words(str(one.error)))
    if late and now.lanes[0].next_tick:
        words = f"it is committed and waits for silver for {now.lag_seconds / 60:.0f} minutes; `lockstep ticks status`"
        alerts.door().raise_now("ticks.silver_late", "warning", now.lanes[0].next_tick, words)
    severe = bool(parked) or now.lag_seconds > VERY_LATE.total_seconds()
    return dg.AssetCheckResult(
        passed=not late and not parked,
        severity=dg.AssetCheckSeverity.ERROR if severe else dg.AssetCheckSeverity.WARN,
        description=f"{now.waiting_ticks} ticks wait, {now.lag_seconds:.0f} s; {len(parked)} lanes parked",
        metadata={
            "lag_seconds": now.lag_seconds,
            "waiting_ticks": now.waiting_ticks,
            "skipped_ticks": len(now.skipped),
            "parked": [f"{one.lane.project_id} at {one.lane.parked}: {one.error}" for one in parked[:20]],
        },
    )


assets = [bronze_ticks, silver_ticks, ticks_daily, agent_sessions, ticks_report, tick_housekeeping]
checks = [dead_letters_check, silver_lag_check]
