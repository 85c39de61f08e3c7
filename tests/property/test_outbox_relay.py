"""The real relay on an in-memory outbox, under any mix of failures, deaths, pauses and rivals.

The store below keeps the contract of `OutboxClaims`; the same contract is tested on PostgreSQL in
tests/integration/kernel/test_relay.py. Time is a fake clock, chance is seeded: any failure repeats.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.crash import CrashInjected, armed, hanging_by
from lockstep.kernel.errors import InvalidInput, LostClaim, Terminal, Transient
from lockstep.kernel.outbox import Claimed, Destination, Message, OnExhausted, parse_destination
from lockstep.kernel.relay import Later, Relay, Stop, after_failure
from lockstep.kernel.retry import RetryPolicy
from tests.faults.modes import MODES, meet

TTL = 60.0
POINTS = ("outbox.relay.claimed", "outbox.relay.delivered", "outbox.relay.marked")


@dataclasses.dataclass
class Row:
    """One message at rest."""

    id: int
    lane: str
    on_exhausted: OnExhausted
    attempts: int = 0
    available: float = 0.0
    owner: str | None = None
    claimed_until: float = 0.0
    state: str = "waiting"  # waiting, delivered, parked, blocked


class Table:
    """The outbox table: what all relays share."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.rows: list[Row] = []

    def put(self, lane: str, on_exhausted: OnExhausted) -> None:
        """Append a committed message."""
        self.rows.append(Row(len(self.rows) + 1, lane, on_exhausted, available=self.clock.monotonic()))

    def head(self, lane: str) -> Row | None:
        """The message that must leave next."""
        return next((r for r in self.rows if r.lane == lane and r.state in ("waiting", "blocked")), None)


class MemoryClaims:
    """The claims of one relay on that table."""

    def __init__(self, table: Table, owner: str) -> None:
        self.table, self.owner = table, owner

    def claim(self, limit: int, lanes: Iterable[str] | None = None) -> list[Claimed]:
        """Heads that are due and free."""
        now, claimed = self.table.clock.monotonic(), []
        for lane in sorted({row.lane for row in self.table.rows}):
            row = self.table.head(lane)
            free = row is not None and row.state == "waiting" and row.available <= now
            if row is None or not free or (row.owner and row.claimed_until > now) or len(claimed) == limit:
                continue
            row.attempts, row.owner, row.claimed_until = row.attempts + 1, self.owner, now + TTL
            claimed.append(self._claimed(row))
        return claimed

    def delivered(self, claimed: Claimed) -> bool:
        """Settle as delivered."""
        return self._settle(claimed, "delivered")

    def postpone(self, claimed: Claimed, seconds: float, error: str) -> bool:
        """Settle for later."""
        return self._settle(claimed, "waiting", self.table.clock.monotonic() + seconds)

    def block(self, claimed: Claimed, error: str) -> bool:
        """Settle as blocked."""
        return self._settle(claimed, "blocked")

    def park(self, claimed: Claimed, error: str) -> bool:
        """Settle as parked."""
        return self._settle(claimed, "parked")

    def _settle(self, claimed: Claimed, state: str, available: float = 0.0) -> bool:
        row = self.table.rows[claimed.id - 1]
        if (row.owner, row.attempts, row.state) != (claimed.owner, claimed.attempt, "waiting"):
            return False
        row.state, row.owner, row.available = state, None, available
        return True

    def _claimed(self, row: Row) -> Claimed:
        return Claimed(
            id=row.id,
            lane=row.lane,
            destination=Destination("sqs", "q"),
            payload=None,
            headers={},
            on_exhausted=row.on_exhausted,
            attempt=row.attempts,
            owner=self.owner,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
        )


