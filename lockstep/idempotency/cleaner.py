"""Fast metadata cleaner: a dataset in interval-named units, each cleaned by a metadata operation, never row by row.

What belongs here: loading a partition, freezing old units and the public view on PostgreSQL. What does not: the
calendar (calendar.py), the same on Delta (cleaner_delta.py), and where the rows come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

from psycopg import errors, sql

from lockstep.idempotency.calendar import Grain, Interval, is_first_partition, unit_name
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.kernel.postgres import Connection, Pool, identifier, refuse_long_name, transaction

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 1))"
_UNITS = "SELECT name, starts, ends, frozen FROM idempotency.unit WHERE dataset = %s ORDER BY starts"
_ADD_UNIT = "INSERT INTO idempotency.unit (dataset, name, starts, ends, frozen) VALUES (%s, %s, %s, %s, %s)"
_REMOVE_UNIT = "DELETE FROM idempotency.unit WHERE dataset = %s AND name = %s"
_IS_LOADED = "SELECT 1 FROM idempotency.unit_partition WHERE dataset = %s AND day = %s"
_RUN = "SELECT row_count FROM idempotency.unit_run WHERE dataset = %s AND day = %s AND run = %s"
_RECORD_RUN = "INSERT INTO idempotency.unit_run (dataset, day, run, row_count) VALUES (%s, %s, %s, %s)"
_FORGET_RUNS = "DELETE FROM idempotency.unit_run WHERE dataset = %s AND day >= %s AND day < %s AND day <> %s"
_LOADED_DAYS = "SELECT day FROM idempotency.unit_partition WHERE dataset = %s AND name = %s ORDER BY day"
_RECORD = "INSERT INTO idempotency.unit_partition (dataset, name, day, run, row_count) VALUES (%s, %s, %s, %s, %s)"
_REPOINT = "UPDATE idempotency.unit_partition SET name = %s WHERE dataset = %s AND name = ANY(%s)"
_RENAME_UNIT = "UPDATE idempotency.unit SET name = %s WHERE dataset = %s AND name = %s"
_COLUMNS = """
SELECT attname, attgenerated <> '' FROM pg_attribute
WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"""


class Refused(InvalidInput):
    """The load would break the dataset; nothing was changed."""


@dataclass(frozen=True)
class Dataset:
    """A view and the tables behind it.

    Args:
        schema: Where view and tables live.
        name: The public view. Units are called `<name>_<first day>`.
        shape: An empty table with the columns, constraints and indexes that every unit gets.
        day: The column, of type date, that holds a row's partition.
        grain: How days are gathered into units.
        quota: The most units that may exist, frozen ones included.
    """

    schema: str
    name: str
    shape: str
    day: str
    grain: Grain
    quota: int = 1000

    def __post_init__(self) -> None:
        refuse_long_name(self.name, longest_suffix=len("_20241230__new"))


class Unit(NamedTuple):
    """One physical table. A frozen one takes no more rows."""

    name: str
    starts: date
    ends: date
    frozen: bool


class Loaded(NamedTuple):
    """What a load left. `to_replay`: days that were cleaned away with the unit and must be loaded again."""

    unit: str
    rows: int
    already: bool = False
    to_replay: tuple[date, ...] = ()


Fill = Callable[[Connection, sql.Identifier], int]
"""Adds the rows of one partition to the table and says how many."""


def create(source: Connection | Pool, dataset: Dataset) -> None:
    """Make the public view, without units as yet. Safe to repeat."""
    with transaction(source, what=f"creating {dataset.name}") as connection:
        _lock(connection, dataset)
        _refresh_view(connection, dataset)


def units(connection: Connection, dataset: Dataset) -> list[Unit]:
    """The units, oldest first."""
    return [Unit(*row) for row in connection.execute(_UNITS, (_key(dataset),)).fetchall()]


def load(source: Connection | Pool, dataset: Dataset, day: date, fill: Fill, *, run: str) -> Loaded:
    """Load one partition, in one transaction: readers see the dataset before it or after it.

    The first partition of a unit makes the unit anew: a table is filled aside and takes the old one's place, so what
    the unit held before goes with one DROP. A retry of the same run changes nothing, also when a newer run has replaced
    its day since; a day that went with its unit may be loaded again by any run.

    Raises:
        Refused: The day is loaded already by another run and is not the first of its unit (replay the unit from its
            start); the unit is frozen; the quota is used up; rows belong to another day.
    """
    with transaction(source, what=f"loading {dataset.name} {day}") as connection:
        _lock(connection, dataset)
        done = connection.execute(_RUN, (_key(dataset), day, run)).fetchone()
        if done is not None:
            return Loaded(unit_name(dataset.name, dataset.grain.interval(day)), done[0], already=True)
        unit = _unit_of(connection, dataset, day)
        step = _renew if is_first_partition(dataset.grain, day) else _extend
        loaded = step(connection, dataset, unit, day, fill)
        connection.execute(_RECORD, (_key(dataset), loaded.unit, day, run, loaded.rows))
        connection.execute(_RECORD_RUN, (_key(dataset), day, run, loaded.rows))
        crash_point("cleaner.load.before_commit")
    crash_point("cleaner.load.after_commit")
    return loaded


def freeze(source: Connection | Pool, dataset: Dataset, *, before: date, into: Grain) -> list[Unit]:
    """Merge neighbouring units that ended before a day into larger, immutable ones; return those that were made.

    Units are gathered by the interval of `into` that holds their first day. The merged unit covers exactly the days
    of its parts, is named by its first day and refuses loads from now on.
    """
    made = []
    with transaction(source, what=f"freezing {dataset.name}") as connection:
        _lock(connection, dataset)
        for group in frozen_groups(units(connection, dataset), before=before, into=into):
            made.append(_merge(connection, dataset, group))
        _refresh_view(connection, dataset)
        crash_point("cleaner.freeze.before_commit")
    crash_point("cleaner.freeze.after_commit")
    return made


def frozen_groups(candidates: Iterable[Unit], *, before: date, into: Grain) -> list[list[Unit]]:
    """Which units become one: over, not frozen yet, of one interval of `into`, and without a gap between them."""
    groups: list[list[Unit]] = []
    for unit in sorted(candidates, key=lambda one: one.starts):
        if unit.frozen or unit.ends > before:
            continue
        last = groups[-1][-1] if groups else None
        if last and last.ends == unit.starts and into.interval(last.starts) == into.interval(unit.starts):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


def _unit_of(connection: Connection, dataset: Dataset, day: date) -> Unit | None:
    interval = dataset.grain.interval(day)
    for unit in units(connection, dataset):
        if not (unit.starts < interval.ends and interval.starts < unit.ends):
            continue
        if unit.frozen:
            raise _refusal(dataset, f"{unit.name} is frozen up to {unit.ends}.", "correct it in a new dataset.")
        if (unit.starts, unit.ends) != interval:
            raise _refusal(dataset, f"{unit.name} overlaps the unit of {day}: the grain changed.", "keep the grain.")
        return unit
    return None


def _renew(connection: Connection, dataset: Dataset, old: Unit | None, day: date, fill: Fill) -> Loaded:
    interval = dataset.grain.interval(day)
    name = unit_name(dataset.name, interval)
    lost = _loaded_days(connection, dataset, name) if old else []
    if old is None:
        _check_quota(connection, dataset)
    aside = f"{name}__new"
    _create_table(connection, dataset, aside, interval)
    rows = _fill(connection, dataset, aside, day, fill)
    crash_point("cleaner.load.filled_aside")
    if old is not None:
        connection.execute(_REMOVE_UNIT, (_key(dataset), name))
        connection.execute(_FORGET_RUNS, (_key(dataset), *interval, day))
    connection.execute(_ADD_UNIT, (_key(dataset), aside, *interval, False))
    _refresh_view(connection, dataset)  # the view lets go of the old table before it is dropped
    if old is not None:
        _drop(connection, dataset, name)
    _rename(connection, dataset, aside, name)
    return Loaded(name, rows, to_replay=tuple(one for one in lost if one != day))


def _extend(connection: Connection, dataset: Dataset, unit: Unit | None, day: date, fill: Fill) -> Loaded:
    interval = dataset.grain.interval(day)
    if connection.execute(_IS_LOADED, (_key(dataset), day)).fetchone() is not None:
        raise _refusal(
            dataset,
            f"{day} is loaded already and is not the first day of its unit.",
            f"replay the unit from {interval.starts}: a metadata operation cleans it whole or not at all.",
        )
    name = unit_name(dataset.name, interval)
    if unit is None:  # the pipeline began in the middle of a unit
        _check_quota(connection, dataset)
        _create_table(connection, dataset, name, interval)
        connection.execute(_ADD_UNIT, (_key(dataset), name, *interval, False))
        _refresh_view(connection, dataset)
    return Loaded(name, _fill(connection, dataset, name, day, fill))


def _merge(connection: Connection, dataset: Dataset, group: Sequence[Unit]) -> Unit:
    interval = Interval(group[0].starts, group[-1].ends)
    name = unit_name(dataset.name, interval)
    aside = f"{name}__new"
    _create_table(connection, dataset, aside, interval)
    # Computed columns are computed again, and identities keep their values.
    columns = sql.SQL(", ").join(map(identifier, _columns(connection, dataset, computed=False)))
    for unit in group:
        copy = sql.SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}")
        connection.execute(copy.format(_table(dataset, aside), columns, columns, _table(dataset, unit.name)))
    connection.execute(_ADD_UNIT, (_key(dataset), aside, *interval, True))
    connection.execute(_REPOINT, (aside, _key(dataset), [unit.name for unit in group]))
    for unit in group:
        connection.execute(_REMOVE_UNIT, (_key(dataset), unit.name))
    _refresh_view(connection, dataset)
    for unit in group:
        _drop(connection, dataset, unit.name)
    _rename(connection, dataset, aside, name)
    return Unit(name, *interval, True)


def _create_table(connection: Connection, dataset: Dataset, name: str, interval: Interval) -> None:
    # The check keeps strangers out and lets the planner pass over units that a query on the day cannot need.
    statement = sql.SQL("CREATE TABLE {} (LIKE {} INCLUDING ALL, CHECK ({} >= {} AND {} < {}))")
    day = identifier(dataset.day)
    connection.execute(
        statement.format(
            _table(dataset, name),
            _table(dataset, dataset.shape),
            *(day, sql.Literal(interval.starts), day, sql.Literal(interval.ends)),
        )
    )


def _fill(connection: Connection, dataset: Dataset, name: str, day: date, fill: Fill) -> int:
    try:
        rows = fill(connection, _table(dataset, name))
    except errors.CheckViolation as error:
        raise _refusal(dataset, f"rows of another unit came with {day}.", "filter them by the day.") from error
    count = sql.SQL("SELECT count(*) FROM {} WHERE {} = %s").format(_table(dataset, name), identifier(dataset.day))
    found = connection.execute(count, (day,)).fetchone()
    if found is None or found[0] != rows:
        counted = found[0] if found else 0
        raise _refusal(dataset, f"{rows} rows came for {day}, {counted} of them are of it.", "filter them by the day.")
    return rows


def _refresh_view(connection: Connection, dataset: Dataset) -> None:
    # Replaced, never dropped, and from the catalogue, never from names that look alike: consumers' views stay.
    columns = sql.SQL(", ").join(map(identifier, _columns(connection, dataset)))
    tables = [dataset.shape, *(unit.name for unit in units(connection, dataset))]
    parts = [sql.SQL("SELECT {} FROM {}").format(columns, _table(dataset, name)) for name in tables]
    view = sql.SQL("CREATE OR REPLACE VIEW {} AS {}")
    connection.execute(view.format(_table(dataset, dataset.name), sql.SQL(" UNION ALL ").join(parts)))


def _drop(connection: Connection, dataset: Dataset, name: str) -> None:
    try:
        connection.execute(sql.SQL("DROP TABLE {}").format(_table(dataset, name)))
    except errors.DependentObjectsStillExist as error:
        raise Terminal(
            f"something was built on {name} itself: {error.diag.message_detail or 'unknown'}; nothing was changed.",
            unit=_key(dataset),
            next_step=f"let it read the view {dataset.name} instead.",
        ) from error


def _rename(connection: Connection, dataset: Dataset, old: str, new: str) -> None:
    connection.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(_table(dataset, old), identifier(new)))
    connection.execute(_RENAME_UNIT, (new, _key(dataset), old))


def _check_quota(connection: Connection, dataset: Dataset) -> None:
    count = len(units(connection, dataset))
    if count >= dataset.quota:
        raise _refusal(dataset, f"its quota of {dataset.quota} units is used up.", "freeze old units, or raise it.")


def _loaded_days(connection: Connection, dataset: Dataset, name: str) -> list[date]:
    return [day for (day,) in connection.execute(_LOADED_DAYS, (_key(dataset), name)).fetchall()]


def _columns(connection: Connection, dataset: Dataset, *, computed: bool = True) -> list[str]:
    shape = _table(dataset, dataset.shape).as_string(connection)
    found = connection.execute(_COLUMNS, (shape,)).fetchall()
    return [name for name, is_computed in found if computed or not is_computed]


def _lock(connection: Connection, dataset: Dataset) -> None:
    connection.execute(_LOCK, (_key(dataset),))


def _table(dataset: Dataset, name: str) -> sql.Identifier:
    return identifier(dataset.schema, name)


def _key(dataset: Dataset) -> str:
    return f"{dataset.schema}.{dataset.name}"


def _refusal(dataset: Dataset, what: str, next_step: str) -> Refused:
    return Refused(f"{what} Nothing was changed.", unit=_key(dataset), next_step=next_step)
