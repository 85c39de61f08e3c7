"""The transactional outbox: messages that leave if, and only if, the transaction that wrote them committed.

What belongs here: the message, its place in the table and every statement on it. What does not: sending; see
relay.py for the loop and deliver.py for the destinations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from psycopg import sql

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.logs import redact_text
from lockstep.kernel.postgres import Connection, Pool, transaction, translated
from lockstep.kernel.trace import MESSAGE_ATTRIBUTE, traceparent

OnExhausted = Literal["block", "park"]

_QUEUE = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo", re.ASCII)
_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}", re.ASCII)
_HEADER = re.compile(r"[A-Za-z0-9_.-]{1,100}", re.ASCII)
_LONGEST_LANE = 512
_LONGEST_URL = 2048
_LONGEST_ERROR = 2000

# Identity values are given out at INSERT, but rows appear at COMMIT: without this lock a transaction with a
# lower id could commit after a relay had already delivered a higher one. Two lanes whose hashes collide only
# wait a little.
_LOCK_LANE = "SELECT pg_advisory_xact_lock(hashtextextended('kernel.outbox/' || %s, 0))"
# One statement and one document however many messages there are: ten thousand statements took seconds. The ids are
# drawn row by row in the order given, so sorting what comes back gives each message its own.
_PUT = """
INSERT INTO kernel.outbox (lane, destination, payload, headers, on_exhausted)
SELECT m ->> 0, m ->> 1, m -> 2, m -> 3, m ->> 4
  FROM jsonb_array_elements(%s::jsonb) WITH ORDINALITY AS messages (m, place)
 ORDER BY place
RETURNING id"""

# Walks the index from lane to lane instead of reading every waiting row: a deep lane costs one step.
_ALL_LANES = sql.SQL("""
    (SELECT lane FROM kernel.outbox WHERE delivered_at IS NULL AND parked_at IS NULL ORDER BY lane LIMIT 1)
    UNION ALL
    SELECT (SELECT o.lane FROM kernel.outbox AS o
             WHERE o.lane > lanes.lane AND o.delivered_at IS NULL AND o.parked_at IS NULL
             ORDER BY o.lane LIMIT 1)
      FROM lanes WHERE lanes.lane IS NOT NULL""")
_SOME_LANES = sql.SQL("SELECT unnest(%(lanes)s::text[])")
# The conditions on `o` are checked again once the row is locked, so a head that another relay has just
# finished is dropped and not sent twice. The array of ids keeps the planner on the primary key: as a join, and
# before the first ANALYZE, it read every waiting row for every claim (80 ms instead of 1 at 5,000 rows).
_CLAIM = sql.SQL("""
WITH RECURSIVE lanes (lane) AS ({lanes}),
heads AS MATERIALIZED (
    SELECT head.id FROM lanes CROSS JOIN LATERAL (
        SELECT id, available_at, blocked_at, claimed_until FROM kernel.outbox
         WHERE lane = lanes.lane AND delivered_at IS NULL AND parked_at IS NULL
         ORDER BY id LIMIT 1) AS head
     WHERE head.blocked_at IS NULL AND head.available_at <= clock_timestamp()
       AND (head.claimed_until IS NULL OR head.claimed_until <= clock_timestamp())),
picked AS (
    SELECT o.id FROM kernel.outbox AS o
     WHERE o.id = ANY (ARRAY(SELECT id FROM heads))
       AND o.delivered_at IS NULL AND o.parked_at IS NULL AND o.blocked_at IS NULL
       AND o.available_at <= clock_timestamp()
       AND (o.claimed_until IS NULL OR o.claimed_until <= clock_timestamp())
     ORDER BY o.available_at, o.id LIMIT %(limit)s
       FOR UPDATE OF o SKIP LOCKED)
UPDATE kernel.outbox AS o
   SET attempts = o.attempts + 1, claimed_by = %(owner)s,
       claimed_until = clock_timestamp() + make_interval(secs => %(ttl)s)
  FROM picked WHERE o.id = picked.id
