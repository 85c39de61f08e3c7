"""The HTTP door on the real parts: every route, status and header of the contract."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import psycopg
import pytest
from fastapi.testclient import TestClient

from lockstep.exports.clients import ClientStore
from lockstep.kernel.settings import load_settings
from services.exports import create_app, routes
from tests.databases import fresh_database
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

OLD, RECENT = "20250215", f"{datetime.now(UTC) - timedelta(days=1):%Y%m%d}"
BODY = {"items": [{"key": "ABC", "effectiveDates": [OLD]}], "output": {"format": "CSV"}}


@pytest.fixture(scope="module")
def app(module_world: World, stack: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stack.site().environment.items():
            patch.setenv(name, value)
        settings = load_settings(
            postgres_dsn=module_world.state_dsn,
            source_dsn=module_world.source_dsn,
            exports_bucket=module_world.bucket,
            exports_max_chunks=50,
        )
        with TestClient(create_app(settings), raise_server_exceptions=False) as http:
            yield http


@pytest.fixture
def http(app: TestClient, module_world: World) -> TestClient:
    app.headers["X-Api-Key"] = module_world.client.api_key
    return app


def _submit(http: TestClient, body: Any = BODY, **options: Any) -> str:
    answer = http.post("/jobs", json=body, **options)
    assert answer.status_code == 202, answer.text
    return answer.json()["jobId"]


def test_a_submission_is_acknowledged_with_its_place(http: TestClient):
    answer = http.post("/jobs", json={"items": [{"key": " ABC ", "effectiveDates": [OLD, OLD]}]})
    assert answer.status_code == 202
    body = answer.json()
    assert body["status"] == "SUBMITTED"
    assert body["duplicatesRemoved"] == 1
    assert body["jobId"].startswith(f"J{datetime.now(UTC):%Y%m}")
    assert answer.headers["location"] == f"/jobs/{body['jobId']}"
    assert int(answer.headers["retry-after"]) > 0


def test_the_status_has_every_field_of_the_document(http: TestClient, module_world: World):
    job_id = _submit(http)
    module_world.drain()
    answer = http.get(f"/jobs/{job_id}")
    body = answer.json()
    documented = {
        "jobId": job_id,
        "status": "COMPLETED",
        "total": 1,
        "pending": 0,
        "running": 0,
        "done": 1,
        "failed": 0,
        "s3BasePath": f"s3://{module_world.bucket}/exports/",
        "errorMessage": None,
    }
    assert {name: body[name] for name in documented} == documented
    assert body["filesGenerated"] + body["filesReused"] == 1
    assert body["percent"] == 100
    assert body["rows"] > 0
    assert "retry-after" not in answer.headers


def test_an_unchanged_job_is_answered_with_304(http: TestClient):
    job_id = _submit(http)
    tag = http.get(f"/jobs/{job_id}").headers["etag"]
    assert http.get(f"/jobs/{job_id}", headers={"If-None-Match": tag}).status_code == 304
    http.post(f"/jobs/{job_id}:cancel")
    assert http.get(f"/jobs/{job_id}", headers={"If-None-Match": tag}).status_code == 200


@pytest.mark.parametrize("spelled", ["{}", "*", '"other", {}', "{strong}"])
def test_a_tag_is_compared_as_http_says(http: TestClient, spelled: str):
    """Guards clients and proxies that keep tags without `W/`, or send several."""
    path = f"/jobs/{_submit(http)}"
    tag = http.get(path).headers["etag"]
    told = spelled.format(tag, strong=tag.removeprefix("W/"))
    assert http.get(path, headers={"If-None-Match": told}).status_code == 304
    assert http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_same_key_and_body_give_the_same_answer_and_one_job(http: TestClient, module_world: World):
    before = module_world.ask("SELECT count(*) FROM exports.job")[0][0]
    answers = [http.post("/jobs", json=BODY, headers={"Idempotency-Key": "once"}) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.text for answer in answers}) == 1
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true", "true"]
    assert module_world.ask("SELECT count(*) FROM exports.job")[0][0] == before + 1


def test_the_same_key_with_another_body_is_refused(http: TestClient):
    _submit(http, headers={"Idempotency-Key": "mine"})
    answer = http.post("/jobs", json={**BODY, "force": True}, headers={"Idempotency-Key": "mine"})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/idempotency-key-reused")


def test_a_key_past_its_time_is_a_new_key(http: TestClient, module_world: World):
    """Guards what `GET /limits` promises: nobody has to wait for housekeeping, with the same body or another."""
    hours = http.get("/limits").json()["idempotencyHours"]
    aged = (
        "UPDATE exports.idempotency SET created_at = now() - make_interval(hours => %s) WHERE idempotency_key = 'old'"
    )
    first = _submit(http, headers={"Idempotency-Key": "old"})
    module_world.ask(aged, hours - 1)
    assert _submit(http, headers={"Idempotency-Key": "old"}) == first
    module_world.ask(aged, hours + 1)
    second = _submit(http, {**BODY, "force": True}, headers={"Idempotency-Key": "old"})
    assert second != first
    assert _submit(http, {**BODY, "force": True}, headers={"Idempotency-Key": "old"}) == second


def test_a_key_in_flight_is_a_conflict_that_may_be_repeated(http: TestClient, module_world: World):
    with psycopg.connect(module_world.state_dsn) as other:
        other.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended('exports.idempotency/' || %s || '/' || %s, 0))",
            (module_world.client.client.client_id, "busy"),
        )
        answer = http.post("/jobs", json=BODY, headers={"Idempotency-Key": "busy"})
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
    assert answer.json()["type"] == "/problems/idempotency-key-in-flight"
    assert answer.json()["retryable"] is True
    assert http.post("/jobs", json=BODY, headers={"Idempotency-Key": "busy"}).status_code == 202


def test_a_platform_that_is_set_up_wrongly_is_no_fault_of_the_request(module_world: World, stack: Any):
    """Guards clients: 422 makes them give up a request that is right, for tables that a deployment forgot to make."""
    headers = {"X-Api-Key": module_world.client.api_key, "Idempotency-Key": "k"}
    with fresh_database(stack) as bare, TestClient(create_app(load_settings(postgres_dsn=bare))) as http:
        answer = http.post("/jobs", json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/transient")
    assert answer.json()["retryable"] is True
    assert int(answer.headers["retry-after"]) > 0
    assert "exports." not in answer.text, "what is missing is for the log"


def test_an_unexpected_error_may_be_repeated_with_the_same_key_and_makes_one_job(
    http: TestClient, module_world: World, monkeypatch: pytest.MonkeyPatch
):
    """Guards a submission whose answer was lost to a fault of ours: it stands, and the repetition finds it."""

    def broken(point: str) -> None:
        raise RuntimeError(point)

    monkeypatch.setattr(routes, "crash_point", broken)
    answer = http.post("/jobs", json=BODY, headers={"Idempotency-Key": "unexpected"})
    assert (answer.status_code, answer.json()["type"]) == (500, "/problems/internal-error")
    assert answer.json()["retryable"] is True
    monkeypatch.undo()
    again = http.post("/jobs", json=BODY, headers={"Idempotency-Key": "unexpected"})
    assert (again.status_code, again.headers["idempotent-replayed"]) == (202, "true")


def test_validate_only_plans_and_makes_nothing(http: TestClient, module_world: World):
    _submit(http)
    module_world.drain()
    before = module_world.ask("SELECT count(*) FROM exports.job")
    answer = http.post(
        "/jobs?validateOnly=true", json={"items": [{"key": "ABC", "effectiveDates": [OLD, RECENT, RECENT]}]}
    )
    assert answer.status_code == 200
    assert answer.json() == {"valid": True, "total": 2, "duplicatesRemoved": 1, "reusable": 1, "toGenerate": 1}
    assert module_world.ask("SELECT count(*) FROM exports.job") == before


def test_every_bad_place_of_a_body_is_in_the_problem(http: TestClient):
    answer = http.post("/jobs", json={"items": [{"key": "../x", "effectiveDates": ["20259999", OLD]}, {}]})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["type"] == "/problems/invalid-submission"
    assert {one["pointer"] for one in body["errors"]} == {
        "#/items/0/key",
        "#/items/0/effectiveDates/0",
        "#/items/1/key",
        "#/items/1/effectiveDates",
    }
    assert http.get(body["type"]).json()["meaning"]


DEEP = b'{"items":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"items": NaN}', 400),
        (json.dumps(BODY).encode("utf-16"), 400),
        (b'{"items": [], "items": [{"key": "ABC", "effectiveDates": ["20250215"]}]}', 400),
        (b'{"items": [{"key": "ABC", "effectiveDates": ["20250215"]}], "\\ud800": 1}', 422),
        (DEEP, 400),
        (b"null", 422),
        (b"[]", 422),
        (b'{"items": [{"key": "a\\u0000b", "effectiveDates": ["20250215"]}]}', 422),
        (b'{"items": [{"key": "' + b"A" * 10_000_000 + b'", "effectiveDates": ["20250215"]}]}', 413),
        (json.dumps({"items": [{"key": f"K{n}", "effectiveDates": [OLD]} for n in range(100_000)]}).encode(), 422),
    ],
    ids=[
        "empty",
        "cut",
        "not UTF-8",
        "NaN",
        "UTF-16",
        "name twice",
        "half a pair",
        "deep",
        "null",
        "list",
        "NUL",
        "10 MB key",
        "100 k items",
    ],
)
def test_a_hostile_body_is_refused_and_nothing_is_written(
    http: TestClient, module_world: World, raw: bytes, status: int
):
    before = module_world.ask("SELECT count(*) FROM exports.job")
    answer = http.post("/jobs", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text[:300]
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["traceId"]
    assert http.get(answer.json()["type"]).json()["meaning"], "every type is explained at its address"
    assert module_world.ask("SELECT count(*) FROM exports.job") == before


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("PUT", "/jobs", 405), ("GET", "/problems/nothing", 404)]
)
def test_an_address_or_method_that_is_not_there_is_a_documented_problem_too(
    http: TestClient, method: str, path: str, status: int
):
    answer = http.request(method, path)
    assert answer.status_code == status
    assert http.get(answer.json()["type"]).json()["meaning"]


@pytest.mark.parametrize(
    "name", ["nothing", "J20260102", "j20260102_000123", "J20260102_000123%00", "J20260102_%D9%A1%D9%A2"]
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("GET", "/chunks"), ("GET", "/manifest"), ("POST", ":cancel"), ("POST", ":retry")]
)
def test_an_id_that_no_job_can_have_is_not_found_like_any_other(http: TestClient, method: str, path: str, name: str):
    answer = http.request(method, f"/jobs/{name}{path}")
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/job-not-found")
    assert http.request(method, f"/jobs/{name}{path}", headers={"X-Api-Key": ""}).status_code == 401


def test_a_misspelt_query_parameter_is_refused_by_name(http: TestClient):
    """Guards callers against a filter that silently does not filter."""
    refused = http.get("/jobs", params={"statuss": "FAILED"})
    assert refused.status_code == 422
    assert "no query parameter 'statuss'" in refused.json()["detail"]
    assert "pageSize, status" in refused.json()["detail"]
    assert http.get("/jobs", params={"status": "FAILED"}).status_code == 200


def test_a_body_that_is_not_json_by_name_is_refused(http: TestClient):
    assert http.post("/jobs", content=json.dumps(BODY), headers={"Content-Type": "text/plain"}).status_code == 415


def test_cancel_and_retry_refuse_the_wrong_states(http: TestClient, module_world: World):
    job_id = _submit(http)
    assert http.post(f"/jobs/{job_id}:retry").status_code == 409
    assert http.post(f"/jobs/{job_id}:cancel").json()["status"] == "CANCELLED"
    assert http.post(f"/jobs/{job_id}:cancel").status_code == 202
    done = _submit(http)
    module_world.drain()
    refused = http.post(f"/jobs/{done}:cancel")
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/wrong-state")


def test_the_manifest_proves_and_serves_every_file(http: TestClient, module_world: World):
    import hashlib

    job_id = _submit(http, {"items": [{"key": "XYZ", "effectiveDates": [OLD, RECENT]}]})
    assert http.get(f"/jobs/{job_id}/manifest").json()["complete"] is False
    module_world.drain()
    manifest = http.get(f"/jobs/{job_id}/manifest").json()
    assert manifest["complete"] is True
    assert manifest["dialect"]["delimiter"] == ","
    assert [(one["key"], one["date"]) for one in manifest["files"]] == [("XYZ", OLD), ("XYZ", RECENT)]
    for one in manifest["files"]:
        data = httpx.get(one["url"]).content
        assert hashlib.sha256(data).hexdigest() == one["sha256"]
        assert (len(data), data.count(b"\n") - 1) == (one["bytes"], one["rows"])
        assert one["columns"][0] == {"name": "line_no", "type": "integer"}
        assert one["generation"] >= 1
        assert one["asOf"]
    redirect = http.get(f"/jobs/{job_id}/files/XYZ/{OLD}", follow_redirects=False)
    assert redirect.status_code == 307
    assert httpx.get(redirect.headers["location"]).status_code == 200
    assert http.get(f"/jobs/{job_id}/files/XYZ/20240101").status_code == 404


def test_a_replaced_file_is_said_to_be_gone_and_never_served_under_an_old_checksum(
    http: TestClient, module_world: World
):
    """Guards a manifest that would hand out bytes it does not describe."""
    body = {"items": [{"key": "K0007", "effectiveDates": [RECENT]}]}
    first = _submit(http, body)
    module_world.drain()
    module_world.source("UPDATE demo.source_key SET rows_per_day = rows_per_day + 1 WHERE key = 'K0007'")
    _submit(http, body)
    module_world.drain()
    module_world.source("UPDATE demo.source_key SET rows_per_day = rows_per_day - 1 WHERE key = 'K0007'")
    (entry,) = http.get(f"/jobs/{first}/manifest").json()["files"]
    assert (entry["superseded"], entry["url"]) == (True, None)
    gone = http.get(f"/jobs/{first}/files/K0007/{RECENT}", follow_redirects=False)
    assert (gone.status_code, gone.json()["type"]) == (410, "/problems/file-superseded")


def test_a_bucket_that_is_not_there_does_not_make_every_file_gone(http: TestClient, module_world: World, stack: Any):
    """Guards clients: 410 tells them to order the file anew, and it lies whole in a bucket that a setting misspells."""
    job_id = _submit(http, {"items": [{"key": "K0009", "effectiveDates": ["20250217"]}]})
    module_world.drain()
    wrong = load_settings(postgres_dsn=module_world.state_dsn, exports_bucket="no-such-bucket-here")
    with TestClient(create_app(wrong), headers={"X-Api-Key": module_world.client.api_key}) as other:
        answer = other.get(f"/jobs/{job_id}/files/K0009/20250217", follow_redirects=False)
    assert (answer.status_code, answer.json()["retryable"]) == (503, True)
    assert int(answer.headers["retry-after"]) > 0
    assert http.get(f"/jobs/{job_id}/files/K0009/20250217", follow_redirects=False).status_code == 307


def test_a_file_that_somebody_removed_is_gone_and_the_answer_does_not_blame_a_later_job(
    http: TestClient, module_world: World
):
    job_id = _submit(http, {"items": [{"key": "K0009", "effectiveDates": [OLD]}]})
    module_world.drain()
    module_world.s3.delete_object(Bucket=module_world.bucket, Key=f"exports/2025/02/15/K0009_{OLD}.csv")
    gone = http.get(f"/jobs/{job_id}/files/K0009/{OLD}", follow_redirects=False)
    assert (gone.status_code, gone.json()["type"]) == (410, "/problems/file-superseded")
    assert "or somebody removed it" in gone.json()["detail"]


def test_a_file_made_anew_from_the_same_data_serves_the_older_job_too(http: TestClient, module_world: World):
    """Guards a client that is slow to download: somebody else's equal job must not take its files away."""
    import hashlib

    body = {"items": [{"key": "K0008", "effectiveDates": [RECENT]}]}
    jobs = []
    for _ in range(2):
        jobs.append(_submit(http, body))
        module_world.drain()
    entries = [http.get(f"/jobs/{job}/manifest").json()["files"][0] for job in jobs]
    assert [one["generation"] for one in entries] == [1, 2]
    for job, entry in zip(jobs, entries, strict=True):
        assert (entry["superseded"], entry["sha256"]) == (False, entries[0]["sha256"])
        redirect = http.get(f"/jobs/{job}/files/K0008/{RECENT}", follow_redirects=False)
        for address in (entry["url"], redirect.headers["location"]):
            assert hashlib.sha256(httpx.get(address).content).hexdigest() == entry["sha256"]


