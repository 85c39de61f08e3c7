"""`lockstep agent`: what an operator on the customer's side runs. Words and a progress bar; see sender.py for the walk.

What belongs here: arguments and sentences. What does not: HTTP, SQL, files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from lockstep.kernel.clock import SystemClock
from lockstep.kernel.errors import InvalidInput, Transient
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.logs import configure_logging
from lockstep.ticks.agent.client import IngestClient, Throttle
from lockstep.ticks.agent.pages import PART_BYTES, WORK, Described, Pager
from lockstep.ticks.agent.sender import Agent, Blocked, Idle
from lockstep.ticks.agent.state import AgentStore, AgentTick, LocalState
from lockstep.ticks.model import Mode
from lockstep.ticks.rules import check_id

agent = typer.Typer(name="agent", help="Send Parquet files of this machine as ticks.", no_args_is_help=True)
console = Console(width=None if sys.stdout.isatty() else 160)

Folder = Annotated[Path, typer.Argument(help="Folder of tick folders; the agent keeps its memory in .agent below it.")]
Url = Annotated[str, typer.Option("--url", envvar="AGENT_URL", help="Base address of the ingest service.")]
Org = Annotated[str, typer.Option("--org", envvar="AGENT_ORG", help="Sent as X-Api-Key.")]
ProjectId = Annotated[str, typer.Option("--project", envvar="AGENT_PROJECT", help="The project's UUID.")]
Secret = Annotated[
    str, typer.Option("--secret", envvar="AGENT_SECRET", help="Sent as X-Api-Secret. Better set the variable.")
]
Parallel = Annotated[int, typer.Option(min=1, max=64, help="Parts sent at the same time.")]
Bandwidth = Annotated[float, typer.Option(min=0, help="Most MiB a second, for all parts together; 0 for no limit.")]
PartSize = Annotated[float, typer.Option(min=0.01, help="Size of a page, in MiB.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of words.")]
TickArgument = Annotated[str, typer.Argument(metavar="TICK", help="The tick's id.")]


@dataclass(frozen=True)
class _Line:
    """Where to send and how."""

    folder: Path
    url: str
    org: str
    project: str
    secret: str
    parallel: int
    bandwidth: float
    part_size: float
    quiet: bool


@agent.command()
def run(  # noqa: PLR0913, PLR0917  # each option is one argument
    folder: Folder,
    url: Url,
    org: Org,
    project: ProjectId,
    secret: Secret,
    once: Annotated[bool, typer.Option("--once", help="Send what is there, then end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the folder.")] = 5.0,
    parallel: Parallel = 4,
    bandwidth: Bandwidth = 0.0,
    part_size: PartSize = PART_BYTES / 1024 / 1024,
    as_json: AsJson = False,
) -> None:
    """Send every tick folder of DIR, in the order of their names, until interrupted.

    A tick folder holds one Parquet file per table and, written last, tick.json:
    {"mode": "delta", "dt": "20260507", "primary_key": {"orders": ["id"]}}.
    """
    line = _Line(folder, url, org, project, secret, parallel, bandwidth, part_size, as_json)
    clock = SystemClock()
    with _opened(line) as (store, pager, sender):
        while True:
            end = _round(folder, pager, sender, once=once)
            if once:
                _print(store.ticks(), as_json)
                raise typer.Exit(0 if isinstance(end, Idle) else 1)
            clock.sleep(every)


@agent.command()
def push(  # noqa: PLR0913, PLR0917
    files: Annotated[list[Path], typer.Argument(help="Parquet files; the name before .parquet is the table.")],
    key: Annotated[list[str], typer.Option("--key", help="table=column,column or, for all tables, column,column.")],
    url: Url,
    org: Org,
    project: ProjectId,
    secret: Secret,
    mode: Annotated[Mode, typer.Option(help="delta or full.")] = Mode.DELTA,
    deleted: Annotated[
        list[str] | None,
        typer.Option("--deleted", help="table=column or, for all tables, column: where it is true, the row is gone."),
    ] = None,
    dt: Annotated[str | None, typer.Option(help="Day as YYYYMMDD; today if not given.")] = None,
    tick: Annotated[str | None, typer.Option(help="Id of the tick; made if not given.")] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            envvar="AGENT_WORK", help="Folder of the agent's memory; by default one of the user's for each project."
        ),
    ] = None,
    parallel: Parallel = 4,
    bandwidth: Bandwidth = 0.0,
    part_size: PartSize = PART_BYTES / 1024 / 1024,
    as_json: AsJson = False,
) -> None:
    """Send these files as one tick, after those that still wait; exit with 1 unless it is committed."""
    folder = work or default_work(project)
    line = _Line(folder, url, org, project, secret, parallel, bandwidth, part_size, as_json)
    now = SystemClock().now()
    tick_id = tick or f"{now:%Y%m%dT%H%M%S}__{SystemIds().new_id()[-12:]}"
    described = Described(
        tick_id,
        mode,
        dt or f"{now:%Y%m%d}",
        {path.stem: path for path in files},
        _by_table(key, files),
        {table: columns[0] for table, columns in _by_table(deleted or [], files).items() if columns},
    )
    with _opened(line) as (store, pager, sender):
        pager.stage(described)
        sender.send_all()
        sent = store.get(tick_id)
    _print([sent] if sent else [], as_json)
    if sent and sent.state is LocalState.COMMITTED:
        return
    if not as_json:
        console.print(f"not committed; see `lockstep agent status {folder}`", style="yellow", highlight=False)
    raise typer.Exit(1)


@agent.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """Show every tick of DIR that the agent knows."""
    with AgentStore(folder / WORK / "state.sqlite") as store:
        _print(store.ticks(), as_json)


@agent.command()
def retry(folder: Folder, tick: TickArgument) -> None:
    """Let a tick that failed for good go again, once it is mended. Its folder, if there is one, is read anew."""
    with AgentStore(folder / WORK / "state.sqlite") as store:
        known = store.get(tick)
        if known is None or not known.state.may_be_mended:
            raise InvalidInput(
                "the tick has not failed.", unit=f"tick {tick}", next_step="see `lockstep agent status`."
            )
        owner = known.manifest
        pager = Pager(store, folder / WORK, org_id=owner["org_id"], project_id=owner["project_id"])
        if not pager.mend(folder, tick):
            store.retry(tick)
    console.print(f"{tick} goes again.", highlight=False)


@agent.command()
def skip(folder: Folder, tick: TickArgument) -> None:
    """Leave a tick out for ever, so that the ones after it may go. Its rows are not sent."""
    with AgentStore(folder / WORK / "state.sqlite") as store:
        if not store.skip(tick):
            raise InvalidInput(
                "there is no such open tick.", unit=f"tick {tick}", next_step="see `lockstep agent status`."
            )
    console.print(f"{tick} is left out.", highlight=False)


def default_work(project_id: str) -> Path:
    """Where `push` remembers what it has sent, whatever folder it is called from: the user's own state of programs."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "lockstep" / "agent" / check_id("project_id", project_id)


