"""Who uses the shared stack of the tests. Several runs in one tree may; only the last of them may stop it.

What belongs here: being counted, by a lock on a file that ends with its process however it ends. What does not: the
stack itself (conftest.py).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Users:
    """The processes that use a stack: each shares the lock of one file for as long as it lives."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._handle: int | None = None

    def join(self) -> None:
        """Be one of them from now on. Waits while somebody stops the stack."""
        if self._handle is None:
            self._handle = self._open()
            fcntl.flock(self._handle, fcntl.LOCK_SH)

    @contextmanager
    def leave(self) -> Iterator[bool]:
        """Be none of them any more. Yields whether nobody is left; nobody can join meanwhile then."""
        handle = self._open() if self._handle is None else self._handle
        self._handle = None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            last = False
        else:
            last = True
        try:
            yield last
        finally:
            os.close(handle)

    def _open(self) -> int:
        """A handle of this process alone: what it starts does not inherit it, and so does not count."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
