"""The readiness service: HTTP door of the readiness plane, and the process in which its watchdog runs.

What belongs here: routes, their models, the key, the watchdog's thread. What does not: rules and stores (lockstep/).
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import date, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.security import APIKeyHeader
from fastapi_problem.error import Problem
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic.alias_generators import to_camel

from lockstep.kernel.errors import LockstepError
from lockstep.kernel.logs import get_logger
from lockstep.kernel.settings import Settings
from lockstep.readiness import codec
from lockstep.readiness.control import NotFound, NotReady
from lockstep.readiness.explain import explain
from lockstep.readiness.model import Category, Execution, IllegalTransition, Key, Plan, Reason, TraitStatus
from resources.readiness import Deployment, build_deployment
from services import shell
from services.checks import dynamodb_check

WATCHDOG_SECONDS = 60.0

_log = get_logger("lockstep.watchdog")
_key = APIKeyHeader(name="X-API-Key", auto_error=False, description="The deployment's key.")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class RunBody(_Body):
    """Which execution; without a date, the one that is due now."""

    date_: date | None = Field(default=None, alias="date")
    schedule_id: str | None = None


class RerunBody(_Body):
    """Which execution to run once more, and why."""

    original_date: date
    reason: str = Field(min_length=1, max_length=500)
    kind: Literal["manual", "replay"] = "manual"
    schedule_id: str | None = None
    rerun_id: str | None = Field(default=None, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")


class BackfillBody(_Body):
    """A range of past dates."""

    first: date
    last: date
    reason: str = Field(min_length=1, max_length=500)
    schedule_id: str | None = None


class CancelBody(_Body):
    """Which execution to stop, and why."""

    date_: date = Field(alias="date")
    schedule_id: str | None = None
    reason: str = Field(min_length=1, max_length=500)


class CompleteBody(_Body):
    """A job's own report of its end."""

    status: Literal["success", "failed"]
    message: str = Field(default="", max_length=500)
    failure_category: Category | None = None


class PushBody(_Body):
    """A trait's answer from outside. Without a date it holds for every execution until it expires."""

    status: Literal["PASS", "FAIL"]
    value: dict[str, Any] = {}
    reason: str = Field(default="", max_length=500)
    ttl: int = Field(default=3600, ge=1, le=30 * 24 * 3600, description="Seconds until it expires.")
    date_: date | None = Field(default=None, alias="date")
    schedule_id: str | None = None


def create_app(settings: Settings, *, deployment: Deployment | None = None, watch: bool = True) -> FastAPI:
    """The service, not yet serving. `deployment` replaces the one of the settings, for tests."""
    deployment = deployment or build_deployment(settings)
    app = shell.create_app(
        "readiness",
        title="Lockstep readiness",
        description="When pipelines may run, what stands in the way, and what happened to them.",
        readiness_checks={"dynamodb": dynamodb_check(settings)},
        lifespan=_watching(deployment) if watch else None,
        problems={IllegalTransition: _conflict, NotReady: _not_ready, NotFound: _not_found},
    )
    allow = _guard(settings.readiness_api_key)
    app.include_router(_health())
    app.include_router(_pipelines(deployment), dependencies=[Depends(allow)])
    app.include_router(_requests(deployment), dependencies=[Depends(allow)])
    app.include_router(_ledger(deployment), dependencies=[Depends(allow)])
    return app


