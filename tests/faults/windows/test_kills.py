"""Killing a drain at every step, stopping it beyond its lease, and losing the queue: the warehouse stays the oracle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.kernel.crash import armed, declared_points
from lockstep.kernel.settings import PROJECT_ROOT
from lockstep.windows.model import WindowKind, WindowStatus
from tests.faults.modes import FAILS, HANGS, meet
from tests.windows_lane import LaneUnderTest
from tests.windows_world import Files

pytestmark = pytest.mark.stack

PATIENCE_SECONDS = 120
_FULL = ("windows.full.", "windows.swap.")


def _apply_points() -> list[str]:
    names = declared_points(Path(PROJECT_ROOT, "lockstep", "windows"))
    return [name for name in names if not name.startswith("windows.produce.")]


def _child(lane: LaneUnderTest, point: str, mode: str) -> None:
    """In a forked process: connections of its own, then a drain that meets its fate."""
    with armed(point, mode):
        lane.worker().drain(lane.vault)


def _fork(lane: LaneUnderTest, point: str, mode: str = "kill") -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_child, args=(lane, point, mode))
    process.start()
    return process


def _drain_after_the_lease(lane: LaneUnderTest) -> None:
    """Let the dead worker's lease run out, without waiting for it, and drain as the sensor would."""
    held = lane.worker().drain(lane.vault)
    if held.reason == "a live worker holds the lane":
        lane.warehouse(
            "UPDATE windows.apply_control SET lease_until = clock_timestamp() WHERE vault = %s RETURNING 1", lane.vault
        )
        lane.worker().drain(lane.vault)


@pytest.mark.parametrize("point", [name for name in _apply_points() if not name.startswith(_FULL)])
def test_a_drain_killed_at_any_step_loses_and_doubles_nothing(lane: LaneUnderTest, point: str):
    """Guards every crash point that the source declares: a new one is tested as soon as it is written."""
    lane.world.publish(5)
    process = _fork(lane, point)
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL, "the point was not reached"
    lane.assert_prefix()
    _drain_after_the_lease(lane)
    lane.assert_equals_oracle()


@pytest.mark.parametrize("point", [name for name in _apply_points() if name.startswith(_FULL)])
def test_a_full_load_killed_at_any_step_is_swapped_in_whole_or_not_at_all(
    new_lane: Callable[..., LaneUnderTest], point: str
):
    lane = new_lane(begun=False)
    rows = [lane.world.row("study__v", number) for number in range(5)]
    lane.world.add(Files({"study__v": rows}), kind=WindowKind.FULL)
    lane.world.publish(3)
    process = _fork(lane, point)
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL, "the point was not reached"
    _drain_after_the_lease(lane)
    lane.assert_equals_oracle()
    assert [one.epoch for one in lane.history()] == [1, 1, 1]


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@pytest.mark.parametrize("point", _apply_points())
def test_a_drain_that_fails_or_sleeps_through_its_lease_at_any_step_changes_nothing_in_the_end(
    new_lane: Callable[..., LaneUnderTest], point: str, mode: str
):
    """While it hangs, another worker takes over its lane; where it holds the lane's row, the other one waits for it."""
    full = point.startswith(_FULL)
    lane = new_lane(begun=not full)
    if full:
        rows = [lane.world.row("study__v", number) for number in range(5)]
        lane.world.add(Files({"study__v": rows}), kind=WindowKind.FULL)
    lane.world.publish(3)
    meet(point, mode, lambda: lane.worker().drain(lane.vault), lambda: _drain_after_the_lease(lane))
    lane.assert_prefix() if not full else None
    _drain_after_the_lease(lane)
    lane.assert_equals_oracle()


def test_a_worker_stopped_beyond_its_lease_wakes_up_and_changes_nothing(lane: LaneUnderTest):
    """Guards against a zombie: it was inside a window when it froze, and its lane moved on without it."""
    lane.world.publish(6)
    process = _fork(lane, "windows.stage.after_copy", "hang:8")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not lane.warehouse("SELECT FROM pg_namespace WHERE starts_with(nspname, %s)", f"stage:{lane.vault}:"):
        assert time.monotonic() < deadline, "the worker never staged"
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        _drain_after_the_lease(lane)
        lane.assert_equals_oracle()
        before = lane.history()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    process.join(PATIENCE_SECONDS)
    assert not process.is_alive()
    assert lane.history() == before
    lane.assert_equals_oracle()


def test_a_zombie_cannot_write_the_queue_over_a_newer_worker(lane: LaneUnderTest):
    """Guards the mirror: the fence is in the condition of every queue write."""
    (window,) = lane.world.publish(1)
    worker = lane.worker()
    old = worker.store.claim(lane.vault, "old", 0.01)
    assert old is not None
    time.sleep(0.05)
    worker.drain(lane.vault)
    assert not worker.ledger.failed(window, fence=old.fence, error="late")
    assert lane.world.statuses() == ["APPLIED"]
    (ahead,) = lane.world.publish(1)
    newer = worker.store.claim(lane.vault, "newer", 30)
    assert newer is not None
    row = worker.ledger.get(ahead)
    assert row is not None
    worker.ledger.processing(row, fence=newer.fence, owner="newer", lease_until=newer.lease.lease_until, attempt=True)
    assert not worker.ledger.failed(ahead, fence=old.fence, error="late")
    assert not worker.ledger.ready(ahead, fence=old.fence, was=WindowStatus.PROCESSING)
    worker.ledger.applied([ahead], fence=old.fence)
    assert lane.world.statuses() == ["APPLIED", "PROCESSING"]
