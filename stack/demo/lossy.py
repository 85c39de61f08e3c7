"""A bad line: a TCP proxy that resets connections, cuts them in the middle of a request, and swallows answers.

What belongs here: damage, drawn from a seed for each connection in turn. What does not: who talks through it.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from enum import StrEnum
from typing import NamedTuple, Self

_CHUNK = 16 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close() sends RST instead of FIN
_TICK_SECONDS = 0.1


class Fate(StrEnum):
    """What happens to one connection."""

    WHOLE = "worn out in the end"
    REFUSED = "reset at once"
    CUT_REQUEST = "cut in the request"
    LOST_ANSWER = "answer lost"


class Plan(NamedTuple):
    """The fate of a connection, and how many bytes of requests it may carry before it is cut."""

    fate: Fate
    after: int


class Weather:
    """Draws the fate of each connection. The same seed gives the same sequence."""

    def __init__(self, seed: int, loss: float = 0.35, lifetime_bytes: int = 40_000) -> None:
        self._random = random.Random(seed)  # noqa: S311  # reproducible on purpose
        self._loss, self._lifetime = loss, lifetime_bytes

    def next(self) -> Plan:
        """The fate of the next connection."""
        lost, kind = self._random.random(), self._random.randrange(3)
        after = self._random.randrange(1, max(2, self._lifetime // 4))
        if lost >= self._loss:
            return Plan(Fate.WHOLE, self._lifetime)
        fate = (Fate.REFUSED, Fate.CUT_REQUEST, Fate.LOST_ANSWER)[kind]
        return Plan(fate, after if fate is Fate.CUT_REQUEST else self._lifetime)


class LossyProxy:
    """Listens on a free local port and passes bytes on to `target`, as far as the weather lets it.

    No connection lives for ever, so that a client with a pool of them meets the weather again and again.
    """

    def __init__(self, target: tuple[str, int], weather: Weather) -> None:
        self._target, self._weather = target, weather
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_TICK_SECONDS)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._damage: Counter[Fate] = Counter()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def damage(self) -> dict[Fate, int]:
        """How many connections were harmed so far, by what was done to them."""
        with self._lock:
            return dict(self._damage)

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.close()
        with self._lock:
            for one in list(self._open):
                _end(one)
        for thread in self._threads:
            thread.join(timeout=5)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="lossy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            plan = self._weather.next()
            if plan.fate is Fate.REFUSED:
                self._drop(plan.fate, client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:  # the service restarts: for the client, one more bad moment
                _reset(client)
                continue
            server.settimeout(None)
            self._keep(client, server)
            self._start(self._requests, client, server, plan)
            self._start(self._answers, client, server, plan)

    def _requests(self, client: socket.socket, server: socket.socket, plan: Plan) -> None:
        passed = 0
        while data := _read(client):
            passed += len(data)
            if passed > plan.after:
                _send(server, data[: len(data) // 2])
                self._drop(plan.fate, client, server)
                return
            if not _send(server, data):
                break
        self._drop(None, client, server)

    def _answers(self, client: socket.socket, server: socket.socket, plan: Plan) -> None:
        while data := _read(server):
            if plan.fate is Fate.LOST_ANSWER:  # the service did its work; the client never learns of it
                self._drop(plan.fate, client, server)
                return
            if not _send(client, data):
                break
        self._drop(None, client, server)

    def _keep(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._open.update(sockets)

    def _drop(self, why: Fate | None, *sockets: socket.socket) -> None:
        """End a connection: with a reset if it was harmed, in peace if one side had enough."""
        with self._lock:
            if why is not None:
                self._damage[why] += 1
            self._open.difference_update(sockets)
        for one in sockets:
            (_end if why is None else _reset)(one)


def _read(source: socket.socket) -> bytes:
    try:
        return source.recv(_CHUNK)
    except OSError:
        return b""


def _send(target: socket.socket, data: bytes) -> bool:
    try:
        target.sendall(data)
    except OSError:
        return False
    return True


def _reset(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    _end(one, socket.SHUT_RD)


def _end(one: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(how)  # wakes a thread that waits in recv; close alone does not
    one.close()
