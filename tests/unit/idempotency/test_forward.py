"""A lane that only moves forward: what it takes for done, by the newest commits alone."""

from __future__ import annotations

import pytest

from lockstep.idempotency.stateful import Refused, run_forward
from lockstep.idempotency.stateful_rules import Action, Commit, Done, History, Mark, Proceed, Reason, Run

RUN = Run("devices", "10-08", "10-07", "r-10-08")
MERGED = Commit(4, Action.MERGE, "MERGE", Mark("10-08", 3, "r-10-08", False), ours=True)


def restore(version: int, to: int | None, *erase: str) -> Commit:
    return Commit(version, Action.RESTORE, "RESTORE", restored_to=to, ours=True, erase=erase)


class Table:
    """A table that shows these commits and counts merges."""

    def __init__(self, *commits: Commit) -> None:
        self.commits = commits
        self.merged = 0

    def history(self, run: Run) -> History:
        return History(self.commits)

    def restore(self, version: int, run: Run) -> None:
        raise AssertionError("a forward lane never goes back")

    def erase(self) -> None:
        raise AssertionError("nor erases")

    def merge(self, run: Run, *, first: bool) -> int:
        self.merged += 1
        return 9


def test_a_request_whose_answer_was_lost_is_done():
    table = Table(MERGED, Commit(5, Action.HARMLESS, "OPTIMIZE"))
    assert run_forward(table, RUN) == (Done(4), 4)
    assert table.merged == 0


@pytest.mark.parametrize("to", [2, None])
def test_a_request_that_a_restore_took_back_is_merged_again(to: int | None):
    """Guards the runs after a replay: their old commits are still in the log, and their rows are not in the table."""
    table = Table(MERGED, restore(5, to), Commit(6, Action.MERGE, "MERGE", Mark("10-07", 2, "fix", False), ours=True))
    assert run_forward(table, RUN) == (Proceed(first=False), 9)
    assert table.merged == 1


def test_a_restore_that_kept_the_rows_leaves_the_request_done():
    assert run_forward(Table(MERGED, Commit(5, Action.HARMLESS), restore(6, 5)), RUN) == (Done(4), 4)


def test_a_replay_that_died_before_it_erased_stops_the_lane():
    """Guards erased rows: merging over them would settle the debt, and nobody would delete them again."""
    table = Table(MERGED, restore(5, 2, "id = 7"))
    with pytest.raises(Refused, match="id = 7") as refused:
        run_forward(table, RUN)
    assert refused.value.reason is Reason.UNFINISHED
    assert table.merged == 0
    settled = Commit(6, Action.MERGE, "MERGE", Mark("10-07", 2, "fix", False), ours=True)
    assert run_forward(Table(MERGED, restore(5, 2, "id = 7"), settled), RUN) == (Proceed(first=False), 9)
