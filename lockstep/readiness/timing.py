"""Calendar arithmetic: when an execution date becomes active, when its deadlines are, which dates are due.

Pure: instants and dates are arguments, and "today" is only ever computed from an instant in a named time zone. What
does not belong here: what happens at those moments (rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from lockstep.kernel.errors import InvalidInput
from lockstep.readiness.model import NO_DEADLINES, Deadlines, Key, Plan, SchedulePlan

_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)(?:\+([1-9]))?", re.ASCII)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_LONGEST = timedelta(days=366)


class ClockTime(NamedTuple):
    """A local time of day, `days` after the execution date."""

    hour: int
    minute: int
    days: int = 0


def parse_clock(text: str) -> ClockTime | None:
    """`HH:MM` or `HH:MM+N`; None if it is not one."""
    match = _CLOCK.fullmatch(text)
    return ClockTime(int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def parse_duration(text: str) -> timedelta | None:
    """`45m`, `1h30m`, `2d`, `90s`; None if it is not one, or nothing, or longer than a year."""
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return length if timedelta(0) < length <= _LONGEST else None


@lru_cache(maxsize=64)
def zone(name: str) -> ZoneInfo:
    """The time zone, or `InvalidInput`."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InvalidInput(f"{name!r} is not a time zone.", next_step="use a name such as Europe/Zurich.") from None


def local_instant(day: date, clock: ClockTime, timezone: str) -> datetime:
    """The instant of a local time of day, in UTC.

    A time that the spring change skips is taken as far after the gap as it lies inside it; a time that the autumn
    change repeats is its first occurrence. So the order of `after` and `deadline` on one day never turns round.
    """
    local = datetime.combine(day + timedelta(days=clock.days), time(clock.hour, clock.minute), zone(timezone))
    return local.astimezone(UTC)


@lru_cache(maxsize=65536)
def activation(schedule: SchedulePlan, day: date) -> datetime:
    """When the execution of `day` becomes active."""
    return local_instant(day, _clock_of(schedule), schedule.timezone)


def _clock_of(schedule: SchedulePlan) -> ClockTime:
    clock = parse_clock(schedule.after)
    if clock is None:  # refused when the configuration is loaded; never fail open
        raise InvalidInput(f"after: {schedule.after!r} is not HH:MM or HH:MM+N.", unit=schedule.name)
    return clock


def deadline_instant(text: str, day: date, active_at: datetime, timezone: str) -> datetime:
    """The instant of a deadline: a local time on the execution date, or a duration after activation.

    A time of day is the first one after the activation: `after 23:00, deadline 02:00` is a window of three hours, not
    one that was missed before it began. With +N it is that many days after the execution date.
    """
    if (length := parse_duration(text)) is not None:
        return active_at + length
    clock = parse_clock(text)
    if clock is None:
        raise InvalidInput(f"{text!r} is neither HH:MM nor a duration.")
    if clock.days:
        return local_instant(day, clock, timezone)
    begins = local_date(active_at, timezone)
    instant = local_instant(begins, clock, timezone)
    return instant if instant > active_at else local_instant(begins, clock._replace(days=1), timezone)


def deadlines(plan: Plan, schedule: SchedulePlan, day: date) -> Deadlines:
    """The SLA of one execution. The schedule's own deadline goes before those of the pipeline."""
    start, sla, lead = activation(schedule, day), plan.sla, plan.sla.at_risk_lead

    def instant(own: str | None) -> datetime | None:
        if schedule.deadline is not None:
            return deadline_instant(schedule.deadline, day, start, schedule.timezone)
        return None if own is None else deadline_instant(own, day, start, sla.timezone)

    evaluation, completion = instant(sla.evaluation), instant(sla.completion)
    if evaluation is None and completion is None:
        return NO_DEADLINES
    return Deadlines(
        evaluation,
        evaluation - lead if evaluation and lead else None,
        completion,
        completion - lead if completion and lead else None,
    )


def local_date(now: datetime, timezone: str) -> date:
    """The date that people in `timezone` have at this instant."""
    return now.astimezone(zone(timezone)).date()


def due_keys(
    plan: Plan, now: datetime, lookback_days: int = 1, since: Mapping[str, datetime] | None = None
) -> Iterator[Key]:
    """Every execution that the schedules want at this instant: active, not excluded, not older than the lookback.

    The date is the schedule's own; a run of 23:00 that is looked at after midnight keeps yesterday's date. `since`
    has the instant from which on each schedule counts (see `first_starts`).
    """
    lookback = max(lookback_days, plan.catch_up.days + 1 if plan.catch_up else 0)
    for schedule in plan.schedules:
        newest = local_date(now, schedule.timezone) - timedelta(days=_clock_of(schedule).days)
        begin = since.get(schedule.name) if since else None
        for back in range(lookback, -1, -1):
            day = newest - timedelta(days=back)
            if plan.exclusions.excludes(day):
                continue
            active = activation(schedule, day)
            if active <= now and (begin is None or active >= begin):
                yield Key(plan.pipeline, day, schedule.name)


def first_starts(plan: Plan, now: datetime) -> dict[str, datetime]:
    """From when on each schedule of a newly deployed pipeline counts.

    The execution whose time it is now, and all that follow: a deployment at 10:20 opens this hour and not the whole
    day before it. A pipeline that asks for catch-up begins that much earlier; one that asks for none, with the next.
    """
    if plan.catch_up is not None:
        return {schedule.name: now - plan.catch_up for schedule in plan.schedules}
    latest = {schedule.name: activation(schedule, latest_date(schedule, now)) for schedule in plan.schedules}
    current = max(latest.values())
    return {name: moment if moment == current else now for name, moment in latest.items()}


def latest_date(schedule: SchedulePlan, now: datetime) -> date:
    """The date whose execution became active last, excluded or not."""
    newest = local_date(now, schedule.timezone) - timedelta(days=_clock_of(schedule).days)
    return newest if activation(schedule, newest) <= now else newest - timedelta(days=1)


def current_key(plan: Plan, schedules: Iterable[SchedulePlan], now: datetime) -> Key:
    """The execution of these schedules whose time it is: the one that became active last."""
    dates = [(activation(one, day := latest_date(one, now)), day, one.name) for one in schedules]
    _, day, name = max(dates)
    return Key(plan.pipeline, day, name)


def next_activation(plan: Plan, schedule: SchedulePlan, now: datetime, horizon_days: int = 400) -> Key | None:
    """The next execution that will become active after `now`; None if every date up to the horizon is excluded."""
    newest = local_date(now, schedule.timezone) - timedelta(days=_clock_of(schedule).days)
    for ahead in range(-1, horizon_days):
        day = newest + timedelta(days=ahead)
        if not plan.exclusions.excludes(day) and activation(schedule, day) > now:
            return Key(plan.pipeline, day, schedule.name)
    return None
