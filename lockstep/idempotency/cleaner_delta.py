"""Fast metadata cleaner on Delta: units are partitions of one table, and its address is the public name.

What belongs here: loading, cleaning and merging units by commits that touch no row of another unit. What does not: the
calendar (calendar.py), PostgreSQL (cleaner.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, NamedTuple

from lockstep.idempotency import delta
from lockstep.idempotency.calendar import Grain, is_first_partition
from lockstep.idempotency.cleaner import Loaded, Refused, Unit, frozen_groups
from lockstep.idempotency.overwrite import Overwritten, overwrite_delta
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UNIT = "unit_start"
_FROZEN = "lockstep.frozen_before"


@dataclass(frozen=True)
class DeltaDataset:
    """A table partitioned by the first day of the unit and by the day.

    Args:
        path: The table.
        day: The column, of type date, that holds a row's partition.
        grain: How days are gathered into units.
        quota: The most units that may exist.
    """

    path: str
    day: str
    grain: Grain
    quota: int = 1000


def load_delta(spark: SparkSession, dataset: DeltaDataset, day: date, frame: DataFrame, *, run: str) -> Loaded:
    """Load one partition in one commit. The first partition of a unit replaces the whole unit; any other only itself.

    Both replace whole partitions, so Delta removes files and rewrites none. A retry of the same run that finds its
    commit changes nothing: a late retry of the first day must not clean away the days that came after it.
    """
    interval = dataset.grain.interval(day)
    starts = f"{interval.starts:%Y%m%d}"
    seen = _look(spark, dataset)
    if _name(run, day) in seen.runs:
        return Loaded(starts, 0, already=True)
    _check_open(dataset, day, seen)
    first = is_first_partition(dataset.grain, day)
    unit: dict[str, object] = {UNIT: interval.starts} if first else {UNIT: interval.starts, dataset.day: day}
    crash_point("cleaner.delta.before_write")
    marked = _only(frame, dataset, day).selectExpr(f"{delta.literal(interval.starts)} AS {UNIT}", "*")
    written = _overwrite(spark, dataset, marked, unit, run=_name(run, day))
    crash_point("cleaner.delta.after_commit")
    replay = tuple(sorted(one for unit, one in seen.days if first and unit == interval.starts and one != day))
    return Loaded(starts, written.rows, to_replay=replay)


def clean_delta(spark: SparkSession, dataset: DeltaDataset, day: date, *, run: str) -> int:
    """Empty the unit that holds `day` by removing its files from the table; return the rows that went."""
    _check_open(dataset, day, _look(spark, dataset))
    starts = dataset.grain.interval(day).starts
    crash_point("cleaner.delta.before_clean")
    stamp = delta.stamp("cleaner", run=run, clean=starts.isoformat())
    with delta.commit_as(spark, stamp), delta.contested(dataset.path):
        statement = f"DELETE FROM {delta.quoted(dataset.path)} WHERE {delta.equality({UNIT: starts})}"  # noqa: S608
        return int(spark.sql(statement).collect()[0]["num_affected_rows"])


def forget_delta(spark: SparkSession, path: str, day: str, *, before: object, run: str) -> int:
    """Remove every partition whose `day` is before that value from a table; return how many files went.

    For tables that are partitioned by day without units of this module. Only the log is written: no file is read or
    rewritten, whatever its size. The bytes go with the table's next VACUUM.

    Raises:
        Refused: `day` is no partition column, so rows would have to be rewritten. Nothing was changed.
    """
    detail = spark.sql(f"DESCRIBE DETAIL {delta.quoted(path)}").collect()[0]
    if day not in detail["partitionColumns"]:
        raise Refused(f"{day} is no partition column. Nothing was changed.", unit=path)
    with delta.commit_as(spark, delta.stamp("cleaner", run=run, before=str(before))), delta.contested(path):
        condition = f"{delta.column(day)} < {delta.literal(before)}"
        spark.sql(f"DELETE FROM {delta.quoted(path)} WHERE {condition}").collect()  # noqa: S608
    newest = delta.history(spark, path, limit=1)[0]
    ours = newest.stamp is not None and newest.stamp.get("run") == run
    return int(newest.metrics.get("numRemovedFiles", 0)) if ours else 0


def freeze_delta(spark: SparkSession, dataset: DeltaDataset, *, before: date, into: Grain, run: str) -> list[Unit]:
    """Merge neighbouring units that ended before a day, and refuse loads before that day from now on."""
    table = delta.quoted(dataset.path)
    # First the mark: a load between the two steps would be merged away unseen otherwise. A unit under way stays open.
    mark = dataset.grain.interval(before).starts
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('{_FROZEN}' = '{mark.isoformat()}')")
    crash_point("cleaner.delta.marked_frozen")
    made = []
    for group in frozen_groups(_units(dataset, _look(spark, dataset)), before=before, into=into):
        if len(group) > 1:
            _merge(spark, dataset, group, run)
        made.append(Unit(f"{group[0].starts:%Y%m%d}", group[0].starts, group[-1].ends, True))
    return made


def _merge(spark: SparkSession, dataset: DeltaDataset, group: Sequence[Unit], run: str) -> None:
    starts = ", ".join(delta.literal(unit.starts) for unit in group)
    predicate = f"{UNIT} IN ({starts})"
    rows = delta.read(spark, dataset.path).where(predicate).drop(UNIT)
    merged = rows.selectExpr(f"{delta.literal(group[0].starts)} AS {UNIT}", "*")
    overwrite_delta(spark, dataset.path, merged, predicate, run=f"{run}:freeze:{group[0].starts}")


def _overwrite(
    spark: SparkSession, dataset: DeltaDataset, frame: DataFrame, unit: dict[str, object], *, run: str
) -> Overwritten:
    return overwrite_delta(spark, dataset.path, frame, unit, run=run, partition_by=[UNIT, dataset.day])


def _only(frame: DataFrame, dataset: DeltaDataset, day: date) -> DataFrame:
    # The unit's predicate alone would let another day of the same unit in; the writer's check cannot see it.
    if dataset.day not in frame.columns or UNIT in frame.columns:
        raise InvalidInput(f"the rows need a column {dataset.day} and must not have {UNIT}.", unit=dataset.path)
    column, wanted = delta.column(dataset.day), delta.literal(day)
    words = delta.literal(f"a row of another day came with {day}")
    return frame.where(f"CASE WHEN {column} <=> {wanted} THEN TRUE ELSE raise_error({words}) END")


class _Seen(NamedTuple):
    """The table before a load: which runs committed, up to where it is frozen, which partitions have rows."""

    runs: frozenset[str]
    frozen: str | None
    days: tuple[tuple[date, date], ...]


def _look(spark: SparkSession, dataset: DeltaDataset) -> _Seen:
    try:
        commits = delta.history(spark, dataset.path)
    except delta.NotATable:
        return _Seen(frozenset(), None, ())
    detail = spark.sql(f"DESCRIBE DETAIL {delta.quoted(dataset.path)}").collect()[0]
    days = delta.read(spark, dataset.path).select(UNIT, dataset.day).distinct().collect()
    return _Seen(
        runs=frozenset(str(commit.stamp.get("run")) for commit in commits if commit.stamp),
        frozen=detail["properties"].get(_FROZEN),
        days=tuple((row[0], row[1]) for row in days),
    )


def _check_open(dataset: DeltaDataset, day: date, seen: _Seen) -> None:
    if seen.frozen and day < date.fromisoformat(seen.frozen):
        raise Refused(f"units before {seen.frozen} are frozen. Nothing was changed.", unit=dataset.path)
    starts = {unit for unit, _ in seen.days}
    if dataset.grain.interval(day).starts not in starts and len(starts) >= dataset.quota:
        raise Refused(
            f"its quota of {dataset.quota} units is used up. Nothing was changed.",
            unit=dataset.path,
            next_step="freeze old units, or raise it.",
        )


def _units(dataset: DeltaDataset, seen: _Seen) -> list[Unit]:
    # A merged unit ends where the interval of its last day ends.
    ends: dict[date, date] = {}
    for unit, day in seen.days:
        ends[unit] = max(ends.get(unit, unit), dataset.grain.interval(day).ends, dataset.grain.interval(unit).ends)
    return [Unit(f"{unit:%Y%m%d}", unit, end, False) for unit, end in ends.items()]


def _name(run: str, day: date) -> str:
    return f"{run}:{day.isoformat()}"
