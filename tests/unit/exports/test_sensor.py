"""The chunk sensor stays a moment when it finds nothing, and not longer."""

from __future__ import annotations

from lockstep.exports.claims import Batch
from lockstep.kernel.clock import FakeClock
from sensors.exports import ATTENTION_SECONDS, LOOK_SECONDS, reserve_soon


class _Claims:
    """Has work from a moment on."""

    def __init__(self, clock: FakeClock, *, after: float) -> None:
        self._clock = clock
        self._from = clock.monotonic() + after
        self.asked = 0

    def reserve(self, limit: int) -> Batch | None:
        self.asked += 1
        return Batch("batch", limit) if self._clock.monotonic() >= self._from else None


def test_work_that_arrives_during_the_pass_is_taken_by_it():
    clock = FakeClock()
    assert reserve_soon(_Claims(clock, after=1.0), 7, clock=clock) == Batch("batch", 7)


def test_work_that_is_there_is_taken_without_waiting():
    clock = FakeClock()
    begun, claims = clock.monotonic(), _Claims(clock, after=0.0)
    assert reserve_soon(claims, 7, clock=clock) is not None
    assert (clock.monotonic(), claims.asked) == (begun, 1)


def test_a_pass_without_work_ends():
    clock = FakeClock()
    claims = _Claims(clock, after=60.0)
    assert reserve_soon(claims, 7, clock=clock) is None
    assert claims.asked <= ATTENTION_SECONDS / LOOK_SECONDS + 2
