"""The tick sensor: receives messages, lets the ledger decide, asks for one run per project, and sweeps.

What belongs here: turning groups into run requests and reporting what bronze committed. What does not: which ticks make
a group (lockstep/ticks/silver/intake.py). A message is deleted by the worker, when its tick is done.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import dagster as dg

from jobs.lanes import LANE_TAG
from jobs.ticks import silver_ticks_job
from lockstep.kernel import trace
from lockstep.kernel.errors import LockstepError
from lockstep.kernel.settings import load_settings
from lockstep.ticks.silver.intake import Group, sweep
from lockstep.ticks.silver.model import SILVER_ASSET, Lane
from platform_assets.tick_events import add_partitions, bronze_event
from platform_assets.ticks import GroupConfig
from resources.silver import Silver, open_silver
from sensors import EVERY_LOOP_SECONDS, IN_FLIGHT

RECEIVE_SECONDS = 25.0  # a tick is cut at 60 s, and what it had decided by then would be lost
SWEEP_SECONDS = 60.0
MOST_LATER = 500


class Cursor(NamedTuple):
    """What a pass leaves to the next one. All of it only saves time: one that cannot be read is an empty one."""

    swept_at: float = 0.0
    later: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str | None) -> Cursor:
        """The cursor of the last pass."""
        try:
            found = json.loads(text or "{}")
            return cls(float(found["swept_at"]), tuple(map(str, found["later"])))
        except (ValueError, KeyError, TypeError):
            return cls()

    def render(self) -> str:
        """As Dagster keeps it."""
        return json.dumps(self._asdict())


@dg.sensor(
    name="ticks_sensor",
    job=silver_ticks_job,
    minimum_interval_seconds=EVERY_LOOP_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description=(
        "Turns committed ticks into silver runs, one per project at a time and in its order. A message goes away only "
        "when its tick is in silver; a sweep makes lost ones anew."
    ),
)
def ticks_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
    """One bounded pass over the queue, and every minute a sweep."""
    with open_silver(load_settings(), application_name="lockstep-ticks-sensor") as silver:
        before = Cursor.read(context.cursor)
        swept_at = _sweep_if_due(context, silver, before.swept_at)
        found = silver.intake.look(lambda lane: is_busy(context.instance, lane), before.later, seconds=RECEIVE_SECONDS)
    for words in found.waiting[:20]:
        context.log.info("%s", words)
    ticks = [tick for group in found.groups for tick in group.ticks]
    add_partitions(context.instance, (tick.tick_id for tick in ticks))
    skip = f"{found.received} messages, {found.deleted} deleted, {len(found.waiting)} wait"
    return dg.SensorResult(
        run_requests=[build_run_request(group) for group in found.groups],
        asset_events=[bronze_event(tick) for group in found.groups if group.attempt == 1 for tick in group.ticks],
        cursor=Cursor(swept_at, tuple(found.later[:MOST_LATER])).render(),
        skip_reason=None if found.groups else skip,
    )


def build_run_request(group: Group) -> dg.RunRequest:
    """The run of a group, as a run of its first tick's partition; the others turn green by events of the same run.

    A tick that failed before stands alone: it is what turns red. A run without a partition is no choice: Dagster
    refuses one whose upstream has the same partitions.
    """
    first = group.ticks[0]
    return dg.RunRequest(
        run_key=f"silver:{first.tick_id}:{group.lane.generation}:{group.attempt}:{len(group.ticks)}",
        partition_key=first.tick_id,
        run_config=dg.RunConfig(
            ops={SILVER_ASSET: GroupConfig(project_id=group.lane.project_id, ticks=list(group.tick_ids))}
        ),
        tags={
            LANE_TAG: lane_tag(group.lane),
            "lockstep/org": group.lane.org_id,
            "lockstep/project": group.lane.project_id,
            "lockstep/attempt": str(group.attempt),
            trace.RUN_TAG: group.trace_id or trace.new_trace(),
        },
    )


def lane_tag(lane: Lane) -> str:
    """The run queue lets one run of each value start at a time."""
    return f"silver_{lane.project_id}"


def is_busy(instance: dg.DagsterInstance, lane: Lane) -> bool:
    """Whether a run of the lane waits or works. A run that died is neither, so its lane is free at once."""
    filters = dg.RunsFilter(tags={LANE_TAG: lane_tag(lane)}, statuses=IN_FLIGHT)
    return bool(instance.get_runs(filters=filters, limit=1))


def _sweep_if_due(context: dg.SensorEvaluationContext, silver: Silver, swept_at: float) -> float:
    """Sweep every minute. Returns when it was done last."""
    now = silver.clock.now().timestamp()
    if now - swept_at < SWEEP_SECONDS:
        return swept_at
    try:
        swept = sweep(silver.store, silver.dispatches, silver.queue, clock=silver.clock)
    except LockstepError as error:  # messages may still come: they must not wait for a sweep that cannot be done
        context.log.error("not swept: %s", error)
        return swept_at
    if swept.enqueued:
        context.log.warning("ticks without a live dispatch were enqueued again: %s", ", ".join(swept.enqueued[:20]))
    return now


sensors = [ticks_sensor]
