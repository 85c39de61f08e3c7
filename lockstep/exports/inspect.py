"""Looking at exports from outside: what checks, the UI and gc need to know. Reads, and writes manifests only.

What belongs here: comparing records with objects, and the picture of a batch. What does not: changing jobs or chunks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.rows import class_row

from lockstep.exports import ledger
from lockstep.exports.dialect import CSV_DIALECT
from lockstep.exports.model import CachedFile, ChunkStatus, Format, Place
from lockstep.exports.sink import ObjectStore
from lockstep.exports.store import JobStore
from lockstep.kernel.postgres import Connection, Pool, transaction

MANIFESTS = "_manifests"
_MOST_FILES = 2000
_MOST_MANIFESTS = 500

_NAMED = "SELECT job_id, chunk_key FROM exports.job_chunk WHERE batch_id = %s"
_OUTCOME_COLUMNS = """
c.job_id, c.key || '|' || to_char(c.effective_date, 'YYYYMMDD') AS partition, c.status,
coalesce(c.row_count, 0) AS rows, coalesce(c.bytes, 0) AS bytes, coalesce(c.sha256, '') AS sha256,
coalesce(c.s3_object_key, '') AS object_key, c.reused, coalesce(c.error_message, '') AS error"""
_OUTCOMES = f"""
SELECT {_OUTCOME_COLUMNS} FROM exports.job_chunk AS c
  JOIN unnest(%s::text[], %s::text[]) AS p (job_id, chunk_key) ON p.job_id = c.job_id AND p.chunk_key = c.chunk_key
 ORDER BY 2"""  # noqa: S608
# The chunk that built each of the newest files; one that only reused it would tell the same bytes.
_NEWEST_OUTCOMES = f"""
SELECT {_OUTCOME_COLUMNS} FROM exports.job_chunk AS c
  JOIN (SELECT file_id, generation FROM exports.file_cache ORDER BY last_generated_at DESC LIMIT %s) AS f
    ON f.file_id = c.file_id AND f.generation = c.generation
 WHERE c.status = 'DONE' AND NOT c.reused"""  # noqa: S608
_FAILED = """
SELECT c.job_id, c.chunk_key FROM exports.job_chunk AS c JOIN exports.job AS j USING (job_id)
 WHERE c.status = 'FAILED' AND j.status IN ('FAILED', 'IN_PROGRESS') ORDER BY 1, 2 LIMIT 1000"""
_NEWEST = """
SELECT file_id, effective_date, s3_object_key AS object_key, schema_version, etag, bytes, generation, last_generated_at
  FROM exports.file_cache ORDER BY last_generated_at DESC LIMIT %s"""
_NAMES = "SELECT s3_object_key FROM exports.file_cache WHERE s3_object_key = ANY(%s)"
_RECENT = """
SELECT key || '|' || to_char(effective_date, 'YYYYMMDD') FROM exports.file_cache
 WHERE last_generated_at >= %(since)s
 UNION
