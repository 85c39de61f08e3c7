"""Producers of vaults: from a registered vault to one that can run. Knows no Dagster.

What belongs here: which HTTP client, login and work folder a producer receives. What does not: what it does with them
(lockstep/windows/producer.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from lockstep.vaults.registry import RegisteredVault, login_of
from lockstep.windows.client import TIMEOUT, VaultClient
from lockstep.windows.producer import WORKERS, Producer
from lockstep.windows.queue import WindowQueue
from lockstep.windows.raw import RawStore


@contextmanager
def open_producer(
    vault: RegisteredVault,
    *,
    raw: RawStore,
    dynamodb: Any,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Producer]:
    """A producer of `vault`, usable inside the block. Raises `InvalidInput` if its login is not set."""
    login = login_of(vault.id, environment)
    limits = httpx.Limits(max_connections=WORKERS + 1, max_keepalive_connections=WORKERS + 1)
    with httpx.Client(timeout=TIMEOUT, limits=limits, follow_redirects=False) as http:
        client = VaultClient(vault.id, vault.url, login, http)
        yield Producer(client, raw, WindowQueue(dynamodb), folder=folder)
