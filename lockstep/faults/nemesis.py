"""The nemesis: a seeded thread that does something bad every few seconds, and counts what it did.

What belongs here: which fault, when, to whom, and making it undone. What does not: processes and proxies themselves
(lab.py, proxy.py). The schedule follows from the seed; what it meets depends on the machine, so a run is not repeatable
to the last call. The simulation is.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.faults.proxy import Dose, Toxic, ToxicProxy
from lockstep.kernel.errors import InvalidInput, LockstepError
from lockstep.kernel.logs import get_logger

_log = get_logger(__name__)
_STOP_SECONDS = 20.0


@dataclass
class Child:
    """A process of the lab: a service or a worker. `revive` starts it again if it died, until it was ended.

    `has_clock`: its wall clock can be made to jump (hand.py). `jumped`: the signals that did so and were not undone.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    pause_seconds: float
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    has_clock: bool = False
    jumped: list[signal.Signals] = field(default_factory=list)
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def revive(self) -> bool:
        """Start it if it does not run. True if it was started."""
        with self._lock:
            if self._ended or (self.process is not None and self.process.poll() is None):
                return False
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    self.command, env=dict(self.environment), stdout=log, stderr=log, start_new_session=True
                )
        self.starts += 1
        self.jumped.clear()  # a new process has the machine's clock
        return True

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal; False if it is not there."""
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.send_signal(number)
        return True

    def jump(self, number: signal.Signals) -> bool:
        """Let its wall clock jump; False if it has none of its own, or is not there."""
        if not self.has_clock or not self.send(number):
            return False
        self.jumped.append(number)
        return True

    def set_right(self) -> None:
        """Undo every jump."""
        back = {signal.SIGUSR1: signal.SIGUSR2, signal.SIGUSR2: signal.SIGUSR1}
        for number in self.jumped:
            self.send(back[number])
        self.jumped.clear()

    def end(self) -> None:
        """End it for good, in good order if it can: a nemesis that calms down meanwhile must not start it again."""
        with self._lock:
            self._ended = True
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        if self.process is None:
            return
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Nemesis:
    """Does the damage.

    Attributes:
        seed: Decides what and when.
        children: Services and workers that may be killed and stopped.
        proxies: Doors that may be poisoned.
        part_pid: The process of a part of the stack, by name; None if it does not run.
        parts: Parts that may be killed.
        deeds: Other bad ideas by name: repeated messages, operators' deeds, part restarts.
    """

    seed: int
    children: Sequence[Child]
    proxies: Sequence[ToxicProxy]
    part_pid: Callable[[str], int | None]
    parts: Sequence[str]
    deeds: Mapping[str, Callable[[random.Random], bool]]
    counts: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)
    _paused: list[tuple[Child, threading.Timer]] = field(default_factory=list)

    def work(self) -> None:
        """Damage until it is over, then leave nothing damaged."""
        chance = random.Random(self.seed)  # noqa: S311  # reproducible on purpose
        while not self.over.wait(chance.uniform(0.3, 1.5)):
            for child in self.children:
                child.revive()
            self._strike(chance)
        self.calm()

    def calm(self) -> None:
        """Everything that was done is undone: clean doors, nobody paused, clocks right, everybody alive."""
        for proxy in self.proxies:
            proxy.dose = None
        for child, timer in self._paused:
            timer.cancel()
            child.send(signal.SIGCONT)
        for child in self.children:
            child.set_right()
            child.revive()

    def faults(self) -> dict[str, int]:
        """Faults by kind; a toxic counts each time that it did something to a connection."""
        met: Counter[str] = Counter()
        for proxy in self.proxies:
            for toxic, count in proxy.struck.items():
                met[f"{toxic} ({proxy.name})"] += count
        return dict(sorted((self.counts + met).items()))

    def _strike(self, chance: random.Random) -> None:
        kind = chance.choices(("kill", "pause", "toxic", "part", "deed", "clock"), (25, 12, 40, 6, 17, 10))[0]
        child = chance.choice(self.children)
        if kind == "kill":
            self._count(f"kill -9 ({child.name})", child.send(signal.SIGKILL))
        elif kind == "pause":
            self._pause(child)
        elif kind == "part":
            self._kill_part(chance.choice(self.parts))
        elif kind == "toxic":
            self._poison(chance)
        elif kind == "clock":
            self._count(f"clock jump ({child.name})", child.jump(chance.choice((signal.SIGUSR1, signal.SIGUSR2))))
        else:
            name = chance.choice(sorted(self.deeds))
            self._count(name, self._do(name, chance))

    def _pause(self, child: Child) -> None:
        """SIGSTOP for longer than its lease; somebody wakes it up later."""
        if not child.send(signal.SIGSTOP):
            return
        self._count(f"pause beyond the lease ({child.name})", True)
        timer = threading.Timer(child.pause_seconds, child.send, [signal.SIGCONT])
        timer.daemon = True
        timer.start()
        self._paused.append((child, timer))

    def _poison(self, chance: random.Random) -> None:
        proxy = chance.choice(self.proxies)
        toxic = chance.choice(list(Toxic))
        amount = chance.uniform(0.05, 0.8) if toxic is Toxic.LATENCY else chance.choice((0, 20, 200, 5000))
        seconds = chance.uniform(0.3, 2.0) if toxic is Toxic.LOSE_ANSWER else chance.uniform(1.0, 5.0)
        proxy.dose = Dose(toxic, amount)
        self.over.wait(seconds)
        proxy.dose = None

    def _kill_part(self, part: str) -> None:
        pid = self.part_pid(part)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._count(f"kill -9 of a part ({part})", True)

    def _do(self, name: str, chance: random.Random) -> bool:
        try:
            return self.deeds[name](chance)
        except InvalidInput:  # refused with its reason, as when there is nothing left to stop
            return False
        except (LockstepError, OSError) as error:
            _log.warning("a deed failed", deed=name, error=str(error))
            return False

    def _count(self, what: str, happened: bool) -> None:
        self.counts[what] += int(happened)
