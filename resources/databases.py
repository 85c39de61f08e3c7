"""PostgreSQL and the warehouse as Dagster resources.

What belongs here: opening connections, with timeouts. What does not: SQL, which lives beside the store that
runs it. An address holds a password, so it is given as `EnvVar`: the UI and run configs show only its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import psycopg
from pydantic import Field

from lockstep.kernel.errors import InvalidInput


class PostgresResource(dg.ConfigurableResource):
    """A PostgreSQL database, opened per use: a run is its own process and would pool one connection."""

    dsn: str = Field(repr=False, description="Address with credentials. Give it as EnvVar.")
    connect_timeout_seconds: int = 5
    statement_timeout_seconds: int = Field(default=300, description="Longest single statement.")

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection]:
        """One connection: commits when the block ends well, rolls back when it raises, closes either way."""
        with psycopg.connect(
            self.dsn,
            connect_timeout=self.connect_timeout_seconds,
            options=f"-c statement_timeout={self.statement_timeout_seconds}s",
            application_name="lockstep-dagster",
        ) as connection:
            yield connection


class WarehouseResource(PostgresResource):
    """The warehouse: its dialect, and its connection where that is PostgreSQL's own."""

    dialect: str = Field(default="postgres", description="`postgres` or `redshift`.")

    @contextmanager
    def connect(self) -> Iterator[psycopg.Connection]:
        """One connection to a PostgreSQL warehouse. Other dialects are opened by their own driver."""
        if self.dialect != "postgres":
            raise InvalidInput(
                f"a {self.dialect} warehouse does not open with the PostgreSQL driver.",
                next_step="open it through the dialect in lockstep.warehouse.",
            )
        with super().connect() as connection:
            yield connection