RETURNING o.id, o.lane, o.destination, o.payload, o.headers, o.on_exhausted, o.attempts, o.created_at""")
_CLAIM_ANY = _CLAIM.format(lanes=_ALL_LANES)
_CLAIM_SOME = _CLAIM.format(lanes=_SOME_LANES)

_SETTLE = sql.SQL("""
UPDATE kernel.outbox SET {outcome}, claimed_by = NULL, claimed_until = NULL
 WHERE id = %(id)s AND claimed_by = %(owner)s AND attempts = %(attempt)s
   AND delivered_at IS NULL AND parked_at IS NULL""")
_DELIVERED = _SETTLE.format(outcome=sql.SQL("delivered_at = clock_timestamp()"))
_POSTPONE = _SETTLE.format(
    outcome=sql.SQL("available_at = clock_timestamp() + make_interval(secs => %(seconds)s), last_error = %(error)s")
)
_BLOCK = _SETTLE.format(outcome=sql.SQL("blocked_at = clock_timestamp(), last_error = %(error)s"))
_PARK = _SETTLE.format(outcome=sql.SQL("parked_at = clock_timestamp(), last_error = %(error)s"))
_RESUME = """
UPDATE kernel.outbox SET blocked_at = NULL, attempts = 0, available_at = clock_timestamp()
 WHERE lane = %s AND blocked_at IS NOT NULL AND delivered_at IS NULL AND parked_at IS NULL"""
_REQUEUE = """
UPDATE kernel.outbox SET parked_at = NULL, blocked_at = NULL, attempts = 0, available_at = clock_timestamp()
 WHERE id = %s AND parked_at IS NOT NULL"""
_HASTEN = """
WITH due AS (
    UPDATE kernel.outbox SET available_at = least(available_at, clock_timestamp()), blocked_at = NULL,
           attempts = CASE WHEN blocked_at IS NULL THEN attempts ELSE 0 END
     WHERE id = ANY (%(ids)s) AND delivered_at IS NULL AND parked_at IS NULL
       AND (available_at > clock_timestamp() OR blocked_at IS NOT NULL))
