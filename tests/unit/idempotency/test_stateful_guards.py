"""Each guard of the decision, removed in turn: the matrix must notice. Else a row of it passes by luck."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lockstep.idempotency import stateful_rules as rules
from lockstep.idempotency.stateful_rules import Action, Commit
from tests.unit.idempotency import test_stateful_rules as matrix

after = rules._after


def restores_are_ignored(state: Any, commit: Commit, states: Mapping[int, Any]) -> Any:
    return state if commit.action is Action.RESTORE else after(state, commit, states)


def a_second_merge_replaces_the_base_of_the_first(state: Any, commit: Commit, states: Mapping[int, Any]) -> Any:
    if commit.mark is None:
        return after(state, commit, states)
    forgetful = {e: row for e, row in state.live.items() if e != commit.mark.execution}
    return after(rules._State(forgetful, state.foreign), commit, states)


def compaction_counts_as_somebodys_work(state: Any, commit: Commit, states: Mapping[int, Any]) -> Any:
    strict = commit._replace(action=Action.FOREIGN) if commit.action is Action.HARMLESS else commit
    return after(state, strict, states)


def foreign_commits_are_overlooked(state: Any, commit: Commit, states: Mapping[int, Any]) -> Any:
    return state if commit.action is Action.FOREIGN else after(state, commit, states)


def an_unknown_restore_means_empty(state: Any, commit: Commit, states: Mapping[int, Any]) -> Any:
    found = after(state, commit, states)
    return found if found.known else rules._State()


MUTANTS = {
    "the predecessor is not asked for": ("_missing_predecessor", lambda *_: None),
    "the place in the schedule is not checked": ("_refusal", lambda *_: None),
    "a restore is always possible": ("_unrestorable", lambda *_: None),
    "an interrupted restore is forgotten": ("_ends_with_our_restore", lambda _: False),
    "restores are ignored": ("_after", restores_are_ignored),
    "a second merge replaces the base": ("_after", a_second_merge_replaces_the_base_of_the_first),
    "compaction counts as work": ("_after", compaction_counts_as_somebodys_work),
    "foreign commits are overlooked": ("_after", foreign_commits_are_overlooked),
    "an unknown restore means empty": ("_after", an_unknown_restore_means_empty),
}


def rows() -> Iterator[Any]:
    for suite in (matrix.TestDecisionMatrix(), matrix.TestBeyondTheMatrix()):
        for name, method in inspect.getmembers(suite, inspect.ismethod):
            if name.startswith("test_") and len(inspect.signature(method).parameters) == 0:
                yield method
    yield lambda: matrix.TestBeyondTheMatrix().test_a_restore_to_an_unknown_version_stops_everything(None)


def failures() -> int:
    count = 0
    for row in rows():
        try:
            row()
        except (AssertionError, KeyError, pytest.fail.Exception):
            count += 1
    return count


def test_the_rows_pass_as_they_are():
    assert failures() == 0


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_matrix_notices_that(mutant: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, *MUTANTS[mutant])
    assert failures() > 0
