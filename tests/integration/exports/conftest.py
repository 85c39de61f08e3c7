"""Fixtures of exports on the shared stack: fresh databases, a bucket, and everything that stands on them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql

from lockstep.exports import rules
from lockstep.exports.claims import ClaimStore
from lockstep.exports.clients import ClientStore, NewClient
from lockstep.exports.fleet import run_loop
from lockstep.exports.model import Job, Limits, Place, Tally
from lockstep.exports.sink import ObjectStore
from lockstep.exports.source import SourceSession
from lockstep.exports.store import JobStore
from lockstep.exports.worker import Pulse, Worker
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Pool, on_connect, pool
from resources.exports import s3_client

LIMITS = Limits(max_chunks=50, max_attempts=3)


@dataclass
class World:
    """One deployment of its own: state, source, bucket, a client."""

    state_dsn: str
    source_dsn: str
    bucket: str
    state: Pool
    s3: Any
    client: NewClient
    limits: Limits = LIMITS

    @property
    def jobs(self) -> JobStore:
        return JobStore(self.state, place=Place(self.bucket), limits=self.limits)

    def claims(self, owner: str = "w1", lease: float = 60.0) -> ClaimStore:
        return ClaimStore(self.state, owner=owner, limits=self.limits, lease_seconds=lease)

    def submit(self, *pairs: tuple[str, str], client: NewClient | None = None, **options: Any) -> str:
        body = {"items": [{"key": key, "effectiveDates": [day]} for key, day in pairs], **options}
        submission = rules.parse_submission(body, self.limits)
        return self.jobs.submit((client or self.client).client, submission, body).job_id

    def worker(self, claims: ClaimStore | None = None, *, every: float = 60.0) -> Worker:
        claims = claims or self.claims()
        source = SourceSession(on_connect(self.source_dsn, application_name="test"))
        objects = ObjectStore(self.s3, self.bucket)
        return Worker(claims, source, objects, Pulse(claims, every=every), place=Place(self.bucket), limits=self.limits)

    def drain(self, worker: Worker | None = None) -> Tally:
        used = worker or self.worker()
        try:
            return run_loop(used, self.claims(), threading.Event(), until_idle=True)
        finally:
            used._source.close()

    def job(self, job_id: str) -> Job:
        return self.jobs.get(job_id)

    def read(self, object_key: str) -> bytes:
        return self.s3.get_object(Bucket=self.bucket, Key=object_key)["Body"].read()

    def names(self) -> list[str]:
        return [one["Key"] for one in self.s3.list_objects_v2(Bucket=self.bucket).get("Contents", [])]

    def ask(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.state_dsn) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def source(self, statement: str) -> None:
        with psycopg.connect(self.source_dsn, autocommit=True) as connection:
            connection.execute(statement)


@dataclass(frozen=True)
class Ground:
    """Two databases that worlds stand on, one after another: making them costs seconds, emptying them does not."""

    state_dsn: str
    source_dsn: str
    function: str
    environment: dict[str, str]

    def clean(self) -> None:
        """As new: no job, no file, no message, and the demo's function."""
        with psycopg.connect(self.state_dsn, autocommit=True) as state:
            state.execute("SET lock_timeout = '20 s'")
            state.execute(
                "TRUNCATE exports.client, exports.job, exports.job_chunk, exports.file_cache, exports.idempotency,"
                " exports.breaker, kernel.request_budget, kernel.outbox"
            )
        with psycopg.connect(self.source_dsn, autocommit=True) as source:
            if _function(source) != self.function:
                source.execute("DROP FUNCTION IF EXISTS export_rows(text, date)")
                source.execute(self.function.encode())


@pytest.fixture(scope="session")
def world_ground(stack: Any) -> Iterator[Ground]:
    """For `world`."""
    yield from _ground(stack)


@pytest.fixture(scope="session")
def module_ground(stack: Any) -> Iterator[Ground]:
    """For `module_world`: a test may use both worlds."""
    yield from _ground(stack)


@pytest.fixture(scope="module")
def module_world(module_ground: Ground) -> Iterator[World]:
    """A world that the tests of one module share; each test makes its own jobs."""
    yield from _world(module_ground)


@pytest.fixture
def world(world_ground: Ground) -> Iterator[World]:
    """A world of one test's own."""
    yield from _world(world_ground)


def _ground(stack: Any) -> Iterator[Ground]:
    environment = stack.site().environment
    address, names = environment["LOCKSTEP_POSTGRES_DSN"], [f"test_{secrets.token_hex(6)}" for _ in range(2)]
    with psycopg.connect(address, autocommit=True) as admin:
        for name in names:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    state_dsn, source_dsn = (address.rsplit("/", 1)[0] + f"/{name}" for name in names)
    migrate(state_dsn, "lockstep.kernel")
    migrate(state_dsn, "lockstep.exports")
    migrate(source_dsn, "lockstep.exports.demo")
    with psycopg.connect(source_dsn, autocommit=True) as source:
        source.execute("UPDATE demo.source_key SET rows_per_day = 40")
        function = _function(source)
    yield Ground(state_dsn, source_dsn, function, environment)
    with psycopg.connect(address, autocommit=True) as admin:
        for name in names:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _function(source: psycopg.Connection[Any]) -> str:
    row = source.execute("SELECT pg_get_functiondef(to_regprocedure('export_rows(text, date)'))").fetchone()
    return str(row[0]) if row else ""


def _world(ground: Ground) -> Iterator[World]:
    import boto3

    ground.clean()
    bucket = f"test-{secrets.token_hex(6)}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ground.environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=bucket)
        with pool(ground.state_dsn, application_name="test", max_size=8) as state:
            client = ClientStore(state).add("tester")
            yield World(ground.state_dsn, ground.source_dsn, bucket, state, s3_client("us-east-1"), client)
