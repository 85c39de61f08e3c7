"""`lockstep bench`: runs the benchmarks and prints their ratios; see report.py for the shape of a result."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.place import own_environment, own_stack
from bench.report import PARTS, Context, Result, show
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.logs import get_logger
from stack.cli import stop_on_signals

console = Console()
_log = get_logger(__name__)


def bench(
    part: Annotated[str | None, typer.Argument(help="One part; all of them if absent.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller data; the same ratios, with more noise.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--page",
            metavar="docs/performance.md",
            help="Also write the page with its plots; parts that did not run keep what the .json beside it holds.",
        ),
    ] = None,
) -> None:
    """Measure each part against its baselines in the same run and print the ratios."""
    if part is not None and part not in PARTS:
        raise InvalidInput(f"there is no benchmark {part}.", next_step=f"choose from {', '.join(PARTS)}.")
    stop_on_signals()
    results: dict[str, Any] = {}
    failed = []
    with own_stack():
        for name in [part] if part else PARTS:
            try:
                results[name] = _measure(name, quick=quick)
            except Exception as error:  # an hour of figures is not lost because a later part has a fault
                failed.append(name)
                console.print(f"  {name} was not measured: {error}", style="red", highlight=False, markup=False)
                _log.exception("benchmark failed", part=name)
            if json_file:
                json_file.write_text(json.dumps(results, indent=2))
    if page and results:
        from bench.performance import write  # only this needs the plotting library

        for made in write(page, results):
            console.print(f"  wrote {made}", highlight=False)
    if failed:
        raise typer.Exit(1)


def _measure(name: str, *, quick: bool) -> dict[str, Any]:
    context = Context(quick=quick, say=lambda words: console.print(f"  {words}", highlight=False))
    with own_environment():
        result: Result = import_module(f"bench.{name}").run(context)
    show(name, result, console)
    return result.as_json()
