"""Where benchmarks run: a stack of their own, empty at first and gone afterwards.

What belongs here: that stack's life. What does not: which parts of it a benchmark starts. The user's stack may run
beside it: nothing of it is read or changed, but the figures will show that it takes its share of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.kernel.settings import load_settings
from stack.environment import environment, forget_own
from stack.lifecycle import Stack


@contextmanager
def own_stack() -> Iterator[Path]:
    """A home inside the user's, for all benchmarks of one command. Yields its folder."""
    with own_environment():
        yield from _stack()


@contextmanager
def own_environment() -> Iterator[None]:
    """Variables that are set inside are gone outside.

    Every benchmark takes over the addresses of the parts that it started. To the next one they would mean that these
    parts are the user's own, and not to be started.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _stack() -> Iterator[Path]:
    forget_own()
    settings = load_settings()
    _forget_addresses(Stack(settings))
    os.environ["LOCKSTEP_HOME"] = str(settings.home / "bench")
    stack = Stack(load_settings())
    stack.reset()
    try:
        yield stack.home.root
    finally:
        stack.reset()


def _forget_addresses(users: Stack) -> None:
    """Drop every variable that only repeats what the user's own stack says of itself."""
    ports = users.home.ports()
    for name, value in environment(users.settings, users.home, ports).items() if ports else ():
        if os.environ.get(name) == value:
            del os.environ[name]
