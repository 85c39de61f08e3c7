"""Two replicas of a service on the same stores: requests may reach either, both work at once, and one may be killed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from lockstep.exports.clients import ClientStore
from lockstep.kernel.migrate import migrate
from lockstep.kernel.outbox import Message, Outbox
from lockstep.kernel.postgres import connect, transaction
from tests.conftest import FreshQueue
from tests.replicas import ServiceProcess, two_replicas
from tests.unit.readiness.webserver import serving

pytestmark = pytest.mark.stack


def _at_once(replicas: tuple[ServiceProcess, ...], times: int, call: Callable[[ServiceProcess], Any]) -> list[Any]:
    with ThreadPoolExecutor(times) as pool:
        return list(pool.map(call, islice(cycle(replicas), times)))


def test_one_key_sent_to_both_replicas_of_exports_is_one_job(database: str, tmp_path: Path):
    for package in ("lockstep.kernel", "lockstep.exports"):
        migrate(database, package)
    with connect(database, application_name="test") as connection:
        key = ClientStore(connection).add("both").api_key
    body = {"items": [{"key": "ABC", "effectiveDates": ["20250215"]}], "output": {"format": "CSV"}}
    headers = {"X-Api-Key": key, "Idempotency-Key": "once"}

    def submit(replica: ServiceProcess) -> httpx.Response:
        return httpx.post(f"{replica.url}/jobs", json=body, headers=headers, timeout=30)

    with two_replicas("exports", tmp_path, LOCKSTEP_POSTGRES_DSN=database) as (first, second):
        answers = _at_once((first, second), 8, submit)
        assert {answer.status_code for answer in answers} <= {202, 409}
        (job,) = {answer.json()["jobId"] for answer in answers if answer.status_code == 202}
        first.kill()
        found = httpx.get(f"{second.url}/jobs/{job}", headers={"X-Api-Key": key}, timeout=30)
        assert (found.status_code, found.json()["status"]) == (200, "SUBMITTED")
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM exports.job").fetchone() == (1,)


def test_a_pipeline_asked_for_at_both_replicas_of_readiness_starts_once(stack: Any, tmp_path: Path):
    name = f"two-{secrets.token_hex(4)}"
    with serving(lambda seen: (200, {})) as (address, seen):
        host = address.removeprefix("http://")
        variables = {"LOCKSTEP_READINESS_API_KEY": "right", "LOCKSTEP_READINESS_ALLOWED_HOSTS": host}
        with two_replicas("readiness", tmp_path, **variables) as (first, second):
            body = {
                "name": name,
                "archetype": "platform-gate",
                "traits": {"progress": {"evaluator": "builtin:table-reachable"}},
                "trigger": {"type": "http", "url": f"{address}/start", "completion": "callback"},
            }
            assert _ask(first, "POST", "pipelines", body).status_code == 201
            answers = _at_once((first, second), 6, lambda one: _ask(one, "POST", f"pipelines/{name}/run", {}))
            statuses = {answer.status_code for answer in answers}
            assert 202 in statuses and statuses <= {202, 409, 412}, [one.text for one in answers]
            assert len(seen) == 1, "the job was started once"
            first.kill()
            (run,) = _ask(second, "GET", f"pipelines/{name}/runs").json()
            done = _ask(second, "POST", f"runs/{run['runId']}/complete", {"status": "success"})
            assert (done.status_code, done.json()["status"]) == (200, "COMPLETED")
            assert _ask(second, "DELETE", f"pipelines/{name}").status_code == 204


def _ask(replica: ServiceProcess, method: str, path: str, body: Any = None) -> httpx.Response:
    return httpx.request(method, f"{replica.url}/api/{path}", json=body, headers={"X-API-Key": "right"}, timeout=60)


@pytest.fixture
def outbox(database: str) -> Iterator[Callable[[list[Message]], None]]:
    """A way to commit messages."""
    for package in ("lockstep.kernel", "lockstep.exports", "lockstep.ticks", "lockstep.ticks.silver"):
        migrate(database, package)
    with connect(database, application_name="test") as connection:

        def put(messages: list[Message]) -> None:
            with transaction(connection) as opened:
                Outbox().put_all(opened, messages)

        yield put


def test_two_relays_deliver_everything_and_one_may_be_killed(
    database: str, outbox: Callable[[list[Message]], None], queue: FreshQueue, sqs: Any, tmp_path: Path
):
    def messages(numbers: range) -> list[Message]:
        return [Message(f"lane/{number}", f"sqs:{queue.name}", {"number": number}) for number in numbers]

    outbox(messages(range(20)))
    with two_replicas("relay", tmp_path, LOCKSTEP_POSTGRES_DSN=database) as (first, _):
        assert len(_received(sqs, queue.url, 20)) == 20
        first.kill()
        outbox(messages(range(20, 30)))
        assert len(_received(sqs, queue.url, 10)) == 10


def _received(sqs: Any, url: str, wanted: int) -> set[str]:
    found: set[str] = set()
    deadline = time.monotonic() + 150  # what a killed relay had claimed is free after two minutes
    while len(found) < wanted and time.monotonic() < deadline:
        for message in sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1).get("Messages", []):
            found.add(message["Body"])
            sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    return found
