"""Exports from end to end on the running stack: HTTP in, relay, sensor, run queue, Spark, file, nothing left over."""

from __future__ import annotations

import hashlib
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import psycopg
import pytest

from lockstep.exports.clients import ClientStore

pytestmark = [pytest.mark.stack, pytest.mark.platform]

RECENT = f"{datetime.now(UTC) - timedelta(days=2):%Y%m%d}"


def test_a_job_submitted_over_http_is_built_by_spark_and_its_messages_are_gone(stack: Any, sqs: Any):
    environment = stack.site().environment
    with psycopg.connect(environment["LOCKSTEP_POSTGRES_DSN"], autocommit=True) as state:
        client = ClientStore(state).add(f"e2e-{secrets.token_hex(4)}")
    address = f"http://127.0.0.1:{stack.home.ports()['exports']}"
    with httpx.Client(base_url=address, headers={"X-Api-Key": client.api_key}, timeout=30) as http:
        body = {"items": [{"key": key, "effectiveDates": [RECENT]} for key in ("ABC", "XYZ", "K0001")]}
        job_id = http.post("/jobs", json=body).raise_for_status().json()["jobId"]
        job = _wait(http, job_id)
        assert (job["status"], job["done"]) == ("COMPLETED", 3), job
        manifest = http.get(f"/jobs/{job_id}/manifest").json()
    for one in manifest["files"]:
        assert hashlib.sha256(httpx.get(one["url"]).content).hexdigest() == one["sha256"]
    assert _messages_of(sqs, environment, job_id) == 0


def _wait(http: httpx.Client, job_id: str) -> dict[str, Any]:
    deadline, seen = time.monotonic() + 240, 0
    while time.monotonic() < deadline:
        job = http.get(f"/jobs/{job_id}").json()
        assert job["percent"] >= seen, "progress never goes back"
        seen = job["percent"]
        if job["status"] in ("COMPLETED", "FAILED", "CANCELLED"):
            return job
        time.sleep(0.5)
    pytest.fail(f"the job did not end: {job}")


def _messages_of(sqs: Any, environment: dict[str, str], job_id: str) -> int:
    """Messages of the job that are still on their way or in the queue; the sensor removes them at its next ticks."""
    url = sqs.get_queue_url(QueueName="job-chunk-work")["QueueUrl"]
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        with psycopg.connect(environment["LOCKSTEP_POSTGRES_DSN"]) as state:
            row = state.execute(
                "SELECT count(*) FROM kernel.outbox WHERE lane LIKE %s AND delivered_at IS NULL",
                (f"exports/{job_id}/%",),
            ).fetchone()
        found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
        left = sum(int(value) for value in found.values()) + (row[0] if row else 0)
        if left == 0:
            return 0
        time.sleep(1)
    return left
