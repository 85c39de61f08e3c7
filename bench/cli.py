"""`lockstep bench`: runs the benchmarks and prints their ratios; see report.py for the shape of a result."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.place import own_environment, own_stack
from bench.report import PARTS, Context, show
from lockstep.kernel.errors import InvalidInput

console = Console()


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
    results = {}
    with own_stack():
        for name in [part] if part else PARTS:
            context = Context(quick=quick, say=lambda words: console.print(f"  {words}", highlight=False))
            with own_environment():
                result = import_module(f"bench.{name}").run(context)
            show(name, result, console)
            results[name] = result.as_json()
    if json_file:
        json_file.write_text(json.dumps(results, indent=2))
    if page:
        from bench.performance import write  # noqa: PLC0415  # only this needs the plotting library

        for made in write(page, results):
            console.print(f"  wrote {made}", highlight=False)
