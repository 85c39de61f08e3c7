"""The service shell: what a client sees when something is wrong, and what it must never see."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from fastapi_problem.error import Problem
from pydantic import BaseModel
from starlette.requests import Request

from lockstep.kernel.errors import InvalidInput, LostClaim, Terminal, Transient
from lockstep.kernel.settings import Settings
from services import exports, ingest, readiness, shell, vault
from services.problems import status_name

SECRET = "hunter2-secret"
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Order(BaseModel):
    """A body with rules."""

    name: str
    count: int


def _broken() -> None:
    raise RuntimeError(f"postgresql://user:{SECRET}@db/x is gone")


ERRORS: dict[str, Exception] = {
    "invalid": InvalidInput("bad order.", unit="order 1", next_step="fix it.", problems=["a: wrong", "b: wrong"]),
    "transient": Transient("the database is busy.", retry_after=2.2),
    "lost": LostClaim("attempt 2 owns it.", unit="chunk 7"),
    "terminal": Terminal("the file is not a CSV."),
    "unexpected": RuntimeError(f"password={SECRET}"),
    "busy": Problem("Being answered.", type_="busy", status=409, headers={"Retry-After": "1"}),
}


def _app(**options: Any) -> FastAPI:
    app = shell.create_app("test", title="Test", description="For tests.", **{"readiness_checks": {}, **options})

    @app.get("/fail/{name}")
    def fail(name: str) -> None:
        raise ERRORS[name]

    @app.post("/orders")
    def orders(order: Order) -> Order:
        return order

    @app.post("/upload")
    async def upload(request: Request) -> int:
        return sum([len(chunk) async for chunk in request.stream()])

    return app


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(_app(max_body_bytes=100)) as http:
        yield http


@pytest.mark.parametrize(
    ("name", "status", "kind", "retryable"),
    [
        ("invalid", 422, "/problems/invalid-input", False),
        ("transient", 503, "/problems/transient", True),
        ("lost", 409, "/problems/lost-claim", False),
        ("terminal", 422, "/problems/terminal", False),
        ("unexpected", 500, "/problems/internal-error", True),
        ("busy", 409, "/problems/busy", True),
    ],
)
def test_every_error_is_a_problem_that_a_program_can_branch_on(
    client: TestClient, name: str, status: int, kind: str, retryable: bool
):
    """Guards clients from parsing sentences: type and retryable are the contract."""
    answer = client.get(f"/fail/{name}", headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["type"], problem["status"], problem["retryable"]) == (kind, status, retryable)
    assert problem["traceId"] == TRACE
    assert answer.headers["traceparent"].split("-")[1] == TRACE


def test_every_problem_of_an_input_is_listed(client: TestClient):
    """Guards against fixing one field only to be told of the next."""
    assert len(client.get("/fail/invalid").json()["errors"]) == 2
    problem = client.post("/orders", json={"count": "many"}).json()
    assert {error["pointer"] for error in problem["errors"]} == {"#/body/name", "#/body/count"}
    assert problem["type"] == "/problems/invalid-input"


def test_a_refused_value_is_not_repeated(client: TestClient):
    """Guards secrets that a client sent into the wrong field."""
    assert SECRET not in client.post("/orders", json={"name": "x", "count": SECRET}).text


def test_a_body_that_is_not_json_is_a_bad_request(client: TestClient):
    """Guards the difference between a broken message and a wrong one."""
    answer = client.post("/orders", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-input")


def test_a_transient_error_says_when_to_come_back(client: TestClient):
    """Guards against clients that hammer: whole seconds, rounded up, at least one."""
    assert client.get("/fail/transient").headers["retry-after"] == "3"


def test_an_unexpected_error_reveals_nothing_and_is_logged_without_its_secret(
    client: TestClient, capfd: pytest.CaptureFixture[str]
):
    """Guards passwords in exception texts: not in the answer, not in the log."""
    from lockstep.kernel.logs import configure_logging

    configure_logging("INFO", "json", service="test")
    answer = client.get("/fail/unexpected")
    logged = capfd.readouterr().err
    assert SECRET not in answer.text
    assert "RuntimeError" in logged
    assert SECRET not in logged


@pytest.mark.parametrize("path", ["/nowhere", "/fail"])
def test_an_unknown_address_is_a_problem_too(client: TestClient, path: str):
    """Guards the last corner where frameworks answer in their own words."""
    answer = client.get(path)
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")


@pytest.mark.parametrize(
    ("status", "name"), [(404, "Not Found"), (413, "Content Too Large"), (422, "Unprocessable Content")]
)
def test_a_status_has_the_same_name_under_every_python(status: int, name: str):
    """Python 3.13 renamed some: with them the types of problems and the API pages would change."""
    assert status_name(status) == name


def test_a_body_above_the_limit_is_refused_by_its_length_and_while_it_arrives(client: TestClient):
    """Guards memory: a client may leave the length out, or lie."""
    announced = client.post("/upload", content=b"x" * 101)
    streamed = client.post("/upload", content=(b"x" * 60 for _ in range(2)))
    assert [announced.status_code, streamed.status_code] == [413, 413]
    assert streamed.headers["content-type"] == "application/problem+json"
    assert client.post("/upload", content=b"x" * 100).json() == 100


def test_liveness_asks_nobody():
    """Guards against restarting a healthy process because a database is down."""
    with TestClient(_app(readiness_checks={"postgres": _broken})) as http:
        assert http.get("/healthz").status_code == 200


def test_readiness_names_what_does_not_work_and_nothing_else():
    """Guards the on-call person's first question, without printing an address."""
    with TestClient(_app(readiness_checks={"postgres": _broken, "sqs": lambda: None})) as http:
        answer = http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["missing"] == ["postgres"]
    assert answer.json()["retryable"] is True
    assert SECRET not in answer.text