def test_pages_show_every_job_once_while_new_ones_arrive(http: TestClient):
    made = [_submit(http) for _ in range(5)]
    seen, cursor = [], None
    while True:
        page = http.get("/jobs", params={"pageSize": 2, **({"cursor": cursor} if cursor else {})}).json()
        seen += [job["jobId"] for job in page["jobs"]]
        cursor = page["nextCursor"]
        if cursor is None or set(made) <= set(seen):
            break
        _submit(http)
    assert len(seen) == len(set(seen))
    assert set(made) <= set(seen)
    assert [job for job in seen if job in made] == made[::-1]


def test_lists_filter_by_state_and_refuse_what_they_cannot_read(http: TestClient):
    job_id = _submit(http)
    http.post(f"/jobs/{job_id}:cancel")
    listed = http.get("/jobs", params={"status": "CANCELLED", "pageSize": 1000}).json()["jobs"]
    assert job_id in {job["jobId"] for job in listed}
    assert {job["status"] for job in listed} == {"CANCELLED"}
    for parameters in ({"status": "LOST"}, {"pageSize": 0}, {"cursor": "zzz"}, {"createdAfter": "yesterday"}):
        assert http.get("/jobs", params=parameters).status_code == 422
    assert http.get("/jobs", params={"createdAfter": "2999-01-01T00:00:00Z"}).json()["jobs"] == []


