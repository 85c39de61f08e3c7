"""Ticks and their parts in PostgreSQL: every statement on them, each with the condition that makes it safe.

What belongs here: SQL on `ticks.tick`, `ticks.part` and `ticks.bronze_table`. What does not: who may call
(projects.py), objects (parts.py), Spark (bronze.py), the order of steps (worker.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.kernel.postgres import Connection, Pool, transaction
from lockstep.ticks.model import Column, Footer, Mode, Part, TableCommit, Tick, TickState

_COLUMNS = """project_id, tick_id, org_id, state, attempt, generation, created_at, updated_at, manifest,
       manifest_sha256, mode, dt, result, error, sequence, prev_tick_id, commits, outbox_ids, committed_at"""
_FIND = f"SELECT {_COLUMNS} FROM ticks.tick WHERE project_id = %s AND tick_id = %s"  # noqa: S608
_FIND_COMMITTED = f"SELECT {_COLUMNS} FROM ticks.tick WHERE tick_id = %s AND state = 'committed'"  # noqa: S608
_CHAIN = f"""
SELECT {_COLUMNS} FROM ticks.tick
 WHERE project_id = %s AND state = 'committed' AND sequence > %s ORDER BY sequence LIMIT %s"""  # noqa: S608
_PARTS = """
SELECT file_seq, sha256, bytes, object_key, row_count, uncompressed_bytes, row_groups, columns, problem, received_at
  FROM ticks.part WHERE project_id = %s AND tick_id = %s ORDER BY file_seq"""


class TickStore:
    """Ticks in the state database. Every call is one transaction."""

    def __init__(self, source: Pool | Connection) -> None:
        self._source = source

    def find(self, project_id: str, tick_id: str) -> Tick | None:
        """One tick of a project, in whatever state."""
        with transaction(self._source, what="reading a tick") as connection:
            row = connection.execute(_FIND, (project_id, tick_id)).fetchone()
        return as_tick(row) if row else None

    def committed(self, tick_id: str) -> Tick | None:
        """The committed tick of this id: ids of committed ticks are unique in the platform."""
        with transaction(self._source, what="reading a tick") as connection:
            row = connection.execute(_FIND_COMMITTED, (tick_id,)).fetchone()
        return as_tick(row) if row else None

    def chain(self, project_id: str, *, after: int = 0, limit: int = 100) -> list[Tick]:
        """Committed ticks of a project in their order, from the one after sequence number `after`."""
        with transaction(self._source, what="reading a chain of ticks") as connection:
            return [as_tick(row) for row in connection.execute(_CHAIN, (project_id, after, limit)).fetchall()]

    def parts(self, project_id: str, tick_id: str) -> dict[int, Part]:
        """The files received for a tick, by number."""
        with transaction(self._source, what="reading the parts of a tick") as connection:
            return read_parts(connection, project_id, tick_id)


def read_parts(connection: Connection, project_id: str, tick_id: str) -> dict[int, Part]:
    """The files of a tick inside the caller's transaction."""
    rows = connection.execute(_PARTS, (project_id, tick_id)).fetchall()
    return {row[0]: _part(row) for row in rows}


def as_tick(row: Sequence[Any]) -> Tick:
    """A row of `ticks.tick`, in the order of the columns above."""
    (project, tick, org, state, attempt, generation, created, updated, manifest, digest, mode, dt, *rest) = row
    result, error, sequence, prev, commits, outbox, committed = rest
    return Tick(
        project_id=project,
        tick_id=tick,
        org_id=org,
        state=TickState(state),
        attempt=attempt,
        generation=generation,
        created_at=created,
        updated_at=updated,
        manifest=manifest,
        manifest_sha256=digest,
        mode=Mode(mode) if mode else None,
        dt=dt,
        result=result,
        error=error,
        sequence=sequence,
        prev_tick_id=prev,
        commits=tuple(TableCommit(**one) for one in commits or ()),
        outbox_ids=tuple(outbox),
        committed_at=committed,
    )


def _part(row: Sequence[Any]) -> Part:
    number, sha256, size, key, rows, uncompressed, groups, columns, problem, received = row
    footer = None if columns is None else Footer(rows, uncompressed, groups, tuple(Column(*one) for one in columns))
    return Part(number, sha256, size, key, footer, problem, received)
