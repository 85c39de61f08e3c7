"""Half a minute without S3, SQS or DynamoDB while agents send and silver follows: no tick is lost or doubled.

The original design's chaos test. Agents, a replica and silver's sensor and worker meet the outage together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.kernel.errors import LockstepError
from lockstep.kernel.migrate import migrate
from lockstep.ticks.silver.intake import sweep
from resources.silver import Silver, open_silver
from tests.ticks_fixtures import people
from tests.ticks_replica import Gate, replica
from tests.ticks_world import Sender, open_world

pytestmark = [pytest.mark.stack, pytest.mark.long]

PARTS = ("s3", "sqs", "dynamodb")
AWAY_SECONDS, DEADLINE = 30.0, 300.0
ORGS, LEAST_TICKS, ROWS = 2, 8, 3


class Agent:
    """Sends tick after tick, each until it is acknowledged, and remembers which were."""

    def __init__(self, sender: Sender) -> None:
        self.sender, self.acknowledged, self.refused = sender, list[str](), 0

    def send_until(self, over: threading.Event) -> None:
        while not over.is_set() or len(self.acknowledged) < LEAST_TICKS:
            self._send(len(self.acknowledged))

    def _send(self, number: int) -> None:
        previous = self.acknowledged[-1] if self.acknowledged else None
        draft = self.sender.draft(people(ROWS, number * ROWS), prev_tick_id=previous)
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                put = self.sender.put(draft.tick_id, 0, draft.parts[0])
                answer = self.sender.finalize(draft) if put.status_code in (200, 202) else put
                if answer.status_code == 200:
                    self.acknowledged.append(draft.tick_id)
                    return
                assert answer.status_code in (425, 429, 503), answer.text
            self.refused += 1
            time.sleep(0.5)
        raise AssertionError(f"{draft.tick_id} was never acknowledged")


@contextmanager
def _followed(silver: Silver, spark: Any) -> Iterator[None]:
    """Silver's sensor, sweep and worker, over and over, as the daemon would run them."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.2):
            with suppress(LockstepError):
                found = silver.intake.look(lambda lane: False)
                for group in found.groups:
                    silver.worker(spark).drain(group.lane.project_id, group.tick_ids, run_id="test")
                again, now = timedelta(seconds=5), timedelta(0)
                sweep(
                    silver.store, silver.dispatches, silver.queue, clock=silver.clock, older_than=now, again_after=again
                )

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=120)


@pytest.mark.parametrize("part", PARTS)
def test_half_a_minute_without_a_part_loses_and_doubles_no_tick_and_all_of_them_reach_silver(
    stack: Any, spark: Any, tmp_path: Path, part: str
):
    environment = stack.site().environment
    gate = Gate(environment[f"AWS_ENDPOINT_URL_{part.upper()}"])
    way = {f"AWS_ENDPOINT_URL_{part.upper()}": gate.address}
    with open_world(stack) as world, pytest.MonkeyPatch.context() as patch:
        assert world.settings.postgres_dsn is not None
        for package in ("lockstep.idempotency", "lockstep.ticks.silver"):
            migrate(world.settings.postgres_dsn.get_secret_value(), package)
        patch.setenv(*next(iter(way.items())))
        with (
            replica(world, tmp_path / "log", **way) as ingest,
            open_silver(world.settings, application_name="test") as silver,
            _followed(silver, spark),
        ):
            agents = [Agent(world.sender().at(ingest.url)) for _ in range(ORGS)]
            over = threading.Event()
            with ThreadPoolExecutor(ORGS) as executor:
                work = [executor.submit(agent.send_until, over) for agent in agents]
                _until(lambda: all(agent.acknowledged for agent in agents))
                gate.shut()
                time.sleep(AWAY_SECONDS)
                gate.open()
                over.set()
                for one in work:
                    one.result()
            _until(lambda: not silver.store.behind())
        assert sum(agent.refused for agent in agents) > 0, "somebody must have met the outage"
        for agent in agents:
            _check(world.settings.lake_bucket, agent, spark)


def _check(lake: str, agent: Agent, spark: Any) -> None:
    project = agent.sender.secret.project_id
    chain = agent.sender.world.store.chain(project, limit=1000)
    assert [tick.tick_id for tick in chain] == agent.acknowledged
    for layer in ("bronze", "silver"):
        rows = spark.read.format("delta").load(f"s3a://{lake}/{layer}/{project}/people").collect()
        assert sorted(row["id"] for row in rows) == list(range(ROWS * len(chain))), layer
    applied = agent.sender.world.ask(
        "SELECT tick_id FROM silver.applied WHERE project_id = %s ORDER BY sequence", project
    )
    assert [one[0] for one in applied] == agent.acknowledged


def _until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
