"""The services against the real parts: ready when everything works, honest when something does not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from lockstep.kernel.settings import load_settings
from services import exports, ingest, readiness, vault

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("module", [exports, ingest, readiness, vault])
def test_a_service_is_ready_when_its_parts_work(stack: Any, module: Any):
    """Guards the checks themselves: one that always fails keeps traffic away for ever."""
    with TestClient(module.create_app(load_settings())) as http:
        assert _missing(http, until=[]) == []


@pytest.mark.parametrize(
    ("module", "bucket"), [(exports, "exports_bucket"), (ingest, "ticks_bucket"), (ingest, "lake_bucket")]
)
def test_a_service_names_the_one_part_that_is_missing(stack: Any, module: Any, bucket: str):
    """Guards against an all-or-nothing answer that sends people to the wrong part."""
    with TestClient(module.create_app(load_settings(**{bucket: "no-such-bucket-here"}))) as http:
        assert _missing(http, until=["s3"]) == ["s3"]


def test_a_service_does_not_ask_for_the_buckets_of_others(stack: Any):
    """Guards a role with the least rights: it may not look at them, and would never be ready."""
    with TestClient(exports.create_app(load_settings(lake_bucket="no-such-bucket-here"))) as http:
        assert _missing(http, until=[]) == []


def _missing(http: TestClient, *, until: list[str]) -> list[str]:
    """What `/readyz` misses; the first Spark session of a cold server takes longer than one check."""
    deadline = time.monotonic() + 60
    while True:
        answer = http.get("/readyz")
        found = [] if answer.status_code == 200 else answer.json()["missing"]
        if found == until or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_service_ends_in_peace_when_told_to(stack: Any):
    """Guards deployments: SIGTERM must end the process by itself, with nothing left behind."""
    port = _free_port()
    command = f"from services.run import serve; serve('vault', port={port})"
    process = subprocess.Popen([sys.executable, "-c", command], env=dict(os.environ), stderr=subprocess.PIPE)
    try:
        _wait_until_alive(port)
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGTERM)
    assert b"Traceback" not in logged


def _wait_until_alive(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail("the service did not come alive")
