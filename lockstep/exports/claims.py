"""Chunks in Postgres, as workers see them: reserve, claim, beat, publish, fail, reap. The table is the queue.

What belongs here: fenced statements. What does not: bytes and objects (worker.py), whose turn it is and what follows
a failure (rules.py). A claim is (chunk, fence); every write carries the fence in its condition, so a worker that was
replaced changes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import class_row, dict_row

from lockstep.exports import ledger, rules
from lockstep.exports.model import (
    PARKING_QUEUE,
    CachedFile,
    Candidate,
    Claim,
    Format,
    FormulaGuard,
    Limits,
    Receipt,
)
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LostClaim, Terminal
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.kernel.logs import redact_text
from lockstep.kernel.outbox import Message, Outbox
from lockstep.kernel.postgres import Connection, Pool, transaction

LEASE_SECONDS = 30.0
BEAT_SECONDS = 5.0
RESERVE_SECONDS = 90.0
LONGEST_BUILD_SECONDS = 3600.0
_MOST_JOBS = 200
_LONGEST_ERROR = 1000

# The first job of every client, then the second of every one: the bound must not hide a client behind another's jobs.
_ACTIVE = """
SELECT job_id, client_id, running FROM exports.job
 WHERE status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT cancel_requested AND pending > 0
 ORDER BY row_number() OVER (PARTITION BY client_id ORDER BY number), number LIMIT %s"""
_BUSY = """
SELECT client_id, sum(running) FROM exports.job
 WHERE status IN ('SUBMITTED', 'IN_PROGRESS') AND running > 0 GROUP BY client_id"""
# A chunk whose file is being built cannot be claimed: set aside, it would be given back and set aside again until that
# build ends, by a loop as fast as the database and by a run at every tick.
_CANDIDATES = """
SELECT j.client_id, c.job_id, c.chunk_key, c.file_id
  FROM unnest(%(jobs)s::text[], %(clients)s::text[]) WITH ORDINALITY AS j (job_id, client_id, place)
 CROSS JOIN LATERAL (
    SELECT job_id, chunk_key, file_id, ordinal FROM exports.job_chunk AS w
     WHERE job_id = j.job_id AND status = 'PENDING' AND run_at <= clock_timestamp()
       AND (reserved_until IS NULL OR reserved_until <= clock_timestamp())
       AND NOT EXISTS (SELECT 1 FROM exports.job_chunk AS r WHERE r.file_id = w.file_id AND r.status = 'RUNNING')
     ORDER BY ordinal LIMIT %(limit)s) AS c
 ORDER BY j.place, c.ordinal"""
_RESERVE = """
UPDATE exports.job_chunk AS c
   SET batch_id = %(batch)s, reserved_until = clock_timestamp() + make_interval(secs => %(seconds)s)
  FROM unnest(%(jobs)s::text[], %(chunks)s::text[]) AS picked (job_id, chunk_key)
 WHERE c.job_id = picked.job_id AND c.chunk_key = picked.chunk_key AND c.status = 'PENDING'
   AND c.run_at <= clock_timestamp() AND (c.reserved_until IS NULL OR c.reserved_until <= clock_timestamp())"""
_RESERVE_FILE = """
UPDATE exports.job_chunk AS c
   SET batch_id = %(batch)s, reserved_until = clock_timestamp() + make_interval(secs => %(seconds)s),
       run_at = clock_timestamp()
  FROM exports.job AS j
 WHERE j.job_id = c.job_id AND j.status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT j.cancel_requested
   AND c.key = %(key)s AND c.effective_date = %(day)s AND c.status = 'PENDING'"""
_EXTEND = """
UPDATE exports.job_chunk SET reserved_until = clock_timestamp() + make_interval(secs => %s)
 WHERE batch_id = %s AND status = 'PENDING'"""
_RELEASE = """
UPDATE exports.job_chunk SET batch_id = NULL, reserved_until = NULL WHERE batch_id = %s AND status = 'PENDING'"""
# The limit was lowered below what a chunk has spent: nobody may claim it any more, so it would wait for ever.
_SPENT_JOBS = "SELECT DISTINCT job_id FROM exports.job_chunk WHERE batch_id = %(batch)s AND attempts >= %(max)s"
_GIVE_UP_SPENT = """
UPDATE exports.job_chunk AS c
   SET status = 'FAILED', completed_at = clock_timestamp(), batch_id = NULL, reserved_until = NULL,
       error_message = coalesce(c.error_message, 'no attempt is left')
  FROM exports.job AS j
 WHERE j.job_id = c.job_id AND j.status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT j.cancel_requested
   AND c.batch_id = %(batch)s AND c.status = 'PENDING' AND c.attempts >= %(max)s
