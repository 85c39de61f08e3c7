"""`lockstep bench`: runs the benchmarks and prints their ratios; see report.py for the shape of a result."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.report import PARTS, Context, show
from lockstep.kernel.errors import InvalidInput

console = Console()


def bench(
    part: Annotated[str | None, typer.Argument(help="One part; all of them if absent.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller data; the same ratios, with more noise.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Measure each part against its baselines in the same run and print the ratios."""
    if part is not None and part not in PARTS:
        raise InvalidInput(f"there is no benchmark {part}.", next_step=f"choose from {', '.join(PARTS)}.")
    results = {}
    for name in [part] if part else PARTS:
        context = Context(quick=quick, say=lambda words: console.print(f"  {words}", highlight=False))
        result = import_module(f"bench.{name}").run(context)
        show(name, result, console)
        results[name] = result.as_json()
    if json_file:
        json_file.write_text(json.dumps(results, indent=2))
