"""Finds and ends the processes of a stack whose supervisor is gone, so that none outlives it.

Every process below a supervisor carries the mark of its home in its environment. PostgreSQL overwrites its own
environment to show a title, so it is recognised by its data folder instead. Only marked processes are ever ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psutil

from stack.environment import MEMBER_MARK
from stack.home import Home


def members(home: Home) -> list[psutil.Process]:
    """The living processes of this home's stack, the supervisor included."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = [process for process in psutil.process_iter() if process.pid not in own and _belongs(process, home)]
    known = {process.pid for process in found}
    for process in list(found):
        found += [child for child in _children(process) if child.pid not in known]
        known |= {child.pid for child in found}
    return found


def end_all(home: Home, grace_seconds: float = 10) -> int:
    """End them, gently first; return how many there were."""
    processes = members(home)
    for process in processes:
        _quietly(partial(process.send_signal, signal.SIGINT) if _is_postgres(process) else process.terminate)
    _, stubborn = psutil.wait_procs(processes, timeout=grace_seconds)
    for process in stubborn:
        _quietly(process.kill)
    psutil.wait_procs(stubborn, timeout=10)
    late = members(home)  # what was being forked while we looked
    for process in late:
        _quietly(process.kill)
    psutil.wait_procs(late, timeout=10)
    return len(processes)


def _belongs(process: psutil.Process, home: Home) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get(MEMBER_MARK) == str(home.root):
            return True
        return _is_postgres(process) and str(home.data("postgres")) in process.cmdline()
    except (psutil.Error, OSError):
        return False


def _is_postgres(process: psutil.Process) -> bool:
    try:
        return process.name() == "postgres"
    except psutil.Error:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _quietly(action: Callable[[], None]) -> None:
    with suppress(psutil.Error):  # it may have ended by itself
        action()
