"""What idempotency costs: each block against the naive write of the same rows in the same run, as a ratio.

What belongs here: one small function for each block, in a list. What does not: tests of the blocks. The naive write is
what one would write without the block: it doubles or loses rows when it is repeated.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from itertools import count
from typing import Any, NamedTuple

import boto3
import psycopg
from psycopg import sql

from bench.report import Context, Result, median, seconds
from lockstep.idempotency import cleaner, delta, keyed, merger, proxy, stateful, transactional
from lockstep.idempotency.calendar import DAY
from lockstep.idempotency.keyed import KeyOf, Kind
from lockstep.idempotency.merger import Contract, Deletes
from lockstep.idempotency.overwrite import overwrite_delta
from lockstep.idempotency.stateful_rules import Run
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect, transaction
from lockstep.kernel.settings import load_settings
from stack.environment import adopt
from stack.lifecycle import Stack

SAMPLES, QUICK_SAMPLES = 3, 1


class Place(NamedTuple):
    """Where a block is measured: a session, a database and a bucket of this run's own."""

    spark: Any
    dsn: str
    connection: Connection
    s3: Any
    bucket: str


class Pair(NamedTuple):
    """The naive write and the block's write of the same rows; each call is a run of its own."""

    naive: Callable[[], object]
    block: Callable[[], object]


def overwrite(place: Place, rows: int) -> Pair:
    """Data overwrite on Delta, against an append."""
    frame = place.spark.range(rows).selectExpr("id", "id * 2 AS value", "'d1' AS day")
    plain, table = f"s3a://{place.bucket}/plain", f"s3a://{place.bucket}/overwrite"
    runs = count()
    return Pair(
        naive=lambda: frame.write.format("delta").mode("append").partitionBy("day").save(plain),
        block=lambda: overwrite_delta(
            place.spark, table, frame, {"day": "d1"}, run=f"r{next(runs)}", partition_by=["day"]
        ),
    )


def transactional_writer(place: Place, rows: int) -> Pair:
    """Transactional writer, against Spark's own JDBC append."""
    for table in ("plain_visits", "visits"):
        place.connection.execute(sql.SQL("CREATE TABLE {} (id bigint, value bigint, day text)").format(_name(table)))
    frame = place.spark.range(rows).selectExpr("id", "id * 2 AS value", "'d1' AS day")
    runs = count(1)

    def block() -> object:
        run = next(runs)
        key = transactional.Key("bench", "d1", run)
        how = transactional.replace_unit("day")
        return transactional.write(frame, place.dsn, ("public", "visits"), key, run=f"r{run}", how=how, ids=SystemIds())

    return Pair(naive=lambda: _jdbc(place, frame, "plain_visits"), block=block)


def metadata_cleaner(place: Place, rows: int) -> Pair:
    """Fast metadata cleaner, against DELETE and INSERT into one table that holds two such days more."""
    first = date(2026, 1, 1)
    days = [first + timedelta(days=n) for n in range(3)]
    place.connection.execute("CREATE TABLE page_shape (n int, day date NOT NULL)")
    place.connection.execute("CREATE TABLE plain_pages (n int, day date NOT NULL)")
    dataset = cleaner.Dataset("public", "pages", "page_shape", "day", DAY)
    cleaner.create(place.connection, dataset)

    def fill(connection: Connection, table: sql.Identifier, day: date = first) -> int:
        add = sql.SQL("INSERT INTO {} SELECT n, %s FROM generate_series(1, %s) AS n").format(table)
        return connection.execute(add, (day, rows)).rowcount

    for day in days:
        fill(place.connection, _name("plain_pages"), day)
        cleaner.load(place.connection, dataset, day, lambda c, t, day=day: fill(c, t, day), run="r")
    runs = count()

    def naive() -> None:
        with place.connection.transaction():
            place.connection.execute("DELETE FROM plain_pages WHERE day = %s", (first,))
            fill(place.connection, _name("plain_pages"))

    return Pair(
        naive=naive, block=lambda: cleaner.load(place.connection, dataset, first, fill, run=f"replay-{next(runs)}")
    )


