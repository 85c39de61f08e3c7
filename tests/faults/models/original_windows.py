"""The window design as its document describes it, read in its favour wherever it is silent.

Restated from requirements/windows.md, by section:
- §3: every 15 minutes the producer calls the incremental endpoint, writes the files and "Insert DynamoDB record:
  status = READY"; "Retrieval / extract failure → no DynamoDB entry", "Next scheduled run retries". In its favour: each
  run looks at everything that is listed and inserts what has no row yet.
- §5: the waker starts a consumer on a new READY row, FAILED → READY and PROCESSING → APPLIED if no row is PROCESSING.
  In its favour: stream records are never lost, and Step Functions itself never dies and repeats its own calls.
- §6: "Query earliest window where status != APPLIED"; READY → process, FAILED and PROCESSING → stop.
- §7: one transaction per window. In its favour: TRUNCATE does not commit, as it does in Redshift.
- §8: "Window marked FAILED" on any apply failure; in its favour also when the job's process dies.
- §9: support sets FAILED → READY. §10: READY → PROCESSING by condition, "This is sufficient and safe."
- §11.3: the watermark, here the row's APPLIED, moves only after COMMIT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.faults.schedule import Actor, World, unreachable
from lockstep.kernel.crash import CrashInjected
from lockstep.kernel.errors import LockstepError, Transient
from tests.faults.models.oracle import Facts
from tests.faults.models.scripts import Scenario, Source


@dataclass
class OriginalWindows:
    """The queue row is the only record of progress."""

    world: World
    source: Source
    queue: dict[str, str] = field(default_factory=dict)
    sink: list[str] = field(default_factory=list)
    woken: bool = False

    def produce(self, actor: Actor) -> None:
        try:
            for unit in self._call(actor, "vendor.list", self.source.offered):
                if self._call(actor, "queue.get", lambda unit=unit: self.queue.get(unit)) is None:
                    self._call(actor, "s3.put", lambda: None)
                    self._call(actor, "queue.put", lambda unit=unit: self._status(unit, "READY"))
        except LockstepError:
            return  # the next scheduled run retries

    def consume(self, actor: Actor) -> None:
        """The Step Function: durable, one execution for each wake-up."""
        while True:
            waiting = [unit for unit in sorted(self.queue) if self.queue[unit] != "APPLIED"]
            if not waiting or self.queue[waiting[0]] != "READY":
                return
            self.queue[waiting[0]] = "PROCESSING"
            try:
                self._apply(actor, waiting[0])
            except (LockstepError, CrashInjected):
                self._status(waiting[0], "FAILED")
                return
            self._status(waiting[0], "APPLIED")

    def operate(self, actor: Actor) -> None:
        """Support fixes the cause and sets the window READY."""
        for unit, status in list(self.queue.items()):
            if status == "FAILED":
                self.source.damaged.discard(unit)
                self._status(unit, "READY")

    def lose_row(self) -> None:
        if self.queue:
            del self.queue[min(self.queue)]

    def facts(self, expected: Sequence[str]) -> Facts:
        finished = {unit for unit, status in self.queue.items() if status == "APPLIED"}
        return Facts(list(expected), [one for one in self.sink if one in expected], finished)

    def _apply(self, actor: Actor, unit: str) -> None:
        """The Glue job: its own process, which may die."""
        self._call(actor, "s3.get", lambda: None)
        if unit in self.source.damaged:
            raise Transient("the data cannot be applied.", unit=unit)
        self._call(actor, "redshift.commit", lambda: self.sink.append(unit))

    def _status(self, unit: str, status: str) -> None:
        before, self.queue[unit] = self.queue.get(unit), status
        self.woken |= status == "READY" or (before, status) == ("PROCESSING", "APPLIED")

    def _call(self, actor, step, action):
        return self.world.call(actor, step, action, unreachable)


def _acts(this: OriginalWindows, scenario: Scenario) -> list:
    """The schedule's producers; while one of them is paused, the stream goes on waking consumers."""
    return [*[("producer", this.produce)] * scenario.copies, *[("worker", this.consume)] * scenario.overlaps]


def run(world: World, scenario: Scenario) -> Facts:
    """Play the scenario: one schedule tick per window, then as many as it takes."""
    source = Source(scenario)
    this = OriginalWindows(world, source)
    for tick in scenario.ticks(world):
        source.advance(tick)
        scenario.together(world, tick, _acts(this, scenario))
        if this.woken:
            this.woken = "PROCESSING" in this.queue.values()
            if not this.woken:
                scenario.together(world, tick, [("worker", this.consume)])
        scenario.disturb(tick, this.lose_row)
        this.operate(None)
    return this.facts(source.expected)
