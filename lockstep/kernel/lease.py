"""Leases with fences on PostgreSQL: who may work on a lane, proven inside the data's own transaction.

What belongs here: taking, keeping, proving and giving back a lane. What does not: which lane to take or what
to do with it. A lease only saves wasted work; the fence, checked by `guard`, is what keeps a stale worker
harmless.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol, Self

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import InvalidInput, LostClaim
from lockstep.kernel.logs import get_logger
from lockstep.kernel.postgres import Connection, OwnConnection, translated

_log = get_logger(__name__)

# Locks, chosen so that the three never wait for each other needlessly: `guard` holds FOR KEY SHARE through
# the data transaction; a heartbeat's UPDATE of plain columns is compatible with it; a takeover asks for FOR
# UPDATE, which is not, and skips instead of waiting. So a long transaction cannot starve its own heartbeat,
# and a fence cannot move while a guarded transaction is open.
_CREATE = """
INSERT INTO kernel.lease (lane, owner, fence, lease_until, acquired_at, renewed_at)
VALUES (%(lane)s, %(owner)s, 1, clock_timestamp() + make_interval(secs => %(ttl)s),
        clock_timestamp(), clock_timestamp())
ON CONFLICT (lane) DO NOTHING
RETURNING fence, lease_until"""
_TAKE_OVER = """
WITH free AS (
    SELECT lane FROM kernel.lease
     WHERE lane = %(lane)s AND (owner IS NULL OR lease_until <= clock_timestamp())
       FOR UPDATE SKIP LOCKED)
UPDATE kernel.lease AS held
   SET owner = %(owner)s, fence = held.fence + 1,
       lease_until = clock_timestamp() + make_interval(secs => %(ttl)s),
       acquired_at = clock_timestamp(), renewed_at = clock_timestamp()
  FROM free WHERE held.lane = free.lane
RETURNING held.fence, held.lease_until"""
_RENEW = """
UPDATE kernel.lease
   SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s), renewed_at = clock_timestamp()
 WHERE lane = %(lane)s AND owner = %(owner)s AND fence = %(fence)s
RETURNING lease_until"""
_RELEASE = """
UPDATE kernel.lease SET owner = NULL, lease_until = clock_timestamp()
 WHERE lane = %(lane)s AND owner = %(owner)s AND fence = %(fence)s
RETURNING lane"""
_HOLDER = """
SELECT owner, lease_until, lease_until > clock_timestamp() FROM kernel.lease
 WHERE lane = %(lane)s AND owner IS NOT NULL"""
_GUARD = """
SELECT 1 FROM kernel.lease
 WHERE lane = %(lane)s AND owner = %(owner)s AND fence = %(fence)s
   FOR KEY SHARE"""


@dataclass(frozen=True)
class Lease:
    """A lane held by an owner under a fence. `lease_until` is the database's time, for people to read."""

    lane: str
    owner: str
    fence: int
    ttl: float
    lease_until: datetime


class LeaseStore:
    """Leases in the table `kernel.lease`. Thread-safe; owns one connection and reopens it when it breaks."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._own = OwnConnection(connect)

    def acquire(self, lane: str, owner: str, ttl: float) -> Lease | None:
        """Take the lane if it is free or its lease has expired by the database's clock; else None, at once.

        Every success carries a fence higher than any before on this lane. `owner` must be unique for each
        attempt (process and try): the same name cannot take a lane that it seems to hold, because after a
        lost answer nobody knows whether it does; the lane is then free again after `ttl`.
        """
        if not lane or not owner or ttl <= 0:
            raise InvalidInput("a lease needs a lane, an owner and a ttl above zero.", unit=lane or None)
        parameters = {"lane": lane, "owner": owner, "ttl": ttl}
        row = self._run(_CREATE, parameters, lane) or self._run(_TAKE_OVER, parameters, lane)
        return None if row is None else Lease(lane, owner, int(row[0]), ttl, row[1])

    def renew(self, lease: Lease) -> Lease:
        """Extend by the lease's ttl. Raises `LostClaim` if a newer fence exists or the lane was released.

        An expired lease that nobody took is still mine: the fence decides, not the time.
        """
        row = self._run(_RENEW, vars(lease), lease.lane)
        if row is None:
            raise _lost(lease)
        return replace(lease, lease_until=row[0])

    def release(self, lease: Lease) -> bool:
        """Give the lane back. False if it was no longer mine; nothing is changed then."""
        return self._run(_RELEASE, vars(lease), lease.lane) is not None

    def holder(self, lane: str) -> tuple[str, datetime, bool] | None:
        """Who has the lane, until when, and whether that is still to come; None if nobody does. For people to read."""
        row = self._run(_HOLDER, {"lane": lane}, lane)
        return None if row is None else (str(row[0]), row[1], bool(row[2]))

    def guard(self, connection: Connection, lease: Lease) -> None:
        """Prove ownership inside the caller's transaction. Raises `LostClaim`; the caller then rolls back.

        Call it first in the transaction that writes. Until that transaction ends nobody can take the lane
        over, so what it commits was written by the only holder. The lease table must be in the same database
        as the data.
        """
        if connection.autocommit and not _in_transaction(connection):
            raise InvalidInput("guard must be called inside the transaction that writes.", unit=lease.lane)
        with translated("checking the lease", unit=lease.lane):
            if connection.execute(_GUARD, vars(lease)).fetchone() is None:
                raise _lost(lease)

    def close(self) -> None:
        """Close the store's own connection. Leases are not released: they expire."""
        self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, statement: str, parameters: dict[str, Any], lane: str) -> Sequence[Any] | None:
        found = self._own.run(statement, parameters, what="lease call", unit=lane)
        return found[0] if found else None


