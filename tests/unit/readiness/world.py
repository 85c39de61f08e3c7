"""A small world around the real driver, store, watchdog and control: a fake clock, readings and a job service.

The job service is honest on the wire: one token is one job, answers can be lost, states can be unreadable.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import httpx

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.ids import SeededIds
from lockstep.readiness import config, timing
from lockstep.readiness.alerts import Dispatcher
from lockstep.readiness.control import Control
from lockstep.readiness.evaluators.builtin import Builtins
from lockstep.readiness.evaluators.http import HttpEvaluator
from lockstep.readiness.evaluators.runner import Runner
from lockstep.readiness.model import (
    Alert,
    Category,
    Execution,
    Key,
    Plan,
    Polled,
    PollOutcome,
    Started,
    StartFailed,
    TraitPlan,
    TriggerPlan,
)
from lockstep.readiness.plane import Plane
from lockstep.readiness.store import Marker, Store
from lockstep.readiness.table import MemoryTable, Table
from lockstep.readiness.triggers.base import Job, StartAnswer, Triggers
from lockstep.readiness.triggers.web import HttpTrigger
from lockstep.readiness.watchdog import Watchdog
from lockstep.readiness.worker import Driver, Limits
from tests.unit.readiness.builders import NOW


class Jobs:
    """Runs jobs by name of their token."""

    def __init__(self) -> None:
        self.state: dict[str, str] = {}
        self.starts: list[str] = []
        self.cancels: list[str] = []
        self.refuse: Category | None = None
        self.lose_answers = 0
        self.unreadable = False
        self.finish_at_once = False
        self.most_alive = 0

    def start(self, job: Job) -> StartAnswer:
        if self.refuse is not None:
            return StartFailed(job.token, self.refuse, "refused")
        if job.token not in self.state:
            self.starts.append(job.token)
            self.state[job.token] = "succeeded" if self.finish_at_once else "running"
        self.most_alive = max(self.most_alive, list(self.state.values()).count("running"))
        if self.lose_answers:
            self.lose_answers -= 1
            raise ConnectionError("the answer was lost")
        return Started(job.token, {"job": job.token}, finished=self.finish_at_once)

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        if self.unreadable:
            raise ConnectionError("503")
        return Polled(job.token, PollOutcome(self.state.get(job.token, "unknown")), Category.TRANSIENT, "job says so")

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        self.cancels.append(job.token)
        if self.unreadable:
            return False
        if self.state.get(job.token) == "running":
            self.state[job.token] = "cancelled"
        return True

    def end(self, outcome: str = "succeeded") -> None:
        """Let every running job end."""
        self.state = {token: outcome if state == "running" else state for token, state in self.state.items()}


class Pager:
    """A sink that remembers, and can be broken."""

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self.broken = False

    def send(self, alert: Alert) -> None:
        if self.broken:
            raise OSError("nobody answers")
        self.alerts.append(alert)

    @property
    def kinds(self) -> list[str]:
        return [alert.kind for alert in self.alerts]


class World:
    """Everything wired together over one table."""

    def __init__(
        self,
        *plans: Plan,
        now: datetime = NOW,
        table: Table | None = None,
        threads: int = 1,
        web: httpx.Client | None = None,
    ) -> None:
        self.clock = FakeClock(now)
        self.table = table or MemoryTable()
        self.ids = SeededIds(7)
        self.store = Store(self.table, self.ids)
        self.jobs, self.pager = Jobs(), Pager()
        self.readings: dict[tuple[str, str], Any] = {}
        self.asked: list[tuple[str, str]] = []
        self.plans = config.connect({plan.pipeline: plan for plan in plans})
        http = HttpEvaluator(web, self.clock) if web else None
        self.runner = Runner(self.clock, Builtins(self.store, {"tick-lag": self._read}), http=http)
        self.dispatcher = Dispatcher([self.pager], self.clock)
        triggers = Triggers({"http": HttpTrigger(web) if web else self.jobs, "dagster": self.jobs})
        self.plane = Plane(
            self.store,
            lambda: self.plans,
            self.plans.get,
            self.runner,
            triggers,
            self.dispatcher,
            self.clock,
            self.ids,
        )
        self.driver = self.new_driver(threads)
        self.control = Control(self.plane, self.driver)
        self.watchdog = Watchdog(self.plane)
        for plan in plans:
            self.store.register(plan.pipeline, {}, origin="test", since=timing.first_starts(plan, now))

    def new_driver(self, threads: int = 1, **limits: Any) -> Driver:
        return Driver(self.plane, Limits(threads=threads, **limits))

    def _read(self, config_: Mapping[str, Any], key: Key, now: datetime) -> Mapping[str, Any]:
        place = (key.pipeline, str(config_["reading"]))
        self.asked.append(place)
        value = self.readings.get(place, 0)
        if isinstance(value, Exception):
            raise value
        if callable(value):
            value = value()
        if isinstance(value, threading.Event):
            value.wait(30)
            return {"lagSeconds": 0}
        return value if isinstance(value, dict) else {"lagSeconds": value}

    def read(self, value: Any, *, trait: str = "fresh", pipeline: str = "sales") -> None:
        """What the evaluator of a trait will find: seconds behind (100 are allowed), values, or an error."""
        self.readings[(pipeline, trait)] = value

    def tick(self, *markers: Marker, seconds: float = 0) -> Any:
        self.clock.advance(seconds)
        report = self.driver.tick(markers)
        assert not report.failures, report.failures
        return report

    def ticks(self, count: int, seconds: float = 31) -> None:
        for _ in range(count):
            self.tick(seconds=seconds)

    def state(self, key: Key) -> Execution:
        found = self.store.load(key, self.plans[key.pipeline], self.clock.now())
        assert found is not None, key
        return found

    def kinds(self, key: Key) -> list[str]:
        return [e["kind"] for e in self.store.events(key.pipeline, self.clock.now(), limit=500, newest=False, key=key)]

    def after(self, **length: float) -> datetime:
        return self.clock.now() + timedelta(**length)


def trait(name: str = "fresh", *, ttl: int = 0, required: bool = True, **config_: Any) -> TraitPlan:
    """A trait that the world's readings answer: PASS up to 100 seconds behind."""
    return TraitPlan(name, required, "builtin:tick-lag", {"maxLagSeconds": 100, "reading": name, **config_}, ttl, 5)


def pipeline(name: str = "sales", *traits: TraitPlan, **changes: Any) -> Plan:
    given: dict[str, Any] = {"traits": traits or (trait(),), "trigger": TriggerPlan("http")}
    return Plan(name, **{**given, **changes})
