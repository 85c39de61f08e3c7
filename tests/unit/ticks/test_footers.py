"""Footers of strangers: what is read of a good file, and how hostile ones are refused."""

from __future__ import annotations

import io
import os
import random
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.ticks import footers
from lockstep.ticks.model import Column
from tests.ticks_fixtures import parquet, people


def _read(body: bytes) -> footers.Footer:
    return footers.read_footer(io.BytesIO(body), len(body))


def test_a_footer_says_rows_columns_and_size():
    found = _read(people(7))
    assert (found.rows, found.row_groups) == (7, 1)
    assert found.columns == (Column("id", "bigint"), Column("name", "string"))
    assert found.uncompressed_bytes > 0


def test_types_are_named_as_spark_names_them():
    body = parquet(
        {
            "a": pa.array([1], pa.int32()),
            "b": pa.array([None], pa.null()),
            "c": pa.array([1], pa.timestamp("us", tz="UTC")),
            "d": pa.array([1], pa.timestamp("ms")),
            "e": pa.array(["x"]).dictionary_encode(),
            "f": pa.array([1], pa.decimal128(10, 2)),
            "g": pa.array([1.0], pa.float32()),
            "h": pa.array([[1]]),
            "i": pa.array([1], pa.timestamp("ns")),
        }
    )
    found = dict(_read(body).columns)
    good = {"a": "int", "b": "null", "c": "timestamp", "d": "timestamp_ntz", "e": "string", "f": "decimal(10,2)"}
    assert {name: found[name] for name in good} == good
    assert found["g"] == "float"
    assert found["h"].startswith("list")
    assert found["i"] == "timestamp[ns]"


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"PAR1",
        b"PAR1" + b"\x00" * 100 + b"PAR1",
        b"PAR1" + (2**31).to_bytes(4, "little") + b"PAR1",
        b"PAR1" + os.urandom(200) + (150).to_bytes(4, "little") + b"PAR1",
        people(5)[:-9],
        people(5)[:40] + b"PAR1",
        b"PARE" + b"\x00" * 20 + b"PARE",
    ],
)
def test_what_is_no_parquet_is_refused_in_words(body: bytes):
    with pytest.raises(footers.NotUsable) as caught:
        _read(body)
    assert caught.value.what


def test_a_row_group_that_unpacks_to_gigabytes_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Guards memory: the bytes on the wire are few, what they become is not."""
    body = parquet({"a": [os.urandom(1000).hex() * 50] * 20}, compression="zstd", use_dictionary=False)
    monkeypatch.setattr(footers, "MAX_GROUP_BYTES", 1_000_000)
    with pytest.raises(footers.NotUsable, match="unpacks"):
        _read(body)


def test_a_codec_that_spark_cannot_read_is_refused():
    with pytest.raises(footers.NotUsable, match="BROTLI"):
        _read(parquet({"a": [1]}, compression="brotli"))


def test_a_column_whose_name_cannot_be_kept_is_refused():
    """Guards the PUT: the footer is kept in PostgreSQL, which takes no NUL, so the part could never be recorded."""
    for body in (parquet({"a\x00b": [1]}), parquet({"s": pa.array([{"x\x00y": 1}])})):
        with pytest.raises(footers.NotUsable, match="NUL"):
            _read(body)


def test_sizes_are_those_that_the_writer_knows():
    """Guards the reading of the footer's own bytes against the library that wrote them."""
    for options in ({"row_group_size": 3}, {"compression": "gzip"}, {"use_dictionary": False, "version": "1.0"}):
        body = parquet({"id": range(10), "blob": [os.urandom(50) for _ in range(10)], "s": ["x"] * 10}, **options)
        known = pq.read_metadata(io.BytesIO(body))
        sizes = [
            known.row_group(group).column(one).total_uncompressed_size
            for group in range(known.num_row_groups)
            for one in range(known.num_columns)
        ]
        assert _read(body).uncompressed_bytes == sum(sizes)
    assert _read(people(0)).uncompressed_bytes >= 0


def test_no_footer_ends_the_process():
    """Guards the replica: pyarrow meets some odd bytes outside any handler, and takes all requests down with it."""
    good, dice = [people(20), parquet({"a": pa.array([1, 2], pa.decimal128(10, 2)), "s": ["x", "y"]})], random.Random(7)
    for _ in range(3000):
        body = bytearray(dice.choice(good))
        first = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
        for _ in range(dice.randint(1, 4)):
            body[dice.randrange(first, len(body) - 8)] = dice.randrange(256)
        with suppress(footers.NotUsable):
            assert 0 <= _read(bytes(body)).uncompressed_bytes < 2**63
