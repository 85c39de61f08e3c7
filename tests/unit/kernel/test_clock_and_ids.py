"""Clock and id sources: what the rest of the platform may take for granted about time and identity."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone

import pytest

from lockstep.kernel.clock import FakeClock, SystemClock
from lockstep.kernel.ids import SeededIds, SystemIds


def test_the_system_clock_speaks_aware_utc() -> None:
    """A naive or local instant would shift every window by the offset of the machine."""
    assert SystemClock().now().utcoffset() == timedelta(0)


def test_a_system_clock_does_not_wait_for_a_negative_time() -> None:
    """`time.sleep` raises on a negative value, which would turn a late wake-up into a crash."""
    SystemClock().sleep(-1)


def test_a_fake_clock_advances_both_clocks_together() -> None:
    clock = FakeClock()
    before, ticks = clock.now(), clock.monotonic()
    clock.advance(90)
    assert clock.now() - before == timedelta(seconds=90)
    assert clock.monotonic() - ticks == 90


def test_a_wall_clock_jump_leaves_monotonic_time_alone() -> None:
    """If both moved, no test could show that a lease trusts the wrong clock."""
    clock = FakeClock()
    clock.jump(-3600)
    assert clock.monotonic() == 0
    assert clock.now() == datetime(2025, 12, 31, 23, tzinfo=UTC)


def test_a_fake_clock_sleeps_by_advancing() -> None:
    clock = FakeClock()
    clock.sleep(5)
    clock.sleep(0)
    assert clock.sleeps == [5]
    assert clock.monotonic() == 5


def test_a_fake_clock_refuses_naive_starts_and_backward_time() -> None:
    with pytest.raises(ValueError, match="aware"):
        FakeClock(datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(ValueError, match="forward"):
        FakeClock().advance(-1)


def test_a_fake_clock_answers_in_utc_whatever_the_start_zone() -> None:
    clock = FakeClock(datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))))
    assert clock.now().isoformat() == "2026-01-01T00:00:00+00:00"


def test_system_ids_are_version_seven_and_carry_their_time() -> None:
    clock = FakeClock(datetime(2026, 5, 4, 3, 2, 1, 500_000, tzinfo=UTC))
    made = uuid.UUID(SystemIds(clock).new_id())
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == int(clock.now().timestamp() * 1000)


def test_ids_keep_rising_when_the_wall_clock_is_set_back() -> None:
    """An id that sorts before older ones would hide new rows from a cursor that walks by id."""
    clock = FakeClock()
    ids = SystemIds(clock)
    made = [ids.new_id()]
    clock.jump(-86_400)
    made += [ids.new_id() for _ in range(5000)]  # more than the counter holds in one millisecond
    assert made == sorted(set(made))


def test_ids_stay_unique_between_threads() -> None:
    ids = SystemIds()
    with ThreadPoolExecutor(8) as pool:
        made = [one for batch in pool.map(lambda _: [ids.new_id() for _ in range(500)], range(8)) for one in batch]
    assert len(set(made)) == len(made)


def test_seeded_ids_repeat_for_one_seed_and_differ_for_another() -> None:
    """A simulation that cannot repeat its ids cannot repeat its failure."""

    def first_five(seed: int) -> list[str]:
        ids = SeededIds(seed)
        return [ids.new_id() for _ in range(5)]

    assert first_five(7) == first_five(7)
    assert first_five(7) != first_five(8)
    assert first_five(7) == sorted(set(first_five(7)))
