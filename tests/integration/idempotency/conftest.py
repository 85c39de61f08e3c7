"""What the tests of the blocks share: a database with their tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect


@pytest.fixture
def dsn(database: str) -> str:
    migrate(database, "lockstep.idempotency")
    return database


@pytest.fixture
def connection(dsn: str) -> Iterator[Connection]:
    with connect(dsn, application_name="tests") as opened:
        yield opened
