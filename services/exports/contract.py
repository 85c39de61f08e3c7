"""The words of the exports API: schemas, examples, problem types, and the parts of OpenAPI that types cannot say.

What belongs here: what clients may rely on. What does not: answering requests (routes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi_problem.error import Problem
from fastapi_problem.handler import ExceptionHandler, Handler
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.requests import Request

from lockstep.exports import rules
from lockstep.exports.model import Format, FormulaGuard
from lockstep.exports.store import KeyInFlight, KeyReused, NotFound, WrongState
from lockstep.kernel.errors import Terminal
from services.openapi import PROBLEM_CONTENT, ProblemView, complete_openapi, header
from services.problems import platform_fault, status_name

EXAMPLE_ID = "J20260102_000123"
_WEBHOOK_PATTERN = (
    r"^https://(?:[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?\.){1,5}[a-z]{2,20}(?::[1-9][0-9]{0,3})?"
    r"(?:/[A-Za-z0-9._~/-]{0,1000})?(?:\?[A-Za-z0-9._~=&-]{0,500})?$"
)

PROBLEM_TYPES: Final[dict[str, str]] = {
    "invalid-submission": "The request breaks rules. `errors` lists every place with a JSON pointer.",
    "too-many-chunks": "The request expands to more chunks than `GET /limits` allows. Split it into several jobs.",
    "invalid-input": "A parameter or the JSON itself cannot be read. `errors` says where.",
    "unauthorized": "`X-Api-Key` is missing, wrong or revoked.",
    "job-not-found": "You have no job with this id.",
    "file-not-found": "The job has no such chunk, or its file is not there yet.",
    "file-superseded": "A later job made this file anew. Submit a job for the pair to get its current bytes.",
    "wrong-state": "The job is in a state in which this cannot be done.",
    "idempotency-key-reused": "This `Idempotency-Key` belongs to another body. Use a new key.",
    "idempotency-key-in-flight": "The first request with this key is still being answered. Repeat after `Retry-After`.",
    "unsupported-media-type": "The body must be `application/json`.",
    "content-too-large": "The body is larger than `GET /limits` allows.",
    "too-many-requests": "You sent more requests than `GET /limits` allows. Repeat after `Retry-After`.",
    "not-found": "There is nothing at this address. `GET /openapi.json` lists every address.",
    "method-not-allowed": "The address does not know this method; `Allow` names those that it knows.",
    "not-ready": "`GET /readyz`: a part that the service needs does not work; `missing` names it.",
    "transient": (
        "A part that the service needs is away or set up wrongly; nothing is wrong with your request. Repeat it after "
        "`Retry-After`, with the same `Idempotency-Key`."
    ),
    "internal-error": (
        "Something unexpected happened. You may repeat the request, with the same `Idempotency-Key`; if it stays, tell "
        "us the `traceId`."
    ),
}

DESCRIPTION = (
    """
Asynchronous exports: one request for many keys and dates, one file per pair. Submit a job, poll it (or take a webhook),
read its manifest, download the files. Send your key in `X-Api-Key`. Errors are RFC 9457 problems; every `type` is
explained at its own address:

"""
    + "\n".join(f"- `/problems/{name}`: {meaning}" for name, meaning in PROBLEM_TYPES.items())
    + "\n"
)


class View(BaseModel):
    """What every answer is: camelCase outside, snake_case inside."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class AcceptedView(View):
    """The answer to a submission."""

    job_id: str = Field(pattern=f"^{rules.JOB_ID_PATTERN}$", examples=[EXAMPLE_ID])
    status: str = Field(examples=["SUBMITTED"])
    total: int
    duplicates_removed: int


class PlanView(View):
    """The answer to `validateOnly=true`: nothing was made."""

    valid: bool
    total: int
    duplicates_removed: int
    reusable: int
    to_generate: int


