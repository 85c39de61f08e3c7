"""Any order of runs, failing tasks, crashes, replays and zombies applies each unit once. On real Postgres."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.idempotency.transactional import Key, Outcome, publish, replace_unit
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import LostClaim
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect
from tests.integration.idempotency.staging import stage

pytestmark = pytest.mark.stack

TARGET = ("public", "visits")
POINTS = [f"transactional.publish.{moment}" for moment in ("before", "before_commit", "after_commit")]


class Run(NamedTuple):
    """One unit: its partitions of rows, the tasks that die after their commit, and where the driver dies."""

    unit: str
    partitions: list[list[int]]
    failures: list[int]
    crash: str | None


RUNS = st.lists(
    st.builds(
        Run,
        unit=st.sampled_from(["d1", "d2", "d3"]),
        partitions=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3),
        failures=st.lists(st.integers(0, 2), max_size=2),
        crash=st.sampled_from([None, *POINTS]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture
def dsn(database: str) -> str:
    migrate(database, "lockstep.idempotency")
    with connect(database, application_name="tests") as connection:
        connection.execute("CREATE TABLE visits (id int NOT NULL, unit text NOT NULL)")
    return database


def attempt(connection: Connection, dsn: str, run: Run, generation: int) -> Outcome:
    rows = [[(one, run.unit) for one in partition] for partition in run.partitions]
    staging = stage(connection, dsn, TARGET, rows, failures=run.failures)
    return publish(connection, staging, Key("visits", run.unit, generation), run="r", how=replace_unit("unit"))


def execute(connection: Connection, dsn: str, run: Run, generation: int) -> None:
    if run.crash:
        with connect(dsn, application_name="dying") as dying, pytest.raises(CrashInjected), armed(run.crash, "raise"):
            attempt(dying, dsn, run, generation)
    attempt(connection, dsn, run, generation)
    assert attempt(connection, dsn, run, generation).already  # a retry too many
    if generation > 1:
        with pytest.raises(LostClaim):
            attempt(connection, dsn, run, generation - 1)  # a zombie of the generation before


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=RUNS, replay_from=st.integers(0, 4))
def test_any_history_applies_each_unit_once(dsn: str, runs: list[Run], replay_from: int):
    """The oracle: the rows of the last run of each unit, each as often as the run has it."""
    generations: dict[str, int] = {}
    with connect(dsn, application_name="driver") as connection:
        connection.execute("TRUNCATE visits, idempotency.ledger")
        for run in [*runs, *runs[replay_from:]]:
            generations[run.unit] = generations.get(run.unit, 0) + 1
            execute(connection, dsn, run, generations[run.unit])
        found = connection.execute("SELECT unit, id FROM visits ORDER BY unit, id").fetchall()
    clean = {run.unit: [one for partition in run.partitions for one in partition] for run in runs}
    assert found == sorted((unit, one) for unit, rows in clean.items() for one in rows)
