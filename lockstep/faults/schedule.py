"""A seeded world in which several workers run, one step at a time, and any step may go wrong.

What belongs here: whose step is next, what goes wrong at it, and what time it is. What does not: the parts that are
stepped on (parts.py and the worlds). Actors are threads, but only the one that holds the baton runs, and it gives the
baton back at every call of a part: so the order of all calls is a function of the seed alone.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from lockstep.kernel.crash import CrashInjected
from lockstep.kernel.errors import LockstepError, Transient

T = TypeVar("T")

PAUSE_SECONDS = 400.0
"""Longer than every lease in the code: whoever is paused so long was replaced."""

COMMITS = frozenset(
    {
        "sink.apply",
        "claims.guard",
        "claims.commit",
        "s3.put_object",
        "spark.merge",
        "silver.complete",
        "ledger.transact_write_items",
        "jobs.start",
    }
)
"""Calls that decide something: chance alone would strike them too seldom."""

_STEP_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0
_BEGINNING = datetime(2026, 1, 5, tzinfo=UTC)


class Fault(StrEnum):
    """What may happen at one call of a part."""

    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"
    LOST_REQUEST = "request lost"
    LOST_ANSWER = "answer lost after commit"
    PAUSE = "pause beyond the lease"
    CLOCK_JUMP = "clock jump"


class Plan(Protocol):
    """Decides what goes wrong."""

    def fault(self, actor: Actor, step: str) -> Fault | None:
        """The fault at this call, if any."""
        ...


@dataclass
class RandomPlan:
    """Faults by chance, until told to stop."""

    random: random.Random
    rate: float = 0.06
    active: bool = True

    def fault(self, actor: Actor, step: str) -> Fault | None:
        """One of them, now and then."""
        rate = self.rate * 5 if step in COMMITS else self.rate
        if not self.active or self.random.random() >= rate:
            return None
        kinds: list[Fault] = [*Fault, Fault.PAUSE]  # twice: it must strike between two writes to matter
        return self.random.choice(kinds)


@dataclass
class Script:
    """Exactly these faults: at the nth call of an actor whose name begins so, counted over all of its kind.

    `step` narrows it to calls of one part or one operation, such as `sink.apply`.
    """

    fault_kind: Fault
    nth: int
    actor: str = ""
    step: str = ""
    calls: int = 0
    fired: bool = False

    def fault(self, actor: Actor, step: str) -> Fault | None:
        """The fault, once."""
        if self.fired or not actor.name.startswith(self.actor) or not step.startswith(self.step):
            return None
        self.calls += 1
        if self.calls != self.nth:
            return None
        self.fired = True
        return self.fault_kind


class Never:
    """Nothing goes wrong."""

    def fault(self, actor: Actor, step: str) -> Fault | None:
        """None, ever."""
        return None


class SimulatedTime:
    """The parts' own time: moves a little at every step, and as far as anybody sleeps."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> datetime:
        """The present."""
        return _BEGINNING + timedelta(seconds=self._seconds)

    def monotonic(self) -> float:
        """Seconds since the beginning."""
        return self._seconds

    def sleep(self, seconds: float) -> None:
        """Pass whole seconds: waits carry jitter from the machine's own chance, and a seed must not depend on it."""
        if seconds > 0:
            self.pass_by(math.ceil(seconds))

    def pass_by(self, seconds: float) -> None:
        """Let time go on."""
        self._seconds += seconds


class ActorClock:
    """One process's clock: the world's time, with a wall clock that may be wrong."""

    def __init__(self, time: SimulatedTime) -> None:
        self._time = time
        self.skew = 0.0

    def now(self) -> datetime:
        """What this process believes."""
        return self._time.now() + timedelta(seconds=self.skew)

    def monotonic(self) -> float:
        """A step of the wall clock does not move it."""
        return self._time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self._time.sleep(seconds)


def _baton() -> threading.Lock:
    """A lock that one thread takes and another gives back: cheaper than a semaphore, and it is most of the cost."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Actor:
    """One process: a worker, a client, a sensor, a person."""

    def __init__(
        self, name: str, body: Callable[[Actor], Any], clock: ActorClock, hand_on: Callable[[Actor | None], None]
    ) -> None:
        self.name = name
        self.clock = clock
        self.dead = False
        self.ended = False
        self.asleep_until = 0.0
        self.result: Any = None
        self.error: BaseException | None = None
        self._body = body
        self._hand_on = hand_on
        self._go = _baton()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self.alone = False
        """Nobody else is there: the baton stays, which saves most of a run's time."""

    def go(self) -> None:
        """Take the baton."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._go.release()

    def yield_baton(self) -> None:
        """Called by whatever thread works for this actor: whose turn is next? If it is another's, wait for the own."""
        if self._started and not self.alone:
            self._hand_on(self)

    def wait(self) -> None:
        """Until the baton comes back."""
        self._go.acquire()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._body(self)
        except CrashInjected as death:
            self.error = death
        except Exception as error:  # an actor's failure is part of the run; the checker judges what it left
            self.error = error
        finally:
            self.ended = True
            self._hand_on(None)