RETURNING c.job_id, c.key, c.effective_date, c.attempts, c.error_message"""
_BATCHES = """
SELECT DISTINCT batch_id FROM exports.job_chunk
 WHERE batch_id IS NOT NULL AND status = 'PENDING' AND reserved_until > clock_timestamp() LIMIT %s"""

# The single-flight index has the last word; NOT EXISTS only avoids running into it. The attempts are checked here
# too: a crash never runs the error path, so the claim is the only place that always sees the number.
_CLAIM = """
WITH picked AS (
    SELECT c.job_id, c.chunk_key FROM exports.job_chunk AS c JOIN exports.job AS j USING (job_id)
     WHERE c.batch_id = %(batch)s AND c.status = 'PENDING' AND c.run_at <= clock_timestamp()
       AND c.attempts < %(max)s AND j.status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT j.cancel_requested
       AND NOT EXISTS (SELECT 1 FROM exports.job_chunk AS r WHERE r.file_id = c.file_id AND r.status = 'RUNNING')
     ORDER BY c.ordinal LIMIT 1 FOR UPDATE OF c SKIP LOCKED)
UPDATE exports.job_chunk AS c
   SET status = 'RUNNING', attempts = c.attempts + 1, fence = c.fence + 1, locked_at = clock_timestamp(),
       lock_owner = %(owner)s, lease_until = clock_timestamp() + make_interval(secs => %(lease)s), rows_so_far = 0,
       started_at = coalesce(c.started_at, clock_timestamp()), batch_id = NULL, reserved_until = NULL
  FROM picked WHERE c.job_id = picked.job_id AND c.chunk_key = picked.chunk_key
RETURNING c.job_id, c.chunk_key, c.key, c.effective_date, c.file_id, c.attempts, c.fence, c.counted_from,
          c.locked_at AS claimed_at"""
_START = """
UPDATE exports.job
   SET pending = pending - 1, running = running + 1, status = 'IN_PROGRESS', version = version + 1,
       updated_at = clock_timestamp(), started_at = coalesce(started_at, clock_timestamp())
 WHERE job_id = %s AND status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT cancel_requested
RETURNING tenant, format, formula_guard"""
_BEAT = """
UPDATE exports.job_chunk AS c
   SET lease_until = least(clock_timestamp() + make_interval(secs => %(lease)s),
                           c.locked_at + make_interval(secs => %(longest)s)),
       rows_so_far = %(rows)s
  FROM exports.job AS j
 WHERE c.job_id = %(job)s AND c.chunk_key = %(chunk)s AND c.fence = %(fence)s AND c.status = 'RUNNING'
   AND j.job_id = c.job_id AND c.locked_at + make_interval(secs => %(longest)s) > clock_timestamp()
RETURNING j.cancel_requested"""
# gc takes the same lock alone: an object that is about to get its record must not be removed as one that has none.
GC_LOCK = "hashtextextended('exports.gc', 0)"
_GUARD = f"""
SELECT f.etag, pg_advisory_xact_lock_shared({GC_LOCK})
  FROM exports.job_chunk AS c LEFT JOIN exports.file_cache AS f USING (file_id)
 WHERE c.job_id = %(job)s AND c.chunk_key = %(chunk)s AND c.fence = %(fence)s AND c.status = 'RUNNING'
   FOR UPDATE OF c"""  # noqa: S608
_CACHE = """
INSERT INTO exports.file_cache AS f (file_id, tenant, key, effective_date, format, formula_guard, schema_version,
       s3_object_key, row_count, bytes, sha256, etag, version_id, generation, as_of, columns, created_at,
       last_generated_at)
