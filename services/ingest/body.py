"""Reading bodies from strangers: counted, hashed while they arrive, never longer or slower than allowed.

What belongs here: digests and the two ways a body is read. What does not: what is done with it (routes.py).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from http import HTTPStatus
from typing import BinaryIO, NamedTuple, cast

from fastapi_problem.error import Problem
from starlette.requests import ClientDisconnect, Request

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.ticks.model import Limits
from lockstep.ticks.rules import is_id
from services.problems import status_name

IN_MEMORY_BYTES = 8 * 1024 * 1024
_DIGEST = re.compile(r"\s*(?P<name>[a-z0-9-]{1,20})=:(?P<value>[A-Za-z0-9+/=]{0,200}):\s*", re.ASCII)


class Spooled(NamedTuple):
    """A whole body, in memory or, if it is large, on disk until it is closed."""

    file: BinaryIO
    size: int
    sha256: str


def announced_size(request: Request, limits: Limits) -> int:
    """`Content-Length`, or the problem with it: 411 without one, 413 above the limit, 400 for nothing."""
    text = request.headers.get("content-length", "")
    if not text.isascii() or not text.isdigit():
        raise _problem(HTTPStatus.LENGTH_REQUIRED, "length-required", "Send Content-Length.")
    size = int(text[:20])
    if size > limits.max_part_bytes:
        raise _problem(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "content-too-large",
            f"A part has at most {limits.max_part_bytes} bytes, not {size}.",
        )
    if size == 0:
        raise _problem(HTTPStatus.BAD_REQUEST, "empty-part", "A part has at least one byte.")
    return size


def announced_sha256(x_sha256: str | None, content_digest: str | None) -> str:
    """What `X-Sha256` or `Content-Digest` (RFC 9530) promise. Both may be sent; then they must agree."""
    found = set()
    if x_sha256 is not None:
        found.add(x_sha256.strip().lower())
    if content_digest is not None:
        found.update(_from_digest(content_digest))
    if len(found) != 1 or not is_id("sha256", next(iter(found), None)):
        raise _problem(
            HTTPStatus.BAD_REQUEST,
            "digest-unusable",
            "Send X-Sha256 with 64 hex digits, or Content-Digest with sha-256=:base64:, and only one value.",
        )
    return found.pop()


@asynccontextmanager
async def spooled(request: Request, size: int, limits: Limits, clock: Clock | None = None) -> AsyncIterator[Spooled]:
    """Read the body of a part, hashing it. 408 when it comes too slowly, 400 when it ends early."""
    digest, seen, small = hashlib.sha256(), 0, size <= IN_MEMORY_BYTES
    with ExitStack() as closing:
        chunks: list[bytes] = []
        file = None if small else closing.enter_context(tempfile.TemporaryFile())
        keep = chunks.append if file is None else file.write
        async for chunk in _chunks(request, limits, clock or SystemClock()):
            seen += len(chunk)
            if seen > size:
                raise _problem(HTTPStatus.BAD_REQUEST, "length-differs", "The body is longer than Content-Length.")
            digest.update(chunk)
            keep(chunk)
        if seen != size:
            raise _problem(HTTPStatus.BAD_REQUEST, "length-differs", "The body is shorter than Content-Length.")
        whole = file or io.BytesIO(b"".join(chunks))
        chunks.clear()
        yield Spooled(cast("BinaryIO", whole), size, digest.hexdigest())


async def drain(request: Request, limits: Limits, clock: Clock | None = None) -> None:
    """Read a body that is of no interest: an answer before its end would look like a broken connection.

    A client that asked for leave to send (`Expect: 100-continue`) gets its answer at once.
    """
    if request.headers.get("expect", "").lower() == "100-continue":
        return
    async for _ in _chunks(request, limits, clock or SystemClock()):
        pass


async def small_body(request: Request, most: int, limits: Limits, clock: Clock | None = None) -> bytes:
    """A body that fits into memory, such as a manifest; 413 above `most`."""
    parts, seen = [], 0
    async for chunk in _chunks(request, limits, clock or SystemClock()):
        seen += len(chunk)
        if seen > most:
            raise _problem(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "content-too-large", f"The body has at most {most} bytes."
            )
        parts.append(chunk)
    return b"".join(parts)


async def _chunks(request: Request, limits: Limits, clock: Clock) -> AsyncIterator[bytes]:
    stream = request.stream()
    deadline = clock.monotonic() + limits.body_seconds
    while True:
        left = min(limits.body_idle_seconds, deadline - clock.monotonic())
        try:
            async with asyncio.timeout(max(0.0, left)):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _problem(
                HTTPStatus.REQUEST_TIMEOUT,
                "too-slow",
                "The body came too slowly; nothing was stored.",
                headers={"Connection": "close"},
            ) from None
        except ClientDisconnect:
            raise _problem(HTTPStatus.BAD_REQUEST, "length-differs", "The body ended early.") from None
        yield chunk


def _from_digest(header: str) -> list[str]:
    found = []
    for part in header.split(","):
        match = _DIGEST.fullmatch(part)
        if match is None:
            return [""]
        if match["name"] == "sha-256":
            try:
                found.append(base64.b64decode(match["value"], validate=True).hex())
            except (binascii.Error, ValueError):
                return [""]
    return found


def _problem(status: HTTPStatus, kind: str, detail: str, *, headers: dict[str, str] | None = None) -> Problem:
    return Problem(status_name(status), type_=kind, status=status, detail=detail, headers=headers)
