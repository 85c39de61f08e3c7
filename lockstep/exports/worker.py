"""The worker: one chunk after another, I/O in the order that the rules give. The same code on Spark and outside.

What belongs here: reuse, build, publish, and what is done about each kind of error. What does not: SQL (claims.py),
bytes (dialect.py), processes (fleet.py). Every client is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Protocol, Self

from lockstep.exports import rules
from lockstep.exports.claims import BEAT_SECONDS, LEASE_SECONDS, ClaimStore, ReuseCandidate
from lockstep.exports.dialect import encoder
from lockstep.exports.model import DEFAULT_TENANT, Claim, Limits, Place, Receipt, Tally
from lockstep.exports.sink import NameMoved, ObjectStore, StoreDown, Upload
from lockstep.exports.source import SessionLost, SourceDown, SourceSession
from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LockstepError, LostClaim, Terminal, Transient
from lockstep.kernel.logs import get_logger
from lockstep.kernel.retry import RetryPolicy

_log = get_logger(__name__)
# The table must hear how a chunk ended: a short loss of the connection would otherwise cost the whole lease.
_TELLING = RetryPolicy(max_attempts=4, base_seconds=0.2, cap_seconds=2.0, budget_seconds=8.0)


class Cancelled(LockstepError):
    """The job's client asked to stop."""


class Beats(Protocol):
    """What a pulse needs of the store."""

    def beat(self, claim: Claim, rows: int) -> bool:
        """Keep the claim; True to stop. Raises `LostClaim`."""
        ...


class Pulse:
    """Beats for the chunk in hand from a thread of its own, and remembers what it was told.

    `check` is called by the build between pieces: it raises `LostClaim` or `Cancelled`. When beats fail for the
    whole lease, somebody else may own the chunk, so that counts as lost too; the fence has the last word anyway.
    A build that waits for its first row never comes to `check`, so what it waits for is interrupted.
    """

    def __init__(
        self,
        store: Beats,
        *,
        every: float = BEAT_SECONDS,
        lease: float = LEASE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._every = every
        self._lease = lease
        self._clock = clock or SystemClock()
        self._alive_until = 0.0
        self._claim: Claim | None = None
        self._error: LockstepError | None = None
        self._interrupt: Callable[[], None] = _nothing
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="exports pulse", daemon=True)
        self.rows = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=self._every)

    @property
    def told(self) -> LockstepError | None:
        """Why the chunk in hand must not go on; None while it may."""
        return self._error

    def hold(self, claim: Claim | None, *, interrupt: Callable[[], None] | None = None) -> None:
        """Beat for this chunk from now on; None: for none. `interrupt` ends what the build waits for."""
        with self._lock:
            self._claim, self._error, self.rows = claim, None, 0
            self._interrupt = interrupt or _nothing
            self._alive_until = self._clock.monotonic() + self._lease

    def check(self) -> None:
        """Raise what the last beat learned."""
        if self._error is not None:
            raise self._error
        if self._claim is not None and self._clock.monotonic() >= self._alive_until:
            raise LostClaim("no heartbeat was answered for the whole lease.", unit=self._claim.unit)

    def beat(self) -> None:
        """One beat now."""
        with self._lock:
            claim, rows = self._claim, self.rows
        if claim is None:
            return
        asked_at = self._clock.monotonic()  # before the call: the database counts the lease from later than this
        try:
            cancelled = self._store.beat(claim, rows)
            outcome: LockstepError | None = Cancelled("its job was cancelled.", unit=claim.unit) if cancelled else None
        except LostClaim as error:
            outcome = error
        except LockstepError as error:
            _log.warning("heartbeat failed", chunk=claim.unit, error=str(error))
            return
        with self._lock:
            if self._claim is not claim:
                return
            self._error, self._alive_until = outcome, asked_at + self._lease
            if outcome is not None:
                self._interrupt()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.beat()


