"""Ticks against the original design and against the bare minimum, in one run: DuckDB and a zip, delta-rs, boto3.

What belongs here: baselines and ratios. What does not: the code that is measured. Everything happens in a database, in
buckets, in a queue and in a table of its own, so that no sensor of a running stack takes part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
import psycopg
from psycopg import sql

from bench.report import Context, Result, Target, median, seconds
from lockstep.kernel.deliver import DynamoDeliverer, SqsDeliverer
from lockstep.kernel.errors import Terminal
from lockstep.kernel.migrate import migrate
from lockstep.kernel.outbox import Claimed, Destination
from lockstep.kernel.postgres import Pool, pool
from lockstep.kernel.relay import Relay
from lockstep.kernel.settings import PROJECT_ROOT, Settings, load_settings
from lockstep.ticks.footers import read_footer
from lockstep.ticks.model import Limits, Project
from lockstep.ticks.projects import NewSecret
from lockstep.ticks.store import Received
from lockstep.ticks.worker import Committer
from resources.clients import aws_client
from resources.exports import s3_client
from resources.silver import open_silver
from resources.ticks import WarmSpark, open_plant, project_store

_TEXT = 88  # characters of the one long column: with it 50,000 rows are 5 MB
_WARM_UP = 3
_REPEAT = 5
_LOOPBACK = "127.0.0.1"


def run(context: Context) -> Result:
    """Everything, on the stack of the benchmarks."""
    from stack.environment import adopt
    from stack.lifecycle import Stack

    Stack(load_settings()).up(["postgres", "s3", "sqs", "dynamodb", "spark"])
    adopt(load_settings())
    with _deployment() as (settings, state), _committer(settings, state) as committer:
        return _Bench(context, settings, state, committer).measure()


class _Bench:
    def __init__(self, context: Context, settings: Settings, state: Pool, committer: Committer) -> None:
        self.context, self.settings, self.state, self.committer = context, settings, state, committer
        self.rows = 5_000 if context.quick else 50_000
        self.history = (5, 12, 30) if context.quick else (10, 100, 500)
        self.part = _parquet(self.rows)
        self.s3 = s3_client(settings.aws_region)

    def measure(self) -> Result:
        """All ratios, the baselines on the same bytes and the same S3."""
        result, say = Result(), self.context.say
        say(f"a tick has {self.rows} rows, {len(self.part) / 1e6:.1f} MB; history of {self.history} ticks")
        self._parts(result)  # first: what the others write to the disk would still be on its way
        ours = self._ours(result)
        theirs = self._original(result)
        least, middle, most = self.history
        names = ("growth_500_vs_10", "vs_original_at_100", "vs_original_at_500")  # the history of the full run
        result.ratio(names[0], median(ours[most]) / median(ours[least]), Target(1.15, at_least=False))
        ahead = None if self.context.quick else Target(1.0)  # small files and short histories prove nothing here
        result.ratio(names[1], median(theirs[middle]) / median(ours[middle]), ahead)
        result.ratio(names[2], median(theirs[most]) / median(ours[most]), ahead)
        bare = self._delta_rs()
        result.samples["delta_rs_seconds"] = bare
        result.ratio("vs_delta_rs", median(ours[most]) / median(bare))
        result.ratio("parallel_orgs_speedup", self._parallel(3 if self.context.quick else 8), Target(1.0))
        if not self.context.quick:
            self._silver(result)
        return result

    # --- ours -------------------------------------------------------------------------------------------------------

    def _ours(self, result: Result) -> dict[int, list[float]]:
        """Finalizes of one project, as its history grows; each is measured alone, after its part is stored."""
        project, found, done = self._project(), {}, 0
        for _ in range(_WARM_UP):
            self._finalize(self._project())
        for goal in self.history:
            while done < goal - _REPEAT:
                self._finalize(project)
                done += 1
            found[goal] = [self._finalize(project) for _ in range(_REPEAT)]
            done += _REPEAT
            result.samples[f"finalize_seconds_at_{goal}"] = found[goal]
            self.context.say(f"ours at {goal}: {median(found[goal]):.2f} s")
        return found

    def _silver(self, result: Result) -> None:
        """One worker drains committed ticks of a project into silver; the first, which makes the table, is left out."""
        project, each = self._project(), 5
        with open_silver(self.settings, application_name="lockstep-bench") as parts:
            worker = parts.worker(self.committer._plant.spark.session())

            def drain(ticks: int) -> float:
                for _ in range(ticks):
                    self._finalize(project)
                taken = seconds(lambda: worker.drain(project.project_id, run_id="bench"))
                waiting = parts.store.plan(parts.store.lane(project.project_id)).ready
                if waiting:
                    raise Terminal("silver did not apply every tick.", unit=waiting[0].tick_id)
                return taken / ticks

            drain(1)
            found = [drain(each) for _ in range(3)]
        result.samples["silver_seconds_per_tick"] = found
        self.context.say(f"silver: {median(found):.2f} s a tick")

    def _parallel(self, each: int) -> float:
        """Ticks of four organisations at the same time against as many of one organisation."""
        one, several = self._project(), [self._project() for _ in range(4)]
        for project in (one, *several):
            self._finalize(project)
        alone = seconds(lambda: [self._finalize(one) for _ in range(2 * each)])
        with ThreadPoolExecutor(4) as executor:

            def in_turn(project: Project) -> None:
                for _ in range(each):
                    self._finalize(project)

            together = seconds(lambda: list(executor.map(in_turn, several)))
        self.context.say(f"one organisation {2 * each / alone:.2f} ticks/s, four {4 * each / together:.2f} ticks/s")
        return (4 * each / together) / (2 * each / alone)

    def _finalize(self, project: Project) -> float:
        tick_id = f"bench-{secrets.token_hex(8)}"
        plant = self.committer._plant  # the part is stored as the service stores it, without HTTP
        key = plant.parts.put(project.project_id, tick_id, 0, io.BytesIO(self.part))
        digest = hashlib.sha256(self.part).hexdigest()
        footer = read_footer(io.BytesIO(self.part), len(self.part))
        plant.store.record(project, tick_id, Received(0, digest, len(self.part), footer, None), key, replaces=None)
        body = _manifest(project, tick_id, digest, len(self.part), self.rows)
        return seconds(lambda: self.committer.finalize(project, tick_id, body))

    def _project(self) -> Project:
        store = project_store(self.settings, self.state)
        found = store.get(store.add(f"bench-{secrets.token_hex(4)}", actor="bench").project_id)
        if found is None:
            raise Terminal("the project that was just made is gone.")
        return found

    # --- baselines --------------------------------------------------------------------------------------------------

    def _original(self, result: Result) -> dict[int, list[float]]:
        """The original design: append to the project's DuckDB file, zip all of it, put it on S3."""
        import duckdb  # only this baseline needs it

        found: dict[int, list[float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            source, database = Path(folder) / "part.parquet", Path(folder) / "bronze.duckdb"
            source.write_bytes(self.part)
            connection = duckdb.connect(str(database))
            connection.execute(f"CREATE TABLE people AS SELECT *, '' AS tick FROM '{source}' LIMIT 0")  # noqa: S608
            done = 0

            def append() -> None:
                nonlocal done
                connection.execute(f"INSERT INTO people SELECT *, 't{done}' FROM '{source}'")  # noqa: S608
                connection.execute("CHECKPOINT")
                done += 1

            def finalize() -> None:
                append()
                packed = Path(folder) / "bronze.duckdb.zip"
                with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
                    archive.write(database, "bronze.duckdb")
                with packed.open("rb") as body:
                    self.s3.put_object(Bucket=self.settings.ticks_bucket, Key="state/bronze.duckdb.zip", Body=body)

            for goal in self.history:
                while done < goal - 1:
                    append()
                found[goal] = [seconds(finalize) for _ in range(1 if goal == self.history[-1] else 2)]
                result.samples[f"original_seconds_at_{goal}"] = found[goal]
                self.context.say(f"the original design at {goal}: {median(found[goal]):.2f} s")
            connection.close()
        return found

    def _delta_rs(self) -> list[float]:
        """A bare append by delta-rs to the same S3: no checks, no lane, no message. The floor of a Delta commit."""
        import deltalake
        import pyarrow.parquet as pq

        options = {
            "AWS_ENDPOINT_URL": os.environ.get("AWS_ENDPOINT_URL_S3", ""),
            "AWS_ACCESS_KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID", ""),
            "AWS_SECRET_ACCESS_KEY": os.environ.get("AWS_SECRET_ACCESS_KEY", ""),
            "AWS_REGION": self.settings.aws_region,
            "AWS_ALLOW_HTTP": "true",
            "aws_conditional_put": "etag",
        }
        address = f"s3://{self.settings.lake_bucket}/bench/delta-rs"

        def append() -> None:
            rows = pq.read_table(io.BytesIO(self.s3.get_object(Bucket=bucket, Key=key)["Body"].read()))
            deltalake.write_deltalake(address, rows, mode="append", storage_options=options)

        bucket, key = self.settings.ticks_bucket, "bench/part.parquet"
        self.s3.put_object(Bucket=bucket, Key=key, Body=self.part)
        append()
        taken = [seconds(append) for _ in range(_REPEAT)]
        self.context.say(f"delta-rs: {median(taken):.2f} s")
        return taken

    def _parts(self, result: Result) -> None:
        """Parts through the service against boto3 straight to the same S3, four at a time, the same bytes."""
        count = 12 if self.context.quick else 40
        bodies = [os.urandom(5_000_000) for _ in range(4)]
        plain = aws_client("s3", region=self.settings.aws_region)
        with self._service() as (url, secret), httpx.Client(timeout=120) as http:
            prefix = f"{url}/v1/projects/{secret.project_id}/ticks"
            digests = [hashlib.sha256(body).hexdigest() for body in bodies]
            keys = {"X-Api-Key": secret.org_id, "X-Api-Secret": secret.api_secret}

            def put(number: int) -> None:
                headers = keys | {"X-Sha256": digests[number % 4]}
                path = f"{prefix}/bench-{secrets.token_hex(6)}/parts/0"
                http.put(path, content=bodies[number % 4], headers=headers).raise_for_status()

            def bare(number: int) -> None:
                name = f"bench/{secrets.token_hex(6)}"
                plain.put_object(Bucket=self.settings.ticks_bucket, Key=name, Body=bodies[number % 4])

            ways, rates = {"boto3": bare, "service": put}, {"service": [], "boto3": []}  # type: Any, dict[str, list[float]]
            for action in ways.values():
                _rate(
                    action, count, len(bodies[0])
                )  # S3Proxy compiles what it runs often, and the service has just begun
            for _ in range(3 if self.context.quick else _REPEAT):
                for name, action in ways.items():
                    rates[name].append(_rate(action, count, len(bodies[0])))
        for name, values in rates.items():
            result.samples[f"parts_mb_per_second_{name}"] = values
        result.ratio("parts_vs_boto3", median(rates["service"]) / median(rates["boto3"]), Target(0.7))

    @contextmanager
    def _service(self) -> Iterator[tuple[str, NewSecret]]:
        """A replica in a process of its own."""
        with socket.socket() as free:
            free.bind((_LOOPBACK, 0))
            port = free.getsockname()[1]
        settings = self.settings
        own = {
            "LOCKSTEP_POSTGRES_DSN": settings.postgres_dsn.get_secret_value() if settings.postgres_dsn else "",
            "LOCKSTEP_TICKS_BUCKET": settings.ticks_bucket,
            "LOCKSTEP_LAKE_BUCKET": settings.lake_bucket,
            "LOCKSTEP_LOG_LEVEL": "WARNING",
        }
        line = [sys.executable, "-m", "lockstep.cli", "serve", "ingest", "--host", _LOOPBACK, "--port", str(port)]
        child = subprocess.Popen(line, env=os.environ | own, cwd=PROJECT_ROOT, stderr=subprocess.DEVNULL)
        try:
            url = f"http://{_LOOPBACK}:{port}"
            _await(f"{url}/healthz")
            yield url, project_store(settings, self.state).add(f"bench-{secrets.token_hex(4)}", actor="bench")
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(timeout=30)


def _rate(action: Callable[[int], None], count: int, size: int) -> float:
    """MB per second with four at a time."""
    with ThreadPoolExecutor(4) as executor:
        taken = seconds(lambda: list(executor.map(action, range(count))))
    return count * size / taken / 1e6


class _Elsewhere(SqsDeliverer):
    """Sends to the benchmark's queue whatever the message says."""

    def __init__(self, client: Any, queue: str) -> None:
        super().__init__(client)
        self._queue = queue

    def deliver(self, claimed: Claimed) -> None:
        super().deliver(dataclasses.replace(claimed, destination=Destination("sqs", self._queue)))


class _OtherTable(DynamoDeliverer):
    """Writes to the benchmark's table whatever the message says."""

    def __init__(self, client: Any, table: str) -> None:
        super().__init__(client)
        self._table = table

    def deliver(self, claimed: Claimed) -> None:
        super().deliver(dataclasses.replace(claimed, destination=Destination("dynamodb", self._table)))


@contextmanager
def _deployment() -> Iterator[tuple[Settings, Pool]]:
    """A database and buckets of its own, gone afterwards."""
    settings, token = load_settings(), secrets.token_hex(4)
    address = settings.postgres_dsn.get_secret_value() if settings.postgres_dsn else ""
    name, s3 = f"bench_{token}", boto3.client("s3")
    buckets = {"ticks_bucket": f"bench-ticks-{token}", "lake_bucket": f"bench-lake-{token}"}
    with ExitStack() as closing:
        admin = closing.enter_context(psycopg.connect(address, autocommit=True))
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        closing.callback(admin.execute, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
        dsn = address.rsplit("/", 1)[0] + f"/{name}"
        for package in ("lockstep.kernel", "lockstep.ticks", "lockstep.ticks.silver"):
            migrate(dsn, package)
        for bucket in buckets.values():
            s3.create_bucket(Bucket=bucket)
            closing.callback(_empty, s3, bucket)
        state = closing.enter_context(pool(dsn, application_name="lockstep-bench", max_size=8))
        yield load_settings(postgres_dsn=dsn, **buckets), state


@contextmanager
def _committer(settings: Settings, state: Pool) -> Iterator[Committer]:
    token = secrets.token_hex(4)
    sqs, dynamodb = (aws_client(one, region=settings.aws_region) for one in ("sqs", "dynamodb"))
    queue, table = f"bench-ticks-{token}", f"bench_ticks_{token}"
    url = sqs.create_queue(QueueName=queue)["QueueUrl"]
    dynamodb.create_table(
        TableName=table,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "tick_id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "tick_id", "KeyType": "HASH"}],
    )
    spark = WarmSpark(settings.spark_remote)
    try:
        with open_plant(settings, state, spark) as plant:
            deliverers = {"sqs": _Elsewhere(sqs, queue), "dynamodb": _OtherTable(dynamodb, table)}
            relay = Relay(state, deliverers, workers=1)
            yield Committer(dataclasses.replace(plant, relay=relay, limits=Limits()))
    finally:
        spark.close()
        sqs.delete_queue(QueueUrl=url)
        dynamodb.delete_table(TableName=table)


def _empty(s3: Any, bucket: str) -> None:
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for item in page.get("Contents", ()):
            s3.delete_object(Bucket=bucket, Key=item["Key"])
    s3.delete_bucket(Bucket=bucket)


def _await(address: str) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            if httpx.get(address, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise Terminal("the ingest service did not start.", next_step="see `lockstep doctor`.")


def _parquet(rows: int) -> bytes:
    """Rows that do not compress away, about a hundred bytes each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    noise = os.urandom(rows * _TEXT // 2).hex()
    names = [noise[number * _TEXT : (number + 1) * _TEXT] for number in range(rows)]
    target = io.BytesIO()
    pq.write_table(pa.table({"id": pa.array(range(rows), pa.int64()), "name": names}), target, compression="none")
    return target.getvalue()


def _manifest(project: Project, tick_id: str, digest: str, size: int, rows: int) -> dict[str, Any]:
    return {
        "schema_version": "1.0",
        "org_id": project.org_id,
        "project_id": project.project_id,
        "tick_id": tick_id,
        "mode": "delta",
        "dt": "20260507",
        "tables": [
            {
                "name": "people",
                "primary_key": ["id"],
                "columns": [{"name": "id", "type": "bigint"}, {"name": "name", "type": "string"}],
                "parquets": [{"file_seq": 0, "sha256": digest, "bytes": size, "rows": rows}],
            }
        ],
    }
