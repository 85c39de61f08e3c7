"""The fault lab: real services and workers on a stack of their own, clients that write, a nemesis, and the checker.

What belongs here: building the place, running it, waiting until it is calm, reading the final stores. What does not:
faults (nemesis.py, proxy.py), clients (clients.py), workers (hand.py), judgement (checker.py). Services and workers
reach every part, Spark and the vendor included, only through toxic doors, and clients reach the services so too.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lockstep.faults import oracle, readiness_lab
from lockstep.faults.checker import Effect, Stores, Unit, Violation, by_promise, check
from lockstep.faults.clients import ExportClient, Person, Run, TickAgent, Vendor
from lockstep.faults.history import History
from lockstep.faults.nemesis import Child, Nemesis
from lockstep.faults.proxy import LOOPBACK, ProxyLoop, ToxicProxy
from lockstep.faults.readiness_ledger import Ledger
from lockstep.kernel.errors import LockstepError, Transient
from lockstep.kernel.settings import PROJECT_ROOT, load_settings
from lockstep.vaultsim.model import VaultState
from lockstep.vaultsim.packing import world_of
from lockstep.warehouse.model import vault_schema

ORIGIN = datetime(2026, 1, 1, tzinfo=UTC)
_REPEATED = 5  # ticks before and after the one that silver is at
CALM_SECONDS = 480.0
"""A dispatch that was lost (2 min), a hint that was lost (2 min), a lease (1 min), one after another; then the work."""
_ADDRESSES = ("LOCKSTEP_POSTGRES_DSN", "LOCKSTEP_WAREHOUSE_DSN", "LOCKSTEP_SOURCE_DSN")
_DOORS = {
    "postgres": _ADDRESSES,
    "s3": ("AWS_ENDPOINT_URL_S3",),
    "sqs": ("AWS_ENDPOINT_URL_SQS",),
    "dynamodb": ("AWS_ENDPOINT_URL_DYNAMODB", "AWS_ENDPOINT_URL_DYNAMODB_STREAMS"),
    "spark": ("LOCKSTEP_SPARK_REMOTE",),
}
# Longer than the leases of 30 s (a chunk), 35 s (a start), 60 s (a lane of windows or silver), 15 s (one of ingest).
_PAUSES = {"exports": 36.0, "windows": 66.0, "silver": 66.0, "readiness": 42.0, "service": 20.0}
_KEYS = ("ABC", "XYZ", "K0001")
_ROWS_A_DAY = 40
_SMALL = "UPDATE demo.source_key SET rows_per_day = %s"

_JOBS = """
SELECT j.job_id, j.status, i.idempotency_key FROM exports.job AS j LEFT JOIN exports.idempotency AS i USING (job_id)"""
_CHUNKS = """
SELECT job_id || '/' || chunk_key, status, key, effective_date, s3_object_key, sha256 FROM exports.job_chunk"""
_OPEN_JOBS = "SELECT count(*) FROM exports.job WHERE status IN ('SUBMITTED', 'IN_PROGRESS')"
_APPLIED = """
SELECT stop, fence FROM windows.applied_window
 WHERE vault = %s AND kind = 'incremental' ORDER BY applied_at, stop"""
_TICKS = """
SELECT t.tick_id, t.project_id, t.sequence <= coalesce(l.watermark, 0)
  FROM ticks.tick AS t LEFT JOIN silver.lane AS l USING (project_id)
 WHERE t.state = 'committed' ORDER BY t.project_id, t.sequence"""
_SILVER = "SELECT project_id, tick_id, fence FROM silver.applied ORDER BY applied_at, sequence"
_PARKED = "SELECT parked FROM silver.lane WHERE parked IS NOT NULL"
_BEHIND = """
SELECT count(*) FROM ticks.project AS p LEFT JOIN silver.lane AS l USING (project_id)
 WHERE p.sequence > coalesce(l.watermark, 0)"""


@dataclass
class Report:
    """What a run did and what it found."""

    seed: int
    minutes: float
    faults: dict[str, int] = field(default_factory=dict)
    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    calm_seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            **{name: value for name, value in vars(self).items() if name != "violations"},
            "commit": _commit(),
            "fault_count": sum(self.faults.values()),
            "by_promise": by_promise(self.violations),
            "violations": [str(one) for one in self.violations],
        }


Say = Callable[[str], None]


def run_lab(seed: int, minutes: float, *, home: Path | None, ticks: bool, say: Say) -> tuple[Report, History]:
    """Start everything, damage it for so many minutes, let it recover, judge what is left, and remove it.

    Args:
        seed: Decides what the nemesis and the clients do.
        minutes: How long faults happen.
        home: A home to use and to keep; by default one below the current home, removed at the end.
        ticks: Whether agents and silver take part; they need Spark.
        say: Told what happens.
    """
    with _place(home, seed, say, ticks=ticks) as site, ExitStack() as closing:
        lab = Lab(seed, site, closing, ticks=ticks, say=say)
        try:
            lab.prepare()
            lab.damage(minutes * 60)
            calm = lab.recover()
            stores = lab.stores()
        finally:
            lab.end()
        violations = check(lab.run.history, stores)
        report = Report(seed, minutes, calm_seconds=round(calm, 1), violations=violations, parts=lab.part_names)
        report.faults, report.operations = lab.nemesis.faults(), lab.run.history.counts()
        report.units = lab.units
        return report, lab.run.history


@contextmanager
def _place(home: Path | None, seed: int, say: Say, *, ticks: bool) -> Iterator[Any]:
    """A stack of the lab's own; yields it, running. A home that was not given is removed."""
    from stack.lifecycle import Stack  # `import lockstep` stays free of the stack

    for name in [one for one in os.environ if one.startswith(("LOCKSTEP_", "AWS_", "PG")) and one != "LOCKSTEP_HOME"]:
        del os.environ[name]  # addresses of another stack would make its parts external here
    root = home or load_settings().home / f"faults-{seed}"
    stack = Stack(load_settings(home=root), lambda part, news: say(f"{part}: {news}"))
    parts = ["postgres", "dynamodb", "sqs", "s3", "vault", *(["spark"] if ticks else [])]
    try:
        stack.up(parts)
        yield stack
    finally:
        stack.down()
        if home is None:
            shutil.rmtree(root, ignore_errors=True)


