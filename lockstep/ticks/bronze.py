"""Bronze in Delta: one table per project and table of its ticks, each tick replaced whole, read at its own version.

What belongs here: addresses, Spark reads and writes of bronze, and finding a tick's commit in the log. What does not:
state (store.py), order and checks (worker.py). Objects are read by a client that is passed in.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.ticks.model import BRONZE_PREFIX, TICK_COLUMN, TableCommit, Tick, TickMessage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COMMIT_KEY = re.compile(
    rf"{BRONZE_PREFIX}/(?P<project>[0-9a-f-]{{36}})/(?P<table>[A-Za-z][A-Za-z0-9_]*)/_delta_log/(?P<version>\d{{20}})\.json",
    re.ASCII,
)


class BronzeMoved(Terminal):
    """The commit that a message names is gone or is another one. Nothing may be read in its place."""


class CommitPlace(NamedTuple):
    """What the key of a commit file says."""

    project_id: str
    table: str
    version: int


def table_key(project_id: str, table: str) -> str:
    """The folder of a bronze table inside the lake's bucket."""
    return f"{BRONZE_PREFIX}/{project_id}/{table}"


def table_path(lake: str, project_id: str, table: str) -> str:
    """The address of a bronze table as Spark spells it."""
    return f"s3a://{lake}/{table_key(project_id, table)}"


def commit_key(project_id: str, table: str, version: int) -> str:
    """The key of one commit of a bronze table."""
    return f"{table_key(project_id, table)}/_delta_log/{version:020}.json"


def parse_commit_key(key: str) -> CommitPlace:
    """Read `bronze_db_key`. Raises `InvalidInput` for anything else than a commit of bronze."""
    match = _COMMIT_KEY.fullmatch(key)
    if match is None:
        raise InvalidInput(f"{key!r} is not the commit of a bronze table.")
    return CommitPlace(match["project"], match["table"], int(match["version"]))


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


def read_tick(spark: SparkSession, lake: str, tick: Tick, table: str) -> DataFrame:
    """The rows of one table of a committed tick, as committed: at the version of its commit, whatever came after.

    Beside the declared columns they have `_tick_id`, `_dt`, `_file_seq` and `_row`; columns that later ticks added
    are absent, columns that this tick did not have are NULL.
    """
    commit = tick.commit_of(table)
    frame = (
        spark.read.format("delta").option("versionAsOf", commit.version).load(table_path(lake, tick.project_id, table))
    )
    return frame.where(frame[TICK_COLUMN] == tick.tick_id)


def etag_of(s3: Any, bucket: str, key: str) -> str | None:
    """The ETag of an object, without quotes; None if there is none. Raises `Transient`."""
    try:
        return str(s3.head_object(Bucket=bucket, Key=key)["ETag"]).strip('"')
    except ClientError as error:
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
            return None
        raise as_aws_error(error, unit=key) from error
    except BotoCoreError as error:
        raise as_aws_error(error, unit=key) from error


def commit_info(line: str) -> dict[str, Any]:
    """What a commit says about itself: the `commitInfo` of its first line that has one."""
    found = json.loads(line).get("commitInfo", {})
    return found if isinstance(found, dict) else {}
