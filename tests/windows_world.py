"""A small deterministic vault for tests: writes raw windows straight to S3, and knows what the warehouse must hold.

The oracle is plain Python dictionaries and follows the documented rules: deletes first, the last row of a key wins, and
a row that was deleted after its last change stays deleted.
"""

from __future__ import annotations

import csv
import hashlib
import io
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg

from lockstep.windows.model import (
    FileType,
    QueueRow,
    RawFile,
    RawManifest,
    Window,
    WindowKind,
    file_key,
)
from lockstep.windows.queue import WindowQueue

START = datetime(2026, 3, 1, tzinfo=UTC)
STEP = timedelta(minutes=15)
COLUMNS: dict[str, dict[str, tuple[str, int]]] = {
    "study__v": {
        "id": ("String", 20),
        "modified_date__v": ("DateTime", 0),
        "name__v": ("String", 128),
        "budget__c": ("Number", 0),
        "started__c": ("Date", 0),
        "blinded__c": ("Boolean", 0),
        "notes__c": ("LongText", 32000),
    },
    "site__v": {
        "id": ("String", 20),
        "modified_date__v": ("DateTime", 0),
        "study__v": ("Relationship", 20),
        "city__c": ("String", 60),
    },
}
NAMES = ["Ada", "", 'O\'Neil, "Jo"', "línea\nsegunda", "007", "NA", "null", "日本 🧬", " spaced "]

Row = dict[str, str | None]


@dataclass
class Files:
    """What one window brings: rows and deleted ids by object. None is an unquoted nothing, "" a quoted one."""

    upserts: dict[str, list[Row]] = field(default_factory=dict)
    deletes: dict[str, list[Row]] = field(default_factory=dict)


@dataclass
class World:
    """One vault. `publish` makes the next windows; `oracle` is what the warehouse must hold after them."""

    s3: Any
    bucket: str
    dynamodb: Any
    table: str
    vault: str = "v1"
    start: datetime = START
    seed: int = 1
    fraction: int = 11
    """Most digits after the point of a number."""
    columns: dict[str, dict[str, tuple[str, int]]] = field(
        default_factory=lambda: {name: dict(columns) for name, columns in COLUMNS.items()}
    )

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.oracle: dict[str, dict[str, Row]] = {}
        self.before: dict[datetime, dict[str, dict[str, Row]]] = {}
        self.windows: list[Window] = []
        self.rows: dict[datetime, QueueRow] = {}
        self.queue = WindowQueue(self.dynamodb, self.table)
        self._next = self.start

    def publish(self, count: int = 1, *, rows: int = 4, enqueue: bool = True) -> list[Window]:
        """The next windows, with random changes."""
        return [self.add(self.changes(rows), enqueue=enqueue) for _ in range(count)]

    def changes(self, rows: int = 4) -> Files:
        """Random upserts over a small set of ids, and now and then a delete."""
        files = Files()
        for name in self.columns:
            files.upserts[name] = [self.row(name, self._random.randrange(12)) for _ in range(rows)]
            files.upserts[name] = list({row["id"]: row for row in files.upserts[name]}.values())
            if self._random.random() < 0.4:
                number = self._random.randrange(12)
                gone = {"id": f"{name[:2].upper()}{number:04}", "deleted_date": _time(self._next)}
                if gone["id"] not in {row["id"] for row in files.upserts[name]}:
                    files.deletes[name] = [gone]
        return files

    def row(self, name: str, number: int, **values: str | None) -> Row:
        """One row of an object; `values` replace what chance chose."""
        made: Row = {}
        for column, (kind, _) in self.columns[name].items():
            made[column] = self._value(kind)
        made["id"] = f"{name[:2].upper()}{number:04}"
        made["modified_date__v"] = _time(self._next + timedelta(seconds=self._random.randrange(900)))
        return made | values

    def add(
        self,
        files: Files,
        *,
        enqueue: bool = True,
        kind: WindowKind = WindowKind.INCREMENTAL,
        tamper: Callable[[RawManifest], RawManifest] | None = None,
        stop: datetime | None = None,
    ) -> Window:
        """Write one window's files, its manifest last, and its queue row."""
        start, end = (
            (self._next, self._next + STEP)
            if kind is WindowKind.INCREMENTAL
            else (
                datetime(2000, 1, 1, tzinfo=UTC),
                stop or self._next,
            )
        )
        window = Window(self.vault, start, end, kind=kind)
        raw = [
            self._put(window, name, FileType.UPSERT, list(self.columns[name]), rows)
            for name, rows in files.upserts.items()
        ]
        raw += [self._put(window, name, FileType.DELETE, list(rows[0]), rows) for name, rows in files.deletes.items()]
        schema = self._put_bytes(window, "metadata", FileType.SCHEMA, self._metadata(), 0, ())
        manifest = RawManifest(window, tuple(raw), (), (), sum(one.rows for one in raw), START, schema)
        manifest = tamper(manifest) if tamper else manifest
        self.s3.put_object(Bucket=self.bucket, Key=window.manifest_key, Body=manifest.to_json())
        if kind is WindowKind.INCREMENTAL:
            self.windows.append(window)
            self._next = window.stop
            self.before[window.stop] = {name: dict(rows) for name, rows in self.oracle.items()}
            self._learn(files)
        elif kind is WindowKind.FULL:
            self.oracle = {name: {str(row["id"]): row for row in rows} for name, rows in files.upserts.items()}
        if enqueue:
            self.queue.add_ready(window, manifest.checksum)
        self.rows[window.stop] = QueueRow(window, "READY", window.prefix, manifest.checksum)  # type: ignore[arg-type]
        return window

    def enqueue(self, windows: Iterable[Window]) -> None:
        """Publish rows that were held back."""
        for window in windows:
            self.queue.add_ready(window, self.rows[window.stop].checksum)

    def rewrite(self, window: Window, name: str, body: bytes) -> None:
        """Replace a file and its digest, as a healed source would; the queue row gets the new checksum."""
        found = self.s3.get_object(Bucket=self.bucket, Key=window.manifest_key)["Body"].read()
        manifest = RawManifest.from_json(found)
        files = tuple(
            self._put_bytes(window, one.object, one.type, body, one.rows, one.columns) if one.object == name else one
            for one in manifest.files
        )
        manifest = replace(manifest, files=files)
        self.s3.put_object(Bucket=self.bucket, Key=window.manifest_key, Body=manifest.to_json())
        self.dynamodb.update_item(
            TableName=self.table,
            Key={"vault_id": {"S": window.vault}, "stoptime": {"S": window.sort_key}},
            UpdateExpression="SET checksum = :c",
            ExpressionAttributeValues={":c": {"S": manifest.checksum}},
        )

    def statuses(self) -> list[str]:
        """The status of every published window, in order."""
        return [str(row.status) if (row := self.queue.get(one)) else "-" for one in self.windows]

    def forget_after(self, window: Window) -> None:
        """Set the oracle back to what held before `window`."""
        self.oracle = self.before[window.stop]

    def _learn(self, files: Files) -> None:
        for name, rows in files.deletes.items():
            for row in rows:
                self.oracle.get(name, {}).pop(str(row["id"]), None)
        for name, rows in files.upserts.items():
            known = self.oracle.setdefault(name, {})
            deleted = {row["id"]: row["deleted_date"] for row in files.deletes.get(name, [])}
            last = {str(row["id"]): row for row in rows}
            for key, row in last.items():
                gone = deleted.get(key)
                if gone is not None and str(gone) > str(row["modified_date__v"]):
                    continue
                known[key] = {**known.get(key, {}), **row}

    def _value(self, kind: str) -> str | None:
        pick = self._random
        if pick.random() < 0.15:
            return None
        if kind == "Number":
            return str(Decimal(pick.randrange(10**22)) / Decimal(10 ** pick.randrange(self.fraction + 1)))
        if kind == "Date":
            return f"2025-{pick.randrange(1, 13):02}-{pick.randrange(1, 29):02}"
        if kind == "Boolean":
            return pick.choice(["true", "false"])
        if kind == "DateTime":
            return _time(START)
        return pick.choice(NAMES)

    def _put(self, window: Window, name: str, kind: FileType, header: Sequence[str], rows: Sequence[Row]) -> RawFile:
        return self._put_bytes(window, name, kind, as_csv(header, rows), len(rows), tuple(header))

    def _put_bytes(
        self, window: Window, name: str, kind: FileType, body: bytes, rows: int, columns: tuple[str, ...]
    ) -> RawFile:
        key = file_key(window, name, kind)
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=body)
        return RawFile(name, kind, key, hashlib.sha256(body).hexdigest(), len(body), rows, columns, f"Object.{name}")

    def _metadata(self) -> bytes:
        lines = [
            {
                "modified_date": None,
                "extract": f"Object.{name}",
                "column_name": column,
                "type": kind,
                "length": str(size),
            }
            for name, columns in self.columns.items()
            for column, (kind, size) in columns.items()
        ]
        return as_csv(["modified_date", "extract", "column_name", "type", "length"], lines)


