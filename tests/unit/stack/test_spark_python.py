"""The process that forks Spark's Python workers loads only what is safe before a fork, and goes when it is idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from stack import spark_python


def _run(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


def test_nothing_that_is_loaded_before_a_fork_starts_a_thread():
    """Guards every worker: a lock that another thread held at the fork is never free again in the child."""
    code = "import os; from stack.spark_python import preload; preload(); print(len(os.listdir('/proc/self/task')))"
    assert _run(code).communicate(timeout=60)[0].strip() == "1"


def test_what_tasks_need_is_there_before_the_first_fork():
    code = "import sys; from stack.spark_python import preload; preload(); print(*sys.modules)"
    loaded = _run(code).communicate(timeout=60)[0].split()
    assert {"boto3", "psycopg", "resources.exports", "lockstep.exports.worker"} <= set(loaded)
    assert not {"pandas", "pyarrow"} & set(loaded)


def test_only_looks_in_a_row_without_a_worker_count_as_idle():
    idleness = spark_python.Idleness(limit=2)
    assert [idleness.look(workers) for workers in (False, True, False, False)] == [False, False, False, True]


def test_a_daemon_with_a_worker_stays_and_one_without_goes():
    code = (
        "import os, signal, time\n"
        "from stack import spark_python\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        "spark_python._leave_when_idle()\n"
        "print(child, flush=True)\n"
        "while True:\n"
        "    time.sleep(60)\n"
    )
    daemon = _run(code, **{spark_python.IDLE_VARIABLE: "0.1"})
    assert daemon.stdout is not None
    worker = int(daemon.stdout.readline())
    try:
        time.sleep(0.1 * (spark_python.IDLE_LOOKS + 3))
        assert daemon.poll() is None
    finally:
        os.kill(worker, signal.SIGKILL)
    assert daemon.wait(timeout=30) == 0
