"""`lockstep ticks status|reconcile|redrive-dlq|retention|vacuum`: looking after committed ticks. Words and tables only.

What belongs here: options, tables, JSON. What does not: the deeds (silver/operations.py, silver/retention.py) and who
may send (cli.py).
"""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lockstep.kernel.ids import SystemIds
from lockstep.kernel.settings import Settings, load_settings
from lockstep.ticks.parts import PartObjects
from lockstep.ticks.silver import operations
from lockstep.ticks.silver.retention import FILES_DAYS, RETENTION_DAYS, retain, vacuum_tables
from lockstep.ticks.silver.store import Actor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from resources.silver import Silver

console = Console(width=None if sys.stdout.isatty() else 160)

Reason = Annotated[str, typer.Option("--reason", help="Why; kept in the audit.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `lockstep ticks`."""
    app.command()(status)
    app.command()(reconcile)
    app.command("redrive-dlq")(redrive_dlq)
    app.command()(retention)
    app.command()(vacuum)


def status(
    limit: Annotated[int, typer.Option(help="Projects to show, the one that waits longest first.")] = 20,
    as_json: Json = False,
) -> None:
    """Show both queues, every project whose silver is behind, and skipped ticks. Exits with 1 if one is parked."""
    with opened() as parts:
        found = operations.status(parts, limit=limit)
    head = {
        "queue": found.queue._asdict(),
        "dead_letters": found.dead.total,
        "lag_seconds": round(found.lag_seconds, 1),
        "waiting_ticks": found.waiting_ticks,
        "skipped_ticks": len(found.skipped),
    }
    rows = [
        {
            "project": one.lane.project_id,
            "org": one.lane.org_id,
            "applied": one.lane.watermark,
            "waiting": one.waiting,
            "next": one.next_tick or "missing",
            "since": one.oldest.isoformat(timespec="seconds") if one.oldest else "",
            "state": f"parked: {one.error}" if one.lane.parked else "waits",
        }
        for one in found.lanes
    ]
    skipped = [one._asdict() | {"at": one.at.isoformat(timespec="seconds")} for one in found.skipped]
    show({**head, "projects": rows, "skipped": skipped}, rows, as_json, head=head)
    if skipped and not as_json:
        console.print("\nskipped: their rows are not in silver", highlight=False)
        show({}, skipped, as_json)
    raise typer.Exit(1 if any(one.lane.parked for one in found.lanes) else 0)


def reconcile(reason: Reason = "reconcile", as_json: Json = False) -> None:
    """Enqueue every committed tick that is not in silver and that nobody works on, now."""
    with opened() as parts:
        found = operations.reconcile(parts, this_person(reason))
    rows = [{"tick": one, "why": "not in silver"} for one in found.swept.enqueued]
    rows += [{"tick": one, "why": "in silver, DONE was not said"} for one in found.not_said]
    rows += [{"tick": one, "why": "parked: not enqueued, see status"} for one in found.parked]
    show({"enqueued": rows}, rows, as_json)


def redrive_dlq(reason: Reason = "redrive", as_json: Json = False) -> None:
    """Give dead letters another life; those of ticks that are in silver are dropped."""
    with opened() as parts:
        found = operations.redrive(parts, this_person(reason))
    rows = [{"tick": one, "what": "enqueued"} for one in found.sent]
    rows += [{"tick": one, "what": "dropped, it is in silver"} for one in found.finished]
    show({"messages": rows, "unreadable": found.unreadable}, rows, as_json, head={"unreadable": found.unreadable})


def retention(
    days: Annotated[int, typer.Option(help="Keep so many days.")] = RETENTION_DAYS,
    reason: Reason = "retention",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which tables would lose days.")] = False,
    as_json: Json = False,
) -> None:
    """Forget bronze, gold and stored parts of older days, by metadata: whole partitions leave, no row is rewritten."""
    with opened() as parts, connected(parts.settings) as spark:
        lake, doer = parts.settings.lake_bucket, this_person(reason)
        objects = PartObjects(parts.s3, parts.settings.ticks_bucket, ids=SystemIds())
        found = retain(parts, spark, lake, objects, doer, days=days, dry_run=dry_run)
    rows = [{"table": one} for one in found.tables]
    head = {
        "before": found.before,
        "bronze_files": found.bronze_files,
        "gold_rows": found.gold_rows,
        "ticks_without_parts": found.ticks_without_parts,
        "dry_run": dry_run,
    }
    show({**head, "tables": list(found.tables)}, rows, as_json, head=head)


def vacuum(
    days: Annotated[int, typer.Option(help="Keep files that a version of the last so many days needs.")] = FILES_DAYS,
    project: Annotated[str | None, typer.Option(help="Only this project; gold is left alone then.")] = None,
    reason: Reason = "vacuum",
    as_json: Json = False,
) -> None:
    """Delete files that no table needs any more: what merges replaced and retention forgot. No row changes."""

    def shown(tables: list[str]) -> Iterable[str]:
        return track(tables, "tables", console=Console(stderr=True), disable=as_json)

    with opened() as parts, connected(parts.settings) as spark:
        lake, doer = parts.settings.lake_bucket, this_person(reason)
        found = vacuum_tables(parts, spark, lake, doer, days=days, project_id=project, each=shown)
    rows = [{"table": one} for one in found.tables]
    show({"days": found.days, "tables": list(found.tables)}, rows, as_json, head={"days": found.days})


@contextmanager
def connected(settings: Settings) -> Iterator[SparkSession]:
    """A session for one command."""
    from pyspark.sql import SparkSession  # heavy, and few commands need it

    spark = SparkSession.builder.remote(str(settings.spark_remote)).create()
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def opened() -> Iterator[Silver]:
    """Everything that a command needs."""
    from resources.silver import open_silver  # clients are built there and nowhere else

    with open_silver(load_settings(), application_name="lockstep-ticks-cli") as parts:
        yield parts


def find_stack() -> None:
    """What the user did not set comes from the stack that runs here."""
    from stack.environment import adopt  # keeps `import lockstep` free of the stack

    adopt(load_settings())


def this_person(reason: str) -> Actor:
    """Who typed the command."""
    return Actor(getpass.getuser(), reason)


def show(
    document: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    as_json: bool,
    *,
    head: Mapping[str, Any] | None = None,
) -> None:
    """JSON for machines; for people a line and a table."""
    if as_json:
        print(json.dumps(document, indent=2))
        return
    if head:
        console.print("  ".join(f"{name}: {value}" for name, value in head.items()), highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in rows[0] if rows else ():
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table if rows else "nothing", highlight=False)
