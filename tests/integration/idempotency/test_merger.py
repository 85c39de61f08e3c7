"""Merger on the real stores: the chapter's tables, the refusals, and the guards one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg import sql

from lockstep.idempotency import merger
from lockstep.idempotency.merger import Contract, Deletes, Duplicates, NullFlag
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.kernel.postgres import connect, transaction
from tests.faults.modes import HANGS, meet

pytestmark = pytest.mark.stack

CONTRACT = Contract(keys=("id",), values=("v",), order="seq", flag="gone")
UNORDERED = dataclasses.replace(CONTRACT, order=None, values=("v", "seq"))
HOURS = ("07:00", "08:00", "09:00", "10:00")
TABLE_4_1 = {
    "07:00": ([("A", "A", 1, False)], "A"),
    "08:00": ([("A", "A-U", 2, False), ("B", "B", 2, False)], "A-U B"),
    "09:00": ([("B", None, 3, True), ("C", "C", 3, False)], "A-U C"),
    "10:00": ([("M", "M", 4, False), ("N", "N", 4, False), ("O", "O", 4, False)], "A-U C M N O"),
}
TABLE_4_2 = {"08:00": "A-U B C M N O", "09:00": "A-U C M N O", "10:00": "A-U C M N O"}


@pytest.fixture
def work(dsn: str) -> Iterator[Any]:
    with connect(dsn, application_name="test-merger") as connection:
        connection.execute("CREATE TABLE devices (id text PRIMARY KEY, v text, seq bigint)")
        connection.execute("CREATE TABLE flagged (id text PRIMARY KEY, v text, seq bigint, gone boolean)")
        merger.create_tombstones(connection, CONTRACT, target="devices", tombstones="graves")
        merger.create_tombstones(connection, CONTRACT, target="devices", tombstones="graves")  # again: no harm
        yield connection


def merge(work: Any, rows: list[Any], contract: Contract = CONTRACT, target: str = "devices") -> int:
    with transaction(work):
        source = merger.stage(work, contract, target=target, rows=rows)
        graves = "graves" if contract.needs_tombstones else None
        return merger.merge_postgres(work, contract, target=target, source=source, tombstones=graves)


def seen(work: Any, target: str = "devices") -> str:
    return " ".join(v for (v,) in work.execute(f"SELECT coalesce(v, '-') FROM {target} ORDER BY id"))  # noqa: S608


def test_table_4_1_the_increments_build_up(work: Any):
    for hour in HOURS:
        rows, after = TABLE_4_1[hour]
        merge(work, rows)
        assert seen(work) == after


def test_table_4_2_without_an_order_a_replay_walks_through_states_that_never_were(work: Any):
    """The plain pattern, as the book prints it: B is back until its delete is replayed."""
    for hour in HOURS:
        merge(work, TABLE_4_1[hour][0], UNORDERED)
    for hour in HOURS[1:]:
        merge(work, TABLE_4_1[hour][0], UNORDERED)
        assert seen(work) == TABLE_4_2[hour]


def test_table_4_2_with_an_order_a_replay_changes_nothing_at_any_moment(work: Any):
    """Guards the order and the tombstone: B was deleted later than the replayed insert."""
    for hour in HOURS:
        merge(work, TABLE_4_1[hour][0])
    for hour in HOURS:
        assert merge(work, TABLE_4_1[hour][0]) == 0
        assert seen(work) == "A-U C M N O"


def test_figure_4_4_rows_deleted_before_the_first_run_never_enter(work: Any):
    merge(work, [("A", "A", 1, False), ("B", "B", 1, True)])
    assert seen(work) == "A"
    soft = dataclasses.replace(CONTRACT, deletes=Deletes.SOFT)
    merge(work, [("A", "A", 1, False), ("B", "B", 1, True)], soft, "flagged")
    assert work.execute("SELECT id, gone FROM flagged ORDER BY id").fetchall() == [("A", False), ("B", True)]


def test_a_deleted_key_may_come_back_by_a_newer_insert_only(work: Any):
    merge(work, [("A", "old", 1, False)])
    merge(work, [("A", None, 5, True)])
    assert merge(work, [("A", "late", 3, False)]) == 0
    assert merge(work, [("A", "reborn", 6, False)]) == 1
    assert merge(work, [("A", None, 5, True)]) == 0  # the old delete, replayed
    assert seen(work) == "reborn"


def test_a_late_change_that_meets_a_delete_does_not_bring_the_row_back(dsn: str, work: Any):
    """Guards the lock: the late one would read the tombstones before the delete, and the table after it."""
    merge(work, [("A", "old", 1, False)])

    def drive(*row: Any) -> None:
        with connect(dsn, application_name="driver") as mine:
            merge(mine, [row])

    meet(
        "idempotency.merger.before_commit",
        HANGS,
        lambda: drive("A", None, 5, True),
        lambda: drive("A", "late", 3, False),
        blocked_after=1.0,
    )
    assert seen(work) == ""


def test_the_statements_for_redshift_keep_the_newer_row_and_the_delete(work: Any):
    """On the SQL that both dialects share; the property tests walk further."""

    def apply(rows: list[Any]) -> None:
        with transaction(work):
            source = merger.stage(work, CONTRACT, target="devices", rows=rows)
            names = {"target": "devices", "source": source, "tombstones": "graves"}
            for statement in merger.redshift_statements(CONTRACT, **names):
                work.execute(statement)

    apply([("A", "new", 5, False), ("B", None, 5, True)])
    apply([("A", "old", 3, False), ("B", "late", 3, False)])
    assert seen(work) == "new"


def test_a_row_from_before_the_order_column_is_older_than_any_change(work: Any):
    """Guards a table that got its order later: compared with NULL no change is newer, and none would ever arrive."""
    add = "INSERT INTO devices VALUES ('A', 'unordered', NULL), ('B', 'unordered', NULL), ('C', 'unordered', NULL)"
    work.execute(add)
    assert merge(work, [("A", "new", 1, False), ("B", None, 1, True)]) == 2
    assert seen(work) == "new unordered"
    with transaction(work):
        source = merger.stage(work, CONTRACT, target="devices", rows=[("C", "newer", 1, False)])
        names = {"target": "devices", "source": source, "tombstones": "graves"}
        for statement in merger.redshift_statements(CONTRACT, **names):
            work.execute(statement)
    assert seen(work) == "new newer"


def test_columns_may_be_called_anything(work: Any):
    """Guards tables of others: upper case, quotes, and the plain words that a statement might use itself."""
    names = ('Id "1"', "nth", "same_rows", "last_order", "Order", "dead_at")
    contract = Contract(keys=names[:1], values=(*names[1:4], "dead_at"), order="Order", flag="Gone?")
    columns = ", ".join(sql.Identifier(name).as_string(None) + " text" for name in contract.target_columns)
    work.execute(f"CREATE TABLE odd ({columns})")
    merger.create_tombstones(work, contract, target="odd", tombstones="odd_graves")

    def apply(*rows: Any) -> int:
        with transaction(work):
            source = merger.stage(work, contract, target="odd", rows=rows)
            return merger.merge_postgres(work, contract, target="odd", source=source, tombstones="odd_graves")

    assert apply(("k", "a", "b", "c", "d", "1", False), ("k", "a", "b", "c", "D", "2", False)) == 1
    assert apply(("k", "x", "x", "x", "x", "1", False)) == 0
    assert work.execute("SELECT dead_at FROM odd").fetchall() == [("D",)]


def test_several_rows_of_one_key_resolve_to_the_last_and_doubles_collapse(work: Any):
    merge(work, [("A", "1", 1, False), ("A", "3", 3, False), ("A", "3", 3, False), ("A", "2", 2, True)])
    assert seen(work) == "3"


@pytest.mark.parametrize(
    ("rows", "contract", "words"),
    [
        ([(None, "x", 1, False)], CONTRACT, "1 rows have no key"),
        ([("A", "x", None, False)], CONTRACT, "1 rows have no order"),
        ([("A", "x", 1, None)], CONTRACT, "NULL flag"),
        ([("A", "x", 1, False), ("A", "y", 1, False)], CONTRACT, "1 keys have several different rows"),
        ([("A", "x", 1, False), ("A", None, 1, True)], CONTRACT, "1 keys have several different rows"),
        ([("A", "x", 1, False), ("A", "y", 2, False)], UNORDERED, "1 keys have several different rows"),
        (
            [("A", "x", 1, False), ("A", "y", 2, False)],
            dataclasses.replace(CONTRACT, duplicates=Duplicates.REFUSE),
            "1 keys occur more than once",
        ),
    ],
)
def test_an_increment_that_would_be_guessed_at_is_refused_whole(
    work: Any, rows: list[Any], contract: Contract, words: str
):
    """Each of these loses, doubles or randomises rows in the plain pattern, without an error."""
    merge(work, [("Z", "kept", 1, False)])
    with pytest.raises(InvalidInput, match=words):
        merge(work, [("B", "good", 1, False), *rows], contract)
    assert seen(work) == "kept"


@pytest.mark.parametrize(("meaning", "after"), [(NullFlag.ALIVE, "new"), (NullFlag.DELETED, "")])
def test_a_null_flag_means_what_the_contract_says(work: Any, meaning: NullFlag, after: str):
    merge(work, [("A", "old", 1, False)])
    merge(work, [("A", "new", 2, None)], dataclasses.replace(CONTRACT, null_flag=meaning))
    assert seen(work) == after


def test_a_second_run_on_the_same_connection_can_stage_again(work: Any):
    """Guards ON COMMIT DROP and its absence inside one transaction: the book's temporary table outlives the run."""
    with transaction(work):
        for number in (1, 2):
            source = merger.stage(work, CONTRACT, target="devices", rows=[("A", str(number), number, False)])
            merger.merge_postgres(work, CONTRACT, target="devices", source=source, tombstones="graves")
    assert seen(work) == "2"
    with pytest.raises(InvalidInput, match="open transaction"):
        merger.stage(work, CONTRACT, target="devices", rows=[])


