"""Deterministic simulation: the domain code of the four pipelines under random faults, by seed.

What belongs here: who acts in which round, when faults stop, and the verdict. What does not: the worlds themselves and
the checker. A seed and a commit reproduce a run to the last call: `lockstep faults replay SEED` prints it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Protocol

from lockstep.faults.checker import Promise, Stores, Violation, check
from lockstep.faults.exports_world import ExportsWorld, wanted
from lockstep.faults.history import History
from lockstep.faults.readiness_world import ReadinessWorld
from lockstep.faults.schedule import PAUSE_SECONDS, Actor, RandomPlan, World
from lockstep.faults.ticks_world import TicksWorld
from lockstep.faults.windows_world import WindowsWorld
from lockstep.kernel.crash import hanging_by

TAKEOVER_SECONDS = PAUSE_SECONDS - 40
CALM_ROUNDS = 30
"""Rounds without faults within which everything must become terminal."""
CALM_MINUTES = 100
"""For readiness: less than a clock jumps, so that no execution may wait until a wrong clock is right."""


@dataclass
class Result:
    """One seed's run: all that is needed to judge it, and all that is needed to understand it."""

    seed: int
    history: History = field(default_factory=History)
    stores: Stores = field(default_factory=Stores)
    faults: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    calls: int = 0


class _Settling(Protocol):
    def is_settled(self) -> bool: ...

    def stores(self) -> Stores: ...


Act = Callable[[Actor], object]


def simulate(seed: int, *, rate: float = 0.05, only: str | None = None) -> Result:
    """Run the four pipelines, or one, under the faults of this seed, let them recover, and judge what is left."""
    result = Result(seed)
    for number, (name, run) in enumerate(_PIPELINES.items()):
        if only not in (None, name):
            continue
        world = World(seed * len(_PIPELINES) + number)
        plan = RandomPlan(world.random, rate)
        world.plan = plan
        with hanging_by(world.hang):
            settled = run(world, result.history, plan)
        result.stores.add(settled.stores())
        result.faults += world.faults
        result.trace += world.trace
        result.calls += len(world.trace)
        result.violations += [
            Violation(Promise.TERMINAL, f"seed {seed}", f"an actor ended unexpectedly: {error!r}")
            for error in world.unexpected
        ]
    result.violations += check(result.history, result.stores)
    return result


def _windows(world: World, history: History, plan: RandomPlan) -> _Settling:
    chance = world.random
    this = WindowsWorld(world, history, windows=chance.randint(4, 8))
    this.vendor.damaged |= {one.stop for one in this.vendor.chain if chance.random() < 0.15}
    for number in range(chance.randint(3, 5)):
        late = [one for one in this.vendor.chain if one.stop not in this.vendor.published]
        for window in chance.sample(late, min(len(late), chance.randint(0, 3))):  # in any order: some are late
            this.publish(window)
        acts: list[tuple[str, Act]] = [("producer", this.produce), ("worker", this.drain), ("rival", this.drain)]
        acts += [("reader", this.look)] if chance.random() < 0.5 else []
        acts += [("operator", this.operate)] if chance.random() < 0.4 else []
        _round(world, number, acts, [("heir", this.drain)])
        if chance.random() < 0.15:
            this.lose_row()
        if chance.random() < 0.1:
            this.meddle()
    plan.active = False
    for window in this.vendor.chain:
        if window.stop not in this.vendor.published:
            this.publish(window)
    _recover(world, this, [("producer", this.produce), ("operator", this.operate), ("worker", this.drain)])
    _round(world, 99, [("reader", this.look)])
    return this


def _exports(world: World, history: History, plan: RandomPlan) -> _Settling:
    chance = world.random
    this = ExportsWorld(world, history)
    for number in range(chance.randint(3, 6)):
        acts: list[tuple[str, Act]] = [("worker", this.work), ("rival", this.work), ("reader", this.look)]
        for client in range(chance.randint(0, 2)):
            acts.append((f"client{client}", _submission(this, f"{number}-{client}", wanted(chance))))
        acts += [("operator", this.operate)] if chance.random() < 0.4 else []
        _round(world, number, acts, [("heir", this.work)])
    plan.active = False
    _recover(world, this, [("worker", this.work)])
    _round(world, 99, [("reader", this.look)])
    return this


