"""Staging: raw CSV files read, checked and typed, many windows at once, on Spark's workers.

What belongs here: what one task does with its files, and the Spark call that runs the tasks. What does not: which
windows (rules.py), where staged rows are written (places.py) and what becomes of them (store.py). A task may run twice
or die half-way: what it wrote then carries a load number that nobody was told, so it is never applied.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from botocore.exceptions import BotoCoreError, ClientError
from pyarrow import csv

from lockstep.kernel.errors import LockstepError, Terminal, Transient
from lockstep.warehouse.dialect import DELETE, DELETED, DELETED_DATE, KIND, LOAD, ROW, UPSERT
from lockstep.warehouse.model import ColumnType, Table
from lockstep.windows.model import FileType, RawFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2
WHOLE_BYTES = 4 * 2**20
"""Files up to this size are read at once; larger ones go through a file on disk, block by block."""
FLUSH_BYTES = 16 * 2**20
BLOCK_BYTES = 2**20
CHUNK_BYTES = 2**18
READERS = 4
FILES_AHEAD = 8

_RESULT = "number int, load bigint, failure string, message string, doubled string"
_ROW_SHAPE = re.compile(r"Row #\d+: Expected \d+ columns, got \d+")


@dataclass(frozen=True)
class StageJob:
    """One window's files, and the tables they go to."""

    number: int
    unit: str
    files: tuple[RawFile, ...]


class Piece(NamedTuple):
    """Rows of one file, tagged and in the order of `columns`, ready to be written."""

    object: str
    kind: str
    load: int
    columns: tuple[str, ...]
    rows: pa.Table
    types: Mapping[str, ColumnType]


class Writer(Protocol):
    """Puts pieces where the warehouse applies them from. Used by one task."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write all of them or none. Raises `LockstepError`."""
        ...

    def finish(self, load: int) -> None:
        """The last piece of a load was written."""
        ...

    def close(self) -> None:
        """Give back what is open."""
        ...


@dataclass(frozen=True)
class StageTarget:
    """Where tasks read and write. The factories travel to the workers, clients do not."""

    bucket: str
    tables: Mapping[str, Table] = field(hash=False)
    open_s3: Callable[[], Any]
    open_writer: Callable[[], Writer]


class StageResult(NamedTuple):
    """What became of one window: staged under `load`, or an error that says whether trying again can help."""

    number: int
    load: int
    error: LockstepError | None
    doubled: frozenset[str]
    """Objects in whose file a key may occur twice."""


def stage(spark: SparkSession, target: StageTarget, jobs: Sequence[StageJob]) -> list[StageResult]:
    """Stage the windows in parallel and return their results in order. An error of one window is its own."""
    shares = [tuple(jobs[number::PARTITIONS]) for number in range(min(PARTITIONS, len(jobs)))]
    frame = spark.range(0, len(shares), 1, len(shares))
    try:
        rows = frame.mapInArrow(partial(_task, target, shares), _RESULT).collect()
    except Exception as error:
        # Spark's own failures (a lost worker, a restarted server) say nothing about the data.
        raise Transient(f"Spark could not stage: {type(error).__name__} {str(error)[:300]}") from error
    units = {job.number: job.unit for job in jobs}
    return sorted((_result(row, units) for row in rows), key=lambda one: one.number)


def stage_share(target: StageTarget, jobs: Sequence[StageJob]) -> Iterator[StageResult]:
    """What one task does: read, check and copy its windows; also what runs where there is no Spark."""
    client = cached(target.open_s3)
    with closing(target.open_writer()) as writer, _Fetcher(client, target.bucket, jobs) as fetcher:
        batch = _Batch(target, writer, fetcher)
        for job in jobs:
            batch.add(job)
            if batch.size > FLUSH_BYTES:
                yield from batch.flush()
        yield from batch.flush()


