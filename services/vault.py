"""The vault simulator: HTTP door of a stand-in for the vendor, with controls apart from the vendor's routes.

What belongs here: routes, headers, the vendor's envelope. What does not: what a vault answers (lockstep/vaultsim), and
the client of a vault (lockstep/windows/client.py). A vault's address is `/v/<id>`, in place of its own host name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

from anyio import to_thread
from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import Settings
from lockstep.vaultsim.model import VaultState
from lockstep.vaultsim.site import KINDS, Refusal, VaultSite, parse_time
from services import shell

ACTIONS = (
    "publish",
    "withhold",
    "release",
    "poison",
    "heal",
    "fault",
    "twist",
    "lose",
    "evolve",
    "full",
    "log",
    "knobs",
)
_OCTETS = "application/octet-stream;charset=UTF-8"


def create_app(settings: Settings) -> FastAPI:
    """The service, not yet serving. Its memory is under the home folder and is opened at the first call."""
    door = _Door(settings.home / "data" / "vault")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        door.close()

    app = shell.create_app(
        "vault",
        title="Lockstep vault simulator",
        description="The vendor's Direct Data API from a seed, faults included. Controls are under /_control.",
        readiness_checks={},
        lifespan=lifespan,
    )
    app.state.door = door
    _add_session_routes(app)
    _add_file_routes(app)
    _add_controls(app)
    return app


class _Door:
    """The site behind the routes. A health check must not make a folder, so it is opened when someone asks for data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._site: VaultSite | None = None
        self._opening = threading.Lock()

    def site(self) -> VaultSite:
        with self._opening:
            if self._site is None:
                self._site = VaultSite(self._folder)
            return self._site

    def close(self) -> None:
        with self._opening:
            if self._site is not None:
                self._site.close()


def _add_session_routes(app: FastAPI) -> None:
    @app.post("/v/{vault}/api/{version}/auth", tags=["vendor"], summary="Log in")
    async def auth(request: Request, vault: str, version: str) -> Response:
        """A form post. The session may belong to another vault: the caller must compare `vaultId`."""
        form = parse_qs((await request.body()).decode("utf-8", "replace"))

        def answer(site: VaultSite) -> dict[str, Any]:
            user, password = (form.get(name, [""])[0] for name in ("username", "password"))
            token, real = site.login(vault, user, password)
            base = str(request.base_url).rstrip("/")
            ids = [{"id": real, "name": real, "url": f"{base}/v/{real}/api"}]
            return {"sessionId": token, "userId": 1, "vaultIds": ids, "vaultId": real}

        return await _answer(request, vault, answer)

    @app.post("/v/{vault}/api/{version}/keep-alive", tags=["vendor"], summary="Keep a session")
    async def keep_alive(request: Request, vault: str, version: str) -> Response:
        """Counts as a call of the session."""
        return await _answer(request, vault, lambda site: _authorized(site, request, vault) and {})

    @app.delete("/v/{vault}/api/{version}/session", tags=["vendor"], summary="Log out")
    async def log_out(request: Request, vault: str, version: str) -> Response:
        """Ends the session."""
        token = request.headers.get("authorization", "")
        return await _answer(request, vault, lambda site: site.sessions.pop(token, None) and {})


