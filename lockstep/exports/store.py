"""Jobs in Postgres: submitting, reading, cancelling, retrying. Each is one transaction.

What belongs here: what clients and operators do to jobs. What does not: what workers do to chunks (claims.py),
and the counters' arithmetic, which both share (ledger.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from psycopg.rows import class_row, dict_row

from lockstep.exports import ledger, rules
from lockstep.exports.model import (
    DEFAULT_TENANT,
    WORK_QUEUE,
    Chunk,
    ChunkStatus,
    Client,
    Counts,
    Format,
    FormulaGuard,
    Job,
    JobStatus,
    Limits,
    Place,
    Submission,
)
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LockstepError, Transient
from lockstep.kernel.outbox import Message, Outbox, canonical_json
from lockstep.kernel.postgres import Connection, Pool, transaction

IDEMPOTENCY_HOURS = 48
# Messages of a job leave in order within a lane, and lanes side by side. Order means nothing to chunks, so a few
# lanes are enough to keep the relay's workers busy, and few enough to lock at once.
_LANES_PER_JOB = 8

_TRY_KEY = "SELECT pg_try_advisory_xact_lock(hashtextextended('exports.idempotency/' || %s || '/' || %s, 0))"
# The promised time decides, not when housekeeping comes by.
_EXPIRE_KEY = """
DELETE FROM exports.idempotency
 WHERE client_id = %s AND idempotency_key = %s AND created_at < clock_timestamp() - make_interval(hours => %s)"""
_SEEN_KEY = """
SELECT request_sha256, answer FROM exports.idempotency WHERE client_id = %s AND idempotency_key = %s"""
_KEEP_KEY = """
INSERT INTO exports.idempotency (client_id, idempotency_key, request_sha256, job_id, answer)
VALUES (%s, %s, %s, %s, %s::json)"""
_NEXT = """
SELECT nextval('exports.job_number'), moment, (moment AT TIME ZONE 'UTC')::date
  FROM (SELECT clock_timestamp()) AS t (moment)"""
_NEW_JOB = """
INSERT INTO exports.job (job_id, number, client_id, tenant, request_json, created_at, updated_at, as_of,
       reuse_window_days, max_age_seconds, force, format, formula_guard, s3_base_path, webhook_url,
       duplicates_removed, total, pending)
VALUES (%(job_id)s, %(number)s, %(client_id)s, %(tenant)s, %(request)s::jsonb, %(now)s, %(now)s, %(now)s,
       %(window)s, %(max_age)s, %(force)s, %(format)s, %(guard)s, %(base)s, %(webhook)s,
       %(duplicates)s, %(total)s, %(total)s)"""
_NEW_CHUNKS = """
COPY exports.job_chunk (job_id, chunk_key, ordinal, key, effective_date, file_id, reuse_allowed, run_at, created_at)
FROM STDIN"""
_JOB_COLUMNS = """
job_id, number, client_id, status, cancel_requested, total, pending, running, done, failed, generated, reused,
row_total, byte_total, format, formula_guard, s3_base_path, error_message, duplicates_removed, created_at, updated_at,
started_at, completed_at, as_of, version"""
_GET = f"SELECT {_JOB_COLUMNS} FROM exports.job WHERE job_id = %s"  # noqa: S608
_LIST = f"""
SELECT {_JOB_COLUMNS} FROM exports.job
 WHERE client_id = %(client)s AND number < %(before)s
   AND (%(status)s::text IS NULL OR status = %(status)s)
   AND (%(after)s::timestamptz IS NULL OR created_at >= %(after)s)
   AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)
 ORDER BY number DESC LIMIT %(limit)s"""  # noqa: S608
_CHUNKS = """
SELECT c.job_id, c.chunk_key, c.ordinal, c.key, c.effective_date, c.status, c.attempts, c.started_at, c.completed_at,
       c.s3_object_key AS object_key, c.row_count AS rows, c.bytes, c.sha256, c.etag, c.version_id, c.generation,
       c.as_of, c.columns, c.reused, c.rows_so_far, c.error_message, f.sha256 AS current_sha256,
       f.etag AS current_etag
  FROM exports.job_chunk AS c LEFT JOIN exports.file_cache AS f USING (file_id)
 WHERE c.job_id = %(job)s AND c.ordinal > %(after)s AND (%(status)s::text IS NULL OR c.status = %(status)s)
 ORDER BY c.ordinal LIMIT %(limit)s"""
_LAST_ORDINAL = "SELECT ordinal FROM exports.job_chunk WHERE job_id = %s AND chunk_key = %s"
_CANCEL = """
UPDATE exports.job SET cancel_requested = true, version = version + 1, updated_at = clock_timestamp()
 WHERE job_id = %s AND status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT cancel_requested"""
_RETRY = """
UPDATE exports.job_chunk
   SET status = 'PENDING', attempts = 0, counted_from = fence, run_at = clock_timestamp(), completed_at = NULL,
       batch_id = NULL, reserved_until = NULL
 WHERE job_id = %(job)s AND status = 'FAILED' AND (%(chunk)s::text IS NULL OR chunk_key = %(chunk)s)
