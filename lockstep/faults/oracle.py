"""Oracles: what must be there, computed apart from the code that is being watched, for the demo and the lab.

What belongs here: expected values from first principles (the simulator's own data, the source's formula, the rows that
agents sent), and comparing them with what was read. What does not: waiting, and any code of the pipelines.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from lockstep.vaultsim.rows import Key, World

_EPOCH = date(2000, 1, 1)
_NOTES = ("", '""', "plain", '"with, comma"', '"says ""yes"""')
HEADER = "line_no,account,product,quantity,price,traded_at,note\n"


class Difference(NamedTuple):
    """How two sets of rows differ."""

    rows: int
    missing: int
    extra: int
    other: int
    example: str = ""

    def __str__(self) -> str:
        """In words."""
        if not (self.missing or self.extra or self.other):
            return f"{self.rows} rows, all equal"
        words = f"{self.rows} rows: {self.missing} missing, {self.extra} too many, {self.other} different"
        return f"{words}; for example {self.example}" if self.example else words


# --- windows ---------------------------------------------------------------------------------------------------------


Tables = dict[str, tuple[tuple[str, ...], dict[Key, dict[str, str | None]]]]
"""Of every object the columns of its key, and its rows by key."""


def expected_tables(world: World, index: int, *, full: bool = True) -> Tables:
    """What the warehouse must hold after window `index`, on top of the full archive or, without it, of nothing."""
    state = world.state_after(index, full=full)
    found = {}
    for thing in world.things(index):
        names = [column.name for column in thing.columns]
        rows = {key: dict(zip(names, row, strict=True)) for key, row in state[thing.name].items()}
        found[thing.name] = (thing.key, rows)
    return found


def compare_table(
    key: Sequence[str], expected: Mapping[Key, Mapping[str, str | None]], found: Iterable[Mapping[str, Any]]
) -> Difference:
    """Hold the rows of a warehouse table against the simulator's. A key that is there twice is one too many."""
    seen: set[Key] = set()
    count = extra = other = 0
    example = ""
    for row in found:
        count += 1
        place = tuple(row[name] for name in key)
        wanted = expected.get(place)
        if wanted is None or place in seen:
            extra, example = extra + 1, f"{place} is too many"
        elif wrong := [name for name, text in wanted.items() if not same(text, row.get(name))]:
            other, example = other + 1, f"{place}: {', '.join(wrong)}"
        seen.add(place)
    missing = expected.keys() - seen
    if missing and not example:
        example = f"{min(missing, key=str)} is missing"
    return Difference(count, len(missing), extra, other, example)


def compare_warehouse(connection: psycopg.Connection[Any], schema: str, expected: Tables) -> dict[str, Difference]:
    """Hold every table of a vault against the simulator's rows, by a SELECT of its own."""
    found = {}
    with connection.cursor(row_factory=dict_row) as cursor:
        for name, (key, rows) in expected.items():
            cursor.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(schema, name)))
            found[name] = compare_table(key, rows, cursor)
    return found


def same(text: str | None, value: Any) -> bool:  # one line for each type
    """Whether a value of the warehouse is what the vendor's text says."""
    if text is None or value is None:
        return text is None and value is None
    if isinstance(value, bool):
        return value is (text == "true")
    if isinstance(value, Decimal | int):
        return Decimal(text) == value
    if isinstance(value, datetime):
        return datetime.fromisoformat(text) == value
    if isinstance(value, date):
        return date.fromisoformat(text) == value
    return bool(text == value)


def chain_problems(applied: Sequence[tuple[datetime, datetime, datetime]], first: datetime, count: int) -> list[str]:
    """What is wrong with a stretch of the ledger, given as (start, stop, applied at) in the order of application."""
    problems = []
    if len(applied) != count:
        problems.append(f"{len(applied)} windows instead of {count}")
    if applied and applied[0][0] != first:
        problems.append(f"it begins at {applied[0][0]:%H:%M}, not at {first:%H:%M}")
    for before, after in itertools.pairwise(applied):
        if after[0] != before[1]:
            problems.append(f"{after[0]:%m-%d %H:%M} was applied after {before[1]:%m-%d %H:%M}")
    return problems


