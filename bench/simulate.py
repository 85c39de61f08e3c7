"""How many slots a load needs: a simulation of the queues, from what one unit costs when it is measured.

What belongs here: lanes, slots and time, pure and seeded; the three loads of docs/scale.md; where each cost comes from.
What does not: measuring, which the other modules of this folder do. `python -m bench.simulate --help`.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.errors import InvalidInput

HOUR, DAY = 3600.0, 86400.0
MOST_USED = 0.7  # what is left catches up after an outage, and carries a day that is busier than the average


# --- the simulation ---------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Something that arrives and must be done: a window of a vault, a chunk, a tick of a project."""

    at: float
    lane: int


@dataclass(frozen=True)
class Plant:
    """Who does the work: runs in slots. A lane has one run at a time, and a run takes what waits in its lane."""

    slots: int
    per_run: float
    per_unit: float
    drain: int = 1_000_000
    spread: float = 0.2
    closed: tuple[float, float] | None = None  # no run starts in between: an outage


@dataclass
class Outcome:
    """What happened to the units."""

    served: list[tuple[float, float]] = field(default_factory=list)  # when each unit arrived, and when it was done
    runs: int = 0
    busy_seconds: float = 0.0
    ended: float = 0.0
    most_waiting: int = 0
    slots: int = 1

    def percentile(self, share: float) -> float:
        """The latency that this share of the units stays below."""
        ordered = sorted(done - at for at, done in self.served)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0

    @property
    def utilisation(self) -> float:
        """Share of the slots' time that was used."""
        return self.busy_seconds / (self.slots * self.ended) if self.ended else 0.0


class _Lanes:
    """Waiting units by lane; a lane that waits stands in line once, and not while it is being served."""

    def __init__(self) -> None:
        self._units: dict[int, deque[float]] = {}
        self._line: deque[int] = deque()
        self._served: set[int] = set()
        self.waiting = 0

    def arrive(self, unit: Unit) -> None:
        waiting = self._units.setdefault(unit.lane, deque())
        if not waiting and unit.lane not in self._served:
            self._line.append(unit.lane)
        waiting.append(unit.at)
        self.waiting += 1

    def take(self, most: int) -> tuple[int, list[float]] | None:
        """The lane that waits longest, with what its run takes."""
        if not self._line:
            return None
        lane = self._line.popleft()
        self._served.add(lane)
        waiting = self._units[lane]
        taken = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        self.waiting -= len(taken)
        return lane, taken

    def leave(self, lane: int) -> None:
        self._served.discard(lane)
        if self._units[lane]:
            self._line.append(lane)
        else:
            del self._units[lane]


def simulate(units: Iterable[Unit], plant: Plant, *, seed: int = 0) -> Outcome:
    """Let the units arrive, in the order of their time, and serve them all."""
    chance, outcome, lanes = random.Random(seed), Outcome(slots=plant.slots), _Lanes()  # noqa: S311
    ends: list[tuple[float, int]] = []
    coming = iter(units)
    arriving = next(coming, None)
    now = 0.0
    while arriving is not None or ends or lanes.waiting:
        now = _next_moment(now, arriving, ends, lanes, plant)
        while ends and ends[0][0] <= now:
            lanes.leave(heapq.heappop(ends)[1])
        while arriving is not None and arriving.at <= now:
            lanes.arrive(arriving)
            arriving = next(coming, None)
        outcome.most_waiting = max(outcome.most_waiting, lanes.waiting)
        while len(ends) < plant.slots and not _is_closed(plant, now) and (taken := lanes.take(plant.drain)):
            lane, arrivals = taken
            took = (plant.per_run + plant.per_unit * len(arrivals)) * chance.uniform(1 - plant.spread, 1 + plant.spread)
            heapq.heappush(ends, (now + took, lane))
            outcome.runs += 1
            outcome.busy_seconds += took
            outcome.served += [(at, now + took) for at in arrivals]
    outcome.ended = now
    return outcome


def _is_closed(plant: Plant, now: float) -> bool:
    return plant.closed is not None and plant.closed[0] <= now < plant.closed[1]


