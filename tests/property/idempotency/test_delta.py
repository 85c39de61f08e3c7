"""The blocks on real Delta tables against plain-Python oracles: any run, retry, crash, replay and compaction.

The same walks as on Postgres, fewer of them: each statement costs a second. Compaction is Delta's own OPTIMIZE.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lockstep.idempotency import delta, merger, stateful, transactional
from lockstep.idempotency.overwrite import overwrite_delta
from lockstep.idempotency.stateful_rules import Run
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import LostClaim
from lockstep.kernel.ids import SystemIds
from tests.property.idempotency import test_merger as merging
from tests.property.idempotency import test_stateful as replaying

pytestmark = [pytest.mark.stack, pytest.mark.long]

FEW = settings(
    max_examples=6,
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
    run = st.builds(Step, st.sampled_from(UNITS), st.integers(0, 3), st.none() | st.sampled_from(points))
    return st.lists(run | st.just(Step(None, 0, None)), min_size=2, max_size=5)


@pytest.fixture
def tables(bucket: str) -> Callable[[], str]:
    """Addresses of tables that nobody has used."""
    numbers = iter(range(1000))
    return lambda: f"s3a://{bucket}/t{next(numbers)}"


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
    @given(merging.walks(), st.lists(st.none() | st.sampled_from(points), min_size=3, max_size=3))
    def holds(walk: tuple[list[list[merging.Row]], Any], crashes: list[str | None]) -> None:
        batches = walk[0]
        target, graves = tables(), tables()
        spark.createDataFrame([], "id bigint, v string, seq bigint").write.format("delta").save(target)
        merger.create_tombstones_delta(spark, merging.HARD, target=target, tombstones=graves)

        def merge(batch: list[merging.Row]) -> None:
            rows = spark.createDataFrame(batch, "id bigint, v string, seq bigint, gone boolean")
            merger.merge_delta(spark, merging.HARD, target=target, source=rows, tombstones=graves)

        order = [index % len(batches) for (index, _), _ in zip(walk[1], crashes, strict=False)]
        for index, crash in zip(order, crashes, strict=False):
            die_at(crash, lambda index=index: merge(batches[index]))
            compact(spark, target)
        for batch in batches:  # the schedule comes round in the end
            merge(batch)
        rows = {row.id: (row.v, row.seq) for row in delta.read(spark, target).collect()}
        assert rows == merging.oracle(batches, set(range(len(batches))))

    holds()


def test_any_walk_of_the_stateful_merger_is_a_clean_run(spark: Any, tables: Callable[[], str]):
    """Guards the marks inside Delta's own commits: restore points, adoption, refusals, with OPTIMIZE in between."""

    @FEW
    @given(replaying.walks(replaying.INSIDE, 6))
    def holds(walk: list[replaying.Step]) -> None:
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
