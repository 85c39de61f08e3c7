"""The same fault scripts against every design: ours must come through all of them, the others are hit where they say.

Silent failure guarded: a script that hits nothing would make any design look safe.
"""

from __future__ import annotations

import logging

import pytest

from tests.faults.models import compare
from tests.faults.models.compare import ORIGINAL, OURS, VENDOR, Row
from tests.faults.models.oracle import Count, Facts, count


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str, str], Row]:
    logging.disable(logging.CRITICAL)
    try:
        return {(row.pipeline, row.scenario, row.design): row for row in compare.compare(stride=4)}
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.long
def test_lockstep_loses_doubles_reorders_and_blocks_nothing_at_any_call():
    logging.disable(logging.CRITICAL)
    try:
        wrong = [row for row in compare.compare() if row.design == OURS and row.count.any]
    finally:
        logging.disable(logging.NOTSET)
    assert wrong == []


def test_lockstep_loses_doubles_reorders_and_blocks_nothing(rows: dict[tuple[str, str, str], Row]):
    assert [row for row in rows.values() if row.design == OURS and row.count.any] == []


def test_no_design_is_hurt_when_nothing_goes_wrong(rows: dict[tuple[str, str, str], Row]):
    """Guards fairness: a model that fails on its own would be a straw man."""
    calm = [row for row in rows.values() if row.scenario == "nothing goes wrong"]
    assert len(calm) == 9
    assert [row for row in calm if row.count.any] == []


@pytest.mark.parametrize(
    ("pipeline", "scenario", "design", "kind"),
    [
        ("windows", "a window is late", ORIGINAL, "out_of_order"),
        ("windows", "crash after a call", ORIGINAL, "doubled"),
        ("windows", "answer lost after commit", ORIGINAL, "doubled"),
        ("windows", "pause beyond the lease", ORIGINAL, "doubled"),
        ("windows", "a queue row is lost", ORIGINAL, "doubled"),
        ("windows", "a window is late", VENDOR, "lost"),
        ("windows", "crash before a call", VENDOR, "lost"),
        ("windows", "request lost", VENDOR, "lost"),
        ("windows", "a window is poisoned, then put right", VENDOR, "lost"),
        ("exports", "crash after a call", ORIGINAL, "stuck"),
        ("exports", "request lost", ORIGINAL, "stuck"),
        ("exports", "answer lost after commit", ORIGINAL, "doubled"),
        ("exports", "pause beyond the lease", ORIGINAL, "doubled"),
        ("exports", "a message is lost", ORIGINAL, "stuck"),
        ("ticks", "crash after a call", ORIGINAL, "lost"),
        ("ticks", "messages reordered", ORIGINAL, "out_of_order"),
        ("ticks", "a tick fails in silver, then works", ORIGINAL, "lost"),
        ("readiness", "crash before a call", ORIGINAL, "doubled"),
        ("readiness", "crash after a call", ORIGINAL, "doubled"),
        ("readiness", "request lost", ORIGINAL, "doubled"),
        ("readiness", "answer lost after commit", ORIGINAL, "doubled"),
        ("readiness", "an input is late", ORIGINAL, "stuck"),
    ],
)
def test_the_scripts_hit_the_other_designs(rows, pipeline: str, scenario: str, design: str, kind: str):
    assert getattr(rows[pipeline, scenario, design].count, kind) > 0


def test_every_sweep_struck_our_own_code_many_times(rows: dict[tuple[str, str, str], Row]):
    """Guards the sweep itself: a script that never fires proves nothing."""
    swept = [
        row for row in rows.values() if row.design == OURS and row.scenario in ("crash after a call", "request lost")
    ]
    assert len(swept) == 8
    assert all(row.scripts >= 10 for row in swept)


@pytest.mark.parametrize(
    ("effects", "finished", "expected"),
    [
        (["a", "b", "c"], {"a", "b", "c"}, Count()),
        (["a", "c"], {"a", "c"}, Count(lost=1)),
        (["a", "c", "b"], {"a", "b", "c"}, Count(out_of_order=1)),
        (["a", "a", "b", "c"], {"a", "b", "c"}, Count(doubled=1)),
        (["a", "b"], {"a", "b"}, Count(stuck=1)),
        (["a", "b"], {"a", "b", "c"}, Count(lost=1)),
    ],
)
def test_the_oracle_tells_the_kinds_apart(effects: list[str], finished: set[str], expected: Count):
    assert count(Facts(["a", "b", "c"], effects, finished)) == expected


def test_the_oracle_counts_a_half_applied_unit_as_lost():
    assert count(Facts(["a"], ["a"], {"a"}, spoiled={"a"})) == Count(lost=1)
