"""`lockstep exports`: the commands of people. Words and tables; the work is done elsewhere.

What belongs here: arguments, progress, sentences. What does not: rules and SQL. Clients are built in resources/.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lockstep.exports import fleet, janitor, rules
from lockstep.exports.claims import ClaimStore
from lockstep.exports.clients import ClientStore
from lockstep.exports.model import DEFAULT_TENANT, Chunk, ChunkStatus, Client, Job, JobStatus, Tally
from lockstep.exports.sink import ObjectStore
from lockstep.exports.store import JobStore
from lockstep.kernel.clock import SystemClock
from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.kernel.logs import configure_logging
from lockstep.kernel.postgres import Pool
from lockstep.kernel.settings import Settings, load_settings

OPERATOR = "operator"
_POLL_SECONDS = 0.5
_MOST_FAILED_SHOWN = 20

app = typer.Typer(name="exports", help="Export jobs: submit, watch, fetch, verify, look after.", no_args_is_help=True)
client_app = typer.Typer(name="client", help="Who may call the API.", no_args_is_help=True)
app.add_typer(client_app)
console = Console(width=None if sys.stdout.isatty() else 160)

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of words.")]
JobArgument = Annotated[str, typer.Argument(help="A job id, such as J20260102_000123.")]


@app.callback()
def find_stack() -> None:
    """Export jobs: submit, watch, fetch, verify, look after."""
    from stack.environment import adopt, forget_own  # `import lockstep` stays free of the stack

    forget_own()
    adopt(load_settings())  # whatever the user did not set comes from the stack that runs here


@client_app.command("add")
def client_add(
    name: Annotated[str, typer.Argument(help="A name for people.")],
    tenant: Annotated[str, typer.Option(help="Clients of one tenant share files.")] = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Make a client and print its key: now, and never again."""
    with _state() as (_, state):
        made = ClientStore(state).add(name, tenant)
    if as_json:
        print(json.dumps({"client": made.client.name, "api_key": made.api_key}))
        return
    console.print(f"client {made.client.name} ({made.client.client_id}), tenant {made.client.tenant}")
    console.print(f"X-Api-Key: {made.api_key}", highlight=False, soft_wrap=True)
    console.print("Keep it: only its hash is stored.")


@client_app.command("list")
def client_list(as_json: AsJson = False) -> None:
    """Show every client, without keys."""
    with _state() as (_, state):
        found = ClientStore(state).list()
    rows = [
        {
            "client": one.client.name,
            "id": one.client.client_id,
            "tenant": one.client.tenant,
            "created": one.created_at.isoformat(timespec="seconds"),
            "revoked": one.revoked_at.isoformat(timespec="seconds") if one.revoked_at else None,
        }
        for one in found
    ]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("client", "id", "tenant", "created", "revoked", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(value or "" for value in row.values()))
    console.print(table)


@client_app.command("revoke")
def client_revoke(who: Annotated[str, typer.Argument(help="Name or id.")], as_json: AsJson = False) -> None:
    """Refuse a client's key from now on. Its jobs go on."""
    with _state() as (_, state):
        ClientStore(state).revoke(who)
    _say({"client": who, "revoked": True}, f"client {who} is revoked.", as_json)


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="The request as JSON, as POST /jobs takes it; - for standard input.")],
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until the job ends.")] = False,
    client: Annotated[str, typer.Option(help="On whose behalf.")] = OPERATOR,
    as_json: AsJson = False,
) -> None:
    """Submit a job; with --wait, exit with 1 unless it completes."""
    from resources.exports import export_limits

    body = _read(file)
    with _jobs() as (settings, state, jobs):
        submission = rules.parse_submission(body, export_limits(settings))
        accepted = jobs.submit(_client_named(state, client), submission, body)
        if not as_json:
            console.print(f"job {accepted.job_id}: {len(submission.chunks)} chunks", highlight=False)
        job = _watch(jobs, accepted.job_id, quiet=as_json) if wait else jobs.get(accepted.job_id)
    if as_json:
        print(json.dumps(_summary(job)))
    if wait and job.status is not JobStatus.COMPLETED:
        if not as_json:
            console.print(f"{job.status}: {job.error_message or 'cancelled'}")
        raise typer.Exit(1)


