"""Histories: what clients asked, what they were told, and what they were never told.

What belongs here: events, their order and their text form. What does not: judging them (checker.py). An operation that
was invoked ends as `ok`, `fail` (it certainly did nothing) or `info` (nobody knows), or does not end at all.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from lockstep.kernel.errors import InvalidInput


class Outcome(StrEnum):
    """The four kinds of events."""

    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"
    INFO = "info"


class Verb(StrEnum):
    """What an operation does. Only these are judged; a history may hold others."""

    WRITE = "write"  # makes a unit, identified by its key: submit a job, finalize a tick, publish a window
    READ = "read"  # observes the state of a unit
    RETRY = "retry"  # a person reopens a unit on purpose: a terminal state may change once after it


@dataclass(frozen=True)
class Event:
    """One line of a history. `op` joins an invocation and its end."""

    op: int
    process: str
    outcome: Outcome
    verb: str
    key: str
    """What the client calls it: an idempotency key, a tick id, a window."""
    unit: str | None = None
    """What the system calls it; known when it answered."""
    state: str | None = None
    terminal: bool = False
    at: float = 0.0
    note: str = ""


@dataclass
class History:
    """Events in the order in which they happened. Safe to write from several threads."""

    events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _last: int = 0

    def invoke(self, process: str, verb: str, key: str, *, at: float = 0.0) -> Event:
        """An operation begins."""
        with self._lock:
            self._last += 1
            event = Event(self._last, process, Outcome.INVOKE, verb, key, at=at)
            self.events.append(event)
        return event

    def end(self, begun: Event, outcome: Outcome, **found: Any) -> None:
        """It ended like this; `found` are fields of `Event`."""
        event = Event(**{**_fields(begun), "outcome": outcome, **found})
        with self._lock:
            self.events.append(event)

    def counts(self) -> dict[str, dict[str, int]]:
        """Operations by verb and outcome; `open` are those that never ended."""
        found: dict[str, Counter[str]] = {}
        for event in self.events:
            found.setdefault(event.verb, Counter())[event.outcome.value] += 1
        return {
            verb: {**dict(sorted(one.items())), "open": one["invoke"] - one["ok"] - one["fail"] - one["info"]}
            for verb, one in sorted(found.items())
        }

    def lines(self) -> Iterator[str]:
        """One JSON object per event."""
        for event in self.events:
            yield json.dumps(_fields(event), sort_keys=True)

    def save(self, path: Path) -> None:
        """Write it, one event a line."""
        path.write_text("".join(f"{line}\n" for line in self.lines()), encoding="utf-8")

    @classmethod
    def read(cls, lines: Iterable[str]) -> History:
        """The history behind `lines()`. Raises `InvalidInput` for anything else."""
        events = []
        for number, line in enumerate(lines, 1):
            try:
                fields: Mapping[str, Any] = json.loads(line)
                events.append(Event(**{**fields, "outcome": Outcome(fields["outcome"])}))
            except (ValueError, TypeError, KeyError) as error:
                raise InvalidInput(f"line {number} is no event of a history: {error}") from error
        return cls(events, _last=max((event.op for event in events), default=0))


def _fields(event: Event) -> dict[str, Any]:
    return asdict(event)
