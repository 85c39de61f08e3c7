"""Lockstep itself, played by the same scripts: the project's own workers, rules, queue and dispatch code.

Nothing is retold here: the worlds of the four pipelines run the real code on parts in memory.
"""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

from lockstep.exports.model import ChunkStatus
from lockstep.faults.exports_world import OLD, ExportsWorld
from lockstep.faults.history import History
from lockstep.faults.parts import MemoryBucket
from lockstep.faults.readiness_ledger import unit_of
from lockstep.faults.readiness_world import PLANS, ReadinessWorld
from lockstep.faults.schedule import PAUSE_SECONDS, World
from lockstep.faults.ticks_world import TicksWorld
from lockstep.faults.windows_world import QUARTER, START, VAULT, WindowsWorld
from lockstep.readiness.model import Key, PollOutcome
from lockstep.windows.model import QUEUE_TABLE
from tests.faults.models.oracle import Facts
from tests.faults.models.scripts import RIVAL_SECONDS, TICKS_IN_ALL, Scenario, Source, name

_BY_MARKER = {"load": PLANS["load"]._replace(watched=False, downstream=())}
"""Only markers ask for an execution, as in the original: a schedule would ask anyway."""


def run_windows(world: World, scenario: Scenario) -> Facts:
    this = WindowsWorld(world, History(), windows=TICKS_IN_ALL)
    source = Source(scenario)
    windows = {name(number): window for number, window in enumerate(this.vendor.chain)}
    this.vendor.damaged |= {windows[unit].stop for unit in source.damaged}
    for tick in scenario.ticks(world):
        source.advance(tick)
        this.vendor.published |= {windows[unit].stop for unit in source.published}
        producers, workers = [("producer", this.produce)] * scenario.copies, [("worker", this.drain)] * scenario.copies
        scenario.together(world, tick, [*producers, *(workers if scenario.overlaps else [])])
        scenario.together(world, tick, workers)
        scenario.disturb(tick, lambda: _lose_oldest(this))
        world.start(f"operator.{tick}", this.operate)
        world.run()
    units = {window.stop: unit for unit, window in windows.items()}
    effects = [units[one.stop] for one in this.sink.ledger]
    watermark = this.sink.lanes[VAULT].watermark
    finished = {unit for unit, window in windows.items() if window.stop <= watermark}
    assert watermark == START + QUARTER * len(set(effects)), "the watermark and the ledger disagree"
    return Facts(source.expected, [one for one in effects if one in source.expected], finished)


class _Watched(MemoryBucket):
    """A bucket that notices a file that changes under a finished chunk: the same measure as for the other designs."""

    def __init__(self, this: ExportsWorld) -> None:
        super().__init__()
        self._this = this
        self.changed: list[str] = []

    def put_object(self, *, Key: str, Body: bytes, **more: Any) -> dict[str, Any]:  # boto3's names
        answer = super().put_object(Key=Key, Body=Body, **more)
        done = [one for one in self._this.tables.chunks.values() if one.status is ChunkStatus.DONE]
        self.changed += [one.claim.key for one in done if _key(one) == Key]
        return answer


def run_exports(world: World, scenario: Scenario) -> Facts:
    """The messages of the queue are hints: the worker reads the table, so that repeating or losing them is nothing."""
    this = ExportsWorld(world, History())
    this.bucket = watched = _Watched(this)
    source = Source(scenario)
    for tick in scenario.ticks(world):
        if source.advance(tick) and tick < len(source.expected):
            pairs = [(source.expected[tick], OLD)]
            key = f"request-{tick}"
            world.start(f"client.{tick}", lambda actor, key=key, pairs=pairs: this.submit(actor, key, pairs))
            world.run()
        for _ in range(scenario.copies):
            world.start(f"worker.{tick}", this.work)
        if scenario.overlaps:
            world.start(f"worker.{tick}.rival", this.work).asleep_until = world.time.monotonic() + RIVAL_SECONDS
        world.run()
        world.time.pass_by(1)
        scenario.together(world, tick, [("worker", this.work)])
    answered = [event.key for event in this.history.events if event.outcome == "ok"]
    wanted = [unit for number, unit in enumerate(source.expected) if f"request-{number}" in answered]
    chunks = list(this.tables.chunks.values())
    effects = [this.tables.chunks[tuple(one.unit.split("/"))].claim.key for one in this.tables.effects]
    effects += watched.changed
    finished = {one.claim.key for one in chunks if one.status.is_terminal}
    spoiled = {
        one.claim.key for one in chunks if one.status is ChunkStatus.DONE and not this.bucket.objects.get(_key(one))
    }
    return Facts(wanted, [one for one in effects if one in wanted], finished, spoiled, ordered=False)


