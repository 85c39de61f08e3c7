"""Stateful merger on the real stores: the chapter's replay, crashes at every point, other people's work, retention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.idempotency import delta, merger, stateful
from lockstep.idempotency.merger import Contract, Deletes
from lockstep.idempotency.stateful import Refused
from lockstep.idempotency.stateful_rules import Action, Commit, Done, Mark, Proceed, Reason, Restore, Run
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import InvalidInput, LostClaim
from lockstep.kernel.postgres import connect, transaction
from tests.faults.modes import HANGS, meet

pytestmark = pytest.mark.stack

CONTRACT = Contract(keys=("id",), values=("v",), flag="gone")
HOURS = ("06:00", "07:00", "08:00", "09:00", "10:00")
TABLE_4_1 = {
    "07:00": ([("A", "A", False)], "A"),
    "08:00": ([("A", "A-U", False), ("B", "B", False)], "A-U B"),
    "09:00": ([("B", None, True), ("C", "C", False)], "A-U C"),
    "10:00": ([("M", "M", False), ("N", "N", False), ("O", "O", False)], "A-U C M N O"),
}


def run(hour: str, request: str = "1", **more: Any) -> Run:
    return Run("devices", hour, HOURS[HOURS.index(hour) - 1], f"{hour}-{request}", **more)


class TestPostgres:
    """One transaction holds the decision, the restore, the merge and the history row."""

    @pytest.fixture
    def work(self, dsn: str) -> Iterator[Any]:
        with connect(dsn, application_name="test-stateful") as connection:
            connection.execute("CREATE TABLE devices (id text PRIMARY KEY, v text, weight numeric, seen timestamptz)")
            stateful.create_history(connection, "devices")
            stateful.create_history(connection, "devices")  # again: no harm
            yield connection

    def execute(self, work: Any, wish: Run, rows: list[Any] | None = None, **more: Any) -> stateful.Outcome:
        with transaction(work):
            increment = TABLE_4_1[wish.execution][0] if rows is None else rows
            source = merger.stage(work, CONTRACT, target="devices", rows=increment)
            return stateful.merge_postgres(work, CONTRACT, wish, target="devices", source=source, **more)

    def seen(self, work: Any) -> str:
        return " ".join(v for (v,) in work.execute("SELECT v FROM devices ORDER BY id"))

    def all_hours(self, work: Any) -> None:
        for hour in HOURS[1:]:
            assert self.execute(work, run(hour)).decision == Proceed(first=hour == "07:00")
            assert self.seen(work) == TABLE_4_1[hour][1]

    def test_a_replay_shows_the_states_of_table_4_1_and_never_those_of_table_4_2(self, work: Any):
        self.all_hours(work)
        for hour in ("08:00", "09:00", "10:00"):
            self.execute(work, run(hour, "again"))
            assert self.seen(work) == TABLE_4_1[hour][1]

    def test_table_4_5_the_restore_is_a_version_of_its_own(self, work: Any):
        """The book prints 5 for the replayed run; a table that counts its restores gives it 6."""
        days = ("10-04", "10-05", "10-06", "10-07", "10-08")

        def go(day: str, request: str) -> stateful.Outcome:
            wish = Run("devices", day, days[days.index(day) - 1], f"{day}-{request}")
            return self.execute(work, wish, [(day, day, False)])

        assert [go(day, "1").version for day in days[1:]] == [1, 2, 3, 4]
        assert go("10-07", "fix") == (Restore(2, ("10-07", "10-08"), first=False), 6)
        assert go("10-08", "fix") == (Proceed(first=False), 7)
        assert self.seen(work) == "10-05 10-06 10-07 10-08"

    def test_a_replay_from_another_time_zone_finds_the_rows_as_they_were_left(self, work: Any):
        """Guards the digests: the same instant is spelled otherwise in every session, and no row was changed."""
        self.execute(work, run("07:00"))
        work.execute("UPDATE devices SET seen = '2024-10-07 01:02:03+00'")
        self.execute(work, run("08:00"))
        work.execute("SET TimeZone = 'Asia/Tokyo'")
        assert isinstance(self.execute(work, run("08:00", "again")).decision, Restore)
        assert work.execute("SHOW TimeZone").fetchone() == ("Asia/Tokyo",)

    def test_a_corrected_smaller_replay_of_the_latest_run_leaves_no_stale_rows(self, work: Any):
        """The book's history variant asks for rows *after* the run, so it keeps M and O."""
        self.all_hours(work)
        outcome = self.execute(work, run("10:00", "fix"), [("N", "N2", False)])
        assert outcome.decision == Restore(3, ("10:00",), first=False)
        assert self.seen(work) == "A-U C N2"

    def test_a_retry_after_a_lost_answer_adopts_what_was_committed(self, work: Any):
        self.all_hours(work)
        assert self.execute(work, run("10:00")) == (Done(4), 4)

    def test_a_crash_after_the_commit_is_adopted_by_the_retry(self, work: Any):
        work.execute("CREATE TABLE incoming AS SELECT 'A' AS id, 'A' AS v, false AS gone")
        names = {"target": "devices", "source": "incoming"}
        with armed("idempotency.stateful.after_commit", "raise") as charge, pytest.raises(CrashInjected):
            stateful.merge_postgres(work, CONTRACT, run("07:00"), **names)
        assert charge.fired
        assert self.seen(work) == "A"
        assert stateful.merge_postgres(work, CONTRACT, run("07:00"), **names).decision == Done(1)

    @pytest.mark.parametrize(
        "point",
        ["before_restore", "after_restore", "after_erase", "after_merge", "before_commit"],
    )
    def test_a_crash_inside_the_replay_leaves_everything_as_it_was(self, work: Any, point: str):
        self.all_hours(work)
        with armed(f"idempotency.stateful.{point}", "raise") as charge, pytest.raises(CrashInjected):
            self.execute(work, run("08:00", "again"))
        assert charge.fired
        assert self.seen(work) == TABLE_4_1["10:00"][1]
        self.execute(work, run("08:00", "again"))
        assert self.seen(work) == TABLE_4_1["08:00"][1]

    def test_rows_come_back_exactly_with_columns_that_the_merge_never_saw(self, work: Any):
        """Guards the images: numbers and times must survive the way through JSON."""
        self.execute(work, run("07:00"))
        exact = "UPDATE devices SET weight = 12345678901234567890.000000001, seen = '2024-10-07 01:02:03.000004+00'"
        work.execute(exact)
        before = work.execute("SELECT * FROM devices").fetchall()
        self.execute(work, run("08:00"), [("A", None, True)])
        assert work.execute("SELECT * FROM devices").fetchall() == []
        self.execute(work, run("08:00", "again"), [])
        assert work.execute("SELECT * FROM devices").fetchall() == before

    def test_a_delete_of_somebody_else_is_never_undone_by_a_replay(self, work: Any):
        """Guards erased personal data: putting images back would resurrect it."""
        self.all_hours(work)
        work.execute("DELETE FROM devices WHERE id = 'N'")
        with pytest.raises(Refused, match='"N"') as refused:
            self.execute(work, run("10:00", "again"))
        assert refused.value.reason is Reason.FOREIGN
        assert self.seen(work) == "A-U C M O"
        assert isinstance(self.execute(work, run("10:00", "told"), [], accept_drift=True).decision, Restore)
        assert self.seen(work) == "A-U C"

    def test_without_the_guard_against_drift_the_deleted_row_comes_back(
        self, work: Any, monkeypatch: pytest.MonkeyPatch
    ):
        self.all_hours(work)
        work.execute("DELETE FROM devices WHERE id = 'A'")
        monkeypatch.setattr(stateful, "_DRIFT", "SELECT '' WHERE %(version)s < 0")
        self.execute(work, run("08:00", "again"), [])
        assert self.seen(work) == "A"

    def test_without_the_history_row_a_replay_merges_onto_the_unrestored_table(
        self, work: Any, monkeypatch: pytest.MonkeyPatch
    ):
        self.all_hours(work)
        monkeypatch.setattr(stateful, "_TAKE_OUT", "SELECT %(version)s")
        monkeypatch.setattr(stateful, "_PUT_BACK", "SELECT %(version)s")
        self.execute(work, run("08:00", "again"))
        assert self.seen(work) != TABLE_4_1["08:00"][1]

    def test_of_two_runs_at_once_the_second_decides_by_what_the_first_has_left(self, dsn: str, work: Any):
        """Guards the lock around the decision: the second would decide by a history that is about to change."""
        self.execute(work, run("07:00"))

        def drive(request: str, *rows: Any) -> None:
            with connect(dsn, application_name=request) as mine:
                self.execute(mine, run("08:00", request), list(rows))

        met = meet(
            "idempotency.stateful.after_merge",
            HANGS,
            lambda: drive("first", ("B", "wrong", False), ("C", "wrong too", False)),
            lambda: drive("second", ("B", "right", False)),
            blocked_after=1.0,
        )
        assert (met.victim, met.rival) == (None, None)
        assert self.seen(work) == "A right"

    def test_another_pipeline_on_the_same_table_is_foreign(self, work: Any):
        self.execute(work, run("07:00"))
        self.execute(work, Run("other", "07:00", None, "x"), [("A", "theirs", False)])
        with pytest.raises(Refused) as refused:
            self.execute(work, run("07:00", "again"))
        assert refused.value.reason is Reason.FOREIGN
        assert self.seen(work) == "theirs"

    def test_a_replay_does_not_take_the_rows_of_other_tables_along(self, work: Any):
        """Guards what refers to the table: rows leave it for a moment, and a cascade would follow them for good."""
        self.all_hours(work)
        work.execute("CREATE TABLE visits (id text REFERENCES devices ON DELETE CASCADE)")
        work.execute("INSERT INTO visits VALUES ('A'), ('C')")
        with pytest.raises(Refused, match="visits") as refused:
            self.execute(work, run("09:00", "again"))
        assert refused.value.reason is Reason.FOREIGN
        assert self.seen(work) == TABLE_4_1["10:00"][1]
        work.execute("ALTER TABLE visits DROP CONSTRAINT visits_id_fkey")
        later = "ADD FOREIGN KEY (id) REFERENCES devices DEFERRABLE INITIALLY DEFERRED"
        work.execute(f"ALTER TABLE visits {later}")
        self.execute(work, run("09:00", "again"))
        assert self.seen(work) == TABLE_4_1["09:00"][1]
        assert work.execute("SELECT id FROM visits ORDER BY id").fetchall() == [("A",), ("C",)]

    def test_forgotten_images_are_refused_and_the_newest_run_stays_replayable(self, work: Any):
        self.all_hours(work)
        stateful.forget_postgres(work, "devices", version=99)
        with pytest.raises(Refused) as refused:
            self.execute(work, run("09:00", "again"))
        assert refused.value.reason is Reason.RETENTION
        self.execute(work, run("10:00", "again"), [])
        assert self.seen(work) == "A-U C"

    def test_a_table_without_history_and_a_contract_with_tombstones_are_refused(self, work: Any):
        work.execute("CREATE TABLE bare (id text PRIMARY KEY, v text)")
        with pytest.raises(InvalidInput, match="tombstones"):
            contract = Contract(keys=("id",), order="seq", flag="gone")
            stateful.merge_postgres(work, contract, run("07:00"), target="devices", source="x")
        work.execute("DELETE FROM devices_runs")
        with pytest.raises(InvalidInput, match="no history"):
            self.execute(work, run("07:00"))