def test_the_merge_rolls_back_with_the_callers_transaction(work: Any):
    """Guards composition: a ledger row and the merge commit together or not at all."""
    with pytest.raises(Terminal), transaction(work):
        source = merger.stage(work, CONTRACT, target="devices", rows=[("A", "x", 1, False)])
        merger.merge_postgres(work, CONTRACT, target="devices", source=source, tombstones="graves")
        work.execute("SELECT 1/0")
    assert seen(work) == ""


@pytest.mark.parametrize(
    ("contract", "guard", "instead"),
    [
        (CONTRACT, ' AND (t."seq" IS NULL OR s."seq" > t."seq") THEN UPDATE', " THEN UPDATE"),
        (CONTRACT, ' AND (s.lockstep_dead IS NULL OR s."seq" > s.lockstep_dead)', ""),
        (CONTRACT, ' AND s."gone" AND (t."seq" IS NULL OR s."seq" > t."seq") THEN DELETE', ' AND s."gone" THEN DELETE'),
        (UNORDERED, ' AND NOT s."gone"', ""),
    ],
)
def test_each_guard_of_the_statement_is_needed(
    work: Any, contract: Contract, guard: str, instead: str, monkeypatch: pytest.MonkeyPatch
):
    """Remove a guard and a late or deleted row gets in: the tests above do not pass by luck."""
    late = [("A", "older", 4, False), ("B", "back", 4, False), ("C", "dead", 4, True), ("D", None, 4, True)]
    increment = late if contract is CONTRACT else [("C", "dead", 4, True)]
    original = merger.postgres_merge

    def weaker(*arguments: Any) -> str:
        text = original(*arguments)
        assert guard in text
        return text.replace(guard, instead)

    merge(work, [("A", "newer", 5, False), ("B", None, 5, True), ("D", "later", 5, False)])
    merge(work, increment, contract)
    assert seen(work) == "newer later"
    monkeypatch.setattr(merger, "postgres_merge", weaker)
    merge(work, increment, contract)
    assert seen(work) != "newer later"


