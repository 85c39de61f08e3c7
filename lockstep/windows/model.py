"""Words of the window pipeline: windows, queue rows, gaps, our own manifest, and where raw files live.

What belongs here: immutable values, names, canonical text forms. What does not: decisions (rules), DynamoDB (queue.py,
ledger.py), HTTP (client.py), archives (archive.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from lockstep.kernel.errors import InvalidInput

QUEUE_TABLE = "ddapi_queue"
MANIFEST_NAME = "lockstep-manifest.json"
SOURCE_MANIFEST_NAME = "manifest.csv"
SCHEMA_NAME = "metadata.csv"
MANIFEST_VERSION = 1
FIRST_EPOCH = 1
"""The epoch that the initial full load opens; each rebaseline opens the next."""

GAP_PREFIX = "gap#"
STOP_FORMAT = "%Y%m%d%H%M"
INSTANT_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"

_STOP = re.compile(r"\d{12}", re.ASCII)
_VAULT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_OBJECT = re.compile(r"[A-Za-z0-9_]{1,120}", re.ASCII)


class WindowKind(StrEnum):
    """What an archive holds. Only incrementals form the chain; the vendor calls them N, F and L."""

    INCREMENTAL = "incremental"
    FULL = "full"
    LOG = "log"


class WindowStatus(StrEnum):
    """The four states of a queue row. A window that cannot be fetched has no row: it is a gap."""

    READY = "READY"
    PROCESSING = "PROCESSING"
    FAILED = "FAILED"
    APPLIED = "APPLIED"


class FileType(StrEnum):
    """What a raw file does to its object. A schema describes all objects and is never loaded as rows."""

    UPSERT = "upsert"
    DELETE = "delete"
    SCHEMA = "schema"


@dataclass(frozen=True)
class Window:
    """One archive of one vault: everything committed after `start` and up to `stop`."""

    vault: str
    start: datetime
    stop: datetime
    epoch: int = FIRST_EPOCH
    kind: WindowKind = WindowKind.INCREMENTAL

    def __post_init__(self) -> None:
        check_vault_id(self.vault)
        if self.start.tzinfo is None or self.stop.tzinfo is None:
            raise InvalidInput("a window starts and stops at aware instants.", unit=self.vault)
        if self.start >= self.stop:
            raise InvalidInput(f"a window cannot stop at {self.stop} before it starts.", unit=self.vault)

    @property
    def stoptime(self) -> str:
        """The stop time as keys and people write it: YYYYMMDDHHMM, UTC."""
        return stoptime(self.stop)

    @property
    def sort_key(self) -> str:
        """The queue's sort key. Incrementals have plain digits; all else sorts after every digit."""
        return self.stoptime if self.kind is WindowKind.INCREMENTAL else f"{self.kind}#{self.stoptime}"

    @property
    def prefix(self) -> str:
        """Where the raw files of this window live in the bucket, with the closing slash."""
        folder = "stoptime" if self.kind is WindowKind.INCREMENTAL else str(self.kind)
        return f"vault={self.vault}/{folder}={self.stoptime}/"

    @property
    def manifest_key(self) -> str:
        """The object that is written last: if it exists, the window is whole."""
        return self.prefix + MANIFEST_NAME

    def __str__(self) -> str:
        kind = "" if self.kind is WindowKind.INCREMENTAL else f" {self.kind}"
        return f"{self.vault}{kind} window {self.stoptime}"


@dataclass(frozen=True)
class QueueRow:
    """One row of `ddapi_queue`: a window whose raw files are whole, and how far its apply has come."""

    window: Window
    status: WindowStatus
    s3_prefix: str
    checksum: str
    attempt_count: int = 0
    last_error: str | None = None
    fence: int = 0
    lease_until: datetime | None = None
    owner: str | None = None


@dataclass(frozen=True)
class Gap:
    """A stretch of the chain that is known but not retrievable yet. It is retried until it is retrieved.

    Not a queue row: it lives under the sort key `gap#<stoptime>`, so no query for windows sees it and the four
    statuses keep their meaning. `start` is unknown when the vendor lists only a name with an error.
    """

    vault: str
    stop: datetime
    reason: str
    start: datetime | None = None
    next_retry: datetime | None = None
    first_seen: datetime | None = None
    last_seen: datetime | None = None
    attempt_count: int = 0

    @property
    def sort_key(self) -> str:
        """`gap#<stoptime>`."""
        return GAP_PREFIX + stoptime(self.stop)


@dataclass(frozen=True)
class RawFile:
    """One CSV in the bucket, byte for byte as the vendor packed it."""

    object: str
    type: FileType
    key: str
    sha256: str
    bytes: int
    rows: int
    columns: tuple[str, ...]
    extract: str = ""
    """The vendor's name, `Component.object`, as `metadata.csv` spells it."""


