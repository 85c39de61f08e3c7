"""The agent's side of the HTTP contract: one method per route, typed errors, a shared bandwidth limit.

What belongs here: requests and what their answers mean. What does not: which part to send next (sender.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import httpx

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import InvalidInput, LockstepError, Terminal, Transient

_CHUNK = 256 * 1024
_SMALLEST_PIECE = 512
_PIECES_A_SECOND = 16
_CONNECT_SECONDS = 10.0
_TRANSFER_SECONDS = 60.0
_FINALIZE_SECONDS = 180.0
_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
_LONGEST_WAIT = 300.0


class TickFinalizeError(LockstepError):
    """A finalize that did not end in 200. `status_code` and `body` say what the service said.

    `is_final`: repeating the same manifest cannot help (422). `wants_parts`: put `missing` and `mismatched_sha` (409).
    """

    def __init__(self, status_code: int, body: Mapping[str, Any], *, unit: str) -> None:
        words = body.get("message") or body.get("detail") or body.get("title") or "no reason was given"
        super().__init__(f"the finalize was answered with {status_code}: {words}", unit=unit)
        self.status_code, self.body = status_code, dict(body)

    @property
    def is_final(self) -> bool:
        """Whether a person must mend the tick."""
        return self.status_code == HTTPStatus.UNPROCESSABLE_ENTITY

    @property
    def wants_parts(self) -> bool:
        """Whether parts must be put before it is tried again."""
        return self.status_code == HTTPStatus.CONFLICT and ("missing" in self.body or "mismatched_sha" in self.body)

    @property
    def missing(self) -> list[int]:
        """Parts that the service does not have."""
        return [int(number) for number in self.body.get("missing") or ()]

    @property
    def mismatched_sha(self) -> list[int]:
        """Parts of which the service has other bytes."""
        return [int(number) for number in self.body.get("mismatched_sha") or ()]


class Refused(Terminal):
    """The service knows neither the secret nor the project: a person must look, the ticks are not at fault."""


class Throttle:
    """Lets so many bytes a second through, for all threads together. Zero lets everything through."""

    def __init__(self, bytes_per_second: float = 0.0, clock: Clock | None = None) -> None:
        if bytes_per_second < 0:
            raise InvalidInput("a bandwidth is zero or more bytes per second.")
        self._rate, self._clock = bytes_per_second, clock or SystemClock()
        self._lock, self._free_at = threading.Lock(), 0.0

    @property
    def piece(self) -> int:
        """How many bytes to send at once: so few that every one of many parts moves within seconds.

        The service takes a body that stands still for half a minute for a dead one.
        """
        return min(_CHUNK, max(_SMALLEST_PIECE, int(self._rate / _PIECES_A_SECOND))) if self._rate else _CHUNK

    def pass_through(self, size: int) -> None:
        """Wait until `size` more bytes may go."""
        if not self._rate:
            return
        with self._lock:
            start = max(self._free_at, self._clock.monotonic())
            self._free_at = start + size / self._rate
        self._clock.sleep(start - self._clock.monotonic())


class IngestClient:
    """Speaks to one ingest service, at any base address, for one project. Safe to use from several threads."""

    def __init__(
        self,
        base_url: str,
        *,
        org_id: str,
        project_id: str,
        api_secret: str,
        throttle: Throttle | None = None,
        connections: int = 8,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._project_id = project_id
        self._throttle = throttle or Throttle()
        self._http = httpx.Client(
            base_url=base_url.rstrip("/"),
            headers={"X-Api-Key": org_id, "X-Api-Secret": api_secret},
            timeout=httpx.Timeout(_TRANSFER_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def put_tick_part(
        self, tick_id: str, file_seq: int, path: Path, sha256_hex: str, *, replaces: str | None = None
    ) -> dict[str, Any]:
        """Send one part, streamed from disk. `replaces` is the SHA-256 of other bytes that it takes the place of.

        Raises:
            Transient: Send it again later.
            PartRefused: The service will not take it.
        """
        headers = {
            "X-Sha256": sha256_hex,
            "Content-Type": "application/octet-stream",
            "Content-Length": str(path.stat().st_size),
        }
        if replaces:
            headers["If-Match"] = f'"{replaces}"'
        unit = f"part {file_seq} of tick {tick_id}"
        answer = self._ask(
            "PUT", f"{self._tick(tick_id)}/parts/{file_seq}", unit, headers=headers, content=self._read(path)
        )
        if answer.status_code in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
            return _object(answer)
        raise PartRefused(answer.status_code, _object(answer), unit=unit)

    def finalize_tick(self, tick_id: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Commit a tick and return the service's answer. Raises `TickFinalizeError` or `Transient`."""
        unit = f"tick {tick_id}"
        answer = self._ask(
            "POST", f"{self._tick(tick_id)}/finalize", unit, json=dict(manifest), timeout=_FINALIZE_SECONDS
        )
        if answer.status_code == HTTPStatus.OK:
            return _object(answer)
        raise TickFinalizeError(answer.status_code, _object(answer), unit=unit)

    def tick(self, tick_id: str) -> dict[str, Any] | None:
        """What the service has of a tick; None if nothing."""
        answer = self._ask("GET", self._tick(tick_id), f"tick {tick_id}")
        body = _object(answer)
        if answer.status_code == HTTPStatus.NOT_FOUND and not str(body.get("type", "")).endswith("project-not-found"):
            return None
        return self._expected(answer, f"tick {tick_id}")

    def status(self) -> dict[str, Any]:
        """Where the project stands."""
        unit = f"project {self._project_id}"
        return self._expected(self._ask("GET", f"/v1/projects/{self._project_id}/status", unit), unit)

    def _tick(self, tick_id: str) -> str:
        return f"/v1/projects/{self._project_id}/ticks/{tick_id}"

    def _read(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(self._throttle.piece):
                self._throttle.pass_through(len(chunk))
                yield chunk

    def _ask(self, method: str, path: str, unit: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.InvalidURL as error:
            raise InvalidInput(f"the address cannot be used: {error}", unit=unit) from error
        except httpx.HTTPError as error:
            raise Transient(f"the service cannot be reached: {type(error).__name__}: {error}", unit=unit) from error
        if answer.status_code in _LATER or answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise Transient(
                f"the service answered {answer.status_code}: {_object(answer).get('detail', '')}",
                unit=unit,
                retry_after=_seconds(answer.headers.get("retry-after")),
            )
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise Refused("the secret is not accepted.", unit=unit, next_step="check the organisation and the secret.")
        return answer

    def _expected(self, answer: httpx.Response, unit: str) -> dict[str, Any]:
        if answer.status_code != HTTPStatus.OK:
            raise Refused(
                f"the service answered {answer.status_code}: {_object(answer).get('detail', '')}",
                unit=unit,
                next_step="check the address, the organisation, the project and the secret.",
            )
        return _object(answer)


class PartRefused(Terminal):
    """A part that the service will not take as it is. `status_code` and `body` say why."""

    def __init__(self, status_code: int, body: Mapping[str, Any], *, unit: str) -> None:
        super().__init__(
            f"the part was answered with {status_code}: {body.get('detail') or body.get('title')}", unit=unit
        )
        self.status_code, self.body = status_code, dict(body)

    @property
    def is_damaged(self) -> bool:
        """Whether the service got other bytes than it was promised: on the way, or because the file is another one."""
        return str(self.body.get("type", "")).endswith(("/digest-mismatch", "/length-differs"))


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:  # a proxy's page
        return {"detail": answer.text[:200]}
    return found if isinstance(found, dict) else {}


def _seconds(text: str | None) -> float | None:
    return min(float(text), _LONGEST_WAIT) if text and text.isascii() and text.isdigit() else None
