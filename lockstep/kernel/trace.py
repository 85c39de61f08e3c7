"""One trace from request to Spark task: making, binding and carrying W3C trace ids.

What belongs here: the trace id of the running work and its spelling on every carrier. What does not: spans,
exporters and sampling; a trace here is only the thread that ties log lines, messages and runs together.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

RUN_TAG = "lockstep/trace"
"""Tag of a Dagster run that carries the trace id."""

MESSAGE_ATTRIBUTE = "traceparent"
"""SQS message attribute, outbox header and HTTP header that carry the `traceparent` value."""

_SPARK_PREFIX = "lockstep-trace-"
_TRACE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
# A version above 00 may append fields after the flags; version 00 may not, and version ff is forbidden.
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-.*)?",
    re.ASCII,
)

_current: ContextVar[str | None] = ContextVar("lockstep_trace", default=None)


def new_trace() -> str:
    """A fresh trace id: 32 lower-case hex digits, never all zero."""
    return _random_hex(16)


def current_trace() -> str | None:
    """The trace of the work that runs now, or None outside any."""
    return _current.get()


@contextmanager
def bind_trace(trace_id: str | None = None) -> Iterator[str]:
    """Run the block under `trace_id`; without one, or with a malformed one, under a fresh trace.

    A malformed id is replaced rather than refused: tracing must never be the reason that work stops.
    """
    bound = trace_id if trace_id is not None and is_trace(trace_id) else new_trace()
    token = _current.set(bound)
    try:
        yield bound
    finally:
        _current.reset(token)


def is_trace(text: str) -> bool:
    """Whether `text` is a well-formed trace id."""
    return _TRACE_ID.fullmatch(text) is not None and text != "0" * 32


def traceparent(trace_id: str | None = None) -> str:
    """The header value for the next hop of `trace_id`, by default the current trace, else a fresh one."""
    return f"00-{trace_id or current_trace() or new_trace()}-{_random_hex(8)}-01"


def parse_traceparent(header: str | None) -> str | None:
    """The trace id inside a `traceparent` value, or None for anything malformed."""
    match = _TRACEPARENT.fullmatch(header.strip()) if header else None
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    if match["span"] == "0" * 16 or not is_trace(match["trace"]):
        return None
    return match["trace"]


def spark_tag(trace_id: str | None = None) -> str:
    """The tag of a Spark session's operations for `trace_id`. Spark forbids commas in tags; hex has none."""
    return f"{_SPARK_PREFIX}{trace_id or current_trace() or new_trace()}"


def _random_hex(size: int) -> str:
    text = secrets.token_hex(size)
    return text if text.strip("0") else _random_hex(size)
