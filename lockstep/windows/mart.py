"""The analysts' mart: what changed in a vault, per day and object, from the ledger alone.

What belongs here: the mart's table, rebuilding it, and what the warehouse's tables look like for people. What does not:
applying windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.kernel.postgres import Connection, transaction
from lockstep.warehouse.dialect import quoted
from lockstep.warehouse.evolve import read_tables
from lockstep.warehouse.model import Table

MART_SCHEMA = "mart"
MART_TABLE = "vault_activity"

_CREATE = """
CREATE SCHEMA IF NOT EXISTS mart;
CREATE TABLE IF NOT EXISTS mart.vault_activity (
    vault text NOT NULL, day date NOT NULL, object text NOT NULL, windows bigint NOT NULL,
    upserted bigint NOT NULL, deleted bigint NOT NULL, median_lag_minutes numeric,
    PRIMARY KEY (vault, day, object))"""
_CLEAR = "DELETE FROM mart.vault_activity WHERE vault = %(vault)s"
_FILL = """
INSERT INTO mart.vault_activity
SELECT w.vault, (w.stop AT TIME ZONE 'UTC')::date, o.key, count(*),
       coalesce(sum((o.value ->> 'upserted')::bigint), 0), coalesce(sum((o.value ->> 'deleted')::bigint), 0),
       percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM w.applied_at - w.stop) / 60)
  FROM windows.applied_window AS w
  JOIN windows.apply_control AS c ON c.vault = w.vault AND c.epoch = w.epoch,
       jsonb_each(w.counts) AS o
 WHERE w.vault = %(vault)s AND w.kind = 'incremental'
 GROUP BY 1, 2, 3"""
_READ = """
SELECT day, object, windows, upserted, deleted FROM mart.vault_activity
 WHERE vault = %s ORDER BY day DESC, object LIMIT %s"""


@dataclass(frozen=True)
class TableFacts:
    """A warehouse table as people see it."""

    table: Table
    rows: int


def rebuild(connection: Connection, vault: str) -> int:
    """Write the vault's part of the mart anew, in one transaction: readers see the old or the new."""
    with transaction(connection, what="rebuilding the mart"):
        connection.execute(_CREATE.encode())
        connection.execute(_CLEAR, {"vault": vault})
        return connection.execute(_FILL, {"vault": vault}).rowcount


def newest(connection: Connection, vault: str, limit: int = 12) -> list[tuple[Any, ...]]:
    """The newest lines of the mart: day, object, windows, upserted, deleted."""
    return connection.execute(_READ, (vault, limit)).fetchall()


def facts(connection: Connection, schema: str) -> list[TableFacts]:
    """Every table of a schema with its columns and rows."""
    found = []
    for name, table in sorted(read_tables(connection, schema).items()):
        row = connection.execute(f"SELECT count(*) FROM {quoted(schema, name)}".encode()).fetchone()  # noqa: S608
        found.append(TableFacts(table, int(row[0]) if row else 0))
    return found