RETURNING key, effective_date"""
_FAILED_OF_FILE = """
SELECT job_id, chunk_key FROM exports.job_chunk JOIN exports.job AS j USING (job_id)
 WHERE key = %s AND effective_date = %s AND job_chunk.status = 'FAILED' AND j.status = 'FAILED'
 ORDER BY job_id"""
_REUSE_PLAN = """
SELECT file_id, effective_date, s3_object_key AS object_key, schema_version, etag, bytes, generation,
       least(last_generated_at, as_of) AS last_generated_at
  FROM exports.file_cache WHERE file_id = ANY(%s)"""
_NOW = "SELECT clock_timestamp()"
_PRUNE_KEYS = "DELETE FROM exports.idempotency WHERE created_at < clock_timestamp() - make_interval(hours => %s)"


class NotFound(LockstepError):
    """No such job for this client; whether another client has it is not said."""


class WrongState(LockstepError):
    """The job is in a state in which this cannot be done; nothing was changed."""


class KeyReused(LockstepError):
    """The idempotency key was used with another request."""


class KeyInFlight(Transient):
    """A request with the same idempotency key is being answered right now."""


@dataclass(frozen=True)
class Accepted:
    """The answer to a submission; `replayed` when it was given before."""

    answer: dict[str, Any]
    replayed: bool

    @property
    def job_id(self) -> str:
        """The job that was made."""
        return str(self.answer["jobId"])


@dataclass(frozen=True)
class Plan:
    """What a submission would do."""

    total: int
    duplicates_removed: int
    reusable: int

    @property
    def to_generate(self) -> int:
        """Files that would be built."""
        return self.total - self.reusable


class JobStore:
    """Jobs in schema `exports`. Thread-safe if given a pool."""

    def __init__(self, source: Pool | Connection, *, place: Place, limits: Limits | None = None) -> None:
        self._source = source
        self._place = place
        self._limits = limits or Limits()

    def submit(
        self, client: Client, submission: Submission, request: object, *, idempotency_key: str | None = None
    ) -> Accepted:
        """Make the job, its chunks, its messages and the record of its key: all of them or nothing.

        Raises:
            KeyReused: The key belongs to another request.
            KeyInFlight: The same key is being handled at this moment.
        """
        digest = hashlib.sha256(canonical_json(request).encode()).hexdigest()
        with transaction(self._source, what="submitting a job") as connection:
            if idempotency_key is not None:
                answered = _answered(connection, client, idempotency_key, digest)
                if answered is not None:
                    return Accepted(answered, replayed=True)
            job_id = self._insert(connection, client, submission, request)
            answer = {
                "jobId": job_id,
                "status": JobStatus.SUBMITTED.value,
                "total": len(submission.chunks),
                "duplicatesRemoved": submission.duplicates_removed,
            }
            if idempotency_key is not None:
                connection.execute(_KEEP_KEY, (client.client_id, idempotency_key, digest, job_id, json.dumps(answer)))
            crash_point("exports.submit.before_commit")
        crash_point("exports.submit.after_commit")
        return Accepted(answer, replayed=False)

    def plan(self, client: Client, submission: Submission) -> Plan:
        """How many chunks a submission has and how many files it would reuse, as far as the records tell."""
        window = self._limits.reuse_window_days
        with transaction(self._source, what="planning a job") as connection:
            now = _one(connection, _NOW)
            wanted = {
                rules.file_id(client.tenant, one.key, one.effective_date, submission.format, submission.formula_guard)
                for one in submission.chunks
                if rules.reuse_allowed(one.effective_date, as_of=now, window_days=window, force=submission.force)
            }
            found = ledger.cached(connection, _REUSE_PLAN, (sorted(wanted),))
        reusable = sum(
            rules.may_reuse(
                file, as_of=now, window_days=window, max_age=submission.max_age, schema_version=file.schema_version
            )
            for file in found
        )
        return Plan(len(submission.chunks), submission.duplicates_removed, reusable)

    def get(self, job_id: str, *, client: Client | None = None) -> Job:
        """One job. Raises `NotFound`, also for a job of another client."""
        with transaction(self._source, what="reading a job") as connection:
            return _get(connection, job_id, client)

    def page(
        self,
        client: Client,
        *,
        before: int = 2**62,
        limit: int = 50,
        status: JobStatus | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
    ) -> list[Job]:
        """Jobs of a client, the newest first, with numbers below `before`."""
        parameters = {
            "client": client.client_id,
            "before": before,
            "limit": limit,
            "status": status.value if status else None,
            "after": created_after,
            "until": created_before,
        }
        with (
            transaction(self._source, what="listing jobs") as connection,
            connection.cursor(row_factory=dict_row) as rows,
        ):
            return [_job(row) for row in rows.execute(_LIST, parameters)]

    def chunks(
        self, job_id: str, *, after: int = -1, limit: int = 1000, status: ChunkStatus | None = None
    ) -> list[Chunk]:
        """Chunks of a job in their order, from the one after ordinal `after`."""
        parameters = {"job": job_id, "after": after, "limit": limit, "status": status.value if status else None}
        with (
            transaction(self._source, what="reading chunks") as connection,
            connection.cursor(row_factory=class_row(Chunk)) as rows,
        ):
            return rows.execute(_CHUNKS, parameters).fetchall()

    def ordinal(self, job_id: str, chunk_key: str) -> int | None:
        """The place of a chunk in its job; None if there is no such chunk."""
        with transaction(self._source, what="finding a chunk") as connection:
            row = connection.execute(_LAST_ORDINAL, (job_id, chunk_key)).fetchone()
        return None if row is None else int(row[0])

    def cancel(self, job_id: str, *, client: Client | None = None) -> Job:
        """Ask a job to stop. Waiting chunks never start; running ones stop at their next heartbeat.

        Repeating it changes nothing. Raises `WrongState` for a job that completed or failed.
        """
        with transaction(self._source, what="cancelling a job") as connection:
            job = _get(connection, job_id, client)
            if job.status in (JobStatus.COMPLETED, JobStatus.FAILED):
                raise WrongState(f"the job is {job.status} already.", unit=job_id)
            if connection.execute(_CANCEL, (job_id,)).rowcount:
                ledger.settle(connection, {job_id: ledger.Delta()})
            return _get(connection, job_id, client)

    def retry(self, job_id: str, *, client: Client | None = None, chunk_key: str | None = None) -> Job:
        """Put the failed chunks of a failed job back to work, with all their attempts. Done ones stay done.

        Raises `WrongState` if the job has not failed.
        """
        with transaction(self._source, what="retrying a job") as connection:
            job = _get(connection, job_id, client)
            if job.status is not JobStatus.FAILED:
                raise WrongState(
                    f"the job is {job.status}; only a FAILED job is retried.",
                    unit=job_id,
                    next_step="wait for its end, or submit a new job.",
                )
            again = connection.execute(_RETRY, {"job": job_id, "chunk": chunk_key}).fetchall()
            count = len(again)
            if not count:
                raise WrongState("no such failed chunk.", unit=job_id)
            ledger.settle(connection, {job_id: ledger.Delta(pending=count, failed=-count, reopen=True)})
            Outbox().put_all(connection, [_hint(job_id, key, day, n) for n, (key, day) in enumerate(again)])
            crash_point("exports.retry.before_commit")
            return _get(connection, job_id, client)

    def failed_chunks(self, key: str, day: date) -> Sequence[tuple[str, str]]:
        """(job, chunk) pairs of one key and date that failed, for an operator who rebuilds the partition."""
        with transaction(self._source, what="finding failed chunks") as connection:
            return [(str(job), str(chunk)) for job, chunk in connection.execute(_FAILED_OF_FILE, (key, day))]

    def forget_keys(self) -> int:
        """Drop idempotency keys past their time."""
        with transaction(self._source, what="pruning idempotency keys") as connection:
            return connection.execute(_PRUNE_KEYS, (IDEMPOTENCY_HOURS,)).rowcount

    def _insert(self, connection: Connection, client: Client, submission: Submission, request: object) -> str:
        row = connection.execute(_NEXT).fetchone()
        assert row is not None  # noqa: S101  # a SELECT without FROM has one row
        number, now, day = row
        job_id = rules.job_id(day, number)
        folder = rules.tenant_path(self._place, client.tenant, DEFAULT_TENANT)
        connection.execute(_NEW_JOB, self._job_row(client, submission, request, job_id, number, now, folder))
        crash_point("exports.submit.job_written")
        self._insert_chunks(connection, client, submission, job_id, now)
        Outbox().put_all(
            connection, [_hint(job_id, one.key, one.effective_date, n) for n, one in enumerate(submission.chunks)]
        )
        return job_id

    def _job_row(
        self,
        client: Client,
        submission: Submission,
        request: object,
        job_id: str,
        number: int,
        now: datetime,
        folder: str,
    ) -> dict[str, Any]:
        return {
            "job_id": job_id,
            "number": number,
            "client_id": client.client_id,
            "tenant": client.tenant,
            "request": canonical_json(request),
            "now": now,
            "window": self._limits.reuse_window_days,
            "max_age": None if submission.max_age is None else int(submission.max_age.total_seconds()),
            "force": submission.force,
            "format": submission.format.value,
            "guard": submission.formula_guard.value,
            "base": f"s3://{self._place.bucket}/{folder}/",
            "webhook": submission.webhook_url,
            "duplicates": submission.duplicates_removed,
            "total": len(submission.chunks),
        }

    def _insert_chunks(
        self, connection: Connection, client: Client, submission: Submission, job_id: str, now: datetime
    ) -> None:
        window, form, guard = self._limits.reuse_window_days, submission.format, submission.formula_guard
        with connection.cursor() as cursor, cursor.copy(_NEW_CHUNKS) as copy:
            for ordinal, one in enumerate(submission.chunks):
                day = one.effective_date
                copy.write_row(
                    (
                        job_id,
                        one.chunk_key,
                        ordinal,
                        one.key,
                        day,
                        rules.file_id(client.tenant, one.key, day, form, guard),
                        rules.reuse_allowed(day, as_of=now, window_days=window, force=submission.force),
                        now,
                        now,
                    )
                )


def _hint(job_id: str, key: str, day: date, number: int) -> Message:
    return Message(
        lane=f"exports/{job_id}/{number % _LANES_PER_JOB}",
        destination=f"sqs:{WORK_QUEUE}",
        payload={"jobId": job_id, "key": key, "effectiveDate": f"{day:%Y%m%d}"},
        on_exhausted="park",  # a hint that cannot leave is replaced by the sweep; it must not stop the others
    )


def _answered(connection: Connection, client: Client, key: str, digest: str) -> dict[str, Any] | None:
    if not _one(connection, _TRY_KEY, (client.client_id, key)):
        raise KeyInFlight("a request with this Idempotency-Key is being answered.", retry_after=1.0)
    connection.execute(_EXPIRE_KEY, (client.client_id, key, IDEMPOTENCY_HOURS))
    row = connection.execute(_SEEN_KEY, (client.client_id, key)).fetchone()
    if row is None:
        return None
    if row[0] != digest:
        raise KeyReused("this Idempotency-Key was used with another body.", next_step="use a new key.")
    answer: dict[str, Any] = row[1]
    return answer


def _get(connection: Connection, job_id: str, client: Client | None) -> Job:
    with connection.cursor(row_factory=dict_row) as rows:
        row = rows.execute(_GET, (job_id,)).fetchone()
    if row is None or (client is not None and row["client_id"] != client.client_id):
        raise NotFound("there is no such job.", unit=job_id)
    return _job(row)


def _job(row: dict[str, Any]) -> Job:
    counts = Counts(**{name: row.pop(name) for name in ("total", "pending", "running", "done", "failed")})
    rows, size = row.pop("row_total"), row.pop("byte_total")
    kinds = {
        "status": JobStatus(row["status"]),
        "format": Format(row["format"]),
        "formula_guard": FormulaGuard(row["formula_guard"]),
    }
    return Job(**{**row, **kinds, "counts": counts, "rows": rows, "bytes": size})


def _one(connection: Connection, statement: str, parameters: Sequence[Any] = ()) -> Any:
    row = connection.execute(statement.encode(), parameters).fetchone()
    assert row is not None  # noqa: S101  # every statement here answers one row
    return row[0]
