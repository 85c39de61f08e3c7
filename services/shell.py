"""What every HTTP service has before its first route: health, readiness, metrics, problems, traces, limits.

What belongs here: the doors that do not depend on what a service does. What does not: routes of a pipeline,
and how a service is started (run.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi_problem.error import Problem
from fastapi_problem.handler import Handler
from starlette.responses import Response
from starlette.types import Lifespan

from lockstep.kernel.logs import get_logger
from lockstep.kernel.metrics import HttpMetrics, exposition, new_registry
from services.checks import Check
from services.middleware import BodyLimit, TraceAndLog
from services.problems import install_problems

MAX_BODY_BYTES = 1024 * 1024
CHECK_TIMEOUT_SECONDS = 4.0

_log = get_logger("lockstep.readiness_checks")


def create_app(
    name: str,
    *,
    title: str,
    description: str,
    readiness_checks: Mapping[str, Check],
    lifespan: Lifespan[FastAPI] | None = None,
    problems: Mapping[type[Exception], Handler] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    check_timeout: float = CHECK_TIMEOUT_SECONDS,
) -> FastAPI:
    """Build the shell of one service; the service adds its routes, and its metrics to `app.state.registry`.

    Args:
        name: Short name, as `lockstep serve` and the logs know it.
        title: Name for people, in the OpenAPI document.
        description: What the service is for.
        readiness_checks: What must work before traffic may come, by the name that `/readyz` shows.
        lifespan: Opens and closes what the routes need.
        problems: The service's own errors and their problems, tried before the common ones.
        max_body_bytes: Largest accepted body.
        check_timeout: Seconds after which a check counts as failed.
    """
    app = FastAPI(title=title, description=description, version="1", lifespan=lifespan)
    app.state.name, app.state.registry = name, new_registry()
    handler = install_problems(app, problems)
    # The last one added is the outermost: the limit's refusal must pass through the log and become a problem.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(TraceAndLog, metrics=HttpMetrics(app.state.registry), on_error=handler)
    _add_doors(app, {key: _SingleFlight(check) for key, check in readiness_checks.items()}, check_timeout)
    return app


def _add_doors(app: FastAPI, checks: Mapping[str, _SingleFlight], check_timeout: float) -> None:
    @app.get("/healthz", tags=["operations"], summary="Is the process alive")
    async def healthz() -> dict[str, str]:
        """Touches no dependency: a database that is down is no reason to restart this process."""
        return {"status": "alive"}

    @app.get("/readyz", tags=["operations"], summary="May traffic come")
    async def readyz() -> dict[str, Any]:
        """Asks every dependency at the same time; the answer names those that do not work."""
        names = list(checks)
        works = await asyncio.gather(*(_works(key, checks[key], check_timeout) for key in names))
        missing = [key for key, ok in zip(names, works, strict=True) if not ok]
        if missing:
            raise _not_ready(missing)
        return {"status": "ready", "checks": names}

    @app.get("/metrics", tags=["operations"], summary="Prometheus metrics", response_class=Response)
    def metrics() -> Response:
        """Counters of this process and gauges read from the ledgers; in a thread, because reading may wait."""
        body, media_type = exposition(app.state.registry)
        return Response(body, media_type=media_type)


def _not_ready(missing: list[str]) -> Problem:
    return Problem(
        "Not ready.",
        type_="not-ready",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        detail=f"Not working: {', '.join(missing)}.",
        headers={"Retry-After": "5"},
        missing=missing,
    )


async def _works(name: str, check: _SingleFlight, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await to_thread.run_sync(check, abandon_on_cancel=True)
    except Exception as error:  # whatever a driver raises, the answer is the same; the cause goes to the log
        _log.warning("readiness check failed", check=name, cause=type(error).__name__, detail=str(error))
        return False
    return True


class _SingleFlight:
    """Runs a check at most once at a time: a hanging part must not collect one waiting thread per probe."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._busy = threading.Lock()

    def __call__(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise TimeoutError("the check before this one has not returned")
        try:
            self._check()
        finally:
            self._busy.release()
