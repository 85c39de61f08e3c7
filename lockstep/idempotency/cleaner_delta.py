"""Fast metadata cleaner on Delta: units are partitions of one table, and its address is the public name.

What belongs here: loading, cleaning and merging units by commits that touch no row of another unit. What does not: the
calendar (calendar.py), PostgreSQL (cleaner.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from types import MappingProxyType
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
    if (done := seen.work.loads.get(_name(run, day))) is not None:
        return Loaded(starts, done.rows, already=True)
    _check_open(dataset, day, seen)
    _check_quota(dataset, day, seen)
    first = is_first_partition(dataset.grain, day)
    unit: dict[str, object] = {UNIT: interval.starts} if first else {UNIT: interval.starts, dataset.day: day}
    crash_point("cleaner.delta.before_write")
    marked = _only(frame, dataset, day).selectExpr(f"{delta.literal(interval.starts)} AS {UNIT}", "*")
    written = _overwrite(spark, dataset, marked, unit, run=_name(run, day))
    crash_point("cleaner.delta.after_commit")
    replay = tuple(sorted(one for unit, one in seen.days if first and unit == interval.starts and one != day))
    return Loaded(starts, written.rows, to_replay=replay)


def clean_delta(spark: SparkSession, dataset: DeltaDataset, day: date, *, run: str) -> int:
    """Empty the unit that holds `day` by removing its files from the table; return the rows that went.

    A retry of the same run that finds its commit changes nothing: the unit may have been loaded again since.
    """
    seen = _look(spark, dataset)
    _check_open(dataset, day, seen)
    starts = dataset.grain.interval(day).starts
    if (run, starts) in seen.work.cleans:
        return 0
    crash_point("cleaner.delta.before_clean")
    stamp = delta.stamp("cleaner", run=run, clean=starts.isoformat())
    with delta.commit_as(spark, stamp), delta.settings(spark, delta.RECORD_EMPTY), delta.contested(dataset.path):
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
        raise Refused(
            f"{day} is no partition column. Nothing was changed.",
            unit=path,
            next_step="partition the table by it, or delete the rows by hand.",
        )
    with delta.commit_as(spark, delta.stamp("cleaner", run=run, before=str(before))), delta.contested(path):
        condition = f"{delta.column(day)} < {delta.literal(before)}"
        spark.sql(f"DELETE FROM {delta.quoted(path)} WHERE {condition}").collect()  # noqa: S608
    newest = delta.history(spark, path, limit=1)[0]
    ours = newest.stamp is not None and newest.stamp.get("run") == run
    return int(newest.metrics.get("numRemovedFiles", 0)) if ours else 0


def freeze_delta(spark: SparkSession, dataset: DeltaDataset, *, before: date, into: Grain, run: str) -> list[Unit]:
    """Merge neighbouring units that ended before a day, and refuse loads before that day from now on."""
    # First the mark: a load between the two steps would be merged away unseen otherwise. A unit under way stays open.
    mark = dataset.grain.interval(before).starts
    frozen = _frozen(spark, dataset)
    # It never goes back: a week of a merged month would be loaded beside the month that holds it already.
    if frozen is None or frozen < mark:
        properties = f"SET TBLPROPERTIES ('{_FROZEN}' = '{mark.isoformat()}')"
        with delta.contested(dataset.path):
            spark.sql(f"ALTER TABLE {delta.quoted(dataset.path)} {properties}").collect()
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
    # Recorded even if nothing replaces nothing: the late retry of an empty first day must find its commit.
    with delta.settings(spark, delta.RECORD_EMPTY):
        return overwrite_delta(spark, dataset.path, frame, unit, run=run, partition_by=[UNIT, dataset.day])


def _only(frame: DataFrame, dataset: DeltaDataset, day: date) -> DataFrame:
    # The unit's predicate alone would let another day of the same unit in; the writer's check cannot see it.
    if dataset.day not in frame.columns or UNIT in frame.columns:
        raise InvalidInput(
            f"the rows need a column {dataset.day} and must not have {UNIT}.",
            unit=dataset.path,
            next_step="rename the columns; the unit's is made here.",
        )
    column, wanted = delta.column(dataset.day), delta.literal(day)
    words = delta.literal(f"a row of another day came with {day}")
    return frame.where(f"CASE WHEN {column} <=> {wanted} THEN TRUE ELSE raise_error({words}) END")


class Load(NamedTuple):
    """A load in the log: which partitions it replaced, by its predicate, and with how many rows."""

    predicate: str
    rows: int


class Work(NamedTuple):
    """What was done to the table and still holds: loads by run and day, cleans as (run, unit)."""

    loads: Mapping[str, Load] = MappingProxyType({})
    cleans: frozenset[tuple[str, date]] = frozenset()


class _Seen(NamedTuple):
    """The table before a load: its work, up to where it is frozen, which partitions have rows."""

    work: Work = Work()
    frozen: date | None = None
    days: tuple[tuple[date, date], ...] = ()


def _look(spark: SparkSession, dataset: DeltaDataset) -> _Seen:
    try:
        commits = delta.history(spark, dataset.path)
    except delta.NotATable:
        return _Seen()
    days = delta.read(spark, dataset.path).select(UNIT, dataset.day).distinct().collect()
    return _Seen(work_in(commits), _frozen(spark, dataset), tuple((row[0], row[1]) for row in days))


def work_in(commits: Sequence[delta.Commit]) -> Work:
    """The work that no later clean, renewal of the unit or RESTORE has undone.

    Its retry changes nothing, also where a newer run has replaced the day. What was undone may be done again under the
    same name, or its rows would stay missing in silence.

    Args:
        commits: The table's history, newest first.
    """
    work = Work()
    known: dict[int, Work] = {}
    for commit in reversed(commits):
        stamp = commit.stamp or {}
        if commit.operation == "RESTORE":
            to = commit.parameters.get("version", "")
            work = known.get(int(to), Work()) if to.isdigit() else Work()
        elif "clean" in stamp:
            unit = date.fromisoformat(stamp["clean"])
            work = Work(_without(work.loads, delta.equality({UNIT: unit})), work.cleans | {(str(stamp["run"]), unit)})
        elif stamp.get(delta.STAMP_KEY) == "overwrite":
            one = Load(str(stamp["unit"]), int(commit.metrics.get("numOutputRows", 0)))
            work = Work({**_without(work.loads, f"{one.predicate} AND"), str(stamp["run"]): one}, work.cleans)
        known[commit.version] = work
    return work


def _without(loads: Mapping[str, Load], prefix: str) -> dict[str, Load]:
    """All but those of one unit: the unit's predicate begins that of each of its days."""
    return {name: load for name, load in loads.items() if not load.predicate.startswith(prefix)}


def _frozen(spark: SparkSession, dataset: DeltaDataset) -> date | None:
    detail = spark.sql(f"DESCRIBE DETAIL {delta.quoted(dataset.path)}").collect()[0]
    mark = detail["properties"].get(_FROZEN)
    return date.fromisoformat(mark) if mark else None


def _check_open(dataset: DeltaDataset, day: date, seen: _Seen) -> None:
    if seen.frozen and day < seen.frozen:
        raise Refused(
            f"units before {seen.frozen} are frozen. Nothing was changed.",
            unit=dataset.path,
            next_step="correct it in a new dataset.",
        )


def _check_quota(dataset: DeltaDataset, day: date, seen: _Seen) -> None:
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
