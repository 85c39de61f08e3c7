"""The watchdog: notices what did not happen, on a clock of its own, in a process of its own.

What belongs here: absence (missed schedules, silent drivers, stalled evaluations, stuck runs) and deadlines. What does
not: doing the driver's work in its place. Every check stands alone; one that fails is said aloud and stops no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, TypeVar

from lockstep.kernel.errors import LostClaim
from lockstep.kernel.logs import get_logger
from lockstep.readiness import rules, timing
from lockstep.readiness.model import (
    FACTS,
    Alert,
    DeliverAlerts,
    Delivered,
    Emit,
    Execution,
    Key,
    Level,
    Plan,
    RunStatus,
    Step,
    Tick,
)
from lockstep.readiness.plane import Plane
from lockstep.readiness.store import Registered, slot_key

SELF: Final = "lockstep-readiness"
LOOKBACK: Final = timedelta(minutes=15)
LONGEST_LOOKBACK: Final = timedelta(hours=24)
STUCK_AFTER: Final = timedelta(minutes=30)
STALLED_AFTER: Final = timedelta(minutes=10)
SILENT_AFTER: Final = timedelta(minutes=5)
MISSED_GRACE: Final = timedelta(minutes=15)
SENDING: Final = timedelta(minutes=1)
PRUNED_PER_ROUND: Final = 20

_log = get_logger(__name__)
T = TypeVar("T")


@dataclass
class Findings:
    """What one round found, and which of its checks could not be made."""

    raised: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)


class Watchdog:
    """Looks at every pipeline from outside. Any number may run: an alert is raised once, whoever sees it first."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._store = plane.store
        self._clock = plane.clock

    def check(self) -> Findings:
        """One round over all checks. Its own failures are findings too."""
        now, findings = self._clock.now(), Findings()
        last = self._guard("heartbeat", findings, lambda: self._store.last_beat("watchdog", now))
        window = min(max(LOOKBACK, now - last if last else LOOKBACK), LONGEST_LOOKBACK)
        plans = self._guard("configuration", findings, self._plane.plans) or {}
        entries = self._guard("pipelines", findings, lambda: self._store.registered(now)) or []
        states = self._guard("executions", findings, lambda: self._open_executions(entries, plans, now)) or []
        checks: dict[str, Callable[[], object]] = {
            "missed": lambda: self._missed(plans, entries, window, now, findings),
            "deadlines": lambda: self._deadlines(states, now, findings),
            "stuck": lambda: self._stuck(states, now, findings),
            "stalled": lambda: self._stalled(states, now, findings),
            "monitoring": lambda: self._expired_monitoring(states, now, findings),
            "driver": lambda: self._driver_is_alive(now, findings),
            "undelivered": lambda: self._redeliver(entries, now),
            "prune": lambda: self._prune(sorted(plans), now),
        }
        for name, check in checks.items():
            self._guard(name, findings, check)
        if findings.broken:
            self._guard("degraded", findings, lambda: self._say_degraded(now, findings))
        else:
            self._guard("beat", findings, lambda: self._store.beat("watchdog", now, timedelta(days=2)))
        return findings

    def _guard(self, name: str, findings: Findings, check: Callable[[], T]) -> T | None:
        try:
            return check()
        except Exception as error:
            findings.broken[name] = f"{type(error).__name__}: {error}"[:300]
            _log.error("watchdog check failed", check=name, error=str(error))
            return None

    def _open_executions(self, entries: list[Registered], plans: Mapping[str, Plan], now: datetime) -> list[Execution]:
        keys = {
            slot_key(entry.pipeline, slot): plans[entry.pipeline]
            for entry in entries
            if entry.pipeline in plans
            for slot in entry.open
        }
        return list(self._store.load_many(keys, now).values())

    def _missed(
        self,
        plans: Mapping[str, Plan],
        entries: list[Registered],
        window: timedelta,
        now: datetime,
        findings: Findings,
    ) -> None:
        """An execution whose time came and that nobody opened, within the window: old misses stay silent."""
        since = {entry.pipeline: entry.since for entry in entries}
        late: dict[Key, Plan] = {}
        for plan in plans.values():
            for key in timing.due_keys(plan, now, since=since.get(plan.pipeline)) if plan.watched else ():
                expected = _expected_by(plan, key)
                if expected < now <= expected + window:
                    late[key] = plan
        known = self._store.load_many(late, now)
        for key in late:
            if key not in known:
                self._raise(key, "schedule_missed", Level.ERROR, "its time came and nothing was opened", now, findings)

    def _deadlines(self, states: list[Execution], now: datetime, findings: Findings) -> None:
        """Deadlines fire here even if no driver passes by."""
        for state in states:
            self._write(state, rules.watch(state, now), now, findings)

    def _expired_monitoring(self, states: list[Execution], now: datetime, findings: Findings) -> None:
        for state in states:
            over = state.monitor_until is not None and now >= state.monitor_until + SILENT_AFTER
            if over and state.status is RunStatus.COMPLETED_MONITORING:
                self._write(state, rules.step(state, Tick(), now), now, findings)

    def _stuck(self, states: list[Execution], now: datetime, findings: Findings) -> None:
        for state in states:
            since = state.known_at or state.updated_at or state.opened_at
            if state.status.is_live and now - since > STUCK_AFTER:
                words = f"run {state.run_id} is {state.status} and was last heard of {since:%Y-%m-%d %H:%M} UTC"
                self._raise(state.key, "stuck_run", Level.ERROR, words, now, findings)

    def _stalled(self, states: list[Execution], now: datetime, findings: Findings) -> None:
        """Evaluation is due and does not happen, or its evaluators cannot answer."""
        for state in states:
            due = state.next_at or state.opened_at
            patience = max(STALLED_AFTER, state.plan.interval * 10)
            if state.status is RunStatus.PENDING and now - due > patience:
                words = f"its traits should have been looked at since {due:%Y-%m-%d %H:%M} UTC"
                self._raise(state.key, "evaluation_stalled", Level.ERROR, words, now, findings)
            if state.evaluator_errors >= rules.ERRORS_BEFORE_ALERT and "evaluator_error" not in state.alerted:
                words = f"evaluators could not answer {state.evaluator_errors} times"
                self._raise(state.key, "evaluator_error", Level.ERROR, words, now, findings)

    def _driver_is_alive(self, now: datetime, findings: Findings) -> None:
        last = self._store.last_beat("driver", now)
        if last is None or now - last <= SILENT_AFTER:
            return
        key = Key(SELF, now.date(), f"driver-{last:%H%M%S}")
        words = f"no driver has ticked since {last:%Y-%m-%d %H:%M} UTC"
        self._raise(key, "driver_silent", Level.ERROR, words, now, findings)

    def _redeliver(self, entries: list[Registered], now: datetime) -> None:
        """Alerts whose sender died before a sink took them. Younger ones are being sent at this moment."""
        for entry in entries:
            for alert in entry.undelivered:
                if now - alert.at > SENDING:
                    self._plane.alerts.deliver(alert)

    def _prune(self, names: list[str], now: datetime) -> None:
        """Stored answers of old executions, a few pipelines in each minute: their items must not grow for ever."""
        first = int(now.timestamp() // 60) * PRUNED_PER_ROUND
        for offset in range(min(PRUNED_PER_ROUND, len(names))):
            self._store.prune_traits(names[(first + offset) % len(names)], now)

    def _say_degraded(self, now: datetime, findings: Findings) -> None:
        key = Key(SELF, now.date(), f"watchdog-h{now:%H}")
        words = "; ".join(f"{name}: {error}" for name, error in findings.broken.items())
        self._store.append(key, Emit("WATCHDOG_DEGRADED", words[:500]), now)
        self._raise(key, "watchdog_degraded", Level.ERROR, words[:500], now, findings)

    def _write(self, before: Execution, step: Step, now: datetime, findings: Findings) -> None:
        if step.state is before:
            return
        facts = [effect for effect in step.effects if isinstance(effect, FACTS)]
        try:
            state = self._store.commit(before, step.state, facts, now)
        except LostClaim:
            return  # the driver is at work on it
        for effect in step.effects:
            if isinstance(effect, DeliverAlerts):
                findings.raised += [alert.id for alert in effect.alerts]
                delivered = Delivered(self._plane.dispatcher.dispatch(effect.alerts))
                self._write(state, rules.step(state, delivered, now), now, findings)

    def _raise(self, key: Key, kind: str, level: Level, words: str, now: datetime, findings: Findings) -> None:
        alert = Alert(key, kind, level, words, now)
        if self._plane.alerts.raise_alert(alert):
            findings.raised.append(alert.id)


def _expected_by(plan: Plan, key: Key) -> datetime:
    """When the driver must have opened it: soon after activation, whatever its deadline."""
    schedule = plan.schedule(key.schedule)
    if schedule is None:
        raise LookupError(key.schedule)
    return timing.activation(schedule, key.date) + MISSED_GRACE
