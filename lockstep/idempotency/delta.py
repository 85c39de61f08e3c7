"""What every block needs of a Delta table: quoting, history, and the run's identity inside a commit.

What belongs here: reading versions, writing and reading the `userMetadata` of commits, SQL text by path. What does not:
any pattern. SQL and DataFrames only: the DeltaTable class needs a JVM in this process, and Spark Connect has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.kernel.errors import InvalidInput, Terminal, Transient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STAMP_KEY = "lockstep"
"""The key under which a commit of ours carries its identity; anything else in `userMetadata` is foreign."""

_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_TXN_APP = "spark.databricks.delta.write.txnAppId"
_TXN_VERSION = "spark.databricks.delta.write.txnVersion"
RECORD_EMPTY = {"spark.databricks.delta.skipRecordingEmptyCommits": "false"}
"""The settings under which a commit that changes nothing is made nevertheless, for the identity that it carries."""

_REFUSE_OLD_VERSIONS = "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration"
# Delta's default is a task for each of 10,000 folders: a minute for a table that has three.
_FEW_TASKS = {
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "16",
    "spark.databricks.delta.vacuum.parallelDelete.enabled": "true",
    "spark.databricks.delta.vacuum.parallelDelete.parallelism": "16",
}
_NOT_A_TABLE = frozenset({"DELTA_TABLE_ONLY_OPERATION", "DELTA_MISSING_DELTA_TABLE", "PATH_NOT_FOUND"})


# Told by the text: over Spark Connect these errors have no condition of their own.
_CONTESTED = re.compile(r"\[DELTA_(CONCURRENT_|METADATA_CHANGED|PROTOCOL_CHANGED)")


class Commit(NamedTuple):
    """One line of a table's history. `stamp` is ours, or None for a commit of somebody else."""

    version: int
    operation: str
    timestamp: datetime
    stamp: dict[str, Any] | None
    parameters: dict[str, str]
    metrics: dict[str, str]


class NotATable(Terminal):
    """There is no Delta table under this address."""


class Contested(Transient):
    """Somebody else committed to the table while a commit was made, so Delta refused it. Nothing was written."""


def quoted(path: str) -> str:
    """The table as Spark SQL names it, delta.`path`; the only way an address may enter a statement."""
    if not path or "\x00" in path:
        raise InvalidInput(f"{path!r} is not the address of a table.")
    return f"delta.{column(path)}"


def column(name: str) -> str:
    """A name in backticks, for columns of Spark SQL."""
    if not name or "\x00" in name:
        raise InvalidInput(f"{name!r} is not a column name.")
    return "`" + name.replace("`", "``") + "`"


def computed(frame: DataFrame) -> DataFrame:
    """The frame's rows, computed once, for several statements of its own session.

    Over Spark Connect PySpark binds the result of a checkpoint to the first session of the process, whichever made it.
    Where a session was opened again, as after a restart of the server, that is another one, and it does not know the
    rows. So the frame's own session is the active one for the moment.
    """
    from pyspark.sql.connect.session import SparkSession as Remote  # heavy

    if not isinstance(frame.sparkSession, Remote):
        return frame.localCheckpoint()
    place: Any = Remote._active_session
    before, place.session = getattr(place, "session", None), frame.sparkSession
    try:
        return frame.localCheckpoint()
    finally:
        place.session = before


