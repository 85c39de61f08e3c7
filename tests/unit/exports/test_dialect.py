"""How rows become bytes, where no database is needed to see it."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow.parquet as pq
import pytest

from lockstep.exports.dialect import Column, encoder
from lockstep.exports.model import Format


def _parquet(columns: Sequence[Column], *pieces: bytes) -> list[dict[str, object]]:
    encode = encoder(Format.PARQUET, columns)
    data = b"".join([*(encode.feed(piece) for piece in pieces), encode.end()])
    rows: list[dict[str, object]] = pq.read_table(io.BytesIO(data)).to_pylist()
    return rows


@pytest.mark.parametrize("block", [1, 1 << 20], ids=["a block a piece", "one block"])
def test_a_null_alone_in_its_row_stays_a_row_in_parquet(monkeypatch: pytest.MonkeyPatch, block: int):
    """Guards the row count: COPY writes such a row as an empty line, and a reader of CSV may skip empty lines."""
    monkeypatch.setattr("lockstep.exports.dialect._Parquet._BLOCK", block)
    rows = _parquet([Column("a", "text")], b"a\n", b"\nx\n", b'""\n', b"\n")
    assert [row["a"] for row in rows] == [None, "x", "", None]


def test_a_chunk_without_rows_is_a_parquet_file_with_its_columns():
    assert _parquet([Column("a", "text"), Column("b", "integer")], b"a,b\n") == []
