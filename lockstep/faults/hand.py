"""A worker of the lab as a process of its own: `python -m lockstep.faults.hand exports|windows|silver|readiness`.

What belongs here: the loops that Dagster's sensors and runs drive in a deployment, without Dagster: on two cores its
daemon would spend most of a five-minute run starting processes. What does not: faults, but for one that nobody can do
from outside: on a signal the wall clock of this process jumps.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.clock import SystemClock
from lockstep.kernel.errors import LockstepError
from lockstep.kernel.logs import configure_logging, get_logger
from lockstep.kernel.settings import Settings, load_settings

_PAUSE_SECONDS = 1.0
_SWEEP_SECONDS = 15.0
_PIPELINES = 10
JUMPS = {signal.SIGUSR1: timedelta(hours=2), signal.SIGUSR2: timedelta(hours=-2)}

_log = get_logger(__name__)
T = TypeVar("T")


def exports(settings: Settings, stop: threading.Event) -> None:
    """Reserve, claim, build, publish, as `lockstep exports work` does."""
    from lockstep.exports.claims import ClaimStore  # each hand loads its own pipeline only
    from lockstep.exports.fleet import run_loop
    from resources.exports import export_limits, open_worker, state_pool

    with (
        open_worker(settings) as worker,
        state_pool(settings, application_name="lockstep-export-hand", max_size=1) as state,
    ):
        claims = ClaimStore(state, owner=f"hand:{os.getpid()}", limits=export_limits(settings))
        run_loop(worker, claims, stop)


def windows(settings: Settings, stop: threading.Event) -> None:
    """Produce and drain every vault, again and again: what the schedule, the sensor and their runs do."""
    from lockstep.windows.doors import open_source, registered, warehouse

    resource = warehouse(settings)
    while not stop.wait(_PAUSE_SECONDS):
        for vault in registered(settings):
            with open_source(settings, vault.id) as producer, resource.worker(refetch=producer.refetch) as worker:
                watermark, epoch = resource.chain(vault.id)
                _try("produce", lambda: producer.run(watermark=watermark, epoch=epoch))  # noqa: B023  # called at once
                _try("drain", lambda: worker.drain(vault.id))  # noqa: B023


def silver(settings: Settings, stop: threading.Event) -> None:
    """Receive, dispatch, apply; sweep now and then: what the tick sensor and its runs do."""
    from lockstep.ticks.silver.intake import sweep
    from resources.silver import open_silver
    from resources.ticks import WarmSpark

    spark, swept, later = WarmSpark(settings.spark_remote), 0.0, list[str]()
    with open_silver(settings, application_name="lockstep-silver-hand") as parts:
        while not stop.wait(_PAUSE_SECONDS):
            if time.monotonic() - swept > _SWEEP_SECONDS:
                swept = time.monotonic()
                _try("sweep", lambda: sweep(parts.store, parts.dispatches, parts.queue, clock=SystemClock()))
            found = parts.intake.look(lambda lane: False, later)
            later = found.later
            for group in found.groups:
                worker = parts.worker(spark.session())
                run_id = f"hand-{os.getpid()}-{time.monotonic_ns()}"
                worker.drain(group.lane.project_id, group.tick_ids, run_id=run_id)


def readiness(settings: Settings, stop: threading.Event) -> None:
    """Read the stream, sweep, tick, and look from outside now and then: what the sensor and the service do."""
    from lockstep.faults.readiness_lab import address, plane_of
    from lockstep.readiness import stream
    from lockstep.readiness.watchdog import Watchdog
    from lockstep.readiness.worker import Driver, Limits
    from resources.clients import aws_client
    from resources.readiness import SHORT_CALLS, TABLE

    plane, watched = plane_of(settings, address()), time.monotonic()
    driver = Driver(plane, Limits(seconds=15.0, threads=4))
    dynamodb = aws_client("dynamodb", region=settings.aws_region, **SHORT_CALLS)
    streams = aws_client("dynamodbstreams", region=settings.aws_region, **SHORT_CALLS)
    cursor: str | None = None

    def told() -> list[Any]:
        nonlocal cursor
        arn = dynamodb.describe_table(TableName=TABLE)["Table"]["LatestStreamArn"]
        markers, cursor = stream.read(streams, arn, cursor)
        return markers

    while not stop.wait(_PAUSE_SECONDS):
        markers = _try("stream", told) or []
        driver.tick([*markers, *driver.sweep(0, _PIPELINES)[0]])
        if time.monotonic() - watched > _SWEEP_SECONDS:
            watched = time.monotonic()
            Watchdog(plane).check()


def _let_the_clock_jump() -> None:
    """On a signal, set this process's wall clock ahead or back, as a bad time server does; durations stay right."""
    skew = [timedelta()]

    def now(clock: SystemClock) -> datetime:
        return datetime.now(UTC) + skew[0]

    def jump(number: int, frame: object) -> None:
        skew[0] += JUMPS[signal.Signals(number)]

    setattr(SystemClock, "now", now)  # noqa: B010  # the one place where the domain reads the machine's clock
    for number in JUMPS:
        signal.signal(number, jump)


def main(name: str) -> None:
    """Work until SIGTERM; whatever goes wrong in between is tried again."""
    _let_the_clock_jump()
    settings = load_settings()
    configure_logging(settings.log_level, settings.log_format, service=f"hand-{name}")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    work: Callable[[Settings, threading.Event], None] = {
        "exports": exports,
        "windows": windows,
        "silver": silver,
        "readiness": readiness,
    }[name]
    while not stop.is_set():
        _try(name, lambda: work(settings, stop))
        stop.wait(_PAUSE_SECONDS)


def _try(what: str, action: Callable[[], T]) -> T | None:
    try:
        return action()
    except (LockstepError, BotoCoreError, ClientError, OSError) as error:
        _log.warning("tried again soon", what=what, error=str(error))
        return None


if __name__ == "__main__":
    main(sys.argv[1])
