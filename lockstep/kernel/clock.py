"""Where time comes from: the injected clock, real or fake.

What belongs here: the only reading of the machine's clock in the domain. What does not: calendars, window
arithmetic or deadlines of one pipeline; those are rules and receive instants as arguments.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for durations; a duration is never two `now()` calls apart."""

    def now(self) -> datetime:
        """The current instant, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait. Zero or less returns at once."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """The current instant, aware, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; a step of the wall clock does not move it."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        if seconds > 0:
            time.sleep(seconds)


class FakeClock:
    """A clock that moves only when told to, safe to share between threads.

    `advance` moves both clocks, as real time does. `jump` moves the wall clock alone, as NTP or an operator
    does, so that a test can show which of the two a piece of code trusts.
    """

    def __init__(self, start: datetime | None = None) -> None:
        start = start or datetime(2026, 1, 1, tzinfo=UTC)
        if start.tzinfo is None:
            raise ValueError("a clock starts at an aware instant")
        self._now = start.astimezone(UTC)
        self._monotonic = 0.0
        self._lock = threading.Lock()
        self.sleeps: list[float] = []

    def now(self) -> datetime:
        """The wall clock as last set."""
        with self._lock:
            return self._now

    def monotonic(self) -> float:
        """Seconds advanced so far."""
        with self._lock:
            return self._monotonic

    def sleep(self, seconds: float) -> None:
        """Advance instead of waiting, and remember the request in `sleeps`."""
        if seconds > 0:
            with self._lock:
                self.sleeps.append(seconds)
            self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let real time pass: both clocks move forward."""
        if seconds < 0:
            raise ValueError("time passes forward; use jump() to set the wall clock back")
        with self._lock:
            self._monotonic += seconds
            self._now += timedelta(seconds=seconds)

    def jump(self, seconds: float) -> None:
        """Step the wall clock, forward or back, while no time passes."""
        with self._lock:
            self._now += timedelta(seconds=seconds)
