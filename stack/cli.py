"""The commands that start, stop, show and examine the stack. Words and tables only; see lifecycle.py for the deeds."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.kernel.errors import InvalidInput, LockstepError, Transient
from lockstep.kernel.settings import Settings, load_settings
from stack import doctor as doctors
from stack import java
from stack.environment import adopt, environment, forget_own
from stack.health import probe
from stack.home import Home
from stack.lifecycle import Stack

# A pipe has no width of its own: give it room, so that nothing is cut from what a script or a log keeps.
console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True, width=None if sys.stderr.isatty() else 160)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def user_settings() -> Settings:
    """The settings as the user gave them, the stack's own addresses left out."""
    forget_own()
    return load_settings()


def up(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Start only these parts and what they need; repeat it or separate by commas."),
    ] = None,
    spark_cluster: Annotated[
        bool, typer.Option("--spark-cluster", help="Spark as a standalone master with two workers, until `down`.")
    ] = False,
) -> None:
    """Start the embedded stack, or what is missing of it, and wait until every part is healthy."""
    stop_on_signals()
    warning = java.java_home_warning()
    if warning:
        errors.print(f"[yellow]warning[/] {warning}", highlight=False, soft_wrap=True)
    stack = Stack(user_settings(), report=_say)
    names = [name.strip() for chunk in only or [] for name in chunk.split(",") if name.strip()]
    try:
        seconds = stack.up(names, cluster=spark_cluster)
    except KeyboardInterrupt:
        errors.print("interrupted; nothing of this start is left running.")
        raise typer.Exit(130) from None
    console.print(f"[green]healthy[/] after {seconds:.1f} s")
    ports = stack.home.ports()
    if not names:
        console.print(f"Dagster UI  http://127.0.0.1:{ports['dagster']}", highlight=False)
        console.print("Next: `lockstep status` shows the parts, `lockstep doctor --deep` sends a message through all.")


def down() -> None:
    """Stop every part. Data stays and is there at the next `up`."""
    stack = Stack(user_settings(), report=_say)
    stack.down()
    console.print("stopped; data is kept in " + str(stack.home.root), soft_wrap=True, highlight=False)


def status(as_json: Json = False) -> None:
    """Show every part: address, process, health, restarts, memory. Exits with 1 if a part is not healthy."""
    stack = Stack(user_settings())
    description = stack.describe()
    if as_json:
        print(json.dumps(description, indent=2))
    else:
        _print_status(description)
    raise typer.Exit(0 if description["healthy"] else 1)