def _next_moment(
    now: float, arriving: Unit | None, ends: list[tuple[float, int]], lanes: _Lanes, plant: Plant
) -> float:
    moments = [arriving.at] if arriving is not None else []
    moments += [ends[0][0]] if ends else []
    if lanes.waiting and plant.closed is not None and _is_closed(plant, now):
        moments.append(plant.closed[1])
    return max(now, min(moments)) if moments else now


def slots_needed(
    units: list[Unit], plant: Plant, *, within: float, most_used: float = 1.0, seed: int = 0
) -> tuple[int, Outcome]:
    """The fewest slots with which 95 % of the units are done in time and no more than this share of them is used."""

    def enough(outcome: Outcome) -> bool:
        return outcome.percentile(0.95) <= within and outcome.utilisation <= most_used

    fewest = most = 1
    while not enough(outcome := _with(units, plant, most, seed)):
        if most > 100_000:
            raise InvalidInput(
                "no number of slots is enough: one run alone takes longer than the target.",
                next_step="raise the target, or make the unit cheaper.",
            )
        fewest, most = most + 1, most * 2
    while fewest < most:
        middle = (fewest + most) // 2
        tried = _with(units, plant, middle, seed)
        if enough(tried):
            most, outcome = middle, tried
        else:
            fewest = middle + 1
    return most, outcome


def _with(units: list[Unit], plant: Plant, slots: int, seed: int) -> Outcome:
    changed = Plant(slots, plant.per_run, plant.per_unit, plant.drain, plant.spread, plant.closed)
    return simulate(units, changed, seed=seed)


# --- what a unit costs ------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """One measured or assumed figure, in seconds of one slot."""

    seconds: float
    source: str


# What is taken where no measurement is given. Cautious figures of a busy machine with two cores; the first measurement
# of your own replaces them.
ASSUMED: dict[str, tuple[float, str]] = {
    "run_start": (10.0, "lockstep bench windows: one run per window"),
    "window_apply": (0.08, "lockstep bench windows: the backlog, per window"),
    "window_fetch": (2.0, "lockstep bench windows: fetching a window"),
    "chunk_build": (0.25, "lockstep bench exports: 30,000 rows, per worker"),
    "chunk_wait": (15.0, "lockstep bench exports: end to end, beyond the rows"),
    "tick_finalize": (1.5, "lockstep bench ticks: finalize_seconds"),
    "tick_silver": (3.0, "lockstep bench ticks: silver_seconds_per_tick"),
    "readiness_step": (0.02, "lockstep bench readiness: steps_per_s"),
}
_CHUNK_ROWS = 30_000


def costs(results: Mapping[str, Any] | None = None) -> dict[str, Cost]:
    """Every cost: from the file of `lockstep bench --json`, else assumed."""
    measured = dict(_measured(results or {}))
    return {
        name: Cost(measured[name], f"measured ({command})")
        if name in measured
        else Cost(seconds, f"assumed; {command}")
        for name, (seconds, command) in ASSUMED.items()
    }


def farther(fetch: Cost, seconds: float) -> Cost:
    """A fetch from a vendor who is so much farther away, for each window, than the measured or assumed one."""
    return Cost(fetch.seconds + seconds, f"{fetch.source} + {seconds:g} s for the way to the vendor")


