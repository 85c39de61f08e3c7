"""Archives of a simulated vault: CSV files, the vendor's manifest and metadata, and the tar.gz around them.

What belongs here: turning rows into the bytes a vault would send, the same bytes every time. What does not: which rows
(rows.py) and what is deliberately wrong (damage.py).
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import IO

from lockstep.vaultsim.catalogue import LOGS, Column, Thing, changed_columns, dropped_columns
from lockstep.vaultsim.model import ArchiveFault, Poison, VaultState
from lockstep.vaultsim.rows import Key, Row, Value, World

METADATA_COLUMNS = (
    "modified_date",
    "extract",
    "extract_label",
    "column_name",
    "column_label",
    "type",
    "length",
    "related_extract",
)
_IN_MEMORY = 8 * 1024 * 1024
_NEEDS_QUOTES = re.compile(r'[",\r\n]|^\s|\s$')


@dataclass
class Member:
    """One entry of the tar. `kind` and `link` are other than plain only in damaged archives."""

    name: str
    content: IO[bytes]
    size: int
    kind: bytes = tarfile.REGTYPE
    link: str = ""


@dataclass
class Entry:
    """One row of the vendor's manifest."""

    extract: str
    label: str
    type: str
    records: int
    file: str


@dataclass
class Contents:
    """What goes into an archive, before it is packed."""

    entries: list[Entry] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    with_type: bool = True

    @property
    def records(self) -> int:
        """What the listing calls record_count: rows of data, without metadata."""
        return sum(one.records for one in self.entries if not one.extract.startswith("Metadata."))

    def add(self, extract: str, label: str, kind: str, file: str, header: Iterable[str], rows: Iterable[Row]) -> None:
        """Write one CSV and its row of the manifest. No rows: no file, and an empty name, as the vendor does."""
        first = next(iterator := iter(rows), None)
        if first is None:
            self.entries.append(Entry(extract, label, kind, 0, ""))
            return
        stream, records = csv_stream(header, chain([first], iterator))
        self.entries.append(Entry(extract, label, kind, records, file))
        self.members.append(member(file, stream))

    def manifest(self) -> Member:
        """manifest.csv. The column `type` is documented for incrementals only."""
        header = ["extract", "extract_label", "type", "records", "file"]
        rows: list[Row] = [
            [one.extract, one.label, one.type, str(one.records), one.file or None] for one in self.entries
        ]
        if not self.with_type:
            header.remove("type")
            rows = [[*row[:2], *row[3:]] for row in rows]
        return member("manifest.csv", csv_stream(header, rows)[0])


def incremental(state: VaultState, index: int) -> Contents:
    """The archive of window `index`: changes, deletes, the delta of the schema and the whole schema."""
    world = world_of(state)
    contents = Contents(with_type=state.faults.get(index) is not ArchiveFault.NO_TYPE_COLUMN)
    schema = world.things(index)
    _add_schema_delta(contents, state, schema, index)
    for thing in schema:
        header = [column.name for column in thing.columns]
        upserts = _poisoned(thing, world.upserts(thing, index), state.poisoned.get(index))
        path = f"{thing.component}/{thing.name}"
        contents.add(thing.extract, thing.label, "updates", f"{path}.csv", header, upserts)
        deletes = _deleted(world.deletes(thing, index), state, index)
        contents.add(
            thing.extract, thing.label, "deletes", f"{path}_deletes.csv", [*thing.key, "deleted_date"], deletes
        )
    contents.members.append(member("metadata_full.csv", _schema_csv(schema)[0]))
    return contents


def full(state: VaultState, index: int) -> Contents:
    """The full archive after window `index`: everything that is alive then."""
    world = world_of(state)
    contents = Contents(with_type=False)
    schema, alive = world.things(index), world.state_after(index)
    stream, records = _schema_csv(schema)
    contents.entries.append(Entry("Metadata.metadata", "Metadata", "updates", records, "Metadata/metadata.csv"))
    contents.members.append(member("Metadata/metadata.csv", stream))
    for thing in schema:
        header = [column.name for column in thing.columns]
        rows = alive[thing.name].values()
        contents.add(thing.extract, thing.label, "updates", f"{thing.component}/{thing.name}.csv", header, rows)
    return contents