def run_ticks(world: World, scenario: Scenario) -> Facts:
    this = TicksWorld(world, History())
    source = Source(scenario)
    this.delta.poison |= source.damaged
    for tick in scenario.ticks(world):
        if source.advance(tick) and tick < len(source.expected):
            unit = source.expected[tick]
            world.start(f"agent.{tick}", lambda actor, unit=unit: this.finalize(actor, unit))
            world.run()
        world.start(f"relay.{tick}", this.relay)
        world.run()
        if scenario.repeat:
            this.sqs.repeat(min)
        if scenario.reorder and tick < len(source.expected) - 1:
            continue
        if scenario.reorder:
            this.sqs.messages = dict(reversed(this.sqs.messages.items()))
        if scenario.lose_message and tick == 1:
            this.sqs.lose(min)
        if scenario.overlaps:  # the hint for whoever comes while the sensor is paused
            world.start(f"sweep.{tick}.early", this.sweep).asleep_until = world.time.monotonic() + RIVAL_SECONDS - 10
        scenario.together(world, tick, [("sensor", this.look)] * scenario.copies)
        world.start(f"sweep.{tick}", this.sweep)
        world.start(f"operator.{tick}", this.operate)
        world.run()
        world.time.pass_by(PAUSE_SECONDS * 3)
    answered = [event.key for event in this.history.events if event.outcome == "ok"]
    wanted = [unit for unit in source.expected if unit in answered]
    effects = [tick for tick, _, _ in this.delta.log if tick in wanted]
    finished = {one.tick_id for one in this.ticks.committed_ticks if this.silver.row.watermark >= (one.sequence or 0)}
    return Facts(wanted, effects, finished)


def run_readiness(world: World, scenario: Scenario) -> Facts:
    """No person takes part: drivers come again, and the watchdog."""
    this = ReadinessWorld(world, History(), _BY_MARKER)
    this.calm_down()
    source = Source(scenario)
    keys = {name(number): Key("load", date(2026, 1, 1) + timedelta(days=number)) for number in range(TICKS_IN_ALL)}
    units = {key: unit for unit, key in keys.items()}
    this.jobs.fails = lambda key: _fails_once(source, units[key])
    told = []
    for tick in scenario.ticks(world):
        for unit in source.asked(tick):
            world.start(f"client.{tick}", lambda actor, key=keys[unit]: this.mark_one(actor, key))
            world.run()
        this.late = {key for unit, key in keys.items() if unit not in source.published}
        told += this.stream
        if scenario.repeat:
            this.stream += told[:1]
        for _ in range(2):  # once to start the job, once to see its end
            scenario.together(world, tick, [("driver", this.drive)] * scenario.copies)
        world.start(f"watchdog.{tick}", this.watch)
        world.run()
    answered = {event.key for event in this.history.events if event.outcome == "ok"}
    wanted = [unit for unit in source.expected if unit_of(keys[unit]) in answered]
    good = [one for one in this.jobs.starts if this.jobs.outcome(one) == PollOutcome.SUCCEEDED]
    effects = [units[this.jobs.jobs[one].key] for one in good]
    finished = {units[one.key] for one in this.ledger().executions() if one.status.is_success}
    return Facts(wanted, [one for one in effects if one in wanted], finished, ordered=False)


def _fails_once(source: Source, unit: str) -> bool:
    failed = unit in source.damaged
    source.damaged.discard(unit)
    return failed


def _lose_oldest(this: WindowsWorld) -> None:
    rows = this.dynamo.tables[QUEUE_TABLE]
    if rows:
        del rows[min(rows)]


def _key(chunk) -> str:
    return chunk.receipt.object_key if chunk.receipt else ""
