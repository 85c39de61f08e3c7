"""The analysts' mart: what changed in a vault, per day and object, from the ledger alone.

What belongs here: the mart's table, rebuilding it, and what the warehouse's tables look like for people. What does not:
applying windows. The statements are those that PostgreSQL and Redshift share.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date
from typing import Any, NamedTuple

from lockstep.warehouse.dialect import Step
from lockstep.warehouse.model import Table
from lockstep.windows.sink import Sink
from lockstep.windows.store import Applied

MART_SCHEMA = "mart"
MART_TABLE = "vault_activity"

_CREATE = (
    "CREATE SCHEMA IF NOT EXISTS mart",
    """CREATE TABLE IF NOT EXISTS mart.vault_activity (
    vault VARCHAR(64) NOT NULL, day DATE NOT NULL, object VARCHAR(256) NOT NULL, windows BIGINT NOT NULL,
    upserted BIGINT NOT NULL, deleted BIGINT NOT NULL, median_lag_minutes NUMERIC(18, 3),
    PRIMARY KEY (vault, day, object))""",
)
_CLEAR = "DELETE FROM mart.vault_activity WHERE vault = %(vault)s"
_INSERT = "INSERT INTO mart.vault_activity (vault, day, object, windows, upserted, deleted, median_lag_minutes) VALUES "
_LINES_AT_ONCE = 200


class Line(NamedTuple):
    """One day of one object."""

    day: date
    object: str
    windows: int
    upserted: int
    deleted: int
    median_lag_minutes: float


@dataclass
class _Sum:
    windows: int = 0
    upserted: int = 0
    deleted: int = 0
    lags: list[float] = field(default_factory=list)


class TableFacts(NamedTuple):
    """A warehouse table as people see it."""

    table: Table
    rows: int


def activity(history: Iterable[Applied]) -> list[Line]:
    """The mart's lines, by day and object."""
    sums: dict[tuple[date, str], _Sum] = {}
    for window in history:
        day, lag = window.stop.astimezone(UTC).date(), (window.applied_at - window.stop).total_seconds() / 60
        for name in window.counts:
            one = sums.setdefault((day, name), _Sum())
            upserted, deleted = changed(window, name)
            one.windows, one.upserted, one.deleted = one.windows + 1, one.upserted + upserted, one.deleted + deleted
            one.lags.append(lag)
    return [
        Line(day, name, one.windows, one.upserted, one.deleted, round(statistics.median(one.lags), 3))
        for (day, name), one in sorted(sums.items())
    ]


def changed(window: Applied, name: str) -> tuple[int, int]:
    """Upserted and deleted rows of one table; where the warehouse does not say, what the manifest announced."""
    count = window.counts[name]
    return count.get("upserted", count.get("upserts", 0)), count.get("deleted", count.get("deletes", 0))


def rebuild(sink: Sink, vault: str) -> list[Line]:
    """Write the vault's part of the mart anew, in one transaction: readers see the old or the new."""
    lane = sink.lane(vault)
    history = sink.history(vault, epoch=lane.epoch, kinds=("incremental",)) if lane else []
    lines = activity(history)
    for statement in _CREATE:
        sink.transact([Step(statement)], unit=vault)
    sink.transact([Step(_CLEAR, {"vault": vault}), *_inserts(vault, lines)], unit=vault)
    return lines


def facts(sink: Sink, schema: str) -> list[TableFacts]:
    """Every table of a schema with its columns and rows."""
    return [TableFacts(table, sink.count(schema, name)) for name, table in sorted(sink.tables(schema).items())]


def _inserts(vault: str, lines: list[Line]) -> Iterator[Step]:
    for start in range(0, len(lines), _LINES_AT_ONCE):
        values: dict[str, Any] = {"vault": vault}
        rows = []
        for place, line in enumerate(lines[start : start + _LINES_AT_ONCE]):
            names = [f"{name}{place}" for name in line._fields]
            values |= dict(zip(names, line, strict=True))
            rows.append("(%(vault)s, " + ", ".join(f"%({name})s" for name in names) + ")")
        yield Step(_INSERT + ", ".join(rows), values)
