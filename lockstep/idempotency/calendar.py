"""Intervals for the metadata cleaner: which unit a day belongs to. Pure, and total over all days.

What belongs here: day, ISO week, month and custom grains, names from the start of an interval. What does not: tables.
Nothing here asks for a weekday or a week number: a unit is known by its first day, which no year end can confuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from typing import NamedTuple, Protocol

from lockstep.kernel.errors import InvalidInput


class Interval(NamedTuple):
    """Days from `starts` up to, but not including, `ends`."""

    starts: date
    ends: date

    def days(self) -> list[date]:
        """Every day, in order."""
        return [self.starts + timedelta(days=n) for n in range((self.ends - self.starts).days)]


class Grain(Protocol):
    """How days are gathered into units."""

    def interval(self, day: date) -> Interval:
        """The one interval that holds `day`."""
        ...


@dataclass(frozen=True)
class Every:
    """Intervals of `days` days, counted from `anchor` in both directions."""

    days: int
    anchor: date

    def __post_init__(self) -> None:
        if self.days < 1:
            raise InvalidInput(f"an interval of {self.days} days is none.")

    def interval(self, day: date) -> Interval:
        """The one interval that holds `day`."""
        starts = day - timedelta(days=(day - self.anchor).days % self.days)
        return Interval(starts, starts + timedelta(days=self.days))


@dataclass(frozen=True)
class Months:
    """Calendar months, or `months` of them at a time, counted from January."""

    months: int = 1

    def __post_init__(self) -> None:
        if self.months not in (1, 2, 3, 4, 6, 12):
            raise InvalidInput(f"{self.months} months do not fill a year evenly.")

    def interval(self, day: date) -> Interval:
        """The one interval that holds `day`."""
        first = (day.month - 1) // self.months * self.months
        return Interval(date(day.year, first + 1, 1), _first_of(day.year, first + self.months))


DAY = Every(1, date(1970, 1, 1))
ISO_WEEK = Every(7, date(1970, 1, 5))  # a Monday
MONTH = Months()
YEAR = Months(12)


def unit_name(dataset: str, interval: Interval) -> str:
    """`visits_20231106`: the dataset and the first day."""
    return f"{dataset}_{interval.starts:%Y%m%d}"


def is_first_partition(grain: Grain, day: date) -> bool:
    """Whether the run of this day begins a unit, and so decides that the unit is made anew."""
    return grain.interval(day).starts == day


def _first_of(year: int, month_from_zero: int) -> date:
    return date(year + month_from_zero // 12, month_from_zero % 12 + 1, 1)
