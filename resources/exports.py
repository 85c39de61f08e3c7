"""What an export worker works with, built from the settings: for Spark's tasks, Dagster and plain processes alike.

What belongs here: opening connections and clients for workers. What does not: what is done with them
(lockstep/exports/worker.py). Knows no Dagster, because Spark's Python workers import it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from botocore.config import Config

from lockstep.exports.claims import LONGEST_BUILD_SECONDS, ClaimStore
from lockstep.exports.model import Limits, Place
from lockstep.exports.sink import ObjectStore
from lockstep.exports.source import SourceSession
from lockstep.exports.worker import Pulse, Worker
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.postgres import Pool, on_connect, pool
from lockstep.kernel.settings import Settings, load_settings
from resources.clients import CONNECT_TIMEOUT_SECONDS, MAX_ATTEMPTS, QuickObjects, aws_session

_S3_SECONDS = 120  # completing a large upload takes the store a while


def export_limits(settings: Settings) -> Limits:
    """What this deployment allows."""
    return Limits(
        max_chunks=settings.exports_max_chunks,
        max_attempts=settings.exports_max_attempts,
        reuse_window_days=settings.exports_reuse_window_days,
        private_webhooks=settings.exports_private_webhooks,
        requests_per_minute=settings.exports_requests_per_minute,
    )


def export_place(settings: Settings) -> Place:
    """Where this deployment puts files."""
    return Place(settings.exports_bucket, settings.exports_base_path)


def export_objects(settings: Settings) -> ObjectStore:
    """The bucket of the files."""
    return ObjectStore(s3_client(settings.aws_region), settings.exports_bucket)


def state_pool(settings: Settings, *, application_name: str, max_size: int = 4) -> Pool:
    """Connections to the state database, not yet open."""
    if settings.postgres_dsn is None:
        raise InvalidInput("LOCKSTEP_POSTGRES_DSN is not set.", next_step="start the stack, or set the address.")
    return pool(settings.postgres_dsn, application_name=application_name, max_size=max_size)


def s3_client(region: str) -> Any:
    """A client that hashes nothing by itself: every PUT carries our sha256, which the store checks.

    Signing the body and a second checksum would read every byte twice more on each side, a third of a PUT.
    """
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=_S3_SECONDS,
        retries={"total_max_attempts": MAX_ATTEMPTS, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version="s3v4",
        s3={"payload_signing_enabled": False},
        max_pool_connections=16,
    )
    session = aws_session(region)
    client = session.client("s3", config=config)
    return QuickObjects(client, region, session.get_credentials(), read_timeout=_S3_SECONDS)


@contextmanager
def open_worker(settings: Settings | None = None, *, pulse_seconds: float | None = None) -> Iterator[Worker]:
    """A worker with everything it needs: one source connection, two to the state, a heartbeat."""
    current = settings or load_settings()
    if current.source_dsn is None:
        raise InvalidInput("LOCKSTEP_SOURCE_DSN is not set.", next_step="start the stack, or set the address.")
    owner = f"{socket.gethostname()}:{os.getpid()}:{SystemIds().new_id()[-8:]}"
    limits = export_limits(current)
    source = SourceSession(
        on_connect(current.source_dsn, application_name="lockstep-export", statement_timeout=LONGEST_BUILD_SECONDS)
    )
    with state_pool(current, application_name="lockstep-export-worker", max_size=2) as state:
        claims = ClaimStore(state, owner=owner, limits=limits)
        pulse = Pulse(claims) if pulse_seconds is None else Pulse(claims, every=pulse_seconds)
        with pulse:
            yield Worker(claims, source, _warm_objects(current), pulse, place=export_place(current), limits=limits)
        source.close()


@lru_cache(maxsize=4)
def _client_of(process: int, region: str) -> Any:
    return s3_client(region)


def _warm_objects(settings: Settings) -> ObjectStore:
    # Building a client takes longer than a chunk. Spark keeps its Python workers, so they keep this too; the process
    # id keeps a forked child from using its parent's sockets.
    return ObjectStore(_client_of(os.getpid(), settings.aws_region), settings.exports_bucket)
