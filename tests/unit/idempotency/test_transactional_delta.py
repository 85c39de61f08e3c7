"""What became of a Delta commit that Delta may have ignored: judged by the history alone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from lockstep.idempotency.delta import Commit
from lockstep.idempotency.transactional import ContentChanged, Key, RestoredAway, judge_delta, write_delta
from lockstep.kernel.errors import InvalidInput, LostClaim, Terminal
from lockstep.kernel.ids import SystemIds

KEY = Key("visits", "d1", 2)


def commit(version: int, generation: int, *, attempt: str = "other", content: str = "c", unit: str = "d1") -> Commit:
    fields = {"pipeline": "visits", "unit": unit, "generation": generation, "attempt": attempt, "content": content}
    stamp = {"lockstep": "transactional", "run": "r", **fields}
    return Commit(version, "WRITE", datetime(2026, 1, 1, tzinfo=UTC), stamp, {}, {"numOutputRows": "3"})


def restore(version: int, to: str) -> Commit:
    return Commit(version, "RESTORE", datetime(2026, 1, 1, tzinfo=UTC), None, {"version": to}, {})


def judge(*newest_first: Commit) -> tuple[int, bool]:
    rows, _, already = judge_delta(newest_first, KEY, attempt="mine", content="c")
    return rows, already


def test_our_own_commit_is_applied_now():
    assert judge(commit(5, 1, unit="d2"), commit(4, 2, attempt="mine"), commit(3, 1)) == (3, False)


def test_an_earlier_attempt_of_the_same_key_is_recognised():
    assert judge(commit(5, 1, unit="d2"), commit(4, 2)) == (3, True)


def test_a_stale_generation_gives_way():
    with pytest.raises(LostClaim, match="generation 3"):
        judge(commit(6, 3), commit(4, 2))


def test_other_content_under_the_same_key_is_refused():
    with pytest.raises(ContentChanged, match="raise the generation"):
        judge(commit(4, 2, content="different"))


@pytest.mark.parametrize("to", ["3", "None"])
def test_a_replay_after_a_restore_is_not_ignored_in_silence(to: str):
    """Guards the trap: RESTORE does not roll back txnVersion, so Delta drops the replay without an error."""
    with pytest.raises(RestoredAway, match="raise the generation"):
        judge(restore(5, to), commit(4, 2))


def test_a_restore_that_kept_the_rows_does_not_matter():
    assert judge(restore(6, "5"), commit(4, 2)) == (3, True)


def test_an_ignored_commit_without_any_trace_is_an_error():
    """Guards against believing in rows that nobody can show: the log may have expired."""
    with pytest.raises(Terminal, match="ignored"):
        judge(commit(4, 1))


def test_a_replay_that_would_append_is_refused_before_anything_is_asked():
    """Guards the unit: a second generation without a predicate would stand beside the first."""
    nothing: Any = None
    with pytest.raises(InvalidInput, match="cannot append"):
        write_delta(nothing, "s3a://b/t", nothing, KEY, run="r", content="c", ids=SystemIds())


@pytest.mark.parametrize("predicate", ["", "  "])
def test_a_predicate_of_nothing_does_not_replace_everything(predicate: str):
    nothing: Any = None
    with pytest.raises(InvalidInput, match="needs a predicate"):
        write_delta(nothing, "s3a://b/t", nothing, KEY, run="r", content="c", ids=SystemIds(), replace=predicate)
