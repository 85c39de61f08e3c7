"""The relay service: takes outbox messages to SQS, DynamoDB and webhooks, for all pipelines.

What belongs here: the loop's process, its health and its metrics. What does not: order, retries and claims
(lockstep/kernel/relay.py). It has no routes of its own; N replicas share the lanes.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from anyio import to_thread
from fastapi import FastAPI

from lockstep.exports.clients import ClientStore
from lockstep.kernel.deliver import DynamoDeliverer, SqsDeliverer, WebhookDeliverer
from lockstep.kernel.errors import InvalidInput, Transient
from lockstep.kernel.logs import get_logger
from lockstep.kernel.metrics import LedgerGauges, RelayMetrics, lease_readings, outbox_readings
from lockstep.kernel.postgres import Pool, pool
from lockstep.kernel.relay import Relay
from lockstep.kernel.settings import Settings
from lockstep.ticks.silver.metrics import silver_readings
from lockstep.ticks.silver.queue import TickQueue
from resources.clients import aws_client
from services import shell
from services.checks import dynamodb_check, postgres_check, sqs_check
from services.webhooks import PublicOnly, sign_for

WORKERS = 4
WEBHOOK_SECONDS = 20.0  # well below the claim's ttl, so that a slow receiver cannot cause a second delivery

_log = get_logger("lockstep.relay")


def create_app(settings: Settings) -> FastAPI:
    """The service, not yet serving."""
    loop = RelayLoop(settings)
    app = shell.create_app(
        "relay",
        title="Lockstep relay",
        description="Delivers outbox messages, at least once and in order within each lane.",
        readiness_checks={
            "postgres": postgres_check(settings.postgres_dsn),
            "sqs": sqs_check(settings),
            "dynamodb": dynamodb_check(settings),
            "loop": loop.check,
        },
        lifespan=loop.lifespan,
    )
    return app


class RelayLoop:
    """The thread that delivers, and whether it still does."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._relay: Relay | None = None

    def check(self) -> None:
        """Raise if nothing is being delivered any more."""
        if not self._thread.is_alive():
            raise Transient("the delivery loop has ended.", next_step="see the log; restart the relay.")

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Deliver while the service serves; let the pass in progress end before it stops."""
        if self._settings.postgres_dsn is None:
            raise InvalidInput("LOCKSTEP_POSTGRES_DSN is not set.", next_step="start the stack, or set the address.")
        source = pool(self._settings.postgres_dsn, application_name="lockstep-relay", max_size=WORKERS + 1)
        guard = PublicOnly(private=self._settings.exports_private_webhooks)
        with source, httpx.Client(timeout=WEBHOOK_SECONDS, follow_redirects=False, transport=guard) as webhooks:
            self._relay = self._build(app, source, webhooks)
            self._thread.start()
            yield
            self._stop.set()
            await to_thread.run_sync(self._thread.join, WEBHOOK_SECONDS)

    def _build(self, app: FastAPI, source: Pool, webhooks: httpx.Client) -> Relay:
        registry, region = app.state.registry, self._settings.aws_region
        sqs = aws_client("sqs", region=region)
        silver = silver_readings(source, TickQueue(sqs), TickQueue.dead_letters(sqs))
        registry.register(LedgerGauges([*outbox_readings(source), *lease_readings(source), *silver]))
        return Relay(
            source,
            {
                "sqs": SqsDeliverer(sqs),
                "dynamodb": DynamoDeliverer(aws_client("dynamodb", region=region)),
                "webhook": WebhookDeliverer(webhooks, sign=sign_for(ClientStore(source))),
            },
            workers=WORKERS,
            observe=RelayMetrics(registry).observe,
        )

    def _run(self) -> None:
        if self._relay is None:
            return
        try:
            self._relay.run_forever(self._stop)
        except Exception:
            _log.exception("the delivery loop ended with an unexpected error")
