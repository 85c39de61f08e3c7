"""Additive change of the warehouse: new tables, new columns, more room for text. Nothing is ever dropped.

What belongs here: what the warehouse has, what is missing, and adding it, outside any window's transaction. What does
not: which columns are wanted (catalog.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from lockstep.kernel.postgres import translated
from lockstep.warehouse.dialect import Dialect, quoted
from lockstep.warehouse.model import Column, ColumnType, Table, key_of, short_name
from lockstep.warehouse.postgres import PostgresDialect

_COLUMNS = """
SELECT table_name, column_name, data_type, character_maximum_length
  FROM information_schema.columns WHERE table_schema = %(schema)s
 ORDER BY table_name, ordinal_position"""


class Executor(Protocol):
    """What runs a statement: a connection of psycopg, or a session of another driver."""

    def execute(self, query: Any, params: Any = None, /) -> Iterable[Any]:
        """Run it and give its rows."""
        ...


def read_tables(connection: Executor, schema: str) -> dict[str, Table]:
    """The tables of a schema as they are now, by name."""
    types = PostgresDialect()
    found: dict[str, list[Column]] = {}
    for table, column, kind, length in connection.execute(_COLUMNS, {"schema": schema}):
        found.setdefault(table, []).append(Column(column, types.column_type(kind), length))
    return {name: Table(name, tuple(columns), key_of(name)) for name, columns in found.items()}


def missing(dialect: Dialect, schema: str, present: dict[str, Table], wanted: Iterable[Table]) -> Iterator[str]:
    """The additive statements that make the warehouse hold what is wanted. A column's type is never changed."""
    for table in wanted:
        existing = present.get(short_name(table.name, dialect.identifier_limit))
        if existing is None:
            yield dialect.create_table(schema, table)
            continue
        known = existing.by_name
        for column in table.columns:
            if column.name not in known:
                yield dialect.add_column(schema, table.name, column)
            elif statement := _wider(dialect, schema, table.name, known[column.name], column):
                yield statement


def evolve(connection: Executor, dialect: Dialect, schema: str, wanted: Iterable[Table]) -> list[str]:
    """Add what is missing, each statement on its own, and return what was run. Safe to repeat and to interrupt."""
    with translated("changing the warehouse's tables", unit=schema):
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}".encode())
        statements = list(missing(dialect, schema, read_tables(connection, schema), wanted))
        for statement in statements:
            connection.execute(statement.encode())
    return statements


def _wider(dialect: Dialect, schema: str, table: str, present: Column, wanted: Column) -> str | None:
    if wanted.type is not ColumnType.TEXT or present.type is not ColumnType.TEXT:
        return None
    return dialect.widen(schema, table, wanted, present.length)
