"""The heartbeat under any mix of answers, silence and clock jumps: it never believes for too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import InvalidInput, LostClaim, Transient
from lockstep.kernel.lease import Heartbeat, Lease

LEASE = Lease("vault-1", "me", 7, 30.0, datetime(2026, 1, 1, tzinfo=UTC))


class Script:
    """A store whose next answer the test chooses; `taking` seconds pass inside the call."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.answer: Exception | None = None
        self.taking = 0.0

    def renew(self, lease: Lease) -> Lease:
        """Answer as told."""
        self.clock.advance(self.taking)
        if self.answer is not None:
            raise self.answer
        return lease


def is_held(beat: Heartbeat) -> bool:
    try:
        beat.check()
    except LostClaim:
        return False
    return True


steps = st.lists(
    st.tuples(
        st.sampled_from(["ok", "transient", "bug", "nothing"]),
        st.floats(0, 40),  # time between calls
        st.floats(0, 40),  # time inside the call
        st.floats(-1e6, 1e6),  # wall clock jump
    ),
    max_size=12,
)


@given(steps)
def test_a_lease_is_believed_exactly_while_a_renewal_is_younger_than_the_ttl(
    history: list[tuple[str, float, float, float]],
) -> None:
    """Believing longer is a zombie; measuring by the wall clock or from the answer is how one is born."""
    clock = FakeClock()
    store = Script(clock)
    beat = Heartbeat(store, LEASE, every=10, clock=clock)
    alive_until, lost = clock.monotonic() + LEASE.ttl, False
    for kind, before, inside, jump in history:
        clock.advance(before)
        clock.jump(jump)
        lost = lost or clock.monotonic() >= alive_until
        assert is_held(beat) is not lost
        if kind == "nothing":
            continue
        store.taking = inside
        store.answer = {"transient": Transient("net"), "bug": KeyError("x")}.get(kind)
        asked = clock.monotonic()
        assert beat.beat() is (kind == "ok")
        alive_until = asked + LEASE.ttl if kind == "ok" else alive_until
        lost = lost or clock.monotonic() >= alive_until
        assert is_held(beat) is not lost
    assert beat.lost.is_set() is lost


@given(st.integers(0, 5))
def test_a_refusal_is_final_whatever_comes_later(good_beats_after: int) -> None:
    clock = FakeClock()
    store = Script(clock)
    beat = Heartbeat(store, LEASE, clock=clock)
    store.answer = LostClaim("newer")
    assert not beat.beat()
    store.answer = None
    for _ in range(good_beats_after):
        beat.beat()
        assert not is_held(beat)


def test_entering_with_a_lost_lease_stops_before_any_work() -> None:
    store = Script(FakeClock())
    store.answer = LostClaim("newer")
    with pytest.raises(LostClaim), Heartbeat(store, LEASE):
        pytest.fail("the block ran")


def test_a_renewal_that_never_returns_still_ends_the_lease() -> None:
    """The renewing thread hangs in a dead network; somebody else must notice."""
    release, calls = threading.Event(), []

    class Hanging:
        def renew(self, lease: Lease) -> Lease:
            calls.append(1)
            if len(calls) > 1:
                release.wait(60)
            return lease

    short = Lease("vault-1", "me", 7, 2.0, LEASE.lease_until)
    with Heartbeat(Hanging(), short, every=0.05) as beat:
        assert beat.lost.wait(30)
        with pytest.raises(LostClaim):
            beat.check()
        release.set()


def test_a_background_thread_keeps_a_healthy_lease() -> None:
    renewed = threading.Semaphore(0)

    class Counting:
        def renew(self, lease: Lease) -> Lease:
            renewed.release()
            return lease

    with Heartbeat(Counting(), LEASE, every=0.01) as beat:
        for _ in range(5):
            assert renewed.acquire(timeout=30)
        beat.check()


@pytest.mark.parametrize("make", [lambda: Heartbeat(Script(FakeClock()), LEASE, every=30.0)])
def test_a_heartbeat_slower_than_the_lease_is_refused(make: Callable[[], Heartbeat]) -> None:
    with pytest.raises(InvalidInput):
        make()
