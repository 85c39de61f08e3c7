"""The Dagster trigger and the readiness asset against the real webserver, daemon and code server."""

from __future__ import annotations

import secrets
import time
from datetime import date, timedelta
from typing import Any

import httpx
import pytest

from lockstep.kernel.ids import SystemIds
from lockstep.readiness.model import Category, Key, PollOutcome, Started
from lockstep.readiness.triggers.base import Job
from lockstep.readiness.triggers.dagster import DagsterGraph, DagsterTrigger
from platform_assets.readiness import asset_name
from resources.readiness_plane import ReadinessResource

pytestmark = [pytest.mark.stack, pytest.mark.platform]

DEADLINE_SECONDS = 240


@pytest.fixture
def graph(stack: Any) -> DagsterGraph:
    return DagsterGraph(httpx.Client(timeout=60), stack.site().environment["LOCKSTEP_DAGSTER_URL"])


def _job(**changes: Any) -> Job:
    options = {"job": None, "assets": [], "partition": None, "run_config": {}, "tags": {}}
    place = {"location": "lockstep", "repository": "__repository__"}
    return Job(Key("e2e", date(2026, 1, 1)), SystemIds().new_id(), 1, {**options, **place, **changes}, 60)


def test_a_partition_is_launched_once_and_followed_to_its_end(graph: DagsterGraph, dynamodb: Any):
    """Guards the default trigger whole: token, launch, queue, run, status, and the asset's own door."""
    key = Key("ticks-silvered", date(2026, 1, 1) + timedelta(days=secrets.randbelow(300)), "h07")
    trigger, job = (
        DagsterTrigger(graph),
        _job(assets=[asset_name(key.pipeline)], partition=f"{key.date.isoformat()}|{key.schedule}"),
    )
    started = trigger.start(job)
    assert isinstance(started, Started), started
    assert trigger.start(job) == started, "the run that carries the token is adopted"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (polled := trigger.status(job, started.handle)).outcome is PollOutcome.RUNNING:
        assert time.monotonic() < deadline, polled
        time.sleep(1)
    assert polled.outcome is PollOutcome.SUCCEEDED, polled
    plane = ReadinessResource().plane()
    assert plane.store.status(key, plane.clock.now()).is_success
    config = {"asset": asset_name(key.pipeline), "partition": job.options["partition"]}
    assert graph.asset_freshness(config, key, plane.clock.now())["ageSeconds"] is not None


def test_what_dagster_does_not_know_is_refused_for_good(graph: DagsterGraph):
    answer = DagsterTrigger(graph).start(_job(job="no_such_job"))
    assert getattr(answer, "category", None) is Category.PERMANENT, answer


def test_a_run_that_nobody_knows_is_unknown_and_not_failed(graph: DagsterGraph):
    polled = DagsterTrigger(graph).status(_job(), {"dagster_run_id": SystemIds().new_id()})
    assert polled.outcome is PollOutcome.UNKNOWN
