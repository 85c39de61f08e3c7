"""Transactional writer: parallel tasks stage, one transaction of the driver publishes, and it happens once.

What belongs here: staging with receipts, the applying transaction with its ledger row, and the same for Delta. What
does not: where rows come from. Redshift stages by manifest instead of COPY from the client; see redshift.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import sql
from pydantic import SecretStr

from lockstep.idempotency import delta
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LostClaim, Terminal, Transient
from lockstep.kernel.postgres import Connection, Pool, connect, identifier, transaction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lockstep.kernel.ids import IdSource

SCHEMA = "idempotency"
_HASH, _PARTITION, _ATTEMPT = "_hash", "_partition", "_attempt"
_STATEMENT_TIMEOUT = 600.0  # seconds, for tasks and driver alike: what took minutes to stage takes minutes to apply
_RECEIPT = "partition INT, attempt BIGINT, rows BIGINT, checksum BIGINT"
# What a CSV of Arrow spells exactly as PostgreSQL reads it.
_TYPES = (
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "decimal",
    "string",
    "boolean",
    "date",
    "timestamp",
)

COME_TOO_LATE = "let it go; to replay on purpose take a generation above that one."

_LOCK_UNIT = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 4))"
_NEWER = "SELECT max(generation) FROM idempotency.ledger WHERE pipeline = %s AND unit = %s AND generation > %s"
_CLAIM = """
INSERT INTO idempotency.ledger (pipeline, unit, generation, run, content, row_count) VALUES (%s, %s, %s, %s, %s, %s)
ON CONFLICT (pipeline, unit, generation) DO NOTHING RETURNING 1"""
_ENTRY = """
SELECT run, content, row_count FROM idempotency.ledger WHERE pipeline = %s AND unit = %s AND generation = %s"""
_REGISTER = "INSERT INTO idempotency.staging (name, target, run) VALUES (%s, %s, %s)"
_FORGET = "DELETE FROM idempotency.staging WHERE name = %s"
_OLD_STAGING = "SELECT name FROM idempotency.staging WHERE created_at < %s ORDER BY name FOR UPDATE SKIP LOCKED"


class Key(NamedTuple):
    """What is applied at most once. A deliberate replay of a unit takes the next generation."""

    pipeline: str
    unit: str
    generation: int = 1

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.unit}/{self.generation}"


class Receipt(NamedTuple):
    """What one task attempt left in staging. Rows without a receipt are never applied."""

    partition: int
    attempt: int
    rows: int
    checksum: int


class Staging(NamedTuple):
    """A staging table of one attempt of a run, and the receipts of the tasks that count."""

    name: str
    target: tuple[str, ...]
    columns: tuple[str, ...]
    receipts: tuple[Receipt, ...]

    @property
    def rows(self) -> int:
        """How many rows the receipts speak for."""
        return sum(receipt.rows for receipt in self.receipts)

    @property
    def content(self) -> str:
        """The same for the same rows, in whatever order and however split into tasks."""
        return f"{self.rows}:{sum(receipt.checksum for receipt in self.receipts) % 2**64:016x}"


class Outcome(NamedTuple):
    """What is in the target now. `already`: an earlier attempt had applied it, and this call changed nothing."""

    rows: int
    content: str
    already: bool


class ContentChanged(InvalidInput):
    """The unit was applied before, with other rows; nothing was changed."""


Apply = Callable[[Connection, Key, Staging], None]


def write(
    frame: DataFrame,
    dsn: SecretStr | str,
    target: Sequence[str],
    key: Key,
    *,
    run: str,
    how: Apply,
    ids: IdSource,
) -> Outcome:
    """Stage `frame` with Spark tasks and apply it to a PostgreSQL table, exactly once for `key`.

    Args:
        frame: The rows of the unit; its columns exist in the target under the same names.
        dsn: The database that holds the target and the ledger; tasks connect to it too.
        target: Schema and table.
        key: What is applied at most once.
        run: Who writes. A retry of the same run that finds its ledger row stages nothing.
        how: `append()` or `replace_unit(column)`, or a function of the caller's own, such as a merge.
        ids: Names the staging table.

    Raises:
        ContentChanged: The key was applied with other rows.
        LostClaim: A newer generation of the unit was applied.
    """
    with connect(dsn, application_name="lockstep-transactional", statement_timeout=_STATEMENT_TIMEOUT) as connection:
        done = applied(connection, key)
        if done is not None and done[0] == run:
            return done[1]
        staging = stage(frame, dsn, target, connection=connection, run=run, ids=ids)
        crash_point("transactional.driver.staged")
        return publish(connection, staging, key, run=run, how=how)


def applied(connection: Connection, key: Key) -> tuple[str, Outcome] | None:
    """The run that applied the key, and what it applied; None when nobody did."""
    row = connection.execute(_ENTRY, key).fetchone()
    return (row[0], Outcome(row[2], row[1], already=True)) if row else None


def stage(
    frame: DataFrame, dsn: SecretStr | str, target: Sequence[str], *, connection: Connection, run: str, ids: IdSource
) -> Staging:
    """Make a staging table and let each task COPY its rows into it; one action, so one set of receipts."""
    columns = _columns(frame)
    name = open_staging(connection, target, columns, run=run, ids=ids)
    plain = dsn.get_secret_value() if isinstance(dsn, SecretStr) else dsn
    # xxhash64 passes over NULLs, so each column brings its own "is null": (NULL, 'a') must differ from ('a', NULL).
    each = [f"{delta.column(c)}, isnull({delta.column(c)})" for c in columns]
    hashed = frame.selectExpr(*[delta.column(c) for c in columns], f"xxhash64({', '.join(each)}) AS {_HASH}")
    rows = hashed.mapInArrow(StageTask(plain, name, columns), _RECEIPT).collect()
    receipts = tuple(sorted(Receipt(r["partition"], r["attempt"], r["rows"], r["checksum"]) for r in rows))
    return Staging(name, tuple(target), columns, receipts)


def open_staging(
    connection: Connection, target: Sequence[str], columns: Sequence[str], *, run: str, ids: IdSource
) -> str:
    """Make an empty staging table of one attempt's own and return its name."""
    name = f"stage_{ids.new_id().replace('-', '')}"
    with transaction(connection, what="making the staging table"):
        connection.execute(_create_staging(name, target, columns))
        connection.execute(_REGISTER, (name, ".".join(target), run))
    crash_point("transactional.stage.created")
    return name


