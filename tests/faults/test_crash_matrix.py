"""Every crash point of the code x every way to break there, united: who kills it, who makes it fail.

Deaths are run by the packages' own fault tests, once; here it is checked that no declared point is without one. Death,
exception and a hang beyond every lease, at every point that the simulation reaches, are run here, followed by its
checker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from lockstep.faults.schedule import PAUSE_SECONDS
from lockstep.faults.simulation import simulate
from lockstep.kernel.crash import armed, declared_points
from lockstep.kernel.settings import PROJECT_ROOT

SEED = 8  # one in which everything is met, a poisoned tick and its replay too
SOURCES = ("lockstep", "services", "sensors", "platform_assets", "resources", "jobs")


class Owner(NamedTuple):
    """The tests that kill all points of a prefix. `generated`: they take the list from the code themselves."""

    prefix: str
    module: str
    generated: bool = False


# The longest prefix that fits owns a point.
OWNERS = [
    Owner("windows.", "tests/faults/windows/test_kills.py", generated=True),
    Owner("windows.produce.", "tests/faults/windows/test_producer_dies.py"),
    Owner("exports.", "tests/faults/exports/test_crashes.py"),
    Owner("ticks.", "tests/faults/ticks/test_failure_table.py"),
    Owner("silver.", "tests/faults/silver/test_crashes.py"),
    Owner("readiness.", "tests/property/readiness/test_drivers.py"),
    Owner("outbox.", "tests/integration/kernel/test_relay.py"),
    Owner("cleaner.", "tests/unit/idempotency/test_crash_points.py", generated=True),
    Owner("overwrite.", "tests/unit/idempotency/test_crash_points.py", generated=True),
    Owner("proxy.", "tests/unit/idempotency/test_crash_points.py", generated=True),
    Owner("transactional.", "tests/unit/idempotency/test_crash_points.py", generated=True),
    Owner("idempotency.", "tests/unit/idempotency/test_merging_crash_points.py", generated=True),
]
# Points that the simulation passes; a death or a failure there is followed by its checker.
SIMULATED = {
    "windows": [
        "windows.lane.after_claim",
        "windows.drain.after_repair",
        "windows.drain.after_processing",
        "windows.drain.after_window",
    ],
    "exports": ["exports.build.piece", "exports.build.uploaded", "exports.publish.stored"],
    "ticks": [
        "silver.intake.before_dispatch",
        "silver.intake.dispatched",
        "silver.tick.before_claim",
        "silver.tick.claimed",
        "silver.tick.table_applied",
        "silver.tick.before_complete",
        "silver.tick.completed",
        "silver.tick.done",
        "silver.tick.failure_recorded",
        "silver.replay.rewound",
    ],
}


def _declared() -> set[str]:
    return {name for folder in SOURCES for name in declared_points(PROJECT_ROOT / folder)}


def _owner(point: str) -> Owner | None:
    fitting = [one for one in OWNERS if point.startswith(one.prefix)]
    return max(fitting, key=lambda one: len(one.prefix), default=None)


def uncovered(points: set[str]) -> list[str]:
    """Points that no test kills, as far as the tests' own text tells."""
    missing = []
    for point in sorted(points):
        owner = _owner(point)
        text = "" if owner is None else (PROJECT_ROOT / owner.module).read_text("utf-8")
        named = owner is not None and (("declared_points(" in text) if owner.generated else (f'"{point}"' in text))
        if not named:
            missing.append(point)
    return missing


def test_every_declared_crash_point_is_killed_by_a_test():
    """Guards new steps: a point without an owner fails the suite, whatever package it is in."""
    points = _declared()
    assert len(points) > 100
    assert uncovered(points) == []


def test_a_new_point_without_a_test_is_noticed():
    assert uncovered({"exports.claim.brand_new", "cellar.step.before"}) == [
        "cellar.step.before",
        "exports.claim.brand_new",
    ]


def test_every_owner_owns_something():
    owned = {_owner(point) for point in _declared()}
    assert owned == set(OWNERS)


# --- in the simulation: death and failure, at the first and at a later pass ----------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    """Injected faults are no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("pipeline", "point"), [(pipeline, point) for pipeline, points in SIMULATED.items() for point in points]
)
@pytest.mark.parametrize("mode", ["raise", "error", f"hang:{PAUSE_SECONDS:.0f}"])
def test_a_simulated_worker_that_dies_fails_or_hangs_at_a_point_breaks_no_promise(
    pipeline: str, point: str, mode: str, quiet: None
):
    for nth in (1, 3):
        with armed(point, mode, nth=nth) as charge:
            result = simulate(SEED, rate=0.0, only=pipeline)
        assert charge.fired or nth > charge.hits > 0, f"{point} is not reached"
        assert [str(one) for one in result.violations] == []
