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
