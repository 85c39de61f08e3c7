"""The Dagster code server of the embedded stack, with one difference: runs are forked from a process that is ready.

Dagster starts every run as a new interpreter that imports all definitions: three seconds of a processor, and while it
does, the run queue launches nothing else. Here a fork server imports them once; a run is a fork of it. Everything else
is Dagster's own command. A change of the code needs `lockstep restart dagster-code`, as it does for sensors anyway.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import forkserver
from typing import Any

PRELOADED = ["platform_assets.definitions", "pyspark.sql.connect.session", "pyarrow.csv"]


def fork_runs() -> None:
    """Let every server of this process start its runs by fork. The contexts have the same interface."""
    from dagster._grpc.server import DagsterApiServer  # heavy, and only a server needs it

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    build = DagsterApiServer.__init__

    def build_and_fork(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self._mp_ctx = context
        forkserver.ensure_running()  # it imports now, not when the first run waits for it

    DagsterApiServer.__init__ = build_and_fork  # type: ignore[method-assign]


def main() -> None:
    """`python -m stack.code_server api grpc …` is `dagster api grpc …`."""
    from dagster._cli import main as dagster

    fork_runs()
    sys.argv[0] = "dagster"
    dagster()


if __name__ == "__main__":
    main()
