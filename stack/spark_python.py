"""The process that forks Spark's Python workers: with what they need loaded once, and gone when nobody needs it.

What belongs here: what `spark.python.daemon.module` of the embedded server names, around PySpark's own daemon. What
does not: tasks. Every session of Spark Connect has a daemon of its own, which Spark never ends: a run that opened a
session and closed it would leave 46 MB behind for as long as the server lives.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

LOOK_SECONDS = 60.0
IDLE_LOOKS = 3
"""So many looks without a worker, and the daemon ends. Spark starts another one if the session has work again."""

IDLE_VARIABLE = "STACK_SPARK_PYTHON_LOOK_SECONDS"


class Idleness:
    """Counts looks at which no worker was there."""

    def __init__(self, limit: int = IDLE_LOOKS) -> None:
        self._limit = limit
        self._idle = 0

    def look(self, workers: bool) -> bool:
        """Whether it is time to go."""
        self._idle = 0 if workers else self._idle + 1
        return self._idle >= self._limit


def main() -> None:
    """Load, then do what PySpark's daemon does."""
    _prefer_throughput()
    preload()
    _leave_when_idle()
    from pyspark.daemon import manager

    manager()


def preload() -> None:
    """Import what tasks import, here, once: each worker of each session would spend most of a second on it.

    Only what starts no thread, because forking a process that has some is not safe: neither pandas nor pyarrow, nor
    what imports them.
    """
    import lockstep.exports.fleet  # noqa: F401  # for what it loads
    from resources.exports import s3_client

    s3_client("us-east-1")  # its description of S3 stays, and that is most of the work


def _prefer_throughput() -> None:
    # A reader that is woken for every 8 kB interrupts the very server process that fills them. A batch process waits
    # for its turn: a twentieth more files in the same time.
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _leave_when_idle() -> None:
    """By a timer: a thread would not be safe beside forks, and workers inherit no timer."""
    idleness = Idleness()

    def look(_: int, __: FrameType | None) -> None:
        if idleness.look(_has_children()):
            sys.exit(0)

    signal.signal(signal.SIGALRM, look)
    seconds = float(os.environ.get(IDLE_VARIABLE, LOOK_SECONDS))
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def _has_children() -> bool:
    try:
        return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
    except OSError:  # not on Linux: stay
        return True


if __name__ == "__main__":
    main()
