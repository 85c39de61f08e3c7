"""The session with the source, where a stand-in shows it better than a server."""

from __future__ import annotations

from typing import Any, cast

import psycopg
import pytest

from lockstep.exports.source import SourceSession
from lockstep.kernel.errors import Terminal


class _Connection:
    """Open until it is closed, and good for nothing else."""

    closed = False

    def execute(self, *_: object) -> None: ...

    def close(self) -> None:
        self.closed = True


class _Session(SourceSession):
    """Describes the function with what it is told to."""

    told: Exception | None = None
    looked = 0

    def _describe(self, connection: Any) -> None:
        self.looked += 1
        if self.told is not None:
            raise self.told


def _session() -> tuple[_Session, list[_Connection]]:
    opened: list[_Connection] = []

    def connect() -> Any:
        opened.append(_Connection())
        return opened[-1]

    return _Session(cast("Any", connect)), opened


def test_a_session_that_is_not_open_is_not_opened_to_be_refreshed():
    session, opened = _session()
    session.refresh()
    assert opened == []


@pytest.mark.parametrize("error", [psycopg.OperationalError("gone"), Terminal("no such function")])
def test_a_session_that_cannot_be_refreshed_is_closed_and_the_next_use_tells_why(error: Exception):
    """Guards the loop of a worker: it must meet the cause where a chunk's failures are handled, and nowhere else."""
    session, opened = _session()
    assert session.columns == ()
    session.refresh()
    assert (session.looked, len(opened)) == (2, 1)
    session.told = error
    session.refresh()
    assert opened[0].closed
    session.told = None
    assert session.columns == ()
    assert len(opened) == 2