def test_chunks_can_be_listed_and_filtered(http: TestClient):
    job_id = _submit(http, {"items": [{"key": "ABC", "effectiveDates": [OLD, "20250216", "20250217"]}]})
    first = http.get(f"/jobs/{job_id}/chunks", params={"pageSize": 2}).json()
    second = http.get(f"/jobs/{job_id}/chunks", params={"pageSize": 2, "cursor": first["nextCursor"]}).json()
    dates = [one["effectiveDate"] for one in first["chunks"] + second["chunks"]]
    assert dates == [OLD, "20250216", "20250217"]
    assert second["nextCursor"] is None
    assert http.get(f"/jobs/{job_id}/chunks", params={"status": "DONE"}).json()["chunks"] == []


def test_the_limits_are_told(http: TestClient):
    body = http.get("/limits").json()
    assert body["maxChunks"] == 50
    assert body["formats"] == ["csv", "csv.gz", "ndjson", "parquet"]


def test_a_client_that_asks_too_often_is_told_when_to_come_back(module_world: World, stack: Any):
    settings = load_settings(postgres_dsn=module_world.state_dsn, exports_requests_per_minute=3)
    store = ClientStore(module_world.state)
    eager, calm = store.add("eager"), store.add("calm")
    with TestClient(create_app(settings)) as http:
        answers = [http.get("/limits", headers={"X-Api-Key": eager.api_key}) for _ in range(4)]
        assert [one.status_code for one in answers] == [200, 200, 200, 429]
        assert [one.headers["ratelimit-remaining"] for one in answers] == ["2", "1", "0", "0"]
        assert {one.headers["ratelimit-limit"] for one in answers} == {"3"}
        assert answers[0].headers["ratelimit-policy"] == "3;w=60"
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 20
        assert answers[-1].json()["type"] == "/problems/too-many-requests"
        assert answers[-1].json()["retryable"] is True
        assert http.get("/limits", headers={"X-Api-Key": calm.api_key}).status_code == 200, "others are not affected"
        assert "ratelimit-limit" not in http.get("/limits").headers, "a stranger is not counted"
        module_world.ask("UPDATE kernel.request_budget SET at = at - interval '21 s'")
        assert http.get("/limits", headers={"X-Api-Key": eager.api_key}).status_code == 200