def _task(
    target: StageTarget, shares: Sequence[Sequence[StageJob]], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    numbers = [number.as_py() for batch in batches for number in batch.column(0)]
    for number in numbers:
        for one in stage_share(target, shares[number]):
            kind = "" if one.error is None else "transient" if isinstance(one.error, Transient) else "terminal"
            columns = {
                "number": pa.array([one.number], pa.int32()),
                "load": pa.array([one.load], pa.int64()),
                "failure": pa.array([kind]),
                "message": pa.array([one.error.what if one.error else ""]),
                "doubled": pa.array([",".join(sorted(one.doubled))]),
            }
            yield pa.RecordBatch.from_pydict(columns)


def _result(row: Any, units: Mapping[int, str]) -> StageResult:
    doubled = frozenset(name for name in row["doubled"].split(",") if name)
    error: LockstepError | None = None
    if row["failure"]:
        kind = Transient if row["failure"] == "transient" else Terminal
        error = kind(row["message"], unit=units[row["number"]])
    return StageResult(row["number"], row["load"], error, doubled)


@dataclass
class _Loaded:
    job: StageJob
    load: int
    pieces: list[Piece] = field(default_factory=list)
    doubled: set[str] = field(default_factory=set)
    error: LockstepError | None = None


class _Fetcher:
    """Gets small files ahead of their turn, a few at a time: over a network each costs more waiting than work."""

    def __init__(self, client: Any, bucket: str, jobs: Sequence[StageJob]) -> None:
        self._client = client
        self._bucket = bucket
        self._rest = iter([file for job in jobs for file in job.files if file.bytes <= WHOLE_BYTES])
        self._next = next(self._rest, None)
        self._under_way: deque[tuple[RawFile, Future[bytes]]] = deque()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="get")

    def __enter__(self) -> _Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def body(self, file: RawFile) -> bytes:
        """The bytes of a small file. Files come in the order of the jobs; those of a window that failed are passed."""
        self._ask()
        while True:
            known, future = self._under_way.popleft()
            self._ask()
            if known.key == file.key:
                return future.result()

    def chunks(self, file: RawFile) -> Iterator[bytes]:
        """The bytes of a large file, piece by piece."""
        answer = self._client.get_object(Bucket=self._bucket, Key=file.key)
        yield from answer["Body"].iter_chunks(CHUNK_BYTES)

    def _ask(self) -> None:
        size = sum(file.bytes for file, _ in self._under_way)
        while self._next is not None and len(self._under_way) < FILES_AHEAD:
            if self._under_way and size + self._next.bytes > WHOLE_BYTES:
                return
            size += self._next.bytes
            self._under_way.append((self._next, self._pool.submit(self._get, self._next)))
            self._next = next(self._rest, None)

    def _get(self, file: RawFile) -> bytes:
        body: bytes = self._client.get_whole(self._bucket, file.key)
        return body


class _Batch:
    """Windows that are read but not yet written. One call of the writer serves all of them."""

    def __init__(self, target: StageTarget, writer: Writer, fetcher: _Fetcher) -> None:
        self._target = target
        self._writer = writer
        self._fetcher = fetcher
        self._loaded: list[_Loaded] = []
        self.size = 0

    def add(self, job: StageJob) -> None:
        """Read a window. Small files stay in memory until `flush`; a large one is written at once."""
        loaded = _Loaded(job, secrets.randbits(62))
        self._loaded.append(loaded)
        try:
            for file in job.files:
                self._read(loaded, file)
        except LockstepError as error:
            loaded.error = error
        except (BotoCoreError, ClientError, OSError) as error:
            loaded.error = _known(error, job.unit)

    def flush(self) -> Iterator[StageResult]:
        """Write what is in memory and say what became of each window."""
        self._spill()
        for one in self._loaded:
            if one.error is None:
                self._finish(one)
            yield StageResult(one.job.number, one.load, one.error, frozenset(one.doubled))
        self._loaded = []

    def _spill(self) -> None:
        """Write what is in memory. If that fails, write window by window, so that the fault finds its owner."""
        whole = [one for one in self._loaded if one.error is None]
        try:
            self._writer.write([piece for one in whole for piece in one.pieces])
        except LockstepError:
            for one in whole:
                self._write_alone(one)
        for one in self._loaded:
            one.pieces.clear()
        self.size = 0

    def _write_alone(self, loaded: _Loaded) -> None:
        try:
            for piece in loaded.pieces:
                self._writer.write([piece])
        except LockstepError as error:
            error.unit = loaded.job.unit
            loaded.error = error

    def _finish(self, loaded: _Loaded) -> None:
        try:
            self._writer.finish(loaded.load)
        except LockstepError as error:
            error.unit = loaded.job.unit
            loaded.error = error

    def _read(self, loaded: _Loaded, file: RawFile) -> None:
        table = self._target.tables[file.object]
        if file.bytes > WHOLE_BYTES:
            self._stream(loaded, file, table)
            return
        body = self._fetcher.body(file)
        _check_digest(hashlib.sha256(body).hexdigest(), file, loaded.job.unit)
        rows = _parse(pa.BufferReader(body), file, loaded.job.unit)
        _check_rows(rows.num_rows, file, loaded.job.unit)
        _check_key(rows, file, table, loaded.job.unit)
        if file.type is FileType.UPSERT and _is_doubled(rows, table):
            loaded.doubled.add(file.object)
        if rows.num_rows:
            loaded.pieces.append(_tagged(rows, file, table, loaded.load, 0))
            self.size += len(body)
            if self.size > FLUSH_BYTES:
                self._spill()  # one window of many files must not fill the memory either

    def _stream(self, loaded: _Loaded, file: RawFile, table: Table) -> None:
        """Bounded memory: to disk with the digest, then block by block into the database."""
        unit = loaded.job.unit
        if file.type is FileType.UPSERT:
            loaded.doubled.add(file.object)  # a set of all keys would not be bounded; the sink looks itself
        with tempfile.TemporaryFile() as disk:
            digest = hashlib.sha256()
            for chunk in self._fetcher.chunks(file):
                digest.update(chunk)
                disk.write(chunk)
            _check_digest(digest.hexdigest(), file, unit)
            disk.seek(0)
            done = 0
            for batch in _blocks(disk, file, unit):
                rows = pa.Table.from_batches([batch])
                _check_key(rows, file, table, unit)
                self._write_block(_tagged(rows, file, table, loaded.load, done), unit)
                done += rows.num_rows
        _check_rows(done, file, unit)

    def _write_block(self, piece: Piece, unit: str) -> None:
        try:
            self._writer.write([piece])
        except LockstepError as error:
            error.unit = unit
            raise


