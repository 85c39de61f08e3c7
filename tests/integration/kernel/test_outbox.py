"""The outbox on a real PostgreSQL: atomic with the data, ordered by commit, visible when it stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from lockstep.kernel.errors import InvalidInput, Terminal, Transient
from lockstep.kernel.migrate import migrate
from lockstep.kernel.outbox import Claimed, Message, Outbox, OutboxClaims
from lockstep.kernel.postgres import Connection, Pool, connect, pool, transaction
from lockstep.kernel.relay import Relay
from lockstep.kernel.retry import RetryPolicy
from lockstep.kernel.trace import bind_trace, parse_traceparent

pytestmark = pytest.mark.stack

AT_ONCE = RetryPolicy(max_attempts=3, base_seconds=0, cap_seconds=0)


class Recorder:
    """A destination that remembers, and fails for the payloads it is told to refuse."""

    def __init__(self) -> None:
        self.arrived: list[object] = []
        self.refuse: dict[object, Exception] = {}

    def deliver(self, claimed: Claimed) -> None:
        """Accept or refuse."""
        if claimed.payload in self.refuse:
            raise self.refuse[claimed.payload]
        self.arrived.append(claimed.payload)


class Hasty(Outbox):
    """The outbox with the guard removed: no lock on the lane."""

    def put_all(self, connection: Connection, messages: list[Message]) -> list[int]:  # type: ignore[override]
        """Insert without waiting for other writers of the lane."""
        return self._insert(connection, messages)


@pytest.fixture
def shared(database: str) -> Iterator[Pool]:
    migrate(database, "lockstep.kernel")
    with pool(database, application_name="outbox-tests", max_size=8) as opened:
        yield opened


def put(shared: Pool, lane: str, *payloads: object, on_exhausted: str = "block") -> list[int]:
    messages = [Message(lane, "sqs:q", one, on_exhausted=on_exhausted) for one in payloads]  # type: ignore[arg-type]
    with transaction(shared) as connection:
        return Outbox().put_all(connection, messages)


def relay(shared: Pool, destination: Recorder, **options: object) -> Relay:
    return Relay(shared, {"sqs": destination}, policy=AT_ONCE, **options)  # type: ignore[arg-type]


def test_a_message_exists_only_if_its_transaction_committed(shared: Pool) -> None:
    """A message about a rolled-back change announces data that does not exist."""
    destination = Recorder()
    with pytest.raises(RuntimeError), transaction(shared) as connection:
        Outbox().put(connection, Message("a", "sqs:q", "ghost"))
        raise RuntimeError
    put(shared, "a", "real")
    assert relay(shared, destination).run_once().delivered == 1
    assert destination.arrived == ["real"]


def test_put_outside_a_transaction_is_refused(database: str, shared: Pool) -> None:
    with connect(database, application_name="x") as connection, pytest.raises(InvalidInput):
        Outbox().put(connection, Message("a", "sqs:q", 1))


@pytest.mark.parametrize(("kind", "arrived"), [(Outbox, ["slow", "fast"]), (Hasty, ["fast", "slow"])])
def test_a_lower_id_that_commits_later_is_not_overtaken(
    database: str, shared: Pool, kind: type[Outbox], arrived: list[str]
) -> None:
    """Ids are given at insert, rows appear at commit; the second case shows the disorder without the lock."""
    destination, outbox = Recorder(), kind()
    with connect(database, application_name="slow") as slow, ThreadPoolExecutor(1) as other:

        def put_fast() -> None:
            with transaction(shared) as connection:
                outbox.put(connection, Message("a", "sqs:q", "fast"))

        with transaction(slow):
            outbox.put(slow, Message("a", "sqs:q", "slow"))
            rival = other.submit(put_fast)
            for _ in range(100):  # until the rival committed, or surely waits for the lane
                if rival.done() or _waits_for_lock(shared):
                    break
                threading.Event().wait(0.05)
            relay(shared, destination).run_once()
        rival.result(timeout=30)
    relay(shared, destination).run_once()
    assert destination.arrived == arrived


def _waits_for_lock(shared: Pool) -> bool:
    with transaction(shared) as connection:
        row = connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchone()
    return row is not None and row[0] > 0


def test_writers_of_many_lanes_at_once_do_not_deadlock(shared: Pool) -> None:
    def write(order: int) -> None:
        lanes = ["a", "b", "c"] if order % 2 else ["c", "b", "a"]
        for _ in range(10):
            with transaction(shared) as connection:
                Outbox().put_all(connection, [Message(lane, "sqs:q", 1) for lane in lanes])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    destination = Recorder()
    assert relay(shared, destination).run_once(1000).delivered == 120


def test_the_payload_arrives_as_the_value_that_was_put(shared: Pool) -> None:
    value = {"b": [1, 2.5, None, True, "é\u2028'\"%s"], "a": {"n": 2**60, "empty": {}}}
    destination: list[object] = []

    class Keep:
        def deliver(self, claimed: Claimed) -> None:
            destination.append(claimed.payload)

    put(shared, "a", value)
    Relay(shared, {"sqs": Keep()}).run_once()
    assert destination == [value]


def test_a_message_carries_the_trace_of_its_writer(shared: Pool) -> None:
    seen: list[str | None] = []

    class Keep:
        def deliver(self, claimed: Claimed) -> None:
            seen.append(parse_traceparent(claimed.headers["traceparent"]))

    with bind_trace("c" * 32):
        put(shared, "a", 1)
    Relay(shared, {"sqs": Keep()}).run_once()
    assert seen == ["c" * 32]


def test_a_failing_lane_stops_only_itself(shared: Pool) -> None:
    destination = Recorder()
    destination.refuse["a1"] = Transient("down", retry_after=600)
    put(shared, "a", "a1", "a2")
    put(shared, "b", "b1", "b2")
    report = relay(shared, destination).run_once()
    assert (report.delivered, report.postponed) == (2, 1)
    assert destination.arrived == ["b1", "b2"]


@pytest.mark.parametrize("error", [Terminal("refused"), Transient("down"), KeyError("bug")])
def test_a_spent_message_blocks_its_lane_until_a_person_resumes_it(shared: Pool, error: Exception) -> None:
    """Skipping it in silence would break the order that the lane exists for."""
    destination = Recorder()
    destination.refuse["a1"] = error
    put(shared, "a", "a1", "a2")
    put(shared, "b", "b1")
    report = relay(shared, destination).run_once()
    assert report.blocked == 1
    assert destination.arrived == ["b1"]
    assert relay(shared, destination).run_once().claimed == 0
    destination.refuse.clear()
    with transaction(shared) as connection:
        row = connection.execute("SELECT last_error FROM kernel.outbox WHERE blocked_at IS NOT NULL").fetchone()
        assert row is not None
        assert type(error).__name__ in row[0]
        assert Outbox().resume(connection, "a") == 1
    relay(shared, destination).run_once()
    assert destination.arrived == ["b1", "a1", "a2"]


def test_a_message_that_may_be_parked_lets_its_lane_go_on(shared: Pool) -> None:
    destination = Recorder()
    destination.refuse["a1"] = Terminal("gone")
    first, *_ = put(shared, "a", "a1", "a2", on_exhausted="park")
    report = relay(shared, destination).run_once()
    assert (report.parked, report.delivered) == (1, 1)
    destination.refuse.clear()
    with transaction(shared) as connection:
        assert Outbox().requeue(connection, first)
        assert not Outbox().requeue(connection, first)
    relay(shared, destination).run_once()
    assert destination.arrived == ["a2", "a1"]


def test_a_stored_error_does_not_keep_secrets(shared: Pool) -> None:
    destination = Recorder()
    destination.refuse["a1"] = Terminal("refused by https://u:planted-pw@h/x with token=planted-pw")
    put(shared, "a", "a1")
    relay(shared, destination).run_once()
    with transaction(shared) as connection:
        row = connection.execute("SELECT last_error FROM kernel.outbox").fetchone()
    assert row is not None
    assert "planted-pw" not in row[0]


def test_a_message_that_nobody_can_deliver_is_kept(shared: Pool) -> None:
    put(shared, "a", "a1")
    report = Relay(shared, {}, policy=RetryPolicy(base_seconds=60, cap_seconds=60)).run_once()
    assert report.postponed == 1


def test_a_stale_claim_settles_nothing(shared: Pool) -> None:
    """A relay that lost its claim must not overwrite what the newer attempt found out."""
    put(shared, "a", "a1")
    old = OutboxClaims(shared, owner="old", claim_ttl=0.01)
    (stale,) = old.claim(5)
    threading.Event().wait(0.05)
    (fresh,) = OutboxClaims(shared, owner="new", claim_ttl=60).claim(5)
    assert fresh.attempt == stale.attempt + 1
    assert not old.delivered(stale)
    assert not old.block(stale, "x")
    assert not old.park(stale, "x")
    assert not old.postpone(stale, 1, "x")
    assert OutboxClaims(shared, owner="new", claim_ttl=60).delivered(fresh)


def test_a_claimed_lane_is_closed_to_others(shared: Pool) -> None:
    put(shared, "a", "a1", "a2")
    first = OutboxClaims(shared, owner="one", claim_ttl=60)
    second = OutboxClaims(shared, owner="two", claim_ttl=60)
    assert [one.payload for one in first.claim(5)] == ["a1"]
    assert second.claim(5) == []


def test_a_caller_may_flush_its_own_lane(shared: Pool) -> None:
    destination = Recorder()
    put(shared, "a", "a1")
    put(shared, "b", "b1", "b2")
    assert relay(shared, destination).run_once(lanes=["b", "empty"]).delivered == 2
    assert destination.arrived == ["b1", "b2"]


def test_a_limit_is_kept_and_the_rest_stays(shared: Pool) -> None:
    destination = Recorder()
    put(shared, "a", *range(10))
    assert relay(shared, destination).run_once(4).claimed == 4
    assert relay(shared, destination).run_once(100).claimed == 6
    assert destination.arrived == list(range(10))


def test_pruning_removes_old_delivered_messages_only(shared: Pool) -> None:
    """Deleting what was not delivered would be a silent loss."""
    destination = Recorder()
    destination.refuse.update({"blocked": Terminal("x"), "parked": Terminal("x")})
    put(shared, "a", "done")
    put(shared, "b", "blocked", "behind")
    put(shared, "c", "parked", on_exhausted="park")
    relay(shared, destination).run_once()
    with transaction(shared) as connection:
        assert Outbox().prune(connection, timedelta(hours=1)) == 0
        assert Outbox().prune(connection, timedelta(0)) == 1
        left = connection.execute("SELECT payload FROM kernel.outbox ORDER BY id").fetchall()
    assert left == [("blocked",), ("behind",), ("parked",)]


def test_a_relay_outlives_the_loss_of_every_connection(shared: Pool, database: str) -> None:
    destination, stop = Recorder(), threading.Event()
    runner = threading.Thread(
        target=relay(shared, destination).run_forever, args=(stop,), kwargs={"poll_seconds": 0.02}
    )
    runner.start()
    try:
        with connect(database, application_name="killer") as killer:
            for turn in range(5):
                with killer.transaction():
                    Outbox().put(killer, Message("a", "sqs:q", turn))
                killer.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'outbox-tests'"
                )
            for _ in range(600):
                if destination.arrived and destination.arrived[-1] == 4:
                    break
                # A claim that was cut off keeps the lane until its ttl; here we shorten the wait.
                killer.execute("UPDATE kernel.outbox SET claimed_until = clock_timestamp() WHERE delivered_at IS NULL")
                threading.Event().wait(0.05)
    finally:
        stop.set()
        runner.join(30)
    assert not runner.is_alive()
    assert sorted(set(destination.arrived), key=str) == [0, 1, 2, 3, 4]
