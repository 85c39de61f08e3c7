"""The decision of the stateful merger: the chapter's tables, figure 4-7, and every row of the decision matrix."""

from __future__ import annotations

import pytest

from lockstep.idempotency.stateful_rules import (
    Action,
    Commit,
    Done,
    History,
    Mark,
    Proceed,
    Reason,
    Refuse,
    Restore,
    Run,
    decide,
    owed_erasures,
)
from lockstep.kernel.errors import InvalidInput


def create(version: int = 0) -> Commit:
    return Commit(version, Action.FOREIGN, "CREATE TABLE")


def merge(version: int, execution: str, base: int | None = None, *, request: str = "", first: bool = False) -> Commit:
    mark = Mark(execution, version - 1 if base is None else base, request or f"r-{execution}", first)
    return Commit(version, Action.MERGE, "MERGE", mark, ours=True)


def optimize(version: int) -> Commit:
    return Commit(version, Action.HARMLESS, "OPTIMIZE")


def foreign(version: int, what: str) -> Commit:
    return Commit(version, Action.FOREIGN, what)


def restore(version: int, to: int | None, *erase: str, ours: bool = True) -> Commit:
    return Commit(version, Action.RESTORE, "RESTORE", restored_to=to, ours=ours, erase=erase)


def ask(commits: list[Commit], execution: str, previous: str | None, **more: object) -> object:
    run = Run("devices", execution, previous, request=str(more.pop("request", "new")), **more)  # type: ignore[arg-type]
    return decide(History(tuple(commits)), run)


def refused(decision: object) -> Reason:
    assert isinstance(decision, Refuse), decision
    assert decision.what
    assert decision.next_step
    return decision.reason


TABLE_4_3 = [create(3), merge(4, "08:00", first=True), merge(5, "09:00"), merge(6, "10:00")]
TABLE_4_4 = [create(), merge(1, "10-05", first=True), merge(2, "10-06"), merge(3, "10-07"), merge(4, "10-08")]
TABLE_4_5 = [*TABLE_4_4, restore(5, 2), merge(6, "10-07", request="fix")]
FIGURE_4_7 = [
    create(4),
    merge(5, "10-05", first=True),
    optimize(6),
    merge(7, "10-06"),
    optimize(8),
    merge(9, "10-07"),
    merge(10, "10-08"),
]


