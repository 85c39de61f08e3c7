"""The words of `lockstep readiness`: looking, running, rerunning, cancelling, pushing, validating.

What belongs here: arguments and sentences. What does not: what they mean (control.py, explain.py).
"""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import load_settings
from lockstep.readiness import asl, config
from lockstep.readiness.control import NotReady
from lockstep.readiness.explain import explain as explained
from lockstep.readiness.model import Execution, Reason, TraitStatus, parse_key

if TYPE_CHECKING:
    from resources.readiness import Deployment

app = typer.Typer(help="When pipelines may run, and why they do not.", no_args_is_help=True)
console = Console(soft_wrap=True, highlight=False)

Pipeline = Annotated[str, typer.Argument(help="The pipeline's name.")]
Day = Annotated[str | None, typer.Option("--date", help="Execution date, YYYY-MM-DD; absent: the one that is due.")]
Schedule = Annotated[str | None, typer.Option("--schedule", help="The schedule's name; absent: the first.")]
Why = Annotated[str, typer.Option("--reason", help="Why; kept in the ledger.")]


def _deployment() -> Deployment:
    from resources.readiness import build_deployment  # noqa: PLC0415  # clients are built in resources/ only
    from stack.environment import adopt  # noqa: PLC0415  # finds the embedded stack, as every command does

    adopt(load_settings())
    return build_deployment(load_settings())


def _day(text: str | None, pipeline: str) -> date | None:
    return None if text is None else parse_key(pipeline, text, "daily").date


@app.command()
def validate(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of own configuration; absent: what is shipped.")
    ] = None,
) -> None:
    """Check the configuration and list every problem with its file and line."""
    registry = config.load([config.shipped_folder(), *([folder] if folder else [])])
    counts = (
        f"{len(registry.plans)} pipelines, {len(registry.archetypes)} archetypes, {len(registry.calendars)} calendars"
    )
    console.print(f"[green]valid[/]: {counts}")


@app.command()
def status(
    pipeline: Annotated[str | None, typer.Argument(help="One pipeline; absent: all.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many executions of each.")] = 3,
) -> None:
    """The latest executions."""
    deployment = _deployment()
    table = Table(box=None, pad_edge=False)
    for title in ("pipeline", "date", "schedule", "status", "try", "blocking", "updated"):
        table.add_column(title)
    for name in [pipeline] if pipeline else sorted(deployment.catalogue.plans()):
        deployment.control.plan(name)
        rows = deployment.store.executions(name, deployment.clock.now(), limit=limit)
        for row in rows:
            blocking = ", ".join((row["readiness"] or {}).get("blocking", ()))
            attempt = f"{row['generation']}.{row['attemptNumber']}"
            moment = str(row["updatedAt"])[:19]
            table.add_row(name, row["date"], row["scheduleId"], row["status"], attempt, blocking, moment)
        if not rows:
            table.add_row(name, "", "", "never opened", "", "", "")
    console.print(table)


@app.command()
def evaluate(pipeline: Pipeline, day: Day = None, schedule: Schedule = None) -> None:
    """Ask every evaluator now and show the answers. Exits with 1 if it is not ready."""
    deployment = _deployment()
    key = deployment.control.key(pipeline, _day(day, pipeline), schedule)
    readiness = deployment.control.evaluate(key)
    for trait in readiness.traits:
        console.print(f"  {trait.status:<6}{trait.trait}  {trait.reason}")
    console.print(f"{key}: {readiness.status}")
    raise typer.Exit(0 if readiness.status == "READY" else 1)


@app.command()
def run(pipeline: Pipeline, day: Day = None, schedule: Schedule = None) -> None:
    """Start an execution if it is ready. Exits with 1 if it waits."""
    deployment = _deployment()
    _report(lambda: deployment.control.run(deployment.control.key(pipeline, _day(day, pipeline), schedule)))


@app.command()
def rerun(pipeline: Pipeline, why: Why, day: Annotated[str, typer.Option("--date")], schedule: Schedule = None) -> None:
    """Run an execution once more, within its budget of manual reruns."""
    deployment = _deployment()
    key = deployment.control.key(pipeline, _day(day, pipeline), schedule)
    _report(lambda: deployment.control.rerun(key, Reason.MANUAL, why))


@app.command()
def replay(
    pipeline: Pipeline, why: Why, day: Annotated[str, typer.Option("--date")], schedule: Schedule = None
) -> None:
    """Run a completed execution again as it was, within its budget of replays."""
    deployment = _deployment()
    key = deployment.control.key(pipeline, _day(day, pipeline), schedule)
    _report(lambda: deployment.control.rerun(key, Reason.REPLAY, why))


