"""One group of ticks from end to end on the running stack: HTTP in, bronze, SQS, sensor, run, silver."""

from __future__ import annotations

import hashlib
import io
import secrets
import time
from typing import Any

import dagster as dg
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.kernel.postgres import pool
from lockstep.kernel.settings import load_settings
from lockstep.ticks.silver.dispatch import DispatchTable
from lockstep.ticks.silver.model import SILVER_ASSET
from resources.ticks import project_store

pytestmark = [pytest.mark.stack, pytest.mark.platform]

PATIENCE_SECONDS = 240


def test_ticks_sent_over_http_are_silvered_by_the_daemon_and_turn_green(stack: Any, spark: Any):
    settings = load_settings()
    assert settings.postgres_dsn is not None
    with pool(settings.postgres_dsn, application_name="e2e") as state:
        made = project_store(settings, state).add(f"e2e-{secrets.token_hex(3)}", actor="test")
    address = f"http://127.0.0.1:{stack.home.ports()['ingest']}/v1/projects/{made.project_id}"
    headers = {"X-Api-Key": made.org_id, "X-Api-Secret": made.api_secret}
    ticks = [f"e2e-{secrets.token_hex(4)}-{n}" for n in (1, 2)]
    with httpx.Client(base_url=address, headers=headers, timeout=120) as http:
        _send(http, made, ticks[0], [(1, "a"), (2, "b")], None)
        _send(http, made, ticks[1], [(2, "b2"), (3, "c")], ticks[0])
    _wait(lambda: _states(ticks) == ["DONE", "DONE"], lambda: str(_states(ticks)))
    path = f"s3a://{settings.lake_bucket}/silver/{made.project_id}/orders"
    rows = spark.read.format("delta").load(path).orderBy("id").collect()
    assert [(one.id, one.name, one["_tick"]) for one in rows] == [
        (1, "a", ticks[0]),
        (2, "b2", ticks[1]),
        (3, "c", ticks[1]),
    ]
    with dg.DagsterInstance.get() as instance:
        _wait(
            lambda: set(ticks) <= set(instance.get_materialized_partitions(dg.AssetKey(SILVER_ASSET))),
            lambda: "partitions are not green",
        )


def _send(http: httpx.Client, made: Any, tick_id: str, rows: list[tuple[int, str]], previous: str | None) -> None:
    body = io.BytesIO()
    pq.write_table(
        pa.table({"id": pa.array([one[0] for one in rows], pa.int64()), "name": [one[1] for one in rows]}), body
    )
    data = body.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    http.put(f"/ticks/{tick_id}/parts/0", content=data, headers={"X-Sha256": digest}).raise_for_status()
    manifest = {
        "schema_version": "1.0",
        "org_id": made.org_id,
        "project_id": made.project_id,
        "tick_id": tick_id,
        "mode": "delta",
        "dt": "20260507",
        "tables": [
            {
                "name": "orders",
                "primary_key": ["id"],
                "columns": [{"name": "id", "type": "bigint"}, {"name": "name", "type": "string"}],
                "parquets": [{"file_seq": 0, "sha256": digest, "bytes": len(data), "rows": len(rows)}],
            }
        ],
    } | ({"prev_tick_id": previous} if previous else {})
    answer = http.post(f"/ticks/{tick_id}/finalize", json=manifest)
    assert answer.status_code == 200, answer.text


def _states(ticks: list[str]) -> list[str]:
    import boto3

    from lockstep.kernel.clock import SystemClock

    rows = DispatchTable(boto3.client("dynamodb")).get_all(ticks, SystemClock().now())
    return [rows[one].state.value if one in rows else "-" for one in ticks]


def _wait(condition: Any, words: Any) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, words()
        time.sleep(0.5)