def test_a_hanging_part_is_reported_and_does_not_collect_threads():
    """Guards against one more stuck thread per probe, until the pool is empty."""
    release, entered = threading.Event(), []

    def hang() -> None:
        entered.append(time.monotonic())
        release.wait(20)

    with TestClient(_app(readiness_checks={"spark": hang}, check_timeout=0.1)) as http:
        try:
            assert [http.get("/readyz").status_code for _ in range(3)] == [503, 503, 503]
            assert len(entered) == 1
        finally:
            release.set()


def test_requests_are_counted_by_route_never_by_path(client: TestClient):
    """Guards the metrics store: a label per customer id would be a series per customer id."""
    client.get("/fail/terminal")
    client.get("/nowhere/4711")
    text = client.get("/metrics").text
    assert 'route="/fail/{name}",status="422"' in text
    assert "4711" not in text


def test_an_invented_method_makes_no_series(client: TestClient):
    """Guards the metrics store from a client that sends a new method with every request."""
    client.request("PURGE4711", "/healthz")
    text = client.get("/metrics").text
    assert "PURGE4711" not in text
    assert 'method="OTHER"' in text


def test_the_document_is_openapi_3_1_and_shows_problems(client: TestClient):
    """Guards generated clients."""
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert "Problem" in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (exports, {"postgres", "sqs", "s3"}),
        (ingest, {"postgres", "s3", "sqs", "dynamodb", "spark"}),
        (readiness, {"dynamodb"}),
        (vault, set()),
    ],
)
def test_every_service_is_alive_and_honest_about_what_is_missing(
    module: Any, parts: set[str], monkeypatch: pytest.MonkeyPatch
):
    """Guards against a service that claims to be ready while nothing it needs is there."""
    for service in ("S3", "SQS", "DYNAMODB"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    with TestClient(module.create_app(Settings())) as http:
        assert http.get("/healthz").status_code == 200
        answer = http.get("/readyz")
    assert set(answer.json().get("missing", [])) == parts
    assert answer.status_code == (503 if parts else 200)