def _measured(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    windows, exports, ticks = (_samples(results, part) for part in ("windows", "exports", "ticks"))
    if single := windows.get("one run per window, s each"):
        yield "run_start", statistics.median(single)
        backlog = next((int(found[1]) for name in windows if (found := re.match(r"memory at \d+ and (\d+) ", name))), 0)
        if backlog and (whole := windows.get("platform, s")):
            yield "window_apply", max(0.001, (statistics.median(whole) - statistics.median(single)) / backlog)
    if fetch := windows.get("fetching a window, s"):
        yield "window_fetch", statistics.median(fetch)
    if rate := exports.get("rows_per_second_workers"):
        workers = max(2, int(results["exports"].get("machine", {}).get("cores") or 1))
        yield "chunk_build", workers * _CHUNK_ROWS / statistics.median(rate)
        yield from _chunk_wait(results["exports"], statistics.median(rate))
    sizes = [int(name.rpartition("_")[2]) for name in ticks if name.startswith("finalize_seconds_at_")]
    if sizes:
        yield "tick_finalize", statistics.median(ticks[f"finalize_seconds_at_{max(sizes)}"])
    if silver := ticks.get("silver_seconds_per_tick"):
        yield "tick_silver", statistics.median(silver)
    if steps := results.get("readiness", {}).get("ratios", {}).get("steps_per_s"):
        yield "readiness_step", 1 / steps


def _chunk_wait(exports: Mapping[str, Any], rate: float) -> Iterator[tuple[str, float]]:
    """What the whole way costs beyond the rows: the benchmark tells its rows only as a ratio to psql's rate."""
    whole, psql = exports["samples"].get("end_to_end_seconds"), exports["samples"].get("rows_per_second_psql")
    share = exports.get("ratios", {}).get("end_to_end_vs_psql_copy")
    if whole and psql and share:
        seconds = statistics.median(whole)
        yield "chunk_wait", max(0.0, seconds - share * seconds * statistics.median(psql) / rate)


def _samples(results: Mapping[str, Any], part: str) -> Mapping[str, list[float]]:
    found: Mapping[str, list[float]] = results.get(part, {}).get("samples", {})
    return {name: values for name, values in found.items() if values}


# --- the loads of docs/scale.md ---------------------------------------------------------------------------------------


class Load(NamedTuple):
    """A row of the table: so many units, and how soon 95 % of them must be done."""

    name: str
    slots_are: str
    units: list[Unit]
    per_run: float
    per_unit: float
    within: float
    hours: float
    extra: float = 0.0  # latency that takes no slot


@dataclass(frozen=True)
class Size:
    """What is asked for."""

    vaults: int = 1000
    chunks_a_day: int = 1_000_000
    job_chunks: int = 200
    projects: int = 10_000
    tick_minutes: int = 60
    hours: float = 6.0


def loads(size: Size, price: Mapping[str, Cost], *, seed: int = 0) -> list[Load]:
    """The queues of the platform under this load."""
    start, chance = price["run_start"].seconds, random.Random(seed)  # noqa: S311
    windows = list(windows_of(size.vaults, size.hours))
    ticks = list(ticks_of(size.projects, size.tick_minutes, size.hours, chance))
    chunks = list(chunks_of(size.chunks_a_day, size.job_chunks, size.hours, chance))
    fetch, apply = price["window_fetch"].seconds, price["window_apply"].seconds
    finalize, silver = price["tick_finalize"].seconds, price["tick_silver"].seconds
    build, wait = price["chunk_build"].seconds, price["chunk_wait"].seconds
    return [
        Load("windows: fetch", "runs", windows, start, fetch, 15 * 60, size.hours),
        Load("windows: apply", "runs", windows, start, apply, 15 * 60, size.hours),
        Load("exports: build", "Spark tasks", chunks, 0.0, build, 10 * 60, size.hours, wait),
        Load("ticks: finalize", "commits on Spark", ticks, 0.0, finalize, 60, size.hours),
        Load("ticks: silver", "runs", ticks, start, silver, 15 * 60, size.hours),
    ]


def windows_of(vaults: int, hours: float) -> Iterator[Unit]:
    """Every vault publishes every 15 minutes, all at the same moment: the worst case, and the usual one."""
    for moment in range(int(hours * 4)):
        yield from (Unit(moment * 900.0, vault) for vault in range(vaults))


def chunks_of(a_day: int, job_chunks: int, hours: float, chance: random.Random) -> Iterator[Unit]:
    """Jobs of equal size at random moments; a chunk is a lane of its own, because chunks have no order."""
    at, number = 0.0, 0
    while (at := at + chance.expovariate(a_day / job_chunks / DAY)) < hours * HOUR:
        yield from (Unit(at, number + chunk) for chunk in range(job_chunks))
        number += job_chunks


def ticks_of(projects: int, minutes: int, hours: float, chance: random.Random) -> Iterator[Unit]:
    """Every project sends a tick every so many minutes, each at its own moment."""
    every = minutes * 60.0
    phases = sorted((chance.uniform(0, every), project) for project in range(projects))
    for period in range(math.ceil(hours * HOUR / every)):
        yield from (Unit(period * every + phase, project) for phase, project in phases)


class Row(NamedTuple):
    """What the table shows of a load."""

    load: str
    slots_are: str
    units_a_day: int
    slots: int
    utilisation: float
    p50_seconds: float
    p95_seconds: float
    runs_a_day: int | None  # None: its slots are no runs of Dagster
    recovery_hours: float
    within_seconds: float


def measure(load: Load, *, seed: int = 0) -> Row:
    """The slots that the load needs, and how long a backlog of one hour without any run takes to go away."""
    plant = Plant(1, load.per_run, load.per_unit)
    slots, outcome = slots_needed(load.units, plant, within=load.within - load.extra, most_used=MOST_USED, seed=seed)
    days = load.hours * HOUR / DAY
    again = load.hours * HOUR / 4 + HOUR
    after = simulate(load.units, Plant(slots, load.per_run, load.per_unit, closed=(again - HOUR, again)), seed=seed)
    return Row(
        load.name,
        load.slots_are,
        round(len(load.units) / days),
        slots,
        round(outcome.utilisation, 2),
        round(outcome.percentile(0.5) + load.extra, 1),
        round(outcome.percentile(0.95) + load.extra, 1),
        round(outcome.runs / days) if load.slots_are == "runs" else None,
        round(recovery(after, again, load.within) / HOUR, 2),
        load.within,
    )


def recovery(outcome: Outcome, again: float, within: float) -> float:
    """Seconds from the end of an outage until the last late unit that had arrived by then was done."""
    return max((done - again for at, done in outcome.served if at < again and done - at > within), default=0.0)


# --- words ------------------------------------------------------------------------------------------------------------


def main(  # noqa: PLR0913, PLR0917  # the options of a command
    bench: Annotated[Path | None, typer.Option("--bench", help="File of `lockstep bench --json`.")] = None,
    vaults: Annotated[int, typer.Option(min=1)] = 1000,
    chunks: Annotated[int, typer.Option(min=1, help="Export chunks a day.")] = 1_000_000,
    projects: Annotated[int, typer.Option(min=1)] = 10_000,
    tick_minutes: Annotated[int, typer.Option(min=1, help="A tick of each project every so many minutes.")] = 60,
    vendor_seconds: Annotated[
        float, typer.Option(min=0, help="Added to the fetch of a window: the benchmark's vendor is on its own machine.")
    ] = 0.0,
    hours: Annotated[float, typer.Option(min=0.5, help="Simulated time.")] = 6.0,
    seed: Annotated[int, typer.Option()] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Simulate the queues under a load and print how many slots it needs."""
    size = Size(vaults=vaults, chunks_a_day=chunks, projects=projects, tick_minutes=tick_minutes, hours=hours)
    price = costs(json.loads(bench.read_text()) if bench else None)
    if vendor_seconds:
        price["window_fetch"] = farther(price["window_fetch"], vendor_seconds)
    rows = [measure(load, seed=seed) for load in loads(size, price, seed=seed)]
    show(price, rows, Console(width=150))
    if json_file:
        told = {name: cost._asdict() for name, cost in price.items()}
        json_file.write_text(json.dumps({"costs": told, "rows": [row._asdict() for row in rows]}, indent=2))


def show(price: Mapping[str, Cost], rows: list[Row], console: Console) -> None:
    """Both tables: what was put in, and what came out."""
    given = Table(box=None, pad_edge=False)
    for title in ("cost", "seconds", "from"):
        given.add_column(title, justify="right" if title == "seconds" else "left")
    for name, cost in price.items():
        given.add_row(name, f"{cost.seconds:.3f}", cost.source)
    console.print(given)
    console.print()
    found = Table(box=None, pad_edge=False)
    titles = ("load", "units a day", "in time s", "slots", "slots are", "used", "p50 s", "p95 s", "runs a day")
    for title in (*titles, "recovery h"):
        found.add_column(title, justify="left" if title in ("load", "slots are") else "right")
    for row in rows:
        found.add_row(
            row.load,
            f"{row.units_a_day:,}",
            f"{row.within_seconds:.0f}",
            str(row.slots),
            row.slots_are,
            f"{row.utilisation:.0%}",
            f"{row.p50_seconds:.1f}",
            f"{row.p95_seconds:.1f}",
            "" if row.runs_a_day is None else f"{row.runs_a_day:,}",
            f"{row.recovery_hours:.2f}",
        )
    console.print(found)


if __name__ == "__main__":
    typer.run(main)