@dataclass(frozen=True)
class StageTask:
    """What one Spark task does: COPY its batches in one transaction, then hand back a receipt."""

    dsn: str
    table: str
    columns: tuple[str, ...]

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Stage one partition. A task that dies after its commit leaves rows that no receipt speaks for."""
        from pyspark import TaskContext  # only inside a task

        context = TaskContext.get()
        partition, attempt = (context.partitionId(), context.taskAttemptId()) if context else (0, 0)
        yield self._answer(self.copy(batches, partition, attempt))

    def copy(self, batches: Iterable[Any], partition: int, attempt: int) -> Receipt:
        """Commit the batches to staging; the last column of each is the hash of its row."""
        rows = checksum = 0
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(
            identifier(SCHEMA, self.table),
            sql.SQL(", ").join(map(identifier, [*self.columns, _PARTITION, _ATTEMPT])),
        )
        with (
            connect(
                self.dsn, application_name="lockstep-stage-task", statement_timeout=_STATEMENT_TIMEOUT
            ) as connection,
            transaction(connection, what="staging"),
            connection.cursor().copy(statement) as copy,
        ):
            for batch in batches:
                rows += batch.num_rows
                checksum += _sum(batch.column(len(self.columns)))
                copy.write(_csv(batch, len(self.columns), partition, attempt))
        return Receipt(partition, attempt, rows, checksum % 2**64)

    def _answer(self, receipt: Receipt) -> Any:
        import pyarrow as pa

        signed = receipt.checksum - 2**64 if receipt.checksum >= 2**63 else receipt.checksum
        values = (receipt.partition, receipt.attempt, receipt.rows, signed)
        types = (pa.int32(), pa.int64(), pa.int64(), pa.int64())
        arrays = [pa.array([value], kind) for value, kind in zip(values, types, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=list(Receipt._fields))


def publish(source: Connection | Pool, staging: Staging, key: Key, *, run: str, how: Apply) -> Outcome:
    """Apply the receipted rows and write the ledger row, in one transaction; or recognise that it was done.

    Raises:
        ContentChanged: The key was applied with other rows.
        LostClaim: A newer generation of the unit was applied; this one comes too late.
        Transient: Staged rows are gone, or the answer of the commit was lost: call `write` again.
    """
    crash_point("transactional.publish.before")
    with transaction(source, what=f"publishing {key}") as connection:
        outcome = _claim(connection, staging, key, run)
        if not outcome.already:
            _check_staged(connection, staging, key)
            how(connection, key, staging)
        _drop(connection, staging.name)
        crash_point("transactional.publish.before_commit")
    crash_point("transactional.publish.after_commit")
    return outcome


def _claim(connection: Connection, staging: Staging, key: Key, run: str) -> Outcome:
    # One at a time for each unit, or an older generation could pass its check while a newer one commits.
    connection.execute(_LOCK_UNIT, (f"{key.pipeline}/{key.unit}",))
    newer = connection.execute(_NEWER, key).fetchone()
    if newer is not None and newer[0] is not None:
        raise LostClaim(
            f"generation {newer[0]} was applied; nothing was changed.", unit=str(key), next_step=COME_TOO_LATE
        )
    entry = (*key, run, staging.content, staging.rows)
    if connection.execute(_CLAIM, entry).fetchone():
        return Outcome(staging.rows, staging.content, already=False)
    done = applied(connection, key)
    assert done is not None  # noqa: S101  # the conflict was with this row, and we hold the unit's lock
    if done[1].content != staging.content:
        raise ContentChanged(
            f"it was applied by {done[0]} with content {done[1].content}, not {staging.content}; nothing was changed.",
            unit=str(key),
            next_step="for a deliberate replay with other rows raise the generation.",
        )
    return done[1]


def append() -> Apply:
    """Add the rows. Only for generation 1: a replay that appends would double the unit."""

    def apply(connection: Connection, key: Key, staging: Staging) -> None:
        if key.generation != 1:
            raise InvalidInput("a replay cannot append.", unit=str(key), next_step="use replace_unit(column).")
        connection.execute(*insert_receipted(staging))

    return apply


def replace_unit(column: str) -> Apply:
    """Delete the rows of the unit, then add the new ones. `column` of the target holds the unit's name."""

    def apply(connection: Connection, key: Key, staging: Staging) -> None:
        _refuse_strangers(connection, key, staging, column)
        gone = sql.SQL("DELETE FROM {} WHERE {} = %s").format(identifier(*staging.target), identifier(column))
        connection.execute(gone, (key.unit,))
        connection.execute(*insert_receipted(staging))

    return apply


