"""The jobs that drain each vault's lane and refresh what people read from it.

What belongs here: which assets run together and under which tags. What does not: when they run (sensors/windows.py).
"""

from __future__ import annotations

import dagster as dg

from jobs.lanes import LANE_TAG
from lockstep.kernel.settings import settings
from lockstep.windows.mart import MART_TABLE
from platform_assets.windows import VaultNames


def vault_job(vault: str, objects: list[str]) -> dg.UnresolvedAssetJobDefinition:
    """Drain the lane, then describe its tables and rebuild its mart."""
    names = VaultNames(vault)
    keys = [names.key(name) for name in ("applied_windows", *objects, MART_TABLE)]
    return dg.define_asset_job(
        name=names.job,
        selection=dg.AssetSelection.assets(*keys),
        description=f"Apply the windows of vault {vault} that are ready, in order, and refresh its tables and mart.",
        tags={LANE_TAG: names.group},
        executor_def=dg.in_process_executor,
    )


jobs = [vault_job(vault, settings().vault_objects.split(",")) for vault in settings().vault_ids]
