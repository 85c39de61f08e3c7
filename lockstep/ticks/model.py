"""Words of the tick pipeline: manifest, tick, part, message, and the names it uses outside.

What belongs here: values and their spelling on the wire, immutable. What does not: which input is allowed (rules.py),
SQL (store.py), Spark (bronze.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

from lockstep.kernel.errors import InvalidInput

QUEUE = "bronze-completed"
DEAD_LETTERS = "bronze-completed-dlq"
BRONZE_COMMITTED = "bronze_committed"
SILVER_DISPATCHED = "silver_dispatched"
LEDGER_DAYS = 30
"""How long the DynamoDB rows are kept. Their `expires_at` is checked on read: DynamoDB deletes late."""

BRONZE_PREFIX = "bronze"
PARTS_PREFIX = "parts"

TICK_COLUMN = "_tick_id"
DAY_COLUMN = "_dt"
FILE_COLUMN = "_file_seq"
ROW_COLUMN = "_row"
OWN_COLUMNS = (TICK_COLUMN, DAY_COLUMN, FILE_COLUMN, ROW_COLUMN)
"""What bronze adds to every row. (`_file_seq`, `_row`) is the order in which the agent wrote the rows of a tick."""

SILVER_COLUMNS = ("_project", "_tick", "_order")
"""What silver adds to every row; an agent may not use these names either."""

SCHEMA_VERSION = "1.0"


class TickState(StrEnum):
    """Where a tick stands. `failed`: its manifest was refused; it can be mended and finalized again."""

    UPLOADING = "uploading"
    FINALIZING = "finalizing"
    COMMITTED = "committed"
    FAILED = "failed"

    @property
    def is_open(self) -> bool:
        """Whether parts may still change."""
        return self in (TickState.UPLOADING, TickState.FAILED)


class Mode(StrEnum):
    """`delta`: rows to add, change or, by `deleted_column`, delete. `full`: the whole of each named table."""

    DELTA = "delta"
    FULL = "full"


class Column(NamedTuple):
    """A column; `type` is Spark's name of it, such as bigint or decimal(10,2)."""

    name: str
    type: str


class PartSpec(NamedTuple):
    """One file as the manifest declares it."""

    file_seq: int
    sha256: str
    bytes: int
    rows: int