SELECT key || '|' || to_char(effective_date, 'YYYYMMDD') FROM exports.job_chunk
 WHERE status = 'FAILED' AND completed_at >= %(since)s"""
_FINISHED = """
SELECT job_id, completed_at FROM exports.job WHERE status IN ('COMPLETED', 'FAILED', 'CANCELLED') AND completed_at > %s
 ORDER BY completed_at, job_id"""
_SINCE = "SELECT clock_timestamp() - interval '7 days'"


@dataclass(frozen=True)
class Outcome:
    """How one chunk of a batch stands."""

    job_id: str
    partition: str
    status: ChunkStatus
    rows: int
    bytes: int
    sha256: str
    object_key: str
    reused: bool
    error: str


def chunks_of_batch(source: Pool | Connection, batch_id: str) -> list[tuple[str, str]]:
    """(job, chunk) pairs that a batch holds."""
    with transaction(source, what="reading a batch") as connection:
        return [(str(job), str(chunk)) for job, chunk in connection.execute(_NAMED, (batch_id,))]


def outcomes(source: Pool | Connection, named: Sequence[tuple[str, str]]) -> list[Outcome]:
    """How these chunks stand now."""
    with (
        transaction(source, what="reading outcomes") as connection,
        connection.cursor(row_factory=class_row(Outcome)) as cursor,
    ):
        return cursor.execute(_OUTCOMES, ([job for job, _ in named], [chunk for _, chunk in named])).fetchall()


def newest_outcomes(source: Pool | Connection, limit: int) -> list[Outcome]:
    """The newest files, each by the chunk that built it."""
    with (
        transaction(source, what="reading new files") as connection,
        connection.cursor(row_factory=class_row(Outcome)) as cursor,
    ):
        return cursor.execute(_NEWEST_OUTCOMES, (limit,)).fetchall()


def failed_chunks(source: Pool | Connection) -> list[tuple[str, str]]:
    """(job, chunk) pairs that failed."""
    with transaction(source, what="reading failed chunks") as connection:
        return [(str(job), str(chunk)) for job, chunk in connection.execute(_FAILED)]


def newest_files(source: Pool | Connection, limit: int = _MOST_FILES) -> list[CachedFile]:
    """The files that were made last."""
    with transaction(source, what="reading files") as connection:
        return ledger.cached(connection, _NEWEST, (limit,))


def present_names(objects: ObjectStore, files: Sequence[CachedFile]) -> set[str]:
    """The names of those files whose object is as recorded."""
    there = objects.present(files)
    return {one.object_key for one in files if one.file_id in there}


def recent_partitions(source: Pool | Connection, since: datetime) -> set[str]:
    """Partitions whose file was made after this, and those that failed since: a person must be able to choose them."""
    with transaction(source, what="reading partitions") as connection:
        return {str(name) for (name,) in connection.execute(_RECENT, {"since": since})}


def orphans(source: Pool | Connection, objects: ObjectStore, place: Place, *, older_than: datetime) -> list[str]:
    """Objects under the base path that no record knows, old enough not to be on their way to one."""
    prefix = place.base_path.strip("/") + "/"
    names = [
        str(one["Key"])
        for one in objects.names(prefix)
        if one["LastModified"] < older_than and not str(one["Key"]).startswith(f"{prefix}{MANIFESTS}/")
    ]
    with transaction(source, what="comparing objects") as connection:
        known = {str(name) for (name,) in connection.execute(_NAMES, (names,))}
    return sorted(set(names) - known)


def write_manifests(source: Pool | Connection, jobs: JobStore, objects: ObjectStore, place: Place) -> list[str]:
    """Put the manifest of every job that ended lately beside its files, if it is not there yet; which ones.

    The oldest first and not too many at a time: the next pass goes on.
    """
    prefix = f"{place.base_path.strip('/')}/{MANIFESTS}/"
    there = {str(one["Key"]): one["LastModified"] for one in objects.names(prefix)}
    with transaction(source, what="reading finished jobs") as connection:
        since = connection.execute(_SINCE).fetchone()
        finished = connection.execute(_FINISHED, since).fetchall()
    # A job that was retried ended again: its older manifest does not count. The store tells whole seconds only.
    missing = [
        str(job)
        for job, ended in finished
        if (written := there.get(f"{prefix}{job}.json")) is None or written < ended.replace(microsecond=0)
    ]
    # A manifest that came out the same keeps its old time and is looked at again: it must not stand before new ones.
    missing = sorted(missing, key=lambda job: f"{prefix}{job}.json" in there)[:_MOST_MANIFESTS]
    for job in missing:
        objects.put_keyed(f"{prefix}{job}.json", json.dumps(manifest(jobs, job), indent=1, sort_keys=True).encode())
    return missing


def manifest(jobs: JobStore, job_id: str) -> dict[str, Any]:
    """What a job made, without addresses that expire."""
    job = jobs.get(job_id)
    files, after = [], -1
    while page := jobs.chunks(job_id, after=after, status=ChunkStatus.DONE):
        after = page[-1].ordinal
        files += [
            {
                "key": one.key,
                "date": f"{one.effective_date:%Y%m%d}",
                "objectKey": one.object_key,
                "sha256": one.sha256,
                "bytes": one.bytes,
                "rows": one.rows,
                "columns": one.columns,
                "asOf": one.as_of.isoformat() if one.as_of else None,
                "generation": one.generation,
                "reused": one.reused,
            }
            for one in page
        ]
    dialect = CSV_DIALECT if job.format in (Format.CSV, Format.CSV_GZ) else None
    head = {"jobId": job_id, "status": job.status.value, "format": job.format.value, "dialect": dialect}
    return {**head, "files": files}
