"""What blocks 3, 4 and 5 of the idempotency patterns cost over the naive write of the same data in the same run.

What belongs here: one small function for each measurement, which returns (naive, block) seconds. What does not: what a
result looks like (report.py). `BENCHES` lists them, so that one part can run the blocks together.
"""

# ruff: noqa: S608  # every name and number in a statement is a constant of this file

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.report import Context, Result, seconds
from lockstep.idempotency import delta, keyed, merger, stateful
from lockstep.idempotency.keyed import KeyOf, Kind
from lockstep.idempotency.merger import Contract, Deletes
from lockstep.idempotency.stateful_rules import Run
from lockstep.kernel.postgres import connect, transaction
from lockstep.kernel.settings import load_settings

SOFT = Contract(keys=("id",), values=("v",), order="seq", flag="gone", deletes=Deletes.SOFT)
HARD = Contract(keys=("id",), values=("v",), order="seq", flag="gone")
VISIT = KeyOf("visit", (("id", Kind.INTEGER), ("v", Kind.TEXT)))

_ROWS = (
    "SELECT i AS id, md5(i::text) AS v, {seq}::bigint AS seq, i % 10 = 0 AS gone FROM generate_series({low}, {high}) i"
)
_UPSERT = """
INSERT INTO {target} (id, v, seq) SELECT id, v, seq FROM increment WHERE NOT gone
ON CONFLICT (id) DO UPDATE SET v = EXCLUDED.v, seq = EXCLUDED.seq"""


@dataclass(frozen=True)
class Site:
    """Where to measure, and with how many rows."""

    dsn: str
    spark: Any
    s3: Any
    bucket: str
    rows: int

    def path(self) -> str:
        """A fresh address for a Delta table."""
        return f"s3a://{self.bucket}/bench-{secrets.token_hex(4)}"


def merger_postgres(site: Site) -> tuple[float, float]:
    """INSERT … ON CONFLICT against the merger: half of the increment is new, a tenth deletes."""
    with connect(site.dsn, application_name="bench", statement_timeout=600) as work:
        _tables(work, site.rows)
        with transaction(work):
            _increment(work, site.rows)
            naive = seconds(lambda: work.execute(_UPSERT.format(target="bench_naive")))
        with transaction(work):
            _increment(work, site.rows)
            names = {"target": "bench_block", "source": "pg_temp.increment", "tombstones": "bench_graves"}
            block = seconds(lambda: merger.merge_postgres(work, HARD, **names))
        return naive, block


def stateful_postgres(site: Site) -> tuple[float, float]:
    """INSERT … ON CONFLICT against a run of the stateful merger, which keeps the images of what it changes."""
    with connect(site.dsn, application_name="bench", statement_timeout=600) as work:
        _tables(work, site.rows)
        work.execute("ALTER TABLE bench_block ADD COLUMN gone boolean DEFAULT false")
        stateful.create_history(work, "bench_block")
        with transaction(work):
            _increment(work, site.rows)
            naive = seconds(lambda: work.execute(_UPSERT.format(target="bench_naive")))
        with transaction(work):
            _increment(work, site.rows)
            run = Run("bench", "1", None, "first")
            names = {"target": "bench_block", "source": "pg_temp.increment"}
            block = seconds(lambda: stateful.merge_postgres(work, SOFT, run, **names))
        return naive, block


def merger_delta(site: Site) -> tuple[float, float]:
    """A plain MERGE against the merger, which checks and orders the increment first."""
    naive, block = _delta_tables(site)
    frame = _delta_increment(site)
    plain = seconds(lambda: _plain_merge(site, naive, frame))
    return plain, seconds(lambda: merger.merge_delta(site.spark, SOFT, target=block, source=frame))


def stateful_delta(site: Site) -> tuple[float, float]:
    """A plain MERGE against a run of the stateful merger, which reads the history before and after."""
    naive, block = _delta_tables(site)
    frame = _delta_increment(site)
    plain = seconds(lambda: _plain_merge(site, naive, frame))
    run = Run("bench", "1", None, "first")
    return plain, seconds(lambda: stateful.merge_delta(site.spark, SOFT, run, target=block, source=frame))


