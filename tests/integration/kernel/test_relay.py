"""Relays as real processes that are killed, stopped and doubled: nothing is lost, nothing is overtaken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.kernel.crash import declared_points
from lockstep.kernel.migrate import migrate
from lockstep.kernel.outbox import Message, Outbox
from lockstep.kernel.postgres import Pool, pool, transaction

pytestmark = pytest.mark.stack

LOCKSTEP = Path(__file__).resolve().parents[3] / "lockstep"
POINTS = ("outbox.relay.claimed", "outbox.relay.delivered", "outbox.relay.marked")
LANES = ("a", "b", "c")
EACH = 6

# A relay whose destination is one file: a single O_APPEND write per message, so lines of rivals never mix.
RELAY = """
import os, sys, threading
from lockstep.kernel.postgres import pool
from lockstep.kernel.relay import Relay
from lockstep.kernel.retry import RetryPolicy

class File:
    def __init__(self, path):
        self.handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    def deliver(self, claimed):
        os.write(self.handle, f"{claimed.lane} {claimed.payload}\\n".encode())

dsn, path, claim_ttl, workers = sys.argv[1:5]
with pool(dsn, application_name="relay", max_size=4) as shared:
    options = {"claim_ttl": float(claim_ttl), "workers": int(workers)}
    relay = Relay(shared, {"sqs": File(path)}, policy=RetryPolicy(), **options)
    print("ready", flush=True)
    relay.run_forever(threading.Event(), poll_seconds=0.02, limit=5)
"""


class Relays:
    """Relay processes that are surely dead when the test ends."""

    def __init__(self, dsn: str, path: Path) -> None:
        self.dsn, self.path = dsn, path
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, crash: str = "", *, claim_ttl: float = 0.5, workers: int = 3) -> subprocess.Popen[str]:
        """One more relay, perhaps told to die somewhere."""
        process = subprocess.Popen(
            [sys.executable, "-c", RELAY, self.dsn, str(self.path), str(claim_ttl), str(workers)],
            env={**os.environ, "LOCKSTEP_CRASH": crash},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return process

    def stop(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.communicate(timeout=30)


@pytest.fixture
def shared(database: str) -> Iterator[Pool]:
    migrate(database, "lockstep.kernel")
    with pool(database, application_name="relay-tests") as opened:
        yield opened


@pytest.fixture
def relays(database: str, shared: Pool, tmp_path: Path) -> Iterator[Relays]:
    group = Relays(database, tmp_path / "arrived")
    yield group
    group.stop()


def fill(shared: Pool, start: int = 0) -> None:
    for number in range(start, start + EACH):
        with transaction(shared) as connection:
            Outbox().put_all(connection, [Message(lane, "sqs:q", number) for lane in LANES])


def wait_until_empty(shared: Pool) -> None:
    for _ in range(1200):
        with transaction(shared) as connection:
            row = connection.execute("SELECT count(*) FROM kernel.outbox WHERE delivered_at IS NULL").fetchone()
        if row == (0,):
            return
        threading.Event().wait(0.05)
    raise AssertionError("messages are left in the outbox")


def first_arrivals(path: Path) -> dict[str, list[int]]:
    """What a consumer keeps after it dropped repeated ids."""
    lanes: dict[str, list[int]] = {lane: [] for lane in LANES}
    for line in path.read_text().splitlines():
        lane, number = line.split()
        if int(number) not in lanes[lane]:
            lanes[lane].append(int(number))
    return lanes


def in_order(count: int = EACH) -> dict[str, list[int]]:
    return {lane: list(range(count)) for lane in LANES}


@pytest.mark.parametrize(("mode", "nth", "status"), [("kill", 1, -signal.SIGKILL), ("exit", 4, 137)])
@pytest.mark.parametrize("point", POINTS)
def test_a_relay_killed_at_any_step_loses_and_overtakes_nothing(
    relays: Relays, shared: Pool, point: str, mode: str, nth: int, status: int
) -> None:
    """Marked before sent is a loss; sent before claimed is disorder. Only a real kill shows either."""
    fill(shared)
    victim = relays.start(f"{point}={mode}@{nth}")
    assert victim.wait(timeout=60) == status
    relays.start()
    wait_until_empty(shared)
    assert first_arrivals(relays.path) == in_order()


def test_every_crash_point_of_the_outbox_is_tried() -> None:
    """A new step without a kill test would pass review unnoticed."""
    declared = {name for name in declared_points(LOCKSTEP) if name.startswith("outbox.")}
    assert declared == set(POINTS)


def test_two_relays_share_the_work_and_keep_the_order(relays: Relays, shared: Pool) -> None:
    for _ in range(2):
        relays.start(claim_ttl=60)
    fill(shared)
    fill(shared, EACH)
    wait_until_empty(shared)
    arrived = relays.path.read_text().splitlines()
    assert first_arrivals(relays.path) == in_order(2 * EACH)
    assert len(arrived) == len(set(arrived))  # nothing died, so nothing is repeated


def test_a_rival_takes_over_while_a_relay_is_paused_and_the_sleeper_changes_nothing(
    relays: Relays, shared: Pool
) -> None:
    """The sleeper wakes holding an expired claim; it must neither send nor settle on the strength of it."""
    fill(shared)
    sleeper = relays.start("outbox.relay.claimed=hang:2", workers=1)
    relays.start(claim_ttl=60)
    wait_until_empty(shared)
    for _ in range(100):  # until the sleeper has woken and given its claim up
        threading.Event().wait(0.03)
    assert sleeper.poll() is None
    arrived = relays.path.read_text().splitlines()
    assert first_arrivals(relays.path) == in_order()
    assert len(arrived) == len(set(arrived))


def test_kills_at_random_moments_lose_nothing(relays: Relays, shared: Pool) -> None:
    for turn in range(4):
        relay = relays.start()
        fill(shared, turn * EACH)
        threading.Event().wait(0.05 * turn)
        relay.kill()
    relays.start()
    wait_until_empty(shared)
    assert first_arrivals(relays.path) == in_order(4 * EACH)