def _round(folder: Path, pager: Pager, sender: Agent, *, once: bool) -> Blocked | Idle:
    """Send what is there. A folder that cannot be used stops the ones after it, and is told at every look."""
    unusable: InvalidInput | None = None
    try:
        pager.collect(folder)
    except InvalidInput as error:
        unusable = error
    try:
        end = sender.send_all()
        if unusable is not None:
            raise unusable
    except (Transient, InvalidInput) as error:
        if once:
            raise
        console.print(f"{error}", style="yellow", highlight=False)
        return Idle()
    return end


@contextmanager
def _opened(line: _Line) -> Iterator[tuple[AgentStore, Pager, Agent]]:
    configure_logging("WARNING", "console", service="agent")
    work = line.folder / WORK
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console
    )
    bar.disable = line.quiet or not console.is_terminal
    tasks: dict[str, TaskID] = {}

    def shown(tick_id: str, there: int, total: int) -> None:
        if tick_id not in tasks:
            tasks[tick_id] = bar.add_task(tick_id, total=total)
        bar.update(tasks[tick_id], completed=there)

    throttle = Throttle(line.bandwidth * 1024 * 1024)
    client = IngestClient(
        line.url,
        org_id=line.org,
        project_id=line.project,
        api_secret=line.secret,
        throttle=throttle,
        connections=line.parallel + 1,
    )
    with AgentStore(work / "state.sqlite") as store, client, bar:
        store.claim(line.org, line.project)
        size = int(line.part_size * 1024 * 1024)
        pager = Pager(store, work, org_id=line.org, project_id=line.project, part_bytes=size)
        yield store, pager, Agent(store, pager, client, parallel=line.parallel, progress=shown)


def _by_table(given: list[str], files: list[Path]) -> dict[str, list[str]]:
    """`table=a,b` for one table, `a,b` for all of them."""
    found: dict[str, list[str]] = {}
    for one in given:
        table, _, columns = one.rpartition("=")
        for name in [table] if table else [path.stem for path in files]:
            found[name] = [column.strip() for column in columns.split(",") if column.strip()]
    return found


def _print(ticks: list[AgentTick], as_json: bool) -> None:
    rows = [
        {"tick_id": one.tick_id, "state": one.state.value, "attempts": one.attempts, "error": one.error}
        for one in ticks
    ]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("tick_id", "state", "attempts", "error"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)
