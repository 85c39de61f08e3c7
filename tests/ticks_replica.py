"""Replicas of the ingest service as processes of their own, and gates in front of parts that can be shut."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from lockstep.kernel.settings import PROJECT_ROOT
from tests.ticks_world import World

LOOPBACK = "127.0.0.1"


class Replica:
    """One process. `log` holds everything it said."""

    def __init__(self, world: World, log: Path, **variables: str) -> None:
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            port = free.getsockname()[1]
        assert world.settings.postgres_dsn is not None
        own = {
            "LOCKSTEP_POSTGRES_DSN": world.settings.postgres_dsn.get_secret_value(),
            "LOCKSTEP_TICKS_BUCKET": world.settings.ticks_bucket,
            "LOCKSTEP_LAKE_BUCKET": world.settings.lake_bucket,
            "PYTHONPATH": str(PROJECT_ROOT),
        }
        line = [sys.executable, "-m", "lockstep.cli", "serve", "ingest", "--host", LOOPBACK, "--port", str(port)]
        self.log, self.url = log, f"http://{LOOPBACK}:{port}"
        with log.open("ab") as sink:
            self._child = subprocess.Popen(line, env=os.environ | own | variables, stdout=sink, stderr=sink)

    def ready(self) -> Replica:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self._child.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"the replica did not start: {self.log.read_text()[-2000:]}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._child.send_signal(number)

    def ended(self, timeout: float = 60) -> int:
        return self._child.wait(timeout)

    def kill(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait(30)


@contextmanager
def replica(world: World, log: Path, **variables: str) -> Iterator[Replica]:
    """A replica that is gone afterwards."""
    made = Replica(world, log, **variables)
    try:
        yield made.ready()
    finally:
        made.kill()


class Gate:
    """A way to a part that can be shut and opened: shut, the part is down for whoever goes this way."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._listener = socket.create_server((LOOPBACK, 0))
        self._port = self._listener.getsockname()[1]
        self._lines: list[socket.socket] = []
        self._stop = threading.Event()
        self._start()

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self._port}"

    def shut(self) -> None:
        """Refuse new connections and break the old ones."""
        self._stop.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that accepts
        self._listener.close()
        for line in self._lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self._lines.clear()

    def open(self) -> None:
        """Let everything through again."""
        self._stop = threading.Event()
        self._listener = socket.create_server((LOOPBACK, self._port))
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener, self._stop), daemon=True).start()

    def _accept(self, listener: socket.socket, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                line, _ = listener.accept()
                if stop.is_set():
                    line.close()
                    return
                part = socket.create_connection(self._target, timeout=10)
            except OSError:
                return
            self._lines += [line, part]
            threading.Thread(target=self._carry, args=(line, part), daemon=True).start()

    def _carry(self, line: socket.socket, part: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while True:
                for ready in select.select([line, part], [], [], 60)[0]:
                    data = ready.recv(65536)
                    if not data:
                        raise OSError
                    (part if ready is line else line).sendall(data)
        for one in (line, part):
            one.close()