class TestDecisionMatrix:
    """One test for each row; the names are the rows."""

    def test_table_4_3_run_of_11_00_restores_nothing(self):
        assert ask(TABLE_4_3, "11:00", "10:00") == Proceed(first=False)

    def test_table_4_3_replay_of_09_00_restores_4(self):
        assert ask(TABLE_4_3, "09:00", "08:00") == Restore(4, ("09:00", "10:00"), first=False)

    def test_table_4_4_run_of_10_09_restores_nothing(self):
        assert ask(TABLE_4_4, "10-09", "10-08") == Proceed(first=False)

    def test_table_4_4_replay_of_10_05_restores_the_empty_table_and_does_not_truncate(self):
        assert ask(TABLE_4_4, "10-05", "10-04") == Restore(0, ("10-05", "10-06", "10-07", "10-08"), first=True)

    def test_table_4_4_replay_of_10_07_restores_2(self):
        assert ask(TABLE_4_4, "10-07", "10-06") == Restore(2, ("10-07", "10-08"), first=False)

    def test_table_4_5_counts_the_restore_and_10_08_then_restores_nothing(self):
        assert ask(TABLE_4_5, "10-08", "10-07") == Proceed(first=False)
        assert ask([*TABLE_4_5, merge(7, "10-08")], "10-08", "10-07") == Restore(6, ("10-08",), first=False)

    def test_figure_4_7_replay_of_10_06_restores_6(self):
        assert ask(FIGURE_4_7, "10-06", "10-05") == Restore(6, ("10-06", "10-07", "10-08"), first=False)

    def test_figure_4_7_replay_of_10_07_restores_8(self):
        assert ask(FIGURE_4_7, "10-07", "10-06") == Restore(8, ("10-07", "10-08"), first=False)

    def test_figure_4_7_replay_of_10_08_restores_9(self):
        assert ask(FIGURE_4_7, "10-08", "10-07") == Restore(9, ("10-08",), first=False)

    def test_figure_4_7_with_an_optimize_at_the_end_a_normal_run_restores_nothing(self):
        assert ask([*FIGURE_4_7, optimize(11)], "10-09", "10-08") == Proceed(first=False)

    def test_an_optimize_between_merge_and_state_write_leaves_the_next_run_normal(self):
        """The state is inside the merge commit, so nothing can come between."""
        assert ask([*FIGURE_4_7, optimize(11)], "10-09", "10-08") == Proceed(first=False)

    def test_an_optimize_between_merge_and_state_write_leaves_the_replay_at_9(self):
        assert ask([*FIGURE_4_7, optimize(11)], "10-08", "10-07") == Restore(9, ("10-08",), first=False)

    def test_a_crash_after_the_merge_is_adopted_by_its_retry_and_restored_by_a_replay(self):
        assert ask(FIGURE_4_7, "10-08", "10-07", request="r-10-08") == Done(10)
        assert ask(FIGURE_4_7, "10-08", "10-07") == Restore(9, ("10-08",), first=False)

    def test_a_lost_row_of_the_predecessor_is_refused_never_truncated(self):
        lost = [*FIGURE_4_7[:5], foreign(9, "MERGE")]
        assert refused(ask(lost, "10-08", "10-07")) is Reason.PREDECESSOR

    def test_an_empty_merge_is_a_row_of_its_own_and_its_replay_restores_7(self):
        history = [*FIGURE_4_7[:4], merge(8, "10-07"), merge(9, "10-08")]
        assert ask(history, "10-07", "10-06") == Restore(7, ("10-07", "10-08"), first=False)

    def test_after_10_07_was_backfilled_alone_10_09_is_refused_until_10_08_is_replayed(self):
        decision = ask(TABLE_4_5, "10-09", "10-08")
        assert refused(decision) is Reason.PREDECESSOR
        assert isinstance(decision, Refuse)
        assert "run 10-08 first" in decision.next_step

    def test_a_foreign_merge_leaves_the_next_run_normal(self):
        assert ask([*FIGURE_4_7, foreign(11, "MERGE")], "10-09", "10-08") == Proceed(first=False)

    def test_a_gdpr_delete_is_not_undone_unless_told(self):
        history = [*FIGURE_4_7, foreign(11, "DELETE")]
        decision = ask(history, "10-08", "10-07")
        assert refused(decision) is Reason.FOREIGN
        assert isinstance(decision, Refuse)
        assert "11 (DELETE)" in decision.what
        assert ask(history, "10-08", "10-07", undo=frozenset({11})) == Restore(9, ("10-08",), first=False)

    def test_a_merge_that_was_made_twice_restores_what_was_before_the_first(self):
        history = [*FIGURE_4_7, merge(11, "10-08", base=10)]
        assert ask(history, "10-08", "10-07") == Restore(9, ("10-08",), first=False)

    def test_a_crash_between_restore_and_merge_is_carried_on(self):
        history = [*TABLE_4_4, restore(5, 2)]
        assert ask(history, "10-07", "10-06") == Proceed(first=False, restored=True)


