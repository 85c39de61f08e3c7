"""The client of a vault: sessions, listings, downloads. It believes neither status codes nor content.

What belongs here: HTTP, the vendor's envelope, and which failures are worth another try. What does not: what a listing
means (listing.py) and what an archive holds (archive.py). Errors arrive as HTTP 200; a failed download is JSON; a login
may silently open another vault.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import httpx

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import InvalidInput, LockstepError, Terminal, Transient
from lockstep.kernel.retry import RetryPolicy
from lockstep.vaults.registry import Login
from lockstep.windows.listing import EXTRACT_TYPES, ListedPart
from lockstep.windows.model import SourcePart, WindowKind

T = TypeVar("T")

API_VERSION = "v25.2"
CLIENT_ID = "lockstep-windows"
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
RETRY = RetryPolicy(max_attempts=4, base_seconds=0.5, cap_seconds=10.0, budget_seconds=90.0)

_BURST_WINDOW_SECONDS = 300.0
_CHUNK = 1024 * 1024
_LARGEST_ANSWER = 64 * 1024 * 1024
_LARGEST_FAILURE = 64 * 1024

# Only types are contractual; messages are not.
_CONFIGURATION = {"USER_LOCKED_OUT", "USERNAME_OR_PASSWORD_INCORRECT", "MALFORMED_URL", "INACTIVE_USER"}
_WORTH_ANOTHER_TRY = {"UNEXPECTED_ERROR", "OPERATION_NOT_ALLOWED", "SERVICE_UNAVAILABLE", "INVALID_SESSION_ID"}


class BurstSpent(Transient):
    """The vault's call budget is nearly used up. Stop here; the rest would be refused, and others need calls too."""


class SessionEnded(Transient):
    """The session is no longer valid. The next try logs in again."""


class WrongVault(InvalidInput):
    """The login opened another vault than the configured one. Nothing was read from it."""


