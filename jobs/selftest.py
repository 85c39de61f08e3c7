"""The self-test's job.

What belongs here: which assets run together and under which tags. What does not: when they run, which is the
sensor's part (sensors/selftest.py).
"""

from __future__ import annotations

import dagster as dg

from jobs.lanes import LANE_TAG
from lockstep.selftest.model import LANE, TABLE

selftest_job = dg.define_asset_job(
    name="selftest_job",
    selection=dg.AssetSelection.assets(TABLE),
    description="Write the rows of one self-test and count them.",
    tags={LANE_TAG: LANE},
    executor_def=dg.in_process_executor,
)

jobs = [selftest_job]
