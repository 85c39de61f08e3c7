"""Listings as the vendor sends them: out of order, twice, with errors, and never a reason to skip a window."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.windows.listing import contiguous_until, find_gaps, read_listing
from lockstep.windows.model import Window

# The vendor's own example: a window without records and one that failed.
VENDOR: list[dict[str, Any]] = [
    {
        "name": "1000020-20250513-1330-N",
        "filename": "1000020-20250513-1330-N.tar.gz",
        "extract_type": "incremental_directdata",
        "start_time": "2025-05-13T13:15Z",
        "stop_time": "2025-05-13T13:30Z",
        "record_count": 0,
        "size": 47567,
        "fileparts": 1,
        "filepart_details": [
            {
                "name": "1000020-20250513-1330-N.001",
                "filename": "1000020-20250513-1330-N.tar.gz.001",
                "filepart": 1,
                "size": 47567,
                "md5checksum": "fa7d8bcff8ae95f9f511d4e88dba852e",
            }
        ],
    },
    {
        "name": "1000020-20250513-1345-N",
        "error": {"next_retry": "2025-05-13T14:15Z", "message": "Failed to publish incremental_directdata file."},
    },
]
T0 = datetime(2025, 5, 13, 13, 15, tzinfo=UTC)


def _entry(number: int) -> dict[str, Any]:
    stop = T0 + timedelta(minutes=15 * (number + 1))
    name = f"1000020-{stop:%Y%m%d-%H%M}-N"
    part = {**VENDOR[0]["filepart_details"][0], "name": f"{name}.001"}
    times = {"start_time": f"{stop - timedelta(minutes=15):%Y-%m-%dT%H:%MZ}", "stop_time": f"{stop:%Y-%m-%dT%H:%MZ}"}
    return {**VENDOR[0], **times, "name": name, "filepart_details": [part]}


def _window(number: int) -> Window:
    return Window("v", T0 + timedelta(minutes=15 * number), T0 + timedelta(minutes=15 * (number + 1)))


def test_the_vendors_own_example_is_understood():
    listing = read_listing("1000020", VENDOR)
    assert [one.window.stoptime for one in listing.published] == ["202505131330"]
    assert listing.published[0].record_count == 0
    late = listing.missing[0]
    assert (late.stop, late.next_retry) == (
        datetime(2025, 5, 13, 13, 45, tzinfo=UTC),
        datetime(2025, 5, 13, 14, 15, tzinfo=UTC),
    )


def test_order_and_duplicates_do_not_matter():
    entries = [_entry(number) for number in range(9)]
    shuffled = [*entries, *entries]
    random.Random(1).shuffle(shuffled)
    assert read_listing("1000020", shuffled) == read_listing("1000020", entries)


def test_a_window_that_is_listed_both_ways_can_be_fetched():
    """Guards against waiting for a window that is there."""
    both = [{"name": _entry(0)["name"], "error": {}}, _entry(0), {"name": _entry(0)["name"], "error": {}}]
    listing = read_listing("1000020", both)
    assert (len(listing.published), listing.missing) == (1, ())


def test_the_window_is_taken_from_its_times_and_not_from_its_name():
    """Guards midnight: the date of the name may be the day of publication."""
    odd = {
        **_entry(0),
        "name": "1000020-20250514-0000-N",
        "start_time": "2025-05-13T23:30Z",
        "stop_time": "2025-05-13T23:45Z",
    }
    assert read_listing("1000020", [odd]).published[0].window.stoptime == "202505132345"


@pytest.mark.parametrize(
    "change",
    [
        {"filepart_details": []},
        {"fileparts": 2},
        {"start_time": "yesterday"},
        {"stop_time": None},
        {"start_time": "2025-05-13T13:30Z"},
        {"record_count": "some"},
        {"filepart_details": [{"name": "../../etc/passwd", "filepart": 1, "size": 1}]},
        {"filepart_details": [{"name": "x.001", "filepart": 1, "size": -1}]},
    ],
)
def test_an_entry_that_cannot_be_read_is_missing_and_not_skipped(change: dict[str, Any]):
    """Guards against a silent hole made by a typing error of the vendor."""
    listing = read_listing("1000020", [{**VENDOR[0], **change}, _entry(1)])
    assert [one.name for one in listing.missing] == [VENDOR[0]["name"]]
    assert len(listing.published) == 1


@pytest.mark.parametrize(
    "entry", [{}, None, "x", {"name": "x"}, {"name": "2-20250513-1330-N"}, {"name": "1000020-20251313-1330-N"}]
)
def test_an_entry_without_a_name_of_this_vault_stops_the_pass(entry: Any):
    with pytest.raises(InvalidInput):
        read_listing("1000020", [entry])


def test_the_chain_ends_before_the_first_hole():
    windows = [_window(number) for number in (0, 1, 3, 4)]
    assert contiguous_until(windows) == _window(1).stop
    assert contiguous_until(list(reversed(windows)), T0) == _window(1).stop
    assert contiguous_until(windows, T0 - timedelta(hours=1)) == T0 - timedelta(hours=1)
    assert contiguous_until([]) is None


def test_a_hole_that_nobody_announces_is_a_gap():
    """Guards the chain after ten days, when the vendor has forgotten a window that we never had."""
    gaps = find_gaps("v", None, [_window(0), _window(3)], [])
    assert [(gap.start, gap.stop) for gap in gaps] == [(_window(0).stop, _window(3).start)]


def test_an_announced_window_is_one_gap_with_the_vendors_words():
    missing = read_listing("1000020", [{"name": _entry(1)["name"], "error": {"message": "busy"}}]).missing
    gaps = find_gaps("v", T0, [_window(0), _window(2)], missing)
    assert [(gap.start, gap.stop) for gap in gaps] == [(_window(1).start, _window(1).stop)]
    assert "busy" in gaps[0].reason


def test_what_lies_behind_the_watermark_is_no_gap():
    assert find_gaps("v", _window(5).stop, [_window(0), _window(3), _window(6)], []) == []


def test_the_stretch_between_the_watermark_and_the_first_window_is_a_gap():
    gaps = find_gaps("v", T0, [_window(2)], [])
    assert [(gap.start, gap.stop) for gap in gaps] == [(T0, _window(2).start)]
