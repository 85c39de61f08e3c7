"""What a benchmark gives back and how it is shown: ratios against baselines of the same run, never bare seconds.

What belongs here: the result's shape, repeating with median and spread, the table, the machine's description. What does
not: any measurement of a pipeline; each has a module of its own beside this one with a function `run(context)`.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

# The parts in the order they run; each is a module bench.<name> with `run(context: Context) -> Result`.
PARTS: tuple[str, ...] = ("readiness", "idempotency", "ticks", "exports", "windows")  # few parts of the stack first
_NOISE_TURNS, _NOISE_WORK = 15, 300_000
NOISE_MEASURE = "interquartile range / median"
"""What the machine's `noise` is. Results without this word were made when it was slowest / fastest - 1."""


@dataclass(frozen=True)
class Target:
    """What a ratio should reach: at least or at most a value."""

    value: float
    at_least: bool = True

    def met_by(self, ratio: float) -> bool:
        """Whether a measured ratio reaches it."""
        return ratio >= self.value if self.at_least else ratio <= self.value

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.value:g}"


@dataclass
class Result:
    """The outcome of one part."""

    ratios: dict[str, float] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, name: str, value: float, target: Target | None = None) -> None:
        """Record a ratio and what it should reach."""
        self.ratios[name] = value
        if target is not None:
            self.targets[name] = target

    def as_json(self) -> dict[str, Any]:
        """The machine's form: `{"ratios", "targets", "directions", "samples", "machine"}`."""
        return {
            "ratios": {name: round(value, 4) for name, value in self.ratios.items()},
            "targets": {name: target.value for name, target in self.targets.items()},
            "directions": {name: "at least" if one.at_least else "at most" for name, one in self.targets.items()},
            "samples": self.samples,
            "machine": machine(),
        }


@dataclass
class Context:
    """What a benchmark may use: whether to be quick, and how to tell where it is."""

    quick: bool
    say: Callable[[str], None] = print


def machine() -> dict[str, Any]:
    """Where the figures come from, and how busy it was."""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "system": platform.system(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "noise": round(spread(repeated(_NOISE_TURNS, lambda: sum(range(_NOISE_WORK)))), 3),
        "noise_measure": NOISE_MEASURE,
    }


def spread(samples: list[float]) -> float:
    """How far the middle half of the samples reaches, as a share of their median.

    One hiccup of the machine moves the slowest of them by any factor, and says nothing about the other turns.
    """
    lower, middle, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return (upper - lower) / middle


def seconds(action: Callable[[], Any]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def repeated(times: int, action: Callable[[], Any]) -> list[float]:
    """The same call, several times."""
    return [seconds(action) for _ in range(times)]


def median(samples: list[float]) -> float:
    """The middle of the samples: one slow run on a busy machine must not decide."""
    return statistics.median(samples)


@contextmanager
def peak_memory_mb(pid: int | None = None) -> Iterator[Callable[[], float]]:
    """Resident memory at its highest while the block ran, of a process and its children."""
    import threading

    process, stop, peak = psutil.Process(pid), threading.Event(), 0.0

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.05):
            try:
                family = [process, *process.children(recursive=True)]
                peak = max(peak, sum(member.memory_info().rss for member in family) / 2**20)
            except psutil.Error:
                continue

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: peak
    finally:
        stop.set()
        thread.join(timeout=1)


def show(part: str, result: Result, console: Console) -> None:
    """A table a person can read."""
    table = Table(title=part, title_justify="left", box=None, pad_edge=False)
    for title, justify in (("ratio", "left"), ("value", "right"), ("target", "right"), ("", "left")):
        table.add_column(title, justify=justify)
    for name, value in result.ratios.items():
        target = result.targets.get(name)
        sign = "" if target is None else "[green]met[/]" if target.met_by(value) else "[red]missed[/]"
        table.add_row(name, f"{value:.2f}", str(target or ""), sign)
    console.print(table)
    for name, samples in result.samples.items():
        spread = f", {min(samples):.3f} to {max(samples):.3f}" if len(samples) > 1 else ""
        console.print(f"  {name}: median {median(samples):.3f} of {len(samples)}{spread}", highlight=False)
