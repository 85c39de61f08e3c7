"""What a replica does besides answering: it warms Spark, forgets abandoned uploads, and notices that it should stop.

What belongs here: the background of the process. What does not: requests (routes.py). Nothing here is needed for
safety: a replica that dies in the middle of anything leaves work that another one finishes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.kernel.errors import LockstepError
from lockstep.kernel.logs import get_logger
from lockstep.ticks.worker import Committer, SparkGate

EXPIRY_SECONDS = 600.0

_log = get_logger("lockstep.ingest")


@contextmanager
def noticing_signals(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` as soon as SIGTERM or SIGINT comes, then let the server do what it does with it.

    The server waits for requests that run; without this word those that wait for their turn would start theirs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def told(number: int, frame: FrameType | None) -> None:
        stopping.set()
        following = before[signal.Signals(number)]
        if callable(following):
            following(number, frame)

    for number in before:
        signal.signal(number, told)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def background(committer: Committer, spark: SparkGate, stopping: threading.Event) -> Iterator[None]:
    """Warm Spark and look after abandoned uploads while the block runs."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_warm, args=(spark,), name="warm spark", daemon=True),
        threading.Thread(target=_every, args=(EXPIRY_SECONDS, ended, committer.expire_uploads), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        ended.set()


def _warm(spark: SparkGate) -> None:
    try:
        spark.session().sql("SELECT 1").collect()
    except Exception as error:  # the first finalize opens it; readiness says what is wrong until then
        _log.warning("spark is not warm yet", error=str(error))


def _every(seconds: float, ended: threading.Event, work: Callable[[], object]) -> None:
    while not ended.wait(seconds):
        try:
            work()
        except LockstepError as error:
            _log.warning("uploads were not looked after", error=str(error))
