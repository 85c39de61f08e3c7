"""The jobs of ticks: apply a group of ticks, refresh gold, look after what is there.

What belongs here: which assets run together, and the clock of gold and housekeeping. What does not: when groups run,
which is the sensor's part (sensors/ticks.py).
"""

from __future__ import annotations

import dagster as dg

from jobs.lanes import LANE_TAG
from lockstep.ticks.silver.model import DAILY_ASSET, REPORT_ASSET, SESSIONS_ASSET, SILVER_ASSET

silver_ticks_job = dg.define_asset_job(
    name="silver_ticks_job",
    selection=dg.AssetSelection.assets(SILVER_ASSET).without_checks(),
    description="Apply committed ticks of one project to its silver tables, in order.",
    executor_def=dg.in_process_executor,
)

ticks_gold_job = dg.define_asset_job(
    name="ticks_gold_job",
    selection=dg.AssetSelection.assets(DAILY_ASSET, SESSIONS_ASSET, REPORT_ASSET),
    description="Fold newly applied ticks into the tables for analysts, and carry these over to PostgreSQL.",
    tags={LANE_TAG: "ticks_gold"},
    executor_def=dg.in_process_executor,
)

ticks_housekeeping_job = dg.define_asset_job(
    name="ticks_housekeeping_job",
    selection=dg.AssetSelection.assets("tick_housekeeping")
    | dg.AssetSelection.checks_for_assets(dg.AssetKey(SILVER_ASSET)),
    description="Make DynamoDB and Dagster agree with the ledger, look at the dead letters and at the lag.",
    tags={LANE_TAG: "ticks_housekeeping"},
    executor_def=dg.in_process_executor,
)

ticks_gold_schedule = dg.ScheduleDefinition(
    name="ticks_gold_schedule",
    job=ticks_gold_job,
    cron_schedule="23 * * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Every hour.",
)

ticks_housekeeping_schedule = dg.ScheduleDefinition(
    name="ticks_housekeeping_schedule",
    job=ticks_housekeeping_job,
    cron_schedule="*/15 * * * *",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="Every quarter of an hour.",
)

jobs = [silver_ticks_job, ticks_gold_job, ticks_housekeeping_job]
schedules = [ticks_gold_schedule, ticks_housekeeping_schedule]