def stable_name(place: Place, rows: int) -> Pair:
    """Proxy, against TRUNCATE and INSERT into one table."""
    place.connection.execute("CREATE TABLE plain_devices (n int)")
    devices = proxy.Proxy("public", "devices")
    runs = count()

    def build(connection: Connection, table: sql.Identifier) -> None:
        create = sql.SQL("CREATE TABLE {} AS SELECT n FROM generate_series(1, {}) AS n")
        connection.execute(create.format(table, sql.Literal(rows)))

    def naive() -> None:
        with place.connection.transaction():
            place.connection.execute("TRUNCATE plain_devices")
            place.connection.execute("INSERT INTO plain_devices SELECT n FROM generate_series(1, %s) AS n", (rows,))

    def block() -> None:
        run = f"r{next(runs)}"
        version = proxy.add_version(place.connection, devices, date(2026, 1, 1), build, run=run)
        proxy.point(place.connection, devices, version, reason=run)

    return Pair(naive, block)


SOFT = Contract(keys=("id",), values=("v",), order="seq", flag="gone", deletes=Deletes.SOFT)
VISIT = KeyOf("visit", (("id", Kind.INTEGER), ("v", Kind.TEXT)))
_CHANGES = """
CREATE TEMPORARY TABLE changes ON COMMIT DROP AS
SELECT i AS id, md5(i::text) AS v, {seq}::bigint AS seq, i % 10 = 0 AS gone FROM generate_series(1, {rows}) i"""
_UPSERT = """
INSERT INTO plain_rows SELECT id, v, seq, gone FROM changes
ON CONFLICT (id) DO UPDATE SET v = EXCLUDED.v, seq = EXCLUDED.seq, gone = EXCLUDED.gone"""
_PLAIN_MERGE = """
MERGE INTO {table} t USING {{changes}} s ON t.id = s.id
WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"""


def merging(place: Place, rows: int) -> Pair:
    """Merger on PostgreSQL, against INSERT … ON CONFLICT; every run changes every row."""
    return _merges(
        place, rows, lambda n: merger.merge_postgres(place.connection, SOFT, target="rows", source="pg_temp.changes")
    )


def merging_with_history(place: Place, rows: int) -> Pair:
    """Stateful merger on PostgreSQL, which keeps the images of what it changes, against INSERT … ON CONFLICT."""

    def block(n: int) -> object:
        run = _next_run(n)
        return stateful.merge_postgres(place.connection, SOFT, run, target="rows", source="pg_temp.changes")

    return _merges(place, rows, block)


def merging_delta(place: Place, rows: int) -> Pair:
    """Merger on Delta, against a plain MERGE."""
    return _delta_merges(
        place, rows, lambda n, table, frame: merger.merge_delta(place.spark, SOFT, target=table, source=frame)
    )


def merging_delta_with_history(place: Place, rows: int) -> Pair:
    """Stateful merger on Delta, which reads the history before and after, against a plain MERGE."""

    def block(n: int, table: str, frame: Any) -> object:
        return stateful.merge_delta(place.spark, SOFT, _next_run(n), target=table, source=frame)

    return _delta_merges(place, rows, block)


def stable_keys(place: Place, rows: int) -> Pair:
    """Keyed idempotency: Spark's own 64-bit hash against the stable key; the rows are thrown away."""
    frame = place.spark.range(rows).selectExpr("id", "md5(CAST(id AS STRING)) AS v").localCheckpoint()
    return Pair(
        naive=lambda: _discard(frame.selectExpr("*", "xxhash64(id, v) AS key")),
        block=lambda: _discard(keyed.with_key(frame, VISIT)),
    )


# Each block and the function that measures it; add yours.
BLOCKS: tuple[tuple[str, Callable[[Place, int], Pair]], ...] = (
    ("overwrite", overwrite),
    ("transactional", transactional_writer),
    ("cleaner", metadata_cleaner),
    ("proxy", stable_name),
    ("merger", merging),
    ("merger Delta", merging_delta),
    ("stateful", merging_with_history),
    ("stateful Delta", merging_delta_with_history),
    ("keyed", stable_keys),
)


