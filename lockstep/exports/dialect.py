"""How rows become bytes: the query that fixes order and spelling, and the encoders of the formats.

What belongs here: everything that decides a file's bytes; docs/exports.md says it in words. What does not: where the
rows come from (source.py) and where the bytes go (sink.py). A change here that changes bytes is a new DIALECT.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Protocol

from psycopg import sql

from lockstep.exports.model import Format, FormulaGuard

DIALECT = 2
CSV_DIALECT: dict[str, Any] = {
    "encoding": "UTF-8",
    "byteOrderMark": False,
    "delimiter": ",",
    "quote": '"',
    "escape": '"',
    "lineEnd": "\n",
    "header": True,
    "null": "empty, not quoted",
    "emptyText": '""',
    "dates": "ISO 8601, UTC",
    "booleans": "t / f",
    "order": "all columns, from the first to the last, text by code point, NULL last",
}

_TEXT = frozenset({"text", "varchar", "bpchar", "name", "citext", "character varying", "character"})
_FORMULA = "^[=+\\-@\\t\\r]"
_WITHOUT_ORDER = frozenset({"json", "xml", "point"})


@dataclass(frozen=True)
class Column:
    """One column of the export function: its name, and its type as PostgreSQL spells it."""

    name: str
    type: str

    @property
    def is_text(self) -> bool:
        """Whether its order depends on a collation."""
        return self.type.partition("(")[0] in _TEXT


class Encoder(Protocol):
    """Turns what COPY sends into the bytes of a file. Constant memory: what it is given, it passes on."""

    def feed(self, data: bytes) -> bytes:
        """Bytes that are ready now; may be none."""
        ...

    def end(self) -> bytes:
        """The last bytes."""
        ...


def copy_statement(
    function: sql.Composable,
    columns: Sequence[Column],
    key: str,
    day: date,
    form: Format,
    guard: FormulaGuard,
) -> sql.Composed:
    """The one statement of a chunk. COPY takes no bound parameters, so the values are quoted as literals."""
    rows = sql.SQL("SELECT {columns} FROM {function}({key}, {day}) AS r ORDER BY {order}").format(
        columns=sql.SQL(", ").join(_selected(column, form, guard) for column in columns),
        function=function,
        key=sql.Literal(key),
        day=sql.SQL("{}::date").format(sql.Literal(day.isoformat())),
        order=sql.SQL(", ").join(_ordered(column, form, guard) for column in columns),
    )
    if form is Format.NDJSON:
        # JSON text has no raw control characters, so with these two as quote and delimiter nothing is ever quoted.
        rows = sql.SQL("SELECT row_to_json(t) FROM ({}) AS t").format(rows)
        return sql.SQL("COPY ({}) TO STDOUT WITH (FORMAT csv, QUOTE E'\\x01', DELIMITER E'\\x02')").format(rows)
    return sql.SQL("COPY ({}) TO STDOUT WITH (FORMAT csv, HEADER true, NULL '', ENCODING 'UTF8')").format(rows)


def encoder(form: Format, columns: Sequence[Column]) -> Encoder:
    """The encoder of a format."""
    if form is Format.CSV_GZ:
        return _Gzip()
    if form is Format.PARQUET:
        return _Parquet(columns)
    return _Plain()


def _selected(column: Column, form: Format, guard: FormulaGuard) -> sql.Composable:
    respelled = _respelled(column, form, guard)
    value = _comparable(column) if respelled is None else respelled
    return sql.SQL("{} AS {}").format(value, sql.Identifier(column.name))


def _ordered(column: Column, form: Format, guard: FormulaGuard) -> sql.Composable:
    if column.type in _WITHOUT_ORDER:
        return sql.SQL('{}::text COLLATE "C"').format(_value(column))
    # By the name of the output where that is the value itself: the server then computes it once. As an expression of
    # its own beside the output, a text column costs a third more of the whole statement.
    own_name = _respelled(column, form, guard) is None
    return sql.Identifier(column.name) if own_name else _comparable(column)


def _respelled(column: Column, form: Format, guard: FormulaGuard) -> sql.Composable | None:
    """What a file holds instead of the value, which then no longer tells the order; None for the value itself."""
    if guard is FormulaGuard.QUOTE and column.is_text:
        # A leading apostrophe keeps a spreadsheet from executing the cell.
        return sql.SQL("CASE WHEN {name} ~ {formula} THEN '''' || {name} ELSE {name} END").format(
            name=_value(column), formula=sql.Literal(_FORMULA)
        )
    if form is Format.PARQUET and column.type == "timestamp with time zone":
        spelled = "to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"
        return sql.SQL(spelled).format(_value(column))
    if form is Format.NDJSON and column.type == "json":
        # `json` keeps its text, line ends between tokens too; inside strings they are always escaped.
        return sql.SQL("translate({}::text, E'\\n\\r', '  ')::json").format(_value(column))
    return None


def _comparable(column: Column) -> sql.Composable:
    return sql.SQL('{} COLLATE "C"').format(_value(column)) if column.is_text else _value(column)


def _value(column: Column) -> sql.Composable:
    return sql.SQL("r.{}").format(sql.Identifier(column.name))


class _Plain:
    def feed(self, data: bytes) -> bytes:
        return data

    def end(self) -> bytes:
        return b""


class _Gzip:
    """zlib writes a gzip header without name and with time zero, so equal rows give equal bytes."""

    def __init__(self) -> None:
        self._zlib = zlib.compressobj(6, zlib.DEFLATED, 31)

    def feed(self, data: bytes) -> bytes:
        return self._zlib.compress(data)

    def end(self) -> bytes:
        return self._zlib.flush()


class _Parquet:
    """CSV in, Parquet out, by blocks: a block of whole lines becomes a row group."""

    _BLOCK = 8 << 20

    def __init__(self, columns: Sequence[Column]) -> None:
        import pyarrow as pa  # only this format pays for it
        from pyarrow import parquet

        self._schema = pa.schema([pa.field(column.name, _arrow_type(column.type)) for column in columns])
        self._out = _Collected()
        self._writer = parquet.ParquetWriter(self._out, self._schema, compression="zstd")
        self._rest: list[bytes] = []
        self._size = 0
        self._header_pending = True

    def feed(self, data: bytes) -> bytes:
        self._rest.append(data)
        self._size += len(data)
        return self._write() if self._size >= self._BLOCK else b""

    def end(self) -> bytes:
        ready = self._write()
        self._writer.close()
        return ready + self._out.take()

    def _write(self) -> bytes:
        # COPY sends whole rows, so a block ends where a row ends, also when a value has line ends in it.
        import pyarrow as pa
        from pyarrow import csv

        block = b"".join(self._rest)
        self._rest, self._size = [], 0
        names = None if self._header_pending else self._schema.names
        self._header_pending = False
        if not block:
            return self._out.take()
        table = csv.read_csv(
            pa.BufferReader(block),
            read_options=csv.ReadOptions(column_names=names, use_threads=False, block_size=max(len(block), 1)),
            # A NULL alone in its row is an empty line, which the reader would skip.
            parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            convert_options=csv.ConvertOptions(
                column_types=self._schema,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                true_values=["t"],
                false_values=["f"],
            ),
        )
        if table.num_rows:
            self._writer.write_table(table)
        return self._out.take()


class _Collected:
    """A file that forgets what was taken, so that the whole Parquet file is never in memory."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._position = 0

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._position += len(part)
        return len(part)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def take(self) -> bytes:
        ready = b"".join(self._parts)
        self._parts.clear()
        return ready


def _arrow_type(name: str) -> Any:
    import pyarrow as pa

    plain = {
        "smallint": pa.int16(),
        "integer": pa.int32(),
        "bigint": pa.int64(),
        "real": pa.float32(),
        "double precision": pa.float64(),
        "boolean": pa.bool_(),
        "date": pa.date32(),
        "timestamp without time zone": pa.timestamp("us"),
        "timestamp with time zone": pa.timestamp("us", tz="UTC"),
    }
    if name in plain:
        return plain[name]
    if name.startswith("numeric("):
        precision, _, scale = name.removeprefix("numeric(").removesuffix(")").partition(",")
        return pa.decimal128(int(precision), int(scale or 0)) if int(precision) <= 38 else pa.string()
    return pa.string()
