"""Any order of runs, crashes, retries, zombies, replays and freezes leaves what clean runs leave. On real Postgres."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from lockstep.idempotency.calendar import DAY, ISO_WEEK, MONTH, Every, Grain
from lockstep.idempotency.cleaner import Dataset, Loaded, Refused, create, freeze, load, units
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect

pytestmark = pytest.mark.stack

START = date(2024, 12, 23)  # a Monday; the days below cross a year end
GRAINS: dict[str, Grain] = {"day": DAY, "week": ISO_WEEK, "month": MONTH, "ten": Every(10, START)}
POINTS = [None, "cleaner.load.filled_aside", "cleaner.load.before_commit", "cleaner.load.after_commit"]
FREEZES = [None, "cleaner.freeze.before_commit", "cleaner.freeze.after_commit"]
DAYS = [START + timedelta(days=n) for n in range(14)]


class Step(NamedTuple):
    """A replay of the unit that holds a day, or of it and all after it, dying somewhere; maybe a freeze; a zombie."""

    day: int
    rows: int
    crash: str | None
    suffix: bool
    freeze: bool
    freeze_crash: str | None
    zombie: int


STEPS = st.lists(
    st.builds(
        Step,
        day=st.integers(0, len(DAYS) - 1),
        rows=st.integers(0, 3),
        crash=st.sampled_from(POINTS),
        suffix=st.booleans(),
        freeze=st.booleans(),
        freeze_crash=st.sampled_from(FREEZES),
        zombie=st.integers(0, len(DAYS) - 1),
    ),
    max_size=4,
)


@pytest.fixture
def dsn(database: str) -> str:
    migrate(database, "lockstep.idempotency")
    return database


def fresh(connection: Connection, grain: str) -> Dataset:
    connection.execute("DROP SCHEMA IF EXISTS data CASCADE")
    connection.execute("TRUNCATE idempotency.unit, idempotency.unit_run CASCADE")
    connection.execute("CREATE SCHEMA data")
    connection.execute("CREATE TABLE data.shape (day date, n int)")
    dataset = Dataset("data", "visits", "shape", "day", GRAINS[grain])
    create(connection, dataset)
    return dataset


def one_load(
    connection: Connection, dataset: Dataset, day: date, rows: int, run: str, crash: str | None = None
) -> Loaded:
    def fill(inner: Connection, table: sql.Identifier) -> int:
        add = sql.SQL("INSERT INTO {} SELECT %s, n FROM generate_series(1, %s) AS n").format(table)
        return inner.execute(add, (day, rows)).rowcount

    if crash:
        with armed(crash, "raise"), suppress(CrashInjected):
            load(connection, dataset, day, fill, run=run)
    return load(connection, dataset, day, fill, run=run)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grain=st.sampled_from(sorted(GRAINS)), steps=STEPS)
def test_any_history_of_units_ends_as_clean_runs_of_its_days(dsn: str, grain: str, steps: list[Step]):
    """The oracle: for each day the rows of the last run that was let in; a frozen unit lets none in."""
    with connect(dsn, application_name="tests") as connection:
        dataset = fresh(connection, grain)
        clean = dict.fromkeys(DAYS, 1)
        for day in DAYS:
            one_load(connection, dataset, day, 1, "first")
        for number, step in enumerate(steps):
            _replay(connection, dataset, step, f"replay-{number}", clean)
            if step.freeze:
                _freeze(connection, dataset, DAYS[step.day], step.freeze_crash)
            with suppress(Refused):  # a retry of the very first run of some day, long after it was replaced
                assert one_load(connection, dataset, DAYS[step.zombie], 9, "first").already
            found: Any = connection.execute("SELECT day, count(*) FROM data.visits GROUP BY day").fetchall()
            assert dict(found) == {day: rows for day, rows in clean.items() if rows}


def _freeze(connection: Connection, dataset: Dataset, before: date, crash: str | None) -> None:
    if crash:
        with armed(crash, "raise"), suppress(CrashInjected):
            freeze(connection, dataset, before=before, into=MONTH)
    freeze(connection, dataset, before=before, into=MONTH)


def _replay(connection: Connection, dataset: Dataset, step: Step, run: str, clean: dict[date, int]) -> None:
    first = dataset.grain.interval(DAYS[step.day])
    frozen = [unit for unit in units(connection, dataset) if unit.frozen]
    for day in DAYS:
        interval = dataset.grain.interval(day)
        wanted = interval.starts >= first.starts if step.suffix else interval == first
        # A month that began before our first day has no first partition here, so it cannot be replayed.
        closed = interval.starts not in clean or any(u.starts < interval.ends and day < u.ends for u in frozen)
        if wanted and not closed:
            one_load(connection, dataset, day, step.rows, run, step.crash)
            clean[day] = step.rows