def in_a_row(values: Iterable[str]) -> str:
    """Equal neighbours counted: "4 MATERIALIZED, 1 FAILED, 3 MISSING"."""
    return ", ".join(f"{len(list(group))} {value}" for value, group in itertools.groupby(values))


def expected_activity(
    world: World, first: int, last: int, stop_of: Any
) -> dict[tuple[date, str], tuple[int, int, int]]:
    """The mart from the simulator alone: windows, upserted and deleted rows by day and object."""
    found: dict[tuple[date, str], tuple[int, int, int]] = {}
    for index in range(first, last + 1):
        day = stop_of(index).date()
        for thing in world.things(index):
            change = world.window(thing, index)
            if change.upserts or change.deletes:
                windows, upserted, deleted = found.get((day, thing.name), (0, 0, 0))
                counts = (windows + 1, upserted + len(change.upserts), deleted + len(change.deletes))
                found[day, thing.name] = counts
    return found


# --- exports ---------------------------------------------------------------------------------------------------------


def source_lines(key: str, day: date, rows_a_day: int | None = None) -> Iterator[str]:
    """The lines of one export file, from the formula of the demo's source and the documented dialect of CSV.

    Without `rows_a_day` a key such as K0042 has as many as the demo's source gives it.
    """
    moved, clock = (day - _EPOCH).days, _clock()
    rows = 2000 + (int(key.removeprefix("K")) * 7919) % 3000 if rows_a_day is None else rows_a_day
    for n in range(1, rows + moved % 7 + 1):
        account = (n * 7919 + moved) % 100_000
        product = (n * 31 + moved) % 97
        quantity = (n * 104_729 + moved * 17) % 1000 - 100
        whole, part = divmod((n * 15_485_863 + moved) % 10_000_000, 10_000)
        yield f"{n},AC{account:06d},{key}-{product},{quantity},{whole}.{part:04d},{day} {clock[n]},{_NOTES[n % 5]}\n"


@cache
def _clock() -> tuple[str, ...]:
    """The time of day at each second, as far as files are long."""
    return tuple(f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}" for second in range(6000))


@cache
def source_sha256(key: str, day: date, rows_a_day: int | None = None) -> str:
    """The SHA-256 that the file of this key and day must have."""
    digest = hashlib.sha256(HEADER.encode())
    digest.update("".join(source_lines(key, day, rows_a_day)).encode())
    return digest.hexdigest()


# --- ticks -----------------------------------------------------------------------------------------------------------


class Row(Protocol):
    """A row that an agent sends; two of them are equal if all their columns are."""

    @property
    def id(self) -> int:
        """Its key."""
        ...


AnyRow = TypeVar("AnyRow", bound=Row)


class Order(NamedTuple):
    """One row that an agent sends."""

    id: int
    customer: str
    amount: int


def tick_rows(agent: int, tick: int, rows: int) -> list[Order]:
    """What an agent exports in tick `tick`, from 0: the first is whole, later ones change half and add some."""
    if tick == 0:
        ids: Iterable[int] = range(rows)
    else:
        ids = [*range(tick, rows, 2), *range(rows + (tick - 1) * 10, rows + tick * 10)]
    return [
        Order(one, f"customer {agent}-{(one * 7 + tick) % 97}", (one * 31 + tick * 1009 + agent) % 10_000)
        for one in ids
    ]


def silver_rows(sent: Iterable[Sequence[AnyRow]]) -> dict[int, AnyRow]:
    """What silver must hold after these ticks, in order: the last row of a key wins."""
    return {row.id: row for tick in sent for row in tick}


def compare_silver(expected: Mapping[int, AnyRow], found: Sequence[AnyRow]) -> Difference:
    """Hold the rows of a silver table against those that were sent."""
    held = {row.id: row for row in found}
    other = [key for key, row in held.items() if key in expected and expected[key] != row]
    missing, extra = expected.keys() - held.keys(), held.keys() - expected.keys()
    doubled = len(found) - len(held)
    example = f"id {min([*other, *missing, *extra])}" if other or missing or extra else ""
    return Difference(len(found), len(missing), len(extra) + doubled, len(other), example)