class VaultClient:
    """Calls of one vault. Safe to share between threads; `http` is given by the caller, who closes it."""

    def __init__(
        self,
        vault: str,
        url: str,
        login: Login,
        http: httpx.Client,
        *,
        clock: Clock | None = None,
        retry: RetryPolicy = RETRY,
    ) -> None:
        self.vault = vault
        self._base = f"{url.rstrip('/')}/api/{API_VERSION}"
        self._login = login
        self._http = http
        self._clock = clock or SystemClock()
        self._retry = retry
        self._session: str | None = None
        self._lock = threading.RLock()
        self._pause_until: float | None = None

    def list_files(self, kind: WindowKind, *, start: datetime | None = None) -> list[Any]:
        """The entries of a listing as the vendor sent them; listing.py reads them."""
        query = {"extract_type": EXTRACT_TYPES[kind]}
        if start is not None:
            query["start_time"] = f"{start:%Y-%m-%dT%H:%M:%SZ}"
        document = self._call(lambda: self._get_json("/services/directdata/files", query))
        entries = document.get("data")
        if not isinstance(entries, list):
            raise Terminal("the listing has no list of files.", unit=self._unit)
        return entries

    def download(self, part: ListedPart, target: Path) -> SourcePart:
        """Fetch one part to disk and check its size and MD5. The file is whole, or an error is raised."""
        return self._call(lambda: self._download(part, target))

    # --- one call ----------------------------------------------------------------------------------------------

    @property
    def _unit(self) -> str:
        return f"vault {self.vault}"

    def _call(self, action: Callable[[], T]) -> T:
        return self._retry.call(action, clock=self._clock)

    def _get_json(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        with self._stream("GET", path, session=self._ensure_session(), params=query) as answer:
            return self._read_json(answer)

    def _download(self, part: ListedPart, target: Path) -> SourcePart:
        session = self._ensure_session()
        with self._stream("GET", f"/services/directdata/files/{quote(part.name, safe='')}", session=session) as answer:
            if "json" in answer.headers.get("content-type", ""):
                self._refuse(self._body(answer, _LARGEST_FAILURE), part.name)
            return self._save(answer, part, target)

    def _save(self, answer: httpx.Response, part: ListedPart, target: Path) -> SourcePart:
        digest, size = hashlib.md5(usedforsecurity=False), 0
        with target.open("wb") as file:
            for chunk in answer.iter_bytes(_CHUNK):
                size += len(chunk)
                if size > part.size:
                    break  # whatever follows is not what was listed; the disk must not pay for it
                digest.update(chunk)
                file.write(chunk)
        if size != part.size:
            seen = f"more than {part.size}" if size > part.size else str(size)
            raise Transient(f"{part.name}: {part.size} bytes are listed, {seen} arrived.", unit=self._unit)
        if part.md5 is not None and digest.hexdigest() != part.md5:
            raise Transient(f"{part.name}: the MD5 is not the listed one.", unit=self._unit)
        return SourcePart(part.name, size, digest.hexdigest())

    @contextmanager
    def _stream(self, method: str, path: str, *, session: str | None = None, **more: Any) -> Iterator[httpx.Response]:
        """One HTTP exchange with the vendor's headers; broken connections and HTTP errors become our errors."""
        self._respect_burst()
        headers = {"X-VaultAPI-ClientID": CLIENT_ID, "Accept": "*/*"} | ({"Authorization": session} if session else {})
        try:
            with self._http.stream(
                method, self._base + path, headers=headers, timeout=TIMEOUT, follow_redirects=False, **more
            ) as answer:
                self._note_burst(answer.headers)
                self._check_status(answer)
                yield answer
        except httpx.HTTPError as error:
            raise Transient(f"the call broke off: {type(error).__name__} {error}", unit=self._unit) from error
        except httpx.InvalidURL as error:
            raise InvalidInput(f"the address cannot be used: {error}", unit=self._unit) from error

    def _check_status(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.OK:
            return
        what = f"HTTP {answer.status_code} from {answer.request.url.path}"
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
            raise Transient(what, unit=self._unit, retry_after=_seconds(answer.headers.get("retry-after")))
        raise InvalidInput(what, unit=self._unit, next_step="check the vault's address with `lockstep vaults list`.")

    def _read_json(self, answer: httpx.Response) -> dict[str, Any]:
        document = self._body(answer, _LARGEST_ANSWER)
        if document.get("responseStatus") not in ("SUCCESS", "WARNING"):
            self._refuse(document, answer.request.url.path)
        return document

    def _body(self, answer: httpx.Response, limit: int) -> dict[str, Any]:
        content = bytearray()
        for chunk in answer.iter_bytes(_CHUNK):
            content += chunk
            if len(content) > limit:
                raise Terminal(f"an answer of more than {limit} bytes is not read.", unit=self._unit)
        try:
            document = httpx.Response(200, content=bytes(content)).json()
        except ValueError:
            raise Transient("the answer is not JSON.", unit=self._unit) from None
        return document if isinstance(document, dict) else {}

    def _refuse(self, document: dict[str, Any], what: str) -> NoReturn:
        """Turn a FAILURE of the vendor into the error type that callers branch on."""
        errors = [one for one in document.get("errors") or () if isinstance(one, dict)]
        first: dict[str, Any] = errors[0] if errors else {}
        kind = str(first.get("type") or "UNKNOWN")
        words = f"{what}: {kind}: {first.get('message') or document.get('responseMessage') or 'no reason given'}"
        raise self._error(kind, words)

    def _error(self, kind: str, words: str) -> LockstepError:
        if kind == "INVALID_SESSION_ID":
            self._forget_session()
            return SessionEnded(words, unit=self._unit)
        if kind == "API_LIMIT_EXCEEDED":
            self._pause_until = self._clock.monotonic() + _BURST_WINDOW_SECONDS
            return BurstSpent(words, unit=self._unit, retry_after=_BURST_WINDOW_SECONDS)
        if kind in _CONFIGURATION:
            return InvalidInput(words, unit=self._unit, next_step="check the vault's address and login.")
        if kind in _WORTH_ANOTHER_TRY:
            return Transient(words, unit=self._unit)
        return Terminal(words, unit=self._unit, next_step="check the user's permissions in the vault.")

    # --- sessions and limits -----------------------------------------------------------------------------------

    def _ensure_session(self) -> str:
        """The session, logging in if there is none. One login for all threads: logins have a limit of their own."""
        with self._lock:
            if self._session is None:
                self._session = self._log_in()
            return self._session

    def _forget_session(self) -> None:
        with self._lock:
            self._session = None

    def _log_in(self) -> str:
        form = {"username": self._login.user, "password": self._login.password.get_secret_value()}
        with self._stream("POST", "/auth", data=form) as answer:
            document = self._read_json(answer)
        opened = str(document.get("vaultId"))
        if opened != self.vault:
            raise WrongVault(
                f"the login opened vault {opened[:64]}; nothing was read.",
                unit=self._unit,
                next_step="check that the user may log in to this vault, and the vault's address.",
            )
        session = document.get("sessionId")
        if not isinstance(session, str) or not session:
            raise Terminal("the login brought no session.", unit=self._unit)
        return session

    def _note_burst(self, headers: httpx.Headers) -> None:
        limit, left = (
            _seconds(headers.get("x-vaultapi-burstlimit")),
            _seconds(headers.get("x-vaultapi-burstlimitremaining")),
        )
        if limit is None or left is None:
            return
        scarce = left < min(10, limit / 10)
        self._pause_until = self._clock.monotonic() + _BURST_WINDOW_SECONDS if scarce else None

    def _respect_burst(self) -> None:
        if self._pause_until is None:
            return
        wait = self._pause_until - self._clock.monotonic()
        if wait > 0:
            raise BurstSpent("few calls are left in this burst window.", unit=self._unit, retry_after=wait)
        self._pause_until = None


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
