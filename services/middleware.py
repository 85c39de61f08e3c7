"""What happens around every request: trace, access log, metrics, body limit, and a last net for errors.

What belongs here: plain ASGI layers that know no route. What does not: the answers to errors (problems.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.kernel import trace
from lockstep.kernel.logs import get_logger
from lockstep.kernel.metrics import HttpMetrics
from services.problems import SCOPE_TRACE

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CLIENT_LEFT = 499  # no answer was sent: the client went away first
QUIET_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})  # asked every few seconds by machines

_log = get_logger("lockstep.http")


class TraceAndLog:
    """Outermost: binds the caller's trace, answers what nothing else caught, writes one line per request."""

    def __init__(
        self, app: ASGIApp, *, metrics: HttpMetrics, on_error: Callable[[Request, Exception], Response]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; other scopes pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with trace.bind_trace(trace.parse_traceparent(Headers(scope=scope).get("traceparent"))) as trace_id:
            scope[SCOPE_TRACE] = trace_id
            answer = _Answer(send, trace.traceparent(trace_id))
            with self._metrics.in_progress.track_inprogress(), self._measured(scope, answer):
                await self._answer(scope, receive, answer)

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if not isinstance(error, HTTPException):  # a refusal, such as the body limit's, is no failure
                _log.exception("request failed", method=scope["method"], path=scope["path"])
            if answer.status is not None:  # the head is out: only a broken connection can tell the client
                raise
            await self._on_error(Request(scope), error)(scope, receive, answer)

    @contextmanager
    def _measured(self, scope: Scope, answer: _Answer) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            # Never the raw path, never an invented method: a client could make a new series with every request.
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in METHODS else "OTHER"
            status = answer.status or CLIENT_LEFT
            self._metrics.observe(method, route, status, seconds)
            write = _log.debug if scope["path"] in QUIET_PATHS else _log.info
            # The query string is left out: presigned addresses and keys travel there.
            write(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                milliseconds=round(seconds * 1000, 1),
            )


class _Answer:
    """A `send` that remembers the status and tells the caller the trace."""

    def __init__(self, send: Send, traceparent: str) -> None:
        self._send = send
        self._traceparent = traceparent
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["traceparent"] = self._traceparent
        await self._send(message)


class BodyLimit:
    """Refuses a body above the limit, by its announced length or while it arrives."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; other scopes pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large()
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def count() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._too_large()
            return message

        return count

    def _too_large(self) -> HTTPException:
        return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is larger than {self._max_bytes} bytes.")