@app.command()
def status(job_id: JobArgument, as_json: AsJson = False) -> None:
    """Show one job, and the first chunks that failed in it."""
    with _jobs() as (_, __, jobs):
        summary = _summary(jobs.get(job_id))
        failed = jobs.chunks(job_id, status=ChunkStatus.FAILED, limit=_MOST_FAILED_SHOWN)
    if as_json:
        told = [{"chunk": one.chunk_key, "attempts": one.attempts, "error": one.error_message} for one in failed]
        print(json.dumps({**summary, "failedChunks": told}))
        return
    for name, value in summary.items():
        console.print(f"{name:<16}{'' if value is None else value}", highlight=False, markup=False)
    for chunk in failed:
        words = f"  {chunk.chunk_key} after {chunk.attempts} attempts: {chunk.error_message}"
        console.print(words, highlight=False, markup=False)


@app.command()
def cancel(job_id: JobArgument, as_json: AsJson = False) -> None:
    """Stop a job; running chunks stop within a heartbeat."""
    with _jobs() as (_, __, jobs):
        job = jobs.cancel(job_id)
    _say(_summary(job), f"{job_id} is {job.status if job.status.is_terminal else 'stopping'}.", as_json)


@app.command()
def retry(job_id: JobArgument, as_json: AsJson = False) -> None:
    """Try the failed chunks of a failed job again."""
    with _jobs() as (_, __, jobs):
        job = jobs.retry(job_id)
    _say(_summary(job), f"{job_id}: {job.counts.pending} chunks go again.", as_json)


