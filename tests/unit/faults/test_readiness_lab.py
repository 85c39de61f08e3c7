"""The lab's place for jobs: the project's own trigger talks to it over the wire, and it counts honestly.

Silent failure guarded: a place that starts nothing, or forgets a start, would make every run of the lab a success.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from lockstep.faults.checker import Promise, check
from lockstep.faults.clients import Run
from lockstep.faults.history import History
from lockstep.faults.parts import MemoryDynamo
from lockstep.faults.readiness_lab import TABLE, JobPlace, MarkerClient, control_of, plane_of, plans
from lockstep.faults.readiness_ledger import Ledger, unit_of
from lockstep.kernel.clock import FakeClock
from lockstep.kernel.settings import load_settings
from lockstep.readiness.model import Key, PollOutcome, Started, StartFailed
from lockstep.readiness.triggers.base import Job
from lockstep.readiness.triggers.web import AirflowTrigger
from lockstep.readiness.worker import Driver, Limits
from tests.unit.readiness.builders import DAY, NOW


@pytest.fixture
def place() -> Iterator[tuple[JobPlace, AirflowTrigger, Job]]:
    jobs = JobPlace(seed=1, calm=True)
    with jobs.serving() as port, httpx.Client() as client:
        trigger = plans(f"http://127.0.0.1:{port}")["lab-load"].trigger
        assert trigger is not None
        yield jobs, AirflowTrigger(client), Job(Key("lab-load", DAY), "token-1", 1, trigger.options, 5)


def test_a_job_starts_once_however_often_it_is_asked_for(place: tuple[JobPlace, AirflowTrigger, Job]):
    jobs, trigger, job = place
    answers = [trigger.start(job) for _ in range(3)]
    assert all(isinstance(one, Started) for one in answers)
    assert jobs.starts == ["token-1"]
    jobs.jobs["token-1"].ends_at = 0.0
    assert trigger.status(job, answers[0].handle).outcome is PollOutcome.SUCCEEDED
    assert (jobs.outcome("token-1"), jobs.outcome("other")) == ("succeeded", "never started")


def test_a_job_that_is_stopped_has_failed(place: tuple[JobPlace, AirflowTrigger, Job]):
    jobs, trigger, job = place
    trigger.start(job)
    jobs.jobs["token-1"].ends_at = float("inf")
    assert trigger.status(job, {}).outcome is PollOutcome.RUNNING
    assert trigger.cancel(job, {})
    assert trigger.status(job, {}).outcome is PollOutcome.FAILED


def test_while_faults_happen_some_starts_are_refused_and_do_nothing(place: tuple[JobPlace, AirflowTrigger, Job]):
    jobs, trigger, job = place
    jobs.calm = False
    answers = [trigger.start(job._replace(token=f"t{number}")) for number in range(60)]
    refused = sum(isinstance(one, StartFailed) for one in answers)
    assert 0 < refused < 60
    assert len(jobs.starts) == 60 - refused


def test_the_mart_of_the_lab_follows_its_load():
    assert plans("http://127.0.0.1:1")["lab-load"].downstream == ("lab-mart",)


def test_a_marked_date_runs_its_load_and_its_mart_once_and_the_ledger_says_so():
    """The lab's pipelines end to end, with the project's own plane, on a table in memory."""
    dynamo = MemoryDynamo({TABLE: ("PK", "SK")}, indexes={"GSI1": "GSI1SK"})
    jobs = JobPlace(seed=1, calm=True)
    with jobs.serving() as port:
        url = f"http://127.0.0.1:{port}"
        settings = load_settings(readiness_allowed_hosts=f"127.0.0.1:{port}")
        plane = replace(plane_of(settings, url, dynamo), clock=(clock := FakeClock(NOW)))
        client, driver = MarkerClient(Run(History(), 1), control_of(plane)), Driver(plane, Limits(threads=1))
        client.mark(key := Key("lab-load", DAY), "external")
        for _ in range(12):
            driver.tick(driver.sweep(0, 10)[0])
            clock.advance(3)
            for job in jobs.jobs.values():
                job.ends_at = 0.0
    ledger = Ledger(dynamo.tables[TABLE].values(), plans(url))
    assert (len(jobs.starts), ledger.left()) == (2, 0)
    stores = ledger.stores(jobs.starts, jobs.outcome, None)
    assert check(client.run.history, stores) == []
    assert {unit_of(key), unit_of(key._replace(pipeline="lab-mart"))} <= {one.unit for one in stores.units}
    stores = ledger.stores([*jobs.starts, jobs.starts[0], "stray"], jobs.outcome, ())
    assert {one.promise for one in check(client.run.history, stores)} == {Promise.ONCE, Promise.LIMITS}
