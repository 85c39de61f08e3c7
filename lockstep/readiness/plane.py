"""What driver, requests, watchdog and handlers all stand on, as one value.

What belongs here: the parts they share. What does not: what they do with them, and how the parts are made (resources/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.kernel.clock import Clock
from lockstep.kernel.ids import IdSource
from lockstep.readiness.alerts import AlertDoor, Dispatcher
from lockstep.readiness.evaluators.runner import Runner
from lockstep.readiness.model import Plan
from lockstep.readiness.store import Store
from lockstep.readiness.triggers.base import Triggers


@dataclass(frozen=True)
class Plane:
    """One plane. Configuration is asked for every time, so that a change takes effect.

    `plans` are all, as of some seconds ago; `plan` is one as it is now, or None.
    """

    store: Store
    plans: Callable[[], Mapping[str, Plan]]
    plan: Callable[[str], Plan | None]
    runner: Runner
    triggers: Triggers
    dispatcher: Dispatcher
    clock: Clock
    ids: IdSource

    @property
    def alerts(self) -> AlertDoor:
        """The door for alerts that no execution carries."""
        return AlertDoor(self.store, self.dispatcher, self.clock, self.ids)
