"""Every crash point of the merging blocks is one that some test dies at."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.idempotency import keyed
from lockstep.kernel.crash import declared_points

BLOCKS = ("merger", "keyed", "stateful")
TESTS = Path(__file__).parents[2]
POINTS = [
    name
    for name in declared_points(Path(keyed.__file__).parent)
    if name.startswith(tuple(f"idempotency.{block}." for block in BLOCKS))
]


def test_the_points_are_found():
    assert len(POINTS) == 17


@pytest.mark.parametrize("point", POINTS)
def test_some_test_dies_there(point: str):
    _, block, moment = point.split(".")
    files = [*TESTS.glob(f"*/idempotency/test_{block}.py")]
    assert any(f'"{moment}"' in text or f"{block}.{moment}" in text for text in (f.read_text("utf-8") for f in files))
"""Every place of these blocks that is worth dying at is died at by some test."""

from __future__ import annotations

from lockstep.kernel.crash import declared_points
from lockstep.kernel.settings import PROJECT_ROOT

BLOCKS = ("overwrite.", "transactional.", "cleaner.", "proxy.")


def test_every_crash_point_of_the_blocks_is_armed_by_a_test():
    declared = declared_points(PROJECT_ROOT / "lockstep" / "idempotency")
    ours = {name for name in declared if name.startswith(BLOCKS)}
    assert len(ours) > 20
    tests = "".join(path.read_text("utf-8") for path in (PROJECT_ROOT / "tests").rglob("idempotency/test_*.py"))
    # Some tests write the common part of a name once.
    moments = {f"transactional.publish.{moment}" for moment in ("before", "before_commit", "after_commit")}
    assert {name for name in ours - moments if f'"{name}"' not in tests} == set()
    assert {name: places for name, places in declared.items() if len(places) > 1} == {}
