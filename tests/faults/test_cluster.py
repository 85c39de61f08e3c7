"""A Spark cluster that loses a worker, then its master, while a job runs: the job ends well and its rows are right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep.kernel.settings import load_settings
from stack import orphans
from stack.health import probe
from stack.home import Home
from stack.lifecycle import Stack

pytestmark = [pytest.mark.long, pytest.mark.serial]

TASKS, ROWS = 12, 1000


@pytest.fixture
def clustered(small_home: Path) -> Iterator[Stack]:
    """A stack of its own: S3 and Spark with a master and two workers."""
    stack = Stack(load_settings(home=small_home))
    stack.up(["s3", "spark"], cluster=True)
    yield stack


@pytest.fixture
def session(clustered: Stack) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    opened = SparkSession.builder.remote(clustered.site().environment["LOCKSTEP_SPARK_REMOTE"]).create()
    yield opened
    if not opened.is_stopped:
        opened.stop()


def _wait(what: Callable[[], Any], words: str, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds} s: {words}")


def _slow_rows(marks: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A task leaves a mark with its process when it begins, so that the test knows when to kill whom."""

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            (marks / f"{os.getpid()}-{time.monotonic_ns()}").touch()
            time.sleep(1.5)
            yield batch

    return work


def _write(session: Any, table: str, marks: Path) -> None:
    rows = session.range(0, TASKS * ROWS, 1, TASKS).mapInArrow(_slow_rows(marks), "id long")
    rows.write.format("delta").mode("overwrite").save(table)


def _pid(stack: Stack, part: str) -> int:
    return int(stack.running().processes()[part]["pid"])


def _kill(stack: Stack, part: str) -> None:
    before = stack.running().restarts()[part]
    os.kill(_pid(stack, part), signal.SIGKILL)
    _wait(lambda: stack.running().restarts()[part] > before, f"{part} is started again")


def test_a_worker_and_then_the_master_die_in_the_middle_of_a_job(clustered: Stack, session: Any, tmp_path: Path):
    site = clustered.site()
    table = "s3a://lockstep-lake/cluster"
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(_write, session, table, tmp_path)
        _wait(lambda: len(list(tmp_path.iterdir())) >= 2, "tasks have begun")
        _kill(clustered, "spark-worker-1")
        assert not job.done(), "the job must be running when its worker dies"
        _wait(lambda: probe("spark-worker-1", site) is None, "the worker is back")
        _kill(clustered, "spark-master")
        job.result(timeout=240)
    for part in ("spark-master", "spark-worker-1", "spark-worker-2", "spark"):
        _wait(lambda part=part: probe(part, site) is None, f"{part} is healthy")
    found = session.read.format("delta").load(table)
    assert (found.count(), found.distinct().count()) == (TASKS * ROWS, TASKS * ROWS)
    _write(session, table, tmp_path)
    assert session.read.format("delta").load(table).count() == TASKS * ROWS


def test_a_cluster_leaves_no_process_behind(clustered: Stack, session: Any):
    """Executors are children of workers, two levels below the supervisor."""
    session.range(100).selectExpr("sum(id)").collect()
    session.stop()  # without its server it would try for minutes
    assert any("CoarseGrainedExecutorBackend" in " ".join(one.cmdline()) for one in orphans.members(clustered.home))
    clustered.down()
    assert orphans.members(Home(clustered.home.root)) == []
