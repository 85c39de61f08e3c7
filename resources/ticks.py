"""What the tick pipeline works with, built from the settings: for the ingest service, Dagster and commands alike.

What belongs here: opening clients, the warm Spark session and the committer. What does not: what is done with them
(lockstep/ticks/worker.py). Knows no Dagster.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lockstep.kernel.deliver import DynamoDeliverer, SqsDeliverer
from lockstep.kernel.errors import InvalidInput, Terminal, Transient
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.lease import LeaseStore
from lockstep.kernel.postgres import Pool, on_connect
from lockstep.kernel.relay import Relay
from lockstep.kernel.settings import Settings
from lockstep.ticks.model import Limits
from lockstep.ticks.parts import PartObjects
from lockstep.ticks.projects import Keyring, ProjectStore
from lockstep.ticks.store import TickStore
from lockstep.ticks.worker import Committer, Observer, Plant, SparkGate
from resources.clients import aws_client
from resources.exports import s3_client, state_pool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SPARK_PORT = 15002
_CONNECT_SECONDS = 3.0
# An agent waits for the answer: an outage must become a 503 in seconds, not after the client's patient defaults.
_SPARK_RETRIES = 4
_SPARK_BACKOFF_MS = 1000
_DELIVERY_SECONDS = 5
_DELIVERY_ATTEMPTS = 2

# Set once: the block that overwrites a unit sets them too, and two commits at a time must not undo each other's.
_SESSION_SETTINGS = {
    "spark.databricks.delta.replaceWhere.constraintCheck.enabled": "true",
    "spark.databricks.delta.replaceWhere.dataColumns.enabled": "false",
    "spark.sql.sources.partitionOverwriteMode": "static",
    # A checkpoint loads the state of the whole table while the agent waits; every tenth tick would be too often.
    "spark.databricks.delta.properties.defaults.checkpointInterval": "25",
}


class WarmSpark:
    """One session for a whole process, opened at first use and opened again after its server went away."""

    def __init__(self, remote: str | None) -> None:
        self._remote = remote
        self._session: SparkSession | None = None
        self._lock = threading.Lock()

    def session(self) -> SparkSession:
        """The session. Raises `Transient` when no server answers, `Terminal` when none is named."""
        with self._lock:
            if self._session is None:
                self._session = self._open()
            return self._session

    def doubt(self, error: BaseException) -> None:
        """Drop the session if the error says that its server no longer knows it."""
        from pyspark.errors.exceptions.connect import SparkConnectGrpcException

        condition = getattr(error, "getCondition", lambda: None)() or ""
        if str(condition).startswith("INVALID_HANDLE") or type(error) is SparkConnectGrpcException:
            with self._lock:
                self._session = None  # not stopped: the server that knew it is gone

    def close(self) -> None:
        """Release the session on its server."""
        with self._lock:
            if self._session is not None:
                self._session.stop()
                self._session = None

    def _open(self) -> SparkSession:
        if self._remote is None:
            raise Terminal("LOCKSTEP_SPARK_REMOTE is not set.", next_step="start the stack, or set the address.")
        _knock(self._remote)
        from pyspark.errors import PySparkException  # only processes that commit ticks pay for it
        from pyspark.sql import SparkSession
        from pyspark.sql.connect.client.retries import DefaultPolicy

        session: SparkSession = SparkSession.builder.remote(self._remote).create()
        session.client.set_retry_policies([DefaultPolicy(max_retries=_SPARK_RETRIES, max_backoff=_SPARK_BACKOFF_MS)])
        try:
            for name, value in _SESSION_SETTINGS.items():
                session.conf.set(name, value)
        except PySparkException as error:  # it listens and does not answer, or went away since the knock
            session.release_session_on_close = False  # there is nobody to tell
            session.stop()  # else it stays this process's default, for whoever asks PySpark for one
            raise Transient(f"Spark does not answer: {str(error)[:300]}", unit="spark", retry_after=5.0) from error
        return session


class GivenSpark:
    """A session that belongs to somebody else, such as a Dagster run."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def session(self) -> SparkSession:
        """The session that was given."""
        return self._session

    def doubt(self, error: BaseException) -> None:
        """Its owner decides what becomes of it."""


def tick_limits(settings: Settings) -> Limits:
    """What this deployment allows."""
    return Limits(
        max_part_bytes=settings.ticks_max_part_mb * 1024 * 1024,
        max_parts=settings.ticks_max_parts,
        requests_per_second=settings.ticks_requests_per_second,
        request_burst=max(1, round(2 * settings.ticks_requests_per_second)),
        upload_days=settings.ticks_upload_days,
        lane_wait_seconds=settings.ticks_lane_wait_seconds,
    )


def project_store(settings: Settings, state: Pool) -> ProjectStore:
    """Projects and their secrets."""
    return ProjectStore(state, Keyring(settings.ticks_keys))


@contextmanager
def open_plant(settings: Settings, state: Pool, spark: SparkGate) -> Iterator[Plant]:
    """Everything a commit needs, on a pool that is open already."""
    if settings.postgres_dsn is None:
        raise InvalidInput("LOCKSTEP_POSTGRES_DSN is not set.", next_step="start the stack, or set the address.")
    limits, region = tick_limits(settings), settings.aws_region
    s3 = s3_client(region)
    leases = LeaseStore(on_connect(settings.postgres_dsn, application_name="lockstep-ticks-lanes"))
    patience = {
        "connect_timeout": _DELIVERY_SECONDS,
        "read_timeout": _DELIVERY_SECONDS,
        "max_attempts": _DELIVERY_ATTEMPTS,
    }
    deliverers = {
        "sqs": SqsDeliverer(aws_client("sqs", region=region, **patience)),
        "dynamodb": DynamoDeliverer(aws_client("dynamodb", region=region, **patience)),
    }
    with leases:
        yield Plant(
            store=TickStore(state, limits=limits),
            leases=leases,
            parts=PartObjects(s3, settings.ticks_bucket, ids=SystemIds()),
            s3=s3,
            lake=settings.lake_bucket,
            spark=spark,
            relay=Relay(state, deliverers, workers=1),
            limits=limits,
        )


@contextmanager
def open_committer(
    settings: Settings, session: SparkSession | None = None, *, observe: Observer | None = None
) -> Iterator[Committer]:
    """A committer of its own, for a Dagster run or a command. Without a session it opens one."""
    own = WarmSpark(settings.spark_remote) if session is None else None
    with state_pool(settings, application_name="lockstep-ticks", max_size=4) as state:
        try:
            with open_plant(settings, state, own or GivenSpark(session)) as plant:
                yield Committer(plant, observe=observe)
        finally:
            if own is not None:
                own.close()


def _knock(remote: str) -> None:
    """Fail at once when nobody listens: the client itself would try for ten minutes."""
    parts = urlsplit(remote)
    try:
        socket.create_connection((parts.hostname or "", parts.port or _SPARK_PORT), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise Transient(f"Spark does not answer: {error}.", unit="spark", retry_after=5.0) from error
