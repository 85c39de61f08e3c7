"""Replicas of the ingest service as processes of their own, and gates in front of parts that can be shut."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from tests.replicas import LOOPBACK, ServiceProcess
from tests.ticks_world import World


class Replica(ServiceProcess):
    """One process of ingest on the world's database and buckets."""

    def __init__(self, world: World, log: Path, **variables: str) -> None:
        assert world.settings.postgres_dsn is not None
        own = {
            "LOCKSTEP_POSTGRES_DSN": world.settings.postgres_dsn.get_secret_value(),
            "LOCKSTEP_TICKS_BUCKET": world.settings.ticks_bucket,
            "LOCKSTEP_LAKE_BUCKET": world.settings.lake_bucket,
        }
        super().__init__("ingest", log, **(own | variables))


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
