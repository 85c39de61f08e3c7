"""The blocks on real Delta tables against plain-Python oracles: any run, retry, crash, replay and compaction.

The same walks as on Postgres, fewer of them: each statement costs a second. Compaction is Delta's own OPTIMIZE.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lockstep.idempotency import delta, keyed, merger, stateful, transactional
from lockstep.idempotency.calendar import MONTH, Every
from lockstep.idempotency.cleaner import Loaded, Refused
from lockstep.idempotency.cleaner_delta import DeltaDataset, clean_delta, freeze_delta, load_delta
from lockstep.idempotency.keyed import Event
from lockstep.idempotency.overwrite import overwrite_delta
from lockstep.idempotency.stateful_rules import Run
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import LostClaim
from lockstep.kernel.ids import SystemIds
from tests.property.idempotency import test_merger as merging
from tests.property.idempotency import test_stateful as replaying
from tests.unit.idempotency import test_keyed as sessions

pytestmark = [pytest.mark.stack, pytest.mark.long]

FEW = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
UNITS = ("d1", "d2")


class Step(NamedTuple):
    """One thing that happens to a table of units. No unit: a compaction."""

    unit: str | None
    rows: int
    crash: str | None


def steps(*points: str) -> st.SearchStrategy[list[Step]]:
    run = st.builds(Step, st.sampled_from(UNITS), st.integers(0, 3), st.sampled_from((None, *points)))
    return st.lists(st.one_of(run, run, run, st.just(Step(None, 0, None))), min_size=3, max_size=5)


@pytest.fixture
def tables(tmp_path: Path) -> Callable[[], str]:
    """Addresses of tables that nobody has used."""
    numbers = iter(range(1000))
    return lambda: f"{tmp_path.as_uri()}/t{next(numbers)}"


def compact(spark: Any, table: str) -> None:
    if delta.exists(spark, table):
        spark.sql(f"OPTIMIZE {delta.quoted(table)}").collect()


def die_at(point: str | None, act: Callable[[], object]) -> bool:
    """Whether it died."""
    if point is None:
        act()
        return False
    with armed(point, "raise") as charge, suppress(CrashInjected):
        act()
    return charge.fired


def found(spark: Any, table: str) -> dict[str, list[int]]:
    units: dict[str, list[int]] = {}
    for row in delta.read(spark, table).collect() if delta.exists(spark, table) else ():
        units.setdefault(row.unit, []).append(row.id)
    return {unit: sorted(ids) for unit, ids in units.items()}


def expected(units: dict[str, int]) -> dict[str, list[int]]:
    return {unit: list(range(rows)) for unit, rows in units.items() if rows}


def frame(spark: Any, unit: str, rows: int) -> Any:
    return spark.range(rows).selectExpr("CAST(id AS INT) AS id", f"'{unit}' AS unit")


def test_units_that_are_overwritten_hold_what_was_written_last(spark: Any, tables: Callable[[], str]):
    @FEW
    @given(steps("overwrite.delta.before_write", "overwrite.delta.after_commit"))
    def holds(walk: list[Step]) -> None:
        table, units = tables(), dict[str, int]()
        for number, (unit, rows, crash) in enumerate(walk):
            if unit is None:
                compact(spark, table)
                continue

            def write(unit: str = unit, rows: int = rows, run: str = f"r{number}") -> None:
                overwrite_delta(spark, table, frame(spark, unit, rows), {"unit": unit}, run=run, partition_by=["unit"])

            if die_at(crash, write):
                write()  # the retry
            units[unit] = rows
            assert found(spark, table) == expected(units)

    holds()


def test_a_key_is_applied_once_and_a_newer_generation_replaces_it(spark: Any, tables: Callable[[], str]):
    """Every step is a replay of its unit in a new generation; the retry after a crash is the same generation."""

    @FEW
    @given(steps("transactional.delta.before_write", "transactional.delta.after_commit"))
    def holds(walk: list[Step]) -> None:
        table, units = tables(), dict[str, int]()
        for generation, (unit, rows, crash) in enumerate(walk, 1):
            if unit is None:
                compact(spark, table)
                continue

            def write(unit: str = unit, rows: int = rows, generation: int = generation) -> Any:
                return transactional.write_delta(
                    spark,
                    table,
                    frame(spark, unit, rows),
                    transactional.Key("p", unit, generation),
                    run="r",
                    content=str(rows),
                    ids=SystemIds(),
                    replace=f"unit = '{unit}'",
                )

            die_at(crash, write)
            again = write()
            assert again.already == (crash is None or crash.endswith("after_commit"))
            if unit in units:
                with pytest.raises(LostClaim):
                    write(generation=min(n for n, step in enumerate(walk, 1) if step.unit == unit))
            units[unit] = rows
            assert found(spark, table) == expected(units)

    holds()


def test_merges_of_any_order_give_the_newest_fact_of_every_key(spark: Any, tables: Callable[[], str]):
    points = tuple(
        f"idempotency.merger.{moment}"
        for moment in ("before_apply_delta", "after_tombstones_delta", "after_commit_delta")
    )

    @FEW
    @given(
        merging.walks(),
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from((None, *points))), min_size=2, max_size=3),
    )
    def holds(walk: tuple[list[list[merging.Row]], Any], runs: list[tuple[int, str | None]]) -> None:
        batches = walk[0]
        target, graves = tables(), tables()
        spark.createDataFrame([], "id bigint, v string, seq bigint").write.format("delta").save(target)
        merger.create_tombstones_delta(spark, merging.HARD, target=target, tombstones=graves)

        def merge(batch: list[merging.Row]) -> None:
            rows = spark.createDataFrame(batch, "id bigint, v string, seq bigint, gone boolean")
            merger.merge_delta(spark, merging.HARD, target=target, source=rows, tombstones=graves)

        for index, crash in runs:
            die_at(crash, partial(merge, batches[index % len(batches)]))
        compact(spark, target)
        for batch in batches:  # the schedule comes round in the end
            merge(batch)
        rows = {row.id: (row.v, row.seq) for row in delta.read(spark, target).collect()}
        assert rows == merging.oracle(batches, set(range(len(batches))))

    holds()


def test_any_walk_of_the_stateful_merger_is_a_clean_run(spark: Any, tables: Callable[[], str]):
    """Guards the marks inside Delta's own commits: restore points, adoption, refusals, with OPTIMIZE in between."""
    beginning = [replaying.Step("1", {"a": "x", "b": "x"}, False, None), replaying.Step("2", {"b": None}, False, None)]
    replay = st.builds(
        replaying.Step,
        st.sampled_from(("1", "2", "3")),
        replaying.increments,
        st.sampled_from((False, False, True)),
        st.sampled_from((None, *replaying.INSIDE)),
    )

    @FEW
    @given(
        st.lists(
            st.one_of(replay, replay, replay, st.just(replaying.Step(None, {}, False, None))), min_size=2, max_size=4
        )
    )
    def holds(steps: list[replaying.Step]) -> None:
        walk = [*beginning, *steps]
        table = tables()
        spark.createDataFrame([], "id string, v string").write.format("delta").save(table)

        def execute(run: Run, increment: replaying.Increment) -> Any:
            rows = [(key, value, value is None) for key, value in increment.items()]
            source = spark.createDataFrame(rows, "id string, v string, gone boolean")
            return stateful.merge_delta(spark, replaying.CONTRACT, run, target=table, source=source)

        def after_crash(oracle: replaying.Oracle, step: replaying.Step, request: str, verdict: str) -> None:
            if step.crash in ("after_restore", "after_erase"):
                oracle.go_back(step.execution or "")
            elif step.crash == "after_merge":
                oracle.merge(step.execution or "", request, step.increment)

        replaying.follow(
            walk,
            execute,
            lambda: compact(spark, table),
            lambda: {row.id: row.v for row in delta.read(spark, table).collect()},
            after_crash,
        )

    holds()


