"""A silver worker in a process of its own, for tests that kill or freeze it: DSN, lake, queue, project, lease."""

from __future__ import annotations

import os
import sys

import boto3

from lockstep.kernel.errors import LostClaim
from lockstep.kernel.postgres import pool
from tests.silver_world import World

LOST = 7
"""Exit code of a worker that learned that its lane was taken over."""


def main() -> int:
    from pyspark.sql import SparkSession

    dsn, lake, queue, project, ttl = sys.argv[1:]
    spark = SparkSession.builder.remote(os.environ["LOCKSTEP_SPARK_REMOTE"]).create()
    clients = {name: boto3.client(name) for name in ("s3", "sqs", "dynamodb")}
    with pool(dsn, application_name="victim", max_size=3) as source:
        world = World(dsn, source, lake, clients["s3"], clients["sqs"], queue, queue, clients["dynamodb"], spark)
        try:
            world.worker(lease_seconds=float(ttl)).drain(project, run_id="victim")
        except LostClaim:
            return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
