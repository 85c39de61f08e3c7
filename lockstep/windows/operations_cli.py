"""The commands of support: `lockstep windows list|show|retry|skip|…`. Words and tables only; see operations.py."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.errors import InvalidInput
from lockstep.windows import operations
from lockstep.windows.doors import adopted_settings, open_source, warehouse
from lockstep.windows.model import QueueRow, Window, WindowKind, parse_stoptime, stoptime
from lockstep.windows.operations import Doer
from lockstep.windows.queue import WindowQueue
from lockstep.windows.raw import RawStore

if TYPE_CHECKING:
    from lockstep.windows.worker import WindowWorker

console = Console(width=None if sys.stdout.isatty() else 160)

Vault = Annotated[str, typer.Option("--vault", help="The vault's id.")]
Stop = Annotated[str, typer.Option("--stop", help="Stop time of the window, YYYYMMDDHHMM in UTC.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept in the audit.")]
Kind = Annotated[WindowKind, typer.Option("--kind", help="incremental, full or log.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `lockstep windows`."""
    app.command("list")(list_windows)
    for command in (show, apply, retry, skip, begin, rebaseline, replay, as_of, verify, rebuild_queue):
        app.command(command.__name__.replace("_", "-"))(command)


def list_windows(
    vault: Vault,
    limit: Annotated[int, typer.Option(help="Newest applied windows to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the lane: watermark, newest applied windows, and what waits behind it."""
    with _worker() as worker:
        lane = worker.store.lane(vault)
        after = lane.watermark if lane and lane.has_begun else None
        waiting = worker.ledger.pending(vault, after)
        applied = worker.store.history(vault, epoch=lane.epoch)[-limit:] if lane else []
    rows = [
        {"stop": stoptime(one.stop), "status": "APPLIED" if one.kind != "gap" else "GAP", "rows": one.rows, "error": ""}
        for one in applied
    ] + [
        {"stop": row.window.stoptime, "status": str(row.status), "rows": None, "error": row.last_error or ""}
        for row in waiting
    ]
    head = {
        "vault": vault,
        "watermark": stoptime(lane.watermark) if lane else None,
        "epoch": lane.epoch if lane else None,
        "fence": lane.fence if lane else None,
        "held": bool(lane and lane.is_held),
    }
    if as_json:
        print(json.dumps({**head, "windows": rows}, indent=2))
        return
    console.print("  ".join(f"{name} {value}" for name, value in head.items()), highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("stop", "status", "rows", "error"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)


def show(vault: Vault, stop: Stop, kind: Kind = WindowKind.INCREMENTAL, as_json: Json = False) -> None:
    """Show one window: its queue row, its ledger rows, and what people did to it."""
    at = parse_stoptime(stop)
    with _worker() as worker:
        row = next((one for one in worker.ledger.pending(vault, None, kind=kind) if one.window.stop == at), None)
        applied = [one for one in worker.store.history(vault, kinds=(kind.value, "gap")) if one.stop == at]
        audits = [one for one in worker.store.audits(vault, 200) if one[3] == at]
    if row is None and not applied:
        raise InvalidInput("it is neither in the queue nor in the ledger.", unit=f"{vault} window {stop}")
    found = {
        "queue": None if row is None else {
            "status": str(row.status), "start": stoptime(row.window.start), "attempts": row.attempt_count,
            "fence": row.fence, "error": row.last_error, "files": row.s3_prefix,
        },
        "applied": [
            {"epoch": one.epoch, "rows": one.rows, "load_id": one.load_id, "at": one.applied_at.isoformat(),
             "tables": dict(one.counts)}
            for one in applied
        ],
        "audit": [
            {"at": when.isoformat(), "actor": who, "action": what, "reason": why} for when, who, what, _, why in audits
        ],
    }  # fmt: skip
    print(json.dumps(found, indent=2)) if as_json else console.print_json(data=found)


def apply(vault: Vault, as_json: Json = False) -> None:
    """Drain the lane from here, without Dagster and Spark: for recovery when both are down."""
    with _worker() as worker:
        report = worker.drain(vault, actor=getpass.getuser())
    _say({"vault": vault, "applied": report.applied, "rows": report.rows, "reason": report.reason}, as_json)


def retry(
    vault: Vault, stop: Stop, reason: Reason = "retry", kind: Kind = WindowKind.INCREMENTAL, as_json: Json = False
) -> None:
    """Try a FAILED window again; the backlog behind it drains by itself."""
    with _worker() as worker:
        window = _window(worker, vault, parse_stoptime(stop), kind)
        operations.retry(worker, window, _doer(reason))
    _say({"vault": vault, "stop": stop, "status": "READY"}, as_json)


def skip(
    vault: Vault,
    stop: Annotated[str, typer.Option("--stop", help="New watermark: stop of the FAILED window, or end of the hole.")],
    reason: Reason,
    accept_gap: Annotated[bool, typer.Option("--accept-gap", help="Yes, this data will be missing.")] = False,
    as_json: Json = False,
) -> None:
    """Go on without a FAILED window or over a hole. The ledger keeps the gap for ever."""
    with _worker() as worker:
        operations.skip(worker, vault, parse_stoptime(stop), _doer(reason), accept_gap=accept_gap)
    _say({"vault": vault, "watermark": stop, "gap": True}, as_json)


def begin(
    vault: Vault,
    at: Annotated[str, typer.Option("--at", help="Start of the first window, YYYYMMDDHHMM.")],
    reason: Reason,
    as_json: Json = False,
) -> None:
    """Begin a vault without a full load: what was before is not in the warehouse."""
    with _worker() as worker:
        operations.begin(worker, vault, parse_stoptime(at), _doer(reason))
    _say({"vault": vault, "watermark": at}, as_json)


def rebaseline(
    vault: Vault,
    reason: Reason,
    stop: Annotated[str | None, typer.Option("--stop", help="Which full archive; the newest by default.")] = None,
    as_json: Json = False,
) -> None:
    """Load a full archive into new tables and swap it in; old tables are kept under their epoch's name."""
    with _worker() as worker:
        claim = operations.rebaseline(worker, vault, _doer(reason), stop=parse_stoptime(stop) if stop else None)
    _say({"vault": vault, "epoch": claim.epoch, "watermark": stoptime(claim.watermark)}, as_json)


def replay(
    vault: Vault,
    start: Annotated[str, typer.Option("--from", help="Start of the first window to apply again, YYYYMMDDHHMM.")],
    reason: Reason,
    as_json: Json = False,
) -> None:
    """Apply everything from a window on once more, in a new epoch."""
    with _worker() as worker:
        epoch = operations.replay(worker, vault, parse_stoptime(start), _doer(reason))
    _say({"vault": vault, "epoch": epoch, "watermark": start}, as_json)


def as_of(
    vault: Vault, at: Annotated[str, typer.Argument(help="Stop time, YYYYMMDDHHMM.")], as_json: Json = False
) -> None:
    """Build the tables as they were at a stop time, in a schema of their own."""
    moment: datetime = parse_stoptime(at)
    schema = f"vault_{vault}_as_of_{at}"
    with _worker() as worker:
        windows = operations.as_of(worker, vault, moment, schema)
    _say({"vault": vault, "schema": schema, "windows": windows}, as_json)


def verify(vault: Vault, as_json: Json = False) -> None:
    """Prove the lane against its raw files: chain, counts and every row. Exits with 1 if something differs."""
    with _worker() as worker:
        problems = operations.verify(worker, vault)
    _say({"vault": vault, "problems": problems}, as_json)
    raise typer.Exit(1 if problems else 0)


def rebuild_queue(vault: Vault, reason: Reason = "rebuild", as_json: Json = False) -> None:
    """Write queue rows that are missing, from the bucket and the warehouse's ledger."""
    from resources.clients import aws_client  # clients are built there and nowhere else

    settings = adopted_settings()
    with _worker() as worker:
        queue = WindowQueue(aws_client("dynamodb", region=settings.aws_region))
        raw = RawStore(aws_client("s3", region=settings.aws_region), settings.windows_bucket)
        added, repaired = operations.rebuild_queue(worker, raw, queue, vault, _doer(reason))
    _say({"vault": vault, "added": added, "repaired": repaired}, as_json)


@contextmanager
def _worker() -> Iterator[WindowWorker]:
    with warehouse(adopted_settings()).worker(refetch=_refetch) as worker:
        yield worker


def _refetch(row: QueueRow) -> bool:
    """Ask the vault of a window for it once more."""
    with open_source(adopted_settings(), row.window.vault) as producer:
        return producer.refetch(row)


def _window(worker: WindowWorker, vault: str, stop: datetime, kind: WindowKind) -> Window:
    for row in worker.ledger.pending(vault, None, kind=kind):
        if row.window.stop == stop:
            return row.window
    raise InvalidInput("it is not in the queue.", unit=f"{vault} window {stoptime(stop)}")


def _doer(reason: str) -> Doer:
    return Doer(getpass.getuser(), reason)


def _say(words: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(words, indent=2))
    else:
        console.print("  ".join(f"{name}: {value}" for name, value in words.items()), highlight=False)