class JobView(View):
    """One job."""

    job_id: str = Field(pattern=f"^{rules.JOB_ID_PATTERN}$", examples=[EXAMPLE_ID])
    status: str = Field(examples=["IN_PROGRESS"])
    total: int
    pending: int
    running: int
    done: int
    failed: int
    files_generated: int
    files_reused: int
    s3_base_path: str = Field(examples=["s3://lockstep-exports/exports/"])
    error_message: str | None
    percent: int = Field(ge=0, le=100)
    rows: int
    bytes: int
    eta_seconds: int | None
    format: str
    formula_guard: str
    cancel_requested: bool
    duplicates_removed: int
    as_of: str
    created_at: str
    updated_at: str
    started_at: str | None
    completed_at: str | None


class JobsView(View):
    """One page of jobs, the newest first."""

    jobs: list[JobView]
    next_cursor: str | None


class ChunkView(View):
    """One chunk."""

    key: str
    effective_date: str
    status: str
    attempts: int
    reused: bool
    rows: int | None
    bytes: int | None
    rows_so_far: int
    started_at: str | None
    completed_at: str | None
    error_message: str | None


class ChunksView(View):
    """One page of chunks."""

    chunks: list[ChunkView]
    next_cursor: str | None


class ColumnView(View):
    """One column of a file."""

    name: str
    type: str


class FileView(View):
    """One file: enough to fetch it and to prove it."""

    key: str
    date: str
    object_key: str
    url: str | None = Field(description="Readable without a key until `urlExpiresAt`; null once superseded.")
    url_expires_at: str | None
    superseded: bool
    sha256: str
    bytes: int
    rows: int
    columns: list[ColumnView]
    as_of: str
    generation: int
    reused: bool


class ManifestView(View):
    """The files of a job that are there; `complete` when that is all of them."""

    job_id: str
    status: str
    complete: bool
    total: int
    done: int
    failed: int
    format: str
    formula_guard: str
    dialect: dict[str, Any] | None
    files: list[FileView]
    next_cursor: str | None


class LimitsView(View):
    """What this deployment allows."""

    max_chunks: int
    max_body_bytes: int
    max_attempts: int
    max_page_size: int
    reuse_window_days: int
    formats: list[str]
    formula_guards: list[str]
    key_pattern: str
    idempotency_hours: int
    download_seconds: int
    requests_per_minute: int
    longest_wait_seconds: int


class SecretView(View):
    """The key that signs your webhooks (Standard Webhooks, `v1`)."""

    secret: str


class ProblemTypeView(View):
    """What a problem type means."""

    type: str
    meaning: str


def _output_schema(formats: list[str], guards: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "format": {"enum": ["CSV", *formats], "default": "CSV"},
            "formulaGuard": {
                "enum": guards,
                "default": "none",
                "description": "`quote` puts an apostrophe before text that a spreadsheet would execute.",
            },
        },
    }


SUBMISSION_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["items"],
    "properties": {
        "items": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["key", "effectiveDates"],
                "properties": {
                    "key": {
                        "type": "string",
                        "pattern": rf"^[ \t\r\n]*{rules.KEY_PATTERN}[ \t\r\n]*$",
                        "description": "Blanks around it are removed.",
                    },
                    "effectiveDates": {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "string", "pattern": f"^(?:{rules.DATE_PATTERN})$", "maxLength": 8},
                    },
                },
            },
        },
        "output": {
            "anyOf": [
                _output_schema([form.value for form in Format], ["none"]),
                _output_schema([Format.CSV.value, Format.CSV_GZ.value], ["none", "quote"]),
                {"type": "null"},
            ]
        },
        "force": {"type": "boolean", "default": False, "description": "Make every file anew."},
        "maxAge": {
            "type": ["integer", "null"],
            "minimum": 0,
            "maximum": rules.LONGEST_MAX_AGE,
            "description": "Reuse no file older than so many seconds.",
        },
        "webhook": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "required": ["url"],
            "properties": {"url": {"type": "string", "maxLength": rules.LONGEST_URL, "pattern": _WEBHOOK_PATTERN}},
            "description": "Called when the job ends; must resolve to public addresses.",
        },
    },
    "example": {
        "items": [
            {"key": "ABC", "effectiveDates": ["20250215", "20250315"]},
            {"key": "XYZ", "effectiveDates": ["20250215"]},
        ],
        "output": {"format": "CSV"},
    },
}


