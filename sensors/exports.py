"""The chunk sensor: reaps, reserves a fair batch within the connection budget, requests a run, settles messages.

What belongs here: one bounded pass. What does not: whose turn it is (lockstep/exports/rules.py). It looks at the table,
not at messages, so work whose message was lost is found at the next tick.
"""

from __future__ import annotations

import math
import os

import dagster as dg

from jobs.exports import export_chunks_job
from lockstep.exports.claims import Batch, ClaimStore
from lockstep.exports.fleet import tasks_for
from lockstep.exports.model import CHUNKS_ASSET, WORK_QUEUE
from lockstep.exports.queue import ChunkQueue
from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.settings import load_settings
from platform_assets.exports import BatchConfig
from resources.aws import SqsResource
from resources.exports import export_limits, state_pool
from sensors import EVERY_LOOP_SECONDS, IN_FLIGHT

CHUNKS_PER_CONNECTION = 100
"""So many chunks of a batch for each connection: enough to be worth a run, few enough to decide anew soon."""

QUEUE_SECONDS = 15.0
QUEUE_SECONDS_BEFORE_A_RUN = 0.25
"""Messages can wait, a run that is about to start should not."""

ATTENTION_SECONDS = 3.0
LOOK_SECONDS = 0.25
"""How long a pass that found nothing stays, and how often it looks: a job begins two seconds sooner on average."""

BATCH_TAG = "lockstep/export-batch"
TASKS_TAG = "lockstep/export-tasks"


@dg.sensor(
    name="export_chunks_sensor",
    job=export_chunks_job,
    minimum_interval_seconds=EVERY_LOOP_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Turns waiting export chunks into runs: fair between clients and jobs, never more Spark tasks than the "
        "source's connection budget. A message is deleted only when its chunk has ended."
    ),
)
def export_chunks_sensor(context: dg.SensorEvaluationContext, sqs: SqsResource) -> dg.SensorResult:
    """One pass."""
    settings = load_settings()
    with state_pool(settings, application_name="lockstep-export-sensor") as state:
        claims = ClaimStore(state, owner="sensor", limits=export_limits(settings))
        reaped = claims.reap()
        _follow_runs(context.instance, claims)
        free = settings.exports_connections - _tasks_in_flight(context.instance)
        batch = reserve_soon(claims, free * CHUNKS_PER_CONNECTION, clock=SystemClock()) if free > 0 else None
        _settle(context, sqs, claims, QUEUE_SECONDS_BEFORE_A_RUN if batch else QUEUE_SECONDS)
    if batch is None:
        return dg.SensorResult(skip_reason=f"nothing to start ({max(free, 0)} connections free, {reaped} reaped)")
    return dg.SensorResult(run_requests=[build_run_request(batch, free)])


def reserve_soon(claims: ClaimStore, limit: int, *, clock: Clock) -> Batch | None:
    """A batch, also of work that comes within the next moments: the daemon asks again only every five seconds."""
    deadline = clock.monotonic() + ATTENTION_SECONDS
    while (batch := claims.reserve(limit)) is None and clock.monotonic() < deadline:
        clock.sleep(LOOK_SECONDS)
    return batch


def build_run_request(batch: Batch, free: int) -> dg.RunRequest:
    """The run that works off a batch. The batch is new at every attempt, so its key never was used before."""
    tasks = max(1, min(free, tasks_for(os.cpu_count() or 1), math.ceil(batch.size / 2)))
    config = BatchConfig(batch_id=batch.batch_id, tasks=tasks)
    return dg.RunRequest(
        run_key=f"exports:{batch.batch_id}",
        run_config=dg.RunConfig(ops={CHUNKS_ASSET: config}),
        tags={BATCH_TAG: batch.batch_id, TASKS_TAG: str(tasks)},
    )


def _tasks_in_flight(instance: dg.DagsterInstance) -> int:
    """Connections that runs hold or will hold. A run that died is not in flight, so its share comes back."""
    runs = instance.get_runs(filters=dg.RunsFilter(job_name=export_chunks_job.name, statuses=IN_FLIGHT), limit=100)
    return sum(int(run.tags.get(TASKS_TAG, "1")) for run in runs)


def _follow_runs(instance: dg.DagsterInstance, claims: ClaimStore) -> None:
    """A run that waits in the queue keeps its chunks; what a run left behind that was killed is free again at once.

    A batch that has no run belongs to a worker outside Dagster, or its request was lost: it expires by itself.
    """
    held = claims.batches()
    if not held:
        return
    for run in instance.get_runs(filters=dg.RunsFilter(tags={BATCH_TAG: held})):
        act = claims.release if run.is_finished else claims.extend
        act(run.tags[BATCH_TAG])


def _settle(context: dg.SensorEvaluationContext, sqs: SqsResource, claims: ClaimStore, seconds: float) -> None:
    client = sqs.get_client()
    try:
        url = client.get_queue_url(QueueName=WORK_QUEUE)["QueueUrl"]
        report = ChunkQueue(client, url).settle(claims, seconds=seconds)
        context.log.info("messages: %s", report)
    except Exception as error:  # messages are hints: without them work still moves, a little less tidily
        context.log.warning("messages not settled: %s", error)


sensors = [export_chunks_sensor]
