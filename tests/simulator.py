"""The vault simulator on a port of its own, for tests: real HTTP, inside this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from lockstep.kernel.settings import load_settings
from services import vault


class Simulator:
    """A running simulator: its address, and its controls as one call."""

    def __init__(self, url: str, http: httpx.Client) -> None:
        self.url = url
        self._http = http

    def add(self, vault_id: str, **fields: Any) -> dict[str, Any]:
        return self._checked(self._http.post("/_control/vaults", json={"id": vault_id, **fields}))

    def do(self, vault_id: str, action: str, **data: Any) -> dict[str, Any]:
        return self._checked(self._http.post(f"/_control/vaults/{vault_id}/{action}", json=data))

    def address(self, vault_id: str) -> str:
        return f"{self.url}/v/{vault_id}"

    def _checked(self, answer: httpx.Response) -> dict[str, Any]:
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found


@contextmanager
def running_simulator(home: Path) -> Iterator[Simulator]:
    """Serve until the block ends."""
    app = vault.create_app(load_settings(home=home))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, timeout_keep_alive=600)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline, "the simulator did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Simulator(url, http)
    finally:
        server.should_exit = True
        thread.join(30)