START = date(2024, 12, 30)


class Deed(NamedTuple):
    """One thing that happens to a dataset of units of two days; a replay loads both days of its unit."""

    what: str  # replay, zombie, clean, freeze, compact
    unit: int
    rows: int
    crash: str | None


def deeds(what: str, *points: str) -> st.SearchStrategy[Deed]:
    return st.builds(Deed, st.just(what), st.integers(0, 2), st.integers(0, 2), st.sampled_from((None, *points)))


REPLAYS = deeds("replay", "before_write", "after_commit")
DEEDS = st.one_of(
    REPLAYS,
    REPLAYS,
    deeds("zombie"),
    deeds("clean", "before_clean"),
    deeds("freeze", "marked_frozen"),
    deeds("compact"),
)


class Units:
    """The dataset and its oracle: the rows of each day, the runs of each unit's first day, up to where it is frozen."""

    def __init__(self, spark: Any, path: str) -> None:
        self.spark = spark
        self.dataset = DeltaDataset(path, "day", Every(2, START))
        self.rows: dict[date, int] = {}
        self.runs: dict[int, list[str]] = {}
        self.frozen = START

    def days(self, unit: int) -> tuple[date, date]:
        return START + timedelta(days=2 * unit), START + timedelta(days=2 * unit + 1)

    def load(self, day: date, rows: int, run: str) -> Loaded:
        frame = self.spark.range(rows).selectExpr("id", f"{delta.literal(day)} AS day")
        return load_delta(self.spark, self.dataset, day, frame, run=run)

    def do(self, deed: Deed, run: str) -> None:
        point = f"cleaner.delta.{deed.crash}" if deed.crash else None
        acts = {"replay": self.replay, "zombie": self.zombie, "clean": self.clean, "freeze": self.freeze}
        if deed.what == "compact":
            compact(self.spark, self.dataset.path)
        else:
            acts[deed.what](deed, point, run)

    def replay(self, deed: Deed, point: str | None, run: str) -> None:
        first, second = self.days(deed.unit)
        for day in (first, second):
            if not self.refused(day, partial(self.load, day, deed.rows, run)):
                die_at(point, partial(self.load, day, deed.rows, run))
                self.load(day, deed.rows, run)
                self.rows = {one: rows for one, rows in self.rows.items() if day != first or one != second}
                self.rows[day] = deed.rows
                self.runs.setdefault(deed.unit, []).append(run)

    def zombie(self, deed: Deed, point: str | None, run: str) -> None:
        """A late retry of a run that loaded the unit's first day."""
        if runs := self.runs.get(deed.unit):
            assert self.load(self.days(deed.unit)[0], 9, runs[0]).already

    def clean(self, deed: Deed, point: str | None, run: str) -> None:
        first, second = self.days(deed.unit)
        if not self.refused(first, partial(clean_delta, self.spark, self.dataset, first, run=run)):
            if not delta.exists(self.spark, self.dataset.path):
                return
            die_at(point, partial(clean_delta, self.spark, self.dataset, first, run=run))
            clean_delta(self.spark, self.dataset, first, run=run)
            self.rows = {day: rows for day, rows in self.rows.items() if day not in (first, second)}
            self.runs.pop(deed.unit, None)

    def freeze(self, deed: Deed, point: str | None, run: str) -> None:
        if not delta.exists(self.spark, self.dataset.path):
            return
        before = self.days(deed.unit)[0]
        act = partial(freeze_delta, self.spark, self.dataset, before=before, into=MONTH, run=run)
        die_at(point, act)
        act()
        self.frozen = max(self.frozen, before)

    def refused(self, day: date, act: Callable[[], object]) -> bool:
        if day >= self.frozen:
            return False
        with pytest.raises(Refused, match="frozen"):
            act()
        return True

    def found(self) -> dict[date, int]:
        if not delta.exists(self.spark, self.dataset.path):
            return {}
        counted = delta.read(self.spark, self.dataset.path).groupBy("day").count().collect()
        return {row["day"]: row["count"] for row in counted}


