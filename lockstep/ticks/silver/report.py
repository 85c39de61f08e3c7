"""Gold in PostgreSQL, for people and tools that read with SQL: days are replaced, sessions are versions behind a name.

What belongs here: carrying what gold holds at one version into the schema ticks_report, with the transactional writer
(days) and the proxy (sessions). What does not: making gold. Each version of gold is carried over once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import sql
from pydantic import SecretStr

from lockstep.idempotency import delta, proxy, transactional
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.kernel.postgres import Connection, connect
from lockstep.ticks.silver.gold import DailyRow, Gold

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = "ticks_report"
DAILY = (SCHEMA, "daily")
SESSIONS = proxy.Proxy(SCHEMA, "agent_sessions")
KEPT_VERSIONS = 3
KEPT_FOR = timedelta(hours=6)
"""Old versions of the sessions stay this long: a reader's query that has begun still finds its table. What a report has
staged stays as long, in case it is still at work."""

_PIPELINE = "ticks_report.daily"
_SESSION_COLUMNS = "key text PRIMARY KEY, project_id text, first timestamptz, last timestamptz, ticks bigint"


class Published(NamedTuple):
    """What a report came to."""

    day_rows: dict[date, int]
    sessions: str | None


class Report:
    """The report of one lake in one database. One at a time: the caller holds gold's lane."""

    def __init__(self, spark: SparkSession, gold: Gold, dsn: SecretStr | str, ids: IdSource | None = None) -> None:
        self._spark, self._gold, self._dsn, self._ids = spark, gold, dsn, ids or SystemIds()

    def publish(self, days: Sequence[date], *, run: str, now: datetime) -> Published:
        """Carry these days and the sessions over, as gold holds them now. What dead reports left staged goes first."""
        with connect(self._dsn, application_name="lockstep-ticks-report") as connection:
            transactional.sweep(connection, created_before=now - KEPT_FOR)
        rows = {day: self.publish_day(day, run=run).rows for day in days}
        return Published(rows, self.publish_sessions(now=now))

    def publish_day(self, day: date, *, run: str) -> transactional.Outcome:
        """Replace one day. The generation is gold's version, so an older gold never replaces a newer one.

        Raises:
            InvalidInput: Gold was never made.
            LostClaim: The day was already carried over from a newer gold.
        """
        version = delta.latest_version(self._spark, self._gold.daily.path)
        if version is None:
            raise InvalidInput("gold has no daily table yet.", next_step="materialize ticks_daily first.")
        gold = delta.read(self._spark, self._gold.daily.path, version=version)
        frame = gold.where(f"day = {delta.literal(day)}").select(*DailyRow._fields).coalesce(1)
        key = transactional.Key(_PIPELINE, day.isoformat(), version + 1)
        how = transactional.replace_unit("day")
        return transactional.write(frame, self._dsn, DAILY, key, run=run, how=how, ids=self._ids)

    def publish_sessions(self, *, now: datetime) -> str | None:
        """Show the sessions as gold holds them: a new table behind the old name. None without any session."""
        if not delta.exists(self._spark, self._gold.sessions):
            return None
        newest = delta.history(self._spark, self._gold.sessions, limit=1)[0]
        rows = delta.read(self._spark, self._gold.sessions, version=newest.version).toLocalIterator()
        with connect(self._dsn, application_name="lockstep-ticks-report") as connection:
            version = proxy.add_version(
                connection, SESSIONS, newest.timestamp.astimezone(UTC), _filled(rows), run=f"gold-{newest.version}"
            )
            proxy.point(connection, SESSIONS, version, reason=f"gold has version {newest.version}")
            proxy.collect(connection, SESSIONS, keep=KEPT_VERSIONS, sealed_before=now - KEPT_FOR)
        return version.name


def _filled(rows: Any) -> proxy.Build:
    """How a version's table is made: its columns, then all rows by COPY."""

    def build(connection: Connection, table: sql.Identifier) -> None:
        connection.execute(sql.SQL("CREATE TABLE {} ({})").format(table, sql.SQL(_SESSION_COLUMNS)))
        with connection.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(table)) as copy:
            for row in rows:  # Spark gives local times without a zone
                copy.write_row(
                    (row["key"], row["user"], row["first"].astimezone(), row["last"].astimezone(), row["events"])
                )

    return build
