"""What was done to the simulated vaults, kept in SQLite and replayed at start: a kill -9 forgets nothing.

What belongs here: the log of events, the reducer that turns them into state, and the remembered size and checksum of
packed archives. What does not: archives themselves, which are made from the seed whenever someone asks.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.kernel.errors import InvalidInput
from lockstep.vaultsim.model import ArchiveFault, Change, Event, Knobs, Poison, Twist, VaultConfig, VaultState

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    vault  TEXT NOT NULL,
    kind   TEXT NOT NULL,
    data   TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS archives (
    vault   TEXT NOT NULL,
    name    TEXT NOT NULL,
    variant TEXT NOT NULL,
    records INTEGER NOT NULL,
    parts   TEXT NOT NULL,
    PRIMARY KEY (vault, name, variant)
);
"""
_INSERT_EVENT = "INSERT INTO events (vault, kind, data) VALUES (?, ?, ?)"
_READ_EVENTS = "SELECT vault, kind, data FROM events ORDER BY number"
_READ_ARCHIVES = "SELECT name, variant, records, parts FROM archives WHERE vault = ?"
_PUT_ARCHIVE = "INSERT OR REPLACE INTO archives (vault, name, variant, records, parts) VALUES (?, ?, ?, ?, ?)"


class Part(NamedTuple):
    """Size and checksum of one part of an archive."""

    size: int
    md5: str


class Summary(NamedTuple):
    """What the listing says about an archive. `variant` names what it was made from."""

    variant: str
    records: int
    parts: tuple[Part, ...]


class EventLog:
    """The simulator's memory on disk. Safe to share between threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=20)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(_SCHEMA)

    def append(self, event: Event) -> None:
        """Make one event durable."""
        with self._lock:
            self._connection.execute(_INSERT_EVENT, (event.vault, event.kind, json.dumps(event.data)))

    def replay(self) -> dict[str, VaultState]:
        """Every vault as its events left it."""
        with self._lock:
            found = self._connection.execute(_READ_EVENTS).fetchall()
        vaults: dict[str, VaultState] = {}
        for vault, kind, data in found:
            step(vaults, Event(vault=vault, kind=kind, data=json.loads(data)))
        return vaults

    def summaries(self, vault: str) -> dict[str, Summary]:
        """The remembered archives of a vault, by name."""
        with self._lock:
            found = self._connection.execute(_READ_ARCHIVES, (vault,)).fetchall()
        return {
            name: Summary(variant, records, tuple(Part(*one) for one in json.loads(parts)))
            for name, variant, records, parts in found
        }

    def remember(self, vault: str, new: dict[str, Summary]) -> None:
        """Keep what is known about packed archives, so that a listing need not pack them again."""
        with self._lock, self._connection:
            self._connection.execute("BEGIN")
            self._connection.executemany(
                _PUT_ARCHIVE,
                [(vault, name, one.variant, one.records, json.dumps(one.parts)) for name, one in new.items()],
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def step(vaults: dict[str, VaultState], event: Event) -> None:
    """Change the state as `event` says. The same events in the same order give the same state."""
    if event.kind == "add":
        vaults[event.vault] = VaultState(config=VaultConfig(**event.data))
        return
    if event.kind == "remove":
        vaults.pop(event.vault, None)
        return
    state = vaults.get(event.vault)
    if state is None:
        raise InvalidInput(f"there is no vault {event.vault}.", next_step="add it with `lockstep vault add`.")
    _STEPS[event.kind](state, event.data)


def _publish(state: VaultState, data: dict[str, Any]) -> None:
    state.published += int(data["windows"])


def _withhold(state: VaultState, data: dict[str, Any]) -> None:
    state.withheld[int(data["index"])] = str(data.get("message", ""))


def _release(state: VaultState, data: dict[str, Any]) -> None:
    state.withheld.pop(int(data["index"]), None)


def _poison(state: VaultState, data: dict[str, Any]) -> None:
    state.poisoned[int(data["index"])] = Poison(data["kind"])


def _fault(state: VaultState, data: dict[str, Any]) -> None:
    state.faults[int(data["index"])] = ArchiveFault(data["kind"])


def _twist(state: VaultState, data: dict[str, Any]) -> None:
    state.twists[int(data["index"])] = Twist(data["kind"])


def _heal(state: VaultState, data: dict[str, Any]) -> None:
    state.poisoned.pop(int(data["index"]), None)
    state.faults.pop(int(data["index"]), None)


def _knobs(state: VaultState, data: dict[str, Any]) -> None:
    state.knobs = Knobs(**{**state.knobs.model_dump(), **data})


_STEPS: dict[str, Callable[[VaultState, dict[str, Any]], None]] = {
    "publish": _publish,
    "withhold": _withhold,
    "release": _release,
    "poison": _poison,
    "fault": _fault,
    "twist": _twist,
    "heal": _heal,
    "knobs": _knobs,
    "evolve": lambda state, data: state.changes.append(Change(**data)),
    "full": lambda state, data: state.fulls.append(int(data["index"])),
    "log": lambda state, data: state.logs.append(int(data["index"])),
    "lose": lambda state, data: state.lost.append(int(data["index"])),
}