def literal(value: object) -> str:
    """A value as Spark SQL text, for the places that take no bound parameter: predicates of writes and DML.

    Raises:
        InvalidInput: The type has no literal whose meaning is beyond doubt. A naive datetime is one of them: it
            would mean another instant in every session's time zone.
    """
    if value is None or isinstance(value, bool):
        return {None: "NULL", True: "TRUE", False: "FALSE"}[value]
    if isinstance(value, int | Decimal):
        return str(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return f"TIMESTAMP '{value.isoformat(sep=' ', timespec='microseconds')}'"
    if isinstance(value, date) and not isinstance(value, datetime):
        return f"DATE '{value.isoformat()}'"
    if isinstance(value, str) and "\x00" not in value:
        # Spark reads backslashes inside quotes; a doubled quote would be two strings joined, so it is escaped too.
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    raise InvalidInput(
        f"{type(value).__name__} {value!r} cannot stand in a predicate.", next_step="cast it, or give it a zone."
    )


def equality(values: Mapping[str, object]) -> str:
    """`a = 1 AND b IS NULL` over named columns: the predicate of one partition."""
    if not values:
        raise InvalidInput("a partition needs at least one column.")
    return " AND ".join(
        f"{column(name)} IS NULL" if value is None else f"{column(name)} = {literal(value)}"
        for name, value in values.items()
    )


def stamp(pattern: str, **fields: Any) -> str:
    """The `userMetadata` of a commit of ours: which pattern wrote it, for which run, from which base."""
    return json.dumps({STAMP_KEY: pattern, **fields}, sort_keys=True, separators=(",", ":"))


def read_stamp(text: str | None) -> dict[str, Any] | None:
    """What `stamp` wrote, or None when the commit is not ours."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) and STAMP_KEY in found else None


def exists(spark: SparkSession, path: str) -> bool:
    """Whether a Delta table is there."""
    return latest_version(spark, path) is not None


def latest_version(spark: SparkSession, path: str) -> int | None:
    """The version that a reader sees now, or None when there is no table."""
    commits = _history(spark, path, limit=1)
    return commits[0].version if commits else None


def history(spark: SparkSession, path: str, *, limit: int | None = None) -> list[Commit]:
    """The commits, newest first, as far back as the log is kept. Raises `NotATable`."""
    commits = _history(spark, path, limit=limit)
    if commits is None:
        raise NotATable("there is no Delta table.", unit=path, next_step="write it first, or correct the address.")
    return commits


def read(spark: SparkSession, path: str, *, version: int | None = None) -> DataFrame:
    """The table as it is now, or as it was at `version`."""
    reader = spark.read.format("delta")
    return (reader if version is None else reader.option("versionAsOf", version)).load(path)


@contextmanager
def commit_as(
    spark: SparkSession, metadata: str | None = None, *, app: str | None = None, app_version: int = 1
) -> Iterator[None]:
    """Commits made in the block by SQL (MERGE, DELETE, UPDATE, RESTORE) carry this identity.

    It is a setting of the session, so one session does one such block at a time; DataFrame writes take the writer
    options `userMetadata`, `txnAppId` and `txnVersion` instead.

    Args:
        spark: The session whose commits are marked.
        metadata: `userMetadata`, see `stamp`.
        app: `txnAppId`: Delta ignores a second commit under the same pair, without any error.
        app_version: `txnVersion`.
    """
    wanted = {_USER_METADATA: metadata, _TXN_APP: app, _TXN_VERSION: str(app_version) if app else None}
    with settings(spark, {name: value for name, value in wanted.items() if value is not None}):
        yield


@contextmanager
def settings(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    """Settings of the session for the duration of the block; afterwards they are what they were."""
    before = {name: spark.conf.get(name, None) for name in wanted}
    try:
        for name, value in wanted.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def vacuum(spark: SparkSession, path: str, *, keep: timedelta) -> None:
    """Delete the files that no version of the last `keep` needs. No row and no version changes; may be repeated.

    Delta itself refuses to keep less than the table's `delta.deletedFileRetentionDuration`.
    """
    hours = int(keep.total_seconds() // 3600)
    with settings(spark, _FEW_TASKS):
        spark.sql(f"VACUUM {quoted(path)} RETAIN {hours} HOURS").collect()


def read_however_old(spark: SparkSession) -> None:
    """Let this session read every version whose log and files are there.

    Without it Delta refuses versions beyond `delta.deletedFileRetentionDuration`, a week by default, although their
    files are untouched. A setting of the session for good, because frames are computed long after they were made.
    """
    spark.conf.set(_REFUSE_OLD_VERSIONS, "false")


@contextmanager
def contested(path: str) -> Iterator[None]:
    """Commits made in the block that Delta refuses because of another writer raise `Contested`."""
    try:
        yield
    except Exception as error:
        if _CONTESTED.search(str(error)) is None:
            raise
        raise Contested(
            "another writer committed to the table meanwhile; nothing was written.",
            unit=path,
            next_step="run it again: it decides anew by what is there now.",
        ) from error


def condition_of(error: BaseException) -> str:
    """Spark's name of an error, such as DELTA_REPLACE_WHERE_MISMATCH; empty for other errors."""
    asked = getattr(error, "getCondition", None)
    return str(asked() or "") if callable(asked) else ""


def _history(spark: SparkSession, path: str, *, limit: int | None) -> list[Commit] | None:
    from pyspark.errors import AnalysisException  # pyspark is heavy, imported when used

    rows = f" LIMIT {int(limit)}" if limit is not None else ""
    try:
        found = spark.sql(f"DESCRIBE HISTORY {quoted(path)}{rows}").collect()
    except AnalysisException as error:
        if condition_of(error) in _NOT_A_TABLE:
            return None
        raise
    return [_commit(row) for row in found]


def _commit(row: Any) -> Commit:
    return Commit(
        version=int(row["version"]),
        operation=str(row["operation"]),
        timestamp=row["timestamp"],
        stamp=read_stamp(row["userMetadata"]),
        parameters={name: str(value) for name, value in (row["operationParameters"] or {}).items()},
        metrics={name: str(value) for name, value in (row["operationMetrics"] or {}).items()},
    )
