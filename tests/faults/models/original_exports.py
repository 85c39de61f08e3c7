"""The export design as its document describes it, read in its favour wherever it is silent.

Restated from requirements/exports.md, by section:
- §3.1: the API creates the job record, expands it into chunk rows and then publishes "one queue message per chunk". In
  its favour: job and chunks are one transaction. §4.1 has no idempotency key, so a client without an answer asks again.
- §10.1: a message is removed only after processing; a crash redelivers it. §5.3: one consumer at a time.
- §10.2 step 1: the claim; "If no row is updated, the chunk is already owned or completed; acknowledge the message and
  return." Its WHERE clause is cut off in the document; §11.2 is used: PENDING, or RUNNING with an expired lease.
- step 3 to 5: export, upload to the deterministic path, update the cache, mark DONE by job and chunk alone.
- §11.1: on an exception below MAX_ATTEMPTS "throw exception (message redelivered)"; else FAILED.
- §11.2: a lease far above the longest run. In its favour: every redelivery that the broker makes is tried, and the
  broker notices a silent consumer after 30 s, ActiveMQ's default.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.faults.schedule import Actor, World, unreachable
from lockstep.kernel.errors import LockstepError
from tests.faults.models.oracle import Facts
from tests.faults.models.scripts import RIVAL_SECONDS, Scenario, Source

LEASE_SECONDS = 300.0
MAX_ATTEMPTS = 5


@dataclass
class Chunk:
    """A row of `job_chunk`, as far as it matters."""

    unit: str
    status: str = "PENDING"
    attempts: int = 0
    locked_at: float = 0.0


@dataclass
class OriginalExports:
    """Rows in Postgres, messages in ActiveMQ, files in S3."""

    world: World
    chunks: dict[tuple[int, str], Chunk] = field(default_factory=dict)
    messages: list[tuple[int, str]] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    """A unit each time that it became DONE, and each time that its file changed afterwards."""
    jobs: int = 0
    answered: list[str] = field(default_factory=list)
    holders: dict[tuple[int, str], Actor] = field(default_factory=dict)

    def ask(self, actor: Actor, unit: str) -> None:
        """A client that asks until it is answered."""
        for _ in range(3):
            try:
                self._submit(actor, unit)
            except LockstepError:
                continue
            self.answered.append(unit)
            return

    def work(self, actor: Actor) -> None:
        """A consumer: takes each message that is there now; what it does not acknowledge comes back."""
        for message in list(self.messages):
            if not self._is_free(message):
                continue
            self.holders[message] = actor
            try:
                self._process(actor, message)
            except LockstepError:
                del self.holders[message]
                continue  # thrown: the broker delivers it again
            if message in self.messages:
                self._call(actor, "mq.ack", lambda message=message: self._ack(message))

    def facts(self, source: Source) -> Facts:
        """A job is what its client wanted once: every further job of the same request is a second effect."""
        finished = {one.unit for one in self.chunks.values() if one.status in ("DONE", "FAILED")}
        wanted = [unit for unit in source.expected if unit in self.answered]
        return Facts(wanted, [one for one in self.published if one in wanted], finished, ordered=False)

    def _submit(self, actor: Actor, unit: str) -> None:
        def insert() -> int:
            self.jobs += 1
            self.chunks[self.jobs, unit] = Chunk(unit)
            return self.jobs

        job = self._call(actor, "pg.insert", insert)
        self._call(actor, "mq.publish", lambda: self.messages.append((job, unit)))

    def _process(self, actor: Actor, message: tuple[int, str]) -> None:
        chunk = self.chunks[message]
        if not self._call(actor, "pg.claim", lambda: self._claim(chunk)):
            return  # acknowledged
        try:
            self._call(actor, "source.export", lambda: None)
            self._call(actor, "s3.put", lambda: self._put(chunk))
            self._call(actor, "pg.done", lambda: self._done(chunk))
        except LockstepError:
            if chunk.attempts >= MAX_ATTEMPTS:
                chunk.status = "FAILED"
                return
            raise

    def _put(self, chunk: Chunk) -> None:
        """Writing the file again is the design's way to retry; under a finished chunk it is a second effect."""
        if chunk.status == "DONE":
            self.published.append(chunk.unit)

    def _done(self, chunk: Chunk) -> None:
        chunk.status = "DONE"
        self.published.append(chunk.unit)

    def _claim(self, chunk: Chunk) -> bool:
        expired = chunk.status == "RUNNING" and self.world.time.monotonic() - chunk.locked_at > LEASE_SECONDS
        if chunk.status != "PENDING" and not expired:
            return False
        chunk.status, chunk.locked_at = "RUNNING", self.world.time.monotonic()
        chunk.attempts += 1
        return True

    def _is_free(self, message: tuple[int, str]) -> bool:
        """One consumer at a time, unless it died or has been silent."""
        holder = self.holders.get(message)
        return message in self.messages and (
            holder is None or holder.ended or holder.asleep_until > self.world.time.monotonic()
        )

    def _ack(self, message: tuple[int, str]) -> None:
        if message in self.messages:
            self.messages.remove(message)

    def _call(self, actor, step, action):
        return self.world.call(actor, step, action, unreachable)


def run(world: World, scenario: Scenario) -> Facts:
    """Play the scenario: one request per tick; consumers get every redelivery, the first within seconds."""
    source = Source(scenario)
    this = OriginalExports(world)
    for tick in scenario.ticks(world):
        if source.advance(tick) and tick < len(source.expected):
            world.start(f"client.{tick}", lambda actor, unit=source.expected[tick]: this.ask(actor, unit))
            world.run()
        if scenario.repeat and this.messages:
            this.messages.append(this.messages[0])
        if scenario.lose_message and tick == 1 and this.messages:
            this.messages.pop(0)
        for _ in range(scenario.copies):
            world.start(f"worker.{tick}", this.work)
        if scenario.overlaps:
            world.start(f"worker.{tick}.rival", this.work).asleep_until = world.time.monotonic() + RIVAL_SECONDS
        world.run()
        world.time.pass_by(1)  # the broker's redelivery delay
        scenario.together(world, tick, [("worker", this.work)])
    return this.facts(source)
