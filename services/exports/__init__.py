"""The exports service: HTTP door of the export pipeline.

What belongs here: assembling the service. What does not: its routes (routes.py), the words of its contract
(contract.py), rules and stores (lockstep/exports/).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Depends, FastAPI

from lockstep.exports.clients import ClientStore
from lockstep.exports.model import Limits
from lockstep.exports.sink import ObjectStore
from lockstep.exports.store import JobStore
from lockstep.kernel.budget import BudgetStore
from lockstep.kernel.metrics import LedgerGauges
from lockstep.kernel.settings import Settings
from resources.exports import export_limits, export_objects, export_place, state_pool
from services import shell
from services.allow import TrueAllow
from services.checks import postgres_check, s3_check, sqs_check
from services.exports.budget import WINDOW_SECONDS, TellBudget
from services.exports.contract import DESCRIPTION, EXPORT_PROBLEMS, describe
from services.exports.metrics import export_readings
from services.exports.routes import router
from services.queries import refuse_unknown_queries

CONNECTIONS = 8


@dataclass(frozen=True)
class Doors:
    """What the routes use while the service runs."""

    clients: ClientStore
    budgets: BudgetStore
    jobs: JobStore
    objects: ObjectStore
    limits: Limits


def create_app(settings: Settings) -> FastAPI:
    """The service, not yet serving."""
    limits = export_limits(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.doors = None
        if settings.postgres_dsn is None:  # alive, not ready, and every route says so
            yield
            return
        with state_pool(settings, application_name="lockstep-exports", max_size=CONNECTIONS) as state:
            app.state.doors = Doors(
                clients=ClientStore(state),
                budgets=BudgetStore(
                    state,
                    limit=limits.requests_per_minute,
                    per_second=limits.requests_per_minute / WINDOW_SECONDS,
                ),
                jobs=JobStore(state, place=export_place(settings), limits=limits),
                objects=export_objects(settings),
                limits=limits,
            )
            gauges = LedgerGauges(export_readings(state))
            app.state.registry.register(gauges)
            yield
            app.state.registry.unregister(gauges)

    app = shell.create_app(
        "exports",
        title="Lockstep exports",
        description=DESCRIPTION,
        readiness_checks={
            "postgres": postgres_check(settings.postgres_dsn),
            "sqs": sqs_check(settings),
            "s3": s3_check(settings, settings.exports_bucket),
        },
        lifespan=lifespan,
        problems=EXPORT_PROBLEMS,
        max_body_bytes=limits.max_body_bytes,
    )
    app.include_router(router, dependencies=[Depends(refuse_unknown_queries)])
    app.add_middleware(TellBudget)
    app.add_middleware(TrueAllow, routes=[*router.routes, *app.router.routes])
    describe(app)
    return app
