"""The simulation of the queues: what it computes for loads that can be done by hand, and where costs come from."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from bench import simulate as sim
from bench.simulate import Plant, Size, Unit, simulate
from lockstep.kernel.errors import InvalidInput

EXACT = {"spread": 0.0}


def test_one_slot_serves_one_after_the_other():
    outcome = simulate([Unit(0, 1), Unit(0, 2), Unit(100, 3)], Plant(1, 2.0, 8.0, **EXACT))
    assert outcome.served == [(0, 10), (0, 20), (100, 110)]
    assert (outcome.runs, outcome.busy_seconds, outcome.ended) == (3, 30.0, 110.0)


def test_a_lane_has_one_run_at_a_time_however_many_slots_are_free():
    outcome = simulate([Unit(0, 1), Unit(1, 1), Unit(2, 1)], Plant(5, 10.0, 1.0, **EXACT))
    assert outcome.served == [(0, 11), (1, 23), (2, 23)], "the second run takes both that waited"
    assert outcome.runs == 2


def test_a_run_takes_no_more_than_it_may():
    outcome = simulate([Unit(0, 1)] * 5, Plant(1, 0.0, 1.0, drain=2, **EXACT))
    assert outcome.runs == 3
    assert [done for _, done in outcome.served] == [2, 2, 4, 4, 5]


def test_nothing_starts_during_an_outage_and_all_is_done_after_it():
    plant = Plant(1, 0.0, 1.0, closed=(5.0, 50.0), **EXACT)
    outcome = simulate([Unit(float(at), at) for at in range(10)], plant)
    assert outcome.served[:5] == [(at, at + 1) for at in range(5)]
    assert [done for _, done in outcome.served[5:]] == [51, 52, 53, 54, 55]
    assert sim.recovery(outcome, 50.0, within=10.0) == 5.0


def test_the_fewest_slots_are_enough_and_one_less_is_not():
    units = [Unit(0.0, lane) for lane in range(100)]
    plant = Plant(1, 9.0, 1.0, **EXACT)
    slots, outcome = sim.slots_needed(units, plant, within=50.0)
    assert (slots, outcome.percentile(0.95)) == (19, 50.0), "five rounds of ten seconds must hold 95 lanes"
    assert sim._with(units, plant, slots - 1, 0).percentile(0.95) > 50.0


def test_slots_that_are_always_busy_are_not_enough():
    units = [Unit(float(at), at) for at in range(1000)]
    plant = Plant(1, 0.0, 0.9, **EXACT)
    assert sim.slots_needed(units, plant, within=60.0)[0] == 1
    slots, outcome = sim.slots_needed(units, plant, within=60.0, most_used=0.7)
    assert slots == 2
    assert outcome.utilisation == pytest.approx(0.45, abs=0.01)


def test_a_target_below_one_run_is_refused():
    with pytest.raises(InvalidInput, match="no number of slots"):
        sim.slots_needed([Unit(0.0, 1)], Plant(1, 10.0, 1.0, **EXACT), within=5.0)


def test_the_same_seed_gives_the_same_result_and_another_seed_another():
    units = list(sim.chunks_of(100_000, 20, 1.0, Random(3)))
    first, again, other = (simulate(units, Plant(2, 0.0, 1.0), seed=seed).served for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_costs_are_assumed_until_they_are_measured():
    assert all(cost.source.startswith("assumed") for cost in sim.costs().values())
    measured = sim.costs(MEASURED)
    assert measured["run_start"] == (8.0, "measured (lockstep bench windows: one run per window)")
    assert measured["window_apply"].seconds == pytest.approx((56.0 - 8.0) / 960)
    assert measured["chunk_build"].seconds == pytest.approx(2 * 30_000 / 500_000)
    assert measured["chunk_wait"].seconds == pytest.approx(40.0 - 0.5 * 40 * 800_000 / 500_000)
    assert measured["tick_finalize"].seconds == 1.1
    assert measured["readiness_step"].seconds == pytest.approx(0.01)
    assert measured["tick_silver"].seconds == 2.5
    assert measured["window_fetch"].seconds == 0.3


MEASURED = {
    "windows": {
        "samples": {
            "one run per window, s each": [7.0, 8.0, 9.0],
            "platform, s": [56.0],
            "memory at 96 and 960 windows, MB": [500.0, 520.0],
            "fetching a window, s": [0.2, 0.3, 0.4],
        }
    },
    "exports": {
        "samples": {
            "rows_per_second_workers": [500_000.0],
            "rows_per_second_psql": [800_000.0],
            "end_to_end_seconds": [40.0],
        },
        "ratios": {"end_to_end_vs_psql_copy": 0.5},
        "machine": {"cores": 2},
    },
    "ticks": {
        "samples": {
            "finalize_seconds_at_10": [0.9],
            "finalize_seconds_at_500": [1.1, 1.0, 1.2],
            "silver_seconds_per_tick": [2.5],
        }
    },
    "readiness": {"ratios": {"steps_per_s": 100.0}},
}


def test_the_samples_that_are_read_are_the_ones_that_the_benchmarks_write():
    """Guards a renamed sample: the simulation would go back to its assumptions without a word."""
    folder = Path(sim.__file__).parent
    texts = {part: (folder / f"{part}.py").read_text() for part in ("windows", "exports", "ticks", "readiness")}
    assert '"one run per window, s each"' in texts["windows"]
    assert '"platform, s"' in texts["windows"]
    assert 'f"memory at {sizes.small} and {sizes.backlog} windows, MB"' in texts["windows"]
    for name in ("rows_per_second_workers", "rows_per_second_psql", "end_to_end_seconds", "end_to_end_vs_psql_copy"):
        assert f'"{name}"' in texts["exports"]
    assert f"ROWS = {sim._CHUNK_ROWS:_}" in texts["exports"]
    assert 'f"finalize_seconds_at_{goal}"' in texts["ticks"]
    assert '"silver_seconds_per_tick"' in texts["ticks"]
    assert '"steps_per_s"' in texts["readiness"]


def test_the_loads_have_as_many_units_as_they_should():
    size = Size(vaults=10, chunks_a_day=240_000, job_chunks=100, projects=50, tick_minutes=30, hours=2)
    by_name = {load.name: load for load in sim.loads(size, sim.costs())}
    assert len(by_name["windows: apply"].units) == 10 * 8
    assert len(by_name["ticks: silver"].units) == 50 * 4
    assert len(by_name["exports: build"].units) == pytest.approx(20_000, rel=0.3)
    for load in by_name.values():
        assert load.units == sorted(load.units, key=lambda unit: unit.at)


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path):
    import typer

    app = typer.Typer()
    app.command()(sim.main)
    (tmp_path / "bench.json").write_text(json.dumps(MEASURED))
    small = ["--vaults", "20", "--chunks", "5000", "--projects", "50", "--hours", "1"]
    files = ["--bench", str(tmp_path / "bench.json"), "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(app, [*small, *files, "--vendor-seconds", "1.5"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["load"] for row in found["rows"]] == [load.name for load in sim.loads(Size(hours=1), sim.costs())]
    assert found["costs"]["run_start"]["seconds"] == 8.0
    near = sim.costs(MEASURED)["window_fetch"].seconds
    assert found["costs"]["window_fetch"]["seconds"] == near + 1.5
    assert "1.5 s for the way to the vendor" in found["costs"]["window_fetch"]["source"]
    assert all(row["slots"] >= 1 for row in found["rows"])
    assert [row["runs_a_day"] is None for row in found["rows"]] == [False, False, True, True, False], (
        "only runs are runs"
    )
    assert [row["within_seconds"] for row in found["rows"]] == [900, 900, 600, 60, 900]
