"""The assets of each vault: applied windows, warehouse tables, mart, and their checks. Doors into lockstep/windows.

What belongs here: what Dagster shows of a vault. What does not: rules, SQL, clients. Vaults come from the settings, so
that loading opens nothing. No `from __future__ import annotations`: Dagster reads the annotations as real types.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import dagster as dg

from lockstep.kernel.errors import LockstepError
from lockstep.kernel.settings import Settings
from lockstep.kernel.settings import settings as process_settings
from lockstep.warehouse.model import vault_schema
from lockstep.windows import mart
from lockstep.windows.model import QueueRow
from lockstep.windows.queue import WindowQueue
from lockstep.windows.sink import Sink
from lockstep.windows.store import Applied
from lockstep.windows.verify import count_problems, find_gaps
from lockstep.windows.worker import DrainReport
from platform_assets.window_events import (
    WindowReporter,
    missing_partitions,
    partition_of,
    picture,
    report,
    start_of,
    window_metadata,
    window_partitions,
)
from platform_assets.windows_source import build_vault_source_assets
from resources.aws import DynamoDBResource
from resources.databases import PostgresResource
from resources.spark import SparkResource
from resources.vaults import VaultSourceResource
from resources.windows import WindowsResource

ATTEMPT_TAG = "lockstep/attempt"
"""On runs that the sensor requested. A run without it was started by hand: its window is tried even if FAILED."""

WINDOW = timedelta(minutes=15)
LATE = timedelta(hours=1)
VERY_LATE = timedelta(days=1)
COUNTED_WINDOWS = 10
HISTORY = timedelta(days=2)
OWNERS = ["team:lockstep"]


class VaultNames(NamedTuple):
    """The names under which one vault appears."""

    vault: str

    @property
    def group(self) -> str:
        """Group, and first part of every key."""
        return f"vault_{self.vault.replace('-', '_')}"

    @property
    def lane(self) -> str:
        """Value of the lane tag."""
        return f"vault_{self.vault}"

    @property
    def pool(self) -> str:
        """The pool that lets one run at a time into the lane."""
        return f"lane_{self.group}"

    @property
    def job(self) -> str:
        """The job that drains the lane."""
        return f"windows_{self.group}_job"

    def key(self, name: str) -> dg.AssetKey:
        """The key of one of the vault's assets."""
        return dg.AssetKey([self.group, name])


def build_vault(vault: str, settings: Settings) -> tuple[list[Any], list[Any]]:
    """Assets and checks of one vault."""
    names = VaultNames(vault)
    applied = _applied_windows(names, settings)
    tables = _warehouse_tables(names, settings.vault_objects.split(","))
    shown = window_partitions(settings.windows_start)
    return [*build_vault_source_assets(vault), applied, tables, _activity(names, settings)], build_checks(names, shown)


def _applied_windows(names: VaultNames, settings: Settings) -> dg.AssetsDefinition:
    @dg.asset(
        key=names.key("applied_windows"),
        group_name=names.group,
        kinds={"spark", "postgres"},
        owners=OWNERS,
        deps=[names.key("raw_windows")],
        partitions_def=window_partitions(settings.windows_start),
        pool=names.pool,
        tags={"lockstep/lane": names.group},
        op_tags={"dagster/max_runtime": 3600},
        description=(
            "One partition per 15-minute window, green when the warehouse has committed it. A run drains all windows "
            "that are ready, each in its own transaction and in order. Materialize a red partition to try it again."
        ),
    )
    def applied_windows(
        context: dg.AssetExecutionContext,
        windows: WindowsResource,
        spark: SparkResource,
        vault_source: VaultSourceResource,
        postgres: PostgresResource,
    ) -> dg.MaterializeResult:
        own = start_of(context.partition_key)
        by_hand = ATTEMPT_TAG not in context.run.tags
        reporter = WindowReporter(context, context.partition_key)

        def refetch(row: QueueRow) -> bool:
            with vault_source.producer(names.vault, postgres) as producer:
                return producer.refetch(row)

        with windows.worker(lambda: spark.spark_session, refetch=refetch) as worker:
            _report_missed(context, worker.store, names)
            try:
                drained = worker.drain(
                    names.vault,
                    own=own + WINDOW,
                    by_hand=by_hand,
                    progress=reporter.add,
                    actor=f"run {context.run.run_id}",
                )
            except LockstepError as error:
                raise dg.Failure(str(error), allow_retries=False) from error
            finally:
                reporter.close()
            context.log.info("%s windows, %s rows: %s", drained.applied, drained.rows, drained.reason)
            return _own_result(worker.store, names, context.partition_key, drained)

    return applied_windows


