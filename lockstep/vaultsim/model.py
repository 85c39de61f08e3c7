"""Words of the vault simulator: a vault's configuration, its knobs, its changes of schema, its state.

What belongs here: values, their limits, and the names of faults. What does not: data (rows.py), archives (packing.py),
events on disk (events.py), HTTP (services/vault.py).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

STEP = timedelta(minutes=15)
BEGINNING = datetime(2000, 1, 1, tzinfo=UTC)
"""Where the vendor says that every full archive starts."""


class ArchiveFault(StrEnum):
    """What can be wrong with one archive. Each is a knob of one window."""

    TRAVERSAL = "traversal"
    ABSOLUTE_PATH = "absolute_path"
    SYMLINK = "symlink"
    HARDLINK = "hardlink"
    DEVICE = "device"
    BOMB = "bomb"
    MANY_MEMBERS = "many_members"
    DUPLICATE_MEMBER = "duplicate_member"
    TRUNCATED = "truncated"
    NOT_GZIP = "not_gzip"
    WRONG_MD5 = "wrong_md5"
    WRONG_SIZE = "wrong_size"
    MISSING_PART = "missing_part"
    MISSING_FILE = "missing_file"
    NO_MANIFEST = "no_manifest"
    LYING_MANIFEST = "lying_manifest"
    BINARY_CSV = "binary_csv"
    WIDE = "wide"
    RAGGED = "ragged"
    JSON_BODY = "json_body"
    WRAPPED = "wrapped"
    NO_TYPE_COLUMN = "no_type_column"


class Twist(StrEnum):
    """Legal but awkward content of one window."""

    BOTH_FILES = "both_files"
    DUPLICATE_ID = "duplicate_id"


class Poison(StrEnum):
    """A well-formed archive with one value that no warehouse can take."""

    NUMBER = "number"
    DATE = "date"


class ChangeKind(StrEnum):
    """How a vault's schema can change."""

    COLUMN = "column"
    OBJECT = "object"
    WIDEN = "widen"
    DROP_COLUMN = "drop_column"


class Change(BaseModel):
    """One change of the schema, in force from window `index` on."""

    model_config = ConfigDict(frozen=True)

    kind: ChangeKind
    object: str
    column: str = ""
    type: str = "String"
    length: int = 100
    index: int = 0


class VaultConfig(BaseModel):
    """What a vault is: everything its data is made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    name: str = "Simulated vault"
    seed: int = 1
    origin: datetime = Field(default=datetime(2026, 1, 1, tzinfo=UTC), description="Stop of the initial full archive.")
    objects: tuple[str, ...] = Field(default=(), description="Objects of the catalogue to have; empty means all.")
    rows: int = Field(default=20, ge=0, le=5_000_000, description="Changed rows per object and window.")
    base_rows: int = Field(default=20, ge=0, le=5_000_000, description="Rows per object before the first window.")
    delete_percent: int = Field(default=8, ge=0, le=100)
    empty_every: int = Field(default=0, ge=0, description="Every n-th window has no records; 0 means none.")

    @field_validator("origin")
    @classmethod
    def _on_the_grid(cls, value: datetime) -> datetime:
        value = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        if value.timestamp() % STEP.total_seconds():
            raise ValueError("must lie on a quarter of an hour")
        return value

    def start_of(self, index: int) -> datetime:
        """When window `index` starts."""
        return self.origin + STEP * index

    def stop_of(self, index: int) -> datetime:
        """When window `index` stops."""
        return self.start_of(index + 1)

    def index_of(self, stop: datetime) -> int:
        """Which window stops at `stop`; it may lie before the first or between two."""
        return int((stop - self.origin) // STEP) - 1


class Knobs(BaseModel):
    """Faults and habits of a vault's service, apart from the content of single archives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part_size: int = Field(default=1024**3, ge=1, description="Bytes per part; the vendor splits at 1 GB.")
    md5: bool = Field(default=True, description="Whether the listing carries md5checksum (from 25.2 on).")
    retention_days: int = Field(default=10, ge=0, description="How long incrementals stay listed; 0 means for ever.")
    burst_limit: int = Field(default=2000, ge=1, description="Calls per burst window.")
    burst_seconds: float = Field(default=300.0, gt=0)
    session_calls: int = Field(default=0, ge=0, description="A session dies after this many calls; 0 means never.")
    fail_next: int = Field(default=0, ge=0, description="That many calls answer FAILURE UNEXPECTED_ERROR.")
    http_error_next: int = Field(default=0, ge=0, description="That many calls answer HTTP 503.")
    cut_next: int = Field(default=0, ge=0, description="That many downloads break off in the middle.")
    delay_ms: int = Field(default=0, ge=0, le=60_000)
    shuffle: bool = Field(default=False, description="The listing is out of order.")
    duplicates: bool = Field(default=False, description="The listing names every file twice.")
    wrong_vault: str = Field(default="", description="Sessions silently belong to this other vault.")
    locked_out: bool = False
    initial: bool = Field(default=False, description="The first full archive is still being generated.")


class VaultState(BaseModel):
    """A vault as its events left it."""

    config: VaultConfig
    knobs: Knobs = Knobs()
    published: int = 0
    withheld: dict[int, str] = Field(default_factory=dict, description="Window index to the vendor's message.")
    poisoned: dict[int, Poison] = Field(default_factory=dict)
    faults: dict[int, ArchiveFault] = Field(default_factory=dict)
    twists: dict[int, Twist] = Field(default_factory=dict)
    changes: list[Change] = Field(default_factory=list)
    fulls: list[int] = Field(default_factory=lambda: [-1], description="Index of the last window in each full archive.")
    logs: list[int] = Field(default_factory=list)
    lost: list[int] = Field(default_factory=list, description="Windows that are not listed at all.")

    @property
    def now(self) -> datetime:
        """The vault's own clock: a window is published 15 minutes after it stops."""
        return self.config.stop_of(self.published - 1) + STEP


class Event(BaseModel):
    """One thing that was done to a vault."""

    vault: str
    kind: str
    data: dict[str, Any] = Field(default_factory=dict)