@dataclass(frozen=True)
class SourcePart:
    """One part of the vendor's archive as it was downloaded. The MD5 is the one we computed."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class SourceRow:
    """One row of the vendor's manifest.csv."""

    extract: str
    extract_label: str
    type: str
    records: int
    file: str


@dataclass(frozen=True)
class RawManifest:
    """Our own manifest: what a window's raw files are, so that a reader needs to trust nothing else."""

    window: Window
    files: tuple[RawFile, ...]
    source_parts: tuple[SourcePart, ...]
    source_manifest: tuple[SourceRow, ...]
    record_count: int
    produced_at: datetime
    schema: RawFile | None = None
    """`metadata.csv`: every column of every object at `stop`. None if the vendor sent no full schema."""
    version: int = field(default=MANIFEST_VERSION)

    def to_json(self) -> bytes:
        """Canonical bytes: the same manifest is always the same text, so its checksum means something."""
        window = self.window
        document = {
            "version": self.version,
            "vault": window.vault,
            "kind": window.kind.value,
            "start": format_instant(window.start),
            "stop": format_instant(window.stop),
            "epoch": window.epoch,
            "files": [asdict(one) for one in sorted(self.files, key=lambda one: one.key)],
            "schema": None if self.schema is None else asdict(self.schema),
            "source_parts": [asdict(one) for one in self.source_parts],
            "source_manifest": [asdict(one) for one in self.source_manifest],
            "record_count": self.record_count,
            "produced_at": format_instant(self.produced_at),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def checksum(self) -> str:
        """What the queue row carries: the sha256 of the manifest object."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @classmethod
    def from_json(cls, text: bytes | str) -> RawManifest:
        """Read a manifest back. Raises `InvalidInput` for anything that `to_json` did not write."""
        try:
            return _read_manifest(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"the raw manifest cannot be read: {type(error).__name__} {error}",
                next_step="produce the window again.",
            ) from error


def stoptime(instant: datetime) -> str:
    """YYYYMMDDHHMM in UTC."""
    return instant.astimezone(UTC).strftime(STOP_FORMAT)


def parse_stoptime(text: str) -> datetime:
    """The instant behind YYYYMMDDHHMM, or `InvalidInput`."""
    try:
        if _STOP.fullmatch(text) is None:
            raise ValueError(text)
        return datetime.strptime(text, STOP_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        raise InvalidInput(f"{text!r} is not a stop time.", next_step="write YYYYMMDDHHMM in UTC.") from None


def format_instant(instant: datetime) -> str:
    """A fixed-width UTC text whose order is the order of time."""
    return instant.astimezone(UTC).strftime(INSTANT_FORMAT)


def parse_instant(text: str) -> datetime:
    """The instant that `format_instant` wrote."""
    return datetime.strptime(text, INSTANT_FORMAT).replace(tzinfo=UTC)


def check_vault_id(vault: str) -> str:
    """The id itself, if it can be part of a key and of a variable's name; else `InvalidInput`."""
    if _VAULT_ID.fullmatch(vault) is None:
        raise InvalidInput(
            f"{vault!r} is not a vault id.", next_step="use 1 to 64 letters, digits, hyphens or underscores."
        )
    return vault


def is_object_name(name: str) -> bool:
    """Whether a name from an archive may become part of a key, and later of a table's name."""
    return _OBJECT.fullmatch(name) is not None


def file_key(window: Window, object_name: str, kind: FileType) -> str:
    """`<prefix><object>_upsert.csv` or `<prefix><object>_delete.csv`; the schema is `<prefix>metadata.csv`."""
    if kind is FileType.SCHEMA:
        return window.prefix + SCHEMA_NAME
    return f"{window.prefix}{object_name}_{kind.value}.csv"


def _read_manifest(document: Mapping[str, Any]) -> RawManifest:
    if document["version"] != MANIFEST_VERSION:
        raise ValueError(f"version {document['version']} is not {MANIFEST_VERSION}")
    window = Window(
        vault=document["vault"],
        start=parse_instant(document["start"]),
        stop=parse_instant(document["stop"]),
        epoch=int(document["epoch"]),
        kind=WindowKind(document["kind"]),
    )
    schema = document["schema"]
    return RawManifest(
        window=window,
        files=tuple(_read_file(one) for one in _sequence(document["files"])),
        source_parts=tuple(SourcePart(**one) for one in _sequence(document["source_parts"])),
        source_manifest=tuple(SourceRow(**one) for one in _sequence(document["source_manifest"])),
        record_count=int(document["record_count"]),
        produced_at=parse_instant(document["produced_at"]),
        schema=None if schema is None else _read_file(schema),
    )


def _read_file(fields: Mapping[str, Any]) -> RawFile:
    plain = {name: value for name, value in fields.items() if name not in ("type", "columns")}
    return RawFile(type=FileType(fields["type"]), columns=tuple(fields["columns"]), **plain)


def _sequence(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise TypeError("a list was expected")
    return value