def test_a_refused_request_changes_nothing(module_world: World, stack: Any):
    settings = load_settings(postgres_dsn=module_world.state_dsn, exports_requests_per_minute=1)
    client = ClientStore(module_world.state).add("once a minute")
    with TestClient(create_app(settings), headers={"X-Api-Key": client.api_key}) as http:
        assert http.post("/jobs", json=BODY).status_code == 202
        assert http.post("/jobs", json=BODY).status_code == 429
    made = module_world.ask("SELECT count(*) FROM exports.job WHERE client_id = %s", client.client.client_id)
    assert made == [(1,)]


def test_a_poll_waits_for_news_if_asked_to(http: TestClient, module_world: World):
    job_id = _submit(http)
    tag = http.get(f"/jobs/{job_id}").headers["etag"]
    patient = {"Prefer": "wait=15", "If-None-Match": tag}
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(http.get, f"/jobs/{job_id}", headers=patient)
        module_world.drain()
        answer = waiting.result(timeout=30)
    assert (answer.status_code, answer.headers["preference-applied"]) == (200, "wait=15")
    assert answer.headers["etag"] != tag
    ended = http.get(f"/jobs/{job_id}", headers={"Prefer": "respond-async, wait=999"})
    assert ended.json()["status"] == "COMPLETED"
    assert ended.headers["preference-applied"] == "wait=20", "never longer than the limit"