VALUES (%(file_id)s, %(tenant)s, %(key)s, %(day)s, %(format)s, %(guard)s, %(schema_version)s, %(object_key)s,
       %(rows)s, %(bytes)s, %(sha256)s, %(etag)s, %(version_id)s, 1, %(as_of)s, %(columns)s::jsonb,
       clock_timestamp(), clock_timestamp())
ON CONFLICT (file_id) DO UPDATE
   SET schema_version = excluded.schema_version, s3_object_key = excluded.s3_object_key,
       row_count = excluded.row_count, bytes = excluded.bytes, sha256 = excluded.sha256, etag = excluded.etag,
       version_id = excluded.version_id, generation = f.generation + 1, as_of = excluded.as_of,
       columns = excluded.columns, last_generated_at = excluded.last_generated_at
RETURNING f.generation"""
_DONE_FIELDS = """
status = 'DONE', completed_at = clock_timestamp(), lease_until = NULL, batch_id = NULL, reserved_until = NULL,
s3_object_key = f.s3_object_key, row_count = f.row_count, bytes = f.bytes, sha256 = f.sha256, etag = f.etag,
version_id = f.version_id, generation = f.generation, as_of = f.as_of, columns = f.columns, error_message = NULL"""
_DONE = f"""
UPDATE exports.job_chunk AS c SET {_DONE_FIELDS}, rows_so_far = f.row_count, reused = false
  FROM exports.file_cache AS f
 WHERE f.file_id = c.file_id AND c.job_id = %(job)s AND c.chunk_key = %(chunk)s AND c.fence = %(fence)s
   AND c.status = 'RUNNING'"""  # noqa: S608
_WAITING_JOBS = "SELECT DISTINCT job_id FROM exports.job_chunk WHERE file_id = %s AND status = 'PENDING'"
# Jobs are locked before the chunks of other jobs are touched (and those chunks are never waited for), so that a job
# cannot be cancelled between the choice of its chunk and its counters.
_LOCK_JOBS = "SELECT 1 FROM exports.job WHERE job_id = ANY(%s) ORDER BY job_id FOR UPDATE"
# Others who asked for the same file before this build began are served by it: its data is as fresh as they asked.
_ATTACH = f"""
WITH waiting AS (
    SELECT c.job_id, c.chunk_key FROM exports.job_chunk AS c JOIN exports.job AS j USING (job_id)
     WHERE c.file_id = %(file_id)s AND c.status = 'PENDING' AND c.created_at <= %(as_of)s
       AND j.status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT j.cancel_requested
     FOR UPDATE OF c SKIP LOCKED)
UPDATE exports.job_chunk AS c
   SET {_DONE_FIELDS}, rows_so_far = f.row_count, reused = true, fence = c.fence + 1,
       started_at = coalesce(c.started_at, clock_timestamp())
  FROM exports.file_cache AS f, waiting
 WHERE f.file_id = c.file_id AND c.job_id = waiting.job_id AND c.chunk_key = waiting.chunk_key
