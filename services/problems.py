"""Every error as an RFC 9457 problem: which type, which status, and whether repeating helps.

What belongs here: the translation from typed errors to answers. What does not: routes, and when errors
are raised. An unexpected error says nothing about itself: its words go to the log, under the same trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi_problem.error import Problem, StatusProblem
from fastapi_problem.handler import ExceptionHandler, Handler, add_exception_handler, new_exception_handler
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lockstep.kernel import trace
from lockstep.kernel.errors import InvalidInput, LockstepError, LostClaim, Terminal, Transient
from lockstep.kernel.logs import get_logger

TYPE_TEMPLATE = "/problems/{type}"
DEFAULT_RETRY_AFTER_SECONDS = 5
SCOPE_TRACE = "lockstep.trace"

PLATFORM_RETRY_AFTER_SECONDS = 30

# An unexpected error may be over with the next call: who sends the same Idempotency-Key again does nothing twice.
_RETRYABLE = {
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
_log = get_logger("lockstep.problems")
_RENAMED = {413: "Content Too Large", 414: "URI Too Long", 416: "Range Not Satisfiable", 422: "Unprocessable Content"}


class InternalError(StatusProblem):
    """The answer to anything unexpected. Drops what the library would pass on: the error's own words."""

    type_ = "internal-error"
    title = "Something unexpected happened."
    status = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(detail="The cause is in the service's log, under this traceId.")


def install_problems(app: FastAPI, further: Mapping[type[Exception], Handler] | None = None) -> ExceptionHandler:
    """Answer every error of `app` with a problem.

    `further` holds a service's own errors, tried first, and its own answers to the common ones.
    """
    common: dict[type[Exception], Handler] = {
        InvalidInput: _invalid_input,
        Transient: _transient,
        LostClaim: _lost_claim,
        Terminal: _terminal,
    }
    handler = new_exception_handler(
        unhandled_wrappers={"default": InternalError},
        # The first that fits answers, so the service's own stand before the common ones, and once.
        handlers={**(further or {}), **{kind: how for kind, how in common.items() if kind not in (further or {})}},
        post_hooks=[_complete],
        documentation_uri_template=TYPE_TEMPLATE,
        http_exception_handler=_http_error,
        request_validation_handler=_invalid_request,
    )
    add_exception_handler(app, handler)
    for kind in (LockstepError, *(further or {})):
        app.add_exception_handler(kind, handler)
    return handler


def _invalid_input(_: ExceptionHandler, __: Request, error: InvalidInput) -> Problem:
    return Problem(
        "The input is refused.",
        type_="invalid-input",
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        detail=_words(error),
        errors=[{"detail": problem} for problem in error.problems],
    )


def _transient(_: ExceptionHandler, __: Request, error: Transient) -> Problem:
    seconds = DEFAULT_RETRY_AFTER_SECONDS if error.retry_after is None else error.retry_after
    return Problem(
        "Not possible right now.",
        type_="transient",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        detail=_words(error),
        headers={"Retry-After": str(max(1, math.ceil(seconds)))},
    )


def _lost_claim(_: ExceptionHandler, __: Request, error: LostClaim) -> Problem:
    return Problem("A newer attempt owns this.", type_="lost-claim", status=HTTPStatus.CONFLICT, detail=_words(error))


def _terminal(_: ExceptionHandler, __: Request, error: Terminal) -> Problem:
    return Problem(
        "This cannot succeed as it is.",
        type_="terminal",
        status=HTTPStatus.UNPROCESSABLE_ENTITY,
        detail=_words(error),
    )


def platform_fault(_: ExceptionHandler, __: Request, error: Terminal) -> Problem:
    """The answer to `Terminal` of a service whose clients' own faults all have types of their own.

    A right, a bucket, a key or a table of the platform is missing. 422 would make every client give up its request for
    a fault that is not the request's, and the words name what only the platform's people may read.
    """
    _log.error("the platform cannot do its part", error=str(error))
    return Problem(
        "Not possible until somebody has looked.",
        type_="transient",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        detail="The cause is in the service's log, under this traceId.",
        headers={"Retry-After": str(PLATFORM_RETRY_AFTER_SECONDS)},
    )


def status_name(status: int) -> str:
    """The name of a status in RFC 9110. Before Python 3.13 the standard library has older names for some of them."""
    return _RENAMED.get(status) or HTTPStatus(status).phrase


def _http_error(_: ExceptionHandler, __: Request, error: HTTPException) -> Problem:
    phrase = status_name(error.status_code)
    silent = error.detail == HTTPStatus(error.status_code).phrase  # the framework's words, nobody's
    return Problem(
        phrase,
        type_="-".join(phrase.lower().split()),
        status=error.status_code,
        detail=None if silent else str(error.detail),
        headers=dict(error.headers) if error.headers else None,
    )


def _invalid_request(_: ExceptionHandler, __: Request, error: RequestValidationError) -> Problem:
    found = error.errors()
    unreadable = any(problem["type"] == "json_invalid" for problem in found)
    # The rejected value is not repeated: it may be a secret, or a megabyte.
    return Problem(
        "The body is not JSON." if unreadable else "The input is refused.",
        type_="invalid-input",
        status=HTTPStatus.BAD_REQUEST if unreadable else HTTPStatus.UNPROCESSABLE_ENTITY,
        errors=[{"detail": problem["msg"], "pointer": _pointer(problem["loc"])} for problem in found],
    )


def _complete(content: dict[str, Any], request: Request, response: Response) -> tuple[dict[str, Any], Response]:
    """Add what every problem of ours says: the trace, and whether the same call may succeed later."""
    full = {
        **content,
        "traceId": request.scope.get(SCOPE_TRACE) or trace.current_trace(),
        # Whoever is told when to come back may come back: a conflict with a request in flight is over in a second.
        "retryable": response.status_code in _RETRYABLE or "retry-after" in response.headers,
    }
    kept = {name: value for name, value in response.headers.items() if name != "content-length"}
    return full, JSONResponse(full, status_code=response.status_code, headers=kept)


def _words(error: LockstepError) -> str:
    where = f"{error.unit}: " if error.unit else ""
    then = f" Next: {error.next_step}" if error.next_step else ""
    return f"{where}{error.what}{then}"


def _pointer(location: tuple[int | str, ...]) -> str:
    return "#/" + "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in location)