def _print_status(description: dict) -> None:
    if not description["parts"]:
        console.print(f"No stack has run in {description['home']}. Start one with `lockstep up`.", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for title, justify in (("part", "left"), ("kind", "left"), ("address", "left"), ("pid", "right")):
        table.add_column(title, justify=justify, no_wrap=True)
    for title in ("restarts", "memory", ""):
        table.add_column(title, justify="right" if title else "left")
    for part in description["parts"]:
        sign = "[green]healthy[/]" if part["healthy"] else f"[red]{part['detail']}[/]"
        memory = f"{part['rss_mb']:.0f} MB" if part["rss_mb"] else ""
        table.add_row(
            part["name"],
            part["kind"],
            part["address"] or "",
            str(part["pid"] or ""),
            str(part["restarts"]),
            memory,
            sign,
        )
    console.print(table)
    took = description["started_in_seconds"]
    since = f" The last full start took {took} s." if took is not None else ""
    console.print(f"{description['rss_mb'] / 1024:.2f} GB in all.{since} Home: {description['home']}", soft_wrap=True)


def logs(
    part: Annotated[str, typer.Argument(help="A part's name, or `supervisor`.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing what is added.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="How many lines to begin with.")] = 50,
) -> None:
    """Print a part's log."""
    stack = Stack(user_settings())
    log = stack.log_file(part)
    if not log.exists():
        raise InvalidInput(f"{part} has not written a log yet.", next_step="start it with `lockstep up`.")
    with log.open(errors="replace") as stream:
        for line in stream.readlines()[-lines:]:
            sys.stdout.write(line)
    if follow:
        _follow(log)


def _follow(log: Path) -> None:
    """Print what is added to a file, also across its rotation, until Ctrl-C."""
    stream = log.open(errors="replace")
    stream.seek(0, 2)
    try:
        while True:
            line = stream.readline()
            if line:
                sys.stdout.write(line)
                sys.stdout.flush()
                continue
            if log.exists() and log.stat().st_size < stream.tell():
                stream.close()
                stream = log.open(errors="replace")
            time.sleep(0.2)
    except KeyboardInterrupt:
        stream.close()


def restart(part: Annotated[str, typer.Argument(help="A part's name.")]) -> None:
    """Stop one part and start it again, for example `dagster-code` after a change of the code."""
    stack = Stack(user_settings(), report=_say)
    stack.log_file(part)  # refuses an unknown name
    stack.restart(part)


def reset(
    yes: Annotated[bool, typer.Option("--yes", help="Really delete all data of the embedded stack.")] = False,
) -> None:
    """Stop the stack and delete its folder with all data."""
    stack = Stack(user_settings(), report=_say)
    if not yes:
        raise InvalidInput(
            f"this would delete {stack.home.root} with all its data.", next_step="say `lockstep reset --yes`."
        )
    stack.reset()
    console.print(f"deleted {stack.home.root}", soft_wrap=True, highlight=False)


def env(as_json: Json = False) -> None:
    """Print the variables that boto3, psql, curl and Dagster users need: eval "$(lockstep env)"."""
    settings = user_settings()
    home = Home(settings.home)
    ports = home.ports()
    if not ports:
        raise InvalidInput(f"no stack has run in {home.root}.", next_step="start one with `lockstep up`.")
    variables = environment(settings, home, ports)
    for part in ("dagster", "exports", "ingest", "readiness", "vault"):
        variables[f"{part.upper()}_URL"] = f"http://127.0.0.1:{ports[part]}"
    if as_json:
        print(json.dumps(variables, indent=2))
        return
    for name, value in sorted(variables.items()):
        print(f"export {name}={shlex.quote(value)}")


def settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False, as_json: Json = False
) -> None:
    """Show every setting: variable, value in force, meaning. Secrets are masked."""
    if markdown:
        print(settings_page(), end="")
        return
    current = user_settings()
    values = {variable(name): _shown(getattr(current, name)) for name in Settings.model_fields}
    if as_json:
        print(json.dumps(values, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("variable", "value", "meaning"):
        table.add_column(title, overflow="fold")
    for name, field in Settings.model_fields.items():
        table.add_row(variable(name), values[variable(name)], field.description or "")
    console.print(table)


def settings_page() -> str:
    """The reference page of the settings, made from the class so that it cannot be out of date."""
    head = (
        "# Settings\n\nEvery setting is a variable or the same key in lower case, without `LOCKSTEP_`, in "
        "`lockstep.toml`; a variable wins.\nMade by `lockstep settings --markdown`.\n\n"
        "| variable | default | example | meaning |\n|---|---|---|---|\n"
    )
    rows = []
    for name, field in Settings.model_fields.items():
        default = "the project's `.lockstep`" if name == "home" else f"`{field.default}`"
        default = "" if field.default is None else default
        example = f"`{field.examples[0]}`" if field.examples else ""
        meaning = (
            field.description or f"Port of the embedded {name.removesuffix('_port')}; absent: a free one, then kept."
        )
        rows.append(f"| `{variable(name)}` | {default} | {example} | {meaning} |\n")
    return head + "".join(rows)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"LOCKSTEP_{name.upper()}"


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the stack running afterwards.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write claims, seconds and links as JSON.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Fewer windows, files and ticks; the same claims.")] = False,
    screenshots: Annotated[
        Path | None,
        typer.Option("--screenshots", metavar="DIR", help="Take pictures of the Dagster UI; needs Chromium."),
    ] = None,
) -> None:
    """Play the whole platform through the real daemon and prove every claim. Exits with 1 if one does not hold."""
    from stack.demo.browser import find_chromium
    from stack.demo.play import perform  # brings the scenes, which no other command needs
    from stack.demo.stage import SMALL

    if screenshots is not None:
        find_chromium()  # before a minute is spent
    stop_on_signals()
    stack = Stack(user_settings(), report=_say)
    try:
        outcome = perform(stack, console, keep=keep, sizes=SMALL if small else None, pictures=screenshots)
    except KeyboardInterrupt:
        errors.print("interrupted; nothing that the demo started is left running.")
        raise typer.Exit(130) from None
    if json_file is not None:
        outcome.write(json_file)
    failed = sum(not claim.ok for claim in outcome.claims)
    verdict = (
        f"[red]{failed} of {len(outcome.claims)} claims do not hold[/]"
        if failed
        else (f"[green]all {len(outcome.claims)} claims hold[/]")
    )
    console.print(f"{verdict} after {outcome.seconds:.0f} s.", highlight=False)
    if keep:
        console.print("The stack stays up: `lockstep down` stops it, `lockstep reset --yes` forgets its data.")
    raise typer.Exit(0 if outcome.holds else 1)


def provision(
    part: Annotated[str, typer.Argument(help="postgres, s3, sqs, dynamodb or dagster-code.")],
) -> None:
    """Create databases, tables, queues and buckets inside a part, also an external one. Safe to repeat."""
    from stack.provision import provision as create

    stack = Stack(user_settings())
    stack.log_file(part)  # refuses an unknown name
    if not stack.home.ports():  # where every part is external, no stack ever started here
        stack.home.prepare()
        stack.home.choose_ports(stack.settings)
    reason = probe(part, stack.site()) if part in ("postgres", "s3", "sqs", "dynamodb") else None
    if reason:
        raise Transient(f"it does not work: {reason}", unit=part, next_step="start it, or correct its address.")
    create(part, stack.site())
    console.print(f"{part} holds all it must hold")


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also send a message through every part and see it land.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Examine this machine and the stack; every finding says what to do. Exits with 1 if something is wrong."""
    findings = doctors.examine(Stack(user_settings()), deep=deep)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            sign = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "bad": "[red]bad [/]"}[finding.state]
            console.print(f"{sign} {finding.subject}: {finding.words}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(finding.state == "bad" for finding in findings) else 0)


def serve(
    service: Annotated[str, typer.Argument(help="exports, ingest, readiness, vault or relay.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Run one service alone, for containers and replicas."""
    from services.run import serve as run_service

    adopt(user_settings())
    run_service(service, host, port)


def register(app: typer.Typer) -> None:
    """Add the stack's commands to the program."""
    for command in (up, down, status, logs, restart, doctor, env, settings, provision, reset, serve, demo):
        app.command()(command)


def _say(part: str, news: str) -> None:
    console.print(f"  {part:<15} {news}", highlight=False)


def stop_on_signals() -> None:
    """SIGTERM ends a command as cleanly as Ctrl-C. SIGINT is set too: a background shell starts us with it ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _as_interrupt)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def explain(error: LockstepError) -> int:
    """Print an expected failure the way a person reads it; return the exit code."""
    errors.print(f"[red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    return 1