RETURNING c.job_id"""  # noqa: S608
_FAIL = """
UPDATE exports.job_chunk
   SET status = %(status)s::text, attempts = attempts - %(refund)s, lease_until = NULL, error_message = %(error)s,
       run_at = clock_timestamp() + make_interval(secs => %(seconds)s),
       completed_at = CASE WHEN %(status)s::text = 'FAILED' THEN clock_timestamp() END
 WHERE job_id = %(job)s AND chunk_key = %(chunk)s AND fence = %(fence)s AND status = 'RUNNING'"""
_EXPIRED = """
SELECT c.job_id, c.chunk_key, c.key, c.effective_date, c.file_id, j.tenant, j.format, j.formula_guard, c.attempts,
       c.fence, c.counted_from, c.locked_at AS claimed_at, j.cancel_requested, c.lock_owner
  FROM exports.job_chunk AS c JOIN exports.job AS j USING (job_id)
 WHERE c.status = 'RUNNING' AND c.lease_until <= clock_timestamp()
 ORDER BY c.lease_until LIMIT %s FOR UPDATE OF c SKIP LOCKED"""
# A file is as old as its data, which was read before it was published: a build may take an hour, and midnight may fall
# into it.
_REUSE_CANDIDATES = """
SELECT c.job_id, c.chunk_key, j.as_of AS decided_at, j.reuse_window_days, j.max_age_seconds, f.file_id,
       f.effective_date, f.s3_object_key AS object_key, f.schema_version, f.etag, f.bytes, f.generation,
       least(f.last_generated_at, f.as_of) AS last_generated_at
  FROM exports.job_chunk AS c JOIN exports.job AS j USING (job_id) JOIN exports.file_cache AS f USING (file_id)
 WHERE c.batch_id = %s AND c.status = 'PENDING' AND c.reuse_allowed
   AND j.status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT j.cancel_requested
 ORDER BY c.ordinal"""
_REUSE = f"""
WITH picked AS (
    SELECT c.job_id, c.chunk_key FROM exports.job_chunk AS c
      JOIN unnest(%(jobs)s::text[], %(chunks)s::text[], %(generations)s::bigint[]) AS p (job_id, chunk_key, generation)
        ON p.job_id = c.job_id AND p.chunk_key = c.chunk_key
      JOIN exports.file_cache AS f ON f.file_id = c.file_id AND f.generation = p.generation
      JOIN exports.job AS j ON j.job_id = c.job_id
     WHERE c.status = 'PENDING' AND c.attempts < %(max)s AND j.status IN ('SUBMITTED', 'IN_PROGRESS')
       AND NOT j.cancel_requested
     ORDER BY c.job_id, c.chunk_key FOR UPDATE OF c SKIP LOCKED)
UPDATE exports.job_chunk AS c
   SET {_DONE_FIELDS}, rows_so_far = f.row_count, reused = true, attempts = c.attempts + 1, fence = c.fence + 1,
       lock_owner = %(owner)s, locked_at = clock_timestamp(), started_at = coalesce(c.started_at, clock_timestamp())
  FROM exports.file_cache AS f, picked
 WHERE f.file_id = c.file_id AND c.job_id = picked.job_id AND c.chunk_key = picked.chunk_key
