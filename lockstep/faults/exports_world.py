"""Export jobs in a simulated world: the real worker, rules and object store on tables in memory.

What belongs here: the tables of exports as transactions leave them, and who does what when. What does not: faults
(schedule.py), judgement (checker.py), SQL: the statements behind these tables are tested on PostgreSQL.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any, cast

from lockstep.exports import rules
from lockstep.exports.claims import LEASE_SECONDS, RESERVE_SECONDS, Batch, ReuseCandidate
from lockstep.exports.dialect import Column
from lockstep.exports.model import (
    CachedFile,
    Candidate,
    ChunkStatus,
    Claim,
    Counts,
    Format,
    FormulaGuard,
    JobStatus,
    Limits,
    Place,
    Receipt,
)
from lockstep.exports.sink import ObjectStore
from lockstep.exports.source import SourceDown
from lockstep.exports.worker import Pulse, Worker
from lockstep.faults.checker import Effect, Stores, Unit
from lockstep.faults.history import History, Outcome, Verb
from lockstep.faults.parts import MemoryBucket, aws_unreachable, etag
from lockstep.faults.schedule import Actor, Bound, SimulatedTime, World, unreachable
from lockstep.kernel.errors import LockstepError, LostClaim, Terminal

RECENT, OLD = date(2026, 1, 4), date(2025, 3, 1)
_RETRY_SECONDS = 5.0


@dataclass
class _Chunk:
    claim: Claim
    client: str
    ordinal: int
    created_at: datetime
    reuse_allowed: bool
    status: ChunkStatus = ChunkStatus.PENDING
    run_at: float = 0.0
    batch: str | None = None
    reserved_until: float = 0.0
    lease_until: float = 0.0
    locked: bool = False
    receipt: Receipt | None = None
    generation: int = 0
    published: int = 0
    """How often this chunk was made DONE; more than once would be a second effect."""


@dataclass
class _Job:
    job_id: str
    key: str
    as_of: datetime
    status: JobStatus = JobStatus.SUBMITTED
    cancel: bool = False


@dataclass
class _File:
    receipt: Receipt
    generation: int
    generated_at: datetime
    day: date


@dataclass
class MemoryTables:
    """Jobs, chunks and files. Every method is one transaction."""

    time: SimulatedTime
    limits: Limits = field(default_factory=lambda: Limits(max_attempts=4))
    jobs: dict[str, _Job] = field(default_factory=dict)
    chunks: dict[tuple[str, str], _Chunk] = field(default_factory=dict)
    files: dict[str, _File] = field(default_factory=dict)
    breakers: dict[str, float] = field(default_factory=dict)
    writes: list[tuple[str, int]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    # --- clients and operators ----------------------------------------------------------------------------------------

    def submit(self, client: str, key: str, wanted: Sequence[tuple[str, date]]) -> str:
        """One job for one idempotency key, whole or not at all."""
        for job in self.jobs.values():
            if job.key == key:
                return job.job_id
        now = self.time.now()
        job = _Job(rules.job_id(now.date(), len(self.jobs) + 1), key, now)
        self.jobs[job.job_id] = job
        for ordinal, (name, day) in enumerate(sorted(wanted)):
            file_id = rules.file_id("default", name, day, Format.CSV, FormulaGuard.NONE)
            chunk_key = f"key={name}:date={day:%Y%m%d}"
            claim = Claim(
                job.job_id, chunk_key, name, day, file_id, "default", Format.CSV, FormulaGuard.NONE, 0, 0, now
            )
            allowed = rules.reuse_allowed(day, as_of=now, window_days=self.limits.reuse_window_days)
            self.chunks[job.job_id, chunk_key] = _Chunk(claim, client, ordinal, now, allowed)
        return job.job_id

    def state(self, job_id: str) -> JobStatus:
        """The job's status."""
        return self.jobs[job_id].status

    def cancel(self, job_id: str) -> None:
        """Ask a job to stop; one that has ended stays as it is."""
        job = self.jobs[job_id]
        if not job.status.is_terminal:
            job.cancel = True
            self._settle(job_id)

    def retry(self, job_id: str) -> None:
        """Put the failed chunks of a failed job back to work."""
        job = self.jobs[job_id]
        if job.status is not JobStatus.FAILED:
            raise Terminal("only a FAILED job is retried.", unit=job_id)
        for chunk in self._of(job_id):
            if chunk.status is ChunkStatus.FAILED:
                chunk.status, chunk.run_at = ChunkStatus.PENDING, 0.0
                chunk.claim = replace(chunk.claim, attempts=0, counted_from=chunk.claim.fence)
        job.status = JobStatus.IN_PROGRESS

    # --- workers ------------------------------------------------------------------------------------------------------

    def reserve(self, limit: int) -> Batch | None:
        """Set due chunks aside, fairly."""
        now = self.time.monotonic()
        if any(until > now for until in self.breakers.values()):
            return None
        due = [one for one in self._open() if one.run_at <= now and one.reserved_until <= now]
        busy = Counter(one.client for one in self.chunks.values() if one.status is ChunkStatus.RUNNING)
        candidates = [Candidate(one.client, one.claim.job_id, one.claim.chunk_key, one.claim.file_id) for one in due]
        chosen = rules.fair_order(candidates, limit=limit, busy_clients=busy, busy_jobs={})
        batch = f"batch-{now:.2f}"
        for one in chosen:
            chunk = self.chunks[one.job_id, one.chunk_key]
            chunk.batch, chunk.reserved_until = batch, now + RESERVE_SECONDS
        return Batch(batch, len(chosen)) if chosen else None

    def claim(self, batch_id: str) -> Claim | None:
        """The next chunk of a batch, one build per file; the attempt is counted now."""
        running = {one.claim.file_id for one in self.chunks.values() if one.status is ChunkStatus.RUNNING}
        for chunk in sorted(self._open(), key=lambda one: one.ordinal):
            spent = chunk.claim.attempts >= self.limits.max_attempts
            if chunk.batch != batch_id or spent or chunk.claim.file_id in running or chunk.locked:
                continue
            claim = chunk.claim
            chunk.claim = replace(claim, attempts=claim.attempts + 1, fence=claim.fence + 1, claimed_at=self.time.now())
            chunk.status, chunk.batch = ChunkStatus.RUNNING, None
            chunk.lease_until = self.time.monotonic() + LEASE_SECONDS
            self._wrote(chunk)
            self._settle(claim.job_id)
            return chunk.claim
        return None

    def beat(self, claim: Claim, rows: int) -> bool:
        """Keep the claim; whether to stop."""
        chunk = self._mine(claim)
        chunk.lease_until = self.time.monotonic() + LEASE_SECONDS
        return self.jobs[claim.job_id].cancel

    def guard(self, claim: Claim) -> str | None:
        """Lock the chunk for its publication; the tag that its file has on record."""
        chunk = self._mine(claim)
        if chunk.locked:
            raise unreachable("another transaction holds the row")
        chunk.locked = True
        known = self.files.get(claim.file_id)
        return known.receipt.etag if known else None

    def unlock(self, claim: Claim) -> None:
        """The transaction ended, one way or the other."""
        self.chunks[claim.job_id, claim.chunk_key].locked = False

    def publish(self, claim: Claim, receipt: Receipt) -> int:
        """The file, the chunk, and everyone who waited for the same file, at once."""
        own = self._mine(claim)
        known = self.files.get(claim.file_id)
        generation = known.generation + 1 if known else 1
        self.files[claim.file_id] = _File(receipt, generation, self.time.now(), claim.effective_date)
        waiting = [
            one
            for one in self._open()
            if one.claim.file_id == claim.file_id and one.created_at <= claim.claimed_at and not one.locked
        ]
        self._done(own)
        for one in waiting:
            one.claim = replace(one.claim, fence=one.claim.fence + 1)
            self._done(one)
        for job_id in {claim.job_id, *(one.claim.job_id for one in waiting)}:
            self._settle(job_id)
        return len(waiting)

    def fail(self, claim: Claim, error: str, decision: rules.Retry | rules.GiveUp) -> None:
        """What followed a failure. The pause is fixed: jitter is the machine's chance, not the seed's."""
        chunk = self._mine(claim)
        if isinstance(decision, rules.GiveUp):
            chunk.status = ChunkStatus.FAILED
        else:
            chunk.status, chunk.run_at = ChunkStatus.PENDING, self.time.monotonic() + _RETRY_SECONDS
            chunk.claim = replace(chunk.claim, attempts=chunk.claim.attempts - int(decision.refund))
        self._wrote(chunk)
        self._settle(claim.job_id)

    def reap(self) -> int:
        """Take chunks from workers that stopped beating."""
        now = self.time.monotonic()
        silent = [
            one
            for one in self.chunks.values()
            if one.status is ChunkStatus.RUNNING and one.lease_until <= now and not one.locked
        ]
        for one in silent:
            decision = rules.after_failure(
                attempts=one.claim.attempts,
                max_attempts=self.limits.max_attempts,
                cancelled=self.jobs[one.claim.job_id].cancel,
            )
            self.fail(one.claim, "silent", decision)
        return len(silent)

    def reuse_candidates(self, batch_id: str) -> list[ReuseCandidate]:
        """Waiting chunks that a file on record may serve."""
        return [
            ReuseCandidate(
                one.claim.job_id, one.claim.chunk_key, self.jobs[one.claim.job_id].as_of,
                self.limits.reuse_window_days, None, self._cached(one.claim.file_id),
            )
            for one in self._open()
            if one.batch == batch_id and one.reuse_allowed and one.claim.file_id in self.files
        ]  # fmt: skip

    def reuse(self, verified: Sequence[ReuseCandidate]) -> int:
        """Finish these with the files that were seen, unless a file changed since."""
        count = 0
        for one in verified:
            chunk = self.chunks[one.job_id, one.chunk_key]
            same = self.files[one.file.file_id].generation == one.file.generation
            job = self.jobs[one.job_id]
            if chunk.status is ChunkStatus.PENDING and same and not job.cancel and not job.status.is_terminal:
                chunk.claim = replace(chunk.claim, fence=chunk.claim.fence + 1)
                self._done(chunk)
                self._settle(one.job_id)
                count += 1
        if count:
            self.close_breakers()
        return count

    def trip(self, part: str, error: str) -> None:
        """Keep everybody away from a part for a while."""
        self.breakers[part] = self.time.monotonic() + rules.breaker_pause(1)

    def close_breakers(self) -> None:
        """A part works again."""
        self.breakers = {part: until for part, until in self.breakers.items() if until > self.time.monotonic()}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open(self) -> list[_Chunk]:
        found = []
        for one in self.chunks.values():
            job = self.jobs[one.claim.job_id]
            if one.status is ChunkStatus.PENDING and not job.cancel and not job.status.is_terminal:
                found.append(one)
        return found

    def _of(self, job_id: str) -> list[_Chunk]:
        return [one for one in self.chunks.values() if one.claim.job_id == job_id]

    def _mine(self, claim: Claim) -> _Chunk:
        chunk = self.chunks[claim.job_id, claim.chunk_key]
        if chunk.claim.fence != claim.fence or chunk.status is not ChunkStatus.RUNNING:
            raise LostClaim("a newer attempt has the chunk.", unit=claim.unit)
        return chunk

    def _done(self, chunk: _Chunk) -> None:
        file = self.files[chunk.claim.file_id]
        chunk.status, chunk.receipt, chunk.generation = ChunkStatus.DONE, file.receipt, file.generation
        self._wrote(chunk)
        self.effects.append(Effect("exports", f"{chunk.claim.job_id}/{chunk.claim.chunk_key}", chunk.claim.fence))

    def _wrote(self, chunk: _Chunk) -> None:
        self.writes.append((f"exports/{chunk.claim.job_id}/{chunk.claim.chunk_key}", chunk.claim.fence))

    def _settle(self, job_id: str) -> None:
        job, chunks = self.jobs[job_id], self._of(job_id)
        if job.status.is_terminal:
            raise Terminal(f"a job that is {job.status} cannot change.", unit=job_id)
        by_status = Counter(one.status for one in chunks)
        counts = Counts(
            len(chunks),
            by_status[ChunkStatus.PENDING],
            by_status[ChunkStatus.RUNNING],
            by_status[ChunkStatus.DONE],
            by_status[ChunkStatus.FAILED],
        )
        job.status = rules.job_status(
            counts, cancel_requested=job.cancel, started=job.status is not JobStatus.SUBMITTED
        )

    def _cached(self, file_id: str) -> CachedFile:
        file, receipt = self.files[file_id], self.files[file_id].receipt
        return CachedFile(
            file_id, file.day, receipt.object_key, receipt.schema_version, receipt.etag, receipt.bytes,
            file.generation, file.generated_at,
        )  # fmt: skip


