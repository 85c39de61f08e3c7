"""Readiness: steps per second of the pure core, and of one tick over many pipelines on DynamoDB.

What belongs here: the measurement. Growth compares the time per step of many pipelines with that of a tenth of them in
the same run, so that a slow machine does not decide.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any

from bench.report import Context, Result, Target, median, seconds
from lockstep.kernel.clock import FakeClock
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.settings import load_settings
from lockstep.readiness import rules, timing
from lockstep.readiness.alerts import Dispatcher
from lockstep.readiness.evaluators.builtin import Builtins
from lockstep.readiness.evaluators.runner import Runner
from lockstep.readiness.model import (
    Evaluated,
    ExclusionPlan,
    Key,
    Plan,
    Polled,
    PollOutcome,
    Started,
    Tick,
    TraitPlan,
    TraitResult,
    TraitStatus,
    TriggerPlan,
)
from lockstep.readiness.plane import Plane
from lockstep.readiness.store import Store
from lockstep.readiness.table import DynamoTable
from lockstep.readiness.triggers.base import Triggers
from lockstep.readiness.worker import Driver, Limits
from resources.clients import aws_client
from stack.environment import adopt
from stack.lifecycle import Stack
from stack.provision import TABLES, definition

START = datetime(2026, 3, 10, 8, tzinfo=UTC)
DAY = date(2026, 3, 10)
TRAITS = 5
THREADS = 4
ROUNDS = 5
SMALL_TICKS = 4  # of the tenth, for each tick over all
_LIFE = 10  # events of one whole life, opening included


def run(context: Context) -> Result:
    """Both measurements."""
    result = Result()
    _core(context, result)
    _ticks(context, result)
    return result


def _core(context: Context, result: Result) -> None:
    lives = 2_000 if context.quick else 10_000
    context.say(f"core: {lives} executions from opening to completion")
    # Seconds of this process, not of the wall: the core waits for nothing, and neighbours must not be measured.
    rates = [lives * _LIFE / _cpu_seconds(lives) for _ in range(3)]
    result.samples["core_steps_per_s"] = rates
    result.ratio("core_steps_per_s", max(rates), Target(100_000))


def _cpu_seconds(lives: int) -> float:
    started = time.process_time()
    _live(lives)
    return time.process_time() - started


def _live(lives: int) -> None:
    plan = _plan("core")
    passed = tuple(TraitResult(trait.type, TraitStatus.PASS) for trait in plan.traits)
    failed = (passed[0]._replace(status=TraitStatus.FAIL), *passed[1:])
    moments = [START + timedelta(seconds=31 * place) for place in range(_LIFE)]
    key = Key("core", DAY, "daily")
    for _ in range(lives):
        state = rules.open_execution(plan, key, START).state
        run_id = state.run_id
        events = (
            Tick(),
            Evaluated(run_id, failed),
            Tick(),
            Evaluated(run_id, passed),
            Started(run_id, {"job": "1"}),
            Tick(),
            Polled(run_id, PollOutcome.RUNNING),
            Tick(),
            Polled(run_id, PollOutcome.SUCCEEDED),
        )
        for event, moment in zip(events, moments, strict=False):
            state = rules.step(state, event, moment).state


def _plan(name: str) -> Plan:
    traits = tuple(TraitPlan(f"trait-{number}", evaluator="builtin:tick-lag", ttl=86400) for number in range(TRAITS))
    yesterday = frozenset({DAY - timedelta(days=1)})
    return Plan(name, traits, TriggerPlan("gate"), exclusions=ExclusionPlan(dates=yesterday))


def _ticks(context: Context, result: Result) -> None:
    """Ticks that re-judge waiting pipelines: four traits are cached, one is pushed and says not yet.

    Ticks over many and over a tenth of them take turns, and growth is that of the middle round: a machine that slows
    down meanwhile slows down both.
    """
    many = 200 if context.quick else 1000
    few = many // 10
    Stack(load_settings()).up(["dynamodb"])
    adopt(load_settings())
    with _table() as small, _table() as large:
        ticks = {few: _waiting(small, few), many: _waiting(large, many)}
        for tick in ticks.values():
            tick()  # opens all executions
            tick()  # every connection stands
        read, written = large.items_read, large.items_written
        taken: dict[int, list[float]] = {few: [], many: []}
        growth = []
        for _ in range(ROUNDS):
            before = [seconds(ticks[few]) for _ in range(SMALL_TICKS)]
            taken[few] += before
            taken[many].append(seconds(ticks[many]))
            growth.append(taken[many][-1] / many / (median(before) / few))
        steps = ROUNDS * many
        per_step = {number: median(samples) / number for number, samples in taken.items()}
        for number, samples in taken.items():
            words = f"{median(samples):.2f} s a tick, {1000 * per_step[number]:.2f} ms a step"
            context.say(f"{number} pipelines x {TRAITS} cached traits: {words}")
        result.samples |= {"tick_seconds": taken[many], "growth_per_step": growth}
        result.ratio("steps_per_s", 1 / per_step[many])
        result.ratio("items_read_per_step", (large.items_read - read) / steps)
        result.ratio("items_written_per_step", (large.items_written - written) / steps)
        result.ratio("growth_per_step", median(growth), Target(1.1, at_least=False))


def _waiting(table: DynamoTable, number: int) -> Callable[[], None]:
    """Pipelines that wait; each call is the tick that comes when they are due again."""
    clock, ids = FakeClock(START), SystemIds()
    store = Store(table, ids)
    plans = {name: _plan(name) for name in (f"pipeline-{place:04}" for place in range(number))}
    until = START + timedelta(days=1)
    for name, plan in plans.items():
        store.register(name, {}, origin="bench", since=timing.first_starts(plan, START))
        cached = [TraitResult(f"trait-{place}", TraitStatus.PASS, expires_at=until) for place in range(TRAITS - 1)]
        waiting = TraitResult(f"trait-{TRAITS - 1}", TraitStatus.FAIL, "not yet", expires_at=until, pushed=True)
        store.put_traits(name, Key(name, DAY), [*cached, waiting], START)
    runner = Runner(clock, Builtins(store))
    plane = Plane(store, lambda: plans, plans.get, runner, Triggers({}), Dispatcher([]), clock, ids)
    driver = Driver(plane, Limits(threads=THREADS))

    def tick() -> None:
        clock.advance(31)
        report = driver.tick(until=clock.monotonic() + 600)
        if report.stepped != number:
            raise AssertionError(f"{report.stepped} of {number} stepped: {report}")

    return tick


@contextmanager
def _table() -> Iterator[DynamoTable]:
    client: Any = aws_client("dynamodb", region=load_settings().aws_region)
    (declared,) = [table for table in TABLES if table.name == "readiness"]
    name = f"readiness-bench-{secrets.token_hex(4)}"
    client.create_table(**{**definition(declared), "TableName": name})
    try:
        yield DynamoTable(client, name)
    finally:
        client.delete_table(TableName=name)
