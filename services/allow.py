"""A truthful `Allow` header: every method of a path, where the framework names those of one route only.

What belongs here: that one layer. What does not: anything about one service.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class TrueAllow:
    """Rewrites `Allow` on 405."""

    def __init__(self, app: ASGIApp, *, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; other scopes pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def corrected(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.METHOD_NOT_ALLOWED:
                MutableHeaders(scope=message)["allow"] = ", ".join(self._methods(scope["path"]))
            await send(message)

        await self._app(scope, receive, corrected)

    def _methods(self, path: str) -> list[str]:
        matching = [one for one in self._routes if isinstance(one, Route) and one.path_regex.match(path)]
        return sorted({method for route in matching for method in route.methods or ()})
