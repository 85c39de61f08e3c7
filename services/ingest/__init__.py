"""The ingest service: HTTP door of the tick pipeline. Stateless: any number of replicas, any of them for any request.

What belongs here: assembling the service. What does not: its routes (routes.py), the words of its contract
(contract.py), rules and stores (lockstep/ticks/).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from anyio import CapacityLimiter
from fastapi import FastAPI

from lockstep.kernel.budget import BudgetStore
from lockstep.kernel.metrics import LedgerGauges
from lockstep.kernel.settings import Settings
from lockstep.ticks.model import Limits
from lockstep.ticks.parts import PartObjects
from lockstep.ticks.projects import ProjectStore
from lockstep.ticks.store import TickStore
from lockstep.ticks.worker import Committer
from resources.exports import state_pool
from resources.ticks import WarmSpark, open_plant, project_store, tick_limits
from services import shell
from services.allow import TrueAllow
from services.checks import dynamodb_check, postgres_check, s3_check, spark_check, sqs_check
from services.ingest.contract import DESCRIPTION, INGEST_PROBLEMS, describe
from services.ingest.drain import background, noticing_signals
from services.ingest.metrics import IngestMetrics, ingest_readings
from services.ingest.routes import router
from services.ingest.turns import Turns

CONNECTIONS = 16
PART_THREADS = 8
COMMIT_THREADS = 64  # most of them wait for lanes; how many write at once is the committer's own limit


@dataclass(frozen=True)
class Doors:
    """What the routes use while the service runs."""

    projects: ProjectStore
    store: TickStore
    parts: PartObjects
    committer: Committer
    limits: Limits
    budgets: BudgetStore
    turns: Turns
    metrics: IngestMetrics
    stopping: threading.Event
    part_threads: CapacityLimiter
    commit_threads: CapacityLimiter


def create_app(settings: Settings) -> FastAPI:
    """The service, not yet serving."""
    limits = tick_limits(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.doors = None
        if settings.postgres_dsn is None:  # alive, not ready, and every route says so
            yield
            return
        stopping, spark = threading.Event(), WarmSpark(settings.spark_remote)
        with ExitStack() as closing:
            closing.callback(spark.close)
            state = closing.enter_context(
                state_pool(settings, application_name="lockstep-ingest", max_size=CONNECTIONS)
            )
            plant = closing.enter_context(open_plant(settings, state, spark))
            committer = Committer(
                plant,
                observe=app.state.ingest_metrics.phase,
                stopping=stopping,
                parallel=settings.ticks_parallel_commits,
            )
            app.state.doors = Doors(
                projects=project_store(settings, state),
                store=plant.store,
                parts=plant.parts,
                committer=committer,
                limits=limits,
                budgets=BudgetStore(state, limit=limits.request_burst, per_second=limits.requests_per_second),
                turns=Turns(limits.lane_wait_seconds),
                metrics=app.state.ingest_metrics,
                stopping=stopping,
                part_threads=CapacityLimiter(PART_THREADS),
                commit_threads=CapacityLimiter(COMMIT_THREADS),
            )
            gauges = LedgerGauges(ingest_readings(state))
            app.state.registry.register(gauges)
            closing.callback(app.state.registry.unregister, gauges)
            closing.enter_context(background(committer, spark, stopping))
            closing.enter_context(noticing_signals(stopping))
            yield

    app = shell.create_app(
        "ingest",
        title="Lockstep ingest",
        description=DESCRIPTION,
        readiness_checks={
            "postgres": postgres_check(settings.postgres_dsn),
            "s3": s3_check(settings, settings.ticks_bucket, settings.lake_bucket),
            "sqs": sqs_check(settings),
            "dynamodb": dynamodb_check(settings),
            "spark": spark_check(settings.spark_remote),
        },
        lifespan=lifespan,
        problems=INGEST_PROBLEMS,
        max_body_bytes=sys.maxsize,  # parts and manifests have limits of their own, with answers of their own
    )
    app.state.ingest_metrics = IngestMetrics(app.state.registry)
    app.include_router(router)
    app.add_middleware(TrueAllow, routes=[*router.routes, *app.router.routes])
    describe(app)
    return app