@dataclass
class World:
    """Time, chance, actors and the plan of faults."""

    seed: int
    plan: Plan = field(default_factory=Never)
    time: SimulatedTime = field(default_factory=SimulatedTime)
    faults: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311  # reproducible on purpose
        self._actors: list[Actor] = []
        self._over = _baton()
        self._turns = 0
        self._at_work: Actor | None = None
        self.unexpected: list[BaseException] = []

    def start(self, name: str, body: Callable[[Actor], Any]) -> Actor:
        """A new process; it runs when `run` gives it turns."""
        actor = Actor(name, body, ActorClock(self.time), self._hand_on)
        self._actors.append(actor)
        return actor

    def run(self) -> None:
        """Give turns until every actor ended. Chance decides the order."""
        seen = self._turns
        self._hand_on(None)
        while not self._over.acquire(timeout=_PATIENCE_SECONDS):
            if seen == self._turns and self._at_work is not None:
                raise Transient(f"{self._at_work.name} does not hand on: it waits for something real.", unit="world")
            seen = self._turns
        for actor in self._actors:
            if actor.error is not None and not isinstance(actor.error, CrashInjected | LockstepError):
                self.unexpected.append(actor.error)
        self._actors.clear()

    def call(self, actor: Actor, step: str, action: Callable[[], T], lost: Callable[[str], Exception]) -> T:
        """One call of a part by an actor: the only place where anything goes wrong.

        Args:
            actor: Who calls. A dead one is refused, so that no `finally` of a killed process does anything.
            step: What it calls, `part.operation`.
            action: The call itself; it happens whole or not at all.
            lost: The error that the caller sees when the request or the answer is lost.
        """
        actor.yield_baton()
        if actor.dead:
            raise CrashInjected(step)
        self.time.pass_by(_STEP_SECONDS)
        fault = self.plan.fault(actor, step)
        if fault is not None:
            self.faults[fault.value] += 1
        self.trace.append(f"{actor.name} {step}{f' ! {fault}' if fault else ''}")
        if fault is Fault.CRASH_BEFORE:
            self._die(actor, step)
        if fault is Fault.LOST_REQUEST:
            raise lost(step)
        if fault is Fault.CLOCK_JUMP:
            actor.clock.skew += self.random.choice((-7200.0, -60.0, 60.0, 7200.0))
        if fault is Fault.PAUSE:
            self._pause(actor, PAUSE_SECONDS)
        result = action()
        if fault is Fault.CRASH_AFTER:
            self._die(actor, step)
        if fault is Fault.LOST_ANSWER:
            raise lost(step)
        return result

    def hang(self, seconds: float) -> None:
        """Whoever has the baton sleeps, between two calls; the others go on."""
        if self._at_work is not None:
            self._pause(self._at_work, seconds)

    def _pause(self, actor: Actor, seconds: float) -> None:
        actor.asleep_until = self.time.monotonic() + seconds
        actor.alone = False
        actor.yield_baton()

    def _die(self, actor: Actor, step: str) -> None:
        actor.dead = True
        raise CrashInjected(step)

    def _hand_on(self, holder: Actor | None) -> None:
        """Give the baton to whoever is next. Decided by who has it, so that who is next again needs no other thread."""
        while alive := [one for one in self._actors if not one.ended]:
            ready = [one for one in alive if one.asleep_until <= self.time.monotonic()]
            if not ready:
                self.time.pass_by(min(one.asleep_until for one in alive) - self.time.monotonic())
                continue
            chosen = self._at_work = self.random.choice(ready)
            chosen.alone = len(alive) == 1
            self._turns += 1
            if chosen is not holder:
                chosen.go()
                if holder is not None:
                    holder.wait()
            return
        self._over.release()


class Bound:
    """A part as one actor reaches it: every public method is one step of the world."""

    def __init__(
        self,
        world: World,
        actor: Actor,
        name: str,
        part: Any,
        *,
        lost: Callable[[str], Exception],
        plain: Iterable[str] = (),
    ) -> None:
        self._bound = (world, actor, name, part, lost, frozenset(plain))

    def __getattr__(self, operation: str) -> Any:
        world, actor, name, part, lost, plain = self._bound
        target = getattr(part, operation)
        if operation.startswith("_") or operation in plain or not callable(target) or isinstance(target, type):
            return target

        def stepped(*args: Any, **kwargs: Any) -> Any:
            return world.call(actor, f"{name}.{operation}", lambda: target(*args, **kwargs), lost)

        return stepped


def unreachable(step: str) -> Transient:
    """What a caller of a PostgreSQL store sees when the connection breaks."""
    return Transient("the connection broke; whether the call took effect is unknown.", unit=step)
