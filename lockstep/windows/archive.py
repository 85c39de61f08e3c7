"""Reading the vendor's archives without trusting them: safe unpacking, and every file counted against the manifest.

What belongs here: what may be in an archive, how much of it, and whether it is what its manifest says. What does not:
fetching (client.py), keeping (raw.py). An archive is taken whole, or refused in words that name file and window.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from lockstep.kernel.errors import Terminal
from lockstep.windows.model import FileType, SourceRow, Window, WindowKind, is_object_name

_CHUNK = 1024 * 1024
_MANIFEST = "manifest.csv"
_FULL_SCHEMA = "metadata_full.csv"
_SCHEMA_EXTRACT = "Metadata.metadata"
_MANIFEST_COLUMNS = ("extract", "records", "file")
_HEADER_MEMBERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


@dataclass(frozen=True)
class Limits:
    """How much an archive may be. Far above what a vault sends, far below what hurts."""

    members: int = 10_000
    total_bytes: int = 64 * 1024**3
    ratio: int = 200
    small: int = 32 * 1024**2
    """Up to here no ratio is asked: a short text of repeated values packs better than any limit."""
    columns: int = 1_600
    """What PostgreSQL and Redshift can hold in one table."""
    field_chars: int = 16 * 1024**2
    header_bytes: int = 64 * 1024


class BadArchive(Terminal):
    """The archive is not what it should be. Nothing of it was kept; the vendor must publish it anew."""

    def __init__(self, window: Window, what: str) -> None:
        super().__init__(
            what, unit=str(window), next_step="nothing of it was kept; it is fetched again at the next pass."
        )


@dataclass(frozen=True)
class CheckedFile:
    """A file of the archive that is what the manifest says."""

    object: str
    type: FileType
    extract: str
    path: Path
    sha256: str
    bytes: int
    rows: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class CheckedArchive:
    """A whole archive: its files, its schema, and what its manifest says."""

    files: tuple[CheckedFile, ...]
    schema: CheckedFile | None
    manifest: Path
    source_rows: tuple[SourceRow, ...]
    unlisted: tuple[str, ...]


@dataclass(frozen=True)
class _Unpacked:
    path: Path
    sha256: str
    size: int
    has_nul: bool


def read_archive(window: Window, parts: Sequence[Path], folder: Path, limits: Limits | None = None) -> CheckedArchive:
    """Unpack the joined `parts` into `folder` and check everything. Raises `BadArchive`; never writes elsewhere."""
    limits = limits or Limits()
    return _check(window, _unpack(window, parts, folder, limits), limits)


# --- unpacking ---------------------------------------------------------------------------------------------------


def _unpack(window: Window, parts: Sequence[Path], folder: Path, limits: Limits) -> dict[str, _Unpacked]:
    packed = sum(part.stat().st_size for part in parts)
    allowed = min(limits.total_bytes, max(limits.small, packed * limits.ratio))
    found: dict[str, _Unpacked] = {}
    with _joined(parts) as joined, _explained(window):
        stream: Any = _Bounded(window, gzip.GzipFile(fileobj=joined, mode="rb"), allowed, packed)
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK, tarinfo=_header_type(window, limits)) as tar:
            for member in tar:
                if member.isdir():
                    continue
                name = _safe_name(window, member, folder)
                if name in found or len(found) >= limits.members:
                    why = "is in it twice" if name in found else f"is member {limits.members + 1}: too many"
                    raise BadArchive(window, f"{name} {why}.")
                stream.expect(name, member.size)
                found[name] = _extract(tar, member, folder / f"{len(found):05d}.csv")
        stream.drain()  # only the end of the gzip carries its checksum
    return found


def _safe_name(window: Window, member: tarfile.TarInfo, folder: Path) -> str:
    """The member's path, if it is a plain file inside the archive. Files are stored under numbers all the same."""
    if not member.isreg() or member.issparse():
        raise BadArchive(
            window, f"{member.name[:200]!r} is not a plain file (links, devices and the like are refused)."
        )
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\x00" in member.name:
        raise BadArchive(window, f"{member.name[:200]!r} points outside the archive.")
    try:
        tarfile.data_filter(member, str(folder))
    except tarfile.FilterError as error:
        raise BadArchive(window, f"{member.name[:200]!r} is refused: {error}") from error
    return str(path)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> _Unpacked:
    source = tar.extractfile(member)
    if source is None:  # cannot be: the member is a plain file
        raise tarfile.ReadError(f"{member.name} cannot be read")
    digest, size, has_nul = hashlib.sha256(), 0, False
    with target.open("xb") as file:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            has_nul = has_nul or b"\x00" in chunk
            file.write(chunk)
    if size != member.size:
        raise tarfile.ReadError(f"{member.name} ends after {size} of {member.size} bytes")
    return _Unpacked(target, digest.hexdigest(), size, has_nul)


