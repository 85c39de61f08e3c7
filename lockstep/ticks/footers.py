"""What a Parquet file says about itself, read from its footer with bounds on everything that a stranger may choose.

What belongs here: opening a footer and judging it as a file. What does not: comparing it with a manifest (rules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import BinaryIO

from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import thrift, types
from lockstep.ticks.model import Column, Footer
from lockstep.ticks.thrift import Reader

MAX_FOOTER_BYTES = 8 * 1024 * 1024
MAX_ROW_GROUPS = 10_000
MAX_GROUP_BYTES = 512 * 1024 * 1024
MAX_COLUMNS = 2_000
_MAGIC = b"PAR1"
_SMALLEST = 12
_CODECS = frozenset({0, 1, 2, 5, 6, 7})  # none, snappy, gzip, lz4, zstd, lz4_raw: what Spark reads without more jars
_CODEC_NAMES = {3: "LZO", 4: "BROTLI"}
# Fields of parquet.thrift, by number and type.
_ROW_GROUPS = (4, thrift.LIST)  # of FileMetaData
_COLUMNS = (1, thrift.LIST)  # of RowGroup
_META_DATA = (3, thrift.STRUCT)  # of ColumnChunk
_CODEC, _UNCOMPRESSED_SIZE = (4, thrift.I32), (6, thrift.I64)  # of ColumnMetaData
_THRIFT_LIMIT = 1_000_000


class NotUsable(InvalidInput):
    """The bytes are no Parquet file that bronze takes; `what` is one line for the agent."""


def read_footer(file: BinaryIO, size: int) -> Footer:
    """Read the footer of an open file. Raises `NotUsable`; data pages are not touched."""
    footer = _footer(file, size)
    import pyarrow as pa  # heavy, and only replicas that take parts need it
    import pyarrow.parquet as pq

    file.seek(0)
    try:
        opened = pq.ParquetFile(
            file, thrift_string_size_limit=MAX_FOOTER_BYTES, thrift_container_size_limit=_THRIFT_LIMIT
        )
        metadata, schema = opened.metadata, opened.schema_arrow
    except (pa.ArrowException, OSError, ValueError) as error:
        raise NotUsable(f"the footer cannot be read: {_line(error)}") from error
    if metadata.num_columns > MAX_COLUMNS or metadata.num_row_groups > MAX_ROW_GROUPS:
        raise NotUsable(f"{metadata.num_columns} columns in {metadata.num_row_groups} row groups are too many")
    columns = tuple(Column(field.name, _type(field)) for field in schema)
    if any("\x00" in text for column in columns for text in column):  # PostgreSQL, which keeps the footer, takes none
        raise NotUsable("the name of a column holds a NUL")
    return Footer(
        rows=metadata.num_rows,
        uncompressed_bytes=_uncompressed(footer, metadata.num_row_groups, metadata.num_columns),
        row_groups=metadata.num_row_groups,
        columns=columns,
    )


def _footer(file: BinaryIO, size: int) -> bytes:
    file.seek(0)
    head = file.read(4)
    file.seek(max(0, size - 8))
    tail = file.read(8)
    if size < _SMALLEST or head != _MAGIC or tail[4:] != _MAGIC:
        raise NotUsable("it is no Parquet file, or it is encrypted or cut off")
    length = int.from_bytes(tail[:4], "little")
    if not 0 < length <= min(size - _SMALLEST, MAX_FOOTER_BYTES):
        raise NotUsable(f"its footer claims {length} bytes")
    file.seek(size - 8 - length)
    return file.read(length)


class _Sizes:
    """What the column chunks say of themselves, read from the footer's own bytes.

    Not by pyarrow: it makes a chunk outside any handler, so that one odd byte in it (a histogram of another size, for
    example) ends the whole process with all its requests.
    """

    def __init__(self, footer: bytes) -> None:
        self.groups: list[int] = []
        self.codecs: set[int] = set()
        self.chunks = 0
        self._reader = Reader(footer)
        self._walk({_ROW_GROUPS: self._each(self._group)})

    def _group(self) -> None:
        self.groups.append(0)
        self._walk({_COLUMNS: self._each(lambda: self._walk({_META_DATA: self._chunk}))})

    def _chunk(self) -> None:
        self.chunks += 1
        self._walk({_CODEC: self._codec, _UNCOMPRESSED_SIZE: self._size})

    def _codec(self) -> None:
        self.codecs.add(self._reader.integer())

    def _size(self) -> None:
        size = self._reader.integer()
        if size < 0:
            raise NotUsable(f"row group {len(self.groups) - 1} unpacks to {size} bytes")
        self.groups[-1] += size

    def _walk(self, wanted: Mapping[tuple[int, int], Callable[[], None]]) -> None:
        for field in self._reader.fields():
            wanted.get(field, partial(self._reader.skip, field[1]))()

    def _each(self, element: Callable[[], None]) -> Callable[[], None]:
        def walk() -> None:
            for kind in self._reader.elements():
                if kind != thrift.STRUCT:
                    raise thrift.Malformed("a list holds other things than it should")
                element()

        return walk


def _uncompressed(footer: bytes, groups: int, columns: int) -> int:
    try:
        sizes = _Sizes(footer)
    except thrift.Malformed as error:
        raise NotUsable(f"the footer cannot be read: {error}") from error
    if (len(sizes.groups), sizes.chunks) != (groups, groups * columns):
        raise NotUsable("its row groups do not have one chunk for each column")
    unread = sizes.codecs - _CODECS
    if unread:
        raise NotUsable(f"it is compressed with {', '.join(_CODEC_NAMES.get(one, str(one)) for one in sorted(unread))}")
    for number, unpacked in enumerate(sizes.groups):
        if unpacked > MAX_GROUP_BYTES:
            raise NotUsable(f"row group {number} unpacks to {unpacked} bytes; at most {MAX_GROUP_BYTES} are taken")
    return sum(sizes.groups)


def _type(field: object) -> str:
    name = str(field.type)  # type: ignore[attr-defined]
    return types.from_arrow(name) or name[:100]


def _line(error: Exception) -> str:
    lines = str(error).replace("\x00", "").splitlines()
    return lines[0][:200] if lines else type(error).__name__
