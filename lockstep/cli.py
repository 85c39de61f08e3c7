"""The `lockstep` command: one program, one sub-command per room of the house.

Only composition lives here. A pipeline's commands are in its own `cli.py`; the stack's are in `stack/cli.py`.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from lockstep.kernel.errors import LockstepError

app = typer.Typer(
    name="lockstep",
    help="Data that must move in order and exactly once: windows, exports, ticks, readiness.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the program; an expected failure becomes a sentence, never a traceback."""
    try:
        from stack import cli as stack_cli

        stack_cli.register(app)
        _register_rooms(sys.argv[1] if len(sys.argv) > 1 else "")
        app()
    except LockstepError as error:
        sys.exit(stack_cli.explain(error))
    except KeyboardInterrupt:  # also while the program is still loading
        sys.exit(130)


_ROOMS = {
    "windows": "lockstep.windows.cli:windows",
    "vaults": "lockstep.vaults.cli:vaults",
    "vault": "lockstep.vaultsim.cli:vault",
    "exports": "lockstep.exports.cli:app",
    "ticks": "lockstep.ticks.cli:ticks",
    "agent": "lockstep.ticks.agent.cli:agent",
    "silver": "lockstep.ticks.silver.cli:silver",
    "readiness": "lockstep.readiness.cli:app",
    "faults": "lockstep.faults.cli:faults",
    "docs": "services.cli:docs",
    "bench": "bench.cli:bench",
}


def _register_rooms(named: str = "") -> None:
    """The commands of the rooms beside the stack: each brings its own.

    Only the room that is named is opened, and none for a command of the stack: all together take longer to load than
    most commands to run. Help, and a name that nobody knows, see all of them.
    """
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for name, place in _ROOMS.items():
        if named in known or (named in _ROOMS and name != named):
            continue
        module, _, attribute = place.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)


if __name__ == "__main__":
    main()