def insert_receipted(staging: Staging) -> tuple[sql.Composed, tuple[list[int], list[int]]]:
    """The statement, and its parameters, that adds exactly the receipted rows to the target."""
    columns = sql.SQL(", ").join(map(identifier, staging.columns))
    statement = sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {}").format(
        identifier(*staging.target), columns, columns, receipted_rows(staging)
    )
    return statement, receipt_parameters(staging)


def receipted_rows(staging: Staging) -> sql.Composed:
    """The staged rows that count, as something to select from; bind `receipt_parameters`."""
    return sql.SQL(
        "(SELECT s.* FROM {} s JOIN unnest(%s::int[], %s::bigint[]) AS receipt (p, a) "
        "ON s._partition = receipt.p AND s._attempt = receipt.a) AS staged"
    ).format(identifier(SCHEMA, staging.name))


def receipt_parameters(staging: Staging) -> tuple[list[int], list[int]]:
    """Partitions and attempts of the receipts."""
    return [r.partition for r in staging.receipts], [r.attempt for r in staging.receipts]


def sweep(connection: Connection, *, created_before: datetime) -> int:
    """Drop staging tables that dead runs left behind; a task that still writes into one then fails loudly."""
    with transaction(connection, what="sweeping staging tables"):
        names = [name for (name,) in connection.execute(_OLD_STAGING, (created_before,)).fetchall()]
        for name in names:
            _drop(connection, name)
    return len(names)


