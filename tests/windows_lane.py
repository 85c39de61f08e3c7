"""What window tests share: a warehouse of their own, a vault that nobody else uses, and workers on it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from lockstep.kernel import postgres
from lockstep.kernel.retry import RetryPolicy
from lockstep.windows.ledger import WindowLedger
from lockstep.windows.places import Place, PostgresPlace
from lockstep.windows.prepare import Preparer
from lockstep.windows.sink import Sink
from lockstep.windows.store import Applied, WindowStore
from lockstep.windows.worker import DrainPolicy, Outside, WindowWorker
from resources.clients import object_reader
from tests.windows_world import World, expected, warehouse_rows

QUICK = DrainPolicy(
    ttl=30, first_batch=4, batch=8, retry=RetryPolicy(max_attempts=3, base_seconds=0.01, cap_seconds=0.05)
)


@dataclass
class LaneUnderTest:
    """One vault with its world, its warehouse and as many workers as a test wants."""

    dsn: str
    world: World
    stores: list[Sink] = field(default_factory=list)

    @property
    def vault(self) -> str:
        return self.world.vault

    def connect(self) -> Callable[[], Any]:
        return partial(postgres.connect, self.dsn, application_name="windows-test")

    def worker(
        self, policy: DrainPolicy = QUICK, *, spark: Callable[[], Any] | None = None, outside: Outside | None = None
    ) -> WindowWorker:
        preparer = Preparer(self.place(), spark, open_s3=open_s3(), bucket=self.world.bucket)
        ledger = WindowLedger(self.world.dynamodb, self.world.table)
        return WindowWorker(self.store(), ledger, preparer, policy=policy, outside=outside)

    def place(self) -> Place:
        return PostgresPlace(self.connect())

    def store(self) -> Sink:
        self.stores.append(self.new_store())
        return self.stores[-1]

    def new_store(self) -> Sink:
        return WindowStore(self.connect())

    def open(self) -> LaneUnderTest:
        """Begin the chain at the world's start, as a full load of an empty vault would."""
        self.store().open_lane(self.vault, 1, self.world.start, "test")
        return self

    def history(self) -> list[Applied]:
        return self.store().history(self.vault)

    def assert_prefix(self) -> None:
        """Applied windows are a gap-free prefix, and the watermark is its end."""
        applied = self.history()
        starts = [self.world.start, *(one.stop for one in applied)]
        assert [one.start for one in applied] == starts[:-1]
        lane = self.store().lane(self.vault)
        assert lane is None or lane.watermark == starts[-1]

    def assert_equals_oracle(self) -> None:
        """Everything published is applied, once, and nothing else is there."""
        self.assert_prefix()
        assert [one.stop for one in self.history()] == [one.stop for one in self.world.windows]
        assert warehouse_rows(self.dsn, f"vault_{self.vault}") == expected(self.world.oracle)
        assert set(self.world.statuses()) <= {"APPLIED"}

    def warehouse(self, query: str, *values: Any) -> list[Any]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return connection.execute(query.encode(), values).fetchall()


def open_s3() -> Callable[[], Any]:
    return partial(object_reader, "us-east-1")


def new_vault() -> str:
    return f"t{secrets.token_hex(4)}"
