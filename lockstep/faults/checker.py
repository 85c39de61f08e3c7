"""The checker: judges a history and the stores as they were found at the end. Pure; knows no pipeline by name.

What belongs here: the promises, each as one function from what was seen to violations. What does not: collecting
(simulation.py, lab.py). It reads nothing else, so whatever it finds can be shown to a person with two files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from lockstep.faults.history import Event, History, Outcome, Verb


class Promise(StrEnum):
    """What the platform promises, and the name of its violation."""

    PREFIX = "gap-free prefix"
    ONCE = "exactly once"
    ACKNOWLEDGED = "nothing acknowledged is lost"
    REFUSED = "what failed for certain changed nothing"
    STABLE = "terminal states are stable"
    BYTES = "what is promised is what is there"
    FENCE = "a stale fence changed nothing"
    TERMINAL = "everything is terminal after the faults stop"
    ONE_UNIT = "one key is one unit"
    LIMITS = "no limit is exceeded"


@dataclass(frozen=True)
class Unit:
    """A unit as its store has it in the end.

    `promised` and `found` are fingerprints: what the records say, and what is there when somebody looks.
    """

    unit: str
    state: str
    terminal: bool
    key: str | None = None
    promised: str | None = None
    found: str | None = None


@dataclass(frozen=True)
class Effect:
    """One effect of a unit in a sink, in the order in which the sink committed it."""

    lane: str
    unit: str
    fence: int = 0


@dataclass(frozen=True)
class Limit:
    """Something that may happen so often and no more: retries, reruns, jobs at the same time."""

    unit: str
    what: str
    found: int
    allowed: int


@dataclass
class Stores:
    """The stores in the end.

    Attributes:
        units: Every unit that the stores know.
        chains: For each ordered lane, what its source holds, in the source's order.
        effects: What the sinks hold, in the order of their commits.
        writes: Every fenced write that a store accepted, as (lane, fence), in order.
        limits: What was counted, beside what is allowed.
    """

    units: list[Unit] = field(default_factory=list)
    chains: dict[str, list[str]] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    writes: list[tuple[str, int]] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)

    def add(self, other: Stores) -> None:
        """Put the stores of another pipeline beside these."""
        self.units += other.units
        self.chains |= other.chains
        self.effects += other.effects
        self.writes += other.writes
        self.limits += other.limits


class Violation(NamedTuple):
    """A broken promise: which, of what, and the words for a person."""

    promise: Promise
    unit: str
    words: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.unit}: {self.words}"


def check(history: History, stores: Stores) -> list[Violation]:
    """Every violation that the history and the stores show; none if all promises hold."""
    return [violation for promise in _PROMISES for violation in promise(history.events, stores)]


def _prefix(_: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    """What a lane has applied are the first units of its chain, in order. A second effect is `_once`'s to report."""
    for lane, chain in stores.chains.items():
        applied = list(dict.fromkeys(effect.unit for effect in stores.effects if effect.lane == lane))
        for place, unit in enumerate(applied):
            if place >= len(chain) or chain[place] != unit:
                due = chain[place] if place < len(chain) else "nothing"
                yield Violation(Promise.PREFIX, f"{lane}/{unit}", f"applied in place {place} where {due} was due")
                break


