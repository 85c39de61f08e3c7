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
from lockstep.idempotency import cleaner, proxy, transactional
from lockstep.idempotency.calendar import DAY
from lockstep.idempotency.overwrite import overwrite_delta
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect
from lockstep.kernel.settings import load_settings
from stack.lifecycle import Stack

SAMPLES = 3


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


# Each block and the function that measures it; add yours.
BLOCKS: tuple[tuple[str, Callable[[Place, int], Pair]], ...] = (
    ("overwrite", overwrite),
    ("transactional", transactional_writer),
    ("cleaner", metadata_cleaner),
    ("proxy", stable_name),
)


def run(context: Context) -> Result:
    """Measure every block at two sizes. A ratio of 1.3 means: the block takes 1.3 times as long as the naive write."""
    result = Result()
    sizes = (10_000, 100_000) if context.quick else (10_000, 1_000_000)
    with _stack() as site:
        for name, block in BLOCKS:
            for rows in sizes:
                context.say(f"{name}: {rows} rows")
                with _place(site) as place:
                    _measure(result, f"{name} {rows // 1000}k", block(place, rows))
    return result


def _measure(result: Result, name: str, pair: Pair) -> None:
    pair.naive()
    pair.block()  # the first of each makes tables and warms the server
    naive, block = [], []
    for _ in range(SAMPLES):  # in turns: a busy minute of the machine meets both
        naive.append(seconds(pair.naive))
        block.append(seconds(pair.block))
    result.samples[f"{name} naive"], result.samples[f"{name} block"] = naive, block
    result.ratio(f"{name} rows: block ÷ naive", median(block) / median(naive))


@contextmanager
def _stack() -> Iterator[dict[str, str]]:
    stack = Stack(load_settings())
    stack.up(["postgres", "s3", "spark"])
    environment = dict(stack.site().environment)
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield environment
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _place(site: dict[str, str]) -> Iterator[Place]:
    from pyspark.sql import SparkSession  # noqa: PLC0415  # heavy; only when a benchmark runs

    name = f"bench_{secrets.token_hex(4)}"
    state = site["LOCKSTEP_POSTGRES_DSN"]
    dsn = state.rsplit("/", 1)[0] + f"/{name}"
    s3, bucket = boto3.client("s3"), name.replace("_", "-")
    s3.create_bucket(Bucket=bucket)
    spark = SparkSession.builder.remote(site["LOCKSTEP_SPARK_REMOTE"]).create()
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
