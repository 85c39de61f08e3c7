"""Every crash point of the code x every way to break there, united: who kills it, who makes it fail, who makes it hang.

Deaths are run by the packages' own fault tests, once; here it is checked that no declared point is without one. An
exception at the point, and a hang (the worker is replaced while it sleeps there, and wakes up late), are run here: for
the workers that take data over on the real parts, and for every point that the simulation reaches.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import psycopg
import pytest

from lockstep.exports.model import JobStatus
from lockstep.faults.simulation import simulate
from lockstep.kernel.crash import CrashInjected, armed, declared_points
from lockstep.kernel.errors import LockstepError
from lockstep.kernel.postgres import pool
from lockstep.kernel.settings import PROJECT_ROOT
from tests.faults.exports import test_crashes as exports_crashes
from tests.faults.exports.test_crashes import RECENT, WORKER_POINTS, _assert_sound, _own, _recover, broken_world
from tests.faults.windows.test_kills import _FULL, _apply_points, _drain_after_the_lease
from tests.integration.exports.conftest import World, module_ground, module_world
from tests.windows_fixtures import lane, new_lane, warehouse
from tests.windows_lane import LaneUnderTest

__all__ = ["broken_world", "lane", "module_ground", "module_world", "new_lane", "warehouse"]

SOURCES = ("lockstep", "services", "sensors", "platform_assets", "resources", "jobs")
PATIENCE_SECONDS = 60
HANG_SECONDS = 3


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
@pytest.mark.parametrize("mode", ["raise", "error"])
def test_a_simulated_worker_that_dies_or_fails_at_a_point_breaks_no_promise(
    pipeline: str, point: str, mode: str, quiet: None
):
    for nth in (1, 3):
        with armed(point, mode, nth=nth) as charge:
            result = simulate(5, rate=0.0, only=pipeline)
        assert charge.hits, f"{point} is not reached"
        assert [str(one) for one in result.violations] == []


# --- on the real parts: an exception at every step of a drain and of a build ------------------------------------------


@pytest.mark.stack
@pytest.mark.parametrize("point", [name for name in _apply_points() if not name.startswith(_FULL)])
def test_a_drain_that_fails_at_any_step_is_finished_by_the_next_one(lane: LaneUnderTest, point: str):
    """An error where nobody expects one: the lane is tried again or blocked, never torn and never skipped."""
    lane.world.publish(4)
    with armed(point, "error") as charge, suppress(LockstepError):
        lane.worker().drain(lane.vault)
    assert charge.fired, f"{point} was never reached"
    lane.assert_prefix()
    (blocked,) = {one for one in lane.world.statuses() if one == "FAILED"} or {None}
    lane.worker().drain(lane.vault, own=lane.world.windows[0].stop, by_hand=blocked is not None)
    _drain_after_the_lease(lane)
    lane.assert_equals_oracle()


@pytest.mark.stack
@pytest.mark.parametrize("point", WORKER_POINTS)
def test_a_build_that_fails_at_any_step_is_done_again_or_given_up(broken_world: World, point: str):
    world, key = broken_world, WORKER_POINTS[point]
    if key == "OLD":
        world.submit(("OLD", exports_crashes.OLD))
        world.drain()
    job_id = world.submit((key, exports_crashes.OLD if key == "OLD" else RECENT))
    with armed(point, "error") as charge, suppress(LockstepError):
        world.drain()
    assert charge.fired, f"{point} was never reached"
    _recover(world)
    assert world.job(job_id).status is (JobStatus.FAILED if key == "BAD" else JobStatus.COMPLETED)
    _assert_sound(world, job_id)


# --- hangs: somebody takes over while it sleeps, then it wakes up ---------------------------------------------------


def _hanging_drain(lane: LaneUnderTest, point: str) -> None:
    with armed(point, f"hang:{HANG_SECONDS}"), suppress(LockstepError):
        lane.worker().drain(lane.vault)


@pytest.mark.stack
@pytest.mark.long
@pytest.mark.parametrize("point", [name for name in _apply_points() if not name.startswith(_FULL)])
def test_a_drain_that_hangs_at_any_step_is_replaced_and_changes_nothing_more(lane: LaneUnderTest, point: str):
    lane.world.publish(4)
    process = multiprocessing.get_context("fork").Process(target=_hanging_drain, args=(lane, point))
    process.start()
    time.sleep(HANG_SECONDS / 2)
    with suppress(psycopg.errors.LockNotAvailable, LockstepError):
        _drain_after_the_lease(lane)
    process.join(PATIENCE_SECONDS)
    assert not process.is_alive()
    _drain_after_the_lease(lane)
    lane.assert_equals_oracle()


def _hanging_build(world: World, point: str) -> None:
    with (
        pool(world.state_dsn, application_name="sleeper", max_size=3) as state,
        armed(point, f"hang:{HANG_SECONDS}"),
        suppress(LockstepError, CrashInjected),
    ):
        _own(world, state).drain()


@pytest.mark.stack
@pytest.mark.long
@pytest.mark.parametrize("point", WORKER_POINTS)
def test_a_build_that_hangs_at_any_step_is_replaced_and_publishes_nothing_more(broken_world: Any, point: str):
    world, key = broken_world, WORKER_POINTS[point]
    if key == "OLD":
        world.submit(("OLD", exports_crashes.OLD))
        world.drain()
    job_id = world.submit((key, exports_crashes.OLD if key == "OLD" else RECENT))
    process = multiprocessing.get_context("fork").Process(target=_hanging_build, args=(world, point))
    process.start()
    time.sleep(HANG_SECONDS / 2)
    with suppress(LockstepError, psycopg.Error):
        world.ask("SET lock_timeout = '1 s'; UPDATE exports.job_chunk SET lease_until = now() WHERE status = 'RUNNING'")
    process.join(PATIENCE_SECONDS)
    assert not process.is_alive()
    _recover(world)
    assert world.job(job_id).status is (JobStatus.FAILED if key == "BAD" else JobStatus.COMPLETED)
    _assert_sound(world, job_id)
