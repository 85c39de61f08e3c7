"""Any order of runs, crashes, late retries, backfills and roll backs shows what the rule says. On real Postgres."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from lockstep.idempotency.proxy import Proxy, Refused, add_version, collect, point, roll_back
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect

pytestmark = pytest.mark.stack

POINTS = [
    None,
    "proxy.version.built",
    "proxy.version.before_commit",
    "proxy.version.after_commit",
    "proxy.point.before_commit",
    "proxy.point.after_commit",
]


class Step(NamedTuple):
    """A run of a day that dies somewhere and is retried; or a person's roll back."""

    day: int
    crash: str | None
    roll_back: bool


STEPS = st.lists(
    st.builds(Step, day=st.integers(1, 4), crash=st.sampled_from(POINTS), roll_back=st.booleans()),
    min_size=1,
    max_size=6,
)


@pytest.fixture
def dsn(database: str) -> str:
    migrate(database, "lockstep.idempotency")
    return database


class Oracle:
    """The rule in plain Python: what one can go back to, as (place, run) with the current one last, and what ever was.

    The place of a run is its day and, where the store knows the order of builds, its number: of one day the version
    that was built later stays.
    """

    def __init__(self, *, knows_builds: bool) -> None:
        self.knows_builds = knows_builds
        self.way: list[tuple[tuple[int, int], str]] = []
        self.shown: set[str] = set()

    def run(self, day: int, run: str) -> None:
        place = day, int(run.removeprefix("r")) if self.knows_builds else 0
        if run not in self.shown and (not self.way or place >= self.way[-1][0]):
            self.way.append((place, run))
            self.shown.add(run)

    def roll_back(self) -> None:
        self.way = self.way[:-1] or self.way


def execute(connection: Connection, dsn: str, proxy: Proxy, day: int, run: str, crash: str | None) -> None:
    def attempt(mine: Connection) -> None:
        def build(inner: Connection, table: sql.Identifier) -> None:
            inner.execute(sql.SQL("CREATE TABLE {} AS SELECT {} AS run").format(table, sql.Literal(run)))

        version = add_version(mine, proxy, date(2026, 3, day), build, run=run)
        point(mine, proxy, version, reason="run")

    if crash:
        with armed(crash, "raise"):
            _quietly(lambda: attempt(connection))
    _quietly(lambda: attempt(connection))


def _quietly(action: Any) -> None:
    try:
        action()
    except (CrashInjected, Refused):
        return


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, late=st.integers(0, 5))
def test_any_history_shows_what_the_rule_says(dsn: str, steps: list[Step], late: int):
    oracle, proxy = Oracle(knows_builds=True), Proxy("data", "devices")
    with connect(dsn, application_name="tests") as connection:
        connection.execute("DROP SCHEMA IF EXISTS data CASCADE")
        connection.execute("CREATE SCHEMA data")
        connection.execute("TRUNCATE idempotency.proxy_version CASCADE")
        for number, step in enumerate(steps):
            execute(connection, dsn, proxy, step.day, f"r{number}", step.crash)
            oracle.run(step.day, f"r{number}")
            if step.roll_back:
                _quietly(lambda: roll_back(connection, proxy, reason="bad"))
                oracle.roll_back()
        for number, step in enumerate(steps[late:], start=late):  # late retries of a suffix
            execute(connection, dsn, proxy, step.day, f"r{number}", step.crash)
            oracle.run(step.day, f"r{number}")
        collect(connection, proxy, keep=1, sealed_before=datetime.now(UTC) + timedelta(days=1))
        assert connection.execute("SELECT run FROM data.devices").fetchone() == (oracle.way[-1][1],)