class _Publication:
    """What the worker's block records; written when the block ends."""

    def __init__(self, seen: str | None) -> None:
        self.etag = seen
        self.receipt: Receipt | None = None
        self.attached = 0

    def record(self, receipt: Receipt) -> None:
        """Keep it for the commit."""
        self.receipt = receipt


class _Claims(Bound):
    """The tables as one actor reaches them; a publication is a transaction of two steps around the worker's block."""

    @contextmanager
    def publishing(self, claim: Claim) -> Iterator[_Publication]:
        """Guard, the block, commit; whatever breaks in between rolls back."""
        world, actor, _, tables, lost, _ = self._bound
        locked: list[bool] = []

        def guard() -> str | None:
            found: str | None = tables.guard(claim)
            locked.append(True)
            return found

        try:
            publication = _Publication(world.call(actor, "claims.guard", guard, lost))
            yield publication
            publication.attached = world.call(
                actor, "claims.commit", lambda: tables.publish(claim, publication.receipt), lost
            )
        finally:
            if locked:
                tables.unlock(claim)


class _Source:
    """The export function: its rows change as long as their day is recent, and some keys never work."""

    columns = (Column("n", "integer"),)
    schema_version = "1"

    def __init__(self, world: World, actor: Actor) -> None:
        self._world = world
        self._actor = actor
        self.rows = 0

    def copy(self, key: str, day: date, form: Format, guard: FormulaGuard) -> Generator[bytes]:
        """The rows of one chunk."""
        if key == "BAD":
            raise Terminal("the function cannot do this key.", unit=key)
        version = int(self._world.time.monotonic() // 200) if day == RECENT else 0
        yield self._world.call(self._actor, "source.copy", f"{key},{day},{version}\n".encode, _source_down)
        self.rows = 1

    def refresh(self) -> None:
        """It never changes."""

    def interrupt(self) -> None:
        """Nothing waits here."""


class _Objects:
    """The real object store, its looks at many files as one step."""

    def __init__(self, bound: Any, plain: MemoryBucket, world: World, actor: Actor) -> None:
        self._store = ObjectStore(bound, "exports")
        self._plain = ObjectStore(plain, "exports")
        self._world = world
        self._actor = actor

    def present(self, files: Sequence[CachedFile]) -> set[str]:
        """Which of the files are there as recorded."""
        step = lambda: {one.file_id for one in files if self._plain.etag(one.object_key) == one.etag}  # noqa: E731
        return self._world.call(self._actor, "s3.present", step, _source_down)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class ExportsWorld:
    """Clients, workers and operators around one set of tables and one bucket."""

    def __init__(self, world: World, history: History) -> None:
        self.world = world
        self.history = history
        self.tables = MemoryTables(world.time)
        self.bucket = MemoryBucket()

    def submit(self, actor: Actor, key: str, wanted: Sequence[tuple[str, date]]) -> None:
        """A client asks until it is answered, always with the same key."""
        tables = self._claims(actor)
        for _ in range(6):
            begun = self.history.invoke(actor.name, Verb.WRITE, key, at=self.world.time.monotonic())
            try:
                job_id = tables.submit(actor.name, key, wanted)
            except LockstepError:
                self.history.end(begun, Outcome.INFO)
                continue
            self.history.end(begun, Outcome.OK, unit=job_id)
            return

    def work(self, actor: Actor) -> None:
        """One worker: reap, reserve, work it off, until nothing is due."""
        claims = self._claims(actor)
        bucket = Bound(self.world, actor, "s3", self.bucket, lost=aws_unreachable)
        pulse = Pulse(cast("Any", claims), clock=actor.clock, every=3600.0)
        worker = Worker(
            cast("Any", claims),
            cast("Any", _Source(self.world, actor)),
            cast("Any", _Objects(bucket, self.bucket, self.world, actor)),
            pulse,
            place=Place("exports"),
            limits=self.tables.limits,
            clock=actor.clock,
        )
        with suppress(LockstepError):
            claims.reap()
            while (batch := claims.reserve(3)) is not None:
                worker.work(batch.batch_id)

    def look(self, actor: Actor) -> None:
        """A client polls its jobs."""
        tables = self._claims(actor)
        for job_id in list(self.tables.jobs):
            begun = self.history.invoke(actor.name, Verb.READ, job_id, at=self.world.time.monotonic())
            try:
                state: JobStatus = tables.state(job_id)
            except LockstepError:
                self.history.end(begun, Outcome.INFO)
                continue
            self.history.end(begun, Outcome.OK, unit=job_id, state=state.value, terminal=state.is_terminal)

    def operate(self, actor: Actor) -> None:
        """A person retries what failed, or cancels something, at whatever moment."""
        tables = self._claims(actor)
        jobs = sorted(self.tables.jobs)
        if not jobs:
            return
        job_id = self.world.random.choice(jobs)
        if self.world.random.random() < 0.5:
            with suppress(LockstepError):
                tables.cancel(job_id)
            return
        begun = self.history.invoke(actor.name, Verb.RETRY, job_id, at=self.world.time.monotonic())
        try:
            tables.retry(job_id)
        except Terminal:
            self.history.end(begun, Outcome.FAIL)
        except LockstepError:
            self.history.end(begun, Outcome.INFO)
        else:
            self.history.end(begun, Outcome.OK)

    def is_settled(self) -> bool:
        """Whether every job has ended."""
        return all(job.status.is_terminal for job in self.tables.jobs.values())

    def stores(self) -> Stores:
        """What is there in the end, as the checker reads it."""
        units = [
            Unit(job.job_id, job.status.value, job.status.is_terminal, key=job.key) for job in self.tables.jobs.values()
        ]
        for chunk in self.tables.chunks.values():
            if chunk.receipt is None:
                continue
            body = self.bucket.objects.get(chunk.receipt.object_key)
            if body is not None and etag(body) != chunk.receipt.etag:
                continue  # replaced since: the service says so instead of handing out other bytes
            found = None if body is None else hashlib.sha256(body).hexdigest()
            name = f"{chunk.claim.job_id}/{chunk.claim.chunk_key}"
            units.append(Unit(name, chunk.status.value, True, promised=chunk.receipt.sha256, found=found))
        return Stores(units, {}, list(self.tables.effects), list(self.tables.writes))

    def _claims(self, actor: Actor) -> Any:
        return _Claims(self.world, actor, "claims", self.tables, lost=unreachable)


def wanted(chance: Any) -> list[tuple[str, date]]:
    """What a client may ask for."""
    pairs = {(chance.choice(("A", "B", "C", "BAD")), chance.choice((RECENT, OLD))) for _ in range(3)}
    return sorted(pairs)


def _source_down(step: str) -> SourceDown:
    return SourceDown("the source went away.", unit=step)
