"""Many workers: as processes of their own, and as tasks of a Spark job. Both run the same loop on the same table.

What belongs here: how workers are multiplied and stopped. What does not: what a worker does (worker.py) and how its
clients are built; `open_worker` is given, by name where it must travel to another machine.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.exports.claims import ClaimStore
from lockstep.exports.model import Tally
from lockstep.exports.worker import Worker
from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import Transient
from lockstep.kernel.logs import get_logger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IDLE_SECONDS = 1.0
PATIENCE_SECONDS = 45.0
"""How long a Spark task waits for a state database that is away before it gives its place back."""

REAP_SECONDS = 5.0
BATCH = 8

_log = get_logger(__name__)


@dataclass(frozen=True)
class Opener:
    """A function by name, so that it can travel: `module:function` returns a context manager with a worker."""

    name: str

    def __call__(self) -> AbstractContextManager[Worker]:
        """Import it and call it."""
        module, _, function = self.name.partition(":")
        opened: AbstractContextManager[Worker] = getattr(importlib.import_module(module), function)()
        return opened


def run_loop(
    worker: Worker,
    claims: ClaimStore,
    stop: threading.Event,
    *,
    until_idle: bool = False,
    batch: int = BATCH,
    clock: Clock | None = None,
) -> Tally:
    """Reserve a little, work it off, again; reap on the way. A database that is away is waited for.

    Args:
        worker: Does the work.
        claims: Where work is reserved and reaped.
        stop: Ends the loop after the chunk in hand.
        until_idle: End when nothing is due any more, for tests and one-off runs.
        batch: How many chunks are set aside at a time; small, so that fairness is decided again soon.
        clock: For the pace of reaping.
    """
    clock = clock or SystemClock()
    total, next_reap = Tally(), 0.0
    while not stop.is_set():
        try:
            if clock.monotonic() >= next_reap:
                claims.reap()
                next_reap = clock.monotonic() + REAP_SECONDS
            reserved = claims.reserve(batch)
            if reserved is None:
                if until_idle:
                    return total
                stop.wait(IDLE_SECONDS)
                continue
            crash_point("exports.loop.reserved")
            total.add(worker.work(reserved.batch_id, stop=stop.is_set))
            claims.release(reserved.batch_id)
        except Transient as error:
            _log.warning("worker waits", error=str(error))
            stop.wait(IDLE_SECONDS * 2)
    return total


def run_processes(entry: Callable[..., None], workers: int) -> int:
    """Run `entry` in so many processes until SIGTERM or SIGINT; a process that dies is started again.

    Processes, not threads: one Python thread reads rows, so two threads would read no faster than one.
    """
    context = multiprocessing.get_context("spawn")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    members = [_started(context, entry) for _ in range(workers)]
    while not stop.wait(1.0):
        for place, member in enumerate(members):
            if not member.is_alive() and member.exitcode != 0:
                _log.warning("worker died, starting another", code=member.exitcode)
                members[place] = _started(context, entry)
        if not any(member.is_alive() for member in members):
            return 0
    for member in members:
        member.terminate()
    for member in members:
        member.join(timeout=30)
    return 0


def tasks_for(cores: int) -> int:
    """How many tasks keep so many cores busy: a few more, for those that wait for S3 or a commit."""
    return math.ceil(1.5 * max(cores, 1))


def run_on_spark(spark: SparkSession, batch_id: str, *, tasks: int, opener: Opener) -> Tally:
    """Work off a batch with so many Spark tasks; each takes chunks from the table until none is left.

    A task that Spark starts again, or twice, is one more worker: the fence decides who publishes. Tasks take work
    themselves instead of getting a share each, so that a slow chunk holds up one task and not a whole partition.
    """

    def partition(batches: Iterator[Any]) -> Iterator[Any]:
        from lockstep.exports.fleet import work_partition  # by name: the module is on the executor

        yield from work_partition(batches, batch_id, opener.name)

    rows = spark.range(0, tasks, 1, tasks).mapInArrow(partition, "tally string").collect()
    total = Tally()
    for row in rows:
        total.add(Tally(**json.loads(row["tally"])))
    return total


def work_partition(batches: Iterator[Any], batch_id: str, opener: str) -> Iterator[Any]:
    """One Spark task: drain the input, work, report one row."""
    import pyarrow as pa

    for _ in batches:  # the input only says that there is a task
        pass
    with Opener(opener)() as worker:
        tally = work_patiently(worker, batch_id)
    yield pa.RecordBatch.from_pydict({"tally": [json.dumps(tally.as_dict())]})


def work_patiently(worker: Worker, batch_id: str, *, clock: Clock | None = None) -> Tally:
    """Work off a batch through a short absence of the state database: a restart must not cost the whole run."""
    clock, tally = clock or SystemClock(), Tally()
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while True:
        done = tally.built + tally.reused
        try:
            return worker.work(batch_id, tally=tally)
        except Transient as error:
            if tally.built + tally.reused > done:
                deadline = clock.monotonic() + PATIENCE_SECONDS
            if clock.monotonic() >= deadline:
                raise
            _log.warning("task waits", batch=batch_id, error=str(error))
            clock.sleep(IDLE_SECONDS * 2)


def _started(context: Any, entry: Callable[..., None]) -> Any:
    member = context.Process(target=entry, daemon=True)
    member.start()
    return member
