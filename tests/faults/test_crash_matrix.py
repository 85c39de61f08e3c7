"""Every crash point of the code x every way to break there, united: who kills it, who lets it fail and hang.

Deaths, failures and hangs are run by the packages' own fault tests, on the real parts; here it is checked that no
declared point is without them. At the points that the simulation reaches all three are run here, before its checker.
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

SEED = 2  # one in which everything is met, a poisoned tick and its replay too
SOURCES = ("lockstep", "services", "sensors", "platform_assets", "resources", "jobs")


class Owner(NamedTuple):
    """The tests that kill all points of a prefix, and those where they fail and hang (tests/faults/modes.py).

    `generated`: the first take the list from the code themselves.
    """

    prefix: str
    module: str
    late: str
    generated: bool = False


# The longest prefix that fits owns a point.
_BLOCKS = "tests/integration/idempotency/test_modes.py"
OWNERS = [
    Owner("windows.", "tests/faults/windows/test_kills.py", "tests/faults/windows/test_kills.py", generated=True),
    Owner(
        "windows.produce.", "tests/faults/windows/test_producer_dies.py", "tests/faults/windows/test_producer_dies.py"
    ),
    Owner("exports.", "tests/faults/exports/test_crashes.py", "tests/faults/exports/test_crashes.py"),
    Owner("ticks.", "tests/faults/ticks/test_failure_table.py", "tests/faults/ticks/test_failure_table.py"),
    Owner("silver.", "tests/faults/silver/test_crashes.py", "tests/faults/silver/test_crashes.py"),
    Owner("readiness.", "tests/property/readiness/test_drivers.py", "tests/unit/readiness/test_driver.py"),
    Owner("outbox.", "tests/integration/kernel/test_relay.py", "tests/property/test_outbox_relay.py"),
    Owner("cleaner.", "tests/unit/idempotency/test_crash_points.py", _BLOCKS, generated=True),
    Owner("overwrite.", "tests/unit/idempotency/test_crash_points.py", _BLOCKS, generated=True),
    Owner("proxy.", "tests/unit/idempotency/test_crash_points.py", _BLOCKS, generated=True),
    Owner("transactional.", "tests/unit/idempotency/test_crash_points.py", _BLOCKS, generated=True),
    Owner("idempotency.", "tests/unit/idempotency/test_merging_crash_points.py", _BLOCKS, generated=True),
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


def never_late(points: set[str]) -> list[str]:
    """Points at which no test fails and hangs: neither the simulation nor their owner's tests, as their text tells."""
    simulated = {point for names in SIMULATED.values() for point in names}
    missing = []
    for point in sorted(points - simulated):
        owner = _owner(point)
        text = "" if owner is None else (PROJECT_ROOT / owner.late).read_text("utf-8")
        *_, moment = point.split(".")  # some tests write the common part of their points once
        family = f'f"{point.removesuffix(moment)}{{moment}}"' in text and f'"{moment}"' in text
        generated = owner is not None and owner.late == owner.module and owner.generated
        if "meet(" not in text or not (generated or f'"{point}"' in text or family):
            missing.append(point)
    return missing


def test_every_declared_crash_point_is_killed_by_a_test():
    """Guards new steps: a point without an owner fails the suite, whatever package it is in."""
    points = _declared()
    assert len(points) > 100
    assert uncovered(points) == []


def test_at_every_declared_crash_point_something_fails_and_something_hangs():
    assert never_late(_declared()) == []


def test_a_new_point_without_a_test_is_noticed():
    new = {"exports.claim.brand_new", "cellar.step.before"}
    assert uncovered(new) == sorted(new)
    assert never_late(new | {"silver.tick.brand_new"}) == sorted(new | {"silver.tick.brand_new"})


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