@app.command()
def download(
    job_id: JobArgument,
    into: Annotated[Path, typer.Option("--into", help="Folder; made if absent.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Fetch the files of a job, checking every one against its checksum; exit with 1 if one is not as recorded."""
    with _jobs() as (settings, _, jobs):
        objects = _objects(settings)
        fetched = {one.chunk_key: _fetch(objects, one, into) for one in _done(jobs, job_id)}
    bad = [name for name, whole in fetched.items() if not whole]
    count = len(fetched) - len(bad)
    _say({"job": job_id, "files": count, "into": str(into), "bad": bad}, f"{count} files in {into}", as_json)
    _refuse(bad)


@app.command()
def verify(job_id: JobArgument, as_json: AsJson = False) -> None:
    """Read every file of a job again and compare size and checksum with its record; exit with 1 if one differs."""
    with _jobs() as (settings, _, jobs):
        objects = _objects(settings)
        found = {one.chunk_key: _verdict(objects, one) for one in _done(jobs, job_id)}
    bad = {name: words for name, words in found.items() if words != "ok"}
    told = {"job": job_id, "files": len(found), "ok": len(found) - len(bad), "bad": bad}
    lines = [f"  {name}: {words}" for name, words in bad.items()]
    _say(told, "\n".join([*lines, f"{len(found) - len(bad)} of {len(found)} files verified"]), as_json)
    _refuse(list(bad))


@app.command()
def gc(
    older_than_hours: Annotated[int, typer.Option(min=1, help="Leave alone what is younger.")] = 24,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove objects that no record knows, the parts of uploads whose worker died, and old idempotency keys."""
    from resources.exports import export_place

    limit = datetime.now(UTC) - timedelta(hours=older_than_hours)
    with _jobs() as (settings, state, jobs):
        gone = janitor.sweep(state, jobs, _objects(settings), export_place(settings), older_than=limit, dry_run=dry_run)
    verb = "would go" if dry_run else "removed"
    words = (
        f"{len(gone.objects)} objects {verb}, {gone.uploads} uploads aborted, {gone.keys} idempotency keys forgotten."
    )
    _say({"dryRun": dry_run, **vars(gone)}, words, as_json)


@app.command()
def work(
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; the connection budget if absent.")] = None,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="One worker; end when nothing is due.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a fleet of workers without Dagster, until SIGTERM. Each holds one connection to the source."""
    settings = load_settings()
    if (
        settings.postgres_dsn is None or settings.source_dsn is None
    ):  # else every process would die of it, again and again
        raise InvalidInput(
            "LOCKSTEP_POSTGRES_DSN and LOCKSTEP_SOURCE_DSN must be set.",
            next_step="start the stack, or set the addresses.",
        )
    if until_idle:
        done = _work_once(settings)
        words = f"{done.built} built, {done.reused + done.attached} reused, {done.failed} failed, {done.rows} rows"
        _say(done.as_dict(), words, as_json)
        return
    raise typer.Exit(fleet.run_processes(_work_process, workers or settings.exports_connections))


def _work_process() -> None:
    """One process of the fleet."""
    import signal

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format, service="exports-worker", secrets=[])
    _work_once(settings, stop=stop, until_idle=False)


def _work_once(settings: Settings, *, stop: threading.Event | None = None, until_idle: bool = True) -> Tally:
    from resources.exports import export_limits, open_worker, state_pool

    with state_pool(settings, application_name="lockstep-export-loop", max_size=2) as state, open_worker() as worker:
        claims = ClaimStore(state, owner="loop", limits=export_limits(settings))
        return fleet.run_loop(worker, claims, stop or threading.Event(), until_idle=until_idle)


def _watch(jobs: JobStore, job_id: str, *, quiet: bool) -> Job:
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")]
    clock = SystemClock()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=quiet) as progress:
        job = jobs.get(job_id)
        bar = progress.add_task(job_id, total=job.counts.total)
        while not job.status.is_terminal:
            progress.update(bar, completed=job.counts.done, description=f"{job_id} {job.status} {job.rows:,} rows")
            clock.sleep(_POLL_SECONDS)
            job = jobs.get(job_id)
        progress.update(bar, completed=job.counts.done, description=f"{job_id} {job.status} {job.rows:,} rows")
    return job


def _client_named(state: Pool, name: str) -> Client:
    clients = ClientStore(state)
    found = _active(clients, name)
    if found is None and name == OPERATOR:
        with suppress(InvalidInput):  # two first commands at once: one of them makes it, the other finds it
            return clients.add(OPERATOR).client
        found = _active(clients, name)
    if found is None:
        raise InvalidInput("there is no such client.", unit=name, next_step="lockstep exports client add NAME.")
    return found


def _active(clients: ClientStore, name: str) -> Client | None:
    return next((one.client for one in clients.list() if one.revoked_at is None and one.client.name == name), None)


def _done(jobs: JobStore, job_id: str) -> Iterator[Chunk]:
    jobs.get(job_id)
    after = -1
    while page := jobs.chunks(job_id, after=after, status=ChunkStatus.DONE):
        yield from page
        after = page[-1].ordinal


def _verdict(objects: ObjectStore, chunk: Chunk) -> str:
    if not chunk.is_downloadable:
        return "superseded by a later job"
    digest, size = hashlib.sha256(), 0
    try:
        for piece in objects.read(str(chunk.object_key), version_id=chunk.version_id):
            digest.update(piece)
            size += len(piece)
    except Terminal as error:
        return error.what
    return "ok" if (digest.hexdigest(), size) == (chunk.sha256, chunk.bytes) else "the bytes differ from the record"


def _fetch(objects: ObjectStore, chunk: Chunk, into: Path) -> bool:
    name = str(chunk.object_key).rpartition("/")[2]
    into.mkdir(parents=True, exist_ok=True)
    partial = into / f".{name}.partial"
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as file:
            for piece in objects.read(str(chunk.object_key), version_id=chunk.version_id):
                digest.update(piece)
                file.write(piece)
    except Terminal:
        partial.unlink(missing_ok=True)
        return False
    if digest.hexdigest() != chunk.sha256:
        partial.unlink()
        return False
    partial.rename(into / name)  # whole or not at all
    return True


def _refuse(bad: list[str]) -> None:
    if bad:
        raise Terminal(f"{len(bad)} files are not as recorded: {', '.join(bad[:5])}.", next_step="submit them again.")


def _say(told: dict[str, Any], words: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(told))
    else:
        console.print(words, highlight=False, markup=False, soft_wrap=True)


def _summary(job: Job) -> dict[str, Any]:
    return {
        "jobId": job.job_id,
        "status": job.status.value,
        **vars(job.counts),
        "percent": rules.percent(job.counts),
        "filesGenerated": job.generated,
        "filesReused": job.reused,
        "rows": job.rows,
        "bytes": job.bytes,
        "errorMessage": job.error_message,
    }


def _read(file: Path) -> object:
    try:
        return rules.read_json(sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes())
    except OSError as error:
        raise InvalidInput(f"the request cannot be read: {error.strerror}.", unit=str(file)) from None


def _objects(settings: Settings) -> ObjectStore:
    from resources.exports import export_objects

    objects: ObjectStore = export_objects(settings)
    return objects


@contextmanager
def _state() -> Iterator[tuple[Settings, Pool]]:
    from resources.exports import state_pool  # only resources/ opens connections

    settings = load_settings()
    with state_pool(settings, application_name="lockstep-exports-cli") as state:
        yield settings, state


@contextmanager
def _jobs() -> Iterator[tuple[Settings, Pool, JobStore]]:
    from resources.exports import export_limits, export_place

    with _state() as (settings, state):
        yield settings, state, JobStore(state, place=export_place(settings), limits=export_limits(settings))
