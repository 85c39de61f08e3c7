"""`lockstep silver …`: apply ticks again, or go on without one. Words only; the deeds are in operations.py."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.kernel.errors import InvalidInput
from lockstep.ticks.operations_cli import Json, Reason, find_stack, opened, show, this_person
from lockstep.ticks.silver import operations

silver = typer.Typer(name="silver", help="Silver tables of the ticks' projects.", no_args_is_help=True)


@silver.callback()
def _silver() -> None:
    """Silver tables of the ticks' projects."""
    find_stack()


@silver.command()
def replay(
    reason: Reason = "replay",
    tick: Annotated[list[str] | None, typer.Option("--tick", help="This tick; may be given more than once.")] = None,
    start: Annotated[str | None, typer.Option("--from", help="Ticks committed from this instant or day on.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="Up to this instant or day, which is not part of it.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Ticks of this project; alone: all of them.")] = None,
    as_json: Json = False,
) -> None:
    """Apply ticks again, and every later one of their projects, because order is kept.

    The tables go back to just before the first of them. Nothing is lost if this is interrupted or repeated.
    """
    if tick and (start or end or project):
        raise InvalidInput("--tick names the ticks already.", next_step="leave out --from, --to and --project.")
    if not (tick or start or end or project):
        raise InvalidInput("nothing was chosen.", next_step="give --tick, --from and --to, or --project.")
    with opened() as parts:
        chosen = tick or operations.ticks_between(
            parts, operations.instant(start), operations.instant(end), project_id=project
        )
        lanes = operations.replay_ticks(parts, chosen, this_person(reason), named=bool(tick))
    rows = [
        {
            "project": lane.project_id,
            "generation": lane.generation,
            "from": lane.watermark + 1,
            "state": "will be applied again",
        }
        for lane in lanes
    ]
    show({"replayed": rows}, rows, as_json)


@silver.command()
def skip(
    tick: Annotated[str, typer.Option("--tick", help="The tick that stops its project: `lockstep ticks status`.")],
    reason: Reason,
    accept_gap: Annotated[bool, typer.Option("--accept-gap", help="Yes, its rows will be missing in silver.")] = False,
    as_json: Json = False,
) -> None:
    """Go on without a tick that cannot be applied. Its rows stay out of silver, and `ticks status` keeps showing it.

    Bronze keeps the tick. Once it is mended, `lockstep silver replay --tick` of the same tick brings it in after all.
    """
    with opened() as parts:
        lane = operations.skip_tick(parts, tick, this_person(reason), accept_gap=accept_gap)
    rows = [
        {
            "project": lane.project_id,
            "tick": tick,
            "generation": lane.generation,
            "state": "is left out; the ticks behind it follow",
        }
    ]
    show({"skipped": rows}, rows, as_json)
