"""Readiness in the lab: two pipelines, a place where their jobs run, and a system that asks for executions by marker.

What belongs here: what drivers (hand.py) and the lab share. What does not: processes and doors (lab.py), judgement. The
place speaks Airflow's language, so that the project's own trigger starts, polls and cancels over the wire.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lockstep.faults.clients import Run
from lockstep.faults.history import Outcome, Verb
from lockstep.faults.proxy import LOOPBACK
from lockstep.faults.readiness_ledger import Ledger, unit_of
from lockstep.kernel.errors import LockstepError, LostClaim
from lockstep.kernel.settings import Settings
from lockstep.readiness import config
from lockstep.readiness.control import Control, NotFound, NotReady
from lockstep.readiness.model import (
    Budgets,
    IllegalTransition,
    Key,
    Plan,
    PollOutcome,
    Reason,
    RetryPlan,
    SlaPlan,
    TraitPlan,
    TriggerPlan,
)
from lockstep.readiness.plane import Plane
from lockstep.readiness.worker import Driver, Limits

VARIABLE = "FAULT_LAB_JOBS"
"""Where drivers find the place of the jobs; no setting, so not LOCKSTEP_…"""
TABLE = "readiness"
_FIRST_DAY = date(2025, 1, 1)
_SECONDS = timedelta(seconds=2)
_ATTEMPTS = 8


def plans(url: str) -> Mapping[str, Plan]:
    """A pipeline that is asked for by marker, and one that follows it."""
    options = {"url": url, "dag_id": "lab", "api": "v1", "body": {}, "headers": {}}
    shared: dict[str, Any] = {
        "trigger": TriggerPlan("airflow", options, timeout=5),
        "retry": RetryPlan(max_attempts=3, backoff_seconds=2),
        "budgets": Budgets(manual=1, late_data=1),
        "interval": _SECONDS,
        "poll_interval": _SECONDS,
        "run_timeout": timedelta(minutes=2),
        "watched": False,
    }
    reachable = TraitPlan("reachable", True, "builtin:table-reachable", {}, 0, 5)
    upstream = TraitPlan("upstream", True, "builtin:upstream-job-log", {"upstreamPipeline": "lab-load"}, 0, 5)
    mart = {**shared, "sla": SlaPlan(validation_timeout=timedelta(minutes=1))}
    mart["retry"] = RetryPlan(max_attempts=1)
    return config.connect(
        {"lab-load": Plan("lab-load", (reachable,), **shared), "lab-mart": Plan("lab-mart", (upstream,), **mart)}
    )


def plane_of(settings: Settings, url: str, dynamodb: Any = None) -> Plane:
    """The deployment's plane with the lab's pipelines instead of the shipped ones."""
    from resources.readiness import build_deployment  # opened only where a lab runs

    found = plans(url)
    return replace(build_deployment(settings, dynamodb=dynamodb).plane, plans=lambda: found, plan=found.get)


def control_of(plane: Plane) -> Control:
    """Requests on that plane."""
    return Control(plane, Driver(plane, Limits(threads=1)))


def ledger(dynamodb: Any, url: str) -> Ledger:
    """The whole table, as it is."""
    pages = dynamodb.get_paginator("scan").paginate(TableName=TABLE, ConsistentRead=True)
    return Ledger([item for page in pages for item in page["Items"]], plans(url))


@dataclass
class _Job:
    ends_at: float
    outcome: str


@dataclass
class JobPlace:
    """Runs jobs, once for each id; refuses some requests, and counts every start."""

    seed: int
    jobs: dict[str, _Job] = field(default_factory=dict)
    starts: list[str] = field(default_factory=list)
    calm: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.seed}/jobs")  # noqa: S311  # reproducible on purpose

    def start(self, token: str) -> HTTPStatus:
        """Create the run; one that exists is in conflict."""
        with self._lock:
            if not self.calm and self._chance.random() < 0.1:
                return HTTPStatus.SERVICE_UNAVAILABLE
            if token in self.jobs:
                return HTTPStatus.CONFLICT
            outcome = "success" if self.calm or self._chance.random() < 0.85 else "failed"
            self.jobs[token] = _Job(time.monotonic() + self._chance.choice((0.0, 2.0, 6.0)), outcome)
            self.starts.append(token)
            return HTTPStatus.OK

    def state(self, token: str) -> str | None:
        """What Airflow would say."""
        with self._lock:
            job = self.jobs.get(token)
            return None if job is None else "running" if job.ends_at > time.monotonic() else job.outcome

    def stop(self, token: str) -> None:
        """Mark it failed, if it still runs."""
        with self._lock:
            job = self.jobs.get(token)
            if job is not None and job.ends_at > time.monotonic():
                job.outcome, job.ends_at = "failed", time.monotonic()

    def outcome(self, token: str) -> str:
        """In the words of readiness."""
        state = self.state(token) or "never started"
        return PollOutcome.SUCCEEDED.value if state == "success" else state

    @contextmanager
    def serving(self) -> Iterator[int]:
        """On a port of its own."""
        server = _QuietServer((LOOPBACK, 0), _handler(self))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()


class _QuietServer(ThreadingHTTPServer):
    """Callers that the nemesis cuts off are what the lab is for: no trace of each on the terminal."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None: ...