class TestBeyondTheMatrix:
    """Cases the chapter does not name."""

    def test_the_very_first_run_needs_no_predecessor(self):
        assert ask([create()], "10-05", "10-04") == Proceed(first=True)
        assert ask([create()], "10-05", None) == Proceed(first=True)

    def test_a_truncated_log_does_not_pass_for_a_first_run(self):
        """The book's rule empties the table here."""
        run = Run("devices", "10-05", "10-04", "new")
        assert refused(decide(History((optimize(90),), complete=False), run)) is Reason.PREDECESSOR

    def test_a_crash_after_restoring_to_the_beginning_is_carried_on(self):
        assert ask([*TABLE_4_4, restore(5, 0)], "10-05", "10-04") == Proceed(first=True, restored=True)

    def test_a_run_before_the_beginning_must_say_that_it_is_the_first(self):
        assert refused(ask(TABLE_4_4, "10-04", "10-03")) is Reason.PREDECESSOR
        assert isinstance(ask(TABLE_4_4, "10-04", None), Restore)

    def test_a_run_that_claims_to_be_first_among_earlier_ones_is_refused(self):
        assert refused(ask(TABLE_4_4, "10-09", None)) is Reason.NOT_FIRST

    def test_a_predecessor_that_skips_a_run_is_refused(self):
        decision = ask(TABLE_4_4, "10-09", "10-07")
        assert refused(decision) is Reason.PREDECESSOR
        assert isinstance(decision, Refuse)
        assert "name 10-08" in decision.next_step

    def test_a_stale_retry_does_not_undo_the_replay_that_replaced_it(self):
        """A zombie of the first request would bring the uncorrected data back."""
        assert refused(ask(TABLE_4_5, "10-07", "10-06", request="r-10-07")) is Reason.STALE
        assert ask(TABLE_4_5, "10-07", "10-06", request="fix") == Done(6)

    def test_a_retry_of_a_run_that_has_successors_changes_nothing(self):
        assert ask(TABLE_4_4, "10-06", "10-05", request="r-10-06") == Done(2)

    def test_two_runs_that_overtook_each_other_are_untangled_from_the_earlier_one(self):
        history = [*TABLE_4_4[:4], merge(4, "10-09", base=3), merge(5, "10-08", base=3)]
        assert refused(ask(history, "10-09", "10-08")) is Reason.DISORDER
        assert ask(history, "10-08", "10-07") == Restore(3, ("10-08", "10-09"), first=False)

    def test_a_foreign_change_between_reading_the_base_and_merging_counts(self):
        history = [*TABLE_4_4[:3], foreign(3, "DELETE"), merge(4, "10-07", base=2)]
        assert refused(ask(history, "10-07", "10-06")) is Reason.FOREIGN

    def test_a_foreign_change_that_was_undone_already_does_not_count_again(self):
        history = [*TABLE_4_4, foreign(5, "DELETE"), restore(6, 3), merge(7, "10-08", request="b")]
        assert ask(history, "10-08", "10-07") == Restore(6, ("10-08",), first=False)
        assert ask(history, "10-07", "10-06") == Restore(2, ("10-07", "10-08"), first=False)

    def test_a_schema_change_is_somebodys_work_too(self):
        """RESTORE brings the old schema back."""
        assert refused(ask([*TABLE_4_4, foreign(5, "ADD COLUMNS")], "10-08", "10-07")) is Reason.FOREIGN

    def test_a_restore_by_somebody_else_is_followed(self):
        history = [*TABLE_4_4, restore(5, 3, ours=False)]
        assert refused(ask(history, "10-09", "10-08")) is Reason.PREDECESSOR
        assert ask(history, "10-08", "10-07") == Proceed(first=False)

    @pytest.mark.parametrize("to", [None, 99])
    def test_a_restore_to_an_unknown_version_stops_everything(self, to: int | None):
        assert refused(ask([*TABLE_4_4, restore(5, to, ours=False)], "10-09", "10-08")) is Reason.UNREADABLE

    def test_a_version_beyond_retention_is_refused(self):
        run = Run("devices", "10-06", "10-05", "new")
        assert refused(decide(History(tuple(TABLE_4_4), restorable_from=2), run)) is Reason.RETENTION
        assert refused(decide(History(tuple(TABLE_4_4[1:]), complete=False), Run("d", "10-05", None, "n"))) is (
            Reason.RETENTION
        )

    @pytest.mark.parametrize(
        ("execution", "previous", "request_id"),
        [("9", "10", "r"), ("10", "9", "r"), ("10-05", "10-05", "r"), ("", None, "r"), ("10-05", None, "")],
    )
    def test_a_run_that_text_cannot_place_is_refused(self, execution: str, previous: str | None, request_id: str):
        with pytest.raises(InvalidInput):
            Run("devices", execution, previous, request_id)

    def test_executions_of_two_widths_are_refused(self):
        with pytest.raises(InvalidInput, match="widths"):
            ask(TABLE_4_4, "2024-10-09", "2024-10-08")


class TestOwedErasures:
    """A restore promises to erase; only a merge of ours after it says that this was done."""

    def test_a_restore_without_its_merge_owes_what_it_carries(self):
        assert owed_erasures([*TABLE_4_4, restore(5, 2, "id = 7")]) == ("id = 7",)
        assert owed_erasures(TABLE_4_4) == ()

    def test_a_merge_of_ours_settles_it_and_other_peoples_commits_do_not(self):
        begun = [*TABLE_4_4, restore(5, 2, "id = 7"), foreign(6, "DELETE"), optimize(7)]
        assert owed_erasures(begun) == ("id = 7",)
        assert owed_erasures([*begun, merge(8, "10-07", request="fix")]) == ()

    def test_deaths_in_a_row_add_up_and_repeat_nothing(self):
        begun = [*TABLE_4_4, restore(5, 2, "id = 7"), restore(6, 1, "id = 7", "id = 8")]
        assert owed_erasures(begun) == ("id = 7", "id = 8")