def _watching(deployment: Deployment) -> Callable[[FastAPI], Any]:
    """The watchdog's own clock: a thread of this process, which is not the one that drives pipelines."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        stop = threading.Event()

        def watch() -> None:
            synced = False
            while not stop.wait(1.0 if not synced else WATCHDOG_SECONDS):
                try:
                    if not synced:
                        deployment.catalogue.sync()
                        synced = True
                    deployment.watchdog.check()
                except LockstepError as error:  # the table is away: said in the log, tried again
                    _log.error("watchdog round failed", error=str(error))

        thread = threading.Thread(target=watch, name="watchdog", daemon=True)
        thread.start()
        yield
        stop.set()
        thread.join(timeout=5)

    return lifespan


def _guard(expected: SecretStr | None) -> Callable[..., None]:
    def allow(request: Request, given: Annotated[str | None, Depends(_key)] = None) -> None:
        if expected is None:
            if request.method != "GET":
                raise Problem(
                    "Only reading is allowed.",
                    type_="forbidden",
                    status=HTTPStatus.FORBIDDEN,
                    detail="Set LOCKSTEP_READINESS_API_KEY to allow changes through this service.",
                )
            return
        # Compared in constant time, as bytes: a header may hold any character.
        if given is None or not hmac.compare_digest(given.encode(), expected.get_secret_value().encode()):
            raise Problem("The key is missing or wrong.", type_="unauthorized", status=HTTPStatus.UNAUTHORIZED)

    return allow


def _health() -> APIRouter:
    router = APIRouter(prefix="/api", tags=["operations"])

    @router.get("/health", summary="Is the service alive")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return router


def _pipelines(deployment: Deployment) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["pipelines"])
    control = deployment.control

    @router.get("/pipelines", summary="All pipelines")
    def pipelines() -> list[dict[str, Any]]:
        return [_plan(plan) for _, plan in sorted(deployment.catalogue.plans().items())]

    @router.post("/pipelines", status_code=HTTPStatus.CREATED, summary="Register a pipeline")
    def register(body: dict[str, Any]) -> dict[str, Any]:
        return _plan(deployment.catalogue.register(body))

    @router.get("/pipelines/{pipeline}", summary="One pipeline")
    def pipeline(pipeline: str) -> dict[str, Any]:
        return _plan(control.plan(pipeline))

    @router.delete("/pipelines/{pipeline}", status_code=HTTPStatus.NO_CONTENT, summary="Remove a pipeline")
    def unregister(pipeline: str) -> None:
        control.plan(pipeline)
        deployment.catalogue.unregister(pipeline)

    @router.get("/pipelines/{pipeline}/readiness", summary="The verdict over stored answers")
    def readiness(pipeline: str, day: _Day = None, schedule: _Schedule = None) -> dict[str, Any]:
        key = control.key(pipeline, day, schedule)
        return {**_named(key), **(codec.encode_readiness(control.check(key)) or {})}

    @router.get("/pipelines/{pipeline}/explain", summary="Why it is not running, in words")
    def explained(pipeline: str, day: _Day = None, schedule: _Schedule = None) -> dict[str, Any]:
        key = control.key(pipeline, day, schedule)
        lines = explain(control.plan(pipeline), key, control.execution(key), control.now())
        return {**_named(key), "explanation": lines}

    @router.get("/pipelines/{pipeline}/traits", summary="Stored answers that have not expired")
    def traits(pipeline: str) -> list[dict[str, Any]]:
        control.plan(pipeline)
        return deployment.store.all_traits(pipeline, control.now())

    @router.get("/pipelines/{pipeline}/traits/{trait}", summary="Stored answers of one trait")
    def trait(pipeline: str, trait: str) -> list[dict[str, Any]]:
        control.plan(pipeline)
        return [one for one in deployment.store.all_traits(pipeline, control.now()) if one["trait"] == trait]

    return router


def _requests(deployment: Deployment) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["requests"])
    control = deployment.control

    @router.post("/pipelines/{pipeline}/evaluate", summary="Ask every evaluator now")
    def evaluate(pipeline: str, body: RunBody | None = None) -> dict[str, Any]:
        key = _execution_key(control, pipeline, body or RunBody())
        return {**_named(key), **(codec.encode_readiness(control.evaluate(key)) or {})}

    @router.post("/pipelines/{pipeline}/run", status_code=HTTPStatus.ACCEPTED, summary="Start it if it is ready")
    def run(pipeline: str, body: RunBody | None = None) -> dict[str, Any]:
        """202 with the execution, 412 with what blocks it (it then runs when ready), 409 if it ran already."""
        return _shown(control.run(_execution_key(control, pipeline, body or RunBody())))

    @router.post("/pipelines/{pipeline}/rerun", status_code=HTTPStatus.ACCEPTED, summary="Run once more")
    def rerun(pipeline: str, body: RerunBody) -> dict[str, Any]:
        """202 with the execution, 412 if it waits to be ready, 409 if one is live or the budget is used up."""
        key = control.key(pipeline, body.original_date, body.schedule_id)
        return _shown(control.rerun(key, Reason(body.kind), body.reason, body.rerun_id))

    @router.post("/pipelines/{pipeline}/backfill", status_code=HTTPStatus.ACCEPTED, summary="Open past dates")
    def backfill(pipeline: str, body: BackfillBody) -> dict[str, Any]:
        done = control.backfill(pipeline, body.first, body.last, body.schedule_id, body.reason)
        return {"opened": [_named(key) for key in done.opened], "skipped": done.skipped}

    @router.post("/pipelines/{pipeline}/cancel", status_code=HTTPStatus.ACCEPTED, summary="Stop an execution")
    def cancel(pipeline: str, body: CancelBody) -> dict[str, Any]:
        return _shown(control.cancel(control.key(pipeline, body.date_, body.schedule_id), body.reason))

    @router.post("/runs/{run_id}/complete", summary="A job reports its end")
    def complete(run_id: str, body: CompleteBody) -> dict[str, Any]:
        success = body.status == "success"
        return _shown(control.complete(run_id, success=success, message=body.message, category=body.failure_category))

    @router.post("/pipelines/{pipeline}/traits/{trait}", status_code=HTTPStatus.CREATED, summary="Push an answer")
    def push(pipeline: str, trait: str, body: PushBody) -> dict[str, Any]:
        dated = body.date_ is not None or body.schedule_id is not None
        result = control.push(
            pipeline,
            trait,
            TraitStatus(body.status),
            value=body.value,
            reason=body.reason,
            ttl=timedelta(seconds=body.ttl),
            key=control.key(pipeline, body.date_, body.schedule_id) if dated else None,
        )
        return codec.encode_result(result)

    return router


def _ledger(deployment: Deployment) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["ledger"])
    store, control = deployment.store, deployment.control

    @router.get("/pipelines/{pipeline}/runs", summary="Runs, latest first")
    def runs(pipeline: str, limit: Annotated[int, Query(ge=1, le=500)] = 50) -> list[dict[str, Any]]:
        control.plan(pipeline)
        return store.runs(pipeline, control.now(), limit=limit)

    @router.get("/runs/{run_id}", summary="One run")
    def run(run_id: str) -> dict[str, Any]:
        found = store.run(run_id, control.now())
        if found is None:
            raise NotFound("there is no such run.", unit=run_id)
        return found

    @router.get("/pipelines/{pipeline}/runlogs", summary="Executions, latest date first")
    def runlogs(pipeline: str, limit: Annotated[int, Query(ge=1, le=500)] = 50) -> list[dict[str, Any]]:
        control.plan(pipeline)
        return store.executions(pipeline, control.now(), limit=limit)

    @router.get("/pipelines/{pipeline}/runlogs/{day}", summary="One execution")
    def runlog(pipeline: str, day: date, schedule: _Schedule = None) -> dict[str, Any]:
        key = control.key(pipeline, day, schedule)
        state = control.execution(key)
        if state is None:
            raise NotFound("there is no such execution.", unit=str(key))
        return _shown(state)

    @router.get("/pipelines/{pipeline}/events", summary="The event log, newest first")
    def events(pipeline: str, limit: Annotated[int, Query(ge=1, le=500)] = 100) -> list[dict[str, Any]]:
        return store.events(pipeline, control.now(), limit=limit)

    @router.get("/pipelines/{pipeline}/reruns", summary="Reruns of one pipeline")
    def reruns_of(pipeline: str, limit: Annotated[int, Query(ge=1, le=200)] = 50) -> list[dict[str, Any]]:
        return store.reruns(control.now(), pipeline, limit=limit)

    @router.get("/reruns", summary="Reruns of all pipelines")
    def reruns(limit: Annotated[int, Query(ge=1, le=500)] = 50) -> list[dict[str, Any]]:
        return store.reruns(control.now(), limit=limit)

    return router


_Day = Annotated[date | None, Query(alias="date")]
_Schedule = Annotated[str | None, Query(alias="schedule")]


def _execution_key(control: Any, pipeline: str, body: RunBody) -> Key:
    key: Key = control.key(pipeline, body.date_, body.schedule_id)
    return key


def _named(key: Key) -> dict[str, str]:
    return {"pipelineId": key.pipeline, "date": key.date.isoformat(), "scheduleId": key.schedule}


def _shown(state: Execution) -> dict[str, Any]:
    return {**codec.encode_execution(state), "version": state.version}


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.pipeline,
        "archetype": plan.archetype,
        "tier": plan.tier,
        "owner": plan.owner,
        "trigger": plan.trigger.type if plan.trigger else None,
        "traits": [
            {"type": trait.type, "required": trait.required, "ttl": trait.ttl, "timeout": trait.timeout}
            for trait in plan.traits
        ],
        "schedules": [schedule._asdict() for schedule in plan.schedules],
        "downstream": list(plan.downstream),
        "watched": plan.watched,
        "dryRun": plan.dry_run,
    }


def _conflict(_: Any, __: Request, error: IllegalTransition) -> Problem:
    return Problem("That does not fit its state.", type_="conflict", status=HTTPStatus.CONFLICT, detail=str(error))


def _not_found(_: Any, __: Request, error: NotFound) -> Problem:
    return Problem("There is no such thing.", type_="not-found", status=HTTPStatus.NOT_FOUND, detail=str(error))


def _not_ready(_: Any, __: Request, error: NotReady) -> Problem:
    return Problem(
        "Not ready.",
        type_="not-ready",
        status=HTTPStatus.PRECONDITION_FAILED,
        detail=str(error),
        blocking=list(error.blocking),
        execution=_shown(error.state),
    )