def _columns(frame: DataFrame) -> tuple[str, ...]:
    types = [(name, kind.split("(")[0]) for name, kind in frame.dtypes]
    problems = [f"{name}: {kind} has no exact text form; cast it first" for name, kind in types if kind not in _TYPES]
    reserved = {_HASH, _PARTITION, _ATTEMPT}
    problems += [f"{name}: a name of the staging table" for name, _ in types if name in reserved]
    if problems or not types:
        raise InvalidInput("these columns cannot be staged.", problems=problems)
    return tuple(name for name, _ in types)


def _create_staging(name: str, target: Sequence[str], columns: Sequence[str]) -> sql.Composed:
    # The target's types without its constraints. Unlogged: after a crash of the server it is empty, which the
    # comparison with the receipts notices.
    return sql.SQL(
        "CREATE UNLOGGED TABLE {} AS SELECT {}, 0::int AS _partition, 0::bigint AS _attempt FROM {} WITH NO DATA"
    ).format(identifier(SCHEMA, name), sql.SQL(", ").join(map(identifier, columns)), identifier(*target))


def _check_staged(connection: Connection, staging: Staging, key: Key) -> None:
    counted = sql.SQL("SELECT count(*) FROM {}").format(receipted_rows(staging))
    row = connection.execute(counted, receipt_parameters(staging)).fetchone()
    if row is None or row[0] != staging.rows:
        raise Transient(
            f"staging holds {row and row[0]} of {staging.rows} receipted rows; nothing was changed.",
            unit=str(key),
            next_step="run it again: it stages anew.",
        )


def _refuse_strangers(connection: Connection, key: Key, staging: Staging, column: str) -> None:
    if column not in staging.columns:
        raise InvalidInput(f"the rows have no column {column}.", unit=str(key))
    strangers = sql.SQL("SELECT count(*) FROM {} WHERE {} IS DISTINCT FROM %s").format(
        receipted_rows(staging), identifier(column)
    )
    row = connection.execute(strangers, (*receipt_parameters(staging), key.unit)).fetchone()
    if row is not None and row[0]:
        raise InvalidInput(
            f"{row[0]} rows belong to another unit than {key.unit}; nothing was changed.",
            unit=str(key),
            next_step=f"filter the rows by {column}.",
        )


def _drop(connection: Connection, name: str) -> None:
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(identifier(SCHEMA, name)))
    connection.execute(_FORGET, (name,))


def _sum(column: Any) -> int:
    # The sum modulo 2**64: the same for every order and every split.
    import numpy as np

    values = column.to_numpy(zero_copy_only=False).view(np.uint64)
    return int(np.sum(values, dtype=np.uint64))


def _csv(batch: Any, width: int, partition: int, attempt: int) -> bytes:
    import pyarrow as pa
    from pyarrow import csv

    tags = [pa.repeat(pa.scalar(tag, pa.int64()), batch.num_rows) for tag in (partition, attempt)]
    names = [*batch.schema.names[:width], _PARTITION, _ATTEMPT]
    whole = pa.RecordBatch.from_arrays([*batch.columns[:width], *tags], names=names)
    text = io.BytesIO()
    csv.write_csv(whole, text, csv.WriteOptions(include_header=False))
    return text.getvalue()


class RestoredAway(Terminal):
    """The unit was applied, and a later RESTORE took it back. Delta would ignore the replay without a word."""