class TableSpec(NamedTuple):
    """One table of a tick. Rows whose `deleted_column` is true say that the row of their key is gone."""

    name: str
    primary_key: tuple[str, ...]
    columns: tuple[Column, ...]
    parts: tuple[PartSpec, ...]
    deleted_column: str | None = None

    @property
    def rows(self) -> int:
        """Rows declared for the table."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True)
class Manifest:
    """What a tick consists of, checked. `sha256` identifies it whatever its spacing and key order."""

    org_id: str
    project_id: str
    tick_id: str
    mode: Mode
    dt: str
    tables: tuple[TableSpec, ...]
    prev_tick_id: str | None
    sha256: str
    body: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """Every file of every table."""
        return tuple(part for table in self.tables for part in table.parts)

    @property
    def rows(self) -> int:
        """Rows of the whole tick."""
        return sum(table.rows for table in self.tables)


@dataclass(frozen=True)
class Footer:
    """What a stored file says about itself: read once, when it arrived."""

    rows: int
    uncompressed_bytes: int
    row_groups: int
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Part:
    """A file that was received and stored. `footer` is None when it is no readable Parquet; `problem` says why."""

    file_seq: int
    sha256: str
    bytes: int
    object_key: str
    footer: Footer | None
    problem: str | None
    received_at: datetime


class TableCommit(NamedTuple):
    """The immutable Delta commit that holds one table of a tick."""

    table: str
    version: int
    key: str
    etag: str
    rows: int


@dataclass(frozen=True)
class Tick:
    """One tick as the state database knows it.

    `sequence` and `prev_tick_id` are given at commit: the place in the project's chain. `commits` has one entry per
    table in the manifest's order; the message names the last one.
    """

    project_id: str
    tick_id: str
    org_id: str
    state: TickState
    attempt: int
    generation: int
    created_at: datetime
    updated_at: datetime
    manifest: Mapping[str, Any] | None = None
    manifest_sha256: str | None = None
    mode: Mode | None = None
    dt: str | None = None
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    sequence: int | None = None
    prev_tick_id: str | None = None
    commits: tuple[TableCommit, ...] = ()
    outbox_ids: tuple[int, ...] = ()
    committed_at: datetime | None = None

    @property
    def unit(self) -> str:
        """How errors name it."""
        return f"tick {self.tick_id} of project {self.project_id}"

    def commit_of(self, table: str) -> TableCommit:
        """The commit of one table. Raises `InvalidInput` when the tick does not have it."""
        for commit in self.commits:
            if commit.table == table:
                return commit
        raise InvalidInput(f"the tick has no table {table}.", unit=self.unit)


@dataclass(frozen=True)
class TickMessage:
    """What `bronze-completed` carries, schema 1.0. A hint: the state database is the truth."""

    org_id: str
    project_id: str
    tick_id: str
    mode: Mode
    dt: str
    bronze_db_key: str
    bronze_db_etag: str
    emitted_at: datetime

    def render(self) -> dict[str, str]:
        """The body, every field of the schema."""
        return {
            "schema_version": SCHEMA_VERSION,
            "org_id": self.org_id,
            "project_id": self.project_id,
            "tick_id": self.tick_id,
            "mode": self.mode.value,
            "dt": self.dt,
            "bronze_db_key": self.bronze_db_key,
            "bronze_db_etag": self.bronze_db_etag,
            "emitted_at": spell(self.emitted_at),
        }

    @classmethod
    def parse(cls, body: str | Mapping[str, Any]) -> TickMessage:
        """Read a body; unknown fields are ignored. Raises `InvalidInput` that lists every problem."""
        fields = _object(body)
        problems = [
            f"{name}: missing or empty"
            for name in ("org_id", "project_id", "tick_id", "dt", "bronze_db_key", "bronze_db_etag")
            if not isinstance(fields.get(name), str) or not fields[name]
        ]
        if str(fields.get("schema_version", "")).partition(".")[0] != "1":
            problems.append("schema_version: must be 1.x")
        if fields.get("mode") not in tuple(Mode):
            problems.append("mode: must be delta or full")
        try:
            emitted_at = datetime.fromisoformat(str(fields.get("emitted_at")))
            if emitted_at.tzinfo is None:
                raise ValueError
        except ValueError:
            problems.append("emitted_at: must be an instant with a zone")
        if problems:
            raise InvalidInput("the message is no tick message.", problems=problems)
        return cls(
            org_id=fields["org_id"],
            project_id=fields["project_id"],
            tick_id=fields["tick_id"],
            mode=Mode(fields["mode"]),
            dt=fields["dt"],
            bronze_db_key=fields["bronze_db_key"],
            bronze_db_etag=fields["bronze_db_etag"],
            emitted_at=emitted_at.astimezone(UTC),
        )


@dataclass(frozen=True)
class Project:
    """A project of an organisation: the unit of order. `head_tick_id` is its last committed tick."""

    project_id: str
    org_id: str
    sequence: int
    head_tick_id: str | None
    tables: tuple[str, ...] | None
    created_at: datetime
    revoked_at: datetime | None


@dataclass(frozen=True)
class Limits:
    """What one deployment allows. A replica answers 413 or 429 beyond them, before anything is stored."""

    max_part_bytes: int = 128 * 1024 * 1024
    max_manifest_bytes: int = 4 * 1024 * 1024
    max_parts: int = 1000
    max_tables: int = 200
    max_columns: int = 1000
    max_tick_bytes: int = 2 * 1024**3
    max_tick_rows: int = 50_000_000
    max_uncompressed_bytes: int = 8 * 1024**3
    max_open_ticks: int = 1000
    max_open_bytes: int = 20 * 1024**3
    requests_per_second: float = 200.0
    request_burst: int = 400
    upload_days: float = 7.0
    body_idle_seconds: float = 30.0
    body_seconds: float = 600.0
    lane_wait_seconds: float = 60.0
    write_seconds: float = 300.0


ANY_SIZE = Limits(
    max_parts=10**9,
    max_tables=10**9,
    max_columns=10**9,
    max_tick_bytes=2**62,
    max_tick_rows=2**62,
    max_uncompressed_bytes=2**62,
)
"""For what was accepted once: it is read again, whatever today's limits are."""


def spell(moment: datetime) -> str:
    """An instant as the API and the message write it."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _object(body: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(body, Mapping):
        return body
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidInput("the message is no tick message.", problems=["the body is not a JSON object"])
    return found
