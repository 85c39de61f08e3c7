"""Jobs that the readiness plane starts when their inputs are complete.

What belongs here: which assets such a job makes. What does not: when it may run (lockstep/readiness/config/pipelines).
"""

from __future__ import annotations

import dagster as dg

from lockstep.kernel.settings import settings
from lockstep.windows.mart import MART_TABLE
from platform_assets.windows import VaultNames

windows_mart_job = dg.define_asset_job(
    name="windows_mart_job",
    selection=dg.AssetSelection.assets(*(VaultNames(vault).key(MART_TABLE) for vault in settings().vault_ids)),
    description="Make the analysts' mart of every vault anew. Started by the pipeline windows-mart.",
    executor_def=dg.in_process_executor,
)

jobs = [windows_mart_job]