def write_delta(
    spark: SparkSession,
    path: str,
    frame: DataFrame,
    key: Key,
    *,
    run: str,
    content: str,
    ids: IdSource,
    replace: str | None = None,
) -> Outcome:
    """Commit `frame` to a Delta table, exactly once for `key`, and say so when Delta ignored it.

    Delta keeps one number for each `txnAppId` and drops commits that do not raise it, silently. The number here is the
    generation, so a repetition and a stale generation are both dropped, atomically; reading the history back turns
    the silence into an answer.

    Args:
        spark: The session.
        path: The table.
        frame: The rows of the unit.
        key: What is applied at most once.
        run: Who writes.
        content: The caller's fingerprint of the input, to recognise a replay with other rows.
        ids: Names the attempt inside the commit.
        replace: Predicate of the rows that a replay replaces; without it rows are added, in generation 1 only.

    Raises:
        OutsideUnit: A row of `frame` does not satisfy `replace`; nothing was written.
        ContentChanged: The key was applied with other content.
        LostClaim: A newer generation of the unit was applied.
        RestoredAway: It was applied and then undone by a RESTORE: raise the generation to apply it again.
    """
    from lockstep.idempotency import overwrite  # with the client of S3, which tasks that import this module do not need

    if replace is None and key.generation != 1:
        raise InvalidInput("a replay cannot append.", unit=str(key), next_step="pass the predicate it replaces.")
    if replace is not None:
        overwrite.refuse_blank(replace, path)
    attempt = ids.new_id()
    fields = {"pipeline": key.pipeline, "unit": key.unit, "generation": key.generation}
    writer = (
        frame.write.format("delta")
        .option("txnAppId", f"{key.pipeline}:{key.unit}")
        .option("txnVersion", key.generation)
        .option("userMetadata", delta.stamp("transactional", attempt=attempt, run=run, content=content, **fields))
    )
    crash_point("transactional.delta.before_write")
    with delta.contested(path):
        if replace is None:
            writer.mode("append").save(path)
        else:
            with overwrite.checked(spark, path, replace):
                writer.mode("overwrite").option("replaceWhere", replace).save(path)
    crash_point("transactional.delta.after_commit")
    return judge_delta(delta.history(spark, path), key, attempt=attempt, content=content)


def judge_delta(commits: Sequence[delta.Commit], key: Key, *, attempt: str, content: str) -> Outcome:
    """What became of an attempt, by the history alone, newest commit first."""
    ours = [c for c in commits if c.stamp and (c.stamp.get("pipeline"), c.stamp.get("unit")) == key[:2]]
    same = [c for c in ours if c.stamp and c.stamp["generation"] == key.generation]
    for commit in same:
        if commit.stamp and commit.stamp["attempt"] == attempt:
            return Outcome(int(commit.metrics.get("numOutputRows", 0)), content, already=False)
    newer = [c.stamp["generation"] for c in ours if c.stamp and c.stamp["generation"] > key.generation]
    if newer:
        raise LostClaim(
            f"generation {max(newer)} was applied; nothing was changed.", unit=str(key), next_step=COME_TOO_LATE
        )
    if not same:
        raise Terminal(
            "Delta ignored the commit and the history no longer says why; nothing was changed.",
            unit=str(key),
            next_step="look at the data, then raise the generation to apply it.",
        )
    return _judge_earlier(commits, same[0], key, content)


def _judge_earlier(commits: Sequence[delta.Commit], earlier: delta.Commit, key: Key, content: str) -> Outcome:
    undone = [
        c.version
        for c in commits
        if c.operation == "RESTORE" and c.version > earlier.version and _restored_to(c) < earlier.version
    ]
    if undone:
        raise RestoredAway(
            f"version {earlier.version} applied it and the RESTORE of version {undone[-1]} took it back.",
            unit=str(key),
            next_step="raise the generation to apply it again.",
        )
    stamp = earlier.stamp or {}
    if stamp.get("content") != content:
        raise ContentChanged(
            f"it was applied by {stamp.get('run')} with other content; nothing was changed.",
            unit=str(key),
            next_step="for a deliberate replay with other rows raise the generation.",
        )
    return Outcome(int(earlier.metrics.get("numOutputRows", 0)), content, already=True)


def _restored_to(commit: delta.Commit) -> int:
    version = commit.parameters.get("version", "")
    # By timestamp: the version is not in the history, so assume that everything before was undone.
    return int(version) if version.isdigit() else -1
