"""The platform as the benchmark sees it: queue rows go in, the watermark comes out, and what it cost.

What belongs here: starting, asking, waiting, memory, and where the time of a run went. What does not: which sizes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial

import httpx
import psutil
from dagster import DagsterEventType, DagsterInstance, RunRecord, RunsFilter
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES, DagsterRunStatus

from bench.report import peak_memory_mb
from bench.windows_files import Published
from lockstep.kernel import postgres
from lockstep.kernel.errors import Terminal
from lockstep.kernel.settings import Settings, load_settings
from lockstep.vaults.registry import VaultRegistry
from lockstep.windows.doors import open_source
from lockstep.windows.queue import WindowQueue
from lockstep.windows.store import WindowStore
from resources.clients import aws_client

PATIENCE_SECONDS = 900.0
_LOOK_SECONDS = 0.05


class Platform:
    """The benchmarks' own stack, and one vault of its settings."""

    def __init__(self, settings: Settings, code_port: int, vendor_port: int) -> None:
        if settings.warehouse_dsn is None:
            raise Terminal("no stack is known here.", next_step="start it with `lockstep up`.")
        self.dsn = settings.warehouse_dsn.get_secret_value()
        self.home = settings.home
        self.s3 = aws_client("s3", region=settings.aws_region)
        self.bucket = settings.windows_bucket
        self._settings = settings
        self._vault = settings.vault_ids[-1]
        self._group = f"vault_{self._vault.replace('-', '_')}"
        self._queue = WindowQueue(aws_client("dynamodb", region=settings.aws_region))
        self._store = WindowStore(partial(postgres.connect, self.dsn, application_name="bench-windows"))
        self._dagster, self._code_port = DagsterInstance.get(), str(code_port)
        self._vendor_url = f"http://127.0.0.1:{vendor_port}"
        self._fetched = itertools.count(1)
        self._asked_at = 0.0

    @classmethod
    def start(cls, parts: list[str]) -> Platform:
        """Start what is not running."""
        from stack.environment import adopt  # keeps `import bench` free of the stack
        from stack.lifecycle import Stack

        stack = Stack(load_settings())
        stack.up(parts)
        adopt(load_settings())
        ports = stack.site().ports
        return cls(load_settings(), ports["dagster_code"], ports["vault"])

    def close(self) -> None:
        """Close what is open; the stack stays up."""
        self._store.close()
        self._dagster.dispose()

    def begin(self) -> str:
        """Begin the vault's chain. Returns the vault."""
        first = datetime.combine(self._settings.windows_start, datetime.min.time(), UTC)
        self._store.open_lane(self._vault, 1, first, "benchmark")
        return self._vault

    def watermark(self) -> datetime:
        """How far the warehouse is."""
        lane = self._store.lane(self._vault)
        if lane is None:
            raise Terminal("the vault has not begun.", unit=self._vault)
        return lane.watermark

    def apply(self, windows: Sequence[Published]) -> float:
        """Seconds from the moment that the first window is READY, all others waiting behind it, to the last commit."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda one: self._queue.add_ready(*one), reversed(windows[1:])))
        stop, started, self._asked_at = windows[-1].window.stop, time.perf_counter(), time.time()
        self._queue.add_ready(*windows[0])
        self._wait(lambda: self.watermark() >= stop, "the platform did not apply the backlog in time")
        return time.perf_counter() - started

    def fetch(self, windows: int) -> float:
        """Seconds for each window that a vendor's vault publishes, until it is READY. Of the vault nothing is applied.

        The vault is registered, but not one of the settings', so no sensor looks at its queue.
        """
        vault = f"fetched{next(self._fetched)}"
        with self._vendor() as vendor, self._state() as connection:
            url = vendor.post("/vaults", json={"id": vault}).raise_for_status().json()["url"]
            VaultRegistry(connection).add(vault, url, actor="benchmark")
            with open_source(self._settings, vault) as producer:
                producer.run()  # the full archive, once for each vault, is not a window
                vendor.post(f"/vaults/{vault}/publish", json={"windows": windows}).raise_for_status()
                started = time.perf_counter()
                report = producer.run()
                taken = time.perf_counter() - started
        if len(report.produced) != windows:
            raise Terminal(f"{len(report.produced)} of {windows} windows were fetched.", unit=vault)
        return taken / windows

    def _state(self) -> postgres.Connection:
        return postgres.connect(self._settings.postgres_dsn or "", application_name="bench-windows")

    def _vendor(self) -> httpx.Client:
        return httpx.Client(base_url=f"{self._vendor_url}/_control", timeout=60)

    def rest(self) -> None:
        """Wait until no run of the vault is under way, as a sensor does before it asks for the next."""
        self._wait(lambda: not self._runs(NOT_FINISHED_STATUSES), "the last run did not end in time")

    def split(self) -> dict[str, float]:
        """Where the time of the newest run went, from READY to its last commit."""
        (run,) = self._runs()
        asked, started = run.create_timestamp.timestamp(), float(run.start_time or 0.0)
        committed = self._store.history(self._vault)[-1].applied_at.timestamp()
        spent = self._spent(run.dagster_run.run_id)
        rest = committed - started - spent.get("waited", 0.0) - spent.get("commit", 0.0)
        return {
            "sensor": asked - self._asked_at,
            "queue and process start": started - asked,
            "opening, events and the rest": rest,
            "Spark staging, waited for": spent.get("waited", 0.0),
            "commits": spent.get("commit", 0.0),
        }

    @contextmanager
    def memory(self) -> Iterator[Callable[[], float]]:
        """Peak of Spark (its Java and its Python workers) and of Dagster's runs, together."""
        with ExitStack() as open_ones:
            peaks = [open_ones.enter_context(peak_memory_mb(pid)) for pid in self._processes()]
            yield lambda: sum(peak() for peak in peaks)

    def _processes(self) -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            spark = any("SparkConnectServer" in word for word in words) and str(self.home) in " ".join(words)
            if spark or ("grpc" in words and self._code_port in words):
                found.append(int(process.pid))
        return found

    def _spent(self, run: str) -> dict[str, float]:
        """What the run itself measured; the materialization that carries it comes at the end of the run."""
        found: dict[str, float] = {}

        def reported() -> bool:
            for entry in self._dagster.all_logs(run, of_type=DagsterEventType.ASSET_MATERIALIZATION):
                event = entry.dagster_event
                for label, value in event.materialization.metadata.items() if event else ():
                    if label.startswith("seconds_"):
                        found[label.removeprefix("seconds_")] = float(str(value.value))
            return bool(found)

        self._wait(reported, "the run did not report in time")
        return found

    def _runs(self, statuses: Sequence[DagsterRunStatus] = ()) -> Sequence[RunRecord]:
        """The newest run of the vault, if it is in one of these states."""
        wanted = RunsFilter(tags={"lockstep/lane": self._group}, statuses=list(statuses))
        return self._dagster.get_run_records(wanted, limit=1)

    def _wait(self, until: Callable[[], bool], words: str) -> None:
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while not until():
            if time.perf_counter() > deadline:
                raise Terminal(f"{words}.", unit=self._vault)
            time.sleep(_LOOK_SECONDS)
