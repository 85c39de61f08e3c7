"""The request budget in HTTP: what is left, in the header of every answer; 429 when nothing is.

What belongs here: headers. What does not: counting (lockstep/kernel/budget.py).
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.kernel.budget import Budget
from services.exports.contract import problem

WINDOW_SECONDS = 60
_SCOPE = "lockstep.exports.budget"


class TellBudget:
    """Adds the RateLimit headers to answers of requests that were counted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; other scopes pass through."""

        async def told(message: Message) -> None:
            budget: Budget | None = scope.get(_SCOPE)
            if message["type"] == "http.response.start" and budget is not None:
                MutableHeaders(scope=message).update(_headers(budget))
            await send(message)

        await self._app(scope, receive, told)


def charge(scope: Scope, budget: Budget) -> None:
    """Remember the budget for the headers; raise the 429 problem if the request was one too many."""
    scope[_SCOPE] = budget
    if not budget.granted:
        raise problem(
            HTTPStatus.TOO_MANY_REQUESTS,
            "too-many-requests",
            "Slow down.",
            f"You may send {budget.limit} requests in {WINDOW_SECONDS} seconds.",
            headers={"Retry-After": str(budget.retry_seconds)},
        )


def _headers(budget: Budget) -> dict[str, str]:
    return {
        "RateLimit-Limit": str(budget.limit),
        "RateLimit-Remaining": str(budget.remaining),
        "RateLimit-Reset": str(budget.reset_seconds),
        "RateLimit-Policy": f"{budget.limit};w={WINDOW_SECONDS}",
    }
