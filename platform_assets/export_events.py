"""Reporting chunks to Dagster: a green partition per file that is there, a red one per chunk that failed.

What belongs here: partitions and events. What does not: building files. An event is a report; the chunk table is the
truth, and `unreported` finds the files that Dagster was never told of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dagster as dg
from dagster._core.events import (
    AssetMaterializationPlannedData,
    DagsterEventType,
    StepMaterializationData,
)

from lockstep.exports.inspect import Outcome
from lockstep.exports.model import CHUNKS_ASSET, ChunkStatus
from platform_assets.step_events import step_entry

ADDED_AT_ONCE = 500

chunk_partitions = dg.DynamicPartitionsDefinition(name="export_chunk")


def report(
    context: dg.AssetExecutionContext, outcomes: Sequence[Outcome], *, run_failed: bool = False
) -> list[Outcome]:
    """Show how the chunks of a batch stand, and return those that failed.

    A partition is red when a run that failed had planned it and no materialization came after. A run of Dagster plans
    one partition or one range, ours works off any set of them: so it plans those that failed by itself, last, and the
    caller then fails the run. Of a run that broke, the chunks that were in work count as failed, until a later run
    builds them.
    """
    lost = (ChunkStatus.FAILED, ChunkStatus.RUNNING) if run_failed else (ChunkStatus.FAILED,)
    done = [one for one in outcomes if one.status == ChunkStatus.DONE]
    failed = [one for one in outcomes if one.status in lost]
    add_partitions(context.instance, (one.partition for one in (*done, *failed)))
    storage = context.instance.event_log_storage
    # Few calls for all: `context.log_event` costs two connections an event, a minute for a thousand files.
    if done:
        storage.store_event_batch([step_entry(context, **_materialized(one)) for one in done])
    if failed:
        red = sorted({one.partition for one in failed})
        storage.store_event_batch([step_entry(context, **_planned(context, name)) for name in red])
    return failed


def report_late(instance: dg.DagsterInstance, outcomes: Iterable[Outcome]) -> int:
    """Show files whose run died before it could report them; how many."""
    found = list(outcomes)
    add_partitions(instance, (one.partition for one in found))
    for one in found:
        instance.report_runless_asset_event(_materialization(one))
    return len(found)


def unreported(instance: dg.DagsterInstance, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Files that the table has and Dagster was never told of."""
    known = instance.get_materialized_partitions(dg.AssetKey(CHUNKS_ASSET))
    return [one for one in outcomes if one.partition not in known]


def add_partitions(instance: dg.DagsterInstance, names: Iterable[str]) -> None:
    """Make these partitions known; Dagster binds two parameters for each, so not too many at a time."""
    keys = sorted(set(names))
    for start in range(0, len(keys), ADDED_AT_ONCE):
        instance.add_dynamic_partitions(str(chunk_partitions.name), keys[start : start + ADDED_AT_ONCE])


def _materialization(one: Outcome) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        CHUNKS_ASSET,
        partition=one.partition,
        metadata={
            "dagster/row_count": one.rows,
            "bytes": one.bytes,
            "sha256": one.sha256,
            "object": one.object_key,
            "job": one.job_id,
            "reused": one.reused,
        },
    )


def _materialized(one: Outcome) -> dict[str, Any]:
    return {
        "event_type_value": DagsterEventType.ASSET_MATERIALIZATION.value,
        "event_specific_data": StepMaterializationData(_materialization(one)),
        "message": f"Built {one.partition}." if not one.reused else f"Reused {one.partition}.",
    }


def _planned(context: dg.AssetExecutionContext, partition: str) -> dict[str, Any]:
    return {
        "event_type_value": DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
        "event_specific_data": AssetMaterializationPlannedData(context.asset_key, partition=partition),
        "message": f"{partition} was to be built by this run.",
    }