class Lab:
    """One run on one stack."""

    def __init__(self, seed: int, stack: Any, closing: ExitStack, *, ticks: bool, say: Say) -> None:
        self.seed = seed
        self.stack = stack
        self.site = stack.site()
        self.say = say
        self.ticks = ticks
        self.run = Run(History(), seed)
        self.loop = closing.enter_context(ProxyLoop())
        self.proxies: list[ToxicProxy] = []
        self.children: list[Child] = []
        self.exports: list[ExportClient] = []
        self.vendors: list[Vendor] = []
        self.agents: list[TickAgent] = []
        self.jobs = readiness_lab.JobPlace(seed)
        self.jobs_port = closing.enter_context(self.jobs.serving())
        self.markers: readiness_lab.MarkerClient | None = None
        self.threads: list[threading.Thread] = []
        self.part_names = ["postgres", "dynamodb", "sqs", "s3", *(["spark"] if ticks else [])]
        self.units: dict[str, int] = {}
        self.nemesis = self._nemesis()
        os.environ.update(self.site.environment)  # this process itself uses the straight way

    # --- building -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Doors, services, workers, clients; returns when the services answer."""
        environment = self._poisonable()
        ports = {name: _free_port() for name in (("exports", "ingest") if self.ticks else ("exports",))}
        serve = [str(Path(sys.executable).with_name("lockstep")), "serve"]
        self._child("relay", [*serve, "relay", "--port", str(_free_port())], environment, "service")
        for name, port in ports.items():
            self._child(name, [*serve, name, "--port", str(port)], environment, "service")
        for kind in ("exports", "windows", "readiness", *(["silver"] if self.ticks else [])):
            for number in (1, 2):
                command = [sys.executable, "-m", "lockstep.faults.hand", kind]
                self._child(f"{kind} worker {number}", command, environment, kind)
        self._open_lanes()
        self._move_the_vendor()
        for child in self.children:
            child.revive()
        doors = {name: self._door(f"{name} service", LOOPBACK, port) for name, port in ports.items()}
        for name, port in ports.items():
            self._wait_for(f"http://{LOOPBACK}:{port}/readyz", name)
        self._clients({name: f"http://{LOOPBACK}:{door.port}" for name, door in doors.items()})
        self.nemesis.children, self.nemesis.proxies = self.children, self.proxies

    def _poisonable(self) -> dict[str, str]:
        """The stack's addresses, each behind a door of its own."""
        environment = {
            **{n: v for n, v in os.environ.items() if n in ("PATH", "HOME", "LANG")},
            **self.site.environment,
        }
        for name, variables in _DOORS.items():
            if name == "spark" and not self.ticks:
                continue
            address = urlsplit(self.site.environment[variables[0]])
            door = self._door(name, str(address.hostname), int(address.port or 0))
            for variable in variables:
                environment[variable] = _through(self.site.environment[variable], door.port)
        jobs = self._door("jobs", LOOPBACK, self.jobs_port).port
        os.environ |= {
            readiness_lab.VARIABLE: f"http://{LOOPBACK}:{jobs}",
            "LOCKSTEP_READINESS_ALLOWED_HOSTS": f"{LOOPBACK}:{jobs}",
        }
        environment |= {name: os.environ[name] for name in (readiness_lab.VARIABLE, "LOCKSTEP_READINESS_ALLOWED_HOSTS")}
        return environment | {"LOCKSTEP_LOG_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"}

    def _door(self, name: str, host: str, port: int) -> ToxicProxy:
        door = self.loop.open(name, host, port)
        self.proxies.append(door)
        return door

    def _child(self, name: str, command: list[str], environment: Mapping[str, str], kind: str) -> None:
        log = self.stack.home.logs / f"lab-{name.replace(' ', '-')}.log"
        self.children.append(Child(name, command, environment, log, _PAUSES[kind], has_clock=kind != "service"))

    def _open_lanes(self) -> None:
        """Every vault begins at the simulator's origin, without a full load."""
        with self._sql("LOCKSTEP_SOURCE_DSN") as source:
            source.execute(_SMALL, (_ROWS_A_DAY,))
        with self._windows() as (_, worker):
            for vault in self.stack.settings.vault_ids:
                worker.store.open_lane(vault, 1, ORIGIN, "fault lab")

    def _move_the_vendor(self) -> None:
        """Behind a door: workers find its address in the registry. The next start of the part puts it back."""
        from lockstep.vaults.registry import VaultRegistry

        door = self._door("vault", LOOPBACK, self.site.ports["vault"])
        with self._sql("LOCKSTEP_POSTGRES_DSN") as state:
            registry = VaultRegistry(state)
            for one in registry.vaults():
                registry.add(one.id, _through(one.url, door.port), actor="fault lab")

    def _wait_for(self, url: str, name: str) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if httpx.get(url, timeout=5).status_code == 200:
                    return
            time.sleep(0.3)
        raise Transient(f"{name} did not become ready.", unit="fault lab", next_step="see its log in the lab's home.")

    def _clients(self, urls: Mapping[str, str]) -> None:
        from lockstep.exports.clients import ClientStore  # opened only where a lab runs
        from resources.exports import state_pool

        settings = load_settings()
        recent = datetime.now(UTC).date()
        days = [f"{recent - timedelta(days=back):%Y%m%d}" for back in (1, 2, 30, 60, 90)]
        with state_pool(settings, application_name="fault-lab") as state:
            for number in (1, 2):
                made = ClientStore(state).add(f"lab-{number}")
                client = ExportClient(self.run, urls["exports"], made.api_key, f"client-{number}", list(_KEYS), days)
                self.exports.append(client)
            if self.ticks:
                self._agents(settings, state, urls["ingest"])
        self.markers = self._marker_client(settings)
        controls = f"http://{LOOPBACK}:{self.site.ports['vault']}/_control/vaults"
        self.vendors = [Vendor(self.run, controls, vault) for vault in self.stack.settings.vault_ids]

    def _marker_client(self, settings: Any) -> readiness_lab.MarkerClient:
        """One whose table is behind the door."""
        from resources.clients import aws_session

        door = next(one for one in self.proxies if one.name == "dynamodb")
        endpoint = _through(self.site.environment["AWS_ENDPOINT_URL_DYNAMODB"], door.port)
        calls = Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1})
        client = aws_session(settings.aws_region).client("dynamodb", endpoint_url=endpoint, config=calls)
        plane = readiness_lab.plane_of(settings, os.environ[readiness_lab.VARIABLE], client)
        return readiness_lab.MarkerClient(self.run, readiness_lab.control_of(plane))

    def _agents(self, settings: Any, state: Any, url: str) -> None:
        from lockstep.ticks.agent.client import IngestClient
        from resources.ticks import project_store

        for number in (1, 2):
            made = project_store(settings, state).add(f"lab-{number}", actor="fault lab")

            def opened(made: Any = made) -> IngestClient:
                return IngestClient(url, org_id=made.org_id, project_id=made.project_id, api_secret=made.api_secret)

            self.agents.append(TickAgent(self.run, opened, made.org_id, made.project_id))

    # --- running ------------------------------------------------------------------------------------------------------

    def damage(self, seconds: float) -> None:
        """Clients write while the nemesis strikes."""
        self.say(f"seed {self.seed}: clients write and faults happen for {seconds:.0f} s")
        bodies: list[Callable[[], None]] = [one.work for one in self.exports]
        bodies += [one.work for one in self.vendors]
        bodies += [one.work for one in self.agents]
        bodies += [self.markers.work] if self.markers is not None else []
        bodies.append(self.nemesis.work)
        for body in bodies:
            thread = threading.Thread(target=body, daemon=True)
            thread.start()
            self.threads.append(thread)
        time.sleep(seconds)
        self.nemesis.over.set()
        self.run.over.set()

    def recover(self) -> float:
        """Faults have stopped: wait, within bounds, until nothing is left to do. Returns how long it took."""
        began = time.monotonic()
        for thread in self.threads:
            thread.join(timeout=max(0.0, began + CALM_SECONDS - time.monotonic()))
        self.nemesis.calm()
        self.jobs.calm = True
        self.stack.up(self.part_names)
        self.say("faults have stopped; waiting until everything is terminal")
        while (left := self._left()) and time.monotonic() - began < CALM_SECONDS:
            for child in self.children:
                child.revive()
            self._look_after()
            time.sleep(2.0)
        self.say(f"left to do: {left or 'nothing'}")
        return time.monotonic() - began

    def end(self) -> None:
        """End every process of the lab that is not the stack's."""
        self.run.over.set()
        self.nemesis.over.set()
        for child in self.children:
            child.end()

    def _left(self) -> str:
        """What is not terminal yet, in words; empty when all is."""
        try:
            with self._sql("LOCKSTEP_POSTGRES_DSN") as state:
                jobs = _number(state, _OPEN_JOBS)
                behind = _number(state, _BEHIND) if self.ticks else 0
            windows = sum(
                len(self._chain(vault)) - len(self._applied(vault)) for vault in self.stack.settings.vault_ids
            )
            executions = self._ledger().left()
        except (psycopg.Error, httpx.HTTPError, LockstepError, BotoCoreError, ClientError) as error:
            return f"unknown: {error}"
        found = {"jobs": jobs, "windows": windows, "projects behind": behind, "executions and markers": executions}
        return ", ".join(f"{count} {name}" for name, count in found.items() if count)

    def _look_after(self) -> None:
        """What a person does: let late windows go, retry what failed, replay what is parked."""
        from lockstep.windows import operations
        from lockstep.windows.model import WindowStatus

        for vendor in self.vendors:
            vendor.release()
        doer = operations.Doer("fault lab", "the faults are over")
        with suppress(LockstepError, BotoCoreError, ClientError), self._windows() as (_, worker):
            for vault in self.stack.settings.vault_ids:
                for row in worker.ledger.pending(vault, None):
                    if row.status is WindowStatus.FAILED:
                        operations.retry(worker, row.window, doer)
        if self.ticks:
            self._replay_parked()

    def _replay_parked(self) -> None:
        from lockstep.ticks.silver import operations
        from lockstep.ticks.silver.store import Actor
        from resources.silver import open_silver

        with suppress(LockstepError, psycopg.Error), self._sql("LOCKSTEP_POSTGRES_DSN") as state:
            parked = [str(row[0]) for row in state.execute(_PARKED).fetchall()]
            if parked:
                with open_silver(load_settings(), application_name="fault-lab") as parts:
                    operations.replay_ticks(parts, parked, Actor("fault lab", "the faults are over"))

    # --- faults that need the place -----------------------------------------------------------------------------------

    def _nemesis(self) -> Nemesis:
        deeds: dict[str, Callable[[random.Random], bool]] = {
            "operator cancels a job": lambda chance: self._meddle(chance, "cancel"),
            "operator retries a job": lambda chance: self._meddle(chance, "retry"),
            "operator cancels an execution": lambda chance: self.markers is not None and self.markers.cancel(chance),
            "operator reruns an execution": lambda chance: self.markers is not None and self.markers.rerun(chance),
            "part restarted": self._restart,
        }
        if self.ticks:
            deeds["messages repeated and reordered"] = self._repeat
        return Nemesis(self.seed, [], [], self._part_pid, self.part_names, deeds)

    def _part_pid(self, part: str) -> int | None:
        return int(self.stack.running().processes()[part]["pid"]) or None

    def _meddle(self, chance: random.Random, verb: str) -> bool:
        client = chance.choice(self.exports)
        if not client.jobs:
            return False
        client.meddle(chance.choice(client.jobs), verb)
        return True

    def _restart(self, chance: random.Random) -> bool:
        self.stack.restart(chance.choice(self.part_names))
        return True

    def _repeat(self, chance: random.Random) -> bool:
        """The messages of an agent's newest ticks once more, the last one first, whether they were done or not."""
        from lockstep.ticks.silver.queue import message_of
        from resources.silver import open_silver

        project = chance.choice(self.agents).project_id
        with open_silver(load_settings(), application_name="fault-lab") as parts:
            done = parts.store.lane(project).watermark
            ticks = parts.store.ticks.chain(project, after=max(0, done - _REPEATED))
            parts.queue.send([message_of(tick, parts.clock.now()) for tick in reversed(ticks[: 2 * _REPEATED])])
        return bool(ticks)

    # --- what is left -------------------------------------------------------------------------------------------------

    def stores(self) -> Stores:
        """The final stores, read past every proxy."""
        found = Stores()
        found.add(self._exports_stores())
        for vault in self.stack.settings.vault_ids:
            found.add(self._windows_stores(vault))
        found.add(self._readiness_stores())
        if self.ticks:
            found.add(self._ticks_stores())
        return found

    def _readiness_stores(self) -> Stores:
        ledger = self._ledger()
        self.units |= {"executions": len(list(ledger.executions())), "job starts": len(self.jobs.starts)}
        return ledger.stores(self.jobs.starts, self.jobs.outcome, None)

    def _ledger(self) -> Ledger:
        from resources.clients import aws_client

        client = aws_client("dynamodb", region=load_settings().aws_region)
        return readiness_lab.ledger(client, os.environ[readiness_lab.VARIABLE])

    def _exports_stores(self) -> Stores:
        from lockstep.exports.model import JobStatus
        from resources.clients import aws_client

        s3, bucket = aws_client("s3", region=load_settings().aws_region), load_settings().exports_bucket
        with self._sql("LOCKSTEP_POSTGRES_DSN") as state:
            jobs, chunks = state.execute(_JOBS).fetchall(), state.execute(_CHUNKS).fetchall()
        units = [Unit(job, status, JobStatus(status).is_terminal, key=key) for job, status, key in jobs]
        self.units |= {"jobs": len(jobs), "chunks": len(chunks)}
        for name, status, key, day, object_key, digest in chunks:
            if status != "DONE":
                continue
            expected = oracle.source_sha256(key, day, _ROWS_A_DAY)
            units.append(Unit(name, status, True, promised=expected, found=digest))
            units.append(Unit(f"{name}/file", status, True, promised=expected, found=_digest(s3, bucket, object_key)))
        return Stores(units)

    def _windows_stores(self, vault: str) -> Stores:
        from lockstep.windows import operations

        lane, chain, applied = f"windows/{vault}", self._chain(vault), self._applied(vault)
        done = {stop for stop, _ in applied}
        units = [Unit(f"{lane}/{stop}", "APPLIED" if stop in done else "MISSING", stop in done) for stop in chain]
        with self._windows() as (_, worker):
            problems = operations.verify(worker, vault)
        units.append(Unit(f"{lane}/content", "there", True, promised="as its archives", found=_words(problems)))
        units += self._warehouse_rows(lane, vault)
        self.units["windows"] = self.units.get("windows", 0) + len(chain)
        effects = [Effect(lane, f"{lane}/{stop}", fence) for stop, fence in applied]
        return Stores(
            units, {lane: [f"{lane}/{one}" for one in chain]}, effects, [(lane, fence) for _, fence in applied]
        )

    def _warehouse_rows(self, lane: str, vault: str) -> list[Unit]:
        """Whether every table holds what the vendor's windows leave, by the simulator's own word."""
        state = VaultState.model_validate(self._vendor_state(vault))
        expected = oracle.expected_tables(world_of(state), state.published - 1, full=False)
        with self._sql("LOCKSTEP_WAREHOUSE_DSN") as warehouse:
            found = oracle.compare_warehouse(warehouse, vault_schema(vault), expected)
        return [_held(f"{lane}/{name}", expected=len(rows), found=found[name]) for name, (_, rows) in expected.items()]

    def _ticks_stores(self) -> Stores:
        with self._sql("LOCKSTEP_POSTGRES_DSN") as state:
            ticks, applied = state.execute(_TICKS).fetchall(), state.execute(_SILVER).fetchall()
        found = Stores(
            units=[Unit(tick, "DONE" if there else "WAITING", bool(there), key=tick) for tick, _, there in ticks]
        )
        for tick, project, _ in ticks:
            found.chains.setdefault(f"silver/{project}", []).append(tick)
        found.effects = [Effect(f"silver/{project}", tick, fence) for project, tick, fence in applied]
        found.writes = [(f"silver/{project}", fence) for project, _, fence in applied]
        self.units["ticks"] = len(ticks)
        found.units += self._silver_rows(ticks)
        return found

    def _silver_rows(self, ticks: list[Any]) -> list[Unit]:
        """Whether silver holds exactly what the agents sent in their committed ticks, in the order of these."""
        from lockstep.ticks.silver.tables import SilverTables
        from resources.ticks import WarmSpark

        spark, units = WarmSpark(load_settings().spark_remote), []
        tables = SilverTables(spark.session(), None, load_settings().lake_bucket)
        for agent in self.agents:
            own = [agent.sent[tick] for tick, project, _ in ticks if project == agent.project_id]
            if not own:
                continue  # none of its ticks was committed: there is no table
            read = spark.session().read.format("delta").load(tables.path(agent.project_id, "people"))
            found = [Person(*row) for row in read.select(*Person._fields).collect()]
            expected = oracle.silver_rows(own)
            difference = oracle.compare_silver(expected, found)
            units.append(_held(f"silver/{agent.project_id}/people", expected=len(expected), found=difference))
        spark.close()
        return units

    def _chain(self, vault: str) -> list[str]:
        """Stops of every window that the vendor has published, in order."""
        published = int(self._vendor_state(vault)["published"])
        return [f"{ORIGIN + timedelta(minutes=15 * (number + 1)):%Y%m%d%H%M}" for number in range(published)]

    def _vendor_state(self, vault: str) -> dict[str, Any]:
        controls = f"http://{LOOPBACK}:{self.site.ports['vault']}/_control/vaults/{vault}"
        found: dict[str, Any] = httpx.get(controls, timeout=20).raise_for_status().json()
        return found

    def _applied(self, vault: str) -> list[tuple[str, int]]:
        with self._sql("LOCKSTEP_WAREHOUSE_DSN") as warehouse:
            rows = warehouse.execute(_APPLIED, (vault,)).fetchall()
        return [(f"{stop.astimezone(UTC):%Y%m%d%H%M}", int(fence)) for stop, fence in rows]

    @contextmanager
    def _windows(self) -> Iterator[tuple[Any, Any]]:
        from lockstep.windows.doors import warehouse

        resource = warehouse(load_settings())
        with resource.worker() as worker:
            yield resource, worker

    @contextmanager
    def _sql(self, variable: str) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.site.environment[variable], autocommit=True, connect_timeout=10) as connection:
            yield connection


def _digest(s3: Any, bucket: str, key: str) -> str:
    try:
        return hashlib.sha256(s3.get_object(Bucket=bucket, Key=key)["Body"].read()).hexdigest()
    except ClientError as error:
        return f"no file: {error}"


def _held(unit: str, *, expected: int, found: oracle.Difference) -> Unit:
    """A table as the checker sees it: the same words for both if every row is what it must be."""
    return Unit(unit, "there", True, promised=str(oracle.Difference(expected, 0, 0, 0)), found=str(found))


def _number(connection: psycopg.Connection[Any], statement: str) -> int:
    row = connection.execute(statement.encode()).fetchone()
    return int(row[0]) if row else 0


def _words(problems: list[str]) -> str:
    return "; ".join(problems) or "as its archives"


def _through(address: str, port: int) -> str:
    parts = urlsplit(address)
    user = parts.netloc.rpartition("@")[0]
    return urlunsplit(parts._replace(netloc=f"{user}@{LOOPBACK}:{port}" if user else f"{LOOPBACK}:{port}"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _commit() -> str:
    """The commit that runs: with the seed it is what a report needs."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