class Renewer(Protocol):
    """What a heartbeat needs of a store."""

    def renew(self, lease: Lease) -> Lease:
        """Extend the lease or raise `LostClaim`."""
        ...


class Heartbeat:
    """Keeps a lease alive from a background thread while the block works.

    `lost` is set, and `check()` raises `LostClaim`, as soon as the store says so, or when no renewal
    succeeded for the ttl by the local monotonic clock, whether or not an answer ever comes. Entering renews
    once and so raises `LostClaim` at once for a lease that is already gone. Leaving stops the thread and
    does not release.
    """

    def __init__(self, store: Renewer, lease: Lease, *, every: float | None = None, clock: Clock | None = None) -> None:
        self._every = lease.ttl / 3 if every is None else every
        if not 0 < self._every < lease.ttl:
            raise InvalidInput("a heartbeat must be faster than the ttl of its lease.", unit=lease.lane)
        self._store = store
        self._lease = lease
        self._clock = clock or SystemClock()
        self._alive_until = self._clock.monotonic() + lease.ttl
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.lost = threading.Event()

    def __enter__(self) -> Self:
        self.beat()
        self.check()
        for work in (self._renew_until_stopped, self._watch_until_stopped):
            run = contextvars.copy_context().run  # a thread starts without the trace unless it is handed over
            thread = threading.Thread(target=run, args=(work,), name=f"lease {self._lease.lane}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=self._every)  # a renewal stuck in the network must not delay the worker

    def check(self) -> None:
        """Raise `LostClaim` if the lease is, or may be, no longer mine. Cheap; call it between steps."""
        if self._expired():
            self._lose("no renewal succeeded for the whole ttl")
        if self.lost.is_set():
            raise _lost(self._lease)

    def beat(self) -> bool:
        """Try one renewal now. False if it did not succeed."""
        # Read before the call, because the database counts the ttl from a later moment than this.
        asked_at = self._clock.monotonic()
        try:
            self._store.renew(self._lease)
        except LostClaim:
            self._lose("a newer attempt owns the lane")
            return False
        except Exception as error:
            # Whatever is wrong, silence would be worse: the local clock decides when it has lasted too long.
            _log.warning("lease renewal failed", lane=self._lease.lane, error=str(error))
            return False
        self._alive_until = asked_at + self._lease.ttl
        return True

    def _renew_until_stopped(self) -> None:
        wait = self._every
        while not self._stop.wait(wait) and not self.lost.is_set():
            wait = self._every if self.beat() else self._every / 4

    def _watch_until_stopped(self) -> None:
        # A thread of its own, because the renewing one may be stuck in a call that never returns.
        while not self.lost.is_set():
            left = self._alive_until - self._clock.monotonic()
            if left <= 0:
                self._lose("no renewal succeeded for the whole ttl")
            elif self._stop.wait(min(left, self._every)):
                return

    def _expired(self) -> bool:
        return self._clock.monotonic() >= self._alive_until

    def _lose(self, why: str) -> None:
        if not self.lost.is_set():
            self.lost.set()
            _log.warning("lease lost", lane=self._lease.lane, fence=self._lease.fence, why=why)


def _in_transaction(connection: Connection) -> bool:
    return connection.info.transaction_status.name in ("INTRANS", "INERROR")


def _lost(lease: Lease) -> LostClaim:
    return LostClaim(
        f"fence {lease.fence} of {lease.owner} is no longer the newest.",
        unit=lease.lane,
        next_step="stop; the newer owner continues from the data.",
    )
