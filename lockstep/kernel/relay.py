"""The relay: takes messages from the outbox to their destinations, at least once, in order within each lane.

What belongs here: the loop, and the decision what follows a failure. What does not: SQL (outbox.py) and
protocols of destinations (deliver.py).

No transaction is open while the network is used. A claim is one short transaction (attempt counted, lease
set), the delivery happens outside any, and the outcome is a second short transaction that only the claim's
own attempt may write. A relay that dies delays its lanes by the claim's ttl; holding row locks instead would
free them sooner but would tie a database connection to the slowest destination. A message can therefore
arrive twice, and a relay that was paused in the middle of a call can repeat an old one late: consumers drop
ids that they have seen.
"""

from __future__ import annotations

import os
import random as random_module
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from psycopg_pool import ConnectionPool

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, Terminal, Transient
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.logs import get_logger
from lockstep.kernel.outbox import Claimed, Claims, OutboxClaims
from lockstep.kernel.postgres import Pool
from lockstep.kernel.retry import RetryPolicy
from lockstep.kernel.trace import MESSAGE_ATTRIBUTE, bind_trace, parse_traceparent

_log = get_logger(__name__)

# About four hours of trying on average before a lane stops for a person. The policy's time budget is not
# used here: between two attempts the message rests in the table and nobody waits for it.
RELAY_POLICY = RetryPolicy(max_attempts=100, base_seconds=0.5, cap_seconds=300.0)
CLAIM_TTL = 120.0
# A short loss of the database just after a delivery would otherwise cost a repeat and the whole claim ttl.
_SETTLING = RetryPolicy(max_attempts=4, base_seconds=0.2, cap_seconds=2.0, budget_seconds=5.0)

Observer = Callable[[str, str, float], None]
"""Told after each message: scheme of the destination, outcome, seconds that the delivery took."""


class Deliverer(Protocol):
    """Sends one message. Must time out well before the claim's ttl, and must be safe to repeat."""

    def deliver(self, claimed: Claimed) -> None:
        """Return when the destination has the message; else raise `Transient` or `Terminal`."""
        ...


@dataclass(frozen=True)
class RelayReport:
    """What one pass did. `claimed` is the sum of the others."""

    claimed: int = 0
    delivered: int = 0
    postponed: int = 0
    blocked: int = 0
    parked: int = 0
    lost: int = 0


class Later(NamedTuple):
    """Try again after so many seconds."""

    seconds: float


class Stop(NamedTuple):
    """No further attempt: block the lane or park the message."""

    park: bool


def after_failure(
    error: Exception,
    *,
    attempt: int,
    park: bool,
    policy: RetryPolicy,
    random: random_module.Random | None = None,
) -> Later | Stop:
    """What follows a failed delivery. Pure: the only source of chance is passed in.

    An error of unknown type is treated as transient, because it says nothing about the message, but it is
    bounded by the attempts like any other.
    """
    if isinstance(error, Terminal | InvalidInput) or attempt >= policy.max_attempts:
        return Stop(park)
    asked = getattr(error, "retry_after", None) or 0.0
    return Later(max(policy.delay(attempt, random=random), float(asked)))


