"""Services as processes of their own beside the stack, as `lockstep serve` starts them in a container."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx

from lockstep.kernel.settings import PROJECT_ROOT

LOOPBACK = "127.0.0.1"


class ServiceProcess:
    """One replica of a service. `log` holds everything it said."""

    def __init__(self, service: str, log: Path, **variables: str) -> None:
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            port = free.getsockname()[1]
        line = [sys.executable, "-m", "lockstep.cli", "serve", service, "--host", LOOPBACK, "--port", str(port)]
        self.log, self.url = log, f"http://{LOOPBACK}:{port}"
        own = {"PYTHONPATH": str(PROJECT_ROOT)} | variables
        with log.open("ab") as sink:
            self._child = subprocess.Popen(line, env=os.environ | own, stdout=sink, stderr=sink)

    def ready(self) -> Self:
        """Wait until it answers."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self._child.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"the replica did not start: {self.log.read_text()[-2000:]}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self._child.send_signal(number)

    def ended(self, timeout: float = 60) -> int:
        """Wait for its end; its exit code."""
        return self._child.wait(timeout)

    def kill(self) -> None:
        """Kill -9, if it still lives."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait(30)


@contextmanager
def two_replicas(service: str, folder: Path, **variables: str) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Two of them, started together and gone afterwards."""
    with ExitStack() as closing:
        made = [ServiceProcess(service, folder / f"{service}-{number}.log", **variables) for number in (1, 2)]
        for one in made:
            closing.callback(one.kill)
        first, second = (one.ready() for one in made)
        yield first, second
