"""Query parameters that no route knows are refused: a misspelt filter must not answer with everything.

What belongs here: the one dependency that says so, for services whose clients are programs. What does not: the checks
of known parameters, which each route declares.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute

from lockstep.kernel.errors import InvalidInput


def refuse_unknown_queries(request: Request) -> None:
    """Raise `InvalidInput` for a query parameter that the matched route does not declare."""
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute):
        return
    known = sorted(_declared(route.dependant))
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        raise InvalidInput(
            f"this address has no query parameter {', '.join(repr(name) for name in unknown)}.",
            next_step=f"use {', '.join(known)}." if known else "leave it out.",
        )


def _declared(dependant: Any) -> set[str]:
    """The query parameters of a route and of everything that it depends on."""
    own = {field.alias for field in dependant.query_params}
    return own.union(*(_declared(one) for one in dependant.dependencies))