class TestDelta:
    """The state is inside the commits. One walk through everything, because each statement costs a second."""

    def test_the_whole_life_of_a_table(self, spark: Any, lake: str):
        table = f"{lake}/devices"
        spark.createDataFrame([], "id string, v string").write.format("delta").save(table)
        life = Life(spark, table)

        # Table 4-1, with a compaction and an empty increment between the runs.
        assert life.run(run("07:00")).decision == Proceed(first=True)
        for point in ("after_merge", "after_merge"):  # the second time the run is found done, and nothing fires
            with armed(f"idempotency.stateful.{point}", "raise") as charge:
                life.run_or_die(run("08:00"))
        assert not charge.fired
        spark.sql(f"OPTIMIZE {delta.quoted(table)}").collect()
        empty = life.run(run("09:00"), [])
        assert life.seen() == "A-U B"
        newest = delta.history(spark, table, limit=1)[0]
        assert newest.version == empty.version, "an empty merge must leave its mark"
        assert newest.stamp is not None

        # A corrected replay of 09:00 that dies between restore and merge; a bad increment does not go back at all.
        with pytest.raises(InvalidInput):
            life.run(run("09:00", "bad"), [(None, "x", False)])
        with armed("idempotency.stateful.after_restore", "raise") as charge:
            life.run_or_die(run("09:00", "fix"))
        assert charge.fired
        fixed = life.run(run("09:00", "fix"))
        assert fixed.decision == Proceed(first=False, restored=True)
        assert fixed.version == empty.version + 2, "the restore is a version of its own"
        assert life.seen() == TABLE_4_1["09:00"][1]
        life.run(run("10:00"))

        # Somebody's delete is not undone, unless its version is named and its effect kept: the restore brings C back,
        # the increment N, and both must stay away.
        gone = "id IN ('C', 'N')"
        spark.sql(f"DELETE FROM {delta.quoted(table)} WHERE {gone}").collect()  # noqa: S608
        deleted = delta.history(spark, table, limit=1)[0].version
        with pytest.raises(Refused, match=rf"{deleted} \(DELETE\)") as refused:
            life.run(run("10:00", "again"))
        assert refused.value.reason is Reason.FOREIGN
        told = life.run(run("10:00", "told", undo=frozenset({deleted})), erase=gone)
        assert isinstance(told.decision, Restore)
        assert life.seen() == "A-U M O"

        # Such a run dies after its restore, when A is back. The retry finishes what was begun, although it is not told.
        spark.sql(f"DELETE FROM {delta.quoted(table)} WHERE id = 'A'").collect()  # noqa: S608
        undo = frozenset({delta.history(spark, table, limit=1)[0].version})
        with armed("idempotency.stateful.after_restore", "raise") as charge, pytest.raises(CrashInjected):
            life.run(run("10:00", "lost", undo=undo), erase="id = 'A'")
        assert charge.fired
        assert life.seen() == "A-U"
        increment = [("A", "A-V", False), ("M", "M", False), ("O", "O", False)]
        assert life.run(run("10:00", "lost"), increment).decision == Proceed(first=False, restored=True)
        assert life.seen() == "M O"

        # Retention: Delta itself refuses the version, and the table stays as it is.
        retention = "delta.deletedFileRetentionDuration"
        spark.sql(f"ALTER TABLE {delta.quoted(table)} SET TBLPROPERTIES ('{retention}' = 'interval 0 hours')").collect()
        undo = frozenset(range(delta.history(spark, table, limit=1)[0].version + 1))
        enforced = {delta._REFUSE_OLD_VERSIONS: "true"}  # the session is shared: others read however old
        with delta.settings(spark, enforced), pytest.raises(Refused) as refused:
            life.run(run("08:00", "late", undo=undo))
        assert refused.value.reason is Reason.RETENTION
        assert life.seen() == "M O"


