"""Any order of runs, crashes, retries, replays and freezes of units leaves what clean runs leave. On real Postgres."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from lockstep.idempotency.calendar import DAY, ISO_WEEK, MONTH, Every, Grain
from lockstep.idempotency.cleaner import Dataset, create, freeze, load, units
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect

pytestmark = pytest.mark.stack

START = date(2024, 12, 23)  # a Monday; the days below cross a year end
GRAINS: dict[str, Grain] = {"day": DAY, "week": ISO_WEEK, "month": MONTH, "ten": Every(10, START)}
POINTS = [None, "cleaner.load.filled_aside", "cleaner.load.before_commit", "cleaner.load.after_commit"]


class Step(NamedTuple):
    """A replay of the unit that holds a day, with new row counts, dying somewhere on its way; or a freeze."""

    day: int
    rows: int
    crash: str | None
    freeze: bool


STEPS = st.lists(
    st.builds(
        Step, day=st.integers(0, 20), rows=st.integers(0, 3), crash=st.sampled_from(POINTS), freeze=st.booleans()
    ),
    max_size=5,
)


@pytest.fixture
def dsn(database: str) -> str:
    migrate(database, "lockstep.idempotency")
    return database


def fresh(connection: Connection, grain: str) -> Dataset:
    connection.execute("DROP SCHEMA IF EXISTS data CASCADE")
    connection.execute("TRUNCATE idempotency.unit CASCADE")
    connection.execute("CREATE SCHEMA data")
    connection.execute("CREATE TABLE data.shape (day date, n int)")
    dataset = Dataset("data", "visits", "shape", "day", GRAINS[grain])
    create(connection, dataset)
    return dataset


def one_load(
    connection: Connection, dataset: Dataset, day: date, rows: int, run: str, crash: str | None = None
) -> None:
    def fill(inner: Connection, table: sql.Identifier) -> int:
        add = sql.SQL("INSERT INTO {} SELECT %s, n FROM generate_series(1, %s) AS n").format(table)
        return inner.execute(add, (day, rows)).rowcount

    if crash:
        with armed(crash, "raise") as charge:
            try:
                load(connection, dataset, day, fill, run=run)
            except CrashInjected:
                assert charge.fired
    load(connection, dataset, day, fill, run=run)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grain=st.sampled_from(sorted(GRAINS)), steps=STEPS)
def test_any_history_of_units_ends_as_clean_runs_of_its_days(dsn: str, grain: str, steps: list[Step]):
    """The oracle: for each day the rows of the last run that was let in; a frozen unit lets none in."""
    days = [START + timedelta(days=n) for n in range(21)]
    with connect(dsn, application_name="tests") as connection:
        dataset = fresh(connection, grain)
        clean: dict[date, int] = {}
        for day in days:
            one_load(connection, dataset, day, 1, "first")
            clean[day] = 1
        for number, step in enumerate(steps):
            _replay(connection, dataset, days[step.day], step, f"replay-{number}", clean)
            if step.freeze:
                freeze(connection, dataset, before=days[step.day], into=MONTH)
        found: Any = connection.execute("SELECT day, count(*) FROM data.visits GROUP BY day").fetchall()
        assert dict(found) == {day: rows for day, rows in clean.items() if rows}


def _replay(connection: Connection, dataset: Dataset, day: date, step: Step, run: str, clean: dict[date, int]) -> None:
    interval = dataset.grain.interval(day)
    frozen = [
        u for u in units(connection, dataset) if u.frozen and u.starts < interval.ends and interval.starts < u.ends
    ]
    # A month that began before our first day has no first partition here, so it cannot be replayed.
    if frozen or interval.starts not in clean:
        return
    for one in [one for one in interval.days() if one in clean]:
        one_load(connection, dataset, one, step.rows, run, step.crash)
        clean[one] = step.rows
