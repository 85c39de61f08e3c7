"""The commands `lockstep docs …`: pages that are made from the code. Words only; see reference.py for the making."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

docs = typer.Typer(name="docs", help="Pages that are made from the code.", no_args_is_help=True)


@docs.callback()
def rooms() -> None:
    """Pages that are made from the code."""


@docs.command()
def api(
    into: Annotated[Path | None, typer.Option("--into", help="Folder; absent: docs/api of the project.")] = None,
) -> None:
    """Write the API reference of every service from its OpenAPI document."""
    from services import reference  # builds every service

    for written in reference.write(into or reference.FOLDER):
        print(written)
