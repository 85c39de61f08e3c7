"""The exports service: HTTP door of the export pipeline. So far it has the shell's doors only.

What belongs here: routes and their request and answer models. What does not: rules and stores (lockstep/).
"""

from __future__ import annotations

from fastapi import FastAPI

from lockstep.kernel.settings import Settings
from services import shell
from services.checks import postgres_check, s3_check, sqs_check


def create_app(settings: Settings) -> FastAPI:
    """The service, not yet serving."""
    return shell.create_app(
        "exports",
        title="Lockstep exports",
        description="Export jobs. Health and metrics so far; the pipeline brings its routes.",
        readiness_checks={
            "postgres": postgres_check(settings.postgres_dsn),
            "sqs": sqs_check(settings),
            "s3": s3_check(settings),
        },
    )
