"""Starting, stopping and describing the stack as a whole.

Start order is gated by health: a part starts when everything it needs has proved that it works and holds what it must
hold. What the parts are is in parts.py; how they are kept alive is in supervisor.py.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from lockstep.kernel.errors import InvalidInput, Transient
from lockstep.kernel.settings import Settings
from stack import jars, orphans, parts
from stack.environment import environment
from stack.health import probe
from stack.home import Home, write_atomically
from stack.parts import Part, Site
from stack.provision import provision
from stack.supervisor import Supervisor

PART_DEADLINE_SECONDS = 300  # a busy laptop takes minutes where two quiet cores take 30 s
_IDLE_STATES = ("STOPPED", "EXITED", "FATAL", "UNKNOWN")

Report = Callable[[str, str], None]


@dataclass(frozen=True)
class PartStatus:
    """One line of `lockstep status`."""

    name: str
    kind: str
    address: str | None
    pid: int | None
    healthy: bool
    restarts: int
    rss_mb: float
    detail: str | None


class Stack:
    """The embedded stack of one home."""

    def __init__(self, settings: Settings, report: Report = lambda part, news: None) -> None:
        self.settings = settings
        self.home = Home(settings.home)
        self._report = report

    # --- up -----------------------------------------------------------------------------------------------------

    def up(self, only: list[str] | None = None, *, cluster: bool = False) -> float:
        """Start what is not running and wait until it is healthy; return the seconds it took.

        With `cluster` (or the setting) Spark is a master with two workers, from the first start until `down`.
        Interrupted or not: either every part asked for is healthy afterwards, or (on Ctrl-C of a fresh start) no
        process is left.
        """
        started = time.monotonic()
        with self._exclusive():
            supervisor = self._supervisor()
            fresh = supervisor is None
            self._decide_cluster(cluster or self.settings.spark_cluster, fresh=fresh)
            wanted = parts.select(only or [], self.settings, self._parts())
            try:
                supervisor = supervisor or self._launch()
                self._raise_parts(supervisor, wanted)
            except KeyboardInterrupt:
                if fresh:
                    self._report("stack", "interrupted: stopping what was started")
                    self._end()
                raise
            seconds = time.monotonic() - started
            if fresh and not only:
                write_atomically(self.home.run / "started.json", json.dumps({"seconds": round(seconds, 1)}))
        return seconds

    def _parts(self) -> tuple[Part, ...]:
        return parts.all_parts(clustered=self.home.clustered)

    def _decide_cluster(self, wanted: bool, *, fresh: bool) -> None:
        if wanted and self.settings.external("spark"):
            raise InvalidInput(
                "Spark is a service of your own, so the stack cannot make a cluster of it.",
                unit="spark",
                next_step="unset LOCKSTEP_SPARK_REMOTE and LOCKSTEP_SPARK_MODE, or leave --spark-cluster out.",
            )
        if fresh:
            self.home.remember_cluster(wanted)
        elif wanted and not self.home.clustered:
            raise InvalidInput(
                "the stack runs with one Spark process.",
                unit="spark",
                next_step="stop it with `lockstep down`, then start it with --spark-cluster.",
            )

    def _launch(self) -> Supervisor:
        left = orphans.end_all(self.home)
        if left:
            self._report("stack", f"ended {left} processes that an earlier supervisor left behind")
        fetched = jars.fetch(report=lambda done, of: self._report("jars", f"fetched {done} of {of}"))
        if fetched:
            self._report("jars", f"replaced {fetched} missing or damaged archives")
        ports = self.home.choose_ports(self.settings)
        supervisor = Supervisor(self.home, ports["supervisor"])
        site = self.site()
        embedded = [part for part in self._parts() if not self.settings.external(part.name)]
        parts.ensure_system_users(embedded)
        supervisor.launch(site, embedded)
        return supervisor

    def _raise_parts(self, supervisor: Supervisor, wanted: list[Part]) -> None:
        """Start each part when its needs are ready; return when all are."""
        site, waiting = self.site(), {part.name: part for part in wanted}
        ready = {part.name for part in self._parts() if self.settings.external(part.name)}
        asked: dict[str, float] = {}
        probes: dict[str, Future[str | None]] = {}
        with ThreadPoolExecutor(6, thread_name_prefix="health") as pool:
            while waiting:
                states = supervisor.processes()
                for name, part in list(waiting.items()):
                    if name not in asked:
                        if ready.issuperset(part.needs):
                            self._ask(supervisor, site, part, states[name])
                            asked[name] = time.monotonic()
                    elif self._settle(name, site, probes, pool, asked[name], states[name]):
                        ready.add(name)
                        del waiting[name]
                        self._report(name, f"ready after {time.monotonic() - asked[name]:.1f} s")
                time.sleep(0.25)

    def _ask(self, supervisor: Supervisor, site: Site, part: Part, state: dict[str, Any]) -> None:
        if state["statename"] in _IDLE_STATES:
            part.prepare(site)
            self._report(part.name, "starting")
            supervisor.start(part.name)

    def _settle(
        self,
        name: str,
        site: Site,
        probes: dict[str, Future[str | None]],
        pool: ThreadPoolExecutor,
        since: float,
        state: dict[str, Any],
    ) -> bool:
        """Whether the part has become ready. Raises when it gave up or takes too long."""
        if state["statename"] == "FATAL":
            raise Transient(
                f"keeps dying at start. Its last words:\n{self.last_words(name)}",
                unit=name,
                next_step=f"see `lockstep logs {name}`.",
            )
        if name not in probes:
            probes[name] = pool.submit(self._probe_and_provision, name, site, state)
        reason = None
        if probes[name].done():
            reason = probes.pop(name).result()
            if reason is None:
                return True
        if time.monotonic() - since > PART_DEADLINE_SECONDS:
            raise Transient(
                f"is not healthy after {PART_DEADLINE_SECONDS} s: {reason or 'no answer'}.",
                unit=name,
                next_step=f"see `lockstep logs {name}`.",
            )
        return False

    def _probe_and_provision(self, name: str, site: Site, state: dict[str, Any]) -> str | None:
        time.sleep(0.5)
        reason = probe(name, site, started=_start_of(state))
        if reason is None:
            provision(name, site)
        return reason

    # --- down ---------------------------------------------------------------------------------------------------

    def down(self) -> int:
        """Stop everything, orphans included; return how many processes had to be ended by hand."""
        if not self.home.root.exists():
            return 0
        with self._exclusive():
            return self._end()

    def _end(self) -> int:
        supervisor = self._supervisor()
        if supervisor:
            supervisor.shutdown()
            deadline = time.monotonic() + 90
            while supervisor.alive() and time.monotonic() < deadline:
                time.sleep(0.2)
        return orphans.end_all(self.home)

    def reset(self) -> None:
        """Stop the stack and delete its folder."""
        root = self.home.root
        if root.exists() and any(root.iterdir()) and not (root / "credentials.json").exists():
            raise InvalidInput(
                f"{root} does not look like the folder of a stack; nothing was deleted.",
                next_step="check LOCKSTEP_HOME.",
            )
        self.down()
        shutil.rmtree(root, ignore_errors=True)

    def restart(self, part: str) -> None:
        """Stop one part and start it again, waiting for its health."""
        supervisor = self.running()
        supervisor.stop(part)
        self.up([part])

    # --- looking ------------------------------------------------------------------------------------------------

    def site(self) -> Site:
        """The stack's addresses, as the parts see them."""
        ports = self.home.ports()
        return Site(self.settings, self.home, ports, environment(self.settings, self.home, ports), self.home.clustered)

    def running(self) -> Supervisor:
        """The supervisor, or a clear error if the stack is down."""
        supervisor = self._supervisor()
        if supervisor is None:
            raise Transient(f"no stack runs in {self.home.root}.", next_step="start one with `lockstep up`.")
        return supervisor

    def started(self, part: str) -> datetime | None:
        """When the process of a part began; None if it does not run."""
        return _start_of(self.running().processes().get(part))

    def status(self) -> list[PartStatus]:
        """Every part: where it is, whether it works, how often it came back, what it weighs."""
        supervisor = self._supervisor()
        states = supervisor.processes() if supervisor else {}
        restarts = supervisor.restarts() if supervisor else {}
        if not self.home.ports():
            return []
        site, known = self.site(), self._parts()
        with ThreadPoolExecutor(len(known)) as pool:
            return list(pool.map(lambda part: self._status(part, site, states.get(part.name), restarts), known))

    def _status(self, part: Part, site: Site, state: dict[str, Any] | None, restarts: dict[str, int]) -> PartStatus:
        external = self.settings.external(part.name)
        up = external or bool(state and state["statename"] in ("RUNNING", "STARTING"))
        reason = probe(part.name, site, started=_start_of(state)) if up else _why_down(state)
        return PartStatus(
            name=part.name,
            kind=part.kind + (" (external)" if external else ""),
            address=external_address(part.name, site) if external else part.address(site.ports),
            pid=(state or {}).get("pid") or None,
            healthy=reason is None,
            restarts=restarts.get(part.name, 0),
            rss_mb=_memory_mb((state or {}).get("pid")),
            detail=reason,
        )

    def describe(self) -> dict[str, Any]:
        """What `lockstep status --json` prints."""
        lines = self.status()
        started = self.home.run / "started.json"
        return {
            "home": str(self.home.root),
            "healthy": bool(lines) and all(line.healthy for line in lines),
            "started_in_seconds": json.loads(started.read_text())["seconds"] if started.exists() else None,
            "rss_mb": round(sum(line.rss_mb for line in lines), 1),
            "parts": [asdict(line) for line in lines],
        }

    def log_file(self, part: str) -> Path:
        """The log of a part, or of the supervisor."""
        names = [*(known.name for known in self._parts()), "supervisor"]
        if part not in names:
            raise InvalidInput(f"unknown part: {part}.", next_step=f"choose from {', '.join(names)}.")
        return self.home.logs / f"{part}.log"

    def last_words(self, part: str, lines: int = 8) -> str:
        """The end of a part's log."""
        log = self.log_file(part)
        if not log.exists():
            return "  (no log)"
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 16_384))
            tail = stream.read().decode(errors="replace").splitlines()[-lines:]
        return "\n".join(f"  {line}" for line in tail)

    # --- inside -------------------------------------------------------------------------------------------------

    def _supervisor(self) -> Supervisor | None:
        port = self.home.ports().get("supervisor")
        if port is None:
            return None
        supervisor = Supervisor(self.home, port)
        return supervisor if supervisor.alive() else None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self.home.prepare()
        try:
            with FileLock(self.home.lock, timeout=300):
                yield
        except Timeout as error:
            raise Transient(
                f"another command has been changing the stack in {self.home.root} for five minutes.",
                next_step="wait for it, or end it.",
            ) from error


def external_address(part: str, site: Site) -> str | None:
    """Where an external part is, without its password."""
    if part == "postgres":
        return "postgresql://" + site.environment["LOCKSTEP_POSTGRES_DSN"].rsplit("@", 1)[-1]
    if part == "spark":
        return site.environment.get("LOCKSTEP_SPARK_REMOTE", "in each run")
    return site.environment.get(f"AWS_ENDPOINT_URL_{part.upper()}", "AWS")


def _start_of(state: dict[str, Any] | None) -> datetime | None:
    return datetime.fromtimestamp(state["start"], UTC) if state and state.get("start") else None


def _why_down(state: dict[str, Any] | None) -> str:
    if state is None:
        return "not started"
    if state["statename"] == "FATAL":
        return "gave up after repeated crashes; `lockstep up` tries again"
    return str(state["statename"]).lower()


def _memory_mb(pid: int | None) -> float:
    """Resident memory of a part and its children."""
    if not pid:
        return 0.0
    total = 0
    try:
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
    except psutil.Error:
        return 0.0
    return round(total / 2**20, 1)
