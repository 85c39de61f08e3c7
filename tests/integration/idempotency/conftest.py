"""What the tests of the blocks share: a database with their tables, empty for each test, and a folder for Delta."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect

if TYPE_CHECKING:
    from stack.lifecycle import Stack

_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"""
_EMPTY = "DROP SCHEMA IF EXISTS public, idempotency CASCADE; CREATE SCHEMA public"


@pytest.fixture(scope="module")
def module_database(stack: Stack) -> Iterator[str]:
    """One database for a module: emptying it takes a fifth of the time of making another."""
    name = f"test_{secrets.token_hex(6)}"
    state = stack.site().environment["LOCKSTEP_POSTGRES_DSN"]
    with psycopg.connect(state, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield state.rsplit("/", 1)[0] + f"/{name}"
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


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
