"""What the tests of the blocks share: a database with their tables, empty for each test, and a folder for Delta."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect
from tests.databases import fresh_database

if TYPE_CHECKING:
    from stack.lifecycle import Stack

_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"""
_EMPTY = "DROP SCHEMA IF EXISTS public, idempotency CASCADE; CREATE SCHEMA public"


@pytest.fixture(scope="module")
def module_database(stack: Stack) -> Iterator[str]:
    """One database for a module: emptying it takes a fifth of the time of making another."""
    with fresh_database(stack) as dsn:
        yield dsn


@pytest.fixture
def dsn(module_database: str) -> str:
    """A database that holds the blocks' own tables and nothing else."""
    with psycopg.connect(module_database, autocommit=True) as admin:
        admin.execute(_OTHERS)
        admin.execute(_EMPTY)
    migrate(module_database, "lockstep.idempotency")
    return module_database


@pytest.fixture
def connection(dsn: str) -> Iterator[Connection]:
    with connect(dsn, application_name="tests") as opened:
        yield opened


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """A folder for Delta tables, for tests in which S3 is not the point: a commit there costs half as much."""
    return tmp_path.as_uri()
