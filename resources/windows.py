"""The window pipeline's stores and worker as one Dagster resource.

What belongs here: wiring of clients into lockstep/windows. What does not: decisions, SQL, Dagster events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from lockstep.kernel import postgres
from lockstep.kernel.clock import SystemClock
from lockstep.kernel.errors import LockstepError
from lockstep.kernel.logs import get_logger
from lockstep.kernel.settings import load_settings
from lockstep.windows.alerts import window_failed
from lockstep.windows.ledger import WindowLedger
from lockstep.windows.model import FIRST_EPOCH, Window
from lockstep.windows.places import Place, PostgresPlace
from lockstep.windows.prepare import Preparer
from lockstep.windows.sink import Sink
from lockstep.windows.store import WindowStore
from lockstep.windows.worker import Outside, Refetch, WindowWorker
from resources.clients import aws_client, object_reader

_log = get_logger(__name__)


def raise_alert(window: Window, fence: int, error: LockstepError) -> None:
    """Send a failed window to the platform's alert sinks. The plane is built only when something failed."""
    from resources.readiness_plane import alert_door  # a worker that fails nothing needs none

    alert_door(load_settings()).raise_alert(window_failed(window, fence, error, SystemClock().now()))


class WindowsResource(dg.ConfigurableResource):
    """Opens what applying windows to PostgreSQL needs. Factories, not clients, travel to Spark's workers."""

    dsn: str = Field(repr=False, description="Address of the warehouse. Give it as EnvVar.")
    bucket: str = Field(description="Bucket of the raw windows, and of staging where the warehouse reads it itself.")
    region_name: str = "us-east-1"

    def ledger(self) -> WindowLedger:
        """The queue's rows, as the consumer sees them."""
        return WindowLedger(aws_client("dynamodb", region=self.region_name))

    @contextmanager
    def store(self) -> Iterator[Sink]:
        """The sink's lanes and ledger."""
        with closing(self.open_store()) as store:
            yield store

    def open_store(self) -> Sink:
        """The sink itself; the caller closes it."""
        return WindowStore(self._connect())

    def place(self) -> Place:
        """Where windows are staged."""
        return PostgresPlace(self._connect())

    def chain(self, vault: str) -> tuple[datetime | None, int]:
        """Watermark and epoch for a producer. No answer is no watermark: apply never blocks a producer."""
        try:
            with self.store() as store:
                lane = store.lane(vault)
        except LockstepError as error:
            _log.warning("the warehouse was not asked; the queue's own chain counts", vault=vault, error=str(error))
            return None, FIRST_EPOCH
        return (lane.watermark, lane.epoch) if lane is not None and lane.has_begun else (None, FIRST_EPOCH)

    @contextmanager
    def worker(
        self, spark: Callable[[], Any] | None = None, *, refetch: Refetch | None = None
    ) -> Iterator[WindowWorker]:
        """A worker. Without `spark` it stages in this process; without `refetch` it asks no source again."""
        preparer = Preparer(self.place(), spark, open_s3=self._open_s3(), bucket=self.bucket)
        with self.store() as store:
            outside = Outside(refetch=refetch, alarm=raise_alert)
            yield WindowWorker(store, self.ledger(), preparer, outside=outside)

    def _open_s3(self) -> Callable[[], Any]:
        return partial(object_reader, self.region_name)

    def _connect(self) -> Callable[[], postgres.Connection]:
        return partial(postgres.connect, self.dsn, application_name="lockstep-windows", statement_timeout=600.0)
