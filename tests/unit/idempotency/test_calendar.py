"""Units by interval start: every day has one unit, and no unit is begun twice, also around every year end."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.idempotency.calendar import (
    DAY,
    ISO_WEEK,
    MONTH,
    YEAR,
    Every,
    Grain,
    Months,
    is_first_partition,
    unit_name,
)
from lockstep.kernel.errors import InvalidInput

GRAINS = [DAY, ISO_WEEK, MONTH, YEAR, Months(3), Every(10, date(2024, 2, 29))]
DAYS = st.dates(date(1990, 1, 1), date(2090, 1, 1))


def all_days(first: date, last: date) -> list[date]:
    return [first + timedelta(days=n) for n in range((last - first).days + 1)]


@given(st.sampled_from(GRAINS), DAYS)
def test_every_day_has_one_unit_and_its_neighbours_tile(grain: Grain, day: date):
    interval = grain.interval(day)
    assert interval.starts <= day < interval.ends
    assert {grain.interval(one) for one in interval.days()} == {interval}
    assert grain.interval(interval.ends).starts == interval.ends


@pytest.mark.parametrize("grain", GRAINS)
def test_no_day_of_the_years_2022_to_2030_is_dropped_by_a_later_run(grain: Grain):
    """Guards the chapter's loss of 30 days: a unit is begun once, before any of its days is loaded."""
    kept: dict[str, set[date]] = {}
    days = [day for day in all_days(date(2021, 12, 1), date(2031, 1, 31)) if day >= grain.interval(day).starts]
    for day in days:
        name = unit_name("visits", grain.interval(day))
        if is_first_partition(grain, day):
            assert name not in kept
            kept[name] = set()
        kept.setdefault(name, set()).add(day)
    assert set().union(*kept.values()) == set(days)


def test_the_chapters_rule_loses_what_ours_keeps():
    """The mutation: names by ISO week and calendar year, made anew on Mondays and on 1 January, drop 30 days."""
    kept: dict[str, set[date]] = {}
    days = all_days(date(2022, 1, 1), date(2030, 12, 31))
    for day in days:
        name = f"{day.year}-{day.isocalendar().week}"
        if day.isoweekday() == 1 or (day.month, day.day) == (1, 1):
            kept[name] = set()
        kept.setdefault(name, set()).add(day)
    assert len(set(days) - set().union(*kept.values())) == 30


def test_a_week_is_named_by_its_monday():
    assert unit_name("visits", ISO_WEEK.interval(date(2023, 11, 9))) == "visits_20231106"
    assert unit_name("visits", ISO_WEEK.interval(date(2025, 1, 1))) == "visits_20241230"


@pytest.mark.parametrize("make", [lambda: Every(0, date(2024, 1, 1)), lambda: Months(5)])
def test_a_grain_that_cannot_tile_is_refused(make: object):
    with pytest.raises(InvalidInput):
        make()  # type: ignore[operator]
