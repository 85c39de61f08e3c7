"""Stateful merger against a plain-Python oracle.

After any run, retry, crash, replay or compaction the table is that of a clean run of the executions it holds, and a
refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.idempotency import stateful
from lockstep.idempotency.merger import Contract, stage
from lockstep.idempotency.stateful import Refused
from lockstep.idempotency.stateful_rules import Action, Commit, Done, History, Mark, Run
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.postgres import connect, transaction

EXECUTIONS = ("1", "2", "3", "4")
INSIDE = ("before_restore", "after_restore", "after_erase", "after_merge")
AROUND = ("before_commit", "after_commit")

Increment = dict[str, str | None]  # key to value; None deletes
Rows = dict[str, str]


class Step(NamedTuple):
    """One thing that happens to the table."""

    execution: str | None  # None: a compaction
    increment: Increment
    retry: bool
    crash: str | None


increments = st.dictionaries(st.sampled_from("abcd"), st.none() | st.sampled_from("xyz"), max_size=3)


def walks(points: tuple[str, ...], longest: int) -> st.SearchStrategy[list[Step]]:
    run = st.builds(Step, st.sampled_from(EXECUTIONS), increments, st.booleans(), st.none() | st.sampled_from(points))
    return st.lists(run | st.just(Step(None, {}, False, None)), max_size=longest)


class Memory:
    """A versioned table in memory: each commit keeps the whole state."""

    def __init__(self) -> None:
        self.commits = [Commit(0, Action.FOREIGN, "CREATE")]
        self.states: list[Rows] = [{}]
        self.increment: Increment = {}

    def add(self, commit: Commit, rows: Rows) -> int:
        self.commits.append(commit)
        self.states.append(rows)
        return commit.version

    def history(self, run: Run) -> History:
        return History(tuple(self.commits))

    def restore(self, version: int, run: Run) -> None:
        assert version < len(self.commits) - 1, "a store refuses to restore its current version"
        commit = Commit(len(self.commits), Action.RESTORE, restored_to=version, ours=True)
        self.add(commit, self.states[version])

    def erase(self) -> None:
        pass

    def merge(self, run: Run, *, first: bool) -> int:
        base = len(self.commits) - 1
        mark = Mark(run.execution, base, run.request, first)
        return self.add(
            Commit(base + 1, Action.MERGE, "MERGE", mark, ours=True), merged(self.states[-1], self.increment)
        )

    def optimize(self) -> None:
        self.add(Commit(len(self.commits), Action.HARMLESS, "OPTIMIZE"), self.states[-1])


def merged(rows: Rows, increment: Increment) -> Rows:
    return {key: value for key, value in (rows | increment).items() if value is not None}


class Oracle:
    """What a person would say: which executions are in, by which request; nothing about versions."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[str, Increment]] = {}
        self.asked: dict[str, list[str]] = {}
        self.beginnings: set[str] = set()
        self.merged_once = False

    def rows(self) -> Rows:
        rows: Rows = {}
        for execution in sorted(self.live):
            rows = merged(rows, self.live[execution][1])
        return rows

    def verdict(self, execution: str, request: str) -> str:
        if execution in self.live and self.live[execution][0] == request:
            return "done"
        if execution in self.live and request in self.asked.get(execution, []):
            return "refused"
        newest = max((e for e in self.live if e < execution), default=None)
        if newest == str(int(execution) - 1):
            return "run"
        return "run" if newest is None and (not self.merged_once or execution in self.beginnings) else "refused"

    def go_back(self, execution: str) -> None:
        self.live = {e: row for e, row in self.live.items() if e < execution}

    def merge(self, execution: str, request: str, increment: Increment) -> None:
        self.go_back(execution)
        if not self.live:
            self.beginnings.add(execution)
        self.merged_once = True
        self.live[execution] = (request, increment)
        self.asked.setdefault(execution, []).append(request)