def test_a_wait_without_news_ends_as_not_modified(http: TestClient):
    job_id = _submit(http)
    tag = http.get(f"/jobs/{job_id}").headers["etag"]
    answer = http.get(f"/jobs/{job_id}", headers={"Prefer": "wait=1", "If-None-Match": tag})
    assert (answer.status_code, answer.headers["etag"]) == (304, tag)
    http.post(f"/jobs/{job_id}:cancel")


def test_a_submission_says_that_it_is_answered_asynchronously_if_asked(http: TestClient):
    answer = http.post("/jobs", json=BODY, headers={"Prefer": "respond-async"})
    assert (answer.status_code, answer.headers["preference-applied"]) == (202, "respond-async")
    assert "preference-applied" not in http.post("/jobs", json=BODY).headers


UNTOLD = {"content-length", "content-type", "date", "server", "connection"}


def test_every_status_and_header_that_is_sent_is_in_the_document(http: TestClient, module_world: World):
    """Guards clients that are generated from the document: what it does not name, they do not see."""
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    job_id = _submit(http)
    module_world.drain()
    failed = _submit(http, headers={"Prefer": "respond-async"})
    tag = http.get(f"/jobs/{job_id}").headers["etag"]
    calls = [
        ("post", "/jobs", {"json": BODY, "headers": {"Idempotency-Key": "doc", "Prefer": "respond-async"}}),
        ("post", "/jobs", {"json": BODY, "headers": {"Idempotency-Key": "doc"}}),
        ("post", "/jobs?validateOnly=true", {"json": BODY}),
        ("post", "/jobs", {"json": {}}),
        ("post", "/jobs", {"content": b"{", "headers": {"Content-Type": "application/json"}}),
        ("post", "/jobs", {"content": b"{"}),
        ("post", "/jobs", {"json": BODY, "headers": {"X-Api-Key": ""}}),
        ("get", "/jobs", {}),
        ("get", f"/jobs/{job_id}", {"headers": {"Prefer": "wait=0"}}),
        ("get", f"/jobs/{job_id}", {"headers": {"If-None-Match": tag}}),
        ("get", "/jobs/J20200101_000001", {}),
        ("get", f"/jobs/{job_id}/chunks", {}),
        ("get", f"/jobs/{job_id}/manifest", {}),
        ("get", f"/jobs/{job_id}/files/ABC/{OLD}", {"follow_redirects": False}),
        ("get", f"/jobs/{job_id}/files/NO/{OLD}", {}),
        ("post", f"/jobs/{job_id}:cancel", {}),
        ("post", f"/jobs/{failed}:cancel", {}),
        ("post", f"/jobs/{job_id}:retry", {}),
        ("get", "/limits", {}),
        ("get", "/webhook-secret", {}),
        ("get", "/problems/wrong-state", {}),
        ("get", "/problems/nothing", {}),
        ("get", "/healthz", {}),
    ]
    for method, address, options in calls:
        answer = getattr(http, method)(address, **options)
        path = _template(document, address.partition("?")[0])
        told = document["paths"][path][method]["responses"].get(str(answer.status_code))
        assert told is not None, (method, address, answer.status_code)
        names = {name.lower() for name in told.get("headers", {})}
        assert set(answer.headers) - UNTOLD <= names, (method, address, answer.status_code)


