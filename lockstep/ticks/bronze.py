"""Bronze in Delta: one table per project and table of its ticks, each tick replaced whole, read at its own version.

What belongs here: addresses, Spark reads and writes of bronze, and finding a tick's commit in the log. What does not:
state (store.py), order and checks (worker.py). Objects are read by a client that is passed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.idempotency import delta
from lockstep.idempotency.overwrite import write_unit
from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.errors import Terminal
from lockstep.ticks.model import (
    BRONZE_PREFIX,
    DAY_COLUMN,
    FILE_COLUMN,
    ROW_COLUMN,
    TICK_COLUMN,
    Column,
    Footer,
    Manifest,
    TableCommit,
    TableSpec,
    Tick,
    TickMessage,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_Answer = TypeVar("_Answer")


class BronzeMoved(Terminal):
    """The commit that a message names is gone or is another one. Nothing may be read in its place."""


def table_key(project_id: str, table: str) -> str:
    """The folder of a bronze table inside the lake's bucket."""
    return f"{BRONZE_PREFIX}/{project_id}/{table}"


def table_path(lake: str, project_id: str, table: str) -> str:
    """The address of a bronze table as Spark spells it."""
    return f"s3a://{lake}/{table_key(project_id, table)}"


def commit_key(project_id: str, table: str, version: int) -> str:
    """The key of one commit of a bronze table."""
    return f"{table_key(project_id, table)}/_delta_log/{version:020}.json"


def assert_commit(s3: Any, lake: str, commit: TableCommit | TickMessage) -> None:
    """Prove that the commit file is the one that was acknowledged, by its ETag.

    Raises:
        BronzeMoved: The file is gone or has other bytes; re-ingest the tick from its stored parts.
        Transient: S3 does not answer.
    """
    key, etag = (
        (commit.bronze_db_key, commit.bronze_db_etag) if isinstance(commit, TickMessage) else (commit.key, commit.etag)
    )
    found = etag_of(s3, lake, key)
    if found != etag:
        raise BronzeMoved(
            "the commit file is gone." if found is None else f"the commit file has ETag {found}, not {etag}.",
            unit=key,
            next_step="re-materialize the tick's partition of bronze_ticks; its parts are kept.",
        )


def is_kept(s3: Any, lake: str, tick: Tick) -> bool:
    """Whether every commit of a tick is still there as it was acknowledged. Delta's log is not kept for ever."""
    return all(etag_of(s3, lake, commit.key) == commit.etag for commit in tick.commits)


def read_tick(spark: SparkSession, lake: str, tick: Tick, table: str) -> DataFrame:
    """The rows of one table of a committed tick, as committed: at the version of its commit, whatever came after.

    Beside the declared columns they have `_tick_id`, `_dt`, `_file_seq` and `_row`; columns that later ticks added
    are absent, columns that this tick did not have are NULL.
    """
    delta.read_however_old(spark)  # a project may have stood still for weeks
    frame = delta.read(spark, table_path(lake, tick.project_id, table), version=tick.commit_of(table).version)
    return frame.where(frame[TICK_COLUMN] == tick.tick_id)


def etag_of(s3: Any, bucket: str, key: str) -> str | None:
    """The ETag of an object, without quotes; None if there is none. Raises `Transient`."""
    found = _if_there(lambda: s3.head_object(Bucket=bucket, Key=key), key)
    return None if found is None else _bare_etag(found)


def read_object(s3: Any, bucket: str, key: str) -> tuple[str, str] | None:
    """The text of an object and its ETag without quotes; None if there is none. Raises `Transient`."""

    def read() -> tuple[str, str]:
        found = s3.get_object(Bucket=bucket, Key=key)
        return found["Body"].read().decode(), _bare_etag(found)

    return _if_there(read, key)


def _bare_etag(answer: Any) -> str:
    return str(answer["ETag"]).strip('"')


def _if_there(call: Callable[[], _Answer], key: str) -> _Answer | None:
    try:
        return call()
    except ClientError as error:
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
            return None
        raise as_aws_error(error, unit=key) from error
    except BotoCoreError as error:
        raise as_aws_error(error, unit=key) from error


class Source(NamedTuple):
    """One part as Spark reads it: where it is and what it holds."""

    address: str
    footer: Footer


class Write(NamedTuple):
    """What to write: one table of a tick, as the bronze table will look with it, under which fence.

    `fresh`: the table cannot hold rows of this tick. `merge_schema`: the table is new or gets columns.
    """

    manifest: Manifest
    table: TableSpec
    columns: tuple[Column, ...]
    fence: int
    fresh: bool
    merge_schema: bool


