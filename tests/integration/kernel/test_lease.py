"""Leases on a real PostgreSQL: one holder, rising fences, harmless zombies."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.kernel.errors import InvalidInput, LostClaim, Transient
from lockstep.kernel.lease import Heartbeat, Lease, LeaseStore
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import Connection, connect, on_connect, transaction

pytestmark = pytest.mark.stack

# A worker that takes the lane, waits for a word, then writes under its (perhaps stale) lease.
WORKER = """
import sys
from lockstep.kernel.errors import LostClaim
from lockstep.kernel.lease import LeaseStore
from lockstep.kernel.postgres import connect, on_connect, transaction

dsn, guarded = sys.argv[1], sys.argv[2] == "guarded"
store = LeaseStore(on_connect(dsn, application_name="zombie"))
lease = store.acquire("lane", "zombie", ttl=0.5)
print("held", lease.fence, flush=True)
sys.stdin.readline()
with connect(dsn, application_name="zombie-data") as data:
    try:
        with transaction(data):
            if guarded:
                store.guard(data, lease)
            data.execute("INSERT INTO written VALUES ('zombie')")
        print("wrote", flush=True)
    except LostClaim:
        print("lost", flush=True)
"""


@pytest.fixture
def dsn(database: str) -> str:
    migrate(database, "lockstep.kernel")
    with connect(database, application_name="tests") as connection:
        connection.execute("CREATE TABLE written (who text)")
    return database


@pytest.fixture
def store(dsn: str) -> Iterator[LeaseStore]:
    with LeaseStore(on_connect(dsn, application_name="lease-tests")) as opened:
        yield opened


def held(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


def take_when_free(store: LeaseStore, owner: str) -> Lease:
    """Ask until the lane is free by the database's clock; bounded, because no test may hang."""
    pause = threading.Event()
    for _ in range(600):
        lease = store.acquire("lane", owner, ttl=60)
        if lease is not None:
            return lease
        pause.wait(0.05)
    raise AssertionError("the lane never became free")


def written(dsn: str) -> list[str]:
    with connect(dsn, application_name="tests") as connection:
        return [row[0] for row in connection.execute("SELECT who FROM written")]


def test_a_free_lane_is_taken_and_a_held_one_is_not(store: LeaseStore) -> None:
    first = held(store.acquire("lane", "a", ttl=60))
    assert first.fence == 1
    assert store.acquire("lane", "b", ttl=60) is None
    assert store.acquire("lane", "a", ttl=60) is None
    assert held(store.acquire("other", "b", ttl=60)).fence == 1


def test_the_fence_rises_at_every_takeover_and_after_release(store: LeaseStore) -> None:
    """A fence that starts again would let a worker from before the release write as if it were current."""
    first = held(store.acquire("lane", "a", ttl=0.05))
    second = take_when_free(store, "b")
    assert store.release(second)
    third = held(store.acquire("lane", "c", ttl=60))
    assert [first.fence, second.fence, third.fence] == [1, 2, 3]


def test_a_lost_lease_can_neither_renew_nor_release(store: LeaseStore) -> None:
    old = held(store.acquire("lane", "a", ttl=0.05))
    new = take_when_free(store, "b")
    with pytest.raises(LostClaim):
        store.renew(old)
    assert store.release(old) is False
    assert store.renew(new).fence == new.fence


def test_an_expired_lease_that_nobody_took_is_still_mine(store: LeaseStore, dsn: str) -> None:
    lease = held(store.acquire("lane", "a", ttl=0.01))
    threading.Event().wait(0.05)
    assert store.renew(lease).lease_until > lease.lease_until
    with connect(dsn, application_name="tests") as connection, transaction(connection):
        store.guard(connection, lease)


def test_of_many_who_ask_at_once_each_fence_has_one_winner(dsn: str) -> None:
    def contend(name: str) -> list[Lease]:
        won: list[Lease] = []
        with LeaseStore(on_connect(dsn, application_name=name)) as mine:
            for turn in range(25):
                lease = mine.acquire("lane", f"{name}/{turn}", ttl=60)
                if lease is not None:
                    won.append(lease)
                    assert mine.release(lease)
        return won

    with ThreadPoolExecutor(8) as threads:
        leases = [one for won in threads.map(contend, [f"w{n}" for n in range(8)]) for one in won]
    fences = [lease.fence for lease in leases]
    assert sorted(fences) == list(range(1, len(fences) + 1))


def test_exactly_one_thread_takes_over_an_expired_lane(dsn: str, store: LeaseStore) -> None:
    held(store.acquire("lane", "dead", ttl=0.01))
    threading.Event().wait(0.05)
    together = threading.Barrier(8)

    def contend(name: str) -> Lease | None:
        with LeaseStore(on_connect(dsn, application_name=name)) as mine:
            mine.acquire("warm-up", name, ttl=60)
            together.wait(30)
            return mine.acquire("lane", name, ttl=60)

    with ThreadPoolExecutor(8) as threads:
        won = [one for one in threads.map(contend, [f"w{n}" for n in range(8)]) if one is not None]
    assert [lease.fence for lease in won] == [2]


