"""What silver works with, built from the settings: for Dagster, the command line and plain processes alike.

What belongs here: opening connections and clients. What does not: what is done with them (lockstep/ticks/silver).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.kernel.clock import SystemClock
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.lease import LeaseStore
from lockstep.kernel.postgres import on_connect, pool
from lockstep.kernel.settings import Settings
from lockstep.ticks import bronze
from lockstep.ticks.model import Tick
from lockstep.ticks.silver.dispatch import DispatchTable
from lockstep.ticks.silver.gold import Gold
from lockstep.ticks.silver.intake import Intake
from lockstep.ticks.silver.queue import TickQueue
from lockstep.ticks.silver.report import Report
from lockstep.ticks.silver.store import SilverStore
from lockstep.ticks.silver.tables import SilverTables
from lockstep.ticks.silver.worker import Settler, SilverWorker
from resources.clients import aws_client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONNECTIONS = 3


@dataclass(frozen=True)
class Silver:
    """Silver of this deployment, opened."""

    settings: Settings
    store: SilverStore
    dispatches: DispatchTable
    queue: TickQueue
    dead_letters: TickQueue
    s3: Any
    clock: SystemClock

    @property
    def intake(self) -> Intake:
        """The door from the queue to runs."""
        return Intake(self.store, self.dispatches, self.queue, clock=self.clock)

    def keeps_bronze_of(self, tick: Tick) -> bool:
        """Whether the tick can still be read as it was committed."""
        return bronze.is_kept(self.s3, self.settings.lake_bucket, tick)

    def worker(self, spark: SparkSession) -> SilverWorker:
        """A worker on this session."""
        tables = SilverTables(spark, self.s3, self.settings.lake_bucket)
        return SilverWorker(self.store, self.dispatches, self.queue, tables, clock=self.clock)

    def settler(self) -> Settler:
        """Says DONE for what is in silver; needs no Spark."""
        return Settler(self.dispatches, self.queue, self.clock)

    def gold(self, spark: SparkSession) -> Gold:
        """The tables for analysts, in the lake."""
        return Gold(spark, self.settings.lake_bucket)

    def report(self, spark: SparkSession) -> Report:
        """The same for readers with SQL, in PostgreSQL."""
        assert self.settings.postgres_dsn is not None  # noqa: S101  # `open_silver` has refused that
        return Report(spark, self.gold(spark), self.settings.postgres_dsn)


@contextmanager
def open_silver(settings: Settings, *, application_name: str) -> Iterator[Silver]:
    """Everything that silver needs except Spark."""
    if settings.postgres_dsn is None:
        raise InvalidInput("LOCKSTEP_POSTGRES_DSN is not set.", next_step="start the stack, or set the address.")
    sqs = aws_client("sqs", region=settings.aws_region)
    connect = on_connect(settings.postgres_dsn, application_name=application_name, statement_timeout=10)
    with (
        pool(settings.postgres_dsn, application_name=application_name, max_size=_CONNECTIONS) as source,
        LeaseStore(connect) as leases,
    ):
        yield Silver(
            settings=settings,
            store=SilverStore(source, leases),
            dispatches=DispatchTable(aws_client("dynamodb", region=settings.aws_region)),
            queue=TickQueue(sqs),
            dead_letters=TickQueue.dead_letters(sqs),
            s3=aws_client("s3", region=settings.aws_region),
            clock=SystemClock(),
        )