SELECT count(*) FROM kernel.outbox WHERE id = ANY (%(ids)s) AND delivered_at IS NULL"""
_WAITING = "SELECT count(*) FROM kernel.outbox WHERE id = ANY (%s) AND delivered_at IS NULL"
_PRUNE = """
DELETE FROM kernel.outbox WHERE id IN (
    SELECT id FROM kernel.outbox WHERE delivered_at < clock_timestamp() - %s
     ORDER BY delivered_at LIMIT %s FOR UPDATE SKIP LOCKED)"""


class Destination(NamedTuple):
    """Where a message goes: `sqs:<queue-name>`, `dynamodb:<table>` or `webhook:<url>`."""

    scheme: str
    address: str


@dataclass(frozen=True)
class Message:
    """What to send, where, and in which order relative to what.

    Attributes:
        lane: Messages of one lane leave in the order in which their transactions committed.
        destination: See `Destination`.
        payload: Any JSON value. It is stored as a value: key order and spacing are not kept.
        headers: Carried beside the payload; `traceparent` is filled in from the current trace.
        on_exhausted: After a terminal error or the last attempt, `block` stops the lane at this message
        until a
            person resumes it; `park` sets the message aside and goes on.
    """

    lane: str
    destination: str
    payload: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    on_exhausted: OnExhausted = "block"

    def __post_init__(self) -> None:
        problems = _lane_problems(self.lane) + _header_problems(self.headers) + _payload_problems(self.payload)
        if self.on_exhausted not in ("block", "park"):
            problems.append(f"on_exhausted: {self.on_exhausted!r} is neither block nor park")
        if problems:
            raise InvalidInput("the message cannot be sent.", unit=self.lane or None, problems=problems)
        parse_destination(self.destination)


@dataclass(frozen=True)
class Claimed:
    """A message that one relay may deliver now. `(owner, attempt)` fences everything said about it."""

    id: int
    lane: str
    destination: Destination
    payload: Any
    headers: Mapping[str, str]
    on_exhausted: OnExhausted
    attempt: int
    owner: str
    created_at: datetime


class Outbox:
    """The writing side, and what operators do. Every call runs on the caller's connection."""

    def put(self, connection: Connection, message: Message) -> int:
        """Write a message inside the caller's transaction and return its id.

        Holds the lane until that transaction ends, so put late and commit soon. A transaction that writes to
        several lanes uses `put_all`, which takes them in one order; else two such transactions can deadlock
        (`Transient`).
        """
        return self.put_all(connection, [message])[0]

    def put_all(self, connection: Connection, messages: Sequence[Message]) -> list[int]:
        """Write messages to any number of lanes, in the given order within each."""
        if connection.autocommit and connection.info.transaction_status.name == "IDLE":
            raise InvalidInput("put must be called inside the transaction whose outcome it reports.")
        with translated("writing to the outbox"):
            for lane in sorted({message.lane for message in messages}):
                connection.execute(_LOCK_LANE, (lane,))
            return self._insert(connection, messages)

    def resume(self, connection: Connection, lane: str) -> int:
        """Let a blocked lane go on from the message that stopped it. Returns how many were blocked."""
        with translated("resuming a lane", unit=lane):
            return connection.execute(_RESUME, (lane,)).rowcount

    def requeue(self, connection: Connection, message_id: int) -> bool:
        """Put a parked message back at its place; the lane may have gone on, so it can arrive late."""
        with translated("requeueing a message", unit=str(message_id)):
            return connection.execute(_REQUEUE, (message_id,)).rowcount == 1

    def hasten(self, connection: Connection, ids: Sequence[int]) -> int:
        """Make messages due now, also after a backoff or a block, and return how many have not been delivered.

        For a caller that is being asked for the outcome: waiting out the backoff would only make it ask again.
        """
        with translated("hastening messages"):
            row = connection.execute(_HASTEN, {"ids": list(ids)}).fetchone()
        return int(row[0]) if row else 0

    def waiting(self, connection: Connection, ids: Sequence[int]) -> int:
        """How many of these messages have not been delivered; a pruned one was."""
        with translated("counting messages"):
            row = connection.execute(_WAITING, (list(ids),)).fetchone()
        return int(row[0]) if row else 0

    def prune(self, connection: Connection, older_than: timedelta, *, limit: int = 10_000) -> int:
        """Delete messages delivered longer ago than this, at most `limit` at a time, and nothing else."""
        with translated("pruning the outbox"):
            return connection.execute(_PRUNE, (older_than, limit)).rowcount

    def _insert(self, connection: Connection, messages: Sequence[Message]) -> list[int]:
        if not messages:
            return []
        trace = {MESSAGE_ATTRIBUTE: traceparent()}  # one hop for all of them: they leave from here together
        rows = [
            (one.lane, one.destination, one.payload, {**trace, **one.headers}, one.on_exhausted) for one in messages
        ]
        return sorted(int(row[0]) for row in connection.execute(_PUT, (canonical_json(rows),)))


class Claims(Protocol):
    """What a relay needs of the outbox. False means that the claim was lost; nothing is changed then."""

    def claim(self, limit: int, lanes: Iterable[str] | None = None) -> list[Claimed]:
        """Heads of free lanes that are due, one per lane at most; the attempt is counted here."""
        ...

    def delivered(self, claimed: Claimed) -> bool:
        """The destination has it."""
        ...

    def postpone(self, claimed: Claimed, seconds: float, error: str) -> bool:
        """Try again later; the lane waits."""
        ...

    def block(self, claimed: Claimed, error: str) -> bool:
        """Stop the lane here."""
        ...

    def park(self, claimed: Claimed, error: str) -> bool:
        """Set the message aside and let the lane go on."""
        ...


