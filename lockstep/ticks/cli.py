"""`lockstep ticks`: the commands of people about projects. Words and tables; the work is done elsewhere.

What belongs here: the sub-command itself and who may send ticks. What does not: rules and SQL; looking after committed
ticks has its own module of commands. Clients are built in resources/.
"""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.settings import load_settings
from lockstep.ticks import operations_cli
from lockstep.ticks.projects import ROTATION_HOURS, NewSecret, ProjectStore

ticks = typer.Typer(
    name="ticks", help="Ticks of on-prem agents, from parts to bronze and silver.", no_args_is_help=True
)
project_app = typer.Typer(name="project", help="Who may send ticks.", no_args_is_help=True)
ticks.add_typer(project_app)
operations_cli.register(ticks)
console = Console(width=None if sys.stdout.isatty() else 160)

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of words.")]
ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT", help="The project's UUID.")]


@ticks.callback()
def find_stack() -> None:
    """Ticks of on-prem agents, from parts to bronze and silver."""
    from stack.environment import adopt, forget_own  # `import lockstep` stays free of the stack

    forget_own()
    adopt(load_settings())  # whatever the user did not set comes from the stack that runs here


@project_app.command("add")
def project_add(
    org: Annotated[str, typer.Option("--org", help="The organisation; what its agents send as X-Api-Key.")],
    project: Annotated[str | None, typer.Option("--project", help="Its UUID; a new one if none is given.")] = None,
    tables: Annotated[str | None, typer.Option("--tables", help="Only these tables, with commas.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a project and print its secret: now, and never again."""
    allowed = tuple(name.strip() for name in tables.split(",") if name.strip()) if tables else None
    with _projects() as store:
        _show(store.add(org, project, tables=allowed, actor=getpass.getuser()), as_json)


@project_app.command("list")
def project_list(as_json: AsJson = False) -> None:
    """Show every project, without secrets."""
    with _projects() as store:
        found = store.list()
    _print(
        [
            {
                "org_id": one.project.org_id,
                "project_id": one.project.project_id,
                "ticks": one.project.sequence,
                "head_tick_id": one.project.head_tick_id,
                "tables": list(one.project.tables) if one.project.tables else None,
                "secrets": one.secrets,
                "created": one.project.created_at.isoformat(timespec="seconds"),
                "revoked": one.project.revoked_at.isoformat(timespec="seconds") if one.project.revoked_at else None,
            }
            for one in found
        ],
        as_json,
    )


@project_app.command("rotate")
def project_rotate(
    project: ProjectArgument,
    overlap_hours: Annotated[float, typer.Option(min=0, help="How long the secret before it still works.")] = (
        ROTATION_HOURS
    ),
    as_json: AsJson = False,
) -> None:
    """Make a new secret; the one before it works a while longer, so that no agent is cut off."""
    with _projects() as store:
        _show(store.rotate(project, overlap=timedelta(hours=overlap_hours), actor=getpass.getuser()), as_json)


@project_app.command("revoke")
def project_revoke(project: ProjectArgument) -> None:
    """Refuse a project from now on. Its committed ticks stay and reach silver."""
    with _projects() as store:
        store.revoke(project, actor=getpass.getuser())
    console.print(f"project {project} is revoked.", highlight=False)


@contextmanager
def _projects() -> Iterator[ProjectStore]:
    from resources.exports import state_pool  # clients are built when a command needs them
    from resources.ticks import project_store

    settings = load_settings()
    with state_pool(settings, application_name="lockstep-ticks-cli", max_size=2) as state:
        yield project_store(settings, state)


def _show(made: NewSecret, as_json: bool) -> None:
    if as_json:
        print(json.dumps(vars(made)))
        return
    console.print(f"organisation {made.org_id}, project {made.project_id}", highlight=False)
    console.print(f"X-Api-Secret: {made.api_secret}", highlight=False, soft_wrap=True)
    console.print("Keep it: it is sealed now and cannot be shown again.")


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        console.print("none")
        return
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)
