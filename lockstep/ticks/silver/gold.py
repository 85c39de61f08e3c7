"""Gold for analysts, from what silver's ledger says: ticks by day and project, and the sessions of each agent.

What belongs here: both tables, their facts and their Spark work, built from the cleaner and the keyed block. What does
not: when they are made. Folding the same ticks again changes nothing, so where the last run ended is only a hint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from lockstep.idempotency import delta, keyed
from lockstep.idempotency.calendar import DAY
from lockstep.idempotency.cleaner_delta import DeltaDataset, load_delta
from lockstep.kernel.crash import crash_point
from lockstep.ticks.model import Mode
from lockstep.ticks.silver.model import DAILY_ASSET, GOLD_PREFIX, SESSIONS_ASSET, Applied

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SESSION_GAP = timedelta(hours=1)
QUOTA_DAYS = 3 * 366
_DAILY = (
    "day date, org_id string, project_id string, ticks bigint, full_ticks bigint, replayed_ticks bigint, rows bigint,"
    " median_lag_seconds double, newest_tick string"
)
_EVENTS = "user string, at timestamp, position bigint, id string"


class DailyRow(NamedTuple):
    """One project on one day, by the time at which bronze committed its ticks."""

    day: date
    org_id: str
    project_id: str
    ticks: int
    full_ticks: int
    replayed_ticks: int
    rows: int
    median_lag_seconds: float
    newest_tick: str


def daily_rows(applied: Iterable[Applied]) -> list[DailyRow]:
    """The rows of the daily table. A function of the set of ticks, whatever their order."""
    ordered = sorted(applied, key=lambda one: (_day(one), one.org_id, one.project_id, one.sequence))
    return [
        _daily(*key, list(group))
        for key, group in groupby(ordered, key=lambda one: (_day(one), one.org_id, one.project_id))
    ]


def days_of(applied: Iterable[Applied]) -> list[date]:
    """The days whose rows change when these ticks are applied."""
    return sorted({_day(one) for one in applied})


class Gold:
    """Both tables of one lake. One fold at a time: the caller holds the lane."""

    def __init__(self, spark: SparkSession, lake: str) -> None:
        self._spark = spark
        root = f"s3a://{lake}/{GOLD_PREFIX}"
        self.daily = DeltaDataset(f"{root}/{DAILY_ASSET}", "day", DAY, quota=QUOTA_DAYS)
        self.events = f"{root}/agent_events"
        self.sessions = f"{root}/{SESSIONS_ASSET}"
        self.paths = (self.daily.path, self.events, self.sessions)

    def load_day(self, day: date, applied: Sequence[Applied]) -> int:
        """Make one day of the daily table anew from all its ticks. The same ticks again change nothing."""
        rows = daily_rows(applied)
        newest = max((one.applied_at for one in applied), default=None)
        run = f"{len(applied)}:{sum(one.generation for one in applied)}:{newest.isoformat() if newest else 'none'}"
        loaded = load_delta(self._spark, self.daily, day, self._spark.createDataFrame(rows, _DAILY), run=run)
        crash_point("silver.gold.day_loaded")
        return 0 if loaded.already else loaded.rows

    def days_before(self, limit: date) -> list[date]:
        """Days of the daily table that are older than this."""
        if not delta.exists(self._spark, self.daily.path):
            return []
        found = delta.read(self._spark, self.daily.path).where(f"day < {delta.literal(limit)}").select("day").distinct()
        return sorted(row["day"] for row in found.collect())

    def fold_sessions(self, applied: Sequence[Applied]) -> int:
        """Add ticks to their agents' sessions: stretches without a pause of an hour. Returns how many changed."""
        if not applied:
            return 0
        keyed.create_session_tables(self._spark, events=self.events, sessions=self.sessions)
        rows = [(one.project_id, one.committed_at, one.sequence, one.tick_id) for one in applied]
        batch = self._spark.createDataFrame(rows, _EVENTS)
        return keyed.fold_sessions(self._spark, batch, events=self.events, sessions=self.sessions, gap=SESSION_GAP)


def _daily(day: date, org_id: str, project_id: str, ticks: list[Applied]) -> DailyRow:
    return DailyRow(
        day=day,
        org_id=org_id,
        project_id=project_id,
        ticks=len(ticks),
        full_ticks=sum(one.mode is Mode.FULL for one in ticks),
        replayed_ticks=sum(one.generation > 1 for one in ticks),
        rows=sum(one.rows for one in ticks),
        median_lag_seconds=round(median((one.applied_at - one.committed_at).total_seconds() for one in ticks), 3),
        newest_tick=ticks[-1].tick_id,
    )


def _day(one: Applied) -> date:
    return one.committed_at.astimezone(UTC).date()


def bounds(day: date) -> tuple[datetime, datetime]:
    """The day as a stretch of time, in UTC."""
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return start, start + timedelta(days=1)
