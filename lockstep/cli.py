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
        app()
    except LockstepError as error:
        sys.exit(stack_cli.explain(error))
    except KeyboardInterrupt:  # also while the program is still loading
        sys.exit(130)


if __name__ == "__main__":
    main()
