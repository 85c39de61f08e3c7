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
