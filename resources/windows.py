"""The window pipeline's stores and worker as one Dagster resource.

What belongs here: wiring of clients into lockstep/windows. What does not: decisions, SQL, Dagster events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from lockstep.kernel import postgres
from lockstep.kernel.errors import InvalidInput
from lockstep.windows.ledger import WindowLedger
from lockstep.windows.prepare import Preparer
from lockstep.windows.store import WindowStore
from lockstep.windows.worker import WindowWorker
from resources.clients import aws_client


class WindowsResource(dg.ConfigurableResource):
    """Opens what applying windows needs. Factories, not clients, travel to Spark's workers."""

    dsn: str = Field(repr=False, description="Address of the warehouse. Give it as EnvVar.")
    dialect: str = Field(default="postgres", description="`postgres`; Redshift's statements are emitted, not run.")
    region_name: str = "us-east-1"

    def connect(self) -> postgres.Connection:
        """A connection to the warehouse."""
        return self._connect()()

    def ledger(self) -> WindowLedger:
        """The queue's rows, as the consumer sees them."""
        return WindowLedger(aws_client("dynamodb", region=self.region_name))

    @contextmanager
    def store(self) -> Iterator[WindowStore]:
        """The sink's lanes and ledger."""
        with closing(WindowStore(self._connect())) as store:
            yield store

    @contextmanager
    def worker(self, spark: Callable[[], Any] | None = None) -> Iterator[WindowWorker]:
        """A worker. Without `spark` it stages in this process."""
        open_s3 = partial(aws_client, "s3", region=self.region_name)
        preparer = Preparer(open_s3(), spark, connect=self._connect(), open_s3=open_s3)
        with self.store() as store:
            yield WindowWorker(store, self.ledger(), preparer, connect=self._connect())

    def _connect(self) -> Callable[[], postgres.Connection]:
        if self.dialect != "postgres":
            raise InvalidInput(
                f"windows are not applied to a {self.dialect} warehouse by this version.",
                next_step="use its statements from lockstep.warehouse, or a PostgreSQL warehouse.",
            )
        return partial(postgres.connect, self.dsn, application_name="lockstep-windows", statement_timeout=600.0)
