"""The readiness service: HTTP door of the readiness control plane. So far it has the shell's doors only.

What belongs here: routes and their request and answer models. What does not: rules and stores (lockstep/).
"""

from __future__ import annotations

from fastapi import FastAPI

from lockstep.kernel.settings import Settings
from services import shell
from services.checks import dynamodb_check


def create_app(settings: Settings) -> FastAPI:
    """The service, not yet serving."""
    return shell.create_app(
        "readiness",
        title="Lockstep readiness",
        description="When pipelines may run. Health and metrics so far; the pipeline brings its routes.",
        readiness_checks={"dynamodb": dynamodb_check(settings)},
    )
