"""A circuit breaker per evaluator: after many failures in a row it is left alone for a while.

What belongs here: when to ask and when not. What does not: what an answer means for readiness. An honest FAIL is a
success of the evaluator; a permanent error says nothing about whether it is alive.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lockstep.kernel.clock import Clock
from lockstep.readiness.model import Category, TraitResult, TraitStatus

FAILURES_TO_OPEN = 5
FORGET_AFTER_SECONDS = 60.0
OPEN_SECONDS = 30.0


@dataclass
class _Circuit:
    failures: int = 0
    last_failure: float = 0.0
    open_until: float | None = None
    probing_since: float | None = None


class Breaker:
    """Circuits by evaluator. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._circuits: dict[str, _Circuit] = {}
        self._lock = threading.Lock()

    def allows(self, evaluator: str) -> bool:
        """Whether to ask. When the pause is over exactly one caller may try; the others wait for its answer."""
        now = self._clock.monotonic()
        with self._lock:
            circuit = self._circuits.get(evaluator)
            if circuit is None or circuit.open_until is None:
                return True
            if now < circuit.open_until:
                return False
            if circuit.probing_since is not None and now < circuit.probing_since + OPEN_SECONDS:
                return False
            circuit.probing_since = now
            return True

    def record(self, evaluator: str, result: TraitResult) -> bool:
        """Learn from an answer. True if this one opened the circuit."""
        now = self._clock.monotonic()
        with self._lock:
            if result.status is not TraitStatus.ERROR:
                self._circuits.pop(evaluator, None)
                return False
            if result.category is Category.PERMANENT:
                return False
            circuit = self._circuits.setdefault(evaluator, _Circuit())
            if circuit.open_until is None and now - circuit.last_failure > FORGET_AFTER_SECONDS:
                circuit.failures = 0
            circuit.failures, circuit.last_failure = circuit.failures + 1, now
            if circuit.open_until is None and circuit.failures < FAILURES_TO_OPEN:
                return False
            opened = circuit.open_until is None
            circuit.open_until, circuit.probing_since = now + OPEN_SECONDS, None
            return opened

    def is_open(self, evaluator: str) -> bool:
        """Whether the evaluator is being left alone."""
        with self._lock:
            circuit = self._circuits.get(evaluator)
            return circuit is not None and circuit.open_until is not None