class OutboxClaims:
    """Claims in the table `kernel.outbox`, each in a short transaction of its own."""

    def __init__(self, pool: Pool, *, owner: str, claim_ttl: float) -> None:
        self._pool = pool
        self._owner = owner
        self._ttl = claim_ttl

    def claim(self, limit: int, lanes: Iterable[str] | None = None) -> list[Claimed]:
        """Heads of free lanes that are due; a claim that its relay never settled is free after the ttl."""
        statement = _CLAIM_ANY if lanes is None else _CLAIM_SOME
        parameters: dict[str, Any] = {"limit": limit, "owner": self._owner, "ttl": self._ttl}
        if lanes is not None:
            parameters["lanes"] = sorted(set(lanes))
        with transaction(self._pool, what="claiming from the outbox") as connection:
            rows = connection.execute(statement, parameters).fetchall()
        return [self._claimed(row) for row in sorted(rows)]

    def delivered(self, claimed: Claimed) -> bool:
        """The destination has it."""
        return self._settle(_DELIVERED, claimed)

    def postpone(self, claimed: Claimed, seconds: float, error: str) -> bool:
        """Try again later; the lane waits."""
        return self._settle(_POSTPONE, claimed, seconds=seconds, error=error)

    def block(self, claimed: Claimed, error: str) -> bool:
        """Stop the lane here."""
        return self._settle(_BLOCK, claimed, error=error)

    def park(self, claimed: Claimed, error: str) -> bool:
        """Set the message aside and let the lane go on."""
        return self._settle(_PARK, claimed, error=error)

    def _settle(self, statement: sql.Composed, claimed: Claimed, *, error: str = "", **more: Any) -> bool:
        parameters = {"id": claimed.id, "owner": claimed.owner, "attempt": claimed.attempt, **more}
        # The text may quote a response or an address; it is kept and shown, so it is redacted like a log.
        parameters["error"] = redact_text(error.replace("\x00", ""))[:_LONGEST_ERROR]
        with transaction(self._pool, what="settling an outbox message") as connection:
            return connection.execute(statement, parameters).rowcount == 1

    def _claimed(self, row: Sequence[Any]) -> Claimed:
        identity, lane, destination, payload, headers, on_exhausted, attempt, created_at = row
        scheme, _, address = destination.partition(":")
        return Claimed(
            id=identity,
            lane=lane,
            destination=Destination(scheme, address),
            payload=payload,
            headers=headers,
            on_exhausted=on_exhausted,
            attempt=attempt,
            owner=self._owner,
            created_at=created_at,
        )


def parse_destination(text: str) -> Destination:
    """Read a destination. Raises `InvalidInput` for anything that no deliverer could ever reach."""
    scheme, _, address = text.partition(":")
    if (
        (scheme == "sqs" and _QUEUE.fullmatch(address))
        or (scheme == "dynamodb" and _TABLE.fullmatch(address))
        or (scheme == "webhook" and _is_webhook(address))
    ):
        return Destination(scheme, address)
    raise InvalidInput(
        f"{redact_text(text)!r} is not a destination.",
        next_step="write sqs:<queue-name>, dynamodb:<table> or webhook:<http(s) address without a password>.",
    )


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> str:
    """One spelling for one value, so that a repeated delivery has the same bytes and the same signature."""
    return _CANONICAL.encode(value)


def _is_webhook(address: str) -> bool:
    if len(address) > _LONGEST_URL or not address.isascii() or not address.isprintable() or " " in address:
        return False
    try:
        parts = urlsplit(address)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and "@" not in parts.netloc
            and not parts.fragment
            and parts.port != 0
        )
    except ValueError:
        return False


def _lane_problems(lane: str) -> list[str]:
    usable = 0 < len(lane) <= _LONGEST_LANE and lane.isprintable()
    return [] if usable else [f"lane: must have 1 to {_LONGEST_LANE} printable characters"]


def _header_problems(headers: Mapping[str, str]) -> list[str]:
    return [
        f"header {name!r}: names are letters, digits, '.', '_', '-'; values are printable text"
        for name, value in headers.items()
        if not (isinstance(value, str) and value and value.isprintable() and _HEADER.fullmatch(str(name)))
    ]


def _payload_problems(payload: Any) -> list[str]:
    try:
        text = canonical_json(payload)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        return [f"payload: not a JSON value ({error})"]
    return ["payload: contains a NUL character, which PostgreSQL cannot store"] if "\\u0000" in text else []
