"""The blocks on a Spark that really retries its tasks: every first attempt does its work and then dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lockstep.kernel.postgres import Connection
from lockstep.kernel.settings import PROJECT_ROOT
from tests.integration.idempotency import retrying_spark

pytestmark = pytest.mark.stack

TASKS, ROWS = retrying_spark.TASKS, retrying_spark.ROWS


def test_tasks_that_die_after_their_side_effect_are_retried_and_counted_once(
    connection: Connection, dsn: str, s3: Any, bucket: str
):
    """Guards receipts and the condition of a put: each first attempt left staged rows and an object, and no answer."""
    connection.execute("CREATE TABLE visits (id int PRIMARY KEY, unit text NOT NULL)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    done = subprocess.run(
        [sys.executable, "-m", retrying_spark.__name__, dsn, bucket],
        cwd=PROJECT_ROOT,
        env=environment | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    outcome = [line.removeprefix("outcome ") for line in done.stdout.splitlines() if line.startswith("outcome ")]
    assert outcome, done.stderr[-2000:]
    assert json.loads(outcome[0]) == {
        "applied": [ROWS, False],
        "put": [[part, False] for part in range(TASKS)],
    }
    assert "died after its side effect" in done.stderr
    assert connection.execute("SELECT count(*), count(DISTINCT id) FROM visits").fetchone() == (ROWS, ROWS)
    assert sorted(item["Key"] for item in s3.list_objects_v2(Bucket=bucket)["Contents"]) == [
        f"part={part}" for part in range(TASKS)
    ]
    staged = "SELECT count(*) FROM pg_tables WHERE schemaname = 'idempotency' AND tablename LIKE 'stage\\_%'"
    assert connection.execute(staged).fetchone() == (0,)
