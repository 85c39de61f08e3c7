"""`lockstep windows produce`: one pass of the producer by hand. Words and tables only."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.errors import LockstepError
from lockstep.vaults.registry import RegisteredVault
from lockstep.windows.doors import adopted_settings, open_source, registered, warehouse
from lockstep.windows.model import parse_stoptime
from lockstep.windows.producer import Producer, ProducerReport

console = Console(width=None if sys.stdout.isatty() else 160)

_VAULTS_AT_ONCE = 4


def produce(
    vault: Annotated[str | None, typer.Option("--vault", help="Only this vault. Default: all registered ones.")] = None,
    watermark: Annotated[
        str | None,
        typer.Option("--watermark", help="Where the chain must start, YYYYMMDDHHMM. Default: the warehouse's own."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the audit.")] = "by hand",
    full: Annotated[bool, typer.Option("--full", help="Fetch the newest full archive too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Fetch what the vaults publish: to S3, then into the queue. Exits with 1 if something went wrong."""
    given = parse_stoptime(watermark) if watermark else None

    def one_pass(producer: Producer) -> ProducerReport:
        stop, epoch = warehouse(adopted_settings()).chain(producer.vault)
        report = producer.run(watermark=given or stop, epoch=epoch)
        if full:
            window = producer.produce_full()
            if window not in report.produced:
                report.produced.append(window)
        return report

    reports = _produce_all(one_pass, vault)
    _write_down(reports, reason)
    if as_json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        _print(reports)
    raise typer.Exit(1 if any(report.problems for report in reports) else 0)


def _produce_all(one_pass: Callable[[Producer], ProducerReport], only: str | None) -> list[ProducerReport]:
    """Every vault on its own: what fails in one is a line in its report and nothing in the others."""
    settings = adopted_settings()

    def serve(vault: RegisteredVault) -> ProducerReport:
        try:
            with open_source(settings, vault.id) as producer:
                return one_pass(producer)
        except LockstepError as error:
            return ProducerReport(vault.id, problems=[str(error)])

    with ThreadPoolExecutor(_VAULTS_AT_ONCE) as pool:
        return list(pool.map(serve, registered(settings, only)))


def _write_down(reports: list[ProducerReport], reason: str) -> None:
    """Who made a pass by hand and what came of it. A warehouse that is down must not undo the pass."""
    try:
        with warehouse(adopted_settings()).store() as store:
            for report in reports:
                detail = {"listed": report.listed, "produced": len(report.produced), "gaps": len(report.gaps)}
                store.audit("produce", report.vault, actor=getpass.getuser(), reason=reason, detail=detail)
    except LockstepError as error:
        console.print(f"[yellow]not audited[/] {error}", soft_wrap=True, highlight=False)


def _print(reports: list[ProducerReport]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("vault", "listed", "new", "replaced", "without a gap until", "gaps"):
        table.add_column(title)
    for report in reports:
        until = f"{report.contiguous_until:%Y-%m-%d %H:%M}" if report.contiguous_until else ""
        counts = (str(report.listed), str(len(report.produced)), str(len(report.replaced)))
        table.add_row(report.vault, *counts, until, str(len(report.gaps) or ""))
    console.print(table)
    for report in reports:
        for gap in report.gaps:
            console.print(
                f"[yellow]gap[/] {report.vault} up to {gap.stop:%Y-%m-%d %H:%M}: {gap.reason}", soft_wrap=True
            )
        for problem in report.problems:
            console.print(f"[red]problem[/] {problem}", soft_wrap=True, highlight=False)
