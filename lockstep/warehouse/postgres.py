"""The PostgreSQL dialect: unlogged staging beside the data, and the statements that move a staged window into it.

What belongs here: SQL text. What does not: executing it (lockstep/windows/store.py), deciding which window (rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.warehouse.dialect import (
    DELETE,
    DELETED,
    KIND,
    LOAD,
    MODIFIED,
    ROW,
    UPSERT,
    Change,
    Step,
    name_list,
    quoted,
    same_key,
)
from lockstep.warehouse.model import Column, ColumnType, Table, short_name

# `numeric` without limits keeps every digit; `text` never needs widening.
_TYPES = {
    ColumnType.TEXT: "text",
    ColumnType.NUMBER: "numeric",
    ColumnType.DATE: "date",
    ColumnType.TIMESTAMP: "timestamptz",
    ColumnType.BOOLEAN: "boolean",
}
_BY_CATALOG = {
    "text": ColumnType.TEXT,
    "character varying": ColumnType.TEXT,
    "numeric": ColumnType.NUMBER,
    "date": ColumnType.DATE,
    "timestamp with time zone": ColumnType.TIMESTAMP,
    "boolean": ColumnType.BOOLEAN,
}
# Staged text is compared in byte order: it is matched for equality only, and collation costs time.
_TAGS = f'{LOAD} bigint NOT NULL, {KIND} "char" NOT NULL, {ROW} bigint NOT NULL, {DELETED} timestamptz'


class PostgresDialect:
    """Statements for PostgreSQL 15 and later."""

    name = "postgres"
    identifier_limit = 63

    def sql_type(self, column: Column) -> str:
        """Types without limits."""
        return _TYPES[column.type]

    def column_type(self, catalog_name: str) -> ColumnType:
        """The reverse, from `information_schema`; a type that a person chose counts as text."""
        return _BY_CATALOG.get(catalog_name, ColumnType.TEXT)

    def relation(self, schema: str, table: str) -> str:
        """The quoted name of a table."""
        return quoted(schema, short_name(table, self.identifier_limit))

    def create_table(self, schema: str, table: Table) -> str:
        """With an enforced primary key: the second guard against a doubled row."""
        columns = ", ".join(f"{quoted(column.name)} {self.sql_type(column)}" for column in table.columns)
        return (
            f"CREATE TABLE IF NOT EXISTS {self.relation(schema, table.name)} "
            f"({columns}, PRIMARY KEY ({name_list(table.key)}))"
        )

    def add_column(self, schema: str, table: str, column: Column) -> str:
        """Nullable and without a default: instant at any size."""
        return (
            f"ALTER TABLE {self.relation(schema, table)} "
            f"ADD COLUMN IF NOT EXISTS {quoted(column.name)} {self.sql_type(column)}"
        )

    def widen(self, schema: str, table: str, column: Column, present: int | None) -> str | None:
        """Never needed for our own `text`; a table that somebody made with a limit is opened."""
        if column.type is not ColumnType.TEXT or present is None:
            return None
        return f"ALTER TABLE {self.relation(schema, table)} ALTER COLUMN {quoted(column.name)} TYPE text"

    def create_staging(self, schema: str, table: Table) -> Sequence[str]:
        """An unlogged copy of the columns with tags in front, and the index that finds one load."""
        relation = self.relation(schema, table.name)
        columns = ", ".join(f"{quoted(column.name)} {self.sql_type(column)}" for column in table.columns)
        return (
            f"CREATE UNLOGGED TABLE {relation} ({_TAGS}, {columns}) WITH (autovacuum_enabled = off)",
            f"CREATE INDEX ON {relation} ({LOAD})",
        )

    def copy_into(self, schema: str, table: str, columns: Sequence[str]) -> str:
        """The COPY of staged rows: unquoted nothing is NULL, a quoted nothing is the empty string."""
        names = ", ".join([LOAD, KIND, ROW, DELETED, *(quoted(name) for name in columns)])
        return f"COPY {self.relation(schema, table)} ({names}) FROM STDIN (FORMAT csv)"

    def count_staged(self, staging: str, changes: Sequence[Change]) -> str:
        """Rows that are staged for one load, one line per table and kind."""
        return " UNION ALL ".join(
            f"SELECT {index}, {KIND}, count(*) FROM {self.relation(staging, change.table.name)} "  # noqa: S608
            f"WHERE {LOAD} = %(load)s GROUP BY {KIND}"
            for index, change in enumerate(changes)
        )

    def delete(self, schema: str, staging: str, change: Change) -> Step:
        """Deletes come first: the vendor's order."""
        return Step(
            f"DELETE FROM {self.relation(schema, change.table.name)} AS t "  # noqa: S608
            f"USING {self.relation(staging, change.table.name)} AS s "
            f"WHERE s.{LOAD} = %(load)s AND s.{KIND} = '{DELETE}' AND {same_key(change.key, 't', 's')}",
            what=f"{change.table.name}: deletes",
        )

    def upsert(self, schema: str, staging: str, change: Change) -> Step:
        """The last row of each key in file order; a row that was deleted after its last change stays deleted."""
        columns, key = name_list(change.columns), name_list(change.key)
        updated = [name for name in change.columns if name not in change.key]
        sets = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in updated)
        action = f"DO UPDATE SET {sets}" if sets else "DO NOTHING"
        return Step(
            f"INSERT INTO {self.relation(schema, change.table.name)} ({columns}) "
            f"{self._source(staging, change)} ON CONFLICT ({key}) {action}",
            what=f"{change.table.name}: upserts",
        )

    def _source(self, staging: str, change: Change) -> str:
        relation, columns = self.relation(staging, change.table.name), name_list(change.columns, "s")
        staged = f"s.{LOAD} = %(load)s AND s.{KIND} = '{UPSERT}'"
        source, conditions = f"{relation} AS s", [staged]
        if change.dedupe:
            # A sort and not a join with itself: its cost does not depend on what the planner believes of a fresh table.
            key = ", ".join(f"s.{quoted(name)}{self._byte_order(change, name)}" for name in change.key)
            last = f"SELECT DISTINCT ON ({key}) s.* FROM {relation} AS s WHERE {staged} ORDER BY {key}, s.{ROW} DESC"  # noqa: S608
            source, conditions = f"({last}) AS s", []
        if change.may_conflict:
            conditions.append(
                f"NOT EXISTS (SELECT FROM {relation} AS d WHERE d.{LOAD} = %(load)s AND d.{KIND} = '{DELETE}' "
                f"AND {same_key(change.key, 'd', 's')} AND d.{DELETED} > s.{quoted(MODIFIED)})"
            )
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {columns} FROM {source}{where}"  # noqa: S608

    def _byte_order(self, change: Change, name: str) -> str:
        return ' COLLATE "C"' if change.table.by_name[name].type is ColumnType.TEXT else ""
