"""The words of exports: jobs, chunks, files, and the names that other rooms use for them.

What belongs here: data without behaviour, and constants that several rooms share. What does not: decisions
(rules.py), SQL (store.py, claims.py) and bytes (dialect.py, source.py, sink.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import Any

WORK_QUEUE = "job-chunk-work"
"""`job.chunk.work` in the contract; SQS names have no dots."""

PARKING_QUEUE = "job-chunk-parking"
"""`job.chunk.parking` in the contract."""

CHUNKS_ASSET = "export_chunks"
MANIFESTS_ASSET = "export_manifests"
SOURCE_ASSET = "export_source"

DEFAULT_TENANT = "default"


class JobStatus(StrEnum):
    """The five states of a job, as clients see them."""

    SUBMITTED = "SUBMITTED"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing moves any more unless a person asks for a retry."""
        return self in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED)


class ChunkStatus(StrEnum):
    """The four states of a chunk."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"

    @property
    def is_terminal(self) -> bool:
        """Whether a worker has nothing left to do."""
        return self in (ChunkStatus.DONE, ChunkStatus.FAILED)


class Format(StrEnum):
    """How a file is written. The value is the extension of its name."""

    CSV = "csv"
    CSV_GZ = "csv.gz"
    NDJSON = "ndjson"
    PARQUET = "parquet"


class FormulaGuard(StrEnum):
    """Whether text that a spreadsheet would execute is defused. It changes values, so it is off by default."""

    NONE = "none"
    QUOTE = "quote"


@dataclass(frozen=True)
class Limits:
    """What a deployment allows; `GET /limits` shows it."""

    max_chunks: int = 20_000
    max_attempts: int = 5
    reuse_window_days: int = 7
    max_body_bytes: int = 8 * 1024 * 1024
    private_webhooks: bool = False
    requests_per_minute: int = 1200


@dataclass(frozen=True)
class Place:
    """Where files go: `s3://<bucket>/<base_path>/…`."""

    bucket: str
    base_path: str = "exports"


@dataclass(frozen=True)
class ChunkRequest:
    """One (key, effective date) pair that a client wants."""

    key: str
    effective_date: date

    @property
    def chunk_key(self) -> str:
        """The pair as one name, unique in its job."""
        return f"key={self.key}:date={self.effective_date:%Y%m%d}"


@dataclass(frozen=True)
class Submission:
    """A request that passed every rule, duplicates removed, in its final order."""

    chunks: tuple[ChunkRequest, ...]
    duplicates_removed: int
    format: Format = Format.CSV
    formula_guard: FormulaGuard = FormulaGuard.NONE
    force: bool = False
    max_age: timedelta | None = None
    webhook_url: str | None = None


@dataclass(frozen=True)
class Client:
    """Who asks. Files are shared inside a tenant and never across."""

    client_id: str
    name: str
    tenant: str


@dataclass(frozen=True)
class Counts:
    """How many chunks of a job are where; the job's state follows from these and the wish to cancel."""

    total: int
    pending: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Job:
    """A job as its row tells it."""

    job_id: str
    number: int
    client_id: str
    status: JobStatus
    cancel_requested: bool
    counts: Counts
    generated: int
    reused: int
    rows: int
    bytes: int
    format: Format
    formula_guard: FormulaGuard
    s3_base_path: str
    error_message: str | None
    duplicates_removed: int
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    as_of: datetime
    version: int


@dataclass(frozen=True)
class Chunk:
    """A chunk as its row tells it."""

    job_id: str
    chunk_key: str
    ordinal: int
    key: str
    effective_date: date
    status: ChunkStatus
    attempts: int
    started_at: datetime | None
    completed_at: datetime | None
    object_key: str | None
    rows: int | None
    bytes: int | None
    sha256: str | None
    etag: str | None
    version_id: str | None
    generation: int | None
    as_of: datetime | None
    columns: list[dict[str, str]] | None
    reused: bool
    rows_so_far: int
    error_message: str | None
    current_sha256: str | None
    current_etag: str | None

    @property
    def is_downloadable(self) -> bool:
        """Whether the bytes that this chunk recorded can still be read: pinned by a version, or in place.

        A later job that made the file anew and found the same data replaced nothing.
        """
        done = self.status == ChunkStatus.DONE
        return done and (self.version_id is not None or self.sha256 == self.current_sha256)


@dataclass(frozen=True)
class Candidate:
    """A chunk that could run now, for the fair choice."""

    client_id: str
    job_id: str
    chunk_key: str
    file_id: str


@dataclass(frozen=True)
class Claim:
    """One chunk that one worker owns. Everything it writes is conditional on `fence`."""

    job_id: str
    chunk_key: str
    key: str
    effective_date: date
    file_id: str
    tenant: str
    format: Format
    formula_guard: FormulaGuard
    attempts: int
    fence: int
    claimed_at: datetime
    counted_from: int = 0

    @property
    def unit(self) -> str:
        """The chunk in words, for logs and errors."""
        return f"{self.job_id}/{self.chunk_key}#{self.attempts}"

    @property
    def refunds(self) -> int:
        """Claims of this chunk since its submission or retry that were not counted as attempts, or no longer are."""
        return self.fence - self.counted_from - self.attempts


@dataclass(frozen=True)
class CachedFile:
    """A file that was published: what the reuse rule looks at."""

    file_id: str
    effective_date: date
    object_key: str
    schema_version: str
    etag: str
    bytes: int
    generation: int
    last_generated_at: datetime


@dataclass(frozen=True)
class Receipt:
    """What was built: enough to verify the file without reading the database."""

    object_key: str
    rows: int
    bytes: int
    sha256: str
    etag: str
    version_id: str | None
    schema_version: str
    columns: list[dict[str, str]]


@dataclass
class Tally:
    """What a worker did, for logs, metadata and benchmarks."""

    built: int = 0
    reused: int = 0
    attached: int = 0
    failed: int = 0
    postponed: int = 0
    lost: int = 0
    rows: int = 0
    bytes: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def as_dict(self) -> dict[str, Any]:
        """For metadata."""
        return dict(vars(self))
