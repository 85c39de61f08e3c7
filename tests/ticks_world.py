"""A deployment of ticks of its own on the shared stack: a fresh database and buckets, one or more replicas, projects.

The queue and the DynamoDB tables are the stack's, as in production; ticks are told apart by their ids.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
import httpx
import psycopg
import pytest
import uvicorn
from psycopg import sql

from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Pool, pool
from lockstep.kernel.settings import Settings, load_settings
from lockstep.ticks.model import Project, Tick
from lockstep.ticks.projects import NewSecret
from lockstep.ticks.store import TickStore
from lockstep.ticks.worker import Committer, Plant
from resources.ticks import GivenSpark, open_plant, project_store
from services.ingest import create_app
from tests.ticks_fixtures import COLUMNS, Draft, manifest, new_tick_id, people, sha256, table


@dataclass
class Sender:
    """One project and how to speak for it."""

    world: World
    secret: NewSecret
    url: str
    http: httpx.Client = field(repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Api-Key": self.secret.org_id, "X-Api-Secret": self.secret.api_secret}

    @property
    def project(self) -> Project:
        found = project_store(self.world.settings, self.world.state).get(self.secret.project_id)
        assert found is not None
        return found

    def draft(
        self,
        *bodies: bytes,
        tick_id: str | None = None,
        columns: Sequence[Mapping[str, str]] = COLUMNS,
        name: str = "people",
        **more: Any,
    ) -> Draft:
        """A tick of one table with these parts."""
        parts = dict(enumerate(bodies or (people(),)))
        return self.draft_of([table(name, parts, columns=columns)], parts, tick_id=tick_id, **more)

    def draft_of(
        self,
        tables: Sequence[Mapping[str, Any]],
        parts: Mapping[int, bytes],
        *,
        tick_id: str | None = None,
        **more: Any,
    ) -> Draft:
        tick = tick_id or new_tick_id()
        return Draft(tick, parts, manifest(self.secret.org_id, self.secret.project_id, tick, tables, **more))

    def path(self, tick_id: str, *rest: object) -> str:
        return "/".join([f"{self.url}/v1/projects/{self.secret.project_id}/ticks/{tick_id}", *map(str, rest)])

    def put(self, tick_id: str, number: int, body: bytes, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = self.headers | {"X-Sha256": sha256(body)} | named
        return self.http.put(self.path(tick_id, "parts", number), content=body, headers=sent)

    def put_all(self, draft: Draft) -> Draft:
        for number, body in draft.parts.items():
            answer = self.put(draft.tick_id, number, body)
            assert answer.status_code in (200, 202), answer.text
        return draft

    def finalize(self, draft: Draft, body: Any = None) -> httpx.Response:
        return self.http.post(
            self.path(draft.tick_id, "finalize"), json=draft.manifest if body is None else body, headers=self.headers
        )

    def send(self, *bodies: bytes, **more: Any) -> Draft:
        """Put and finalize; committed afterwards."""
        draft = self.put_all(self.draft(*bodies, **more))
        answer = self.finalize(draft)
        assert answer.status_code == 200, answer.text
        return draft

    def get(self, tick_id: str) -> httpx.Response:
        return self.http.get(self.path(tick_id), headers=self.headers)

    def tick(self, tick_id: str) -> Tick:
        found = self.world.store.find(self.secret.project_id, tick_id)
        assert found is not None
        return found

    def at(self, url: str) -> Sender:
        """The same project at another replica."""
        return Sender(self.world, self.secret, url, self.http)


@dataclass
class World:
    """One deployment."""

    settings: Settings
    state: Pool
    s3: Any
    dynamodb: Any
    http: httpx.Client
    url: str = ""

    @property
    def store(self) -> TickStore:
        return TickStore(self.state)

    def ask(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        assert self.settings.postgres_dsn is not None
        with psycopg.connect(self.settings.postgres_dsn.get_secret_value()) as connection:
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def sender(self, org_id: str | None = None, **more: Any) -> Sender:
        made = project_store(self.settings, self.state).add(
            org_id or f"org-{secrets.token_hex(4)}", actor="test", **more
        )
        return Sender(self, made, self.url, self.http)

    def objects(self, prefix: str = "") -> list[str]:
        found = self.s3.list_objects_v2(Bucket=self.settings.ticks_bucket, Prefix=prefix)
        return [one["Key"] for one in found.get("Contents", [])]

    def audit_row(self, tick_id: str) -> dict[str, Any] | None:
        found = self.dynamodb.get_item(
            TableName="bronze_committed", Key={"tick_id": {"S": tick_id}}, ConsistentRead=True
        ).get("Item")
        return {name: next(iter(value.values())) for name, value in found.items()} if found else None

    def sent(self, tick_id: str) -> list[tuple[str, dict[str, Any], bool]]:
        """Messages of a tick: destination, payload, whether it was delivered."""
        return self.ask(
            "SELECT destination, payload, delivered_at IS NOT NULL FROM kernel.outbox WHERE lane LIKE %s ORDER BY id",
            f"ticks/%/{tick_id}",
        )

    @contextmanager
    def plant(self, spark: Any) -> Iterator[Plant]:
        with open_plant(self.settings, self.state, GivenSpark(spark)) as plant:
            yield plant

    @contextmanager
    def committer(self, spark: Any, **more: Any) -> Iterator[Committer]:
        with self.plant(spark) as plant:
            yield Committer(plant, **more)


@contextmanager
def open_world(stack: Any, **settings: Any) -> Iterator[World]:
    """A world without a replica; see `serving`."""
    environment = stack.site().environment
    address, name = environment["LOCKSTEP_POSTGRES_DSN"], f"test_{secrets.token_hex(6)}"
    token = secrets.token_hex(6)
    with ExitStack() as closing:
        patch = closing.enter_context(pytest.MonkeyPatch.context())
        for variable, value in environment.items():
            patch.setenv(variable, value)
        admin = closing.enter_context(psycopg.connect(address, autocommit=True))
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        closing.callback(admin.execute, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
        dsn = address.rsplit("/", 1)[0] + f"/{name}"
        for package in ("lockstep.kernel", "lockstep.ticks"):
            migrate(dsn, package)
        s3 = boto3.client("s3")
        buckets = {"ticks_bucket": f"test-ticks-{token}", "lake_bucket": f"test-lake-{token}"}
        for bucket in buckets.values():
            s3.create_bucket(Bucket=bucket)
        current = load_settings(postgres_dsn=dsn, **{**buckets, **settings})
        state = closing.enter_context(pool(dsn, application_name="test", max_size=8))
        http = closing.enter_context(httpx.Client(timeout=90, limits=httpx.Limits(max_connections=40)))
        dynamodb = boto3.client("dynamodb")
        for client in (s3, dynamodb):
            closing.callback(client.close)
        yield World(current, state, s3, dynamodb, http)


@contextmanager
def serving(world: World) -> Iterator[str]:
    """One replica inside this process; yields its address."""
    app = create_app(world.settings)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, timeout_graceful_shutdown=10)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.started
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
