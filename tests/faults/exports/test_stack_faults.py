"""One job on the running stack while its parts are killed, one after another: it ends by itself, whole and right."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from typing import Any

import httpx
import psycopg
import pytest

from lockstep.exports.clients import ClientStore
from lockstep.exports.model import Format, FormulaGuard
from lockstep.exports.source import SourceSession
from lockstep.kernel.postgres import on_connect
from resources.exports import s3_client
from stack.lifecycle import Stack

pytestmark = [pytest.mark.stack, pytest.mark.platform, pytest.mark.serial, pytest.mark.long]

CHUNKS = 60
ROWS = 30_000
PATIENCE = 300
DAYS = [date(2024, 3, 1) + timedelta(days=n) for n in range(CHUNKS)]


@pytest.fixture
def key(stack: Stack) -> Iterator[str]:
    """A key with many rows, so that the job is long enough to be hit."""
    name = f"F{secrets.token_hex(4)}"
    with psycopg.connect(stack.site().environment["LOCKSTEP_SOURCE_DSN"], autocommit=True) as source:
        source.execute("INSERT INTO demo.source_key VALUES (%s, %s)", (name, ROWS))
    yield name
    with psycopg.connect(stack.site().environment["LOCKSTEP_SOURCE_DSN"], autocommit=True) as source:
        source.execute("DELETE FROM demo.source_key WHERE key = %s", (name,))


class Client:
    """A client that behaves: it repeats what failed, with the same key."""

    def __init__(self, stack: Stack, api_key: str) -> None:
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{stack.home.ports()['exports']}", headers={"X-Api-Key": api_key}, timeout=20
        )

    def call(self, method: str, path: str, **options: Any) -> Any:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                answer = self._http.request(method, path, **options)
                if answer.status_code < 500:
                    return answer.raise_for_status().json()
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"{path} was never answered"
            time.sleep(0.3)


def _until(what: Callable[[], Any], words: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.2)
    pytest.fail(f"not within {PATIENCE} s: {words}")


def _kill(stack: Stack, *names: str) -> None:
    running = stack.running().processes()
    for name in names:
        os.kill(running[name]["pid"], signal.SIGKILL)


def test_a_job_survives_the_death_of_every_part_while_it_runs(stack: Stack, key: str):
    """Guards the promise to clients: an acknowledged job ends, once, with the right bytes, whatever dies meanwhile."""
    environment = stack.site().environment
    with psycopg.connect(environment["LOCKSTEP_POSTGRES_DSN"], autocommit=True) as state:
        client = Client(stack, ClientStore(state).add(f"faults-{secrets.token_hex(4)}").api_key)
    body = {"items": [{"key": key, "effectiveDates": [f"{day:%Y%m%d}" for day in DAYS]}], "force": True}
    headers = {"Idempotency-Key": key}
    job_id = client.call("POST", "/jobs", json=body, headers=headers)["jobId"]
    path, seen = f"/jobs/{job_id}", [0]

    def done(least: int) -> bool:
        job = client.call("GET", path)
        seen.append(job["done"])
        return job["done"] >= least or job["status"] in ("COMPLETED", "FAILED")

    _kill(stack, "exports", "relay", "sqs")  # nothing of the job has been sent yet, or half of it
    for least, names in ((3, ["s3"]), (12, ["postgres"]), (24, ["spark"])):
        _until(lambda least=least: done(least), f"{least} chunks are done")
        assert seen[-1] < CHUNKS, f"the job was over before {names} could be killed: nothing was proven"
        _kill(stack, *names)
    assert client.call("POST", "/jobs", json=body, headers=headers)["jobId"] == job_id, "the key still leads to the job"
    _until(lambda: done(CHUNKS), "the job ends by itself")
    assert seen == sorted(seen), "progress never goes back"
    job = client.call("GET", path)
    assert (job["status"], job["done"], job["failed"], job["filesGenerated"]) == ("COMPLETED", CHUNKS, 0, CHUNKS)
    _assert_right(stack, environment, job_id, key)


def _assert_right(stack: Stack, environment: dict[str, str], job_id: str, key: str) -> None:
    """Every file against the source itself and against its record: not torn, not doubled, not another one."""
    s3, bucket = s3_client("us-east-1"), "lockstep-exports"
    with psycopg.connect(environment["LOCKSTEP_POSTGRES_DSN"]) as state:
        rows = state.execute(
            "SELECT c.effective_date, c.s3_object_key, c.sha256, c.attempts, f.sha256 = c.sha256"
            "  FROM exports.job_chunk AS c JOIN exports.file_cache AS f USING (file_id) WHERE c.job_id = %s",
            (job_id,),
        ).fetchall()
    assert len({name for _, name, *_ in rows}) == CHUNKS
    source = SourceSession(on_connect(environment["LOCKSTEP_SOURCE_DSN"], application_name="oracle"))
    for day, name, recorded, attempts, same in rows:
        stored = hashlib.sha256(s3.get_object(Bucket=bucket, Key=name)["Body"].read()).hexdigest()
        oracle = hashlib.sha256(b"".join(source.copy(key, day, Format.CSV, FormulaGuard.NONE))).hexdigest()
        assert stored == recorded == oracle, name
        assert same, f"{name}: the record of the file is another one"
        assert 1 <= attempts <= stack.settings.exports_max_attempts
    source.close()