def follow(
    steps: list[Step],
    execute: Callable[[Run, Increment], Any],
    compact: Callable[[], None],
    rows: Callable[[], Rows],
    after_crash: Callable[[Oracle, Step, str, str], None],
) -> Oracle:
    oracle = Oracle()
    for number, step in enumerate(steps):
        if step.execution is None:
            compact()
            continue
        known = oracle.asked.get(step.execution, [])
        request = known[-1] if step.retry and known else f"request-{number}"
        run = Run("p", step.execution, str(int(step.execution) - 1), request)
        verdict = oracle.verdict(step.execution, request)
        with armed(f"idempotency.stateful.{step.crash or INSIDE[0]}", "raise", nth=1 if step.crash else 99) as charge:
            try:
                decision = execute(run, step.increment).decision
                assert (verdict == "done") == isinstance(decision, Done)
            except Refused:
                assert verdict == "refused"
            except CrashInjected:
                assert charge.fired
        if charge.fired:
            after_crash(oracle, step, request, verdict)
        elif verdict == "run":
            oracle.merge(step.execution, request, step.increment)
        assert rows() == oracle.rows(), step
    return oracle


@settings(max_examples=150, deadline=None)
@given(walks(INSIDE, 14))
def test_any_walk_over_a_versioned_table_is_a_clean_run(steps: list[Step]):
    """Guards the whole rule: restore points, superseded runs, adoption, refusals, compaction, empty merges."""
    table = Memory()

    def execute(run: Run, increment: Increment) -> Any:
        table.increment = increment
        return stateful.run_merge(table, run)

    def after_crash(oracle: Oracle, step: Step, request: str, verdict: str) -> None:
        if step.crash in ("after_restore", "after_erase"):
            oracle.go_back(step.execution or "")
        elif step.crash == "after_merge":
            oracle.merge(step.execution or "", request, step.increment)

    oracle = follow(steps, execute, table.optimize, lambda: table.states[-1], after_crash)
    # Replaying everything from the beginning, in order, always leads home.
    start = min(oracle.beginnings, default="1")
    for execution in (e for e in EXECUTIONS if e >= start):
        table.increment = {"a": execution}
        previous = None if execution == start else str(int(execution) - 1)
        stateful.run_merge(table, Run("p", execution, previous, f"again-{execution}"))
    assert table.states[-1] == {"a": EXECUTIONS[-1]}


CONTRACT = Contract(keys=("id",), values=("v",), flag="gone")


@pytest.fixture
def work(database: str) -> Iterator[Any]:
    with connect(database, application_name="test-stateful") as connection:
        connection.execute("CREATE TABLE devices (id text PRIMARY KEY, v text, note text)")
        stateful.create_history(connection, "devices")
        yield connection


@pytest.mark.stack
def test_any_walk_over_a_postgres_table_is_a_clean_run_and_a_crash_leaves_no_trace(work: Any):
    """Guards the images and the one transaction: there is no moment between clean and restore to die in."""

    def execute(run: Run, increment: Increment) -> Any:
        with transaction(work):
            rows = [(key, value, value is None) for key, value in increment.items()]
            source = stage(work, CONTRACT, target="devices", rows=rows)
            return stateful.merge_postgres(work, CONTRACT, run, target="devices", source=source)

    def after_crash(oracle: Oracle, step: Step, request: str, verdict: str) -> None:
        """The outer transaction rolled everything back."""

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(walks((*INSIDE, *AROUND), 7))
    def holds(steps: list[Step]) -> None:
        work.execute("TRUNCATE devices, devices_images")
        work.execute("DELETE FROM devices_runs WHERE version > 0")
        work.execute("INSERT INTO devices VALUES ('theirs', 'kept', 'not ours')")
        follow(
            steps,
            execute,
            lambda: work.execute("VACUUM ANALYZE devices"),
            lambda: dict(work.execute("SELECT id, v FROM devices WHERE id <> 'theirs'").fetchall()),
            after_crash,
        )
        assert work.execute("SELECT note FROM devices WHERE id = 'theirs'").fetchone() == ("not ours",)

    holds()