def _report_missed(context: dg.AssetExecutionContext, store: Sink, names: VaultNames) -> None:
    """Tell Dagster what an earlier run committed and could not say any more."""
    lane = store.lane(names.vault)
    if lane is not None and lane.has_begun:
        recent = store.history(names.vault, epoch=lane.epoch, after=lane.watermark - HISTORY)
        missed = missing_partitions(context.instance, names.key("applied_windows"), recent)
        report(context, [one for one in missed if partition_of(one.start) != context.partition_key])


def _own_result(store: Sink, names: VaultNames, partition: str, drained: DrainReport) -> dg.MaterializeResult:
    """The run's own window as it stands in the ledger; red if it is not there."""
    lane = store.lane(names.vault)
    start = start_of(partition)
    found = [one for one in store.history(names.vault, after=start, until=start + WINDOW) if one.start == start]
    if not found or lane is None:
        raise dg.Failure(f"{names.vault} window {partition} is not applied: {drained.reason}", allow_retries=False)
    newest = store.history(names.vault, epoch=lane.epoch, after=lane.watermark - timedelta(hours=12))
    return dg.MaterializeResult(
        metadata=window_metadata(found[-1])
        | {"picture": picture(newest), "watermark": dg.MetadataValue.text(lane.watermark.isoformat())}
        | {"windows_of_run": dg.MetadataValue.int(drained.applied)}
        | {f"seconds_{name}": dg.MetadataValue.float(round(spent, 3)) for name, spent in drained.seconds.items()}
    )


def _warehouse_tables(names: VaultNames, objects: list[str]) -> dg.AssetsDefinition:
    schema = vault_schema(names.vault)

    def spec(name: str) -> dg.AssetSpec:
        return dg.AssetSpec(
            names.key(name),
            group_name=names.group,
            kinds={"postgres", "table"},
            owners=OWNERS,
            deps=[names.key("applied_windows")],
            skippable=True,
            metadata={"dagster/relation_identifier": f"warehouse.{schema}.{name}"},
            description=f"Object {name} of vault {names.vault} as of the watermark: one row per key, deletes applied.",
        )

    @dg.multi_asset(
        name=f"{names.group}_tables", specs=[spec(name) for name in objects], can_subset=True, pool=names.pool
    )
    def warehouse_tables(
        context: dg.AssetExecutionContext, windows: WindowsResource
    ) -> Iterator[dg.MaterializeResult | dg.AssetMaterialization]:
        with windows.store() as store:
            found = mart.facts(store, schema)
        for one in found:
            key, metadata = names.key(one.table.name), _table_metadata(schema, one)
            if key in context.selected_asset_keys:
                yield dg.MaterializeResult(asset_key=key, metadata=metadata)
            elif one.table.name not in objects:
                context.log_event(dg.AssetMaterialization(key, metadata=metadata))

    return warehouse_tables


def _table_metadata(schema: str, one: mart.TableFacts) -> dict[str, Any]:
    columns = [
        dg.TableColumn(column.name, column.type.value, constraints=_constraints(column.name in one.table.key))
        for column in one.table.columns
    ]
    return {
        "dagster/row_count": dg.MetadataValue.int(one.rows),
        "dagster/column_schema": dg.MetadataValue.table_schema(dg.TableSchema(columns)),
        "dagster/relation_identifier": f"warehouse.{schema}.{one.table.name}",
    }


def _constraints(is_key: bool) -> dg.TableColumnConstraints:
    return dg.TableColumnConstraints(nullable=not is_key, unique=is_key)


