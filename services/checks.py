"""Readiness checks: one question to each part that a service depends on.

What belongs here: the smallest real call to a part, with a short timeout. What does not: how checks are run
and shown (shell.py). A check returns when the part works and raises when it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from pydantic import SecretStr

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import Settings
from resources.clients import aws_client

Check = Callable[[], None]

_SECONDS = 2


def postgres_check(dsn: SecretStr | None) -> Check:
    """A query on the state database."""

    def check() -> None:
        address = _required(dsn.get_secret_value() if dsn else None, "LOCKSTEP_POSTGRES_DSN")
        options = f"-c statement_timeout={_SECONDS}s"
        with psycopg.connect(address, connect_timeout=_SECONDS, options=options) as connection:
            connection.execute("SELECT 1")

    return check


def sqs_check(settings: Settings) -> Check:
    """One page of queue names."""
    return _aws_check("sqs", settings, lambda client: client.list_queues(MaxResults=1))


def dynamodb_check(settings: Settings) -> Check:
    """One page of table names."""
    return _aws_check("dynamodb", settings, lambda client: client.list_tables(Limit=1))


def s3_check(settings: Settings, *buckets: str) -> Check:
    """These buckets exist and may be read: the service's own, because its role reaches no others."""
    return _aws_check("s3", settings, lambda client: [client.head_bucket(Bucket=one) for one in buckets])


def spark_check(remote: str | None) -> Check:
    """A query, not an open port: a server whose executors die in a loop still listens."""
    session: Any = None

    def check() -> None:
        from pyspark.sql import SparkSession  # only services that use Spark pay for it

        nonlocal session
        if session is None or session.is_stopped:
            session = SparkSession.builder.remote(_required(remote, "LOCKSTEP_SPARK_REMOTE")).create()
        session.sql("SELECT 1").collect()

    return check


def _aws_check(service: str, settings: Settings, call: Callable[[Any], object]) -> Check:
    client: Any = None

    def check() -> None:
        nonlocal client
        client = client or aws_client(
            service,
            region=settings.aws_region,
            connect_timeout=_SECONDS,
            read_timeout=_SECONDS,
            max_attempts=1,
        )
        call(client)

    return check


def _required(value: str | None, variable: str) -> str:
    if not value:
        raise InvalidInput(f"{variable} is not set.", next_step="start the stack, or set the address.")
    return value