def test_units_of_days_hold_what_clean_runs_leave(spark: Any, tables: Callable[[], str]):
    """Guards loads, cleans and freezes together: renewed whole, closed for good, and no late retry cleans anything."""

    @FEW
    @given(REPLAYS, st.lists(DEEDS, min_size=2, max_size=4))
    def holds(first: Deed, others: list[Deed]) -> None:
        units = Units(spark, tables())
        for number, deed in enumerate([first, *others]):
            units.do(deed, f"r{number}")
            assert units.found() == {day: rows for day, rows in units.rows.items() if rows}, deed

    holds()


def test_sessions_of_any_split_order_and_crash_are_those_of_one_batch(spark: Any, tables: Callable[[], str]):
    points = ("idempotency.keyed.after_events", "idempotency.keyed.after_sessions")

    @FEW
    @given(
        sessions.arrivals(),
        st.lists(st.tuples(st.integers(0, 5), st.sampled_from((None, *points))), min_size=1, max_size=2),
    )
    def holds(arrival: tuple[list[Event], list[list[Event]], Any], runs: list[tuple[int, str | None]]) -> None:
        log, batches, _ = arrival
        where = {"events": tables(), "sessions": tables()}
        keyed.create_session_tables(spark, **where)

        def fold(batch: list[Event]) -> int:
            rows = spark.createDataFrame(batch, "user string, at timestamp, position bigint, id string")
            return keyed.fold_sessions(spark, rows, **where, gap=sessions.GAP)

        for index, crash in runs:
            die_at(crash, partial(fold, batches[index % len(batches)]))
        compact(spark, where["events"])
        for batch in batches:
            fold(batch)
        rows = delta.read(spark, where["sessions"]).selectExpr("key", "user", "events").collect()
        assert sorted(map(tuple, rows)) == sorted((s.key, s.user, s.events) for s in keyed.sessions(log, sessions.GAP))

    holds()