def problem(status: HTTPStatus, kind: str, title: str, detail: str, **more: Any) -> Problem:
    """A problem of this API."""
    return Problem(title, type_=kind, status=status, detail=detail, **more)


def _bad_submission(_: ExceptionHandler, __: Request, error: rules.BadSubmission) -> Problem:
    return Problem(
        "The request is refused.",
        type_=error.kind,
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        detail=error.what,
        errors=[one._asdict() for one in error.found],
        errorCount=error.count,
    )


def _unreadable(_: ExceptionHandler, __: Request, error: rules.UnreadableBody) -> Problem:
    return problem(HTTPStatus.BAD_REQUEST, "invalid-input", "The body cannot be read.", error.what)


def _not_found(_: ExceptionHandler, __: Request, error: NotFound) -> Problem:
    return problem(HTTPStatus.NOT_FOUND, "job-not-found", "No such job.", error.what)


def _wrong_state(_: ExceptionHandler, __: Request, error: WrongState) -> Problem:
    return problem(HTTPStatus.CONFLICT, "wrong-state", "Not possible in this state.", str(error))


def _key_reused(_: ExceptionHandler, __: Request, error: KeyReused) -> Problem:
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency-key-reused", "Another request has it.", str(error))


def _key_in_flight(_: ExceptionHandler, __: Request, error: KeyInFlight) -> Problem:
    return problem(
        HTTPStatus.CONFLICT,
        "idempotency-key-in-flight",
        "Being answered.",
        error.what,
        headers={"Retry-After": "1"},
    )


EXPORT_PROBLEMS: Mapping[type[Exception], Handler] = {
    rules.BadSubmission: _bad_submission,
    rules.UnreadableBody: _unreadable,
    NotFound: _not_found,
    WrongState: _wrong_state,
    KeyReused: _key_reused,
    KeyInFlight: _key_in_flight,
    Terminal: platform_fault,
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: a problem for each of these statuses; 401, 422, 429 and 503 always."""
    return {
        status: {
            "description": status_name(status),
            "content": PROBLEM_CONTENT,
            **({"headers": _PROBLEM_HEADERS[status]} if status in _PROBLEM_HEADERS else {}),
        }
        for status in sorted({*statuses, 401, 422, 429, 503})
    }


_RETRY = {"Retry-After": header("Seconds to wait.", "integer")}
_PROBLEM_HEADERS: Final[dict[int, dict[str, Any]]] = {
    401: {"WWW-Authenticate": header("How to say who you are.")},
    429: _RETRY,
    503: _RETRY,
}
_EVERY_ANSWER: Final[dict[str, Any]] = {"traceparent": header("The trace of this request (W3C), for questions to us.")}
_COUNTED_ANSWER: Final[dict[str, Any]] = {
    "RateLimit-Limit": header("Requests that you may send in a minute.", "integer"),
    "RateLimit-Remaining": header("Requests that would be answered now.", "integer"),
    "RateLimit-Reset": header("Seconds until the budget is full again.", "integer"),
    "RateLimit-Policy": header("The limit and its window in seconds."),
}


def describe(app: FastAPI) -> None:
    """Complete the OpenAPI document of the service."""
    complete_openapi(
        app,
        problem=ProblemView,
        schemas={"Submission": SUBMISSION_SCHEMA},
        not_ready=problems()[503],
        polish=_add_headers,
    )


def _add_headers(operation: dict[str, Any]) -> None:
    for status, answer in operation["responses"].items():
        # A request without a good key is not counted, and one that could not be counted neither.
        counted = _COUNTED_ANSWER if "security" in operation and status not in ("401", "503") else {}
        answer["headers"] = {**answer.get("headers", {}), **_EVERY_ANSWER, **counted}


FORMULA_GUARDS = [guard.value for guard in FormulaGuard]
