"""The assets of exports: the source, the chunks, the manifests, and the checks that compare records with objects.

What belongs here: doors into lockstep/exports. What does not: rules, SQL and bytes.
No `from __future__ import annotations`: Dagster reads the annotations of `config` as real types.
"""

from datetime import UTC, date, datetime, timedelta

import dagster as dg

from lockstep.exports import inspect
from lockstep.exports.claims import ClaimStore
from lockstep.exports.fleet import Opener, run_on_spark
from lockstep.exports.model import CHUNKS_ASSET, MANIFESTS_ASSET, SOURCE_ASSET, Tally
from lockstep.exports.store import JobStore
from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.kernel.postgres import Pool
from lockstep.kernel.settings import Settings, load_settings
from platform_assets.export_events import chunk_partitions, report, report_late, unreported
from resources.exports import export_limits, export_objects, export_place, open_worker, state_pool
from resources.readiness_plane import alert_door
from resources.spark import SparkResource

OPENER = Opener("resources.exports:open_worker")
RETENTION = timedelta(days=90)
MOST_PARTITIONS = 15_000  # Dagster's pages stay quick below twenty thousand
MOST_LATE = 500
_MOST_WORDS = 10


class BatchConfig(dg.Config):
    """The batch that the sensor reserved. Empty: the run's own partition is rebuilt, by hand."""

    batch_id: str = ""
    tasks: int = 2


source = dg.AssetSpec(
    SOURCE_ASSET,
    group_name="exports",
    kinds={"postgres"},
    owners=["team:lockstep"],
    description="The database that exports read, through the function `export_rows(key, effective_date)`.",
)


@dg.asset(
    name=CHUNKS_ASSET,
    deps=[SOURCE_ASSET],
    partitions_def=chunk_partitions,
    group_name="exports",
    kinds={"spark", "postgres", "s3", "csv"},
    owners=["team:lockstep"],
    description=(
        "One file per key and day at `<basePath>/YYYY/MM/DD/<KEY>_<YYYYMMDD>.csv`. The sensor starts runs that work "
        "off a batch of many; materializing one partition by hand retries its failed chunks, and their jobs complete."
    ),
)
def export_chunks(context: dg.AssetExecutionContext, config: BatchConfig, spark: SparkResource) -> dg.MaterializeResult:
    """Work off the batch on Spark, or rebuild this partition here."""
    settings = load_settings()
    with state_pool(settings, application_name="lockstep-export-run") as state:
        if config.batch_id:
            return _batch(context, config, spark, settings, state)
        return _by_hand(context, settings, state)


def _batch(
    context: dg.AssetExecutionContext, config: BatchConfig, spark: SparkResource, settings: Settings, state: Pool
) -> dg.MaterializeResult:
    claims = ClaimStore(state, owner=f"run:{context.run.run_id}", limits=export_limits(settings))
    named = inspect.chunks_of_batch(state, config.batch_id)
    waiting = claims.extend(config.batch_id)
    context.log.info("batch %s: %s chunks wait", config.batch_id, waiting)
    tally = Tally()
    broke = True
    try:
        if waiting:
            tally = run_on_spark(spark.spark_session, config.batch_id, tasks=config.tasks, opener=OPENER)
        broke = False
    finally:  # also when Spark went away: others may take what is left at once, and what is done is shown
        claims.release(config.batch_id)
        failed = report(context, inspect.outcomes(state, named), run_failed=broke)
    if failed:
        error = _failed(failed)
        alert_door(settings).raise_now("exports.chunks_failed", "error", f"batch {config.batch_id}", str(error))
        raise error
    metadata = {name: dg.MetadataValue.int(value) for name, value in tally.as_dict().items() if name != "errors"}
    return dg.MaterializeResult(metadata={**metadata, "dagster/row_count": tally.rows, "errors": tally.errors[:20]})


def _failed(failed: list[inspect.Outcome]) -> Terminal:
    shown = "; ".join(f"{one.partition}: {one.error}" for one in failed[:_MOST_WORDS])
    more = f" (and {len(failed) - _MOST_WORDS} more)" if len(failed) > _MOST_WORDS else ""
    return Terminal(
        f"{len(failed)} partitions failed: {shown}{more}",
        unit=CHUNKS_ASSET,
        next_step="correct the cause, then materialize the red partitions; the others are built.",
    )


