"""The words of `lockstep readiness`: looking, running, rerunning, cancelling, pushing, validating.

What belongs here: arguments, tables and sentences. What does not: what they mean (control.py, explain.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import load_settings
from lockstep.readiness import asl, codec, config, yamlfile
from lockstep.readiness.control import NotReady
from lockstep.readiness.explain import explain as explained
from lockstep.readiness.model import Execution, Key, ReadinessStatus, Reason, RunStatus, TraitStatus, parse_key

if TYPE_CHECKING:
    from resources.readiness import Deployment

app = typer.Typer(help="When pipelines may run, and why they do not.", no_args_is_help=True)

Pipeline = Annotated[str, typer.Argument(help="The pipeline's name.")]
Day = Annotated[
    str | None, typer.Option("--date", help="Execution date, YYYY-MM-DD; absent: the one whose time it is.")
]
GivenDay = Annotated[str, typer.Option("--date", help="Execution date, YYYY-MM-DD.")]
Schedule = Annotated[str | None, typer.Option("--schedule", help="The schedule's name, if there are several.")]
Why = Annotated[str, typer.Option("--reason", help="Why; kept in the ledger.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of words.")]


def _deployment() -> Deployment:
    from resources.readiness import build_deployment  # clients are built in resources/ only
    from stack.environment import adopt  # finds the embedded stack, as every command does

    adopt(load_settings())
    return build_deployment(load_settings())


# --- looking ---------------------------------------------------------------------------------------------------------


@app.command()
def validate(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of own configuration; absent: what is shipped.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the configuration and list every problem with its file and line."""
    registry = config.load([config.shipped_folder(), *([folder] if folder else [])])
    counts = {name: len(getattr(registry, name)) for name in ("pipelines", "archetypes", "calendars")}
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    _say({"valid": True, **counts} if as_json else f"valid: {words}", style="green")


@app.command()
def status(
    pipeline: Annotated[str | None, typer.Argument(help="One pipeline; absent: all.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many executions of each.")] = 3,
    as_json: AsJson = False,
) -> None:
    """The latest executions."""
    deployment = _deployment()
    if pipeline:
        deployment.control.plan(pipeline)
    names = [pipeline] if pipeline else sorted(deployment.catalogue.plans())
    now = deployment.clock.now()
    found = {name: deployment.store.executions(name, now, limit=limit) for name in names}
    if as_json:
        _say([row for rows in found.values() for row in rows])
        return
    lines = [line for name, rows in found.items() for line in _status_lines(name, rows)]
    _table(("pipeline", "date", "schedule", "status", "try", "blocking", "updated"), lines)


def _status_lines(name: str, rows: Sequence[dict[str, Any]]) -> Iterable[tuple[str, ...]]:
    if not rows:
        yield name, "", "", "never opened"
    for row in rows:
        blocking = ", ".join((row["readiness"] or {}).get("blocking", ())) if row["status"] == "PENDING" else ""
        attempt = f"{row['generation']}.{row['attemptNumber']}"
        moment = str(row["updatedAt"])[:19].replace("T", " ")
        dry = " (dry run)" if row["dryRun"] else ""
        yield name, row["date"], row["scheduleId"], row["status"] + dry, attempt, blocking, moment


@app.command()
def explain(pipeline: Pipeline, day: Day = None, schedule: Schedule = None, as_json: AsJson = False) -> None:
    """Say in words why it is not running and what would make it run."""
    control = (deployment := _deployment()).control
    key = _key(deployment, pipeline, day, schedule)
    lines = explained(control.plan(pipeline), key, control.execution(key), control.now())
    _say({**_named(key), "explanation": lines} if as_json else "\n".join(lines))


@app.command()
def events(
    pipeline: Annotated[str, typer.Argument(help="The pipeline's name; windows, exports and ticks have alerts here.")],
    limit: Annotated[int, typer.Option("--limit", min=1, max=500)] = 30,
    day: Annotated[str | None, typer.Option("--date", help="Only of one execution date.")] = None,
    schedule: Schedule = None,
    as_json: AsJson = False,
) -> None:
    """The event log, oldest first."""
    deployment = _deployment()
    key = _key(deployment, pipeline, day, schedule) if day else None
    found = deployment.store.events(pipeline, deployment.clock.now(), limit=limit, key=key)[::-1]
    if as_json:
        _say(found)
        return
    lines = [
        (
            str(event["timestamp"])[:19].replace("T", " "),
            event["date"],
            event["scheduleId"],
            event["kind"],
            event["message"],
        )
        for event in found
    ]
    _table(("at (UTC)", "date", "schedule", "kind", "message"), lines)


