"""The lab's place for jobs: the project's own trigger talks to it over the wire, and it counts honestly.

Silent failure guarded: a place that starts nothing, or forgets a start, would make every run of the lab a success.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from lockstep.faults.readiness_lab import JobPlace, plans
from lockstep.readiness.model import Key, PollOutcome, Started, StartFailed
from lockstep.readiness.triggers.base import Job
from lockstep.readiness.triggers.web import AirflowTrigger
from tests.unit.readiness.builders import DAY


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
