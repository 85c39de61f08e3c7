"""The tick design as its document describes it, read in its favour wherever it is silent.

Restated from requirements/ticks.md:
- "POST /finalize is synchronous": ingest, upload of the state, SQS message, `bronze_committed`, `ticks` row committed,
  then 200; a failure is 5xx and "agent retries → idempotent ingest". In its favour: no replica ever loses its disk, and
  a repeated ingest has no second effect in bronze.
- the queue is standard, not FIFO, and silver dedupes by tick id; visibility 15 min, dead letters after 5 receives.
- "Lambda receives up to 10 SQS messages per invocation, groups them by (org_id, project_id), dispatches one ECS task
  per group"; the row in `silver_dispatched` is put, if absent, before `run_task`. When the Lambda returns, its messages
  are deleted; when it fails, they come back.
- "Silver ECS task fails mid-batch": the document lets the message come back, but it was deleted when Lambda returned.
- "Silver SQS message lost": an operator re-enqueues ticks of `bronze_committed` without a `silver_dispatched` row.
- silver keeps its state as one archive per project: it is read, changed and written. In its favour: the ETag in the
  message is not asserted, because a newer upload would refuse every older tick of a backlog.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.faults.schedule import Actor, World, unreachable
from lockstep.kernel.errors import LockstepError, Transient
from tests.faults.models.oracle import Facts
from tests.faults.models.scripts import Scenario, Source

VISIBILITY_SECONDS = 900.0


@dataclass
class OriginalTicks:
    """A service, a queue, a Lambda, ECS tasks, two tables, and the archives in S3."""

    world: World
    source: Source
    committed: list[str] = field(default_factory=list)
    audited: set[str] = field(default_factory=set)
    dispatched: set[str] = field(default_factory=set)
    messages: list[list[Any]] = field(default_factory=list)
    silver: tuple[str, ...] = ()
    tasks: list[list[str]] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)

    def finalize(self, actor: Actor, tick: str) -> None:
        """An agent asks until it gets 200."""
        for _ in range(3):
            try:
                self._finalize(actor, tick)
            except LockstepError:
                continue
            self.answered.append(tick)
            return

    def dispatch(self, actor: Actor) -> None:
        """The Lambda: one invocation with what is visible."""
        now = self.world.time.monotonic()
        batch = [one for one in self.messages if one[1] <= now][:10]
        for one in batch:
            one[1] = now + VISIBILITY_SECONDS
        if not batch:
            return
        fresh = []
        for tick, _ in batch:
            if self._call(actor, "dynamodb.put_if_absent", lambda tick=tick: self._absent(tick)):
                fresh.append(tick)
        if fresh:
            self._call(actor, "ecs.run_task", lambda: self.tasks.append(fresh))
        self.messages = [one for one in self.messages if one not in batch]

    def task(self, actor: Actor, ticks: list[str]) -> None:
        """One ECS task: read the state, apply exactly these ticks, write the state."""
        state = self._call(actor, "s3.get_silver", lambda: self.silver)
        for tick in ticks:
            if tick in self.source.damaged:
                self.source.damaged.discard(tick)  # a passing fault: it would work the next time
                raise Transient("the task failed.", unit=tick)
            state = (*state, tick)
        self._call(actor, "s3.put_silver", lambda: setattr(self, "silver", state))

    def recover(self) -> None:
        """The operator's script."""
        waiting = {tick for tick, _ in self.messages}
        for tick in sorted(self.audited - self.dispatched - waiting):
            self.messages.append([tick, 0.0])

    def facts(self) -> Facts:
        wanted = [tick for tick in self.source.expected if tick in self.answered]
        effects = [tick for tick in self.silver if tick in wanted]
        return Facts(wanted, effects, set(self.dispatched))

    def _finalize(self, actor: Actor, tick: str) -> None:
        if tick in self.committed:
            return
        self._call(actor, "s3.put_bronze", lambda: None)
        self._call(actor, "sqs.send", lambda: self.messages.append([tick, 0.0]))
        self._call(actor, "dynamodb.put", lambda: self.audited.add(tick))
        self._call(actor, "sqlite.commit", lambda: self.committed.append(tick))

    def _absent(self, tick: str) -> bool:
        if tick in self.dispatched:
            return False
        self.dispatched.add(tick)
        return True

    def _call(self, actor, step, action):
        return self.world.call(actor, step, action, unreachable)


def run(world: World, scenario: Scenario) -> Facts:
    """Play the scenario: a tick per schedule tick, then as many rounds as it takes."""
    source = Source(scenario)
    this = OriginalTicks(world, source)
    for tick in scenario.ticks(world):
        if source.advance(tick) and tick < len(source.expected):
            world.start(f"agent.{tick}", lambda actor, unit=source.expected[tick]: this.finalize(actor, unit))
            world.run()
        if scenario.repeat and this.messages:
            this.messages.append([this.messages[0][0], 0.0])
        if scenario.reorder and tick < len(source.expected) - 1:
            continue  # the queue holds them back, and delivers the last one first
        if scenario.reorder:
            this.messages.reverse()
        if scenario.lose_message and tick == 1 and this.messages:
            this.messages.pop(0)
        scenario.together(world, tick, [("sensor", this.dispatch)] * scenario.copies)
        scenario.together(
            world,
            tick,
            [("worker", lambda actor, ticks=ticks: this.task(actor, ticks)) for ticks in this.tasks],
            rivals=False,
        )
        this.tasks.clear()
        this.recover()
        world.time.pass_by(VISIBILITY_SECONDS)
    return this.facts()
