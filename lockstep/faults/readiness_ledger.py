"""The readiness table as it was found in the end, in the checker's words. The same for simulation and lab.

What belongs here: which rows are units, effects and limits. What does not: how the rows were read, and judging them
(checker.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from lockstep.faults.checker import Effect, Limit, Stores, Unit
from lockstep.faults.parts import Item
from lockstep.readiness import codec
from lockstep.readiness.model import Execution, Key, Plan, PollOutcome, Reason, RunStatus
from lockstep.readiness.store import slot_key

LANE = "readiness"


def unit_of(key: Key, generation: int = 0) -> str:
    """What the checker calls one generation of an execution."""
    return f"{LANE}/{key}/g{generation}"


def status_in(state: Execution, generation: int) -> RunStatus:
    """How an execution ended, or is, in one of its generations."""
    if state.generation == generation:
        return state.status
    return next(line.status for line in reversed(state.history) if line.generation == generation)


class Ledger:
    """Items of the table, as DynamoDB spells them. Rows of pipelines that have no plan here are left out."""

    def __init__(self, items: Iterable[Item], plans: Mapping[str, Plan]) -> None:
        self._items = sorted(items, key=lambda item: (item["PK"]["S"], item["SK"]["S"]))
        self._plans = plans

    def executions(self) -> Iterator[Execution]:
        """Every execution."""
        for item in self._items:
            plan = self._plans.get(item["PK"]["S"].removeprefix("PIPELINE#"))
            if plan is not None and item["SK"]["S"].startswith("RUNLOG#"):
                yield codec.decode_execution(_data(item), plan, int(item["version"]["N"]))

    def alerts(self) -> list[str]:
        """Ids of the alerts that the event log has, one for each line."""
        events = (_data(item) for item in self._items if item["SK"]["S"].startswith("EVENT#"))
        own = (event for event in events if event["pipelineId"] in self._plans)
        return [event["details"]["alertId"] for event in own if event["kind"] == "ALERT"]

    def left(self) -> int:
        """How many executions have not ended, and markers were not heard."""
        markers = sum(item["PK"]["S"].removeprefix("MARKER#") in self._plans for item in self._items)
        return markers + sum(state.is_open for state in self.executions())

    def stores(self, starts: Iterable[str], outcome: Callable[[str], str], told: Collection[str] | None) -> Stores:
        """All of it.

        Args:
            starts: The token of every start of a job, in order, as the place where they run counted them.
            outcome: How the job of a token is there.
            told: The alerts that reached a person; None if nobody can say.
        """
        found = Stores()
        for state in self.executions():
            for generation in range(state.generation):
                status = status_in(state, generation)
                found.units.append(Unit(unit_of(state.key, generation), status.value, status.is_terminal))
            found.units.append(Unit(unit_of(state.key, state.generation), state.status.value, not state.is_open))
        self._add_reruns(found)
        known = self._add_runs(found, outcome)
        tokens = list(starts)
        found.effects += [Effect(f"{LANE}/jobs", token) for token in tokens]
        found.limits += [Limit(one, "starts of a run that nobody knows", 1, 0) for one in sorted(set(tokens) - known)]
        alerts = self.alerts()
        found.effects += [Effect(f"{LANE}/alerts", one) for one in alerts]
        found.units += [Unit(one, "raised", told is None or one in told) for one in sorted(set(alerts))]
        return found

    def _add_reruns(self, found: Stores) -> None:
        counts: Counter[tuple[Key, Reason]] = Counter()
        for row in self._truths("RERUN#"):
            key = slot_key(row["pipelineId"]["S"], f"{row['originalDate']['S']}#{row['scheduleId']['S']}")
            if key.pipeline in self._plans:
                name, status = row["rerunId"]["S"], row["status"]["S"]
                counts[key, Reason(row["reason"]["S"])] += 1
                found.units.append(Unit(name, status, status != RunStatus.PENDING, key=name))
        for (key, reason), count in counts.items():
            allowed = self._plans[key.pipeline].budgets.allowed(reason)
            found.limits.append(Limit(str(key), f"{reason} reruns", count, allowed))

    def _add_runs(self, found: Stores, outcome: Callable[[str], str]) -> set[str]:
        """Runs, each with what became of its job; returns their tokens."""
        tries: Counter[tuple[Key, int]] = Counter()
        known = set()
        for row in self._truths("RUN#"):
            data, status = _data(row), RunStatus(row["status"]["S"])
            if data["pipelineId"] not in self._plans:
                continue
            token = data["runId"]
            known.add(token)
            tries[slot_key(data["pipelineId"], f"{data['date']}#{data['scheduleId']}"), data["generation"]] += 1
            promised = PollOutcome.SUCCEEDED.value if status.is_success else None
            found.units.append(Unit(f"run {token}", status.value, status.is_terminal, None, promised, outcome(token)))
        for (key, generation), count in tries.items():
            most = self._plans[key.pipeline].retry.max_attempts
            found.limits.append(Limit(unit_of(key, generation), "tries", count, most))
        return known

    def _truths(self, prefix: str) -> Iterator[Item]:
        return (one for one in self._items if one["PK"]["S"].startswith(prefix) and one["SK"]["S"] == "STATE")


def _data(item: Item) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(item["data"]["S"])
    return found