class Worker:
    """Works through batches with one source session. Not safe to share between threads."""

    def __init__(
        self,
        claims: ClaimStore,
        source: SourceSession,
        objects: ObjectStore,
        pulse: Pulse,
        *,
        place: Place,
        limits: Limits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._claims = claims
        self._source = source
        self._objects = objects
        self._pulse = pulse
        self._place = place
        self._limits = limits or Limits()
        self._clock = clock or SystemClock()

    def work(self, batch_id: str, *, stop: Callable[[], bool] = lambda: False, tally: Tally | None = None) -> Tally:
        """Take chunks of a batch until none is left to take, or until `stop`. `tally` is added to, if given."""
        tally = Tally() if tally is None else tally
        self._source.refresh()
        try:
            tally.reused += self.reuse(batch_id)
        except (SourceDown, StoreDown) as error:
            self._trip(error)
            tally.errors.append(str(error))
            return tally
        except Terminal as error:  # their builds meet it too, and there it is recorded: raised here, they would wait on
            _log.warning("nothing reused", batch=batch_id, error=str(error))
        while not stop() and (claim := self._claims.claim(batch_id)) is not None:
            if not self._one(claim, tally):
                break  # a part is down: the rest of the batch would only meet the same error
            if tally.built == 1:
                self._claims.close_breakers()
        return tally

    def reuse(self, batch_id: str) -> int:
        """Finish every chunk of a batch that an existing file may serve; how many."""
        candidates = self._claims.reuse_candidates(batch_id)
        if not candidates:
            return 0
        version = self._source.schema_version
        allowed = [one for one in candidates if _may_reuse(one, version)]
        there = self._objects.present([one.file for one in allowed])
        verified = [one for one in allowed if one.file.file_id in there]
        return self._claims.reuse(verified) if verified else 0

    def _one(self, claim: Claim, tally: Tally) -> bool:
        """One chunk to its end, whatever that is. False: stop, a part is down."""
        self._pulse.hold(claim, interrupt=self._source.interrupt)
        try:
            receipt, attached = self._build(claim)
        except LostClaim as error:
            _log.warning("chunk lost", chunk=claim.unit, error=str(error))
            tally.lost += 1
            return True
        except LockstepError as error:
            # An interrupted build ends with the error of its statement; what the pulse was told is the cause.
            return self._failed(claim, self._pulse.told or error, tally)
        except Exception as error:  # a bug must not leave the chunk to the reaper without a word
            _log.exception("chunk failed unexpectedly", chunk=claim.unit)
            return self._failed(claim, Transient(f"unexpected: {error!r}", unit=claim.unit), tally)
        finally:
            self._pulse.hold(None)
        tally.built += 1
        tally.attached += attached
        tally.rows += receipt.rows
        tally.bytes += receipt.bytes
        return True

    def _build(self, claim: Claim) -> tuple[Receipt, int]:
        folder = rules.tenant_path(self._place, claim.tenant, DEFAULT_TENANT)
        name = rules.object_key(folder, claim.key, claim.effective_date, claim.format, claim.formula_guard)
        upload = self._objects.upload(name, claim.format)
        try:
            self._fill(claim, upload)
            crash_point("exports.build.uploaded")
            self._pulse.check()
            return self._publish(claim, upload)
        finally:
            upload.abort()

    def _fill(self, claim: Claim, upload: Upload) -> None:
        source = self._source
        version = source.schema_version  # opens the session, so that the columns are known
        encode = encoder(claim.format, source.columns)
        _log.debug("building", chunk=claim.unit, schema=version)
        pieces = source.copy(claim.key, claim.effective_date, claim.format, claim.formula_guard)
        with closing(pieces):
            for piece in pieces:
                self._pulse.check()
                self._pulse.rows += piece.count(b"\n")
                upload.write(encode.feed(piece))
                crash_point("exports.build.piece")
        upload.write(encode.end())

    def _publish(self, claim: Claim, upload: Upload) -> tuple[Receipt, int]:
        source = self._source
        with self._claims.publishing(claim) as publication:
            try:
                stored = upload.publish(seen=publication.etag)
            except NameMoved:
                # Bytes that no record knows: an attempt that died, or was replaced, between its object and its
                # commit. It cannot be newer than us, because we hold the chunk.
                stored = upload.publish(seen=self._objects.etag(upload.object_key))
            crash_point("exports.publish.stored")
            receipt = Receipt(
                object_key=upload.object_key,
                rows=source.rows,
                bytes=upload.bytes,
                sha256=upload.sha256,
                etag=stored.etag,
                version_id=stored.version_id,
                schema_version=source.schema_version,
                columns=[{"name": one.name, "type": one.type} for one in source.columns],
            )
            publication.record(receipt)
        return receipt, publication.attached

    def _failed(self, claim: Claim, error: LockstepError, tally: Tally) -> bool:
        if isinstance(error, LostClaim):
            tally.lost += 1
            return True
        outage = isinstance(error, SourceDown | StoreDown)
        decision = rules.after_failure(
            attempts=claim.attempts,
            max_attempts=self._limits.max_attempts,
            terminal=isinstance(error, Terminal),
            infrastructure=outage,
            suspect_refunds=claim.refunds if isinstance(error, SessionLost) else 0,
            cancelled=isinstance(error, Cancelled),
        )
        try:
            _TELLING.call(lambda: self._claims.fail(claim, str(error), decision), clock=self._clock)
        except LostClaim:
            tally.lost += 1
            return True
        if isinstance(decision, rules.GiveUp):
            tally.failed += 1
        else:
            tally.postponed += 1
        tally.errors.append(f"{claim.unit}: {error}")
        _log.warning("chunk not built", chunk=claim.unit, decision=type(decision).__name__, error=str(error))
        if outage:
            self._trip(error)
        return not outage

    def _trip(self, error: LockstepError) -> None:
        part = "source" if isinstance(error, SourceDown) else "s3"
        _log.warning("breaker opened", part=part, error=str(error))
        self._claims.trip(part, str(error))


def _nothing() -> None: ...


def _may_reuse(one: ReuseCandidate, version: str) -> bool:
    return rules.may_reuse(
        one.file,
        as_of=one.decided_at,
        window_days=one.window_days,
        max_age=one.max_age,
        schema_version=version,
    )
