"""A TCP proxy that does to connections what networks do: slow, reset, swallowed, cut, the answer lost after the deed.

What belongs here: bytes between two sockets (`Door`), and one toxic at a time. What does not: when which toxic is set
(nemesis.py), and the weather of the demo (stack/demo/lossy.py). All doors of a loop share one thread.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

LOOPBACK = "127.0.0.1"
_CHUNK = 65536
_LIFT_SECONDS = 0.1
_START_SECONDS = 10.0
_RESET = struct.pack("ii", 1, 0)

Fate = TypeVar("Fate")


class Toxic(StrEnum):
    """What a connection suffers."""

    LATENCY = "latency"
    RESET = "reset"
    BLACK_HOLE = "black hole"
    CUT = "cut after n bytes"
    LOSE_ANSWER = "answer lost"


class Dose(NamedTuple):
    """A toxic and how much of it: seconds of latency, or bytes until the cut."""

    toxic: Toxic
    amount: float = 0.0


class Door(Generic[Fate]):
    """A port of this machine in front of one upstream. What becomes of the bytes is decided by `_begin` and `_pass`."""

    upstream: tuple[str, int]
    port: int = 0
    _serving: set[asyncio.Task[None] | None]

    def _begin(self) -> Fate | None:
        """What a new connection carries with it; None: it is reset at once."""
        raise NotImplementedError

    async def _pass(self, data: bytes, target: asyncio.StreamWriter, fate: Fate, *, answers: bool) -> bool:
        """Send one piece on, as far as it may go. False: the connection ends here, with a reset."""
        raise NotImplementedError

    async def open(self) -> asyncio.Server:
        """Listen on a free port of this machine."""
        server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._serving.add(task)  # the loop itself refers to tasks only weakly
        try:
            with suppress(asyncio.CancelledError):  # the doors close: asyncio would tell it as an error of ours
                await self._connect(client, back)
        finally:
            self._serving.discard(task)

    async def _connect(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        fate = self._begin()
        if fate is None:
            _abort(back)
            return
        try:
            server, forth = await asyncio.open_connection(*self.upstream)
        except OSError:
            _abort(back)
            return
        ends = (back, forth)
        pumps = [
            asyncio.create_task(self._pump(client, forth, ends, fate, answers=False)),
            asyncio.create_task(self._pump(server, back, ends, fate, answers=True)),
        ]
        try:
            await asyncio.gather(*pumps)
        finally:
            for end in ends:
                _abort(end)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        fate: Fate,
        *,
        answers: bool,
    ) -> None:
        """Carry bytes one way until either side ends, or `_pass` ends both."""
        try:
            while data := await source.read(_CHUNK):
                if not await self._pass(data, target, fate, answers=answers):
                    for end in ends:
                        _abort(end)
                    return
            if target.can_write_eof():
                target.write_eof()
        except (OSError, asyncio.IncompleteReadError):
            for end in ends:
                _abort(end)


@dataclass
class ToxicProxy(Door[str]):
    """One door to one upstream. Whatever is set counts for open connections too."""

    name: str
    upstream: tuple[str, int]
    port: int = 0
    dose: Dose | None = None
    struck: Counter[str] = field(default_factory=Counter)
    """How often each toxic did something to a connection: one that met nobody was no fault."""
    _serving: set[asyncio.Task[None] | None] = field(default_factory=set, repr=False)

    def _begin(self) -> str | None:
        if self._is(Toxic.RESET):
            self._meet(Toxic.RESET)
            return None
        return self.name

    async def _pass(self, data: bytes, target: asyncio.StreamWriter, fate: str, *, answers: bool) -> bool:
        dose = self.dose
        if dose is None:
            return await send(target, data)
        if dose.toxic is Toxic.LOSE_ANSWER and not answers:
            return await send(target, data)
        if dose.toxic is Toxic.CUT and len(data) <= dose.amount:
            return await send(target, data)
        self._meet(dose.toxic)
        if dose.toxic is Toxic.LATENCY:
            await asyncio.sleep(dose.amount)
            return await send(target, data)
        if dose.toxic is Toxic.BLACK_HOLE:
            while self._is(Toxic.BLACK_HOLE):  # nobody hears anything; what was sent meanwhile is gone
                await asyncio.sleep(_LIFT_SECONDS)
            return False
        if dose.toxic is Toxic.CUT:
            await send(target, data[: int(dose.amount)])
        return False

    def _is(self, toxic: Toxic) -> bool:
        return self.dose is not None and self.dose.toxic is toxic

    def _meet(self, toxic: Toxic) -> None:
        self.struck[toxic.value] += 1


class ProxyLoop:
    """The event loop of all doors, in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def open(self, name: str, host: str, port: int) -> ToxicProxy:
        """A proxy in front of this address."""
        proxy = ToxicProxy(name, (host, port))
        self.serve(proxy)
        return proxy

    def serve(self, door: Door[Any]) -> None:
        """Open this door, until the loop ends."""
        self._servers.append(self._run(door.open()))

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_SECONDS)


async def send(target: asyncio.StreamWriter, data: bytes) -> bool:
    """Send it all; True, as a piece that was passed on."""
    target.write(data)
    await target.drain()
    return True


def _abort(end: asyncio.StreamWriter) -> None:
    """Close with a reset, as a peer that died does: the other side must not take it for an orderly end."""
    connection = end.get_extra_info("socket")
    if connection is not None and end.transport is not None and not end.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.transport.abort()
