"""Calendar arithmetic: midnight, both clock changes, leap days, exclusions by execution date."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.readiness import timing
from lockstep.readiness.model import ExclusionPlan, Key, SchedulePlan, SlaPlan
from tests.unit.readiness.builders import plan

NEW_YORK = "America/New_York"


def _utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)


def test_a_run_of_the_last_hour_keeps_its_own_date_after_midnight():
    """Guards trap 4: at 00:01 "today" is a different day from the one that the 23:00 schedule is for."""
    late = plan(schedules=(SchedulePlan("h23", "23:00", timezone="UTC"),))
    assert list(timing.due_keys(late, _utc(2026, 3, 11, 0, 1))) == [Key("sales", date(2026, 3, 10), "h23")]


def test_the_execution_date_is_that_of_the_schedules_own_time_zone():
    tokyo = plan(schedules=(SchedulePlan("daily", "00:30", timezone="Asia/Tokyo"),))
    due = list(timing.due_keys(tokyo, _utc(2026, 3, 10, 16, 0)))
    assert due[-1].date == date(2026, 3, 11)


def test_an_hour_that_the_spring_change_skips_still_activates_once():
    """Guards against a schedule at 02:30 that never comes on the day of the change."""
    gap = SchedulePlan("daily", "02:30", timezone=NEW_YORK)
    assert timing.activation(gap, date(2026, 3, 8)) == _utc(2026, 3, 8, 7, 30)
    assert timing.activation(gap, date(2026, 3, 9)) == _utc(2026, 3, 9, 6, 30)


def test_an_hour_that_the_autumn_change_repeats_activates_at_its_first_occurrence():
    twice = SchedulePlan("daily", "01:30", timezone=NEW_YORK)
    assert timing.activation(twice, date(2026, 11, 1)) == _utc(2026, 11, 1, 5, 30)
    due = timing.due_keys(plan(schedules=(twice,)), _utc(2026, 11, 1, 6, 30))
    assert [key.date for key in due] == [date(2026, 10, 31), date(2026, 11, 1)]


@pytest.mark.parametrize("day", [date(2026, 3, 8), date(2026, 11, 1), date(2028, 2, 29), date(2026, 12, 31)])
def test_every_hour_of_a_changed_day_is_due_exactly_once(day: date):
    """Guards hourly pipelines on days of 23 and 25 hours, on leap days and at the end of a year."""
    hourly = plan(
        schedules=tuple(SchedulePlan(f"h{hour:02}", f"{hour:02}:00", timezone=NEW_YORK) for hour in range(24))
    )
    now = timing.local_instant(day, timing.ClockTime(23, 59), NEW_YORK)
    due = [key.schedule for key in timing.due_keys(hourly, now, lookback_days=0)]
    assert due == [f"h{hour:02}" for hour in range(24)]


def test_a_leap_day_is_a_date_like_any_other():
    schedule = SchedulePlan("daily", "06:00", deadline="09:00", timezone="Europe/Zurich")
    promised = timing.deadlines(plan(), schedule, date(2028, 2, 29))
    assert promised.evaluation == _utc(2028, 2, 29, 8, 0)


def test_a_deadline_before_the_activation_belongs_to_the_next_day():
    schedule = SchedulePlan("h23", "23:00", deadline="02:00")
    assert timing.deadlines(plan(), schedule, date(2026, 3, 10)).completion == _utc(2026, 3, 11, 2, 0)


def test_a_duration_counts_from_the_activation_and_not_from_midnight():
    """Guards trap 7: 45m means 45 minutes after it could begin, not 00:45."""
    schedule = SchedulePlan("daily", "06:00")
    promised = timing.deadlines(plan(sla=SlaPlan(completion="45m")), schedule, date(2026, 3, 10))
    assert promised.completion == _utc(2026, 3, 10, 6, 45)


def test_a_deadline_may_be_days_later():
    promised = timing.deadlines(plan(sla=SlaPlan(completion="02:00+2")), SchedulePlan(), date(2026, 3, 10))
    assert promised.completion == _utc(2026, 3, 12, 2, 0)


def test_exclusions_look_at_the_execution_date_and_not_at_today():
    """Guards trap 14 and reruns of past days: Friday's run looked at on Saturday is not a weekend run."""
    weekdays = plan(
        exclusions=ExclusionPlan(days=frozenset({5, 6}), dates=frozenset({date(2026, 3, 12)})),
        schedules=(SchedulePlan("h23", "23:00"),),
    )
    friday_night = _utc(2026, 3, 14, 0, 5)  # Saturday
    assert [key.date for key in timing.due_keys(weekdays, friday_night, 3)] == [date(2026, 3, 11), date(2026, 3, 13)]


