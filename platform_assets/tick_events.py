"""Reporting ticks to Dagster: their partitions, and one event for each tick as it commits.

What belongs here: partitions, metadata of a tick, events. What does not: applying ticks. An event is a report; the
ledger is the truth, so a report that was lost is made again from it.
"""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from lockstep.ticks.model import Tick
from lockstep.ticks.silver.model import BRONZE_ASSET, SILVER_ASSET, Applied

MOST_PARTITIONS = 15_000  # Dagster's pages stay quick below twenty thousand
_AT_ONCE = 500

tick_partitions = dg.DynamicPartitionsDefinition(name="tick")
"""One key per committed tick, the tick's id; old ones are removed by the housekeeping."""


def add_partitions(instance: dg.DagsterInstance, tick_ids: Iterable[str]) -> None:
    """Make the keys of these ticks known, in calls that stay small."""
    keys = sorted(set(tick_ids))
    for start in range(0, len(keys), _AT_ONCE):
        instance.add_dynamic_partitions(str(tick_partitions.name), keys[start : start + _AT_ONCE])


def prune_partitions(instance: dg.DagsterInstance, keep: set[str]) -> int:
    """Remove the keys of ticks that are too old to be looked at; their data and their ledger rows stay."""
    name = str(tick_partitions.name)
    present = instance.get_dynamic_partitions(name)
    stale = [one for one in present if one not in keep]
    stale += [one for one in present if one in keep][:-MOST_PARTITIONS]
    for one in stale:
        instance.delete_dynamic_partition(name, one)
    return len(stale)


def bronze_event(tick: Tick) -> dg.AssetMaterialization:
    """What bronze committed."""
    result = tick.result or {}
    return dg.AssetMaterialization(
        BRONZE_ASSET,
        partition=tick.tick_id,
        metadata={
            "dagster/row_count": sum(one.rows for one in tick.commits),
            "project": tick.project_id,
            "org": tick.org_id,
            "mode": tick.mode.value if tick.mode else "",
            "sequence": int(tick.sequence or 0),
            "committed_at": tick.committed_at.isoformat() if tick.committed_at else "",
            "rows_replaced": int(result.get("rows_replaced", 0)),
            "commits": dg.MetadataValue.json({one.table: one.key for one in tick.commits}),
        },
    )


def silver_event(applied: Applied) -> dg.AssetMaterialization:
    """What silver applied."""
    return dg.AssetMaterialization(SILVER_ASSET, partition=applied.tick_id, metadata=dict(silver_metadata(applied)))


def silver_metadata(applied: Applied) -> dict[str, dg.MetadataValue]:
    """What a person sees on a silver partition."""
    return {
        "dagster/row_count": dg.MetadataValue.int(applied.rows),
        "project": dg.MetadataValue.text(applied.project_id),
        "sequence": dg.MetadataValue.int(applied.sequence),
        "generation": dg.MetadataValue.int(applied.generation),
        "fence": dg.MetadataValue.int(applied.fence),
        "mode": dg.MetadataValue.text(applied.mode.value),
        "tables": dg.MetadataValue.json(dict(applied.tables)),
        "lag_seconds": dg.MetadataValue.float((applied.applied_at - applied.committed_at).total_seconds()),
        **({"skipped": dg.MetadataValue.text(applied.skipped)} if applied.skipped is not None else {}),
    }