def as_csv(header: Sequence[str], rows: Iterable[Mapping[str, str | None]]) -> bytes:
    """Bytes as the vendor packs them: None is nothing at all, every text is quoted."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(header)
    for row in rows:
        cells = ("" if row.get(name) is None else '"' + str(row[name]).replace('"', '""') + '"' for name in header)
        text.write(",".join(cells) + "\n")
    return text.getvalue().encode()


def warehouse_rows(dsn: str, schema: str) -> dict[str, dict[str, Row]]:
    """Every table of a schema as text by id, written the way the oracle writes it."""
    found: dict[str, dict[str, Row]] = {}
    with psycopg.connect(dsn, autocommit=True, options="-c timezone=UTC") as connection:
        tables = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = %s", (schema,)
        ).fetchall()
        for (table,) in tables:
            cursor = connection.execute(f'SELECT * FROM "{schema}"."{table}"')  # noqa: S608
            names = [column.name for column in cursor.description or ()]
            rows = [dict(zip(names, map(_text, row), strict=True)) for row in cursor]
            found[table] = {str(row["id"]): row for row in rows}
    return found


def expected(oracle: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, Row]]:
    """The oracle in the warehouse's spelling: numbers are compared by value."""
    return {
        name: {key: {column: _text(_number(value)) for column, value in row.items()} for key, row in rows.items()}
        for name, rows in oracle.items()
    }


def _number(value: str | None) -> Any:
    if value and value[0].isdigit() and "-" not in value and not value.startswith("0"):
        try:
            return Decimal(value)
        except ArithmeticError:
            return value
    return value


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return _time(value)
    if isinstance(value, Decimal):
        return format(value.normalize(), "f")
    return str(value)


def _time(instant: datetime) -> str:
    return instant.strftime("%Y-%m-%dT%H:%M:%S.") + "000Z"
