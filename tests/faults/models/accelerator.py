"""The vendor's Redshift accelerator, its logic restated from what reference/veeva.md §5 records of its source.

By the numbers of that list:
- flow and 6: every run lists the files and takes the last one listed, `data[-1]`; an `error` entry is dropped by the
  model without a word, other windows are skipped.
- 1: every statement commits by itself; an update is a DELETE of the staged keys and then an INSERT.
- 2, 3: errors are logged and swallowed; the connection stays aborted, so later statements of that load fail too.
- "No MERGE, no transaction, no ledger, no watermark": a run knows nothing of earlier runs.
- 13: no MD5, size or row-count check: a damaged archive is loaded as far as it goes.
In its favour: it is run once for each published window and never twice at the same time, the file that it loads is the
one that it downloaded (7 says otherwise), metadata never changes (4, 5), and its conversions (11, 12) are harmless.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.faults.schedule import Actor, World, unreachable
from lockstep.kernel.errors import LockstepError
from tests.faults.models.oracle import Facts
from tests.faults.models.scripts import Scenario, Source


@dataclass
class Accelerator:
    """A warehouse, and a script that loads the newest file into it."""

    world: World
    source: Source
    deleted: list[str] = field(default_factory=list)
    inserted: list[str] = field(default_factory=list)

    def load(self, actor: Actor) -> None:
        try:
            listed = self._call(actor, "vendor.list", self.source.offered)
            if not listed:
                return
            unit = listed[-1]
            self._call(actor, "vendor.download", lambda: None)
            if unit in self.source.damaged:
                return  # the exception is logged, the process ends with 0
            self._call(actor, "redshift.copy", lambda: None)
            self._call(actor, "redshift.delete", lambda: self.deleted.append(unit))
            self._call(actor, "redshift.insert", lambda: self.inserted.append(unit))
        except LockstepError:
            return  # logged and swallowed; whatever was committed stays

    def facts(self) -> Facts:
        """Rows deleted without their successors are a spoiled window; a run that ended is finished, whatever it did."""
        expected = self.source.expected
        spoiled = {unit for unit in self.deleted if unit not in self.inserted}
        return Facts(expected, [one for one in self.inserted if one in expected], set(expected), spoiled)

    def _call(self, actor, step, action):
        return self.world.call(actor, step, action, unreachable)


def run(world: World, scenario: Scenario) -> Facts:
    """Play the scenario: one run for each window that the vendor publishes."""
    source = Source(scenario)
    this = Accelerator(world, source)
    for tick in scenario.ticks(world):
        if source.advance(tick):
            scenario.together(world, tick, [("worker", this.load)], rivals=False)
    return this.facts()