def _parse(source: Any, file: RawFile, unit: str) -> pa.Table:
    try:
        rows = csv.read_csv(source, *_options(file))
    except pa.ArrowException as error:
        raise _unreadable(error, file, unit) from None
    _check_header(rows.column_names, file, unit)
    return rows


def _blocks(source: Any, file: RawFile, unit: str) -> Iterator[pa.RecordBatch]:
    try:
        reader = csv.open_csv(source, *_options(file))
        _check_header(reader.schema.names, file, unit)
        yield from reader
    except pa.ArrowException as error:
        raise _unreadable(error, file, unit) from None


def _options(file: RawFile) -> tuple[csv.ReadOptions, csv.ParseOptions, csv.ConvertOptions]:
    """Everything as text: an unquoted nothing is NULL, a quoted nothing is the empty string."""
    return (
        csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
        csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        csv.ConvertOptions(
            column_types=dict.fromkeys(file.columns, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _tagged(rows: pa.Table, file: RawFile, table: Table, load: int, before: int) -> Piece:
    """The rows with their tags in front, in the order in which COPY names the columns."""
    columns = table.key if file.type is FileType.DELETE else file.columns
    deleted = pa.nulls(rows.num_rows, pa.string())
    if file.type is FileType.DELETE and DELETED_DATE in rows.column_names:
        deleted = _typed(rows.column(DELETED_DATE), ColumnType.TIMESTAMP)
    kind = DELETE if file.type is FileType.DELETE else UPSERT
    known = table.by_name
    tags = {
        LOAD: pa.repeat(pa.scalar(load, pa.int64()), rows.num_rows),
        KIND: pa.repeat(pa.scalar(kind), rows.num_rows),
        ROW: pa.array(range(before, before + rows.num_rows), pa.int64()),
        DELETED: deleted,
    }
    data = {name: _typed(rows.column(name), known[name].type) for name in columns}
    return Piece(file.object, kind, load, tuple(columns), pa.table({**tags, **data}), _types(table, columns))


def _types(table: Table, columns: Sequence[str]) -> dict[str, ColumnType]:
    return {name: table.by_name[name].type for name in columns}


def _typed(column: pa.ChunkedArray, kind: ColumnType) -> pa.ChunkedArray:
    """A quoted nothing is a value only where text is held; no date or number is empty."""
    if kind is ColumnType.TEXT:
        return column
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)


def _is_doubled(rows: pa.Table, table: Table) -> bool:
    if len(table.key) == 1:
        return bool(pc.count_distinct(rows.column(table.key[0])).as_py() != rows.num_rows)
    return bool(rows.group_by(list(table.key)).aggregate([]).num_rows != rows.num_rows)


def _check_digest(found: str, file: RawFile, unit: str) -> None:
    if found != file.sha256:
        raise Terminal(
            f"{file.key} is not what the manifest says: its sha256 differs.",
            unit=unit,
            next_step="produce the window again.",
        )


def _check_header(found: Sequence[str], file: RawFile, unit: str) -> None:
    if tuple(found) != file.columns:
        raise Terminal(f"{file.key} has another header than the manifest says.", unit=unit)


def _check_rows(found: int, file: RawFile, unit: str) -> None:
    if found != file.rows:
        raise Terminal(f"{file.key} has {found} rows, the manifest says {file.rows}.", unit=unit)


def _check_key(rows: pa.Table, file: RawFile, table: Table, unit: str) -> None:
    for name in table.key:
        if name not in rows.column_names:
            raise Terminal(f"{file.key} has no column {name}, which identifies its rows.", unit=unit)
        if rows.column(name).null_count:
            raise Terminal(f"{file.key} has a row without {name}, which identifies it.", unit=unit)


def _unreadable(error: pa.ArrowException, file: RawFile, unit: str) -> Terminal:
    shape = _ROW_SHAPE.search(str(error))  # the rest of Arrow's message quotes the row
    detail = (
        shape[0] if shape else "not UTF-8 text" if "UTF8" in str(error) else "not a table of comma-separated values"
    )
    return Terminal(
        f"{file.key} cannot be read: {detail}.", unit=unit, next_step="look at the file; nothing was applied."
    )


def _known(error: Exception, unit: str) -> LockstepError:
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in ("NoSuchKey", "404"):
            return Terminal("a file of the window is missing in the bucket.", unit=unit, next_step="produce it again.")
    return Transient(f"reading raw files failed: {type(error).__name__}", unit=unit)


# A Python worker of Spark serves many tasks; building a client costs more than a small window.
_clients: dict[Any, Any] = {}


def cached(factory: Callable[[], Any]) -> Any:
    """What the factory makes, once per process."""
    key: Any = factory
    if isinstance(factory, partial):
        key = (factory.func, factory.args, tuple(sorted(factory.keywords.items())))
    if key not in _clients:
        _clients[key] = factory()
    return _clients[key]
