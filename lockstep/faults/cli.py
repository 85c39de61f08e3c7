"""`lockstep faults`: the words around the fault lab. The work is done elsewhere.

What belongs here: arguments, tables, sentences, exit codes. What does not: faults, checking, processes.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lockstep.faults.checker import by_promise
from lockstep.kernel.errors import InvalidInput

faults = typer.Typer(name="faults", help="Break it on purpose, and check what is left.", no_args_is_help=True)
console = Console(width=None if sys.stdout.isatty() else 140)

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of words.")]


@faults.command()
def compare(as_json: AsJson = False) -> None:
    """The same fault scripts against the original designs, the vendor's accelerator, and Lockstep, as one table."""
    try:
        models: Any = importlib.import_module("tests.faults.models.compare")
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "the models are in tests/faults/models, which is not here.", next_step="run it in a clone of the project."
        ) from error
    with _quiet():
        rows = list(models.compare())
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        _show_comparison(rows)
    if any(row.count.any for row in rows if row.design == models.OURS):
        raise typer.Exit(1)


@faults.command()
def replay(
    seed: Annotated[int, typer.Argument(help="The seed of a simulated run.")],
    as_json: AsJson = False,
) -> None:
    """Run one seed of the simulation, all four pipelines, again: print every call, every fault and the verdict."""
    from lockstep.faults.simulation import simulate  # loads the four pipelines

    with _quiet():
        result = simulate(seed)
    if as_json:
        found = {
            "seed": seed,
            "calls": result.calls,
            "faults": result.faults,
            "operations": result.history.counts(),
            "violations": [str(one) for one in result.violations],
            "history": [json.loads(line) for line in result.history.lines()],
            "trace": result.trace,
        }
        print(json.dumps(found, indent=1))
    else:
        console.print("\n".join(result.trace), highlight=False)
        _verdict(f"seed {seed}", result.calls, result.faults, result.violations)
    if result.violations:
        raise typer.Exit(1)


@faults.command()
def simulate(
    seeds: Annotated[int, typer.Option(help="How many seeds.", min=1)] = 200,
    first: Annotated[int, typer.Option(help="The first one.")] = 0,
) -> None:
    """Run many seeds of the simulation (all four pipelines) and name those that break a promise."""
    from lockstep.faults.simulation import simulate as run

    total: Counter[str] = Counter()
    calls, broken = 0, []
    with _quiet():
        for seed in range(first, first + seeds):
            result = run(seed)
            total += result.faults
            calls += result.calls
            if result.violations:
                broken.append(seed)
                console.print(f"seed {seed}: {result.violations[0]}", highlight=False)
    _verdict(f"{seeds} seeds", calls, total, broken)
    if broken:
        console.print(f"look at one of them: lockstep faults replay {broken[0]}")
        raise typer.Exit(1)


@faults.command()
def run(
    seed: Annotated[int, typer.Option(help="Decides what the nemesis and the clients do.")] = 1,
    minutes: Annotated[float, typer.Option(help="How long faults happen.", min=0.1)] = 5.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here too.")] = None,
    history_file: Annotated[
        Path | None, typer.Option("--history", help="Write the history here, a line an event.")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Use and keep this home; by default one is made and removed.")
    ] = None,
    ticks: Annotated[bool, typer.Option(help="Let agents and silver take part; they need Spark.")] = True,
) -> None:
    """Real services and workers on a stack of their own, clients that write, a nemesis, and then the checker."""
    from lockstep.faults.lab import run_lab  # loads the pipelines and the stack
    from stack.cli import stop_on_signals

    stop_on_signals()
    report, history = run_lab(
        seed, minutes, home=home, ticks=ticks, say=lambda news: console.print(news, highlight=False)
    )
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=1, default=str) + "\n", encoding="utf-8")
    if history_file is not None:
        history.save(history_file)
    _show_report(report)
    if report.violations:
        raise typer.Exit(1)


def _show_report(report: Any) -> None:
    table = Table(title=f"seed {report.seed}: {sum(report.faults.values())} faults in {report.minutes:g} minutes")
    table.add_column("fault")
    table.add_column("times", justify="right")
    for name, count in report.faults.items():
        table.add_row(name, str(count))
    console.print(table)
    for verb, outcomes in report.operations.items():
        console.print(f"{verb}: {', '.join(f'{count} {name}' for name, count in outcomes.items())}", highlight=False)
    console.print(f"units: {', '.join(f'{count} {name}' for name, count in report.units.items())}", highlight=False)
    console.print(f"everything was terminal {report.calm_seconds:g} s after the faults stopped", highlight=False)
    for promise, count in by_promise(report.violations).items():
        console.print(f"{promise}: {count} violations", highlight=False)
    for one in report.violations[:20]:
        console.print(f"VIOLATION {one}", highlight=False)


def _show_comparison(rows: list[Any]) -> None:
    table = Table(title="units that went wrong: lost / doubled / out of order / stuck (scripts played)")
    designs = list(dict.fromkeys(row.design for row in rows))
    for heading in ("pipeline", "what goes wrong", *designs):
        table.add_column(heading)
    found = {(row.pipeline, row.scenario, row.design): row for row in rows}
    for pipeline, scenario in dict.fromkeys((row.pipeline, row.scenario) for row in rows):
        cells = [found.get((pipeline, scenario, design)) for design in designs]
        table.add_row(pipeline, scenario, *("-" if cell is None else _cell(cell) for cell in cells))
    console.print(table)
    for design in designs:
        own = [row for row in rows if row.design == design]
        sums = [sum(row.count[place] for row in own) for place in range(4)]
        words = ", ".join(f"{n} {w}" for n, w in zip(sums, ("lost", "doubled", "out of order", "stuck"), strict=True))
        console.print(f"{design}: {sum(row.scripts for row in own)} scripts: {words}", highlight=False)


def _cell(row: Any) -> str:
    numbers = " / ".join(str(number) for number in row.count)
    return f"{numbers} ({row.scripts})"


def _verdict(what: str, calls: int, found: Counter[str], violations: list[Any]) -> None:
    words = ", ".join(f"{count} x {name}" for name, count in sorted(found.items()))
    console.print(f"{what}: {calls} calls; faults: {words or 'none'}", highlight=False)
    for one in violations[:20]:
        console.print(f"VIOLATION {one}", highlight=False)
    console.print(f"{len(violations)} violations", highlight=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Thousands of injected faults are no news: what the workers log about them would bury the verdict."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