def test_the_next_activation_skips_excluded_dates_and_gives_up_when_all_are():
    weekend = plan(exclusions=ExclusionPlan(days=frozenset({5, 6})))
    found = timing.next_activation(weekend, SchedulePlan(), _utc(2026, 3, 13, 12, 0))
    assert found == Key("sales", date(2026, 3, 16), "daily")
    never = plan(exclusions=ExclusionPlan(days=frozenset(range(7))))
    assert timing.next_activation(never, SchedulePlan(), _utc(2026, 3, 13, 12, 0)) is None


@given(
    day=st.dates(date(2024, 1, 1), date(2030, 12, 31)),
    hour=st.integers(0, 23),
    minute=st.integers(0, 59),
    name=st.sampled_from(["UTC", NEW_YORK, "Europe/Zurich", "Asia/Kolkata", "Australia/Lord_Howe"]),
)
def test_every_date_becomes_active_exactly_once_and_in_order(day: date, hour: int, minute: int, name: str):
    schedule = SchedulePlan("daily", f"{hour:02}:{minute:02}", timezone=name)
    here, there = timing.activation(schedule, day), timing.activation(schedule, day + timedelta(days=1))
    assert here < there
    due = [key.date for key in timing.due_keys(plan(schedules=(schedule,)), here, 0)]
    assert due == [day]


@pytest.mark.parametrize("text", ["", "45", "1h60x", "-5m", "0m", "24:00", "9:00", "400d"])
def test_what_is_no_time_is_refused_and_never_guessed(text: str):
    """Guards trap 13: an unreadable time must not mean "always"."""
    assert timing.parse_duration(text) is None
    assert timing.parse_clock(text) is None


def test_a_schedule_may_begin_the_day_after_its_date():
    """Guards pipelines of a whole day: their date is the day of the data, and their time comes when it is over."""
    nightly = SchedulePlan("daily", "00:20+1", timezone="Europe/Zurich")
    the_plan = plan(schedules=(nightly,), sla=SlaPlan(completion="03:00", timezone="Europe/Zurich"))
    assert timing.activation(nightly, date(2026, 3, 10)) == _utc(2026, 3, 10, 23, 20)
    assert [key.date.day for key in timing.due_keys(the_plan, _utc(2026, 3, 10, 23, 19))] == [9]
    assert [key.date.day for key in timing.due_keys(the_plan, _utc(2026, 3, 10, 23, 20))] == [9, 10]
    assert timing.deadlines(the_plan, nightly, date(2026, 3, 10)).completion == _utc(2026, 3, 11, 2, 0)
    assert timing.current_key(the_plan, [nightly], _utc(2026, 3, 11, 12)) == Key("sales", date(2026, 3, 10), "daily")
    assert timing.next_activation(the_plan, nightly, _utc(2026, 3, 11, 12)).date == date(2026, 3, 11)


def test_of_several_schedules_the_one_that_became_active_last_is_the_current_one():
    both = plan(schedules=(SchedulePlan("morning", "06:00"), SchedulePlan("evening", "18:00")))
    assert timing.current_key(both, both.schedules, _utc(2026, 3, 10, 7)) == Key("sales", date(2026, 3, 10), "morning")
    assert timing.current_key(both, both.schedules, _utc(2026, 3, 10, 5)) == Key("sales", date(2026, 3, 9), "evening")