class Written(NamedTuple):
    """A commit that was found in the log by its stamp.

    `strays` are the ticks of commits that nobody acknowledged, met on the way: attempts that died, or that wrote after
    they were overtaken.
    """

    version: int
    etag: str
    rows: int
    strays: tuple[str, ...]


def write_table(spark: SparkSession, lake: str, write: Write, sources: Mapping[int, Source]) -> None:
    """Write one table of a tick from its parts, in one Delta commit that replaces whatever the tick had there.

    A fresh tick is appended: nothing is there to replace. Anything that makes Delta look, be it `replaceWhere` or
    `txnAppId`, makes it load the state of the whole table first, which costs twice the write itself.

    Any other tick is replaced, under (tick, fence) as `txnAppId` and `txnVersion`: an attempt that was overtaken and
    writes late is dropped by Delta in silence. So nothing may be believed before `find_commit` has found it.
    """
    path = table_path(lake, write.manifest.project_id, write.table.name)
    frame = _frame(spark, write, sources)
    options = {"mergeSchema": str(write.merge_schema).lower()}
    partition_by, run = (DAY_COLUMN, TICK_COLUMN), run_of(write.manifest.tick_id, write.fence)
    if write.fresh:
        options["userMetadata"] = delta.stamp("append", run=run)
        frame.write.format("delta").mode("append").options(**options).partitionBy(*partition_by).save(path)
    else:
        options["txnAppId"] = f"ticks/{write.manifest.project_id}/{write.manifest.tick_id}"
        options["txnVersion"] = str(write.fence)
        unit = {TICK_COLUMN: write.manifest.tick_id}
        write_unit(spark, path, frame, unit, run=run, partition_by=partition_by, aligned=True, options=options)


def find_commit(s3: Any, lake: str, project_id: str, table: str, *, run: str, after: int) -> Written | None:
    """The commit of one attempt, looked for from the version after the last known one; None if there is none.

    Reads one object in the usual case, whatever the length of the history: a listing or Delta's own history would
    cost more with every tick.
    """
    version, strays = after + 1, list[str]()
    while (found := read_object(s3, lake, commit_key(project_id, table, version))) is not None:
        body, etag = found
        info = commit_info(body)
        writer = str((delta.read_stamp(info.get("userMetadata")) or {}).get("run", ""))
        if writer == run:
            metrics = info.get("operationMetrics") or {}
            return Written(version, etag, int(metrics.get("numOutputRows", 0)), tuple(strays))
        if "#" in writer:
            strays.append(writer.partition("#")[0])
        version += 1
    return None


def run_of(tick_id: str, fence: int) -> str:
    """How a commit names the attempt that made it. A fence is given once, also when a tick is deleted and sent anew."""
    return f"{tick_id}#{fence}"


def _frame(spark: SparkSession, write: Write, sources: Mapping[int, Source]) -> DataFrame:
    """The rows of all parts. Files of one layout are read together, with the schema of their own footers."""
    layouts: dict[tuple[Column, ...], list[str]] = {}
    for spec in write.table.parts:
        source = sources[spec.file_seq]
        layouts.setdefault(source.footer.columns, []).append(source.address)
    wanted = {column.name.lower(): column for column in write.columns}
    declared = [wanted[column.name.lower()] for column in write.table.columns]
    frames = []
    for stored, paths in layouts.items():
        # A column of nulls has no type of its own in the file; any type reads it.
        schema = ", ".join(f"{delta.column(one.name)} {'int' if one.type == 'null' else one.type}" for one in stored)
        frames.append(spark.read.schema(schema).parquet(*paths).selectExpr(*_projection(write.manifest, declared)))
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole


def _projection(manifest: Manifest, columns: Sequence[Column]) -> list[str]:
    return [
        *(f"CAST({delta.column(one.name)} AS {one.type}) AS {delta.column(one.name)}" for one in columns),
        f"{delta.literal(manifest.tick_id)} AS {TICK_COLUMN}",
        f"{delta.literal(manifest.dt)} AS {DAY_COLUMN}",
        f"CAST(substring(_metadata.file_name, 1, 6) AS INT) AS {FILE_COLUMN}",  # parts.py puts the number first
        f"_metadata.row_index AS {ROW_COLUMN}",
    ]


def commit_info(body: str) -> dict[str, Any]:
    """What a commit file of Delta says about itself; empty if it says nothing."""
    for line in body.splitlines():
        if line.startswith('{"commitInfo"'):
            found = json.loads(line)["commitInfo"]
            return found if isinstance(found, dict) else {}
    return {}