class Relay:
    """Moves messages. Several may run at once, here or elsewhere; each lane is served by one at a time."""

    def __init__(
        self,
        source: Pool | Claims,
        deliverers: Mapping[str, Deliverer],
        clock: Clock | None = None,
        policy: RetryPolicy = RELAY_POLICY,
        *,
        claim_ttl: float = CLAIM_TTL,
        workers: int = 4,
        random: random_module.Random | None = None,
        observe: Observer | None = None,
    ) -> None:
        """Nothing is opened here.

        Args:
            source: The pool of the outbox's database; it should hold one connection more than `workers`.
            deliverers: One for each scheme: `sqs`, `dynamodb`, `webhook`.
            clock: Measures how old a claim is.
            policy: Attempts and backoff of one message.
            claim_ttl: How long a dead relay keeps its lanes. Every deliverer's timeout must be shorter.
            workers: Lanes served at the same time, so that a slow destination holds up one of them only.
            random: Source of jitter.
            observe: Called after each message, for metrics.
        """
        if isinstance(source, ConnectionPool):
            owner = f"relay-{os.getpid()}-{SystemIds().new_id()}"
            source = OutboxClaims(source, owner=owner, claim_ttl=claim_ttl)
        self._claims = source
        self._deliverers = dict(deliverers)
        self._clock = clock or SystemClock()
        self._policy = policy
        self._claim_ttl = claim_ttl
        self._workers = workers
        self._random = random
        self._observe = observe or (lambda *_: None)

    def run_once(self, limit: int = 100, *, lanes: Sequence[str] | None = None) -> RelayReport:
        """Deliver what is due now, at most `limit` messages, and say what happened.

        Args:
            limit: Upper bound of messages in this pass.
            lanes: Serve only these, for a caller that wants its own message out before it answers.
        """
        outcomes: Counter[str] = Counter()
        claimed = 0
        running: set[Future[str]] = set()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="relay") as executor:
            while True:
                room = min(self._workers - len(running), limit - claimed)
                asked_at = self._clock.monotonic()  # before the call: the claim's ttl runs from later than this
                batch = self._claims.claim(room, lanes) if room > 0 else []
                claimed += len(batch)
                running |= {executor.submit(self._handle, one, asked_at) for one in batch}
                if not running:
                    return RelayReport(claimed=claimed, **outcomes)
                done, running = wait(running, return_when=FIRST_COMPLETED)
                outcomes.update(one.result() for one in done)

    def run_forever(self, stop: threading.Event, *, poll_seconds: float = 1.0, limit: int = 100) -> None:
        """Deliver until `stop` is set. An unreachable database is waited for; any other error is raised."""
        failures = 0
        while not stop.is_set():
            try:
                report = self.run_once(limit)
            except Transient as error:
                failures += 1
                _log.warning("relay pass failed", failures=failures, error=str(error))
                stop.wait(max(poll_seconds, self._policy.delay(failures, random=self._random)))
                continue
            failures = 0
            if report.claimed == 0:
                stop.wait(poll_seconds)

    def _handle(self, claimed: Claimed, asked_at: float) -> str:
        trace = parse_traceparent(claimed.headers.get(MESSAGE_ATTRIBUTE))
        with bind_trace(trace):
            crash_point("outbox.relay.claimed")
            if self._clock.monotonic() - asked_at >= self._claim_ttl:
                return "lost"  # paused since the claim: another relay may already be past this message
            begun = self._clock.monotonic()
            try:
                self._deliver(claimed)
            except Exception as error:
                outcome = self._failed(claimed, error)
            else:
                crash_point("outbox.relay.delivered")
                outcome = "delivered" if self._settle(lambda: self._claims.delivered(claimed)) else "lost"
                crash_point("outbox.relay.marked")
            self._observe(claimed.destination.scheme, outcome, self._clock.monotonic() - begun)
            return outcome

    def _deliver(self, claimed: Claimed) -> None:
        deliverer = self._deliverers.get(claimed.destination.scheme)
        if deliverer is None:
            # Not the message's fault: this relay was started without the part that the writer expected.
            raise Transient(f"this relay has no deliverer for {claimed.destination.scheme}.", unit=claimed.lane)
        deliverer.deliver(claimed)

    def _failed(self, claimed: Claimed, error: Exception) -> str:
        decision = after_failure(
            error,
            attempt=claimed.attempt,
            park=claimed.on_exhausted == "park",
            policy=self._policy,
            random=self._random,
        )
        text = f"{type(error).__name__}: {error}"
        outcome = self._record(claimed, decision, text)
        _log.warning(
            "message not delivered",
            message=claimed.id,
            lane=claimed.lane,
            destination=claimed.destination.address,
            attempt=claimed.attempt,
            outcome=outcome,
            error=text,
        )
        return outcome

    def _record(self, claimed: Claimed, decision: Later | Stop, text: str) -> str:
        if isinstance(decision, Later):
            seconds = decision.seconds
            kept, outcome = self._settle(lambda: self._claims.postpone(claimed, seconds, text)), "postponed"
        elif decision.park:
            kept, outcome = self._settle(lambda: self._claims.park(claimed, text)), "parked"
        else:
            kept, outcome = self._settle(lambda: self._claims.block(claimed, text)), "blocked"
        return outcome if kept else "lost"

    def _settle(self, write: Callable[[], bool]) -> bool:
        # Repeating is safe: if the first write did land, the second finds the claim gone and reports it lost.
        return _SETTLING.call(write, clock=self._clock, random=self._random)
