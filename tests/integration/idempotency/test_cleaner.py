"""The metadata cleaner on real Postgres and Delta: units renewed whole, a view that stays, old units merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import pytest
from psycopg import errors, sql

from lockstep.idempotency import cleaner, delta
from lockstep.idempotency.calendar import ISO_WEEK, MONTH
from lockstep.idempotency.cleaner import Dataset, Loaded, Refused, Unit, create, freeze, load, units
from lockstep.idempotency.cleaner_delta import DeltaDataset, clean_delta, forget_delta, freeze_delta, load_delta
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import Terminal
from lockstep.kernel.postgres import Connection, connect
from tests.faults.modes import HANGS, meet

pytestmark = pytest.mark.stack

VISITS = Dataset("public", "visits", "visits_shape", "day", ISO_WEEK, quota=4)
MONDAY = date(2023, 11, 6)
SHAPE = "CREATE TABLE visits_shape (visit_id text, day date NOT NULL, page text, PRIMARY KEY (visit_id, day))"


@pytest.fixture(autouse=True)
def dataset(connection: Connection) -> Iterator[None]:
    connection.execute(SHAPE)
    create(connection, VISITS)
    connection.execute("CREATE VIEW consumers AS SELECT page, count(*) AS n FROM visits GROUP BY page")
    yield
    connection.execute("SELECT * FROM consumers")  # whatever a test did, the consumer's view is still there


def rows_of(day: date, count: int, page: str = "p") -> Any:
    def fill(connection: Connection, table: sql.Identifier) -> int:
        add = sql.SQL("INSERT INTO {} SELECT %s || '-' || n, %s, %s FROM generate_series(1, %s) AS n").format(table)
        return connection.execute(add, (str(day), day, page, count)).rowcount

    return fill


def go(connection: Connection, day: date, count: int, *, run: str = "r", page: str = "p") -> Loaded:
    return load(connection, VISITS, day, rows_of(day, count, page), run=run)


def counts(connection: Connection) -> dict[date, int]:
    return dict(connection.execute("SELECT day, count(*)::int FROM visits GROUP BY day ORDER BY day").fetchall())


def test_four_days_are_loaded_and_replayed_without_a_doubled_row(connection: Connection):
    """The chapter's vector: 4 days of 50 rows give 200 distinct keys, in the view and in the unit, also replayed."""
    days = [MONDAY + timedelta(days=n) for n in range(4)]
    for run in ("first", "replay"):
        for day in days:
            loaded = go(connection, day, 50, run=run)
            assert loaded.to_replay == (tuple(days[1:]) if (run, day) == ("replay", MONDAY) else ())
        for table in ("visits", "visits_20231106"):
            count = sql.SQL("SELECT count(*), count(DISTINCT (visit_id, day)) FROM {}").format(sql.Identifier(table))
            assert connection.execute(count).fetchone() == (200, 200)
    assert [unit.name for unit in units(connection, VISITS)] == ["visits_20231106"]


def test_a_retry_of_the_first_day_that_comes_late_does_not_clean_the_later_days(connection: Connection):
    """Guards the run's identity: the same run is a retry and changes nothing, another run is a replay and cleans."""
    go(connection, MONDAY, 5, run="mon")
    go(connection, MONDAY + timedelta(days=1), 7, run="tue")
    assert go(connection, MONDAY, 5, run="mon").already
    assert go(connection, MONDAY + timedelta(days=1), 7, run="tue").already
    assert sum(counts(connection).values()) == 12


def test_a_run_that_a_newer_one_replaced_does_not_come_back(connection: Connection):
    """Guards corrected data: a zombie of the first run would clean the unit and bring the uncorrected rows back."""
    tuesday = MONDAY + timedelta(days=1)
    go(connection, MONDAY, 5, run="wrong")
    go(connection, tuesday, 7, run="daily")
    assert go(connection, MONDAY, 6, run="corrected").to_replay == (tuesday,)
    assert go(connection, MONDAY, 5, run="wrong") == Loaded("visits_20231106", 5, already=True)
    assert counts(connection) == {MONDAY: 6}
    assert not go(connection, tuesday, 7, run="daily").already, "it went with its unit, so it must come again"
    assert counts(connection) == {MONDAY: 6, tuesday: 7}


@pytest.mark.parametrize(
    "point", ["cleaner.load.filled_aside", "cleaner.load.before_commit", "cleaner.load.after_commit"]
)
def test_a_replay_that_dies_leaves_the_old_unit_readable(connection: Connection, dsn: str, point: str):
    """Guards readers: DROP, CREATE, view and load of the chapter are separate transactions, here they are one."""
    go(connection, MONDAY, 5, run="old")
    go(connection, MONDAY + timedelta(days=1), 6, run="old")
    with connect(dsn, application_name="dying") as dying, pytest.raises(CrashInjected), armed(point, "raise"):
        go(dying, MONDAY, 9, run="new")
    committed = point.endswith("after_commit")
    assert counts(connection) == ({MONDAY: 9} if committed else {MONDAY: 5, MONDAY + timedelta(days=1): 6})
    assert go(connection, MONDAY, 9, run="new").already == committed
    assert counts(connection) == {MONDAY: 9}