def _once(_: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    for (lane, unit), count in Counter((effect.lane, effect.unit) for effect in stores.effects).items():
        if count > 1:
            yield Violation(Promise.ONCE, f"{lane}/{unit}", f"{count} effects")


def _acknowledged(events: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    known = {one.unit for one in stores.units}
    for event in events:
        if event.verb == Verb.WRITE and event.outcome is Outcome.OK and (event.unit or event.key) not in known:
            yield Violation(Promise.ACKNOWLEDGED, str(event.unit or event.key), "acknowledged, and no store knows it")


def _refused(events: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    """A key whose every attempt failed for certain left nothing behind."""
    ends: dict[str, set[Outcome]] = {}
    begun: Counter[str] = Counter()
    for event in events:
        if event.verb != Verb.WRITE:
            continue
        begun[event.key] += 1 if event.outcome is Outcome.INVOKE else -1
        if event.outcome is not Outcome.INVOKE:
            ends.setdefault(event.key, set()).add(event.outcome)
    made = {one.key for one in stores.units}
    for key, outcomes in ends.items():
        if outcomes == {Outcome.FAIL} and begun[key] == 0 and key in made:
            yield Violation(Promise.REFUSED, key, "every attempt was refused, and there is a unit of it")


def _stable(events: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    """A terminal state that was seen is the state of every read that began after it, and of the store.

    A retry by a person may change it. From its invocation until its answer, and for ever if there is none, nothing is
    concluded: it may take effect at any moment.
    """
    seen: dict[str, str] = {}
    retries: Counter[str] = Counter()
    begun: dict[int, tuple[int, str | None]] = {}
    for event in events:
        key = event.key
        if event.verb == Verb.RETRY:
            seen.pop(key, None)
            retries[key] += {Outcome.INVOKE: 1, Outcome.INFO: 0}.get(event.outcome, 1)
        elif event.verb == Verb.READ and event.outcome is Outcome.INVOKE:
            begun[event.op] = (retries[key], seen.get(key))
        elif event.verb == Verb.READ and event.outcome is Outcome.OK and begun.get(event.op, (-1,))[0] == retries[key]:
            before = begun[event.op][1]
            if before is not None and event.state != before:
                yield Violation(Promise.STABLE, key, f"was {before} for good, then {event.state}")
            elif event.terminal and event.state is not None and retries[key] % 2 == 0:
                seen.setdefault(key, event.state)
    final = {one.unit: one.state for one in stores.units}
    for unit, state in seen.items():
        if unit in final and final[unit] != state:
            yield Violation(Promise.STABLE, unit, f"was {state} for good, the store says {final[unit]}")


def _bytes(_: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    for one in stores.units:
        if one.promised is not None and one.promised != one.found:
            yield Violation(Promise.BYTES, one.unit, f"{one.promised} is promised, {one.found} is there")


def _fence(_: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    """Fences only rise: a write under a lower one than before was made by a worker that had been replaced."""
    newest: dict[str, int] = {}
    for lane, fence in stores.writes:
        if fence < newest.get(lane, fence):
            yield Violation(Promise.FENCE, lane, f"a write under fence {fence} after fence {newest[lane]}")
        newest[lane] = max(fence, newest.get(lane, fence))


def _terminal(_: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    for one in stores.units:
        if not one.terminal:
            yield Violation(Promise.TERMINAL, one.unit, f"still {one.state}")


def _one_unit(events: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    made: dict[str, set[str]] = {}
    for event in events:
        if event.verb == Verb.WRITE and event.outcome is Outcome.OK and event.unit is not None:
            made.setdefault(event.key, set()).add(event.unit)
    for one in stores.units:
        if one.key is not None:
            made.setdefault(one.key, set()).add(one.unit)
    for key, units in made.items():
        if len(units) > 1:
            yield Violation(Promise.ONE_UNIT, key, f"became {', '.join(sorted(units))}")


def _limits(_: Sequence[Event], stores: Stores) -> Iterator[Violation]:
    for one in stores.limits:
        if one.found > one.allowed:
            yield Violation(Promise.LIMITS, one.unit, f"{one.found} {one.what}, {one.allowed} allowed")


_PROMISES: Sequence[Callable[[Sequence[Event], Stores], Iterator[Violation]]] = (
    _prefix,
    _once,
    _acknowledged,
    _refused,
    _stable,
    _bytes,
    _fence,
    _terminal,
    _one_unit,
    _limits,
)


def by_promise(violations: Sequence[Violation]) -> Mapping[str, int]:
    """How many of each, every promise named."""
    found = Counter(one.promise for one in violations)
    return {promise.value: found[promise] for promise in Promise}
