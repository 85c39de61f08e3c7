"""Where identifiers come from: the injected id source, real or seeded.

What belongs here: making new identifiers. What does not: natural keys such as vault, stop or chunk number,
which are part of the data and are never generated.
"""

from __future__ import annotations

import os
import random
import threading
import uuid
from typing import Protocol

from lockstep.kernel.clock import Clock, SystemClock

_COUNTER_BITS = 12
_RANDOM_BITS = 62


class IdSource(Protocol):
    """Makes identifiers that are unique for ever, as UUID strings."""

    def new_id(self) -> str:
        """A new identifier, never returned before."""
        ...


class SystemIds:
    """UUIDv7: sorts by creation time, so that indexes grow at one end and people can read the age of a row.

    Within one source the ids are strictly increasing, even in the same millisecond and when the wall clock
    is set back. Between processes the order is only as good as their clocks: never use it to decide which
    write is newer.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._last_tick = -1  # milliseconds and counter as one number, so that overflow carries by itself

    def new_id(self) -> str:
        """The next time-ordered identifier."""
        millis = int(self._clock.now().timestamp() * 1000)
        with self._lock:
            self._last_tick = max(self._last_tick + 1, millis << _COUNTER_BITS)
            tick = self._last_tick
        return str(_version7(tick, int.from_bytes(os.urandom(8), "big")))


class SeededIds:
    """The same identifiers for the same seed: for simulations and for tests that compare whole outcomes."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311  # reproducible on purpose; never used for secrets
        self._lock = threading.Lock()
        self._tick = 0

    def new_id(self) -> str:
        """The next identifier of the sequence, in the shape of a UUIDv7 and increasing."""
        with self._lock:
            self._tick += 1
            return str(_version7(self._tick, self._random.getrandbits(_RANDOM_BITS)))


def _version7(tick: int, noise: int) -> uuid.UUID:
    """Lay out RFC 9562 version 7: 48 bits of milliseconds, 12 bits of counter, 62 random bits."""
    millis, counter = tick >> _COUNTER_BITS, tick & ((1 << _COUNTER_BITS) - 1)
    value = (millis & ((1 << 48) - 1)) << 80
    value |= 0x7 << 76 | counter << 64 | 0b10 << 62
    value |= noise & ((1 << _RANDOM_BITS) - 1)
    return uuid.UUID(int=value)
