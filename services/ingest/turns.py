"""The order in which the finalizes of one organisation wait, inside one replica.

What belongs here: a queue per organisation. What does not: anything across replicas: the lane is a lease in the
database (lockstep/ticks/worker.py), and how often somebody may ask is counted there too (lockstep/kernel/budget.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lockstep.ticks.errors import InFlight


class Turns:
    """Finalizes of one organisation wait here in the order of their arrival, so that each holds one thread at most."""

    def __init__(self, wait_seconds: float) -> None:
        self._wait = wait_seconds
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}
        self._busy: set[tuple[str, str]] = set()

    @asynccontextmanager
    async def turn(self, org_id: str, project_id: str, tick_id: str) -> AsyncIterator[None]:
        """Hold the organisation's place in this replica. Raises `InFlight` for a tick that is in it already."""
        tick = (project_id, tick_id)
        if tick in self._busy:
            raise InFlight("the tick is being finalized.", unit=f"tick {tick_id}", retry_after=2.0)
        self._busy.add(tick)
        lock = self._locks.setdefault(org_id, asyncio.Lock())
        self._waiting[org_id] = self._waiting.get(org_id, 0) + 1
        try:
            await self._acquire(lock, org_id)
            try:
                yield
            finally:
                lock.release()
        finally:
            self._busy.discard(tick)
            self._waiting[org_id] -= 1
            if not self._waiting[org_id]:
                del self._waiting[org_id], self._locks[org_id]

    async def _acquire(self, lock: asyncio.Lock, org_id: str) -> None:
        try:
            async with asyncio.timeout(self._wait):
                await lock.acquire()
        except TimeoutError:
            raise InFlight(
                "other ticks of the organisation are being committed.", unit=org_id, retry_after=5.0
            ) from None