class TestDelta:
    """The same on Delta, few statements: each costs a second or more."""

    def merge(self, spark: Any, tables: tuple[str, str], rows: list[Any]) -> int:
        frame = spark.createDataFrame(rows, "id string, v string, seq bigint, gone boolean")
        return merger.merge_delta(spark, CONTRACT, target=tables[0], source=frame, tombstones=tables[1])

    def seen(self, spark: Any, tables: tuple[str, str]) -> str:
        return " ".join(row.v for row in spark.read.format("delta").load(tables[0]).orderBy("id").collect())

    def test_late_and_deleted_rows_stay_out_through_crashes_and_replays(self, spark: Any, lake: str):
        """Guards the order, the tombstones and the order of the two commits: tombstones first.

        And the refusal: of an unmatched key Delta inserts both rows, without an error.
        """
        tables = f"{lake}/devices", f"{lake}/graves"
        spark.createDataFrame([], "id string, v string, seq bigint").write.format("delta").save(tables[0])
        merger.create_tombstones_delta(spark, CONTRACT, target=tables[0], tombstones=tables[1])
        self.merge(spark, tables, [("A", "A-U", 2, False), ("B", "B", 2, False), ("B", "B0", 1, False)])
        deleting = [("B", None, 3, True), ("C", "C", 3, False)]
        for point in ("before_apply_delta", "after_tombstones_delta", "after_commit_delta"):
            with armed(f"idempotency.merger.{point}", "raise") as charge, pytest.raises(CrashInjected):
                self.merge(spark, tables, deleting)
            assert charge.fired
        assert self.merge(spark, tables, [*deleting, ("A", "A", 1, False)]) == 0
        with pytest.raises(InvalidInput, match="several different rows"):
            self.merge(spark, tables, [("X", "1", 1, False), ("X", "2", 1, False), (None, "3", 1, None)])
        assert self.merge(spark, tables, [("B", "B", 2, False)]) == 0
        assert self.seen(spark, tables) == "A-U C"

    def test_columns_may_be_called_anything(self, spark: Any, lake: str):
        """Guards names with dots, which Spark reads as fields of a struct, and the words of the statement itself."""
        contract = Contract(keys=("the.Id",), values=("nth", "dead_at"), order="my.seq", flag="gone")
        target, graves = f"{lake}/odd", f"{lake}/odd-graves"
        types = "`the.Id` string, nth string, dead_at string, `my.seq` bigint"
        spark.createDataFrame([], types).write.format("delta").save(target)
        merger.create_tombstones_delta(spark, contract, target=target, tombstones=graves)
        frame = spark.createDataFrame([("A", "1", "x", 1, False), ("A", "2", "y", 2, False)], f"{types}, gone boolean")
        assert merger.merge_delta(spark, contract, target=target, source=frame, tombstones=graves) == 1
        assert merger.merge_delta(spark, contract, target=target, source=frame, tombstones=graves) == 0
        assert [tuple(row) for row in spark.read.format("delta").load(target).collect()] == [("A", "2", "y", 2)]

    def test_a_second_session_of_the_process_merges_rows_of_its_own(self, spark: Any, stack: Any):
        """Guards a worker that opened its session again: PySpark binds checkpoints to the first session there was."""
        from pyspark.sql import SparkSession
        from pyspark.sql.connect.session import SparkSession as Remote

        spark.range(1).collect()
        second = SparkSession.builder.remote(stack.site().environment["LOCKSTEP_SPARK_REMOTE"]).create()
        try:
            rows = second.createDataFrame([("A", "1", 1, False)], "id string, v string, seq bigint, gone boolean")
            increment = merger.checked_delta(CONTRACT, rows, unit="second session")
            assert increment.sparkSession is second
            assert Remote.active() is not second, "what was active before is active again"
        finally:
            second.stop()