def _by_hand(context: dg.AssetExecutionContext, settings: Settings, state: Pool) -> dg.MaterializeResult:
    key, day = _partition(context)
    jobs = JobStore(state, place=export_place(settings), limits=export_limits(settings))
    claims = ClaimStore(state, owner=f"run:{context.run.run_id}", limits=export_limits(settings))
    retried = [jobs.retry(job, chunk_key=chunk).job_id for job, chunk in jobs.failed_chunks(key, day)]
    batch = claims.reserve_file(key, day)
    tally = Tally()
    if batch is not None:
        with open_worker(settings) as worker:
            tally = worker.work(batch.batch_id)
        claims.release(batch.batch_id)
    if tally.errors:  # failed, put off, or not even looked at because a part is away
        raise Terminal(
            "; ".join(tally.errors), unit=context.partition_key, next_step="correct it, then run this again."
        )
    if not (tally.built or tally.reused):
        context.log.info("no chunk of this partition waits or has failed: its file stays as it is")
        return dg.MaterializeResult(metadata={"jobs_retried": retried, "built": 0})
    return dg.MaterializeResult(
        metadata={"jobs_retried": retried, "built": tally.built, "dagster/row_count": tally.rows}
    )


def _partition(context: dg.AssetExecutionContext) -> tuple[str, date]:
    if not context.has_partition_key:
        raise InvalidInput("choose a partition KEY|YYYYMMDD, or let the sensor start a batch.", unit=CHUNKS_ASSET)
    key, _, day = context.partition_key.rpartition("|")
    # A day, not its midnight: compared with a date, an instant is another one in every time zone of the database.
    return key, datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC).date()


@dg.asset(
    name=MANIFESTS_ASSET,
    deps=[CHUNKS_ASSET],
    group_name="exports",
    kinds={"postgres", "s3", "json"},
    owners=["team:lockstep"],
    description=(
        "A manifest of every finished job beside its files, `<basePath>/_manifests/<jobId>.json`: what the API "
        "answers, without addresses. Also removes partitions of files that were not touched for ninety days, and "
        "shows files whose run died before it could report them."
    ),
)
def export_manifests(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Write the manifests that are missing, and prune partitions."""
    settings = load_settings()
    with state_pool(settings, application_name="lockstep-export-manifests") as state:
        jobs = JobStore(state, place=export_place(settings), limits=export_limits(settings))
        written = inspect.write_manifests(state, jobs, export_objects(settings), export_place(settings))
        pruned = _prune(context.instance, inspect.recent_partitions(state, datetime.now(UTC) - RETENTION))
        late = report_late(context.instance, unreported(context.instance, inspect.newest_outcomes(state, MOST_LATE)))
        jobs.forget_keys()
    return dg.MaterializeResult(
        metadata={
            "written": len(written),
            "jobs": written[:20],
            "partitions_pruned": pruned,
            "partitions_reported_late": late,
        }
    )


def _prune(instance: dg.DagsterInstance, recent: set[str]) -> int:
    name = str(chunk_partitions.name)
    present = instance.get_dynamic_partitions(name)
    stale = [one for one in present if one not in recent]
    stale += [one for one in present if one in recent][:-MOST_PARTITIONS]
    for one in stale:
        instance.delete_dynamic_partition(name, one)
    return len(stale)


@dg.asset_check(
    asset=CHUNKS_ASSET, name="no_failed_chunks_check", description="No chunk of a failed job waits for a retry."
)
def no_failed_chunks_check() -> dg.AssetCheckResult:
    """Red while some job needs a person."""
    with state_pool(load_settings(), application_name="lockstep-export-check") as state:
        failed = inspect.failed_chunks(state)
    return dg.AssetCheckResult(
        passed=not failed,
        description=f"{len(failed)} failed",
        metadata={"partitions": [str(one) for one in failed[:50]]},
    )


@dg.asset_check(
    asset=CHUNKS_ASSET,
    name="files_match_cache_check",
    description="Every recorded file is there with its recorded tag and size.",
)
def files_match_cache_check() -> dg.AssetCheckResult:
    """Compare the newest records with the objects."""
    settings = load_settings()
    with state_pool(settings, application_name="lockstep-export-check") as state:
        files = inspect.newest_files(state)
    missing = sorted({one.object_key for one in files} - inspect.present_names(export_objects(settings), files))
    return dg.AssetCheckResult(
        passed=not missing, description=f"{len(missing)} of {len(files)} differ", metadata={"objects": missing[:50]}
    )


@dg.asset_check(
    asset=CHUNKS_ASSET, name="no_orphan_objects_check", description="No object lies around that no record knows."
)
def no_orphan_objects_check() -> dg.AssetCheckResult:
    """Objects younger than an hour may belong to a publication in progress."""
    settings = load_settings()
    with state_pool(settings, application_name="lockstep-export-check") as state:
        orphans = inspect.orphans(
            state, export_objects(settings), export_place(settings), older_than=datetime.now(UTC) - timedelta(hours=1)
        )
    return dg.AssetCheckResult(
        passed=not orphans,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{len(orphans)} orphans",
        metadata={"objects": orphans[:50]},
    )


assets = [source, export_chunks, export_manifests]
checks = [no_failed_chunks_check, files_match_cache_check, no_orphan_objects_check]
