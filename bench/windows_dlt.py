"""dlt as a loader of the same files: run as a program by an environment that holds dlt and nothing of ours.

What belongs here: dlt at its best (Arrow in, CSV by COPY, merge by key, one load per window). What does not: anything
of Lockstep; this file imports none of it. Reads its order as JSON from stdin, prints seconds per window as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any


def main() -> None:
    """Load every window of the order, the first one twice: once to warm up."""
    import boto3
    import dlt

    order = json.load(sys.stdin)
    os.environ["DATA_WRITER__DISABLE_COMPRESSION"] = "true"
    pipeline = dlt.pipeline(
        pipeline_name="bench_windows",
        pipelines_dir=order["folder"],
        destination=dlt.destinations.postgres(order["dsn"]),
        dataset_name="bench_dlt",
    )
    s3 = boto3.client("s3")
    _load(pipeline, s3, order["bucket"], order["windows"][0])
    taken = []
    for window in order["windows"]:
        started = time.perf_counter()
        _load(pipeline, s3, order["bucket"], window)
        taken.append(time.perf_counter() - started)
    print(json.dumps(taken))


def _load(pipeline: Any, s3: Any, bucket: str, window: dict[str, str]) -> None:
    import dlt
    from pyarrow import csv

    def rows(key: str) -> Iterator[Any]:
        yield csv.read_csv(s3.get_object(Bucket=bucket, Key=key)["Body"])

    resources = [
        dlt.resource(rows(key), name=table, primary_key="id", write_disposition="merge")
        for table, key in window.items()
    ]
    pipeline.run(resources, loader_file_format="csv").raise_on_failed_jobs()


if __name__ == "__main__":
    main()
