"""What a Parquet file says about itself, read from its footer with bounds on everything that a stranger may choose.

What belongs here: opening a footer and judging it as a file. What does not: comparing it with a manifest (rules.py).
"""

from __future__ import annotations

from typing import BinaryIO

from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import types
from lockstep.ticks.model import Column, Footer

MAX_FOOTER_BYTES = 8 * 1024 * 1024
MAX_ROW_GROUPS = 10_000
MAX_GROUP_BYTES = 512 * 1024 * 1024
MAX_COLUMNS = 2_000
_MAGIC = b"PAR1"
_SMALLEST = 12
_CODECS = frozenset({"UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "LZ4", "LZ4_RAW"})  # what Spark reads without more jars
_THRIFT_LIMIT = 1_000_000


class NotUsable(InvalidInput):
    """The bytes are no Parquet file that bronze takes; `what` is one line for the agent."""


def read_footer(file: BinaryIO, size: int) -> Footer:
    """Read the footer of an open file. Raises `NotUsable`; data pages are not touched."""
    _check_frame(file, size)
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
        uncompressed_bytes=_uncompressed(metadata),
        row_groups=metadata.num_row_groups,
        columns=columns,
    )


def _check_frame(file: BinaryIO, size: int) -> None:
    file.seek(0)
    head = file.read(4)
    file.seek(max(0, size - 8))
    tail = file.read(8)
    if size < _SMALLEST or head != _MAGIC or tail[4:] != _MAGIC:
        raise NotUsable("it is no Parquet file, or it is encrypted or cut off")
    length = int.from_bytes(tail[:4], "little")
    if not 0 < length <= min(size - _SMALLEST, MAX_FOOTER_BYTES):
        raise NotUsable(f"its footer claims {length} bytes")


def _uncompressed(metadata: object) -> int:
    total = 0
    for number in range(metadata.num_row_groups):  # type: ignore[attr-defined]
        group = metadata.row_group(number)  # type: ignore[attr-defined]
        chunks = [group.column(one) for one in range(group.num_columns)]
        unread = {str(chunk.compression) for chunk in chunks} - _CODECS
        if unread:
            raise NotUsable(f"it is compressed with {', '.join(sorted(unread))}")
        unpacked = sum(int(chunk.total_uncompressed_size) for chunk in chunks)
        if unpacked > MAX_GROUP_BYTES or any(int(chunk.total_uncompressed_size) < 0 for chunk in chunks):
            raise NotUsable(f"row group {number} unpacks to {unpacked} bytes; at most {MAX_GROUP_BYTES} are taken")
        total += unpacked
    return total


def _type(field: object) -> str:
    name = str(field.type)  # type: ignore[attr-defined]
    return types.from_arrow(name) or name[:100]


def _line(error: Exception) -> str:
    lines = str(error).replace("\x00", "").splitlines()
    return lines[0][:200] if lines else type(error).__name__