def _template(document: Any, address: str) -> str:
    patterns = {path: re.sub(r"\{[^}]+\}", "[^/:]+", path) for path in document["paths"]}
    (found,) = [path for path, pattern in patterns.items() if re.fullmatch(pattern, address)]
    return found


ROUTES = [
    ("POST", "/jobs"),
    ("GET", "/jobs"),
    ("GET", "/jobs/{id}"),
    ("GET", "/jobs/{id}/chunks"),
    ("GET", "/jobs/{id}/manifest"),
    ("GET", f"/jobs/{{id}}/files/ABC/{OLD}"),
    ("POST", "/jobs/{id}:cancel"),
    ("POST", "/jobs/{id}:retry"),
    ("GET", "/limits"),
    ("GET", "/webhook-secret"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_a_stranger_and_none_shows_anothers_job(
    http: TestClient, module_world: World, method: str, path: str
):
    """Guards every door: no key, a wrong key, a revoked key, and a good key for somebody else's job."""
    job_id = _submit(http)
    module_world.drain()
    address = path.format(id=job_id)
    store = ClientStore(module_world.state)
    name = f"stranger {method} {path}".translate(str.maketrans("/{}:", "...."))[:60]
    other, gone = store.add(name), store.add("g" + name[:50])
    store.revoke(gone.client.name)
    forged = module_world.client.api_key[:-1] + ("A" if module_world.client.api_key[-1] != "A" else "B")
    for key in ("", "nonsense", forged, gone.api_key):
        answer = http.request(method, address, headers={"X-Api-Key": key}, json=BODY)
        assert (answer.status_code, answer.json()["type"]) == (401, "/problems/unauthorized"), key
    if "{id}" in path:
        foreign = http.request(method, address, headers={"X-Api-Key": other.api_key}, follow_redirects=False)
        unknown = http.request(
            method, path.format(id="J20200101_000001"), headers={"X-Api-Key": other.api_key}, follow_redirects=False
        )
        assert (foreign.status_code, unknown.status_code) == (404, 404)
        assert foreign.json()["type"] == unknown.json()["type"] == "/problems/job-not-found"
    elif path == "/jobs" and method == "GET":
        assert http.get("/jobs", headers={"X-Api-Key": other.api_key}).json()["jobs"] == []


def test_keys_are_not_kept_in_the_clear(module_world: World):
    secret = module_world.client.api_key[-16:]  # its end, not a part between underscores: the secret may hold some
    assert secret not in str(module_world.ask("SELECT * FROM exports.client"))