def keyed_spark(site: Site) -> tuple[float, float]:
    """Spark's own 64-bit hash against the stable key, rows thrown away."""
    frame = _delta_increment(site).localCheckpoint()
    naive = seconds(lambda: _discard(frame.selectExpr("*", "xxhash64(id, v) AS key")))
    return naive, seconds(lambda: _discard(keyed.with_key(frame, VISIT)))


def keyed_objects(site: Site) -> tuple[float, float]:
    """PUT against the conditional PUT; a hundred objects, whatever the number of rows."""
    body = b"x" * max(1, site.rows // 10)
    prefix = secrets.token_hex(4)
    names = [f"bench/{prefix}/{number}" for number in range(100)]

    def plain() -> None:
        for name in names:
            site.s3.put_object(Bucket=site.bucket, Key=f"{name}-plain", Body=body)

    def guarded() -> None:
        for name in names:
            keyed.put_keyed(site.s3, bucket=site.bucket, key=name, body=body)

    return seconds(plain), seconds(guarded)


BENCHES: tuple[tuple[str, Callable[[Site], tuple[float, float]]], ...] = (
    ("merger, PostgreSQL", merger_postgres),
    ("merger, Delta", merger_delta),
    ("stateful merger, PostgreSQL", stateful_postgres),
    ("stateful merger, Delta", stateful_delta),
    ("keyed, Spark", keyed_spark),
    ("keyed, objects", keyed_objects),
)


def run(context: Context) -> Result:
    """Every measurement at 10 k rows and, unless quick, at 1 M; each once warm before it counts."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from stack.health import aws_client  # noqa: PLC0415
    from stack.lifecycle import Stack  # noqa: PLC0415

    settings = load_settings()
    where = Stack(settings).site()
    environment = where.environment
    spark = SparkSession.builder.remote(environment["LOCKSTEP_SPARK_REMOTE"]).create()
    result = Result()
    try:
        for rows, words in ((10_000, "10 k"), (1_000_000, "1 M"))[: 1 if context.quick else 2]:
            site = Site(
                environment["LOCKSTEP_POSTGRES_DSN"], spark, aws_client("s3", where), settings.lake_bucket, rows
            )
            for name, measure in BENCHES:
                context.say(f"{name}, {words} rows")
                if rows == 10_000:
                    measure(site)
                naive, block = measure(site)
                result.ratio(f"{name}, {words}: block ÷ naive", block / naive)
                result.samples |= {f"{name}, {words}, naive s": [naive], f"{name}, {words}, block s": [block]}
    finally:
        spark.stop()
    return result


def _tables(work: Any, rows: int) -> None:
    for name in ("bench_block_runs", "bench_block_images", "bench_naive", "bench_block", "bench_graves"):
        work.execute(f"DROP TABLE IF EXISTS {name}")
    for name in ("bench_naive", "bench_block"):
        work.execute(f"CREATE TABLE {name} (id integer PRIMARY KEY, v text, seq bigint)")
        work.execute(f"INSERT INTO {name} SELECT id, v, seq FROM ({_ROWS.format(seq=1, low=1, high=rows)}) s")
        work.execute(f"ANALYZE {name}")
    merger.create_tombstones(work, HARD, target="bench_block", tombstones="bench_graves")


def _increment(work: Any, rows: int) -> None:
    half = rows // 2
    text = _ROWS.format(seq=2, low=half, high=half + rows)
    work.execute(f"CREATE TEMPORARY TABLE increment ON COMMIT DROP AS {text}")
    work.execute("ANALYZE increment")


def _delta_increment(site: Site) -> Any:
    half = site.rows // 2
    frame = site.spark.range(half, half + site.rows)
    return frame.selectExpr("id", "md5(CAST(id AS STRING)) AS v", "2L AS seq", "id % 10 = 0 AS gone")


def _delta_tables(site: Site) -> tuple[str, str]:
    paths = site.path(), site.path()
    for path in paths:
        frame = site.spark.range(site.rows).selectExpr("id", "md5('') AS v", "1L AS seq", "false AS gone")
        frame.write.format("delta").save(path)
    return paths


def _plain_merge(site: Site, path: str, frame: Any) -> None:
    statement = (
        f"MERGE INTO {delta.quoted(path)} t USING {{increment}} s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )
    site.spark.sql(statement, increment=frame).collect()


def _discard(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()
