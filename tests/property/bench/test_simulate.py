"""The simulation keeps its rules for any load: every unit once, in order within its lane, never too many at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate import Plant, Unit, simulate

arrivals = st.lists(st.tuples(st.floats(0, 500), st.integers(0, 5)), min_size=1, max_size=40)
plants = st.builds(
    Plant,
    slots=st.integers(1, 4),
    per_run=st.floats(0, 20),
    per_unit=st.floats(0.1, 10),
    drain=st.integers(1, 5),
    closed=st.none() | st.tuples(st.floats(0, 100), st.floats(100, 300)),
)


def _units(found: list[tuple[float, int]]) -> list[Unit]:
    return [Unit(at, lane) for at, lane in sorted(found)]


@given(arrivals, plants, st.integers(0, 5))
@settings(deadline=None, max_examples=200)
def test_every_unit_is_done_once_and_after_it_arrived(found: list[tuple[float, int]], plant: Plant, seed: int):
    units = _units(found)
    outcome = simulate(units, plant, seed=seed)
    assert sorted(at for at, _ in outcome.served) == [unit.at for unit in units]
    assert all(done > at for at, done in outcome.served)
    assert outcome.utilisation <= 1.0 + 1e-9
    assert outcome.ended >= max(done for _, done in outcome.served) - 1e-9


@given(st.lists(st.floats(0, 500), min_size=1, max_size=40), st.floats(0.1, 20))
@settings(deadline=None, max_examples=200)
def test_one_slot_without_lanes_is_the_textbook_queue(moments: list[float], service: float):
    """Lindley's recursion is the oracle: a unit waits for what is left of the ones before it."""
    units = [Unit(at, number) for number, at in enumerate(sorted(moments))]
    outcome = simulate(units, Plant(1, 0.0, service, spread=0.0))
    free = 0.0
    expected = []
    for unit in units:
        free = max(free, unit.at) + service
        expected.append((unit.at, free))
    assert [round(done, 6) for _, done in outcome.served] == [round(done, 6) for _, done in expected]


@given(st.lists(st.floats(0, 200), min_size=1, max_size=30), plants)
@settings(deadline=None, max_examples=100)
def test_within_a_lane_nothing_overtakes(moments: list[float], plant: Plant):
    outcome = simulate([Unit(at, 0) for at in sorted(moments)], plant)
    dones = [done for _, done in outcome.served]
    assert dones == sorted(dones)
