"""Windows against a hand-written loader and against one run per window, on the same files in the same run.

What belongs here: making the backlog, the baselines, and the measurements. What does not: the pipeline. The platform is
measured whole: queue rows, sensor, run, Spark, commits and events, from the rows' arrival to the last commit.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import psutil

from bench.report import Context, Result, Target, median, peak_memory_mb, seconds
from lockstep.kernel import postgres
from lockstep.kernel.errors import Terminal
from lockstep.kernel.settings import load_settings
from lockstep.windows.ledger import WindowLedger
from lockstep.windows.model import FileType, RawFile, RawManifest, Window, file_key
from lockstep.windows.queue import WindowQueue
from lockstep.windows.store import WindowStore
from resources.clients import aws_client

OBJECTS = 8
ROWS = 100
BACKLOG, QUICK_BACKLOG = 960, 192
SINGLE_RUNS = 3
STEP = timedelta(minutes=15)
PATIENCE_SECONDS = 1800.0
BUCKET = "raw-ddapi"
_COLUMNS = ("id", "modified_date__v", "name__v", "amount__c", "status__v")


def run(context: Context) -> Result:
    """Measure on the stack of this home, which must be up, with vaults of its settings."""
    bench, result = _Bench(context), Result()
    count = QUICK_BACKLOG if context.quick else BACKLOG
    with bench.vault() as vault:
        _backlog(bench, vault, count, result)
    return result


def _backlog(bench: _Bench, vault: str, count: int, result: Result) -> None:
    bench.begin(vault)
    bench.say("one window first, so that code, Spark and tables are warm")
    bench.through_platform(vault, bench.publish(vault, 1))

    single, split = [], []
    for _ in range(SINGLE_RUNS):
        single.append(bench.through_platform(vault, bench.publish(vault, 1)))
        split.append(bench.split(vault))
    result.samples["single window, READY to APPLIED, s"] = single
    for name in split[0]:
        result.samples[f"  of that: {name}, s"] = [one[name] for one in split]

    small = bench.publish(vault, max(16, count // 10))
    with peak_memory_mb(bench.spark_pid()) as spark_small, bench.run_memory() as run_small:
        bench.through_platform(vault, small)
    bench.say(f"a backlog of {count} windows with {OBJECTS} objects of {ROWS} rows")
    windows = bench.publish(vault, count)
    with peak_memory_mb(bench.spark_pid()) as spark_large, bench.run_memory() as run_large:
        ours = bench.through_platform(vault, windows)
    theirs = seconds(lambda: bench.by_hand(windows))
    result.samples["platform, s"] = [ours]
    result.samples["hand-written, s"] = [theirs]
    result.ratio("vs_handwritten", theirs / ours, Target(1.2))
    result.ratio("vs_run_per_window", median(single) * count / ours, Target(30))
    growth = (spark_large() + run_large()) / max(1.0, spark_small() + run_small())
    result.ratio("memory_growth", growth, Target(1.2, at_least=False))


class _Bench:
    """The parts that are measured with."""

    def __init__(self, context: Context) -> None:
        from stack.environment import adopt  # noqa: PLC0415
        from stack.lifecycle import Stack  # noqa: PLC0415

        adopt(load_settings())
        settings = load_settings()
        if settings.warehouse_dsn is None:
            raise Terminal("no stack is known here.", next_step="start it with `lockstep up`.")
        self._dsn = settings.warehouse_dsn.get_secret_value()
        self._stack = Stack(settings)
        self._settings = settings
        self.say = context.say
        self._s3 = aws_client("s3", region=settings.aws_region)
        self._dynamodb = aws_client("dynamodb", region=settings.aws_region)
        self._queue = WindowQueue(self._dynamodb)
        self._dagster = f"http://127.0.0.1:{self._stack.site().ports['dagster']}"
        self._store = WindowStore(partial(postgres.connect, self._dsn, application_name="bench-windows"))
        self._next: dict[str, datetime] = {}

    @contextmanager
    def vault(self) -> Iterator[str]:
        """The last vault of the settings: the platform must know it."""
        yield self._settings.vault_ids[-1]
        self._store.close()

    def begin(self, vault: str) -> None:
        """Begin the vault's chain if nobody did; go on where it stands otherwise."""
        first = datetime(self._settings.windows_start.year, 1, 1, tzinfo=UTC)
        first = max(first, datetime.combine(self._settings.windows_start, datetime.min.time(), UTC))
        self._store.open_lane(vault, 1, first, "benchmark")
        lane = self._store.lane(vault)
        waiting = WindowLedger(self._dynamodb).pending(vault, lane.watermark) if lane else []
        if lane is None or waiting or not lane.has_begun:
            raise Terminal("the vault has windows of its own.", unit=vault, next_step="use a fresh stack.")
        self._next[vault] = lane.watermark

    def publish(self, vault: str, count: int) -> list[tuple[Window, str]]:
        """Raw files in the bucket and their checksums; the queue is told later."""
        made = []
        for _ in range(count):
            window = Window(vault, self._next[vault], self._next[vault] + STEP)
            self._next[vault] = window.stop
            files = tuple(self._file(window, number) for number in range(OBJECTS))
            manifest = RawManifest(window, files, (), (), OBJECTS * ROWS, window.stop)
            self._s3.put_object(Bucket=BUCKET, Key=window.manifest_key, Body=manifest.to_json())
            made.append((window, manifest.checksum))
        return made

    def through_platform(self, vault: str, windows: list[tuple[Window, str]]) -> float:
        """Seconds from the first READY row to the last commit."""
        stop, started = windows[-1][0].stop, time.perf_counter()
        for window, checksum in windows:
            self._queue.add_ready(window, checksum)
        deadline = started + PATIENCE_SECONDS
        while (lane := self._store.lane(vault)) is None or lane.watermark < stop:
            if time.perf_counter() > deadline:
                raise Terminal("the platform did not apply the backlog in time.", unit=vault)
            time.sleep(0.1)
        return time.perf_counter() - started

    def by_hand(self, windows: list[tuple[Window, str]]) -> None:
        """What one would write in an afternoon: GET, COPY to a temporary table, merge, commit, window by window."""
        columns = ", ".join(_COLUMNS)
        sets = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[1:])
        with postgres.connect(self._dsn, application_name="bench-by-hand") as connection:
            connection.execute("DROP SCHEMA IF EXISTS bench_by_hand CASCADE")
            connection.execute("CREATE SCHEMA bench_by_hand")
            for number in range(OBJECTS):
                connection.execute(
                    f"CREATE TABLE bench_by_hand.object_{number}__v (id text PRIMARY KEY, "
                    "modified_date__v timestamptz, name__v text, amount__c numeric, status__v text)"
                )
            for window, _ in windows:
                with connection.transaction():
                    for number in range(OBJECTS):
                        key = file_key(window, f"object_{number}__v", FileType.UPSERT)
                        body = self._s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
                        target = f"bench_by_hand.object_{number}__v"
                        connection.execute(f"CREATE TEMP TABLE staged (LIKE {target}) ON COMMIT DROP")
                        with connection.cursor().copy("COPY staged FROM STDIN (FORMAT csv, HEADER)") as copy:
                            copy.write(body)
                        connection.execute(
                            f"INSERT INTO {target} SELECT {columns} FROM staged "  # noqa: S608
                            f"ON CONFLICT (id) DO UPDATE SET {sets}".encode()
                        )
                        connection.execute("DROP TABLE staged")

    def split(self, vault: str) -> dict[str, float]:
        """Where the time of the newest run went: until it was asked for, queued, started, committed."""
        query = (
            "query($t: [ExecutionTag!]!) { runsOrError(filter: {tags: $t}, limit: 1) "
            "{ ... on Runs { results { creationTime startTime } } } }"
        )
        tags = [{"key": "lockstep/lane", "value": f"vault_{vault.replace('-', '_')}"}]
        answer = httpx.post(f"{self._dagster}/graphql", json={"query": query, "variables": {"t": tags}}, timeout=30)
        found = answer.json()["data"]["runsOrError"]["results"][0]
        committed = self._store.history(vault)[-1].applied_at.timestamp()
        return {
            "queue": found["startTime"] - found["creationTime"],
            "start, Spark and commit": committed - found["startTime"],
        }

    def spark_pid(self) -> int:
        """The process of the embedded Spark server."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any("SparkConnectServer" in word for word in words) and any(
                str(self._settings.home) in word for word in words
            ):
                return int(process.pid)
        return os.getpid()

    @contextmanager
    def run_memory(self) -> Iterator[Any]:
        """Peak of the code server's children: Dagster's runs of this stack."""
        port = str(self._stack.site().ports["dagster_code"])
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "grpc" in words and port in words:
                with peak_memory_mb(process.pid) as peak:
                    yield peak
                return
        yield lambda: 0.0

    def _file(self, window: Window, number: int) -> RawFile:
        name, moment = f"object_{number}__v", window.stop.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        salt = int(hashlib.sha256(f"{window.stoptime}/{number}".encode()).hexdigest()[:6], 16)
        lines = [",".join(_COLUMNS)]
        lines += [
            f"V{(salt + place * 7) % 5000:08},{moment},Name {place} of {window.stoptime},{place}.25,active__v"
            for place in range(ROWS)
        ]
        body = ("\n".join(lines) + "\n").encode()
        key = file_key(window, name, FileType.UPSERT)
        self._s3.put_object(Bucket=BUCKET, Key=key, Body=body)
        digest = hashlib.sha256(body).hexdigest()
        return RawFile(name, FileType.UPSERT, key, digest, len(body), ROWS, _COLUMNS, f"Object.{name}")
