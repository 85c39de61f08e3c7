"""JSON from strangers: one meaning or none."""

from __future__ import annotations

import pytest

from lockstep.kernel import strict_json


def test_a_name_that_stands_twice_in_an_object_is_refused_and_named():
    """Guards against two readers of one body: whoever checked the first `items` must not export the second."""
    body = '{"items": [], "force": true, "items": [{"key": "A", "key": "B", "key": "C"}]}'
    with pytest.raises(strict_json.Unreadable, match="'items', 'key' more than once"):
        strict_json.read(body)
    assert strict_json.read('[{"key": "A"}, {"key": "B"}]') == [{"key": "A"}, {"key": "B"}], "in two objects it may"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        '{"a": 1}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b"[" * 200_000,
        b"9" * 5000,
    ],
    ids=["empty", "cut", "not UTF-8", "UTF-16", "byte order mark", "NaN", "deep", "endless number"],
)
def test_a_text_that_is_not_plain_json_in_utf_8_is_unreadable(raw: bytes):
    with pytest.raises(strict_json.Unreadable):
        strict_json.read(raw)
