"""Commits that Delta refused or dropped: told apart from faults, and never taken for success."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.idempotency import delta, stateful
from lockstep.idempotency.merger import Contract
from lockstep.idempotency.stateful_rules import Action, Commit, Mark, Run
from lockstep.kernel.errors import Transient

RUN = Run("devices", "10-06", "10-05", "mine")


@pytest.mark.parametrize(
    "words",
    [
        "[DELTA_CONCURRENT_APPEND.WITH_PARTITION_HINT] ConcurrentAppendException",
        "[DELTA_CONCURRENT_DELETE_READ] a file was deleted",
        "[DELTA_METADATA_CHANGED] the metadata changed",
        "[DELTA_PROTOCOL_CHANGED.EMPTY_DIRECTORY] two first writes",
    ],
)
def test_a_commit_that_lost_against_another_writer_may_be_tried_again(words: str):
    """Guards retries: as an error of Spark it would stop the unit, although the next try decides anew."""
    with pytest.raises(delta.Contested, match="nothing was written") as contested, delta.contested("s3a://b/t"):
        raise RuntimeError(words)
    assert isinstance(contested.value, Transient)


@pytest.mark.parametrize("words", ["[DELTA_REPLACE_WHERE_MISMATCH] rows", "bad row: DELTA_CONCURRENT_APPEND"])
def test_other_errors_stay_what_they_are(words: str):
    with pytest.raises(RuntimeError, match="row"), delta.contested("s3a://b/t"):
        raise RuntimeError(words)


def test_a_merge_whose_commit_cannot_be_found_is_no_success():
    """Guards state and data: a Spark that drops the mark would leave rows that no later run knows of."""
    nothing: Any = None

    class Table(stateful.DeltaTable):
        def _commits(self, run: Run) -> tuple[Commit, ...]:
            theirs = Commit(1, Action.MERGE, "MERGE", Mark("10-06", 0, "theirs", True), ours=True)
            return (Commit(0, Action.FOREIGN, "CREATE TABLE"), theirs)

    with pytest.raises(stateful.MarkMissing, match="no commit with its mark"):
        Table(nothing, Contract(keys=("id",)), "t", nothing)._find(Mark("10-06", 0, "mine", True), RUN)