def test_a_pipeline_may_begin_in_the_middle_of_a_unit_but_not_replay_there(connection: Connection):
    wednesday = MONDAY + timedelta(days=2)
    assert go(connection, wednesday, 3, run="a").unit == "visits_20231106"
    with pytest.raises(Refused, match="replay the unit from 2023-11-06"):
        go(connection, wednesday, 3, run="b")
    assert counts(connection) == {wednesday: 3}


def test_a_changed_grain_is_refused(connection: Connection):
    """Guards units that overlap: the days of a week would stand in the view twice, in its week and in its month."""
    go(connection, MONDAY, 5, run="weekly")
    monthly = replace(VISITS, grain=MONTH)
    with pytest.raises(Refused, match="the grain changed"):
        load(connection, monthly, MONDAY, rows_of(MONDAY, 5), run="monthly")
    assert counts(connection) == {MONDAY: 5}


def test_rows_of_another_day_are_refused(connection: Connection):
    """Guards a later reload: a stray row of Tuesday inside Monday's load would be doubled by Tuesday's."""
    for stray in (MONDAY + timedelta(days=1), MONDAY + timedelta(days=9)):
        with pytest.raises(Refused, match="filter them by the day"):
            load(connection, VISITS, MONDAY, rows_of(stray, 1), run="r")
    assert counts(connection) == {}
    assert units(connection, VISITS) == []


def test_weeks_are_frozen_into_months_and_the_quota_counts_units(connection: Connection):
    weeks = [MONDAY + timedelta(weeks=n) for n in range(4)]
    for week in weeks:
        go(connection, week, 2, page=str(week))
    before = counts(connection)
    with pytest.raises(Refused, match="quota of 4"):
        go(connection, weeks[-1] + timedelta(weeks=1), 1)
    for point in ("cleaner.freeze.before_commit", "cleaner.freeze.after_commit"):
        with pytest.raises(CrashInjected), armed(point, "raise"):
            freeze(connection, VISITS, before=date(2023, 11, 27), into=MONTH)
        assert counts(connection) == before
    assert units(connection, VISITS) == [
        Unit("visits_20231106", weeks[0], weeks[3], True),
        Unit("visits_20231127", weeks[3], weeks[3] + timedelta(weeks=1), False),
    ]
    assert freeze(connection, VISITS, before=date(2023, 11, 27), into=MONTH) == []
    for day in (weeks[0], weeks[1] + timedelta(days=3)):
        with pytest.raises(Refused, match="frozen"):
            go(connection, day, 1, run="late")
    go(connection, weeks[3] + timedelta(weeks=1), 1)
    assert sum(counts(connection).values()) == 9


def test_units_with_computed_and_identity_columns_are_frozen_as_they_are(connection: Connection):
    """Guards the quota: PostgreSQL takes no values for such columns, so these units could never be merged."""
    connection.execute(
        "CREATE TABLE clicks_shape (n bigint GENERATED ALWAYS AS IDENTITY, day date NOT NULL, page text, "
        "length int GENERATED ALWAYS AS (length(page)) STORED)"
    )
    clicks = Dataset("public", "clicks", "clicks_shape", "day", ISO_WEEK)
    create(connection, clicks)

    def fill(connection: Connection, table: sql.Identifier) -> int:
        add = sql.SQL("INSERT INTO {} (day, page) VALUES (%s, 'home')").format(table)
        return connection.execute(add, (day,)).rowcount

    for day in (MONDAY, MONDAY + timedelta(weeks=1)):
        load(connection, clicks, day, fill, run="r")
    rows = "SELECT n, day, page, length FROM clicks ORDER BY day"
    before = connection.execute(rows).fetchall()
    assert [row[2:] for row in before] == [("home", 4)] * 2
    (made,) = freeze(connection, clicks, before=MONDAY + timedelta(weeks=2), into=MONTH)
    assert made.frozen
    assert connection.execute(rows).fetchall() == before


def test_a_view_on_a_unit_itself_stops_the_replay_instead_of_vanishing(connection: Connection, monkeypatch: Any):
    """Guards consumers' views: the chapter's CASCADE drops them without a word."""
    go(connection, MONDAY, 2)
    connection.execute("CREATE VIEW too_deep AS SELECT * FROM visits_20231106")
    with pytest.raises(Terminal, match="read the view visits instead"):
        go(connection, MONDAY, 3, run="again")
    assert counts(connection) == {MONDAY: 2}
    with monkeypatch.context() as without:
        cascade = sql.SQL("DROP TABLE {} CASCADE")
        without.setattr(cleaner, "_drop", lambda c, d, name: c.execute(cascade.format(sql.Identifier(d.schema, name))))
        go(connection, MONDAY, 3, run="again")
    with pytest.raises(errors.UndefinedTable):
        connection.execute("SELECT * FROM too_deep")


