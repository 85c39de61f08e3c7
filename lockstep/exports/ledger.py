"""The counters of a job: the one place where they change and where a job's state follows from them.

What belongs here: applying changes under the job's row lock, and the message that a finished job sends. What does
not: which chunk changed and why (store.py, claims.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.rows import class_row, dict_row

from lockstep.exports import rules
from lockstep.exports.model import CachedFile, Counts, JobStatus
from lockstep.kernel.errors import Terminal
from lockstep.kernel.outbox import Message, Outbox
from lockstep.kernel.postgres import Connection

# Every transaction locks chunks first and jobs last, jobs in the order of their ids, so that none waits in a circle.
_LOCK = """
SELECT job_id, status, cancel_requested, total, pending, running, done, failed, started_at IS NOT NULL AS started,
       webhook_url
  FROM exports.job WHERE job_id = ANY(%s) ORDER BY job_id FOR UPDATE"""
_UPDATE = """
UPDATE exports.job
   SET status = %(status)s::text, pending = %(pending)s, running = %(running)s, done = %(done)s, failed = %(failed)s,
       generated = generated + %(generated)s, reused = reused + %(reused)s, row_total = row_total + %(rows)s,
       byte_total = byte_total + %(bytes)s, version = version + 1, updated_at = clock_timestamp(),
       started_at = CASE WHEN %(started)s THEN coalesce(started_at, clock_timestamp()) ELSE started_at END,
       completed_at = CASE WHEN %(terminal)s THEN clock_timestamp() END,
       error_message = CASE WHEN %(status)s::text = 'FAILED' THEN coalesce(%(error)s::text, error_message)
                            WHEN %(status)s::text = 'COMPLETED' OR %(reopen)s THEN NULL
                            ELSE coalesce(%(error)s::text, error_message) END
 WHERE job_id = %(job_id)s
RETURNING job_id, status, total, pending, running, done, failed, generated, reused, row_total, byte_total,
          error_message, completed_at"""


@dataclass(frozen=True)
class Delta:
    """How a job's counters move. `reopen` is the one way out of FAILED."""

    pending: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    generated: int = 0
    reused: int = 0
    rows: int = 0
    bytes: int = 0
    error: str | None = None
    reopen: bool = False


def settle(connection: Connection, deltas: Mapping[str, Delta]) -> dict[str, JobStatus]:
    """Move the counters of these jobs, and end those whose last chunk this was, all in the caller's transaction."""
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(_LOCK, (sorted(deltas),)).fetchall()
        ended = []
        states = {}
        for row in rows:
            delta = deltas[row["job_id"]]
            after = _after(row, delta)
            updated = cursor.execute(_UPDATE, after).fetchone()
            assert updated is not None  # noqa: S101  # the row is locked by us
            states[row["job_id"]] = JobStatus(after["status"])
            if after["terminal"] and row["webhook_url"] and row["status"] != after["status"]:
                ended.append(_webhook(row["webhook_url"], updated))
    if ended:
        Outbox().put_all(connection, ended)
    return states


def cached(connection: Connection, statement: str, parameters: Sequence[Any]) -> list[CachedFile]:
    """Rows of the file cache as the reuse rule wants them."""
    with connection.cursor(row_factory=class_row(CachedFile)) as cursor:
        return cursor.execute(statement.encode(), parameters).fetchall()


def _after(row: Mapping[str, Any], delta: Delta) -> dict[str, Any]:
    before = JobStatus(row["status"])
    if before.is_terminal and not delta.reopen:
        # Every writer checks the job before it comes here; arriving would mean a guard is gone.
        raise Terminal(f"a job that is {before} cannot change.", unit=row["job_id"])
    counts = Counts(
        total=row["total"],
        pending=row["pending"] + delta.pending,
        running=row["running"] + delta.running,
        done=row["done"] + delta.done,
        failed=row["failed"] + delta.failed,
    )
    status = rules.job_status(counts, cancel_requested=row["cancel_requested"], started=row["started"])
    return {
        **vars(counts),
        **{name: getattr(delta, name) for name in ("generated", "reused", "rows", "bytes", "error", "reopen")},
        "job_id": row["job_id"],
        "status": status.value,
        "terminal": status.is_terminal,
        "started": bool(counts.running or counts.done or counts.failed),
    }


def _webhook(url: str, row: Mapping[str, Any]) -> Message:
    return Message(
        lane=f"exports/webhook/{row['job_id']}",
        destination=f"webhook:{url}",
        payload={
            "type": f"export.job.{row['status'].lower()}",
            "timestamp": row["completed_at"].isoformat(),
            "data": {
                "jobId": row["job_id"],
                "status": row["status"],
                **{name: row[name] for name in ("total", "done", "failed")},
                "filesGenerated": row["generated"],
                "filesReused": row["reused"],
                "rows": row["row_total"],
                "bytes": row["byte_total"],
                "errorMessage": row["error_message"],
            },
        },
        on_exhausted="park",
    )
