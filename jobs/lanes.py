"""Lanes: the pools that let one run at a time work in a lane, and their limits.

What belongs here: names, limits and setting them. What does not: ordering, which the ledgers and their fences
own. Pools hold back every queued run, also one launched by hand; run tags do not reach those.
"""

from __future__ import annotations

import dagster as dg

LANE_TAG = "lockstep/lane"
"""Run tag whose every value may have one run at a time (dagster.yaml, `tag_concurrency_limits`)."""

RUNS_PER_LANE = 1


def lane_pools(definitions: dg.Definitions) -> list[str]:
    """Every pool that any asset, check or job of `definitions` uses, sorted."""
    operations = (op for job in definitions.resolve_all_job_defs() for op in job.graph.iterate_op_defs())
    return sorted({op.pool for op in operations if op.pool})


def set_pool_limits(instance: dg.DagsterInstance, definitions: dg.Definitions | None = None) -> list[str]:
    """Give every lane's pool its limit, and return the pools that were changed. Safe to repeat.

    A pool without a limit of its own is not protected at first use: two runs queued together both start. A
    limit of 0 is kept: it is how an operator pauses a lane, and a restart must not open it again.
    """
    if definitions is None:
        from platform_assets.definitions import defs as definitions  # definitions import jobs

    storage = instance.event_log_storage
    explicit = {pool.name: pool.limit for pool in storage.get_pool_limits() if not pool.from_default}
    loose = [pool for pool in lane_pools(definitions) if explicit.get(pool, RUNS_PER_LANE + 1) > RUNS_PER_LANE]
    for pool in loose:
        storage.set_concurrency_slots(pool, RUNS_PER_LANE)
    return loose
