"""The vault simulator: HTTP door of a stand-in for the vendor. So far it has the shell's doors only.

What belongs here: routes and their request and answer models. What does not: the client of a vault.
"""

from __future__ import annotations

from fastapi import FastAPI

from lockstep.kernel.settings import Settings
from services import shell


def create_app(settings: Settings) -> FastAPI:
    """The service, not yet serving. It depends on nothing, so the settings tell it nothing yet."""
    return shell.create_app(
        "vault",
        title="Lockstep vault simulator",
        description="The vendor's stand-in. Health and metrics so far; the pipeline brings its routes.",
        readiness_checks={},
    )