def _handler(place: JobPlace) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            token = str(self._body()["dag_run_id"])
            self._answer(place.start(token), {"dag_run_id": token})

        def do_GET(self) -> None:
            state = place.state(self.path.rpartition("/")[2])
            self._answer(HTTPStatus.OK if state else HTTPStatus.NOT_FOUND, {"state": state})

        def do_PATCH(self) -> None:
            self._body()
            place.stop(self.path.rpartition("/")[2])
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            """Thousands of requests are no news."""

        def _body(self) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            return found

        def _answer(self, status: HTTPStatus, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


@dataclass
class MarkerClient:
    """Asks for one date after another, and tells of late data of dates that it asked for before."""

    run: Run
    control: Control
    """Through the doors."""
    asked: list[Key] = field(default_factory=list)

    def work(self) -> None:
        """Markers until the run is over."""
        chance = random.Random(f"{self.run.seed}/markers")  # noqa: S311  # reproducible on purpose
        while not self.run.pause(chance.uniform(0.5, 2.0)):
            key = Key("lab-load", _FIRST_DAY + timedelta(days=len(self.asked)))
            self.asked.append(key)
            self.mark(key, "external")
            if chance.random() < 0.2:
                self.mark(chance.choice(self.asked), "late-data:lab")

    def mark(self, key: Key, source: str) -> None:
        """One marker, written until it is known to be."""
        unit = unit_of(key)
        for _ in range(_ATTEMPTS):
            begun = self.run.history.invoke("marker", Verb.WRITE, unit, at=self.run.now)
            try:
                self.control.mark(key, source)
            except LockstepError:
                self.run.history.end(begun, Outcome.INFO, at=self.run.now)
                time.sleep(0.5)
                continue
            self.run.history.end(begun, Outcome.OK, unit=unit, at=self.run.now)
            return

    def rerun(self, chance: random.Random) -> bool:
        """A person runs something once more, at whatever moment."""
        if not self.asked:
            return False
        name = f"lab-rerun-{self.run.seed}-{chance.getrandbits(40):x}"
        begun = self.run.history.invoke("operator", Verb.WRITE, name, at=self.run.now)
        try:
            self.control.rerun(chance.choice(self.asked), Reason.MANUAL, "fault lab", name)
        except NotReady:
            self.run.history.end(begun, Outcome.OK, unit=name, at=self.run.now)
        except (IllegalTransition, NotFound, LostClaim):
            self.run.history.end(begun, Outcome.FAIL, at=self.run.now)
        except LockstepError:
            self.run.history.end(begun, Outcome.INFO, at=self.run.now)
        else:
            self.run.history.end(begun, Outcome.OK, unit=name, at=self.run.now)
        return True

    def cancel(self, chance: random.Random) -> bool:
        """A person stops something."""
        if not self.asked:
            return False
        self.control.cancel(chance.choice(self.asked), "fault lab")
        return True


def address() -> str:
    """Where this process finds the jobs."""
    return os.environ[VARIABLE]