def test_guard_refuses_a_stale_fence_and_nothing_is_written(store: LeaseStore, dsn: str) -> None:
    old = held(store.acquire("lane", "a", ttl=0.05))
    take_when_free(store, "b")
    with connect(dsn, application_name="tests") as data, pytest.raises(LostClaim), transaction(data):
        data.execute("INSERT INTO written VALUES ('a')")
        store.guard(data, old)
    assert written(dsn) == []


def test_guard_outside_a_transaction_is_refused(store: LeaseStore, dsn: str) -> None:
    """In autocommit the lock ends with the statement, so the check would prove nothing about the write."""
    lease = held(store.acquire("lane", "a", ttl=60))
    with connect(dsn, application_name="tests") as data, pytest.raises(InvalidInput):
        store.guard(data, lease)


def test_nobody_takes_the_lane_while_a_guarded_transaction_is_open(store: LeaseStore, dsn: str) -> None:
    """Otherwise the new holder could read, decide and write before the old one's commit lands."""
    lease = held(store.acquire("lane", "a", ttl=0.05))
    with connect(dsn, application_name="tests") as data, transaction(data):
        store.guard(data, lease)
        threading.Event().wait(0.1)
        assert store.acquire("lane", "b", ttl=60) is None
        store.renew(lease)  # and the heartbeat is not blocked by its own worker's transaction
        data.execute("INSERT INTO written VALUES ('a')")
    assert take_when_free(store, "b").fence == 2


class Unguarded(LeaseStore):
    """The same store with the guard removed, to show that the guard is what protects."""

    def guard(self, connection: Connection, lease: Lease) -> None:
        """Believe the caller."""


@pytest.mark.parametrize(("kind", "takeover_waits"), [(LeaseStore, True), (Unguarded, False)])
def test_without_the_guard_two_holders_write_at_once(dsn: str, kind: type[LeaseStore], takeover_waits: bool) -> None:
    with kind(on_connect(dsn, application_name="x")) as store, connect(dsn, application_name="d") as data:
        lease = held(store.acquire("lane", "a", ttl=0.05))
        with transaction(data):
            store.guard(data, lease)
            threading.Event().wait(0.1)
            taken_meanwhile = store.acquire("lane", "b", ttl=60) is not None
            data.execute("INSERT INTO written VALUES ('a')")
    assert taken_meanwhile is not takeover_waits


@pytest.mark.parametrize(("mode", "outcome"), [("guarded", "lost"), ("unguarded", "wrote")])
def test_a_worker_paused_longer_than_its_lease_cannot_write(
    dsn: str, store: LeaseStore, mode: str, outcome: str
) -> None:
    """A long pause is invisible to the paused; the second case shows what happens when nobody checks."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, dsn, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            assert worker.stdout.readline().strip() == "held 1"
            worker.send_signal(signal.SIGSTOP)
            fresh = take_when_free(store, "fresh")
            with connect(dsn, application_name="fresh") as data, transaction(data):
                store.guard(data, fresh)
                data.execute("INSERT INTO written VALUES ('fresh')")
            worker.send_signal(signal.SIGCONT)
            answer, _ = worker.communicate("go\n", timeout=60)
        finally:
            worker.kill()
    assert answer.strip() == outcome
    assert written(dsn) == (["fresh"] if mode == "guarded" else ["fresh", "zombie"])


def test_a_heartbeat_survives_the_loss_of_its_connection(dsn: str, store: LeaseStore) -> None:
    lease = held(store.acquire("lane", "a", ttl=30))
    with Heartbeat(store, lease, every=0.1) as beat, connect(dsn, application_name="killer") as killer:
        killer.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'lease-tests'")
        since = killer.execute("SELECT clock_timestamp()").fetchone()
        for _ in range(300):
            row = killer.execute("SELECT renewed_at > %s FROM kernel.lease", since).fetchone()
            if row == (True,):
                break
            threading.Event().wait(0.05)
        else:
            pytest.fail("no renewal after the connection was cut")
        beat.check()


def test_a_heartbeat_notices_the_takeover(store: LeaseStore, dsn: str) -> None:
    lease = held(store.acquire("lane", "a", ttl=30))
    with Heartbeat(store, lease, every=0.05) as beat, connect(dsn, application_name="x") as connection:
        connection.execute("UPDATE kernel.lease SET fence = fence + 1, owner = 'b'")
        assert beat.lost.wait(30)
        with pytest.raises(LostClaim):
            beat.check()


def test_an_unreachable_database_is_transient_and_heals() -> None:
    store = LeaseStore(on_connect("postgresql://u@127.0.0.1:1/x", application_name="x", connect_timeout=2))
    with pytest.raises(Transient):
        store.acquire("lane", "a", ttl=1)


def test_a_lease_without_a_name_or_a_time_is_refused(store: LeaseStore) -> None:
    for lane, owner, ttl in (("", "a", 1.0), ("x", "", 1.0), ("x", "a", 0.0)):
        with pytest.raises(InvalidInput), contextlib.suppress(Transient):
            store.acquire(lane, owner, ttl)
