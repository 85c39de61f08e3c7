"""Short ways to build plans, executions and answers for the readiness tests."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from lockstep.readiness import rules
from lockstep.readiness.model import (
    Category,
    Evaluated,
    Event,
    Execution,
    Key,
    MonitorPlan,
    Plan,
    Reason,
    RetryPlan,
    Started,
    Step,
    Tick,
    TraitPlan,
    TraitResult,
    TraitStatus,
    TriggerPlan,
)

NOW = datetime(2026, 3, 10, 8, 0, tzinfo=UTC)
DAY = date(2026, 3, 10)
KEY = Key("sales", DAY, "daily")
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
TRAITS = (TraitPlan("fresh", evaluator="builtin:x"), TraitPlan("upstream", evaluator="builtin:x"))


def plan(**changes: Any) -> Plan:
    given = {"pipeline": "sales", "traits": TRAITS, "trigger": TriggerPlan("http")}
    return Plan(**{**given, **changes})


def monitored(*rules_: Any, **changes: Any) -> Plan:
    return plan(monitor=MonitorPlan(True, timedelta(hours=2), tuple(rules_)), **changes)


def opened(the_plan: Plan | None = None, now: datetime = NOW, key: Key = KEY, reason: Reason = Reason.SCHEDULE):
    return rules.open_execution(the_plan or plan(), key, now, reason).state


def answers(fresh: str = "PASS", upstream: str = "PASS", **values: Any) -> tuple[TraitResult, ...]:
    def one(trait: str, status: str) -> TraitResult:
        category = Category.TRANSIENT if status == "ERROR" else None
        return TraitResult(trait, TraitStatus(status), value=values if trait == "fresh" else {}, category=category)

    return one("fresh", fresh), one("upstream", upstream)


def evaluated(state: Execution, fresh: str = "PASS", upstream: str = "PASS", **values: Any) -> Evaluated:
    return Evaluated(state.run_id, answers(fresh, upstream, **values))


def after(state: Execution, *events: Event, now: datetime = NOW) -> Execution:
    for event in events:
        state = rules.step(state, event, now).state
    return state


def ticked(state: Execution, now: datetime = NOW) -> Step:
    return rules.step(state, Tick(), now)


def running(the_plan: Plan | None = None, now: datetime = NOW) -> Execution:
    state = opened(the_plan, now)
    state = after(state, evaluated(state), now=now)
    return after(state, Started(state.run_id, {"id": "job-1"}), now=now)


def kinds(step: Step) -> list[str]:
    """Names of the emitted event kinds, in order."""
    return [effect.kind for effect in step.effects if type(effect).__name__ == "Emit"]


def alerts(step: Step) -> list[str]:
    return [e.details["kind"] for e in step.effects if type(e).__name__ == "Emit" and e.kind == "ALERT"]


RETRY = RetryPlan(max_attempts=3, backoff_seconds=30)