RETURNING c.job_id, c.row_count, c.bytes"""  # noqa: S608
_TRIP = """
INSERT INTO exports.breaker AS b (part, failures, open_until, last_error)
VALUES (%(part)s, 1, clock_timestamp() + make_interval(secs => %(first)s), %(error)s)
ON CONFLICT (part) DO UPDATE
   SET failures = CASE WHEN b.open_until > clock_timestamp() THEN b.failures ELSE b.failures + 1 END,
       open_until = CASE WHEN b.open_until > clock_timestamp() THEN b.open_until ELSE clock_timestamp()
                    + make_interval(secs => least(60, %(first)s * power(2, least(b.failures, 10)))) END,
       last_error = excluded.last_error"""
_CLOSE = "DELETE FROM exports.breaker WHERE open_until <= clock_timestamp()"
_BROKEN = "SELECT part, failures, open_until > clock_timestamp() FROM exports.breaker"
_STATES = """
SELECT p.job_id, p.chunk_key, c.status, j.status AS job_status,
       extract(epoch FROM greatest(c.lease_until, c.run_at) - clock_timestamp())::float8 AS wait
  FROM unnest(%s::text[], %s::text[]) AS p (job_id, chunk_key)
  LEFT JOIN exports.job_chunk AS c ON c.job_id = p.job_id AND c.chunk_key = p.chunk_key
  LEFT JOIN exports.job AS j ON j.job_id = p.job_id"""


@dataclass(frozen=True)
class Batch:
    """Chunks set aside for one run or one worker for a while; nothing is counted until one is claimed."""

    batch_id: str
    size: int


@dataclass(frozen=True)
class ReuseCandidate:
    """A waiting chunk and the file that may serve it."""

    job_id: str
    chunk_key: str
    decided_at: datetime
    window_days: int
    max_age: timedelta | None
    file: CachedFile


@dataclass(frozen=True)
class MessageState:
    """What the table says about the chunk that a message names; None: there is no such chunk."""

    job_id: str
    chunk_key: str
    status: str | None
    job_status: str | None
    wait: float | None


class ClaimStore:
    """Chunks in schema `exports`. Give it a pool, or a connection of its own."""

    def __init__(
        self,
        source: Pool | Connection,
        *,
        owner: str,
        limits: Limits | None = None,
        ids: IdSource | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._source = source
        self._owner = owner
        self._limits = limits or Limits()
        self._ids = ids or SystemIds()
        self._lease = lease_seconds

    # --- choosing ---------------------------------------------------------------------------------------------------

    def reserve(self, limit: int, *, seconds: float = RESERVE_SECONDS) -> Batch | None:
        """Set up to `limit` due chunks aside, fairly; None if nothing is due or a part is broken.

        While a part that failed has not been seen to work again, one chunk at a time goes to try it.
        """
        with transaction(self._source, what="reserving chunks") as connection:
            broken = connection.execute(_BROKEN).fetchall()
            if any(is_open for _, _, is_open in broken) or limit <= 0:
                return None
            chosen = self._choose(connection, 1 if broken else limit)
            if not chosen:
                return None
            batch = self._ids.new_id()
            picked = {"jobs": [one.job_id for one in chosen], "chunks": [one.chunk_key for one in chosen]}
            size = connection.execute(_RESERVE, {"batch": batch, "seconds": seconds, **picked}).rowcount
        return Batch(batch, size) if size else None

    def reserve_file(self, key: str, day: date, *, seconds: float = RESERVE_SECONDS) -> Batch | None:
        """Set aside every waiting chunk of one key and day, whoever else had it in mind: a person asked for it now."""
        batch = self._ids.new_id()
        parameters = {"batch": batch, "seconds": seconds, "key": key, "day": day}
        with transaction(self._source, what="reserving a partition") as connection:
            size = connection.execute(_RESERVE_FILE, parameters).rowcount
        return Batch(batch, size) if size else None

    def extend(self, batch_id: str, *, seconds: float = RESERVE_SECONDS) -> int:
        """Keep a reservation; how many chunks still wait in it."""
        with transaction(self._source, what="extending a batch") as connection:
            return connection.execute(_EXTEND, (seconds, batch_id)).rowcount

    def release(self, batch_id: str) -> int:
        """Give back what was not claimed; what could not be claimed, because its attempts are spent, has failed."""
        with transaction(self._source, what="releasing a batch") as connection:
            self._give_up_spent(connection, batch_id)
            return connection.execute(_RELEASE, (batch_id,)).rowcount

    def batches(self, limit: int = 200) -> list[str]:
        """Batches with chunks that wait for their run or worker."""
        with transaction(self._source, what="reading batches") as connection:
            return [str(batch) for (batch,) in connection.execute(_BATCHES, (limit,))]

    def claim(self, batch_id: str) -> Claim | None:
        """Take the next chunk of a batch; the attempt is counted now. None: nothing is left to take."""
        try:
            with transaction(self._source, what="claiming a chunk") as connection:
                with connection.cursor(row_factory=dict_row) as cursor:
                    parameters = {
                        "batch": batch_id,
                        "max": self._limits.max_attempts,
                        "owner": self._owner,
                        "lease": self._lease,
                    }
                    row = cursor.execute(_CLAIM, parameters).fetchone()
                    if row is None:
                        return None
                    job = cursor.execute(_START, (row["job_id"],)).fetchone()
                    if job is None:  # cancelled since the chunk was picked
                        raise _Undo
                crash_point("exports.claim.before_commit")
        except _Undo:
            return self.claim(batch_id)
        except Terminal as error:
            if isinstance(error.__cause__, psycopg.errors.UniqueViolation):  # another worker took the same file
                return self.claim(batch_id)
            raise
        crash_point("exports.claim.after_commit")
        return _claim({**row, **job})

    # --- holding ----------------------------------------------------------------------------------------------------

    def beat(self, claim: Claim, rows: int) -> bool:
        """Keep the claim, tell the progress, and learn whether to stop. Raises `LostClaim`."""
        with transaction(self._source, what="heartbeat") as connection:
            row = connection.execute(
                _BEAT, {**_fence(claim), "lease": self._lease, "longest": LONGEST_BUILD_SECONDS, "rows": rows}
            ).fetchone()
        if row is None:
            raise _lost(claim)
        return bool(row[0])

    # --- ending -----------------------------------------------------------------------------------------------------

    @contextmanager
    def publishing(self, claim: Claim) -> Iterator[Publication]:
        """The transaction in which a file becomes the file. Raises `LostClaim` before anything is written.

        Until it ends nobody can take the chunk over, so the object that the block publishes was written by the
        only holder. The block must call `record` once.
        """
        with transaction(self._source, what="publishing a chunk") as connection:
            row = connection.execute(_GUARD, _fence(claim)).fetchone()
            if row is None:
                raise _lost(claim)
            crash_point("exports.publish.guarded")
            publication = Publication(connection, claim, etag=row[0])
            yield publication
            assert publication.recorded, claim.unit  # noqa: S101  # a block that records nothing is a bug
            crash_point("exports.publish.before_commit")
        crash_point("exports.publish.after_commit")

    def fail(self, claim: Claim, error: str, decision: rules.Retry | rules.GiveUp) -> None:
        """Record what followed a failure. Raises `LostClaim`; nothing is changed then."""
        with transaction(self._source, what="recording a failure") as connection:
            self._fail(connection, claim, error, decision)
        crash_point("exports.fail.after_commit")

    def reap(self, limit: int = 100) -> int:
        """Take chunks from workers that stopped beating, and decide about each as about any failure."""
        with transaction(self._source, what="reaping chunks") as connection:
            with connection.cursor(row_factory=dict_row) as cursor:
                rows = cursor.execute(_EXPIRED, (limit,)).fetchall()
            for row in sorted(rows, key=lambda one: (one["job_id"], one["chunk_key"])):
                cancelled, owner = row.pop("cancel_requested"), row.pop("lock_owner")
                claim = _claim(row)
                decision = rules.after_failure(
                    attempts=claim.attempts, max_attempts=self._limits.max_attempts, cancelled=cancelled
                )
                self._fail(connection, claim, f"the worker {owner} stopped answering", decision)
        return len(rows)

    # --- reusing ----------------------------------------------------------------------------------------------------

    def reuse_candidates(self, batch_id: str) -> list[ReuseCandidate]:
        """Waiting chunks of a batch that may reuse a file, each with the file that exists for it."""
        with (
            transaction(self._source, what="finding files to reuse") as connection,
            connection.cursor(row_factory=dict_row) as cursor,
        ):
            return [_reuse_candidate(row) for row in cursor.execute(_REUSE_CANDIDATES, (batch_id,))]

    def reuse(self, verified: Sequence[ReuseCandidate]) -> int:
        """Finish these chunks with the files that were seen; one whose file changed since is left waiting."""
        parameters: dict[str, Any] = {
            "jobs": [one.job_id for one in verified],
            "chunks": [one.chunk_key for one in verified],
            "generations": [one.file.generation for one in verified],
            "max": self._limits.max_attempts,
            "owner": self._owner,
        }
        with transaction(self._source, what="reusing files") as connection:
            connection.execute(_LOCK_JOBS, (sorted(set(parameters["jobs"])),))
            rows = connection.execute(_REUSE, parameters).fetchall()
            ledger.settle(connection, _reuse_deltas(rows))
            if rows:  # the store showed the files and the source its function: a job of reused files builds nothing
                connection.execute(_CLOSE)
            crash_point("exports.reuse.before_commit")
        return len(rows)

    # --- what is broken around the chunks ---------------------------------------------------------------------------

    def trip(self, part: str, error: str) -> None:
        """A part does not work: nobody tries it for a while, longer each time."""
        parameters = {"part": part, "first": rules.breaker_pause(1), "error": _clean(error)}
        with transaction(self._source, what="opening the breaker") as connection:
            connection.execute(_TRIP, parameters)

    def close_breakers(self) -> None:
        """A chunk went through: parts whose pause is over work again."""
        with transaction(self._source, what="closing the breaker") as connection:
            connection.execute(_CLOSE)

    def breakers(self) -> dict[str, bool]:
        """Parts that failed lately, and whether they are still kept away from."""
        with transaction(self._source, what="reading the breaker") as connection:
            return {part: is_open for part, _, is_open in connection.execute(_BROKEN)}

    def message_states(self, named: Sequence[tuple[str, str]]) -> list[MessageState]:
        """What the table says about chunks that messages name."""
        with (
            transaction(self._source, what="looking up messages") as connection,
            connection.cursor(row_factory=class_row(MessageState)) as cursor,
        ):
            return cursor.execute(_STATES, ([job for job, _ in named], [chunk for _, chunk in named])).fetchall()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _choose(self, connection: Connection, limit: int) -> list[Candidate]:
        active = connection.execute(_ACTIVE, (_MOST_JOBS,)).fetchall()
        busy_clients: Counter[str] = Counter({client: int(n) for client, n in connection.execute(_BUSY)})
        with connection.cursor(row_factory=class_row(Candidate)) as cursor:
            parameters = {
                "jobs": [job for job, _, _ in active],
                "clients": [client for _, client, _ in active],
                "limit": limit,
            }
            found = cursor.execute(_CANDIDATES, parameters).fetchall()
        busy_jobs = {job: running for job, _, running in active}
        return rules.fair_order(found, limit=limit, busy_clients=busy_clients, busy_jobs=busy_jobs)

    def _give_up_spent(self, connection: Connection, batch_id: str) -> None:
        parameters = {"batch": batch_id, "max": self._limits.max_attempts}
        jobs = sorted(str(job) for (job,) in connection.execute(_SPENT_JOBS, parameters))
        if not jobs:
            return
        connection.execute(_LOCK_JOBS, (jobs,))
        for job, key, day, attempts, error in connection.execute(_GIVE_UP_SPENT, parameters).fetchall():
            ledger.settle(connection, {job: ledger.Delta(pending=-1, failed=1, error=_gave_up(key, day))})
            Outbox().put(connection, _parked(job, key, day, attempts, error))

    def _fail(self, connection: Connection, claim: Claim, error: str, decision: rules.Retry | rules.GiveUp) -> None:
        gave_up = isinstance(decision, rules.GiveUp)
        text = _clean(error)
        parameters = {
            **_fence(claim),
            "status": "FAILED" if gave_up else "PENDING",
            "refund": int(isinstance(decision, rules.Retry) and decision.refund),
            "seconds": decision.seconds if isinstance(decision, rules.Retry) else 0.0,
            "error": text,
        }
        if connection.execute(_FAIL, parameters).rowcount == 0:
            raise _lost(claim)
        delta = ledger.Delta(
            running=-1,
            pending=0 if gave_up else 1,
            failed=1 if gave_up else 0,
            error=_gave_up(claim.key, claim.effective_date) if gave_up else None,
        )
        ledger.settle(connection, {claim.job_id: delta})
        if gave_up:
            Outbox().put(connection, _parked(claim.job_id, claim.key, claim.effective_date, claim.attempts, text))
        crash_point("exports.fail.before_commit")


class Publication:
    """One open publication: what the stable name holds now, and the place to record what it holds next."""

    def __init__(self, connection: Connection, claim: Claim, *, etag: str | None) -> None:
        self._connection = connection
        self._claim = claim
        self.etag = etag
        self.recorded = False
        self.attached = 0

    def record(self, receipt: Receipt) -> int:
        """Write the file, the chunk, everyone who waited for the same file, and the counters of all their jobs."""
        claim, connection = self._claim, self._connection
        waiting_jobs = {str(job) for (job,) in connection.execute(_WAITING_JOBS, (claim.file_id,))}
        if waiting_jobs:
            connection.execute(_LOCK_JOBS, (sorted(waiting_jobs | {claim.job_id}),))
        row = connection.execute(_CACHE, _cache_row(claim, receipt)).fetchone()
        assert row is not None  # noqa: S101  # the upsert returns its row
        if connection.execute(_DONE, _fence(claim)).rowcount != 1:
            raise _lost(claim)
        waiting = {"file_id": claim.file_id, "as_of": claim.claimed_at}
        served = connection.execute(_ATTACH, waiting).fetchall() if waiting_jobs else []
        attached = Counter(str(job) for (job,) in served)
        deltas = {
            job: ledger.Delta(
                pending=-count, done=count, reused=count, rows=count * receipt.rows, bytes=count * receipt.bytes
            )
            for job, count in attached.items()
        }
        own = attached.get(claim.job_id, 0)
        deltas[claim.job_id] = ledger.Delta(
            running=-1,
            pending=-own,
            done=1 + own,
            generated=1,
            reused=own,
            rows=(1 + own) * receipt.rows,
            bytes=(1 + own) * receipt.bytes,
        )
        ledger.settle(connection, deltas)
        self.recorded, self.attached = True, len(served)
        return int(row[0])


class _Undo(Exception):
    """Leaves a transaction without its changes."""


def _cache_row(claim: Claim, receipt: Receipt) -> dict[str, Any]:
    return {
        "file_id": claim.file_id,
        "tenant": claim.tenant,
        "key": claim.key,
        "day": claim.effective_date,
        "format": claim.format.value,
        "guard": claim.formula_guard.value,
        "as_of": claim.claimed_at,
        **{name: value for name, value in vars(receipt).items() if name != "columns"},
        "columns": json.dumps(receipt.columns),
    }


def _claim(row: dict[str, Any]) -> Claim:
    return Claim(
        **{**row, "format": Format(row["format"]), "formula_guard": FormulaGuard(row["formula_guard"])},
    )


def _reuse_candidate(row: dict[str, Any]) -> ReuseCandidate:
    names = CachedFile.__dataclass_fields__
    age = row["max_age_seconds"]
    return ReuseCandidate(
        job_id=row["job_id"],
        chunk_key=row["chunk_key"],
        decided_at=row["decided_at"],
        window_days=row["reuse_window_days"],
        max_age=None if age is None else timedelta(seconds=age),
        file=CachedFile(**{name: row[name] for name in names}),
    )


def _reuse_deltas(rows: Sequence[tuple[str, int, int]]) -> dict[str, ledger.Delta]:
    deltas: dict[str, ledger.Delta] = {}
    for job in {row[0] for row in rows}:
        own = [row for row in rows if row[0] == job]
        deltas[job] = ledger.Delta(
            pending=-len(own),
            done=len(own),
            reused=len(own),
            rows=sum(row[1] for row in own),
            bytes=sum(row[2] for row in own),
        )
    return deltas


def _gave_up(key: str, day: date) -> str:
    return f"Chunk failed after retries: key={key} date={day:%Y-%m-%d}"


def _parked(job_id: str, key: str, day: date, attempts: int, error: str) -> Message:
    return Message(
        lane=f"exports/parking/{job_id}",
        destination=f"sqs:{PARKING_QUEUE}",
        payload={
            "jobId": job_id,
            "key": key,
            "effectiveDate": f"{day:%Y%m%d}",
            "attempts": attempts,
            "error": error,
        },
        on_exhausted="park",
    )


def _fence(claim: Claim) -> dict[str, Any]:
    return {"job": claim.job_id, "chunk": claim.chunk_key, "fence": claim.fence}


def _clean(error: str) -> str:
    return redact_text(error.replace("\x00", ""))[:_LONGEST_ERROR]


def _lost(claim: Claim) -> LostClaim:
    return LostClaim(
        f"fence {claim.fence} is no longer the newest.", unit=claim.unit, next_step="stop; a newer attempt owns it."
    )
