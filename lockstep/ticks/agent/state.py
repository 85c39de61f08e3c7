"""What the agent knows of its ticks, in a SQLite file: survives a crash at any moment, serves one project at a time.

What belongs here: SQL on the agent's own file. What does not: files of data (pages.py), requests (client.py).
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

from lockstep.kernel.errors import InvalidInput

_SCHEMA = """
CREATE TABLE IF NOT EXISTS owner (
    one        INTEGER PRIMARY KEY CHECK (one = 1),
    org_id     TEXT NOT NULL,
    project_id TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tick (
    position   INTEGER PRIMARY KEY AUTOINCREMENT,
    tick_id    TEXT NOT NULL UNIQUE,
    state      TEXT NOT NULL CHECK (state IN ('ready', 'uploading', 'committed', 'failed_manual', 'skipped')),
    manifest   TEXT NOT NULL,
    chained    INTEGER NOT NULL DEFAULT 0,
    attempts   INTEGER NOT NULL DEFAULT 0,
    error      TEXT,
    result     TEXT
);
CREATE TABLE IF NOT EXISTS part (
    tick_id  TEXT NOT NULL REFERENCES tick (tick_id) ON DELETE CASCADE,
    file_seq INTEGER NOT NULL,
    path     TEXT NOT NULL,
    sha256   TEXT NOT NULL,
    bytes    INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    sent     INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (tick_id, file_seq)
);
"""
_ADD_PART = "INSERT INTO part (tick_id, file_seq, path, sha256, bytes) VALUES (?, ?, ?, ?, ?)"
_COLUMNS = "position, tick_id, state, manifest, chained, attempts, error, result"
_SELECT = f"SELECT {_COLUMNS} FROM tick"  # noqa: S608


class LocalState(StrEnum):
    """Where a tick stands on this side."""

    READY = "ready"
    UPLOADING = "uploading"
    COMMITTED = "committed"
    FAILED_MANUAL = "failed_manual"
    SKIPPED = "skipped"

    @property
    def is_past(self) -> bool:
        """Whether the ticks after it may go."""
        return self in (LocalState.COMMITTED, LocalState.SKIPPED)

    @property
    def may_be_mended(self) -> bool:
        """Whether nothing is done with it until a person lets it go again."""
        return self in (LocalState.FAILED_MANUAL, LocalState.SKIPPED)


@dataclass(frozen=True)
class AgentTick:
    """One tick of this agent. `chained`: its manifest names what it follows and must not change any more."""

    position: int
    tick_id: str
    state: LocalState
    manifest: dict[str, Any]
    chained: bool
    attempts: int
    error: str | None
    result: dict[str, Any] | None


class LocalPart(NamedTuple):
    """One file of a tick on this disk."""

    file_seq: int
    path: Path
    sha256: str
    bytes: int
    attempts: int
    sent: bool


class AgentStore:
    """The agent's memory. Thread-safe: parts are sent from several threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._path, self._hold = path, ExitStack()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")  # a committed tick is not forgotten when the power goes
        self._database.execute("PRAGMA foreign_keys = ON")
        self._database.executescript(_SCHEMA)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hold.close()
        self._database.close()

    def claim(self, org_id: str, project_id: str) -> None:
        """Be the one agent that works with this memory, until it is closed or the process ends.

        Raises:
            InvalidInput: Another process works with it, or it holds the ticks of another project: they would be sent to
                this one, refused there, and stop everything.
        """
        guard = sqlite3.connect(self._path.with_name("lock.sqlite"), isolation_level=None, timeout=0)
        self._hold.callback(guard.close)
        try:
            guard.execute("BEGIN EXCLUSIVE")  # given back by the system, however the process ends
        except sqlite3.OperationalError:
            raise InvalidInput(
                "another agent is at work here.", unit=str(self._path.parent), next_step="let it end, or stop it."
            ) from None
        with self._transaction() as database:
            database.execute("INSERT INTO owner VALUES (1, ?, ?) ON CONFLICT DO NOTHING", (org_id, project_id))
            owner = database.execute("SELECT org_id, project_id FROM owner").fetchone()
        if owner != (org_id, project_id):
            raise InvalidInput(
                f"this memory belongs to project {owner[1]} of {owner[0]}.",
                unit=str(self._path.parent),
                next_step="use another folder for another project.",
            )

    def add(self, tick_id: str, manifest: Mapping[str, Any], parts: Sequence[LocalPart]) -> None:
        """Remember a tick whose files are all on disk. A tick that is known stays as it is."""
        with self._transaction() as database:
            made = database.execute(
                "INSERT INTO tick (tick_id, state, manifest) VALUES (?, 'ready', ?) ON CONFLICT DO NOTHING",
                (tick_id, json.dumps(manifest)),
            )
            if made.rowcount:
                database.executemany(_ADD_PART, _part_rows(tick_id, parts))

    def mend(self, tick_id: str, manifest: Mapping[str, Any], parts: Sequence[LocalPart]) -> None:
        """Let a failed or skipped tick go again with other files, in its old place."""
        with self._transaction() as database:
            mended = database.execute(
                "UPDATE tick SET state = 'ready', manifest = ?, chained = 0, error = NULL WHERE tick_id = ?"
                " AND state IN ('failed_manual', 'skipped')",
                (json.dumps(manifest), tick_id),
            )
            if mended.rowcount:
                database.execute("DELETE FROM part WHERE tick_id = ?", (tick_id,))
                database.executemany(_ADD_PART, _part_rows(tick_id, parts))

    def ticks(self) -> list[AgentTick]:
        """Every tick, in the order in which they go."""
        with self._lock:
            return [_tick(row) for row in self._database.execute(f"{_SELECT} ORDER BY position").fetchall()]

    def get(self, tick_id: str) -> AgentTick | None:
        """One tick."""
        with self._lock:
            row = self._database.execute(f"{_SELECT} WHERE tick_id = ?", (tick_id,)).fetchone()
        return _tick(row) if row else None

    def parts(self, tick_id: str) -> list[LocalPart]:
        """The files of a tick."""
        with self._lock:
            rows = self._database.execute(
                "SELECT file_seq, path, sha256, bytes, attempts, sent FROM part WHERE tick_id = ? ORDER BY file_seq",
                (tick_id,),
            ).fetchall()
        return [LocalPart(row[0], Path(row[1]), row[2], row[3], row[4], bool(row[5])) for row in rows]

    def begin(self, tick_id: str) -> None:
        """Count an attempt."""
        self._run("UPDATE tick SET state = 'uploading', attempts = attempts + 1 WHERE tick_id = ?", tick_id)

    def chain(self, tick_id: str, manifest: Mapping[str, Any]) -> None:
        """Fix the manifest before it is posted for the first time: every later attempt posts this one."""
        self._run("UPDATE tick SET manifest = ?, chained = 1 WHERE tick_id = ?", json.dumps(manifest), tick_id)

    def sending(self, tick_id: str, file_seq: int) -> None:
        """Count an attempt at one part."""
        self._run("UPDATE part SET attempts = attempts + 1 WHERE tick_id = ? AND file_seq = ?", tick_id, file_seq)

    def sent(self, tick_id: str, file_seq: int) -> None:
        """The service has the part."""
        self._run("UPDATE part SET sent = 1 WHERE tick_id = ? AND file_seq = ?", tick_id, file_seq)

    def note(self, tick_id: str, error: str) -> None:
        """Keep the words of the last failure."""
        self._run("UPDATE tick SET error = ? WHERE tick_id = ?", error, tick_id)

    def commit(self, tick_id: str, result: Mapping[str, Any]) -> None:
        """The service has committed the tick."""
        self._run(
            "UPDATE tick SET state = 'committed', result = ?, error = NULL WHERE tick_id = ?",
            json.dumps(result),
            tick_id,
        )

    def mark_tick_failed_manual(self, tick_id: str, error: str) -> None:
        """A person must look: it is not sent again until told so."""
        self._run("UPDATE tick SET state = 'failed_manual', error = ? WHERE tick_id = ?", error, tick_id)

    def retry(self, tick_id: str) -> bool:
        """Let a failed or skipped tick go again. False if it is in another state."""
        return bool(
            self._run(
                "UPDATE tick SET state = 'ready', error = NULL WHERE tick_id = ?"
                " AND state IN ('failed_manual', 'skipped')",
                tick_id,
            )
        )

    def skip(self, tick_id: str) -> bool:
        """Leave a tick out for ever, so that the ones after it may go. False if it is committed or unknown."""
        return bool(self._run("UPDATE tick SET state = 'skipped' WHERE tick_id = ? AND state <> 'committed'", tick_id))

    def _run(self, statement: str, *values: object) -> int:
        with self._transaction() as database:
            return database.execute(statement, values).rowcount

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")


def _part_rows(tick_id: str, parts: Sequence[LocalPart]) -> list[tuple[str, int, str, str, int]]:
    return [(tick_id, one.file_seq, str(one.path), one.sha256, one.bytes) for one in parts]


def _tick(row: Sequence[Any]) -> AgentTick:
    position, tick_id, state, manifest, chained, attempts, error, result = row
    found = json.loads(result) if result else None
    return AgentTick(position, tick_id, LocalState(state), json.loads(manifest), bool(chained), attempts, error, found)