def log(state: VaultState, index: int) -> Contents:
    """The audit logs of the day that ends with window `index`."""
    world = world_of(state)
    contents = Contents(with_type=False)
    for thing in LOGS:
        header = [column.name for column in thing.columns]
        rows = world.log_rows(thing, index)
        contents.add(thing.extract, thing.label, "updates", f"Log/{thing.name}.csv", header, rows)
    contents.members.append(member("metadata_full.csv", _schema_csv(LOGS)[0]))
    return contents


def world_of(state: VaultState) -> World:
    """The data behind a vault's state."""
    return World(state.config, tuple(state.changes), dict(state.twists))


def pack(members: Iterable[Member], target: IO[bytes]) -> None:
    """Write the tar.gz. No clock and no owner goes in, so the same contents are the same bytes."""
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=1, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for one in members:
            info = tarfile.TarInfo(one.name)
            info.size, info.type, info.linkname, info.mode = one.size, one.kind, one.link, 0o644
            one.content.seek(0)
            tar.addfile(info, one.content)
            one.content.close()


def member(name: str, stream: IO[bytes]) -> Member:
    """A plain file of the archive."""
    size = stream.seek(0, io.SEEK_END)
    return Member(name, stream, size)


def csv_stream(header: Iterable[str], rows: Iterable[Row]) -> tuple[IO[bytes], int]:
    """A CSV on a spooled file, and how many rows it has. NULL is nothing at all, an empty text is two quotes."""
    stream: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  # pack() closes it
    stream.write((",".join(map(csv_field, header)) + "\n").encode())
    count = 0
    for lines in _batches(",".join(map(csv_field, row)) for row in rows):
        stream.write(("\n".join(lines) + "\n").encode())
        count += len(lines)
    return stream, count


def csv_field(value: Value) -> str:
    """One value of a CSV."""
    if value is None:
        return ""
    if not value or _NEEDS_QUOTES.search(value):
        return '"' + value.replace('"', '""') + '"'
    return value


def _batches(lines: Iterator[str], size: int = 1000) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _add_schema_delta(contents: Contents, state: VaultState, schema: list[Thing], index: int) -> None:
    now = f"{state.config.stop_of(index):%Y-%m-%dT%H:%M:%S.000Z}"
    changed = [_metadata_row(thing, column, now) for thing, column in changed_columns(schema, index)]
    contents.add("Metadata.metadata", "Metadata", "updates", "Metadata/metadata.csv", METADATA_COLUMNS, changed)
    extracts = {thing.name: thing.extract for thing in schema}
    gone: list[Row] = [
        [extracts.get(one.object, one.object), one.column, now] for one in dropped_columns(state.changes, index)
    ]
    header = ("extract", "column_name", "deleted_date")
    contents.add("Metadata.metadata", "Metadata", "deletes", "Metadata/metadata_deletes.csv", header, gone)


def _schema_csv(schema: Iterable[Thing]) -> tuple[IO[bytes], int]:
    rows = (_metadata_row(thing, column, None) for thing in schema for column in thing.columns)
    return csv_stream(METADATA_COLUMNS, rows)


def _metadata_row(thing: Thing, column: Column, modified: Value) -> Row:
    length = str(column.length) if column.length else None
    related = column.related or None
    return [modified, thing.extract, thing.label, column.name, column.label, column.type, length, related]


def _deleted(keys: Iterable[Key], state: VaultState, index: int) -> Iterator[Row]:
    now = f"{state.config.stop_of(index):%Y-%m-%dT%H:%M:%S.000Z}"
    return ([*key, now] for key in keys)


def _poisoned(thing: Thing, rows: Iterator[Row], poison: Poison | None) -> Iterator[Row]:
    """Put a value that is not what its column says into the first row of every object that has such a column."""
    wanted = {Poison.NUMBER: "amount__c", Poison.DATE: "start_date__v"}.get(poison) if poison else None
    place = next((place for place, column in enumerate(thing.columns) if column.name == wanted), None)
    for number, row in enumerate(rows):
        if place is not None and number == 0:
            row[place] = "twelve" if poison is Poison.NUMBER else "2026-02-31"
        yield row