def _activity(names: VaultNames, settings: Settings) -> dg.AssetsDefinition:
    @dg.asset(
        key=names.key(mart.MART_TABLE),
        group_name=names.group,
        kinds={"postgres", "table"},
        owners=OWNERS,
        deps=[names.key(name) for name in settings.vault_objects.split(",")],
        metadata={"dagster/relation_identifier": f"warehouse.{mart.MART_SCHEMA}.{mart.MART_TABLE}"},
        description="What changed per day and object: windows, upserted and deleted rows, median lag. For analysts.",
    )
    def vault_activity(windows: WindowsResource) -> dg.MaterializeResult:
        with windows.store() as store:
            found = mart.rebuild(store, names.vault)
        newest = [line[:5] for line in reversed(found[-12:])]
        lines = "\n".join(f"| {' | '.join(str(value) for value in line)} |" for line in newest)
        return dg.MaterializeResult(
            metadata={
                "dagster/row_count": dg.MetadataValue.int(len(found)),
                "newest": dg.MetadataValue.md(
                    f"| day | object | windows | upserted | deleted |\n|---|---|---|---|---|\n{lines}"
                ),
            }
        )

    return vault_activity


def build_checks(names: VaultNames, shown: dg.TimeWindowPartitionsDefinition) -> list[Any]:
    """The checks of a vault's applied windows. `shown` are the windows that have a partition."""
    key = names.key("applied_windows")

    @dg.asset_check(asset=key, name="chain_check", description="Applied windows follow each other without a gap.")
    def chain_check(windows: WindowsResource) -> dg.AssetCheckResult:
        with windows.store() as store:
            lane, history = store.lane(names.vault), _epoch(store, names.vault)
        problems = find_gaps(history, lane.watermark if lane and lane.has_begun else None)
        return dg.AssetCheckResult(
            passed=not problems,
            description="; ".join(problems[:5]) or f"{len(history)} windows without a gap",
            metadata={"windows": len(history), "gaps": len(problems)},
        )

    @dg.asset_check(asset=key, name="ledger_check", description="Dagster's green partitions are the ledger's windows.")
    def ledger_check(context: dg.AssetCheckExecutionContext, windows: WindowsResource) -> dg.AssetCheckResult:
        with windows.store() as store:
            history = store.history(names.vault, kinds=("incremental",))
        known = set(context.instance.get_materialized_partitions(key))
        # A window outside the days that are shown has no partition to be green.
        ledger = {name for name in (partition_of(one.start) for one in history) if shown.has_partition_key(name)}
        return dg.AssetCheckResult(
            passed=known == ledger,
            description=f"{len(known)} reported, {len(ledger)} applied",
            metadata={"not_reported": len(ledger - known), "not_applied": len(known - ledger)},
        )

    @dg.asset_check(
        asset=key, name="counts_check", description="The newest windows hold what their manifests announce."
    )
    def counts_check(windows: WindowsResource) -> dg.AssetCheckResult:
        with windows.worker() as worker:
            problems = count_problems(worker, names.vault, COUNTED_WINDOWS)
        return dg.AssetCheckResult(passed=not problems, description="; ".join(problems[:5]) or "counts agree")

    @dg.asset_check(
        asset=key,
        name="lag_check",
        description="The warehouse is less than a day behind the newest window of the vault; 1 h is a warning.",
    )
    def lag_check(windows: WindowsResource, dynamodb: DynamoDBResource) -> dg.AssetCheckResult:
        with windows.store() as store:
            lane, history = store.lane(names.vault), _epoch(store, names.vault)
        if lane is None or not lane.has_begun:
            return dg.AssetCheckResult(passed=False, description="The vault has not begun.")
        newest = WindowQueue(dynamodb.get_client()).newest_known(names.vault) or lane.watermark
        lag = max(newest - lane.watermark, timedelta(0))
        severity = dg.AssetCheckSeverity.ERROR if lag > VERY_LATE else dg.AssetCheckSeverity.WARN
        return dg.AssetCheckResult(
            passed=lag <= LATE,
            severity=severity,
            description=f"{lag.total_seconds() / 60:.0f} minutes behind the newest window that the vault lists",
            metadata={
                "watermark": lane.watermark.isoformat(),
                "newest_listed": newest.isoformat(),
                "picture": picture(history),
            },
        )

    return [chain_check, ledger_check, counts_check, lag_check]


def _epoch(store: Sink, vault: str) -> list[Applied]:
    lane = store.lane(vault)
    return store.history(vault, epoch=lane.epoch) if lane else []


_built = [build_vault(vault, process_settings()) for vault in process_settings().vault_ids]
assets = [one for found, _ in _built for one in found]
checks = [one for _, found in _built for one in found]