@app.command()
def backfill(
    pipeline: Pipeline,
    why: Why,
    first: Annotated[str, typer.Option("--from", help="First date.")],
    last: Annotated[str, typer.Option("--to", help="Last date.")],
    schedule: Schedule = None,
) -> None:
    """Open past dates; the driver runs them when they are ready."""
    deployment = _deployment()
    days = _day(first, pipeline), _day(last, pipeline)
    if days[0] is None or days[1] is None:
        raise InvalidInput("give both dates.", unit=pipeline)
    done = deployment.control.backfill(pipeline, days[0], days[1], schedule, why)
    console.print(f"{len(done.opened)} opened, {len(done.skipped)} left out")
    for key, reason in done.skipped.items():
        console.print(f"  {key}: {reason}")


@app.command()
def cancel(
    pipeline: Pipeline, why: Why, day: Annotated[str, typer.Option("--date")], schedule: Schedule = None
) -> None:
    """Stop an execution."""
    deployment = _deployment()
    key = deployment.control.key(pipeline, _day(day, pipeline), schedule)
    _report(lambda: deployment.control.cancel(key, why))


@app.command()
def explain(pipeline: Pipeline, day: Day = None, schedule: Schedule = None) -> None:
    """Say in words why it is not running and what would make it run."""
    deployment = _deployment()
    key = deployment.control.key(pipeline, _day(day, pipeline), schedule)
    for line in explained(
        deployment.control.plan(pipeline), key, deployment.control.execution(key), deployment.clock.now()
    ):
        console.print(line)


@app.command()
def events(pipeline: Pipeline, limit: Annotated[int, typer.Option("--limit", min=1, max=500)] = 30) -> None:
    """The event log, oldest first."""
    deployment = _deployment()
    for event in reversed(deployment.store.events(pipeline, deployment.clock.now(), limit=limit)):
        moment, where = str(event["timestamp"])[:19], f"{event['date']}/{event['scheduleId']}"
        console.print(f"{moment}  {where:<18} {event['kind']:<26} {event['message']}")


@app.command()
def push(
    pipeline: Pipeline,
    trait: Annotated[str, typer.Argument(help="The trait's type.")],
    answer: Annotated[str, typer.Argument(help="PASS or FAIL.")],
    value: Annotated[str, typer.Option("--value", help="A JSON object.")] = "{}",
    ttl: Annotated[int, typer.Option("--ttl", min=1, help="Seconds until it expires.")] = 3600,
    day: Day = None,
    schedule: Schedule = None,
) -> None:
    """Tell a trait's answer from outside."""
    deployment = _deployment()
    if answer not in ("PASS", "FAIL"):
        raise InvalidInput("a push says PASS or FAIL.", unit=f"{pipeline}/{trait}")
    key = deployment.control.key(pipeline, _day(day, pipeline), schedule) if day or schedule else None
    data: Any = _json_object(value, pipeline)
    deployment.control.push(pipeline, trait, TraitStatus(answer), value=data, ttl=timedelta(seconds=ttl), key=key)
    console.print(f"{trait} of {pipeline} is {answer} for {ttl} s")


@app.command()
def tick() -> None:
    """Drive everything that is due once, as the sensor does."""
    deployment = _deployment()
    deployment.catalogue.sync()
    report = deployment.driver.tick()
    console.print(f"{report.looked_at} looked at, {report.opened} opened, {report.stepped} stepped")
    for key, error in report.failures.items():
        console.print(f"[red]{key}[/]: {error}")
    raise typer.Exit(1 if report.failures else 0)


@app.command()
def watchdog() -> None:
    """Make one round of the watchdog. Exits with 1 if one of its checks could not be made."""
    found = _deployment().watchdog.check()
    for raised in found.raised:
        console.print(f"alert {raised}")
    for name, error in found.broken.items():
        console.print(f"[red]{name}[/]: {error}")
    raise typer.Exit(1 if found.broken else 0)


@app.command("export-asl")
def export_asl(
    folder: Annotated[Path, typer.Argument(help="Where to write statemachine.asl.json and the handlers.")],
) -> None:
    """Write the Step Functions form: a state machine and thin handlers over the same core."""
    for path in asl.export(folder):
        console.print(str(path))


def _json_object(text: str, unit: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise InvalidInput("--value must be a JSON object.", unit=unit)
    return data


def _report(request: Any) -> None:
    try:
        state: Execution = request()
    except NotReady as waiting:
        console.print(f"{waiting.state.key} waits: {', '.join(waiting.blocking)}. It runs when they pass.")
        raise typer.Exit(1) from None
    moment: datetime | None = state.updated_at
    console.print(f"{state.key}: {state.status} (run {state.run_id}) at {moment:%H:%M:%S} UTC")
