"""Fixtures of silver's tests; each package's conftest imports what it needs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import boto3
import psycopg
import pytest
from psycopg import sql

from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import pool
from tests.silver_world import World


@pytest.fixture(scope="module")
def world(stack: Any, spark: Any) -> Iterator[World]:
    """A database, queues and a lake of this module alone, on the stack's real parts."""
    state = stack.site().environment["LOCKSTEP_POSTGRES_DSN"]
    environment = pytest.MonkeyPatch()
    for name, value in stack.site().environment.items():
        environment.setenv(name, value)
    name = f"test_silver_{secrets.token_hex(4)}"
    s3, sqs = boto3.client("s3"), boto3.client("sqs")
    s3.create_bucket(Bucket=name.replace("_", "-"))
    urls = [sqs.create_queue(QueueName=f"{name}{suffix}")["QueueUrl"] for suffix in ("", "-dead")]
    with psycopg.connect(state, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        dsn = state.rsplit("/", 1)[0] + f"/{name}"
        for package in ("lockstep.kernel", "lockstep.idempotency", "lockstep.ticks", "lockstep.ticks.silver"):
            migrate(dsn, package)
        with pool(dsn, application_name="silver-test", max_size=4) as source:
            made = World(
                dsn, source, name.replace("_", "-"), s3, sqs, name, f"{name}-dead", boto3.client("dynamodb"), spark
            )
            yield made
            made.store.leases.close()
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
    for url in urls:
        sqs.delete_queue(QueueUrl=url)
    environment.undo()


@pytest.fixture
def deployed(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world as the settings of this process, as a run finds them; its queues in place of the stack's."""
    monkeypatch.setenv("LOCKSTEP_POSTGRES_DSN", world.dsn)
    monkeypatch.setenv("LOCKSTEP_LAKE_BUCKET", world.lake)
    monkeypatch.setattr("resources.silver.TickQueue", _Queues(world))
    for name in (world.queue_name, world.dead_name):
        world.sqs.purge_queue(QueueUrl=world.sqs.get_queue_url(QueueName=name)["QueueUrl"])
    return world


class _Queues:
    """Stands for the class of the queue and opens the test's own by name."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, client: Any) -> Any:
        return self._world.queue

    def dead_letters(self, client: Any) -> Any:
        return self._world.dead_letters
