"""The jobs of exports: work off a batch, and look after what is there.

What belongs here: which assets run together, and the clock of the housekeeping. What does not: when batches run, which
is the sensor's part (sensors/exports.py).
"""

from __future__ import annotations

import dagster as dg

from lockstep.exports.model import CHUNKS_ASSET, MANIFESTS_ASSET

export_chunks_job = dg.define_asset_job(
    name="export_chunks_job",
    selection=dg.AssetSelection.assets(CHUNKS_ASSET).without_checks(),
    description="Build the files of one batch of chunks on Spark.",
    executor_def=dg.in_process_executor,
)

export_housekeeping_job = dg.define_asset_job(
    name="export_housekeeping_job",
    selection=dg.AssetSelection.assets(MANIFESTS_ASSET)
    | dg.AssetSelection.checks_for_assets(dg.AssetKey(CHUNKS_ASSET)),
    description="Write missing manifests, prune partitions, compare records with objects.",
    executor_def=dg.in_process_executor,
)

export_housekeeping_schedule = dg.ScheduleDefinition(
    name="export_housekeeping_schedule",
    job=export_housekeeping_job,
    cron_schedule="7 * * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Every hour.",
)

jobs = [export_chunks_job, export_housekeeping_job]
schedules = [export_housekeeping_schedule]
