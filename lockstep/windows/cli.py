"""The commands `lockstep windows …`. Words only; each command's deeds are elsewhere."""

from __future__ import annotations

import typer

from lockstep.windows import operations_cli
from lockstep.windows.source_cli import produce

windows = typer.Typer(name="windows", help="Windows of the vaults, from source to warehouse.", no_args_is_help=True)


@windows.callback()
def _windows() -> None:
    """Keep `produce` a sub-command, also while it is the only one."""


windows.command()(produce)
operations_cli.register(windows)
