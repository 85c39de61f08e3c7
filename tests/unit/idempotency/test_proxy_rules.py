"""When a name may move: never back in time by itself, and never over a person's roll back."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.idempotency.proxy import Decision, Version, decide, kept_versions, logical, previous
from lockstep.kernel.errors import InvalidInput

OLD, MID, NEW = (Version(name, f"2026-0{n}-01") for n, name in enumerate(("old", "mid", "new"), start=1))


@pytest.mark.parametrize(
    ("wanted", "moves", "told", "decision"),
    [
        (OLD, [], False, Decision.MOVE),
        (NEW, [OLD], False, Decision.MOVE),
        (NEW, [NEW, OLD], False, Decision.STAY),
        (OLD, [NEW], False, Decision.OLDER),
        (OLD, [NEW], True, Decision.MOVE),
        (NEW, [OLD, NEW, OLD], False, Decision.SUPERSEDED),
        (NEW, [OLD, NEW, OLD], True, Decision.MOVE),
        (Version("again", OLD.logical_date), [OLD], False, Decision.MOVE),
        (OLD._replace(number=1), [Version("corrected", OLD.logical_date, number=2)], False, Decision.SUPERSEDED),
        (OLD._replace(number=1), [Version("corrected", OLD.logical_date, number=2)], True, Decision.MOVE),
        (NEW._replace(number=1), [Version("corrected", OLD.logical_date, number=2)], False, Decision.MOVE),
    ],
)
def test_the_rule_of_moving(wanted: Version, moves: list[Version], told: bool, decision: Decision):
    assert decide(wanted, moves, told=told) is decision


def test_rolling_back_finds_the_last_other_version_that_still_exists():
    gone = MID._replace(dropped=True)
    assert previous([NEW, gone, NEW, OLD]) == OLD
    assert previous([NEW, gone, OLD]) == OLD
    assert previous([NEW, NEW]) is None
    assert previous([]) is None


def test_a_second_roll_back_goes_one_further_and_not_to_what_was_rolled_back():
    """Guards readers of a bad version: swapping the last two would show it again."""
    assert previous([MID, NEW, MID, OLD]) == OLD
    assert previous([OLD, MID, NEW, MID, OLD]) is None
    assert previous([NEW, OLD, MID, NEW, MID, OLD]) == OLD  # told to show the new one again after all


def test_the_current_version_the_last_others_and_the_way_back_are_kept():
    assert kept_versions([NEW, OLD, NEW, MID], 1) == ["new", "old", "mid"]
    assert kept_versions([MID, NEW, MID, OLD], 0) == ["mid"]
    assert kept_versions([], 3) == []


def test_fewer_than_none_are_never_kept():
    """Guards the current version: a negative number would count from the end and leave it among those that go."""
    with pytest.raises(InvalidInput, match="cannot be kept"):
        kept_versions([NEW, OLD], -1)


@given(st.lists(st.datetimes(timezones=st.just(UTC)), min_size=2, max_size=2))
def test_logical_dates_sort_as_text_as_they_do_in_time(moments: list[datetime]):
    first, second = moments
    assert (logical(first) < logical(second)) == (first < second)


def test_a_date_is_midnight_utc_and_a_naive_time_is_refused():
    east = timezone(timedelta(hours=2))
    assert logical(date(2026, 3, 1)) == logical(datetime(2026, 3, 1, 2, tzinfo=east))
    with pytest.raises(InvalidInput):
        logical(datetime(2026, 3, 1))  # noqa: DTZ001
