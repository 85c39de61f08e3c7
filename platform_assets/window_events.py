"""Reporting windows to Dagster: one event per partition, many in a call, as they commit.

What belongs here: partitions, metadata of a window, storing events in batches. What does not: applying windows. An
event is a report; the ledger in the warehouse is the truth, and `missing_partitions` finds what was never reported.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta

import dagster as dg
from dagster._core.events import DagsterEventType, StepMaterializationData
from dagster._core.events.log import EventLogEntry

from lockstep.windows.mart import changed
from lockstep.windows.store import Applied
from platform_assets.step_events import step_entry

PARTITION_FORMAT = "%Y-%m-%d %H:%M"
PARTITION_DAYS = 200  # 19,200 partitions: above some 20,000 the UI becomes slow
FLUSH_SECONDS = 1.0
FLUSH_EVENTS = 100
_BARS = "▁▂▃▄▅▆▇█"


def window_partitions(start: date) -> dg.TimeWindowPartitionsDefinition:
    """Windows of 15 minutes, named by the time at which they start, in UTC."""
    first = datetime(start.year, start.month, start.day, tzinfo=UTC)
    return dg.TimeWindowPartitionsDefinition(
        start=first,
        end=first + timedelta(days=PARTITION_DAYS),
        cron_schedule="*/15 * * * *",
        fmt=PARTITION_FORMAT,
        timezone="UTC",
    )


def partition_of(start: datetime) -> str:
    """The partition of the window that starts then."""
    return start.astimezone(UTC).strftime(PARTITION_FORMAT)


def start_of(partition: str) -> datetime:
    """When the partition's window starts."""
    return datetime.strptime(partition, PARTITION_FORMAT).replace(tzinfo=UTC)


def window_metadata(window: Applied) -> dict[str, dg.MetadataValue]:
    """What a person sees on a partition."""
    lines = "\n".join(f"| {name} | {' | '.join(map(str, changed(window, name)))} |" for name in sorted(window.counts))
    lag = (window.applied_at - window.stop).total_seconds() / 60
    return {
        "rows": dg.MetadataValue.int(window.rows),
        "stop": dg.MetadataValue.text(window.stop.isoformat()),
        "epoch": dg.MetadataValue.int(window.epoch),
        "fence": dg.MetadataValue.int(window.fence),
        "load_id": dg.MetadataValue.text(window.load_id),
        "lag_minutes": dg.MetadataValue.float(round(lag, 1)),
        "tables": dg.MetadataValue.md(f"| table | upserted | deleted |\n|---|---|---|\n{lines}"),
    }


def picture(windows: Sequence[Applied], width: int = 48) -> dg.MetadataValue:
    """Rows and lag of the newest windows as two lines of bars, with their ranges."""
    newest = list(windows)[-width:]
    if not newest:
        return dg.MetadataValue.md("no window yet")
    rows = [float(one.rows) for one in newest]
    lags = [(one.applied_at - one.stop).total_seconds() / 60 for one in newest]
    span = f"{newest[0].stop:%Y-%m-%d %H:%M} to {newest[-1].stop:%Y-%m-%d %H:%M} UTC, {len(newest)} windows"
    return dg.MetadataValue.md(
        f"{span}\n\n| | | least | most |\n|---|---|---|---|\n"
        f"| rows | `{_bars(rows)}` | {min(rows):.0f} | {max(rows):.0f} |\n"
        f"| lag, minutes | `{_bars(lags)}` | {min(lags):.1f} | {max(lags):.1f} |"
    )


class WindowReporter:
    """Collects committed windows and stores their events, except the run's own partition, which the run returns.

    Events are stored by a thread of its own: Dagster's database must not make the next commit wait. One call is under
    way at a time; what is committed meanwhile goes with the next one. A call that failed fails the run.
    """

    def __init__(self, context: dg.AssetExecutionContext, own: str) -> None:
        self._context = context
        self._own = own
        self._waiting: list[Applied] = []
        self._flushed_at = time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._under_way: Future[None] | None = None

    def add(self, window: Applied) -> None:
        """Remember a commit; store the waiting events when there are many or a second has passed."""
        self._waiting.append(window)
        due = len(self._waiting) >= FLUSH_EVENTS or time.monotonic() - self._flushed_at > FLUSH_SECONDS
        if due and (self._under_way is None or self._under_way.done()):
            self._store()

    def close(self) -> None:
        """Store what is waiting, and return when all is stored."""
        with self._pool:
            self._store()
        self._settle()

    def _store(self) -> None:
        self._settle()
        windows = [one for one in self._waiting if partition_of(one.start) != self._own]
        self._waiting, self._flushed_at = [], time.monotonic()
        self._under_way = self._pool.submit(report, self._context, windows)

    def _settle(self) -> None:
        if self._under_way is not None:
            self._under_way.result()


def report(context: dg.AssetExecutionContext, windows: Sequence[Applied]) -> None:
    """Store one materialization per window in a single call.

    `context.log_event` costs two connections an event: 20 s for 960 windows, against half a second here. The step's
    context is Dagster's own, so a test holds this against the version in use.
    """
    if windows:
        entries = [_entry(context, window) for window in windows]
        context.instance.event_log_storage.store_event_batch(entries)


def missing_partitions(instance: dg.DagsterInstance, key: dg.AssetKey, windows: Iterable[Applied]) -> list[Applied]:
    """Windows that the ledger has and Dagster was never told of: a run died between commit and report."""
    known = instance.get_materialized_partitions(key)
    return [one for one in windows if one.kind == "incremental" and partition_of(one.start) not in known]


def _entry(context: dg.AssetExecutionContext, window: Applied) -> EventLogEntry:
    materialization = dg.AssetMaterialization(
        asset_key=context.asset_key, partition=partition_of(window.start), metadata=window_metadata(window)
    )
    return step_entry(
        context,
        event_type_value=DagsterEventType.ASSET_MATERIALIZATION.value,
        event_specific_data=StepMaterializationData(materialization),
        message=f"Applied window {window.stop:%Y%m%d%H%M}.",
    )


def _bars(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
