"""`lockstep windows produce`: one pass of the producer by hand. Words and tables only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.errors import InvalidInput, LockstepError
from lockstep.kernel.postgres import connect
from lockstep.kernel.settings import Settings, load_settings
from lockstep.vaults.registry import RegisteredVault, VaultRegistry
from lockstep.windows.model import parse_stoptime
from lockstep.windows.producer import Producer, ProducerReport

console = Console(width=None if sys.stdout.isatty() else 160)

_VAULTS_AT_ONCE = 4


def produce(
    vault: Annotated[str | None, typer.Option("--vault", help="Only this vault. Default: all registered ones.")] = None,
    watermark: Annotated[
        str | None,
        typer.Option("--watermark", help="How far the warehouse is, YYYYMMDDHHMM. Default: the queue's chain."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Fetch the newest full archive too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Fetch what the vaults publish: to S3, then into the queue. Exits with 1 if something went wrong."""
    stop = parse_stoptime(watermark) if watermark else None

    def one_pass(producer: Producer) -> ProducerReport:
        report = producer.run(watermark=stop)
        if full:
            window = producer.produce_full()
            if window not in report.produced:
                report.produced.append(window)
        return report

    reports = _produce_all(one_pass, vault)
    if as_json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        _print(reports)
    raise typer.Exit(1 if any(report.problems for report in reports) else 0)


def _produce_all(one_pass: Callable[[Producer], ProducerReport], only: str | None) -> list[ProducerReport]:
    """Every vault on its own: what fails in one is a line in its report and nothing in the others."""
    from resources.clients import aws_client  # noqa: PLC0415  # clients are built there and nowhere else
    from resources.producers import open_producer  # noqa: PLC0415

    settings = _settings()
    vaults = _registered(settings, only)
    s3, dynamodb = (aws_client(name, region=settings.aws_region) for name in ("s3", "dynamodb"))

    def serve(vault: RegisteredVault) -> ProducerReport:
        try:
            with open_producer(vault, s3=s3, dynamodb=dynamodb, folder=settings.home / "work" / "windows") as producer:
                return one_pass(producer)
        except LockstepError as error:
            return ProducerReport(vault.id, problems=[str(error)])

    with ThreadPoolExecutor(_VAULTS_AT_ONCE) as pool:
        return list(pool.map(serve, vaults))


def _settings() -> Settings:
    from stack.environment import adopt  # noqa: PLC0415  # keeps `import lockstep` free of the stack

    adopt(load_settings())
    return load_settings()


def _registered(settings: Settings, only: str | None) -> list[RegisteredVault]:
    if settings.postgres_dsn is None:
        raise InvalidInput("no database is known.", next_step="start the stack with `lockstep up`.")
    with connect(settings.postgres_dsn, application_name="lockstep-produce") as connection:
        vaults = VaultRegistry(connection).vaults()
    found = [vault for vault in vaults if only in (None, vault.id)]
    if not found:
        who = f"vault {only} is not registered" if only else "no vault is registered"
        raise InvalidInput(f"{who}.", next_step="add it with `lockstep vaults add --id … --url …`.")
    return found


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
