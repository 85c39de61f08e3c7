"""Which units become one when old ones are frozen: over, open, of one interval, and next to each other."""

from __future__ import annotations

from datetime import date, timedelta

from lockstep.idempotency.calendar import DAY, ISO_WEEK, MONTH
from lockstep.idempotency.cleaner import Unit, frozen_groups

MONDAY = date(2023, 11, 6)


def week(number: int, *, frozen: bool = False) -> Unit:
    starts = MONDAY + timedelta(weeks=number)
    return Unit(f"u{number}", starts, starts + timedelta(weeks=1), frozen)


def groups(*units: Unit, before: date = date(2024, 2, 1)) -> list[list[str]]:
    return [[unit.name for unit in group] for group in frozen_groups(units, before=before, into=MONTH)]


def test_weeks_are_gathered_by_the_month_of_their_first_day():
    assert groups(*(week(n) for n in range(5))) == [["u0", "u1", "u2", "u3"], ["u4"]]


def test_a_unit_under_way_and_a_frozen_one_stay_as_they_are():
    assert groups(week(0, frozen=True), week(1), week(2), before=MONDAY + timedelta(weeks=2)) == [["u1"]]


def test_units_with_a_gap_between_them_are_not_merged():
    """Guards the days of the gap: a merged unit says that it holds all days from its first to its last."""
    assert groups(week(0), week(2), week(3)) == [["u0"], ["u2", "u3"]]


def test_the_order_in_which_units_come_does_not_matter():
    days = [Unit(str(n), MONDAY + timedelta(days=n), MONDAY + timedelta(days=n + 1), False) for n in range(9)]
    found = frozen_groups(reversed(days), before=date(2024, 1, 1), into=ISO_WEEK)
    assert [len(group) for group in found] == [7, 2]
    assert [len(group) for group in frozen_groups(days, before=date(2024, 1, 1), into=DAY)] == [1] * 9