class Queue:
    """A destination that fails as told, and remembers what arrived and in which order."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.arrived: list[tuple[str, int]] = []
        self.answer = "ok"
        self.taking = 0.0
        self.meanwhile: Callable[[], object] | None = None

    def deliver(self, claimed: Claimed) -> None:
        """Accept, refuse, or accept and lose the answer."""
        self.clock.advance(self.taking)
        if self.meanwhile is not None:
            act, self.meanwhile = self.meanwhile, None
            act()
        if self.answer in ("ok", "answer lost"):
            self.arrived.append((claimed.lane, claimed.id))
        if self.answer in ("down", "answer lost"):
            raise Transient("down")
        if self.answer == "refused":
            raise Terminal("refused")


class RelayMachine(RuleBasedStateMachine):
    """Writers, two relays and a destination, interleaved at random."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        """An empty outbox and two relays."""
        self.clock = FakeClock()
        self.table = Table(self.clock)
        self.queue = Queue(self.clock)
        policy = RetryPolicy(max_attempts=4, base_seconds=1, cap_seconds=30)
        self.relays = [
            Relay(
                MemoryClaims(self.table, f"relay-{n}"),
                {"sqs": self.queue},
                self.clock,
                policy,
                claim_ttl=TTL,
                workers=1,
                random=random.Random(seed + n),
            )
            for n in range(2)
        ]

    @rule(lane=st.sampled_from("abc"), on_exhausted=st.sampled_from(["block", "park"]))
    def a_transaction_commits(self, lane: str, on_exhausted: OnExhausted) -> None:
        """A message appears."""
        self.table.put(lane, on_exhausted)

    @rule(
        which=st.integers(0, 1),
        answer=st.sampled_from(["ok", "ok", "down", "answer lost", "refused"]),
        taking=st.sampled_from([0.0, 1.0, TTL + 1]),
        limit=st.integers(1, 5),
    )
    def a_relay_runs(self, which: int, answer: str, taking: float, limit: int) -> None:
        """One pass, perhaps slower than its claims last."""
        self.queue.answer, self.queue.taking = answer, taking
        report = self.relays[which].run_once(limit)
        parts = report.delivered + report.postponed + report.blocked + report.parked + report.lost
        assert report.claimed == parts <= limit

    @rule(which=st.integers(0, 1), answer=st.sampled_from(["ok", "down", "answer lost", "refused"]))
    def a_relay_is_paused_in_the_middle_of_a_call(self, which: int, answer: str) -> None:
        """Its claim runs out, a rival goes on with the lane, then the paused one wakes and finishes."""
        self.queue.answer, self.queue.taking = "ok", 0.0

        def rival() -> None:
            self.clock.advance(TTL)
            self.relays[1 - which].run_once(5)
            self.queue.answer = answer

        self.queue.meanwhile = rival
        self.relays[which].run_once(1)
        self.queue.meanwhile = None

    @rule(
        which=st.integers(0, 1),
        point=st.sampled_from(POINTS),
        mode=st.sampled_from(["raise", "error", "hang"]),
        nth=st.integers(1, 3),
    )
    def a_relay_dies_fails_or_hangs(self, which: int, point: str, mode: str, nth: int) -> None:
        """Sudden death, an error, or a sleep beyond its claims during which its rival goes on."""
        self.queue.answer, self.queue.taking = "ok", 0.0

        def rival(seconds: float) -> None:
            self.clock.advance(TTL)
            self.relays[1 - which].run_once(5)

        with armed(point, mode, nth=nth) as charge, hanging_by(rival):
            try:
                self.relays[which].run_once(5)
            except (CrashInjected, Transient):
                assert charge.fired

    @rule(seconds=st.sampled_from([1.0, 30.0, TTL]), jump=st.floats(-1e5, 1e5))
    def time_passes(self, seconds: float, jump: float) -> None:
        """Claims and backoffs run out; the wall clock lies."""
        self.clock.advance(seconds)
        self.clock.jump(jump)

    @precondition(lambda self: any(row.state == "blocked" for row in self.table.rows))
    @rule()
    def a_person_resumes(self) -> None:
        """Blocked lanes go on."""
        for row in self.table.rows:
            if row.state == "blocked":
                row.state, row.attempts = "waiting", 0

    @invariant()
    def first_arrivals_are_in_order_within_each_lane(self) -> None:
        """The promise to consumers that drop repeated ids."""
        for lane in "abc":
            seen = list(dict.fromkeys(one for name, one in self.queue.arrived if name == lane))
            assert seen == sorted(seen)

    @invariant()
    def nothing_is_called_delivered_that_did_not_arrive(self) -> None:
        """Marking first would lose the message at the next crash."""
        arrived = {one for _, one in self.queue.arrived}
        assert all(row.id in arrived for row in self.table.rows if row.state == "delivered")

    @invariant()
    def nothing_overtakes_a_message_that_still_waits(self) -> None:
        """A later message of the lane arrives only after every earlier one arrived or was parked."""
        arrived = {one for _, one in self.queue.arrived}
        for row in self.table.rows:
            later = any(r.id in arrived for r in self.table.rows if r.lane == row.lane and r.id > row.id)
            assert not later or row.id in arrived or row.state == "parked"

    def teardown(self) -> None:
        """When faults stop, everything leaves."""
        if not hasattr(self, "table"):
            return
        self.queue.answer, self.queue.taking = "ok", 0.0
        for _ in range(2 * len(self.table.rows) + 2):
            self.clock.advance(TTL)
            self.a_person_resumes_all()
            self.relays[0].run_once(100)
        assert all(row.state in ("delivered", "parked") for row in self.table.rows)

    def a_person_resumes_all(self) -> None:
        """Without its precondition."""
        for row in self.table.rows:
            row.state = "waiting" if row.state == "blocked" else row.state


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
def test_a_relay_that_dies_fails_or_hangs_at_any_step_loses_and_reorders_nothing(point: str, mode: str) -> None:
    """While it hangs its claims run out and another relay goes on with its lanes."""
    clock = FakeClock()
    table, queue = Table(clock), Queue(clock)
    for lane in "abab":
        table.put(lane, "block")

    def relay(name: str) -> Relay:
        policy = RetryPolicy(max_attempts=4, base_seconds=1, cap_seconds=30)
        return Relay(MemoryClaims(table, name), {"sqs": queue}, clock, policy, claim_ttl=TTL, workers=1)

    def rival() -> None:
        clock.advance(TTL)
        relay("rival").run_once(5)

    meet(point, mode, lambda: relay("victim").run_once(5), rival)
    for _ in range(4):
        clock.advance(TTL)
        relay("heir").run_once(5)
    assert [row.state for row in table.rows] == ["delivered"] * 4
    for lane in "ab":
        first = list(dict.fromkeys(one for name, one in queue.arrived if name == lane))
        assert first == [row.id for row in table.rows if row.lane == lane]


TestRelayMachine = RelayMachine.TestCase
TestRelayMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(
    attempt=st.integers(1, 200),
    park=st.booleans(),
    seed=st.integers(0, 2**32),
    error=st.sampled_from(
        [Transient("x"), Transient("x", retry_after=900.0), Terminal("x"), LostClaim("x"), KeyError("bug")]
    ),
)
def test_a_failure_is_followed_by_a_bounded_wait_or_a_visible_stop(
    attempt: int, park: bool, seed: int, error: Exception
) -> None:
    policy = RetryPolicy(max_attempts=100, base_seconds=0.5, cap_seconds=300)
    decision = after_failure(error, attempt=attempt, park=park, policy=policy, random=random.Random(seed))
    if isinstance(error, Terminal) or attempt >= 100:
        assert decision == Stop(park)
    else:
        assert isinstance(decision, Later)
        assert (getattr(error, "retry_after", None) or 0) <= decision.seconds <= 900


def test_a_claim_that_grew_old_before_its_turn_is_not_delivered() -> None:
    """A relay that slept past its claim would repeat an old message behind newer ones."""
    clock = FakeClock()
    table, queue = Table(clock), Queue(clock)
    table.put("a", "block")

    class Sleepy(FakeClock):
        """The process is stopped right after its claim was stamped."""

        def monotonic(self) -> float:
            self.advance(TTL)
            return super().monotonic()

    relay = Relay(MemoryClaims(table, "r"), {"sqs": queue}, Sleepy(), claim_ttl=TTL, workers=1)
    assert relay.run_once(1).lost == 1
    assert queue.arrived == []


class Eager(MemoryClaims):
    """Claims with the guard removed: any message that is due, not only the head of its lane."""

    def claim(self, limit: int, lanes: Iterable[str] | None = None) -> list[Claimed]:
        """The first message that is due."""
        now = self.table.clock.monotonic()
        due = [row for row in self.table.rows if row.state == "waiting" and row.available <= now]
        for row in due[:1]:
            row.attempts, row.owner, row.claimed_until = row.attempts + 1, self.owner, now + TTL
        return [self._claimed(row) for row in due[:1]]


@pytest.mark.parametrize(("kind", "arrived"), [(MemoryClaims, []), (Eager, [("a", 2)])])
def test_only_the_head_rule_keeps_a_failed_message_from_being_overtaken(
    kind: type[MemoryClaims], arrived: list[tuple[str, int]]
) -> None:
    clock = FakeClock()
    table, queue = Table(clock), Queue(clock)
    table.put("a", "block")
    table.put("a", "block")
    relay = Relay(kind(table, "r"), {"sqs": queue}, clock, RetryPolicy(jitter="none"), workers=1)
    queue.answer = "down"
    relay.run_once(1)
    queue.answer = "ok"
    relay.run_once(1)
    assert queue.arrived == arrived


@pytest.mark.parametrize(
    "text",
    [
        "sqs:job-chunk-work",
        "sqs:a.fifo",
        "dynamodb:bronze_committed",
        "webhook:https://hooks.example.com/x?y=1",
    ],
)
def test_good_destinations_are_read(text: str) -> None:
    assert ":".join(parse_destination(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "sqs", "sqs:", "sqs:a.b", "sqs:" + "x" * 81, "dynamodb:ab", "webhook:ftp://x/y", "webhook:https://",
        "webhook:https://u:pw@h/x", "webhook:https://h/x#f", "webhook:https://h/a b", "webhook:http://h:99999/",
        "smtp:someone", "SQS:queue", "webhook:https://h/\n",
    ],
)  # fmt: skip
def test_bad_destinations_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_destination(text)


@given(st.text())
def test_reading_any_destination_ends_in_an_answer_or_a_refusal(text: str) -> None:
    try:
        parse_destination(text)
    except InvalidInput:
        return


@pytest.mark.parametrize(
    "change",
    [
        {"lane": ""},
        {"lane": "a\nb"},
        {"payload": float("nan")},
        {"payload": {"x": object()}},
        {"payload": "a\x00b"},
        {"payload": "\ud800"},
        {"headers": {"bad name": "x"}},
        {"headers": {"x": "line\nbreak"}},
        {"headers": {"x": ""}},
        {"on_exhausted": "ignore"},
        {"destination": "nowhere"},
    ],
)
def test_a_message_that_could_never_leave_is_refused_at_the_door(change: dict[str, object]) -> None:
    """Refused later, it would stop its lane instead of its writer."""
    good: dict[str, object] = {"lane": "a", "destination": "sqs:q", "payload": {"x": 1}}
    Message(**good)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        Message(**{**good, **change})  # type: ignore[arg-type]
