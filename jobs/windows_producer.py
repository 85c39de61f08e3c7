"""When producers run: a schedule for all vaults, one run per vault, so that no vault waits for another.

What belongs here: the job, its schedule and its tags. What does not: what a run does
(platform_assets/windows_source.py), and the sweep that looks for gaps (sensors/windows_source.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from lockstep.kernel.settings import settings
from lockstep.vaults.registry import VaultRegistry
from lockstep.windows.producer import VAULT_TAG
from platform_assets.windows_source import raw_windows_key
from resources.databases import PostgresResource

JOB = "windows_produce_job"
# The vendor publishes a window 15 minutes after it stops, that is at :00, :15, :30 and :45; five minutes are our lag.
CRON = "5,20,35,50 * * * *"


def build_produce_job(vaults: Sequence[str]) -> dg.UnresolvedAssetJobDefinition:
    """One job over the raw windows of all vaults; each of its runs selects one vault."""
    return dg.define_asset_job(
        name=JOB,
        selection=dg.AssetSelection.assets(*(raw_windows_key(vault) for vault in vaults)),
        description="Fetch what a vault publishes, to S3 and into the queue.",
        executor_def=dg.in_process_executor,
    )


def build_produce_schedule(vaults: Sequence[str], job: dg.UnresolvedAssetJobDefinition) -> dg.ScheduleDefinition:
    """Every quarter of an hour and a little later, one run per registered vault."""

    @dg.schedule(
        name="windows_produce_schedule",
        cron_schedule=CRON,
        execution_timezone="UTC",
        job=job,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Asks every vault for what it published since the last row of its chain.",
    )
    def windows_produce_schedule(
        context: dg.ScheduleEvaluationContext, postgres: PostgresResource
    ) -> list[dg.RunRequest] | dg.SkipReason:
        with postgres.connect() as connection:
            registered = {vault.id for vault in VaultRegistry(connection).vaults()}
        wanted = [vault for vault in vaults if vault in registered]
        if not wanted:
            return dg.SkipReason("no vault is registered: see `lockstep vaults add --help`")
        moment = f"{context.scheduled_execution_time:%Y%m%d%H%M}"
        return [produce_request(vault, f"schedule:{moment}") for vault in wanted]

    return windows_produce_schedule


def produce_request(vault: str, occasion: str) -> dg.RunRequest:
    """A run of one vault's producer. The same occasion asks for it once."""
    return dg.RunRequest(
        run_key=f"produce:{vault}:{occasion}",
        job_name=JOB,
        asset_selection=[raw_windows_key(vault)],
        tags={VAULT_TAG: vault},
    )


produce_job = build_produce_job(settings().vault_ids)

jobs = [produce_job]
schedules = [build_produce_schedule(settings().vault_ids, produce_job)]
