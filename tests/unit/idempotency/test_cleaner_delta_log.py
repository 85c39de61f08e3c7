"""Which loads and cleans of a Delta dataset still hold, by its history alone."""

from __future__ import annotations

from datetime import UTC, date, datetime

from lockstep.idempotency import delta
from lockstep.idempotency.cleaner_delta import UNIT, work_in
from lockstep.idempotency.delta import Commit

MONDAY, TUESDAY = date(2023, 11, 6), date(2023, 11, 7)
NEXT_MONDAY = date(2023, 11, 13)


def load(version: int, run: str, **unit: date) -> Commit:
    stamp = {"lockstep": "overwrite", "run": run, "unit": delta.equality(dict(unit))}
    return commit(version, "WRITE", stamp, {"numOutputRows": "3"})


def clean(version: int, run: str, unit: date) -> Commit:
    return commit(version, "DELETE", {"lockstep": "cleaner", "run": run, "clean": unit.isoformat()})


def restore(version: int, to: str) -> Commit:
    return Commit(version, "RESTORE", datetime(2026, 1, 1, tzinfo=UTC), None, {"version": to}, {})


def commit(version: int, operation: str, stamp: object, metrics: dict[str, str] | None = None) -> Commit:
    return Commit(version, operation, datetime(2026, 1, 1, tzinfo=UTC), stamp, {}, metrics or {})  # type: ignore[arg-type]


def loads(*oldest_first: Commit) -> set[str]:
    return set(work_in(oldest_first[::-1]).loads)


WEEK = (load(0, "mon", unit_start=MONDAY), load(1, "tue", unit_start=MONDAY, day=TUESDAY))


def test_loads_are_known_by_run_and_day_with_their_rows():
    work = work_in(WEEK[::-1])
    assert work.loads["tue"] == (f"`{UNIT}` = DATE '2023-11-06' AND `day` = DATE '2023-11-07'", 3)
    assert loads(*WEEK) == {"mon", "tue"}


def test_a_day_that_a_newer_run_replaced_is_not_loaded_again_by_its_old_one():
    """Guards against zombies: the rows of the newer run are the right ones."""
    assert loads(*WEEK, load(2, "tue again", unit_start=MONDAY, day=TUESDAY)) == {"mon", "tue", "tue again"}


def test_days_that_went_with_their_unit_may_come_again_under_their_old_names():
    """Guards the days after a renewal: recognised as done, they would stay missing in silence."""
    other = load(2, "next", unit_start=NEXT_MONDAY)
    assert loads(*WEEK, other, load(3, "mon again", unit_start=MONDAY)) == {"mon", "mon again", "next"}


def test_a_cleaned_unit_may_be_loaded_again_and_its_clean_is_not_repeated():
    history = (*WEEK, load(2, "next", unit_start=NEXT_MONDAY), clean(3, "c", MONDAY))
    assert loads(*history) == {"next"}
    assert work_in(history[::-1]).cleans == {("c", MONDAY)}


def test_a_restore_brings_back_the_work_of_the_version_it_went_to():
    """Guards what Delta's own txnVersion does not: a replay after a RESTORE is no repetition."""
    history = (*WEEK, clean(2, "c", MONDAY))
    assert loads(*history, restore(3, "1")) == {"mon", "tue"}
    assert loads(*history, restore(3, "0")) == {"mon"}
    assert work_in((*history, restore(3, "1"))[::-1]).cleans == frozenset()
    assert loads(*WEEK, restore(2, "None")) == set()  # by timestamp: the history does not say to which version


def test_commits_of_others_change_nothing():
    assert loads(*WEEK, commit(2, "OPTIMIZE", None), commit(3, "WRITE", {"lockstep": "transactional"})) == {
        "mon",
        "tue",
    }
