"""Merger against a plain-Python oracle: any order of runs, retries, crashes and replays ends where a clean run ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.idempotency import merger
from lockstep.idempotency.merger import Contract, Deletes
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.postgres import connect, transaction

pytestmark = pytest.mark.stack

POINTS = (
    "idempotency.merger.before_apply",
    "idempotency.merger.after_tombstones",
    "idempotency.merger.before_commit",
    "idempotency.merger.after_commit",
)
HARD = Contract(keys=("id",), values=("v",), order="seq", flag="gone")
SOFT = Contract(keys=("id",), values=("v",), order="seq", flag="gone", deletes=Deletes.SOFT)

Row = tuple[int, str, int, bool]

# A log of changes: sequence numbers are unique, so a (key, seq) pair is one fact however often it is sent.
changes = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=14).map(
    lambda facts: [(key, f"v{seq}", seq, gone) for seq, (key, gone) in enumerate(facts, 1)]
)


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[list[Row]], list[tuple[int, str | None]]]:
    """Batches (rows shuffled over them, some sent twice) and a walk over them: any order, repeats, crashes."""
    log = draw(changes)
    count = draw(st.integers(1, 4))
    batches: list[list[Row]] = [[] for _ in range(count)]
    for row in log:
        for batch in draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2)):
            batches[batch].append(row)
    steps = st.tuples(st.integers(0, count - 1), st.none() | st.sampled_from(POINTS))
    return batches, draw(st.lists(steps, max_size=8))


@pytest.fixture
def work(database: str) -> Iterator[Any]:
    with connect(database, application_name="test-merger") as connection:
        connection.execute("CREATE TABLE hard (id bigint PRIMARY KEY, v text, seq bigint)")
        connection.execute("CREATE TABLE soft (id bigint PRIMARY KEY, v text, seq bigint, gone boolean)")
        merger.create_tombstones(connection, HARD, target="hard", tombstones="graves")
        yield connection


def apply_postgres(work: Any, contract: Contract, target: str, rows: list[Row]) -> None:
    with transaction(work):
        source = merger.stage(work, contract, target=target, rows=rows)
        merger.merge_postgres(work, contract, target=target, source=source, tombstones="graves")


def apply_redshift(work: Any, contract: Contract, target: str, rows: list[Row]) -> None:
    """The text for Redshift, on the dialect that both share."""
    with transaction(work):
        source = merger.stage(work, contract, target=target, rows=rows)
        for statement in merger.redshift_statements(contract, target=target, source=source, tombstones="graves"):
            work.execute(statement)


def state(work: Any, target: str) -> dict[int, tuple[str, int]]:
    alive = "" if target == "hard" else " WHERE NOT gone"
    return {key: (v, seq) for key, v, seq in work.execute(f"SELECT id, v, seq FROM {target}{alive}")}  # noqa: S608


def oracle(batches: list[list[Row]], applied: set[int]) -> dict[int, tuple[str, int]]:
    last: dict[int, Row] = {}
    for row in (row for index in applied for row in batches[index]):
        if row[0] not in last or row[2] > last[row[0]][2]:
            last[row[0]] = row
    return {key: (v, seq) for key, v, seq, gone in last.values() if not gone}


@pytest.mark.parametrize("target", ["hard", "soft"])
@pytest.mark.parametrize("apply", [apply_postgres, apply_redshift])
def test_any_order_of_runs_retries_crashes_and_replays_is_a_clean_run(work: Any, target: str, apply: Any):
    """Guards order, tombstones and atomicity together: the state is a function of the facts seen, of nothing else."""
    contract = HARD if target == "hard" else SOFT

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(walks())
    def holds(walk: tuple[list[list[Row]], list[tuple[int, str | None]]]) -> None:
        batches, steps = walk
        work.execute("TRUNCATE hard, soft, graves")
        applied: set[int] = set()
        for index, point in steps:
            with armed(point or POINTS[0], "raise", nth=1 if point else 99) as charge:
                with contextlib.suppress(CrashInjected):
                    apply(work, contract, target, batches[index])
                if not charge.fired:
                    applied.add(index)
            assert state(work, target) == oracle(batches, applied)
        for index in range(len(batches)):  # the schedule comes round in the end
            apply(work, contract, target, batches[index])
        assert state(work, target) == oracle(batches, set(range(len(batches))))

    holds()