def run(context: Context) -> Result:
    """Measure every block at two sizes, or at the small one.

    A ratio of 1.3 means: the block takes 1.3 times as long as the naive write.
    """
    result = Result()
    samples = QUICK_SAMPLES if context.quick else SAMPLES
    sizes = (10_000,) if context.quick else (10_000, 1_000_000)
    Stack(load_settings()).up(["postgres", "s3", "spark"])
    adopt(load_settings())
    for name, block in BLOCKS:
        for rows in sizes:
            context.say(f"{name}: {rows} rows")
            with _place() as place:
                _measure(result, f"{name} {rows // 1000}k", block(place, rows), samples)
    return result


def _measure(result: Result, name: str, pair: Pair, samples: int) -> None:
    pair.naive()
    pair.block()  # the first of each makes tables and warms the server
    naive, block = [], []
    for _ in range(samples):  # in turns: a busy minute of the machine meets both
        naive.append(seconds(pair.naive))
        block.append(seconds(pair.block))
    result.samples[f"{name} naive"], result.samples[f"{name} block"] = naive, block
    result.ratio(f"{name} rows: block ÷ naive", median(block) / median(naive))


@contextmanager
def _place() -> Iterator[Place]:
    from pyspark.sql import SparkSession  # heavy; only when a benchmark runs

    name = f"bench_{secrets.token_hex(4)}"
    state = os.environ["LOCKSTEP_POSTGRES_DSN"]
    dsn = state.rsplit("/", 1)[0] + f"/{name}"
    s3, bucket = boto3.client("s3"), name.replace("_", "-")
    s3.create_bucket(Bucket=bucket)
    spark = SparkSession.builder.remote(os.environ["LOCKSTEP_SPARK_REMOTE"]).create()
    with psycopg.connect(state, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            migrate(dsn, "lockstep.idempotency")
            with connect(dsn, application_name="bench", statement_timeout=600) as connection:
                yield Place(spark, dsn, connection, s3, bucket)
        finally:
            spark.stop()
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _jdbc(place: Place, frame: Any, table: str) -> None:
    found = psycopg.conninfo.conninfo_to_dict(place.dsn)
    address = f"jdbc:postgresql://{found['host']}:{found['port']}/{found['dbname']}"
    options = {
        "user": str(found["user"]),
        "password": str(found.get("password", "")),
        "driver": "org.postgresql.Driver",
    }
    frame.write.jdbc(address, table, mode="append", properties=options)


def _name(table: str) -> sql.Identifier:
    return sql.Identifier("public", table)


def _merges(place: Place, rows: int, block: Callable[[int], object]) -> Pair:
    for table in ("plain_rows", "rows"):
        shape = "CREATE TABLE {} (id integer PRIMARY KEY, v text, seq bigint, gone boolean)"
        place.connection.execute(sql.SQL(shape).format(_name(table)))
    stateful.create_history(place.connection, "rows")
    runs = count(1)

    def one(write: Callable[[int], object]) -> None:
        n = next(runs)
        with transaction(place.connection):
            place.connection.execute(_CHANGES.format(seq=n, rows=rows))
            place.connection.execute("ANALYZE changes")
            write(n)

    return Pair(naive=lambda: one(lambda n: place.connection.execute(_UPSERT)), block=lambda: one(block))


def _delta_merges(place: Place, rows: int, block: Callable[[int, str, Any], object]) -> Pair:
    plain, table = f"s3a://{place.bucket}/plain-rows", f"s3a://{place.bucket}/rows"
    for path in (plain, table):
        _changes(place, rows, 0).write.format("delta").save(path)
    runs = count(1)

    def naive() -> None:
        statement = _PLAIN_MERGE.format(table=delta.quoted(plain))
        place.spark.sql(statement, changes=_changes(place, rows, next(runs))).collect()

    def ours() -> None:
        n = next(runs)
        block(n, table, _changes(place, rows, n))

    return Pair(naive, ours)


def _changes(place: Place, rows: int, seq: int) -> Any:
    columns = ("id", "md5(CAST(id AS STRING)) AS v", f"CAST({seq} AS BIGINT) AS seq", "id % 10 = 0 AS gone")
    return place.spark.range(rows).selectExpr(*columns)


def _next_run(n: int) -> Run:
    """Runs in a row; the naive ones in between take numbers too."""
    return Run("bench", f"{n:06}", f"{n - 2:06}" if n > 2 else None, f"r{n}")


def _discard(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()
