"""The table: every fault script against every design, counted by one oracle. `lockstep faults compare` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.faults.schedule import Never, Script, World
from tests.faults.models import (
    accelerator,
    original_exports,
    original_readiness,
    original_ticks,
    original_windows,
    ours,
)
from tests.faults.models.oracle import Count, Facts, count
from tests.faults.models.scripts import EXPORTS, READINESS, TICKS, WINDOWS, Scenario

ORIGINAL, VENDOR, OURS = "original design", "vendor accelerator", "Lockstep"
_MOST_CALLS = 500

Run = Callable[[World, Scenario], Facts]

DESIGNS: dict[str, tuple[list[Scenario], dict[str, Run]]] = {
    "windows": (WINDOWS, {ORIGINAL: original_windows.run, VENDOR: accelerator.run, OURS: ours.run_windows}),
    "exports": (EXPORTS, {ORIGINAL: original_exports.run, OURS: ours.run_exports}),
    "ticks": (TICKS, {ORIGINAL: original_ticks.run, OURS: ours.run_ticks}),
    "readiness": (READINESS, {ORIGINAL: original_readiness.run, OURS: ours.run_readiness}),
}


@dataclass(frozen=True)
class Row:
    """One scenario of one pipeline against one design: how many scripts were played, and what they did in all."""

    pipeline: str
    scenario: str
    design: str
    scripts: int
    count: Count

    def as_dict(self) -> dict[str, object]:
        names = {"pipeline": self.pipeline, "scenario": self.scenario, "design": self.design, "scripts": self.scripts}
        return {**names, **self.count._asdict()}


def compare(*, stride: int = 1) -> Iterator[Row]:
    """Play everything. A `stride` above 1 strikes our own code at every so many calls only: it has the most of them."""
    for pipeline, (scenarios, designs) in DESIGNS.items():
        for scenario in scenarios:
            for design, run in designs.items():
                scripts, total = _play(run, scenario, stride if design == OURS else 1)
                yield Row(pipeline, scenario.name, design, scripts, total)


def _play(run: Run, scenario: Scenario, stride: int) -> tuple[int, Count]:
    if scenario.sweep is None:
        return 1, count(run(World(seed=1, plan=Never()), scenario))
    total, scripts = Count(), 0
    for nth in range(1, _MOST_CALLS, stride):
        script = Script(scenario.sweep, nth)
        facts = run(World(seed=1, plan=script), scenario)
        if not script.fired:
            return scripts, total
        total, scripts = total.plus(count(facts)), scripts + 1
    raise AssertionError(f"a run of {scenario.name} has more than {_MOST_CALLS} calls")
