"""The `lockstep` command: one program, one sub-command per room of the house.

Only composition lives here. A pipeline's commands are in its own `cli.py`; the stack's are in `stack/cli.py`.
"""

from __future__ import annotations

import sys

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
        from stack import cli as stack_cli  # noqa: PLC0415  keeps `import lockstep` free of the stack

        stack_cli.register(app)
        _register_rooms()
        app()
    except LockstepError as error:
        sys.exit(stack_cli.explain(error))
    except KeyboardInterrupt:  # also while the program is still loading
        sys.exit(130)


def _register_rooms() -> None:
    """The commands of the rooms beside the stack: each brings its own."""
    from bench.cli import bench  # noqa: PLC0415
    from lockstep.exports.cli import app as exports  # noqa: PLC0415
    from lockstep.faults.cli import faults  # noqa: PLC0415
    from lockstep.readiness.cli import app as readiness  # noqa: PLC0415
    from lockstep.ticks.agent.cli import agent  # noqa: PLC0415
    from lockstep.ticks.cli import ticks  # noqa: PLC0415
    from lockstep.ticks.silver.cli import silver  # noqa: PLC0415
    from lockstep.vaults.cli import vaults  # noqa: PLC0415
    from lockstep.vaultsim.cli import vault  # noqa: PLC0415
    from lockstep.windows.cli import windows  # noqa: PLC0415
    from services.cli import docs  # noqa: PLC0415

    app.add_typer(windows)
    app.add_typer(vaults)
    app.add_typer(vault)
    app.add_typer(exports)
    app.add_typer(ticks)
    app.add_typer(agent)
    app.add_typer(silver)
    app.add_typer(readiness, name="readiness")
    app.add_typer(faults)
    app.add_typer(docs)
    app.command()(bench)


if __name__ == "__main__":
    main()