@app.command()
def evaluate(pipeline: Pipeline, day: Day = None, schedule: Schedule = None, as_json: AsJson = False) -> None:
    """Ask every evaluator now and show the answers. Exits with 1 if it is not ready."""
    deployment = _deployment()
    key = _key(deployment, pipeline, day, schedule)
    readiness = deployment.control.evaluate(key)
    if as_json:
        _say({**_named(key), **(codec.encode_readiness(readiness) or {})})
    else:
        lines = [(one.trait, one.status.value, one.category or "", one.reason) for one in readiness.traits]
        _table(("trait", "answer", "category", "why"), lines)
        _say(f"{key}: {readiness.status}")
    raise typer.Exit(0 if readiness.status is ReadinessStatus.READY else 1)


# --- asking ----------------------------------------------------------------------------------------------------------


@app.command()
def run(
    pipeline: Pipeline,
    day: Day = None,
    schedule: Schedule = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide, say it, and change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start an execution if it is ready. Exits with 1 if it waits."""
    deployment = _deployment()
    key = _key(deployment, pipeline, day, schedule)
    if dry_run:
        _rehearse(deployment, key, as_json)
        return
    _report(lambda: deployment.control.run(key), as_json)


def _rehearse(deployment: Deployment, key: Key, as_json: bool) -> None:
    state, events_ = deployment.control.rehearse(key)
    starts = state.status.is_success
    if as_json:
        told = [{"kind": event.kind, "message": event.message} for event in events_]
        _say({**_named(key), "wouldStart": starts, "events": told, "execution": codec.encode_execution(state)})
    elif starts:
        _say(f"{key} is ready and would start now. Nothing was started, nothing was written.")
    else:
        words = explained(state.plan, key, state, deployment.clock.now())
        _say("\n".join([f"{key} would not start. Nothing was written.", *words[1:]]))
    raise typer.Exit(0 if starts else 1)


@app.command()
def rerun(pipeline: Pipeline, why: Why, day: GivenDay, schedule: Schedule = None, as_json: AsJson = False) -> None:
    """Run an execution once more, within its budget of manual reruns."""
    deployment = _deployment()
    key = _key(deployment, pipeline, day, schedule)
    _report(lambda: deployment.control.rerun(key, Reason.MANUAL, why), as_json)


@app.command()
def replay(pipeline: Pipeline, why: Why, day: GivenDay, schedule: Schedule = None, as_json: AsJson = False) -> None:
    """Run a completed execution again as it was, within its budget of replays."""
    deployment = _deployment()
    key = _key(deployment, pipeline, day, schedule)
    _report(lambda: deployment.control.rerun(key, Reason.REPLAY, why), as_json)


@app.command()
def backfill(
    pipeline: Pipeline,
    why: Why,
    first: Annotated[str, typer.Option("--from", help="First date.")],
    last: Annotated[str, typer.Option("--to", help="Last date, included.")],
    schedule: Schedule = None,
    as_json: AsJson = False,
) -> None:
    """Open past dates; the driver runs them when they are ready."""
    control = _deployment().control
    done = control.backfill(pipeline, _date(first, pipeline), _date(last, pipeline), schedule, why)
    if as_json:
        _say({"opened": [_named(key) for key in done.opened], "skipped": dict(done.skipped)})
        return
    _say(f"{len(done.opened)} opened, {len(done.skipped)} left out")
    _table(("left out", "why"), list(done.skipped.items()))


@app.command()
def cancel(pipeline: Pipeline, why: Why, day: GivenDay, schedule: Schedule = None, as_json: AsJson = False) -> None:
    """Stop an execution. A running job is asked to stop; the execution ends when it has."""
    deployment = _deployment()
    key = _key(deployment, pipeline, day, schedule)
    _report(lambda: deployment.control.cancel(key, why), as_json)


@app.command()
def push(
    pipeline: Pipeline,
    trait: Annotated[str, typer.Argument(help="The trait's type.")],
    answer: Annotated[str, typer.Argument(help="PASS or FAIL.")],
    value: Annotated[str, typer.Option("--value", help="A JSON object.")] = "{}",
    ttl: Annotated[int, typer.Option("--ttl", min=1, help="Seconds until it expires.")] = 3600,
    day: Annotated[str | None, typer.Option("--date", help="Only for one date; absent: for every execution.")] = None,
    schedule: Schedule = None,
    as_json: AsJson = False,
) -> None:
    """Tell a trait's answer from outside."""
    deployment = _deployment()
    if answer not in ("PASS", "FAIL"):
        raise InvalidInput("a push says PASS or FAIL.", unit=f"{pipeline}/{trait}")
    key = _key(deployment, pipeline, day, schedule) if day or schedule else None
    data, life = _json_object(value, pipeline), timedelta(seconds=ttl)
    result = deployment.control.push(pipeline, trait, TraitStatus(answer), value=data, ttl=life, key=key)
    whose = f"{key}" if key else f"every execution of {pipeline}"
    _say(codec.encode_result(result) if as_json else f"{trait} is {answer} for {whose}, for {ttl} s")


@app.command()
def register(
    file: Annotated[Path, typer.Argument(help="A pipeline as YAML or JSON, as POST /api/pipelines takes it.")],
    as_json: AsJson = False,
) -> None:
    """Take a pipeline into the table, now and without a file in the configuration. The same name again changes it."""
    document = yamlfile.read(file)
    if document.problems or not isinstance(document.data, dict):
        problems = document.problems or (f"{file.name}:1: must be a mapping of fields",)
        raise InvalidInput("the pipeline is refused.", unit=str(file), problems=problems)
    plan = _deployment().catalogue.register(document.data)
    _say({"pipelineId": plan.pipeline} if as_json else f"{plan.pipeline} is registered; the next tick looks at it.")


@app.command()
def unregister(pipeline: Pipeline, as_json: AsJson = False) -> None:
    """Remove a pipeline that was registered and has nothing open. Its history stays."""
    deployment = _deployment()
    deployment.control.plan(pipeline)
    deployment.catalogue.unregister(pipeline)
    _say({"pipelineId": pipeline, "removed": True} if as_json else f"{pipeline} is gone; its history stays.")


# --- driving ---------------------------------------------------------------------------------------------------------


@app.command()
def tick(as_json: AsJson = False) -> None:
    """Drive everything that is due once, as the sensor does. Exits with 1 if something could not be stepped."""
    deployment = _deployment()
    deployment.catalogue.sync()
    markers, _ = deployment.driver.sweep(0, len(deployment.catalogue.plans()))
    report = deployment.driver.tick(markers)
    counts = {name: getattr(report, name) for name in ("looked_at", "opened", "stepped", "left_over")}
    if as_json:
        _say({**counts, "refused": report.refused, "failures": report.failures})
    else:
        _say(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
        _table(("not stepped", "why"), [*report.failures.items(), *(("marker", words) for words in report.refused)])
    raise typer.Exit(1 if report.failures else 0)


@app.command()
def watchdog(as_json: AsJson = False) -> None:
    """Make one round of the watchdog. Exits with 1 if one of its checks could not be made."""
    found = _deployment().watchdog.check()
    if as_json:
        _say({"raised": found.raised, "broken": found.broken})
    else:
        _say(f"{len(found.raised)} alerts raised, {len(found.broken)} checks could not be made")
        raised = [("alert", alert) for alert in found.raised]
        _table(("", ""), [*raised, *((f"check {name}", words) for name, words in found.broken.items())])
    raise typer.Exit(1 if found.broken else 0)


@app.command("export-asl")
def export_asl(
    folder: Annotated[Path, typer.Argument(help="Where to write statemachine.asl.json and the handlers.")],
) -> None:
    """Write the Step Functions form: a state machine and thin handlers over the same core."""
    for path in asl.export(folder):
        _say(str(path))


# --- words -----------------------------------------------------------------------------------------------------------


def _key(deployment: Deployment, pipeline: str, day: str | None, schedule: str | None) -> Key:
    return deployment.control.key(pipeline, None if day is None else _date(day, pipeline), schedule)


def _date(text: str, pipeline: str) -> date:
    return parse_key(pipeline, text, "daily").date


def _named(key: Key) -> dict[str, str]:
    return {"pipelineId": key.pipeline, "date": key.date.isoformat(), "scheduleId": key.schedule}


def _json_object(text: str, unit: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise InvalidInput("--value must be a JSON object.", unit=unit)
    return data


def _report(request: Callable[[], Execution], as_json: bool) -> None:
    """Carry a request out and say where the execution is now; 1 if it waits or has failed."""
    try:
        state = request()
    except NotReady as waiting:
        state = waiting.state
    if as_json:
        _say({**codec.encode_execution(state), "version": state.version})
    elif state.status is RunStatus.PENDING:
        blocking = ", ".join(state.readiness.blocking) if state.readiness else ""
        _say(f"{state.key} waits{': ' + blocking if blocking else ''}. It runs by itself as soon as it may.")
    else:
        _say(f"{state.key}: {state.status} (run {state.run_id}) at {state.updated_at:%H:%M:%S} UTC")
    raise typer.Exit(1 if state.status in (RunStatus.PENDING, RunStatus.FAILED) else 0)


def _say(what: Any, style: str | None = None) -> None:
    """Words as they are, anything else as JSON."""
    if isinstance(what, str):
        _console().print(what, style=style)
    else:
        print(json.dumps(what, indent=2, default=str))


def _table(titles: Sequence[str], lines: Sequence[tuple[str, ...]]) -> None:
    if not lines:
        return
    table = Table(*titles, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*line)
    _console().print(table)


def _console() -> Console:
    # Made anew, so that it writes to where standard output is now; reasons of evaluators are no markup.
    return Console(soft_wrap=True, highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
