"""The Spark work of the self-test: write, count, prune. The session and the instant are given.

What belongs here: reading and writing the self-test's Delta table. What does not: sessions, queues, Dagster.
SQL and DataFrames only: the DeltaTable class needs a JVM in this process, and Spark Connect has none.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from lockstep.selftest.model import RETENTION, SelftestReceipt, SelftestRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PREVIEW_ROWS = 5


def write(spark: SparkSession, table: str, request: SelftestRequest, *, now: datetime) -> SelftestReceipt:
    """Commit the rows of `request` in one Delta commit that replaces whatever this id had before."""
    # The id was validated (letters, digits, hyphens), so it cannot close the quotes.
    frame = spark.range(request.rows).selectExpr(
        f"'{request.id}' AS id",
        "CAST(id AS INT) AS n",
        "pmod(hash(id), 1000) AS value",
        f"{_timestamp(now)} AS written_at",
    )
    (
        frame.write.format("delta")
        .mode("overwrite")
        .option("replaceWhere", f"id = '{request.id}'")
        .option("userMetadata", f"selftest {request.id}")
        .save(table)
    )
    written = _rows_of(spark, table, request.id)
    preview = written.orderBy("n").select("id", "n", "value").limit(PREVIEW_ROWS).collect()
    return SelftestReceipt(table, written.count(), [(row["id"], row["n"], row["value"]) for row in preview])


def count_rows(spark: SparkSession, table: str, token: str) -> int:
    """How many different rows the table holds under `token`: a doubled row does not hide a missing one."""
    return int(_rows_of(spark, table, token).select("n").distinct().count())


def prune(spark: SparkSession, table: str, *, now: datetime) -> None:
    """Drop the rows of old self-tests, so that a table written every day stays small."""
    # Interpolated: Delta's DELETE takes no bound parameters by path. Both values are ours, never a caller's.
    spark.sql(f"DELETE FROM delta.`{table}` WHERE written_at < {_timestamp(now - RETENTION)}")  # noqa: S608


def _timestamp(instant: datetime) -> str:
    return f"TIMESTAMP '{instant.isoformat(sep=' ', timespec='seconds')}'"


def _rows_of(spark: SparkSession, table: str, token: str) -> DataFrame:
    frame = spark.read.format("delta").load(table)
    return frame.where(frame["id"] == token)