def _ticks(world: World, history: History, plan: RandomPlan) -> _Settling:
    chance = world.random
    this = TicksWorld(world, history)
    made = 0
    for number in range(chance.randint(3, 5)):
        acts: list[tuple[str, Act]] = [("relay", this.relay), ("sensor", this.look), ("rival", this.look)]
        for _ in range(chance.randint(0, 2)):
            made += 1
            name = f"{world.seed}-tick-{made:03}"
            if chance.random() < 0.1:
                this.delta.poison.add(name)
            acts.append((f"agent{made}", _finalization(this, name)))
        acts += [("sweep", this.sweep)] if chance.random() < 0.3 else []
        acts += [("reader", this.watch)] if chance.random() < 0.5 else []
        acts += [("operator", this.operate)] if chance.random() < 0.4 else []
        _round(world, number, acts, [("sweep", this.sweep), ("heir", this.look)])
        _disturb(this, chance.random())
    plan.active = False
    calm: list[tuple[str, Act]] = [("relay", this.relay), ("sweep", this.sweep), ("sensor", this.look)]
    _recover(world, this, [*calm, ("operator", this.operate), ("housekeeping", this.housekeep)])
    _round(world, 99, [("reader", this.watch)])
    return this


def _readiness(world: World, history: History, plan: RandomPlan) -> _Settling:
    chance = world.random
    this = ReadinessWorld(world, history)
    for number in range(chance.randint(2, 4)):
        acts: list[tuple[str, Act]] = [("driver", this.drive), ("rival", this.drive)]
        acts += [("client", this.mark)] if chance.random() < 0.5 else []
        acts += [("operator", this.operate)] if chance.random() < 0.7 else []
        acts += [("watchdog", this.watch)] if chance.random() < 0.2 else []
        acts += [("reader", this.look)] if chance.random() < 0.5 else []
        late: list[tuple[str, Act]] = [("job", this.report)] if chance.random() < 0.5 else []
        _round(world, number, acts, [*late, ("heir", this.drive)])
        this.change_input()
    plan.active = False
    this.calm_down()
    _recover(world, this, [("driver", this.drive), ("watchdog", this.watch)], rounds=CALM_MINUTES // 2, seconds=120)
    _round(world, 99, [("reader", this.look)])
    return this


_PIPELINES: Mapping[str, Callable[[World, History, RandomPlan], _Settling]] = {
    "windows": _windows,
    "exports": _exports,
    "ticks": _ticks,
    "readiness": _readiness,
}


def _disturb(this: TicksWorld, chance: float) -> None:
    """What a standard queue may do to messages at any time."""
    if chance < 0.2:
        this.sqs.repeat(this.world.random.choice)
        this.world.faults["message repeated and reordered"] += 1
    elif chance < 0.35:
        this.sqs.lose(this.world.random.choice)
        this.world.faults["message lost"] += 1


def _round(world: World, number: int, acts: Iterable[tuple[str, Act]], late: Iterable[tuple[str, Act]] = ()) -> None:
    """These act at the same time; the seed decides whose step is next.

    Those of `late` come when every lease has run out, and before anybody who was paused wakes up: they take over.
    """
    for name, act in acts:
        world.start(f"{name}.{number}", act)
    for place, (name, act) in enumerate(late):
        world.start(f"{name}.{number}", act).asleep_until = world.time.monotonic() + TAKEOVER_SECONDS + place
    world.run()


def _recover(
    world: World,
    this: _Settling,
    acts: list[tuple[str, Act]],
    *,
    rounds: int = CALM_ROUNDS,
    seconds: float = PAUSE_SECONDS,
) -> None:
    """Faults have stopped: one after another, until everything is settled or the patience is spent."""
    for number in range(rounds):
        if this.is_settled():
            break
        for name, act in acts:
            world.start(f"{name}.calm{number}", act)
            world.run()
        world.time.pass_by(seconds)


def _submission(this: ExportsWorld, key: str, pairs: list[tuple[str, date]]) -> Act:
    return lambda actor: this.submit(actor, key, pairs)


def _finalization(this: TicksWorld, tick_id: str) -> Act:
    return lambda actor: this.finalize(actor, tick_id)