def _add_file_routes(app: FastAPI) -> None:
    @app.get("/v/{vault}/api/{version}/services/directdata/files", tags=["vendor"], summary="List archives")
    async def list_files(
        request: Request,
        vault: str,
        version: str,
        extract_type: str | None = None,
        start_time: str | None = None,
        stop_time: str | None = None,
    ) -> Response:
        """Every archive that is still available, failed publications included."""

        def answer(site: VaultSite) -> dict[str, Any]:
            state = _authorized(site, request, vault)
            if extract_type is not None and extract_type not in KINDS:
                raise Refusal("INVALID_DATA", f"extract_type {extract_type} is not supported.")
            start, stop = (None if text is None else _time(text) for text in (start_time, stop_time))
            found = site.listing(state, extract_type, start, stop)
            return {"responseDetails": {"total": len(found)}, "data": found}

        return await _answer(request, vault, answer)

    @app.get("/v/{vault}/api/{version}/services/directdata/files/{name}", tags=["vendor"], summary="Download a part")
    async def download(request: Request, vault: str, version: str, name: str) -> Response:
        """Bytes, or the vendor's trap: JSON with HTTP 200 when it cannot."""

        def answer(site: VaultSite) -> Response:
            content = site.part(_authorized(site, request, vault), name)
            archive, _, number = name.rpartition(".")
            headers = {"Content-Disposition": f'attachment; filename="{archive}.tar.gz.{number}"'}
            if site.spend(vault, "cut_next"):
                headers["Content-Length"] = str(len(content))
                return StreamingResponse(iter([content[: len(content) // 2]]), media_type=_OCTETS, headers=headers)
            return Response(content, media_type=_OCTETS, headers=headers)

        return await _answer(request, vault, answer)


async def _answer(request: Request, vault: str, make: Any) -> Response:
    """One call of the vendor's API: faults first, then the answer in its envelope and with its headers."""
    return await to_thread.run_sync(_respond, request, vault, make)


def _respond(request: Request, vault: str, make: Any) -> Response:
    site: VaultSite = request.app.state.door.site()
    headers = {"X-VaultAPI-ExecutionId": str(uuid4()), "X-VaultAPI-VaultId": vault}
    if "x-vaultapi-referenceid" in request.headers:
        headers["X-VaultAPI-ReferenceId"] = request.headers["x-vaultapi-referenceid"]
    try:
        limit, left = site.burst(vault)
        headers |= {"X-VaultAPI-BurstLimit": str(limit), "X-VaultAPI-BurstLimitRemaining": str(max(0, left))}
        time.sleep(site.state(vault).knobs.delay_ms / 1000)
        if site.spend(vault, "http_error_next"):
            return JSONResponse({}, HTTPStatus.SERVICE_UNAVAILABLE, headers)
        if left < 0:
            raise Refusal("API_LIMIT_EXCEEDED", "The burst limit is exceeded.")
        if site.spend(vault, "fail_next"):
            raise Refusal("UNEXPECTED_ERROR", "An unexpected error occurred.")
        made = make(site)
        response = made if isinstance(made, Response) else JSONResponse({"responseStatus": "SUCCESS", **(made or {})})
        status = "SUCCESS"
    except Refusal as refusal:
        errors = [{"type": refusal.type, "message": refusal.message}]
        response = JSONResponse({"responseStatus": "FAILURE", "responseMessage": refusal.message, "errors": errors})
        status = "FAILURE"
    response.headers.update(headers | {"X-VaultAPI-Status": status})
    return response


def _authorized(site: VaultSite, request: Request, vault: str) -> VaultState:
    return site.authorize(vault, request.headers.get("authorization"))


def _time(text: str) -> Any:
    try:
        return parse_time(text)
    except InvalidInput as error:
        raise Refusal("INVALID_DATA", str(error)) from None


def _add_controls(app: FastAPI) -> None:
    def site() -> VaultSite:
        found: VaultSite = app.state.door.site()
        return found

    @app.get("/_control/vaults", tags=["control"], summary="All simulated vaults")
    def vaults(request: Request) -> list[dict[str, Any]]:
        """What each vault is and how far it has published."""
        return [_described(request, state) for state in site().states()]

    @app.post("/_control/vaults", tags=["control"], summary="Add a vault", status_code=HTTPStatus.CREATED)
    def add(request: Request, fields: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008  # FastAPI's way
        """The same vault again is a no-op."""
        return _described(request, site().add(fields))

    @app.get("/_control/vaults/{vault}", tags=["control"], summary="One vault")
    def show(request: Request, vault: str) -> dict[str, Any]:
        """What a vault is and what was done to it."""
        return _described(request, site().state(vault))

    @app.delete("/_control/vaults/{vault}", tags=["control"], summary="Remove a vault", status_code=204)
    def remove(vault: str) -> None:
        """Forget it."""
        site().remove(vault)

    @app.post("/_control/vaults/{vault}/{action}", tags=["control"], summary="Do something to a vault")
    def act(request: Request, vault: str, action: str, data: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008
        """Publish, withhold, release, poison, heal, fault, twist, lose, evolve, full, log or knobs."""
        if action not in ACTIONS:
            raise InvalidInput(f"there is no action {action}.", next_step=f"choose one of {', '.join(ACTIONS)}.")
        return _described(request, site().control(vault, action, data))


def _described(request: Request, state: VaultState) -> dict[str, Any]:
    config, base = state.config, str(request.base_url).rstrip("/")
    minutes: Iterator[str | None] = (
        f"{config.stop_of(index):%Y-%m-%dT%H:%MZ}" if state.published else None for index in (0, state.published - 1)
    )
    first, last = minutes
    return {
        **state.model_dump(mode="json"),
        "id": config.id,
        "url": f"{base}/v/{config.id}",
        "now": f"{state.now:%Y-%m-%dT%H:%MZ}",
        "first_stop": first,
        "last_stop": last,
        "withheld_stops": [f"{config.stop_of(index):%Y-%m-%dT%H:%MZ}" for index in sorted(state.withheld)],
        "poisoned_stops": [f"{config.stop_of(index):%Y-%m-%dT%H:%MZ}" for index in sorted(state.poisoned)],
        "faulty_stops": {f"{config.stop_of(index):%Y-%m-%dT%H:%MZ}": kind for index, kind in state.faults.items()},
    }
