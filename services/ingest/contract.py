"""The words of the ingest API: schemas, examples, problem types, and the parts of OpenAPI that types cannot say.

What belongs here: what agents may rely on. What does not: answering requests (routes.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi_problem.error import Problem
from fastapi_problem.handler import ExceptionHandler, Handler
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from lockstep.kernel.errors import LockstepError, LostClaim, Terminal, Transient
from lockstep.ticks import rules
from lockstep.ticks.errors import (
    InFlight,
    NoSuch,
    NotCurrent,
    NotYet,
    OverLimit,
    OverQuota,
    PartConflict,
    PartsMissing,
    TickClosed,
)
from lockstep.ticks.model import SCHEMA_VERSION
from lockstep.ticks.rules import InvalidManifest
from services.openapi import PROBLEM_CONTENT, ProblemView, complete_openapi, header
from services.problems import platform_fault, status_name

DESCRIPTION = """
Ticks from on-prem agents. Put the parts of a tick, in any order and from any replica, then finalize it with its
manifest: 200 means committed, for ever. Every answer is final or says when to ask again; every call may be repeated.
Send the organisation in `X-Api-Key` and the project's secret in `X-Api-Secret`. Errors are RFC 9457 problems.
"""
EXAMPLE_TICK = "20260507T120000__abc"
EXAMPLE_PROJECT = "0192f0c4-7f3a-7c11-9d6e-0d5b8a3f4e21"

PROBLEM_TYPES: Final[dict[str, str]] = {
    "unauthorized": "`X-Api-Key` or `X-Api-Secret` is missing, wrong, expired or revoked.",
    "project-not-found": "Your secret opens no such project.",
    "not-found": "There is no such tick, part or address.",
    "length-required": "A part needs `Content-Length`.",
    "content-too-large": "The body is larger than `GET /v1/limits` allows.",
    "tick-too-large": "The tick has as many parts or bytes as `GET /v1/limits` allows.",
    "empty-part": "A part has at least one byte.",
    "length-differs": "The body is longer or shorter than `Content-Length`. Nothing was stored.",
    "digest-unusable": "`X-Sha256` or `Content-Digest` is missing, malformed, or the two differ.",
    "digest-mismatch": "The body does not have the announced SHA-256. Nothing was stored; put it again.",
    "part-conflict": "Another file is stored under this number. Delete it, or replace it with `If-Match`.",
    "precondition-failed": "`If-Match` names other bytes than those that are stored.",
    "tick-committed": "The tick is committed: its parts do not change any more.",
    "parts-missing": "`missing` and `mismatched_sha` list the parts to put before finalizing again.",
    "invalid-manifest": "The tick cannot be committed like this: `error_class`, `message`. Do not repeat it unchanged.",
    "in-flight": "The tick, or another of the organisation, is being finalized. Ask again after `Retry-After`.",
    "previous-tick-missing": "The tick that this one follows (`waits_for`) is not committed yet.",
    "too-many-requests": "Too fast, or too much open at once. Ask again after `Retry-After`.",
    "too-slow": "The body came too slowly. Nothing was stored.",
    "invalid-input": "A part of the address or a header cannot be read. `errors` says which.",
    "transient": "A part that the service needs is away, or the tick's messages have not left. Repeat the same call.",
    "internal-error": "Something unexpected happened. Tell us the `traceId`.",
}


class View(BaseModel):
    """What every answer is."""

    model_config = ConfigDict(extra="forbid")


class PartView(View):
    """A part that is stored."""

    file_seq: int
    sha256: str
    bytes: int
    received_at: str
    already_present: bool = Field(description="True: an equal file was there before this call.")


class ReceivedView(View):
    """A part in the list of a tick."""

    sha256: str
    bytes: int
    received_at: str


class TickView(View):
    """Where a tick stands, and what it lacks."""

    tick_id: str
    project_id: str
    org_id: str
    state: str = Field(examples=["uploading"])
    parts_received: dict[str, ReceivedView]
    missing: list[int] = Field(description="Parts of the last posted manifest that are not there.")
    mismatched_sha: list[int] = Field(description="Parts that have other bytes than that manifest says.")
    result: dict[str, Any] | None = Field(description="The answer of the finalize, once committed.")
    error: dict[str, Any] | None = Field(description="Why the last finalize was refused.")
    sequence: int | None
    prev_tick_id: str | None
    created_at: str
    updated_at: str
    committed_at: str | None
    expires_at: str | None = Field(description="When the upload is forgotten unless somebody touches it.")


class FinalizeView(View):
    """The tick is committed. The same for every repetition."""

    tick_id: str
    status: str = Field(examples=["committed"])
    rows_inserted: int
    rows_replaced: int
    committed_at: str


class RemovedView(View):
    """What was removed."""

    removed: int


class StatusView(View):
    """A project: its ticks by state and the end of its chain."""

    project_id: str
    org_id: str
    ticks: dict[str, int]
    sequence: int
    head_tick_id: str | None
    oldest_open_at: str | None


class LimitsView(View):
    """What this deployment allows."""

    max_part_bytes: int
    max_manifest_bytes: int
    max_parts: int
    max_tables: int
    max_tick_bytes: int
    max_tick_rows: int
    max_uncompressed_bytes: int
    max_open_ticks: int
    max_open_bytes: int
    requests_per_second: float
    upload_days: float


class ProblemTypeView(View):
    """What a problem type means."""

    type: str
    meaning: str


class TickProblemView(ProblemView):
    """An RFC 9457 problem, with the fields of the original contract beside it where it has some."""

    model_config = ConfigDict(title="ProblemView")

    missing: list[int] | None = None
    mismatched_sha: list[int] | None = None
    error_class: str | None = None
    message: str | None = None


MANIFEST_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["schema_version", "org_id", "project_id", "tick_id", "mode", "dt", "tables"],
    "properties": {
        "schema_version": {"const": SCHEMA_VERSION},
        "org_id": {"type": "string", "pattern": f"^{rules.ORG_PATTERN}$"},
        "project_id": {"type": "string", "pattern": f"^{rules.PROJECT_PATTERN}$"},
        "tick_id": {"type": "string", "pattern": f"^{rules.TICK_PATTERN}$"},
        "prev_tick_id": {
            "type": ["string", "null"],
            "pattern": f"^{rules.TICK_PATTERN}$",
            "description": "The tick before this one; finalized before it is committed, this one gets 425.",
        },
        "mode": {"enum": ["delta", "full"]},
        "dt": {"type": "string", "pattern": "^[0-9]{8}$"},
        "tables": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "primary_key", "columns", "parquets"],
                "properties": {
                    "name": {"type": "string", "pattern": f"^{rules.TABLE_PATTERN}$"},
                    "primary_key": {"type": "array", "minItems": 1, "items": {"type": "string"}},
                    "deleted_column": {
                        "type": ["string", "null"],
                        "description": "A boolean column outside the key; a row where it is true deletes its key.",
                    },
                    "columns": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["name", "type"],
                            "properties": {
                                "name": {"type": "string", "pattern": f"^{rules.COLUMN_PATTERN}$"},
                                "type": {"type": "string", "examples": ["bigint", "string", "decimal(10,2)"]},
                            },
                        },
                    },
                    "parquets": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["file_seq", "sha256", "bytes", "rows"],
                            "properties": {
                                "file_seq": {"type": "integer", "minimum": 0, "maximum": 999_999},
                                "sha256": {"type": "string", "pattern": f"^{rules.SHA256_PATTERN}$"},
                                "bytes": {"type": "integer", "minimum": 0},
                                "rows": {"type": "integer", "minimum": 0},
                            },
                        },
                    },
                },
            },
        },
    },
    "example": {
        "schema_version": SCHEMA_VERSION,
        "org_id": "acme",
        "project_id": EXAMPLE_PROJECT,
        "tick_id": EXAMPLE_TICK,
        "mode": "delta",
        "dt": "20260507",
        "tables": [
            {
                "name": "orders",
                "primary_key": ["id"],
                "columns": [{"name": "id", "type": "bigint"}, {"name": "total", "type": "decimal(10,2)"}],
                "parquets": [{"file_seq": 0, "sha256": "0" * 64, "bytes": 5_000_000, "rows": 50_000}],
            }
        ],
    },
}


def problem(status: HTTPStatus, kind: str, title: str, detail: str, **more: Any) -> Problem:
    """A problem of this API."""
    return Problem(title, type_=kind, status=status, detail=detail, **more)


def _invalid_manifest(_: ExceptionHandler, __: Request, error: InvalidManifest) -> Problem:
    message = " ".join([error.what, *(f"[{one}]" for one in error.problems)])
    return problem(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "invalid-manifest",
        "The tick cannot be committed like this.",
        str(error.what),
        error_class=error.error_class,
        message=message,
        errors=[{"detail": one} for one in error.problems],
    )


def _parts_missing(_: ExceptionHandler, __: Request, error: PartsMissing) -> Problem:
    return problem(
        HTTPStatus.CONFLICT,
        "parts-missing",
        "Parts must be put first.",
        str(error),
        missing=list(error.difference.missing),
        mismatched_sha=list(error.difference.mismatched_sha),
    )


def _part_conflict(_: ExceptionHandler, __: Request, error: PartConflict) -> Problem:
    return problem(HTTPStatus.CONFLICT, "part-conflict", "Another file is there.", str(error), sha256=error.stored)


def _later(status: HTTPStatus, kind: str, title: str) -> Handler:
    def answer(_: ExceptionHandler, __: Request, error: Transient) -> Problem:
        seconds = 1.0 if error.retry_after is None else error.retry_after
        more = {"waits_for": error.waits_for} if isinstance(error, NotYet) else {}
        return problem(
            status, kind, title, str(error), headers={"Retry-After": str(max(1, math.ceil(seconds)))}, **more
        )

    return answer


def _plain(status: HTTPStatus, kind: str, title: str) -> Handler:
    def answer(_: ExceptionHandler, __: Request, error: LockstepError) -> Problem:
        return problem(status, kind, title, str(error))

    return answer


def _overtaken(_: ExceptionHandler, __: Request, error: LostClaim) -> Problem:
    # To an agent this is an answer that was not given: it asks again and gets the one of the newer attempt.
    return problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "transient",
        "Another attempt took over.",
        str(error),
        headers={"Retry-After": "2"},
    )


INGEST_PROBLEMS: Mapping[type[Exception], Handler] = {
    InvalidManifest: _invalid_manifest,
    PartsMissing: _parts_missing,
    PartConflict: _part_conflict,
    NotCurrent: _plain(HTTPStatus.PRECONDITION_FAILED, "precondition-failed", "Other bytes are stored."),
    TickClosed: _plain(HTTPStatus.CONFLICT, "tick-committed", "The tick is committed."),
    NoSuch: _plain(HTTPStatus.NOT_FOUND, "not-found", "There is none."),
    OverLimit: _plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "tick-too-large", "The tick is too large."),
    InFlight: _later(HTTPStatus.TOO_EARLY, "in-flight", "Being finalized."),
    NotYet: _later(HTTPStatus.TOO_EARLY, "previous-tick-missing", "Another tick comes first."),
    OverQuota: _later(HTTPStatus.TOO_MANY_REQUESTS, "too-many-requests", "Too much at once."),
    LostClaim: _overtaken,
    Terminal: platform_fault,
}

_RETRY = (HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def problems(*statuses: int, common: tuple[int, ...] = (401, 404, 422, 429, 503)) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: a problem for each of these statuses and for the common ones."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*statuses, *common}):
        answer: dict[str, Any] = {"description": status_name(status), "content": PROBLEM_CONTENT}
        if status in _RETRY:
            answer["headers"] = {"Retry-After": header("Seconds to wait.", "integer")}
        found[status] = answer
    return found


def describe(app: FastAPI) -> None:
    """Complete the OpenAPI document of the service."""
    complete_openapi(
        app,
        problem=TickProblemView,
        schemas={"Manifest": MANIFEST_SCHEMA},
        not_ready=problems()[503],
        polish=_spell_headers,
    )


_DIGESTS: Final = {
    "X-Sha256": f"^{rules.SHA256_PATTERN}$",
    "Content-Digest": "^sha-256=:[A-Za-z0-9+/]{43}=:$",
}


def _spell_headers(operation: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", ()):
        _spell_header(parameter)


def _spell_header(parameter: dict[str, Any]) -> None:
    """A header is there or it is not: it is never null, whatever the framework makes of an optional one."""
    choices = [one for one in parameter["schema"].get("anyOf", ()) if one.get("type") != "null"]
    if choices:
        parameter["schema"] = {**choices[0], "title": parameter["name"]}
    if parameter["name"] in _DIGESTS:
        parameter["schema"]["pattern"] = _DIGESTS[parameter["name"]]
