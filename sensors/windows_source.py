"""The sweep of the source side: a gap whose time has come is tried again without waiting for the schedule.

What belongs here: reading gaps and requesting runs. What does not: what a gap is (lockstep/windows), and producing.
Level-triggered: it looks at the queue and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import dagster as dg

from jobs.windows_producer import produce_job, produce_request
from lockstep.kernel.clock import SystemClock
from lockstep.kernel.settings import settings
from lockstep.windows.model import Gap
from lockstep.windows.queue import WindowQueue
from resources.aws import DynamoDBResource

SWEEP_SECONDS = 60
PATIENCE = timedelta(minutes=5)
"""How long a gap without a time of the vendor's is left alone after it was looked at."""
DEADLINE_SECONDS = 40


def build_sweep_sensor(vaults: Sequence[str], job: dg.UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """One sensor for all vaults."""

    @dg.sensor(
        name="windows_gap_sweep_sensor",
        job=job,
        minimum_interval_seconds=SWEEP_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Runs the producer of a vault again when one of its gaps may be filled by now.",
    )
    def windows_gap_sweep_sensor(context: dg.SensorEvaluationContext, dynamodb: DynamoDBResource) -> dg.SensorResult:
        clock, queue = SystemClock(), WindowQueue(dynamodb.get_client())
        deadline, requests = clock.monotonic() + DEADLINE_SECONDS, []
        for vault in vaults:
            if clock.monotonic() > deadline:
                context.log.warning("the sweep ran out of time; the next one starts again")
                break
            due = [gap for gap in queue.gaps(vault) if is_due(gap, clock.now())]
            if due:
                requests.append(produce_request(vault, f"gap:{due[0].sort_key}:{due[0].attempt_count}"))
        return dg.SensorResult(run_requests=requests, skip_reason=None if requests else "no gap is due")

    return windows_gap_sweep_sensor


def is_due(gap: Gap, now: datetime) -> bool:
    """Whether looking again may help: the vendor's own time has come, or nobody looked for a while."""
    looked = gap.last_seen or gap.first_seen
    rested = looked is None or now - looked >= PATIENCE
    return rested and (gap.next_retry is None or gap.next_retry <= now)


sensors = [build_sweep_sensor(settings().vault_ids, produce_job)]