def _header_type(window: Window, limits: Limits) -> type[tarfile.TarInfo]:
    """A header reader that refuses long names and attributes of any size: tarfile reads those into memory whole."""

    class BoundedHeader(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Any:
            header = super().frombuf(buf, encoding, errors)
            if header.type in _HEADER_MEMBERS and header.size > limits.header_bytes:
                raise BadArchive(window, f"a header of {header.size} bytes is refused.")
            return header

    return BoundedHeader


class _Bounded:
    """The unpacked stream, cut off where it is more than an honest archive could hold."""

    def __init__(self, window: Window, stream: gzip.GzipFile, allowed: int, packed: int) -> None:
        self._window = window
        self._stream = stream
        self._left = allowed
        self._words = f"it unpacks to more than {allowed} bytes from {packed}: refused as a bomb."

    def expect(self, name: str, size: int) -> None:
        """Refuse a file by its announced size, before a byte of it is written."""
        if size > self._left + _CHUNK:  # what was read ahead has been counted already
            raise BadArchive(self._window, f"{name}: {self._words}")

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(min(size, _CHUNK))
        self._left -= len(chunk)
        if self._left < 0:
            raise BadArchive(self._window, self._words)
        return chunk

    def drain(self) -> None:
        while self.read(_CHUNK):
            pass


class _Joined(io.RawIOBase):
    """Parts one after the other, read as one file without joining them on disk."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self._waiting = list(parts)
        self._open: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._open is None:
                if not self._waiting:
                    return 0
                self._open = self._waiting.pop(0).open("rb")
            chunk = self._open.read(len(buffer))
            if chunk:
                buffer[: len(chunk)] = chunk
                return len(chunk)
            self._open.close()
            self._open = None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        super().close()


@contextmanager
def _joined(parts: Sequence[Path]) -> Iterator[IO[bytes]]:
    with _Joined(parts) as raw, io.BufferedReader(raw, _CHUNK) as buffered:
        yield buffered


@contextmanager
def _explained(window: Window) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise BadArchive(window, "the archive ends early: its gzip is truncated.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadArchive(window, f"the archive is not sound gzip: {error}") from error
    except tarfile.TarError as error:
        raise BadArchive(window, f"the archive is not a sound tar: {error}") from error


# --- checking ----------------------------------------------------------------------------------------------------


def _check(window: Window, found: Mapping[str, _Unpacked], limits: Limits) -> CheckedArchive:
    root = _root(window, found)
    inside = {name.removeprefix(root): file for name, file in found.items() if name.startswith(root)}
    manifest = inside.pop(_MANIFEST)
    rows = _source_rows(window, manifest, limits)
    files: dict[tuple[str, FileType], CheckedFile] = {}
    for row in rows:
        checked = _check_row(window, row, inside, limits)
        if checked is None:
            continue
        if files.setdefault((checked.object.lower(), checked.type), checked) is not checked:
            raise BadArchive(window, f"{row.file}: the manifest names two files for {row.extract} {row.type}.")
    schema = _schema(window, inside, files, limits)
    used = {one.path for one in files.values()} | ({schema.path} if schema else set())
    unlisted = tuple(sorted(name for name, file in inside.items() if file.path not in used))
    return CheckedArchive(tuple(files.values()), schema, manifest.path, rows, unlisted)


def _root(window: Window, found: Mapping[str, _Unpacked]) -> str:
    """Where the manifest is: at the top, or in the one folder around everything that some archives have."""
    places = [name.removesuffix(_MANIFEST) for name in found if PurePosixPath(name).name == _MANIFEST]
    near = [place for place in places if place.count("/") <= 1]
    if len(near) != 1:
        raise BadArchive(window, f"{_MANIFEST}: the archive has {len(near) or 'no'} such file, it must have one.")
    return near[0]


def _source_rows(window: Window, manifest: _Unpacked, limits: Limits) -> tuple[SourceRow, ...]:
    rows: list[SourceRow] = []
    reader = _records(window, _MANIFEST, manifest, limits)
    header = next(reader)
    absent = [name for name in _MANIFEST_COLUMNS if name not in header]
    if absent:
        raise BadArchive(window, f"{_MANIFEST}: column {', '.join(absent)} is missing.")
    for values in reader:
        fields = dict(zip(header, values, strict=True))
        count = fields["records"].strip()
        if not count.isascii() or not count.isdigit():
            raise BadArchive(window, f"{_MANIFEST}: {count[:40]!r} is not a number of records of {fields['extract']}.")
        kind = (fields.get("type") or "updates").strip().lower()
        label = fields.get("extract_label") or ""
        rows.append(SourceRow(fields["extract"].strip(), label, kind, int(count), fields["file"].strip()))
    return tuple(rows)


def _check_row(window: Window, row: SourceRow, inside: Mapping[str, _Unpacked], limits: Limits) -> CheckedFile | None:
    """One row of the manifest against its file. No file is right only when there are no records."""
    if row.type not in ("updates", "deletes"):
        raise BadArchive(window, f"{_MANIFEST}: {row.extract} has the unknown type {row.type[:40]!r}.")
    if not row.file:
        if row.records:
            raise BadArchive(window, f"{_MANIFEST}: {row.extract} has {row.records} records but no file.")
        return None
    file = _resolve(window, row.file, inside)
    deletes = row.type == "deletes" or row.extract.endswith("_deletes")
    component, _, name = row.extract.removesuffix("_deletes" if deletes else "").partition(".")
    if not is_object_name(name) or not is_object_name(component):
        raise BadArchive(window, f"{row.file}: {row.extract[:200]!r} is not a name that a table could have.")
    kind = FileType.DELETE if deletes else FileType.UPSERT
    checked = _count(window, row.file, file, limits, (name, kind, f"{component}.{name}"))
    if checked.rows != row.records:
        raise BadArchive(window, f"{row.file}: the manifest says {row.records} records, the file has {checked.rows}.")
    return checked


def _resolve(window: Window, name: str, inside: Mapping[str, _Unpacked]) -> _Unpacked:
    wanted = name.removeprefix("./")
    if wanted in inside:
        return inside[wanted]
    alike = [file for other, file in inside.items() if other.lower() == wanted.lower()]
    if len(alike) != 1:
        raise BadArchive(window, f"{name[:200]}: the manifest names it, the archive does not hold it.")
    return alike[0]


def _schema(
    window: Window,
    inside: Mapping[str, _Unpacked],
    files: Mapping[tuple[str, FileType], CheckedFile],
    limits: Limits,
) -> CheckedFile | None:
    """The whole schema: `metadata_full.csv`, which no manifest lists, or in a full archive the metadata itself."""
    if _FULL_SCHEMA in inside:
        words = ("metadata", FileType.SCHEMA, _SCHEMA_EXTRACT)
        return _count(window, _FULL_SCHEMA, inside[_FULL_SCHEMA], limits, words)
    listed = files.get(("metadata", FileType.UPSERT))
    if listed is None or window.kind is not WindowKind.FULL:
        return None
    return replace(listed, type=FileType.SCHEMA)


def _count(window: Window, name: str, file: _Unpacked, limits: Limits, words: tuple[str, FileType, str]) -> CheckedFile:
    reader = _records(window, name, file, limits)
    columns = tuple(next(reader))
    rows = sum(1 for _ in reader)
    return CheckedFile(*words, file.path, file.sha256, file.size, rows, columns)


def _records(window: Window, name: str, file: _Unpacked, limits: Limits) -> Iterator[list[str]]:
    """The header and then every record of a CSV: UTF-8, no NUL, every record as wide as the header."""
    if file.has_nul:
        raise BadArchive(window, f"{name}: it holds NUL bytes, so it is not a CSV.")
    csv.field_size_limit(limits.field_chars)
    with file.path.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            header = next(reader, None)
            _check_header(window, name, header, limits)
            assert header is not None  # noqa: S101  # checked above
            yield header
            width = len(header)
            for number, record in enumerate(reader, 1):
                if len(record) != width:
                    raise BadArchive(window, f"{name}: record {number} has {len(record)} values, the header {width}.")
                yield record
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadArchive(window, f"{name}: line {reader.line_num + 1} is not a CSV in UTF-8: {error}") from error


def _check_header(window: Window, name: str, header: Iterable[str] | None, limits: Limits) -> None:
    columns = list(header or ())
    if not columns:
        raise BadArchive(window, f"{name}: it is empty, not even a header is there.")
    if len(columns) > limits.columns:
        raise BadArchive(window, f"{name}: {len(columns)} columns, no table holds more than {limits.columns}.")
    if len(set(columns)) != len(columns) or not all(column.strip() for column in columns):
        raise BadArchive(window, f"{name}: its header names a column twice, or not at all.")
