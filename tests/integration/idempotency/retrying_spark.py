"""A program: tasks of the blocks on a Spark that retries them; the first attempt of each dies after its side effect.

What belongs here: the tasks, their deaths and what came of it, as JSON. What does not: what must hold, which is in
test_task_retries.py. A program, because Spark's own local mode never retries and Spark Connect has no other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import boto3
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from lockstep.idempotency import keyed, transactional
from lockstep.kernel.ids import SystemIds
from resources.classic_spark import prepare_java

TASKS, ROWS = 3, 1000


def die_at_first() -> None:
    """The first attempt of a task ends here: in partition 0 with its process, in the others by an error."""
    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0:
        if context.partitionId() == 0:
            os._exit(137)
        raise RuntimeError("died after its side effect")


class DyingStage(transactional.StageTask):
    """Its rows are committed to staging, and its receipt never arrives."""

    def _answer(self, receipt: transactional.Receipt) -> Any:
        die_at_first()
        return super()._answer(receipt)


class DyingPut:
    """Its object is on S3, and nobody was told."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Put one object for the partition, named by it."""
        rows = sum(batch.num_rows for batch in batches)
        context = TaskContext.get()
        part = context.partitionId() if context else 0
        put = keyed.put_keyed(boto3.client("s3"), bucket=self.bucket, key=f"part={part}", body=b"%d rows" % rows)
        die_at_first()
        yield pa.RecordBatch.from_pydict({"part": pa.array([part], pa.int32()), "written": pa.array([put.written])})


def main(dsn: str, bucket: str) -> None:
    """Write the same rows with two blocks."""
    prepare_java()
    config = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.python.worker.reuse": "false"}
    spark = SparkSession.builder.master("local[2,4]").config(map=config).getOrCreate()
    frame = spark.range(0, ROWS, 1, TASKS).selectExpr("CAST(id AS INT) AS id", "'d1' AS unit")
    transactional.StageTask = DyingStage  # type: ignore[misc]
    key, how = transactional.Key("visits", "d1"), transactional.append()
    applied = transactional.write(frame, dsn, ("public", "visits"), key, run="r", how=how, ids=SystemIds())
    puts = frame.mapInArrow(DyingPut(bucket), "part INT, written BOOLEAN").collect()
    outcome = {
        "applied": [applied.rows, applied.already],
        "put": sorted([row["part"], row["written"]] for row in puts),
    }
    print("outcome", json.dumps(outcome))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
