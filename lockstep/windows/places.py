"""Where windows are staged beside a PostgreSQL warehouse: schemas of unlogged tables, filled by COPY.

What belongs here: what a place must do, and the PostgreSQL one. What does not: reading and checking files (staging.py),
staging for Redshift (redshift_place.py). pyarrow is imported by the writer alone: sensors never need it.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import psycopg

from lockstep.kernel.errors import LockstepError, Terminal, Transient
from lockstep.kernel.postgres import Connection, as_lockstep_error, transaction, translated
from lockstep.warehouse.dialect import quoted
from lockstep.warehouse.evolve import evolve, read_tables
from lockstep.warehouse.model import Table
from lockstep.warehouse.postgres import PostgresDialect
from lockstep.windows.store import Claim

if TYPE_CHECKING:
    import pyarrow as pa

    from lockstep.windows.staging import Piece, Writer

MANY_ROWS = 20_000
_STAGES = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)"
_PLACE_IN_FILE = re.compile(r"line (?P<line>\d+)(, column (?P<column>[^:]+))?")


class Place(Protocol):
    """The warehouse as staging sees it: its tables, what can be added to them, and room for staged rows."""

    identifier_limit: int

    def tables(self, schema: str) -> dict[str, Table]:
        """The tables of a schema as they are now, by name."""
        ...

    def evolve(self, schema: str, wanted: Iterable[Table]) -> None:
        """Add tables, columns and room that are missing. Safe to repeat and to interrupt."""
        ...

    def open_stage(self, claim: Claim, name: str, tables: Mapping[str, Table]) -> str:
        """Make room for the rows of these tables, marked with vault and fence. Returns how it is called."""
        ...

    def drop_stages(self, claim: Claim, stages: Collection[str] | None = None) -> None:
        """Drop these; by default all of the vault up to this fence, a dead worker's too."""
        ...

    def writer(self, stage: str) -> Callable[[], Writer]:
        """A factory of writers that can travel to Spark's workers."""
        ...


@dataclass(frozen=True)
class PostgresPlace:
    """Staging in the warehouse's own database."""

    connect: Callable[[], Connection]
    dialect: PostgresDialect = field(default_factory=PostgresDialect)
    identifier_limit: int = PostgresDialect.identifier_limit

    def tables(self, schema: str) -> dict[str, Table]:
        """The tables of a schema as they are now, by name."""
        with closing(self.connect()) as connection, translated("reading tables", unit=schema):
            return read_tables(connection, schema)

    def evolve(self, schema: str, wanted: Iterable[Table]) -> None:
        """Add what is missing, each statement on its own."""
        with closing(self.connect()) as connection:
            evolve(connection, self.dialect, schema, wanted)

    def open_stage(self, claim: Claim, name: str, tables: Mapping[str, Table]) -> str:
        """A schema of its own, so that dropping it frees everything at once."""
        stage = f"stage:{claim.vault}:{claim.fence}:{name}"
        with closing(self.connect()) as connection, transaction(connection, what="creating staging"):
            connection.execute(f"CREATE SCHEMA {quoted(stage)}".encode())
            for table in tables.values():
                for statement in self.dialect.create_staging(stage, table):
                    connection.execute(statement.encode())
        return stage

    def drop_stages(self, claim: Claim, stages: Collection[str] | None = None) -> None:
        """Drop these schemas, or what the vault has up to this fence."""
        with closing(self.connect()) as connection, translated("dropping staging", unit=claim.vault):
            if stages is None:
                found = connection.execute(_STAGES, (f"stage:{claim.vault}:",)).fetchall()
                stages = {name for (name,) in found if int(name.rsplit(":", 2)[1]) <= claim.fence}
            for name in sorted(stages):
                connection.execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE".encode())

    def writer(self, stage: str) -> Callable[[], Writer]:
        """COPY into the stage's tables."""
        return CopyFactory(self.connect, stage)


@dataclass(frozen=True)
class CopyFactory:
    """Opens a `CopyWriter`; travels to Spark's workers."""

    connect: Callable[[], Connection]
    stage: str

    def __call__(self) -> CopyWriter:
        """Open it."""
        return CopyWriter(self.connect, self.stage)


class CopyWriter:
    """Copies pieces into staging tables: one transaction a call, one COPY for each table and header."""

    def __init__(self, connect: Callable[[], Connection], stage: str) -> None:
        self._connect = connect
        self._connection = connect()
        self._stage = stage
        self._dialect = PostgresDialect()
        self._rows: Counter[str] = Counter()

    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy all or nothing; an error names table, row and column, never a value."""
        groups: dict[tuple[str, tuple[str, ...]], list[pa.Table]] = {}
        for piece in pieces:
            groups.setdefault((piece.object, piece.columns), []).append(piece.rows)
        if self._connection.closed:
            self._connection = self._connect()
        table = ""
        try:
            with self._connection.transaction(), self._connection.cursor() as cursor:
                for (table, columns), parts in groups.items():
                    with cursor.copy(self._dialect.copy_into(self._stage, table, columns).encode()) as copy:
                        copy.write(_encoded(parts))
        except psycopg.Error as error:
            raise _copy_error(error, table) from None
        for piece in pieces:
            self._rows[piece.object] += piece.rows.num_rows

    def finish(self, load: int) -> None:
        """Tell the planner of tables that became large: for a fresh one it would choose a join that never ends."""
        for table in [name for name, rows in self._rows.items() if rows > MANY_ROWS]:
            with translated("counting staged rows", unit=table):
                self._connection.execute(f"ANALYZE {self._dialect.relation(self._stage, table)}".encode())
            del self._rows[table]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _encoded(parts: Sequence[pa.Table]) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    sink = io.BytesIO()
    csv.write_csv(pa.concat_tables(parts), sink, csv.WriteOptions(include_header=False, quoting_style="needed"))
    return sink.getbuffer()


def _copy_error(error: psycopg.Error, table: str) -> LockstepError:
    """The database's refusal with its place in the file, without the value."""
    known = as_lockstep_error(error)
    if isinstance(known, Transient):
        return known
    place = _PLACE_IN_FILE.search(error.diag.context or "")
    where = f"row {place['line']}" + (f", column {place['column']}" if place["column"] else "") if place else "a row"
    words = (error.diag.message_primary or type(error).__name__).split(":")[0]
    return Terminal(f"{table}, {where}: {words} [{error.sqlstate}].")