def test_two_units_that_are_loaded_at_once_are_both_in_the_view(dsn: str, connection: Connection):
    """Guards the dataset's lock: each would make the view of the units that it saw, and the later hides the other."""

    def drive(week: int) -> None:
        with connect(dsn, application_name=f"week-{week}") as mine:
            go(mine, MONDAY + timedelta(weeks=week), 1)

    meet("cleaner.load.before_commit", HANGS, lambda: drive(0), lambda: drive(1), blocked_after=1.0)
    assert counts(connection) == {MONDAY: 1, MONDAY + timedelta(weeks=1): 1}


def test_tables_that_only_look_like_units_stay_out_of_the_view(connection: Connection):
    """Guards the catalogue: LIKE 'visits_%' also finds visitsxfoo."""
    connection.execute("CREATE TABLE visits_backup AS SELECT 'x' AS visit_id, DATE '2023-11-06' AS day, 'p' AS page")
    go(connection, MONDAY, 2)
    assert counts(connection) == {MONDAY: 2}


class TestDelta:
    """The same on Delta: one table through the life of its units, because each statement costs a second."""

    def test_units_are_renewed_cleaned_and_frozen(self, spark: Any, lake: str):
        """Guards every refusal and every late retry. Each write is one commit that replaces whole partitions."""
        table = DeltaDataset(f"{lake}/visits", "day", ISO_WEEK, quota=2)

        def go(day: date, count: int, *, run: str = "r") -> Loaded:
            frame = spark.range(count).selectExpr("id", f"DATE '{day}' AS day")
            return load_delta(spark, table, day, frame, run=run)

        def found() -> dict[date, int]:
            return {row["day"]: row["count"] for row in delta.read(spark, table.path).groupBy("day").count().collect()}

        tuesday, week = MONDAY + timedelta(days=1), timedelta(weeks=1)
        go(MONDAY, 5)
        for point in ("cleaner.delta.before_write", "cleaner.delta.after_commit"):
            with pytest.raises(CrashInjected), armed(point, "raise"):
                go(tuesday, 3)
        assert go(tuesday, 3) == Loaded("20231106", 3, already=True)
        assert go(MONDAY, 5).already  # a late retry: Tuesday stays
        assert found() == {MONDAY: 5, tuesday: 3}
        with pytest.raises(Exception, match="another day"):
            load_delta(spark, table, MONDAY, spark.sql(f"SELECT 1L AS id, DATE '{tuesday}' AS day"), run="stray")
        assert go(MONDAY, 2, run="replay").to_replay == (tuesday,)

        # A unit whose first day is empty: the late retry of that day must find its commit, or it cleans the others.
        go(MONDAY + week, 0)
        go(tuesday + week, 4)
        assert go(MONDAY + week, 0).already
        assert found() == {MONDAY: 2, tuesday + week: 4}
        with pytest.raises(Refused, match="quota"):
            go(MONDAY + week * 2, 1)

        with pytest.raises(CrashInjected), armed("cleaner.delta.marked_frozen", "raise"):
            freeze_delta(spark, table, before=MONDAY + week * 2, into=MONTH, run="f")
        made = freeze_delta(spark, table, before=MONDAY + week * 2, into=MONTH, run="f")
        assert made == [Unit("20231106", MONDAY, MONDAY + week * 2, True)]
        freeze_delta(spark, table, before=MONDAY + week, into=MONTH, run="earlier")  # opens nothing again
        assert found() == {MONDAY: 2, tuesday + week: 4}
        with pytest.raises(Refused, match="frozen"):
            go(MONDAY + week, 1, run="late")

        go(MONDAY + week * 2, 6)
        with pytest.raises(CrashInjected), armed("cleaner.delta.before_clean", "raise"):
            clean_delta(spark, table, MONDAY + week * 2, run="c")
        assert clean_delta(spark, table, MONDAY + week * 2, run="c") == 6
        newest = delta.history(spark, table.path, limit=1)[0]
        assert newest.operation == "DELETE"
        assert (newest.metrics["numCopiedRows"], newest.metrics["numAddedFiles"]) == ("0", "0")
        assert not go(MONDAY + week * 2, 6).already, "it was cleaned away, so the same run may load it again"
        assert clean_delta(spark, table, MONDAY + week * 2, run="c") == 0, "a late retry of the clean"
        assert found()[MONDAY + week * 2] == 6
        with pytest.raises(Refused, match="id is no partition column"):
            forget_delta(spark, table.path, "id", before=3, run="would rewrite rows")
        assert found()[MONDAY + week * 2] == 6
