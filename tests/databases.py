"""Databases of their own for tests, on the shared stack's PostgreSQL. Fixtures decide how long one lives."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql


@contextmanager
def fresh_database(stack: Any, prefix: str = "test") -> Iterator[str]:
    """The address of an empty database, dropped afterwards."""
    name = f"{prefix}_{secrets.token_hex(6)}"
    state = stack.site().environment["LOCKSTEP_POSTGRES_DSN"]
    with psycopg.connect(state, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield state.rsplit("/", 1)[0] + f"/{name}"
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
