"""Five hundred ticks while replicas are killed again and again: none lost, none doubled, each chain whole."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.ticks import bronze
from lockstep.ticks.model import TickState
from tests.ticks_fixtures import people
from tests.ticks_replica import Replica
from tests.ticks_world import Sender, World, open_world

pytestmark = [pytest.mark.stack, pytest.mark.long]

SEED = 20260507
ORGS, TICKS = 5, 100
DEADLINE = 1500.0


def _send(replicas: list[Replica], sender: Sender, number: int, previous: str | None, order: random.Random) -> str:
    """What an agent does: put, finalize, ask again, at whichever replica answers."""
    draft = sender.draft(people(number % 7 + 1, number * 10), prev_tick_id=previous)
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        far = sender.at(order.choice(replicas).url)
        try:
            put = far.put(draft.tick_id, 0, draft.parts[0])
            answer = far.finalize(draft) if put.status_code in (200, 202) else put
        except httpx.HTTPError:
            time.sleep(0.2)
            continue
        if answer.status_code == 200:
            return draft.tick_id
        assert answer.status_code in (409, 425, 429, 500, 502, 503), answer.text
        time.sleep(min(2.0, float(answer.headers.get("retry-after", "1"))))
    raise AssertionError(f"{draft.tick_id} was never acknowledged; seed {SEED}")


def _chain(replicas: list[Replica], sender: Sender, seed: int) -> list[str]:
    order, sent = random.Random(seed), []
    for number in range(TICKS):
        sent.append(_send(replicas, sender, number, sent[-1] if sent else None, order))
    return sent


def test_replicas_that_are_killed_all_the_time_lose_and_double_nothing(stack: Any, spark: Any, tmp_path: Path):
    with open_world(stack, ticks_requests_per_second=10_000.0) as world:
        senders = [world.sender() for _ in range(ORGS)]
        replicas = [Replica(world, tmp_path / f"log{n}").ready() for n in range(2)]
        over = threading.Event()
        killer = threading.Thread(target=_kill, args=(world, replicas, over, tmp_path), daemon=True)
        killer.start()
        try:
            with ThreadPoolExecutor(ORGS) as executor:
                work = [executor.submit(_chain, replicas, sender, n) for n, sender in enumerate(senders)]
                sent = [one.result() for one in work]
        finally:
            over.set()
            killer.join(timeout=120)
            for one in replicas:
                one.kill()
        for sender, acknowledged in zip(senders, sent, strict=True):
            _check(world, sender, acknowledged, spark)


def _kill(world: World, replicas: list[Replica], over: threading.Event, folder: Path) -> None:
    order = random.Random(SEED)
    while not over.wait(order.uniform(4, 9)):
        victim = order.randrange(len(replicas))
        replicas[victim].kill()
        replicas[victim] = Replica(world, folder / f"log{victim}").ready()


def _check(world: World, sender: Sender, acknowledged: list[str], spark: Any) -> None:
    chain = world.store.chain(sender.secret.project_id, limit=TICKS + 1)
    assert [tick.tick_id for tick in chain] == acknowledged
    assert {tick.state for tick in chain} == {TickState.COMMITTED}
    path = bronze.table_path(world.settings.lake_bucket, sender.secret.project_id, "people")
    rows = spark.read.format("delta").load(path).groupBy("_tick_id").count().collect()
    expected = {tick_id: number % 7 + 1 for number, tick_id in enumerate(acknowledged)}
    assert {row["_tick_id"]: row["count"] for row in rows} == expected
    for tick_id in acknowledged:
        assert world.audit_row(tick_id) is not None
        assert [left for *_, left in world.sent(tick_id)] == [True, True]
