"""SQL text for Delta: names, values and stamps that cannot be read as anything else."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.idempotency import delta
from lockstep.kernel.errors import InvalidInput


def test_an_address_cannot_leave_its_backticks():
    assert delta.quoted("s3a://b/x`; DROP TABLE y") == "delta.`s3a://b/x``; DROP TABLE y`"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        (True, "TRUE"),
        (7, "7"),
        (Decimal("1.50"), "1.50"),
        ("it's", r"'it\'s'"),
        ("a\\b", r"'a\\b'"),
        (date(2026, 3, 1), "DATE '2026-03-01'"),
        (datetime(2026, 3, 1, tzinfo=UTC), "TIMESTAMP '2026-03-01 00:00:00.000000+00:00'"),
    ],
)
def test_values_become_literals_of_one_meaning(value: object, text: str):
    assert delta.literal(value) == text


@pytest.mark.parametrize("value", [1.5, datetime(2026, 3, 1), b"x", "a\x00b", object()])  # noqa: DTZ001
def test_a_value_of_doubtful_meaning_is_refused(value: object):
    with pytest.raises(InvalidInput):
        delta.literal(value)


def test_a_null_partition_is_asked_for_with_is_null():
    """Guards the silent no-op: `p = NULL` matches no row at all."""
    assert delta.equality({"day": None, "org": "a"}) == "`day` IS NULL AND `org` = 'a'"


@pytest.mark.parametrize("text", [None, "", "hello", "[1]", '{"other": 1}', '"lockstep"'])
def test_foreign_metadata_is_never_taken_for_ours(text: str | None):
    assert delta.read_stamp(text) is None


@given(st.dictionaries(st.text(min_size=1).filter(lambda k: k not in {"lockstep", "pattern"}), st.text()))
def test_a_stamp_reads_back_as_it_was_written(fields: dict[str, str]):
    assert delta.read_stamp(delta.stamp("merge", **fields)) == {"lockstep": "merge", **fields}
