"""What the OpenAPI documents of the services have in common, and FastAPI does not write by itself.

What belongs here: the problem schema, documented headers, the completion of a document. What does not: the routes, the
statuses and the further schemas of a service (its contract.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field

PROBLEM_CONTENT: Final = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemView"}}}


class ProblemView(BaseModel):
    """An RFC 9457 problem."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str | None = None
    trace_id: str | None = Field(default=None, alias="traceId")
    retryable: bool


def header(description: str, kind: str = "string") -> dict[str, Any]:
    """A documented response header."""
    return {"description": description, "schema": {"type": kind}}


def complete_openapi(
    app: FastAPI,
    *,
    problem: type[ProblemView],
    schemas: Mapping[str, Any],
    not_ready: Mapping[str, Any],
    polish: Callable[[dict[str, Any]], None],
) -> None:
    """Add what the types of the routes cannot say, and take out FastAPI's default 422.

    Args:
        app: The service.
        problem: Its problem.
        schemas: Further schemas, by name.
        not_ready: The 503 answer of `/readyz`.
        polish: Changes one operation in place, after everything else.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components["ProblemView"] = problem.model_json_schema(by_alias=True)
        components.update(schemas)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                _use_problems(operation["responses"])
                if path == "/readyz":
                    operation["responses"]["503"] = dict(not_ready)
                polish(operation)
        for unused in ("HTTPValidationError", "ValidationError"):
            components.pop(unused, None)
        app.openapi_schema = schema
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _use_problems(responses: dict[str, Any]) -> None:
    unprocessable = responses.get("422", {})
    if "application/json" in unprocessable.get("content", {}):
        unprocessable["content"] = PROBLEM_CONTENT