class Life:
    """The Delta table of one test."""

    def __init__(self, spark: Any, table: str) -> None:
        self.spark = spark
        self.table = table

    def run(self, wish: Run, rows: list[Any] | None = None, **more: Any) -> stateful.Outcome:
        increment = TABLE_4_1[wish.execution][0] if rows is None else rows
        frame = self.spark.createDataFrame(increment, "id string, v string, gone boolean")
        return stateful.merge_delta(self.spark, CONTRACT, wish, target=self.table, source=frame, **more)

    def run_or_die(self, wish: Run) -> None:
        try:
            assert isinstance(self.run(wish).decision, Done)
        except CrashInjected:
            return

    def seen(self) -> str:
        return " ".join(row.v for row in delta.read(self.spark, self.table).orderBy("id").collect())


def test_a_stamp_left_on_by_a_session_does_not_pass_for_a_run():
    """Guards against a DELETE that carries our merge stamp because the session forgot to take it off."""
    text = {"lockstep": stateful.PATTERN, "kind": "merge", "pipeline": "p", "execution": "1", "base_version": 0}
    stamp = {**text, "request": "r", "first": True}

    def commit(operation: str, **parameters: str) -> Any:
        return delta.Commit(3, operation, None, stamp, parameters, {})  # type: ignore[arg-type]

    assert stateful.delta_commit(commit("MERGE"), "p").action is Action.MERGE
    assert stateful.delta_commit(commit("MERGE"), "other").action is Action.FOREIGN
    assert stateful.delta_commit(commit("DELETE"), "p").action is Action.FOREIGN
    assert stateful.delta_commit(commit("OPTIMIZE"), "p").action is Action.HARMLESS
    restored = stateful.delta_commit(commit("RESTORE", version="2"), "p")
    assert (restored.restored_to, restored.ours) == (2, False)
    assert stateful.delta_commit(commit("RESTORE", version="None"), "p").restored_to is None


def test_a_run_that_decided_before_another_one_committed_gives_way():
    """Guards a lane that two runs hold at once: nothing is merged, so Spark is not even asked."""
    nothing: Any = None
    commits = [Commit(0, Action.FOREIGN, "CREATE TABLE")]

    class Table(stateful.DeltaTable):
        def _commits(self, run: Run) -> tuple[Commit, ...]:
            return tuple(commits)

    table = Table(nothing, CONTRACT, "t", nothing)
    table.history(run("07:00", "slow"))
    commits.append(Commit(1, Action.HARMLESS, "OPTIMIZE"))
    commits.append(Commit(2, Action.MERGE, "MERGE", Mark("07:00", 1, "quick", True), ours=True))
    with pytest.raises(LostClaim, match="version 2 of the same pipeline"):
        table.merge(run("07:00", "slow"), first=True)


def test_soft_deletes_are_the_way_to_combine_an_order_with_restores():
    assert not Contract(keys=("id",), order="seq", flag="gone", deletes=Deletes.SOFT).needs_tombstones
