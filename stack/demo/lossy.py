"""A bad line: a TCP proxy that resets connections, cuts them in the middle of a request, and swallows answers.

What belongs here: damage, drawn from a seed for each connection in turn. What does not: who talks through it, and the
sockets (lockstep/faults/proxy.py).
"""

from __future__ import annotations

import random
from asyncio import StreamWriter
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from lockstep.faults.proxy import LOOPBACK, Door, ProxyLoop, send


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


@dataclass
class _Connection:
    """The plan of one connection, and how many bytes of requests it has carried."""

    plan: Plan
    passed: int = 0


class LossyProxy(Door[_Connection]):
    """Listens on a free local port and passes bytes on to `target`, as far as the weather lets it.

    No connection lives for ever, so that a client with a pool of them meets the weather again and again.
    """

    def __init__(self, target: tuple[str, int], weather: Weather) -> None:
        self.upstream, self._weather = target, weather
        self._serving = set()
        self._loop = ProxyLoop()
        self._damage: Counter[Fate] = Counter()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def damage(self) -> dict[Fate, int]:
        """How many connections were harmed so far, by what was done to them."""
        return dict(self._damage)

    def __enter__(self) -> Self:
        self._loop.__enter__()
        self._loop.serve(self)
        return self

    def __exit__(self, *reason: Any) -> None:
        self._loop.__exit__(*reason)

    def _begin(self) -> _Connection | None:
        plan = self._weather.next()
        if plan.fate is Fate.REFUSED:
            self._damage[plan.fate] += 1
            return None
        return _Connection(plan)

    async def _pass(self, data: bytes, target: StreamWriter, fate: _Connection, *, answers: bool) -> bool:
        plan = fate.plan
        if answers:
            if plan.fate is not Fate.LOST_ANSWER:
                return await send(target, data)
        else:
            fate.passed += len(data)
            if fate.passed <= plan.after:
                return await send(target, data)
            await send(target, data[: len(data) // 2])
        self._damage[plan.fate] += 1  # of a lost answer the service did the work; the client never learns of it
        return False
