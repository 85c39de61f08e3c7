"""A producer killed with SIGKILL at every step: the next pass ends where a pass without a death would have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lockstep.kernel.crash import VARIABLE, declared_points
from lockstep.kernel.settings import PROJECT_ROOT
from tests.faults.modes import FAILS, HANGS, meet
from tests.producer_world import Place, producing
from tests.simulator import Simulator, running_simulator

pytestmark = pytest.mark.stack

VAULT = "600001"
# Each point, at a pass that lies in the middle of the work.
DEATHS = {
    "windows.produce.listed": 1,
    "windows.produce.gap_recorded": 1,
    "windows.produce.part_downloaded": 3,
    "windows.produce.downloaded": 2,
    "windows.produce.unpacked": 2,
    "windows.produce.object_written": 4,
    "windows.produce.before_manifest": 2,
    "windows.produce.manifest_written": 2,
    "windows.produce.before_row": 2,
    "windows.produce.row_written": 2,
}


class Clean(NamedTuple):
    """What a pass without a death leaves."""

    objects: dict[str, bytes]
    items: list[dict[str, Any]]


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with running_simulator(tmp_path_factory.mktemp("vault")) as running:
        running.add(VAULT, rows=4, base_rows=4, objects=["study__v", "picklist__sys"])
        running.do(VAULT, "publish", windows=4)
        running.do(VAULT, "withhold", stop="202601010045")
        running.do(VAULT, "knobs", part_size=1500, burst_limit=100_000)
        yield running


_clean: list[Clean] = []


@pytest.fixture
def clean(stack: Any, simulator: Simulator, tmp_path: Path) -> Clean:
    if not _clean:
        place = Place().create()
        with producing(place, VAULT, simulator.address(VAULT), tmp_path / "clean") as producer:
            assert not producer.run().problems
        _clean.append(Clean(place.objects(), place.items()))
    return _clean[0]


def _without_counts(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A gap that was seen by two passes counts two attempts; nothing else may differ."""
    return [
        {name: value for name, value in item.items() if item.get("kind") != {"S": "gap"} or name != "attempt_count"}
        for item in items
    ]


def _assert_no_silent_hole(place: Place) -> None:
    """A row behind the withheld window is there only together with its gap."""
    stops = place.stops(VAULT)
    gaps = {gap.sort_key for gap in place.queue.gaps(VAULT)}
    assert "202601010100" not in stops or "gap#202601010045" in gaps
    assert stops == sorted(stops)


@pytest.mark.parametrize("point", DEATHS)
def test_a_killed_producer_leaves_nothing_that_the_next_pass_does_not_finish(
    clean: Clean, simulator: Simulator, tmp_path: Path, point: str
):
    """Guards every moment between listing and row: no half window, no lost window, no second one."""
    place = Place().create()
    folder = tmp_path / "work"
    arguments = [VAULT, simulator.address(VAULT), place.bucket, place.table, str(folder)]
    killed = subprocess.run(
        [sys.executable, "-m", "tests.faults.windows.produce_once", *arguments],
        env={**os.environ, VARIABLE: f"{point}=kill@{DEATHS[point]}"},
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    place.check()  # whatever row is there points at a whole window
    _assert_no_silent_hole(place)
    with producing(place, VAULT, simulator.address(VAULT), folder) as producer:
        assert not producer.run().problems
    assert place.objects() == clean.objects
    assert _without_counts(place.items()) == _without_counts(clean.items)


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@pytest.mark.parametrize("point", DEATHS)
def test_a_producer_that_fails_or_hangs_while_another_one_works_leaves_what_one_pass_would(
    clean: Clean, simulator: Simulator, tmp_path: Path, point: str, mode: str
):
    """Guards two producers of one vault: whoever is late finds its work done and changes nothing."""
    place = Place().create()

    def produce(name: str) -> None:
        with producing(place, VAULT, simulator.address(VAULT), tmp_path / name, workers=1) as producer:
            producer.run()

    meet(point, mode, lambda: produce("victim"), lambda: produce("rival"), nth=DEATHS[point], blocked_after=60)
    place.check()
    _assert_no_silent_hole(place)
    with producing(place, VAULT, simulator.address(VAULT), tmp_path / "victim") as producer:
        assert not producer.run().problems
    assert place.objects() == clean.objects
    assert _without_counts(place.items()) == _without_counts(clean.items)


def test_every_crash_point_of_the_producer_has_its_death():
    """Guards against a new step that nobody kills."""
    declared = declared_points(PROJECT_ROOT / "lockstep" / "windows")
    assert {name for name in declared if name.startswith("windows.produce.")} == set(DEATHS)
