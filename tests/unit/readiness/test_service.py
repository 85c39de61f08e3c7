"""The HTTP door: keys, problems, and requests that really do what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from lockstep.kernel.settings import Settings
from lockstep.readiness import config
from lockstep.readiness.catalogue import Catalogue
from lockstep.readiness.control import Control
from lockstep.readiness.model import ExclusionPlan, RetryPlan, RunStatus
from lockstep.readiness.plane import Plane
from lockstep.readiness.watchdog import Watchdog
from lockstep.readiness.worker import Driver, Limits
from resources.readiness import Deployment
from services.readiness import create_app
from tests.unit.readiness.builders import DAY, KEY
from tests.unit.readiness.world import World, pipeline

TODAY = DAY.isoformat()


class _Catalogue(Catalogue):
    """The world's plans beside those of the API."""

    def __init__(self, world: World) -> None:
        super().__init__(config.load([config.shipped_folder()]), world.store, world.clock)
        self._world = world

    def plans(self) -> Any:
        return {**super().plans(), **self._world.plans}

    def plan(self, pipeline: str) -> Any:
        return self._world.plans.get(pipeline) or super().plan(pipeline)


def _deployment(plane: Plane, catalogue: Catalogue) -> Deployment:
    driver = Driver(plane, Limits(threads=1))
    return Deployment(plane, catalogue, driver, Control(plane, driver), Watchdog(plane), dynamodb=None, table="")


@pytest.fixture
def world() -> World:
    only_today = ExclusionPlan(dates=frozenset({DAY - timedelta(days=1)}))
    return World(pipeline(exclusions=only_today, retry=RetryPlan(max_attempts=1)))


def _client(world: World) -> TestClient:
    """Of a replica of its own."""
    catalogue = _Catalogue(world)
    deployment = _deployment(replace(world.plane, plans=catalogue.plans, plan=catalogue.plan), catalogue)
    settings = Settings(readiness_api_key=SecretStr("right"))
    return TestClient(create_app(settings, deployment=deployment, watch=False), headers={"X-API-Key": "right"})


@pytest.fixture
def http(world: World) -> Iterator[TestClient]:
    with _client(world) as client:
        yield client


def test_the_key_guards_everything_but_health(http: TestClient):
    assert http.get("/api/health", headers={"X-API-Key": ""}).status_code == 200
    for given in ("", "wrong", "rïght"):
        answer = http.get("/api/pipelines", headers={"X-API-Key": given.encode()})
        assert (answer.status_code, answer.json()["type"]) == (401, "/problems/unauthorized")
    assert http.get("/api/pipelines").status_code == 200


def test_without_a_key_only_reading_is_allowed(world: World):
    deployment = _deployment(world.plane, _Catalogue(world))
    with TestClient(create_app(Settings(), deployment=deployment, watch=False)) as client:
        assert client.get("/api/pipelines").status_code == 200
        assert client.post("/api/pipelines/sales/run").status_code == 403
    assert world.jobs.starts == []


def test_run_really_starts_and_a_second_one_is_a_conflict_with_its_reason(http: TestClient, world: World):
    answer = http.post("/api/pipelines/sales/run", json={"date": TODAY})
    assert (answer.status_code, answer.json()["status"]) == (202, "RUNNING")
    assert len(world.jobs.starts) == 1
    again = http.post("/api/pipelines/sales/run", json={"date": TODAY})
    assert (again.status_code, again.json()["type"]) == (409, "/problems/conflict")
    assert "RUNNING already" in again.json()["detail"]


def test_a_pipeline_that_is_not_ready_is_a_412_with_what_blocks_it_and_runs_later(http: TestClient, world: World):
    world.read(500)
    answer = http.post("/api/pipelines/sales/run", json={})
    assert (answer.status_code, answer.json()["blocking"]) == (412, ["fresh"])
    world.read(0)
    world.tick(seconds=31)
    assert world.state(KEY).status is RunStatus.RUNNING


def test_a_job_reports_its_end_once(http: TestClient, world: World):
    run_id = http.post("/api/pipelines/sales/run", json={}).json()["runId"]
    assert http.get(f"/api/runs/{run_id}").json()["status"] == "RUNNING"
    done = http.post(f"/api/runs/{run_id}/complete", json={"status": "success"})
    assert (done.status_code, done.json()["status"]) == (200, "COMPLETED")
    late = http.post(f"/api/runs/{run_id}/complete", json={"status": "failed"})
    assert (late.status_code, "not waiting for a report" in late.json()["detail"]) == (409, True)
    assert http.post("/api/runs/unknown/complete", json={"status": "success"}).status_code == 404


def test_a_rerun_really_runs_and_its_budget_is_kept(http: TestClient, world: World):
    http.post("/api/pipelines/sales/run", json={})
    body = {"originalDate": TODAY, "reason": "new file", "rerunId": "r1"}
    assert http.post("/api/pipelines/sales/rerun", json=body).status_code == 409, "one is running"
    world.jobs.end()
    world.tick(seconds=31)
    assert http.post("/api/pipelines/sales/rerun", json=body).json()["status"] == "RUNNING"
    assert len(world.jobs.starts) == 2
    (rerun,) = http.get("/api/reruns").json()
    assert (rerun["rerunId"], rerun["description"]) == ("r1", "new file")
    assert http.get("/api/pipelines/sales/reruns").json() == [rerun]
    unknown = {**body, "originalDate": "2020-01-01"}
    assert http.post("/api/pipelines/sales/rerun", json=unknown).status_code == 404


def test_cancel_backfill_and_explain(http: TestClient, world: World):
    http.post("/api/pipelines/sales/run", json={})
    assert (
        http.post("/api/pipelines/sales/cancel", json={"date": TODAY, "reason": "stop"}).json()["status"] == "CANCELLED"
    )
    past = {"first": "2026-03-01", "last": "2026-03-03", "reason": "history"}
    done = http.post("/api/pipelines/sales/backfill", json=past).json()
    assert [entry["date"] for entry in done["opened"]] == ["2026-03-01", "2026-03-02", "2026-03-03"]
    world.tick()
    assert len(world.jobs.starts) == 4
    lines = http.get("/api/pipelines/sales/explain", params={"date": "2026-03-02"}).json()["explanation"]
    assert "is running" in lines[0]


def test_a_pushed_trait_counts_and_expires(http: TestClient, world: World):
    world.read(500)
    pushed = http.post("/api/pipelines/sales/traits/fresh", json={"status": "PASS", "ttl": 60, "date": TODAY})
    assert pushed.status_code == 201
    assert http.get("/api/pipelines/sales/readiness").json()["status"] == "READY"
    world.clock.advance(61)
    assert http.get("/api/pipelines/sales/readiness").json()["blocking"] == ["fresh (STALE)"]
    assert http.post("/api/pipelines/sales/traits/fresh", json={"status": "ERROR"}).status_code == 422
    assert http.post("/api/pipelines/sales/evaluate", json={}).json()["blocking"] == ["fresh"]
    assert "TRAIT_PUSHED" in {event["kind"] for event in http.get("/api/pipelines/sales/events").json()}


OWN = {
    "name": "own",
    "archetype": "platform-gate",
    "traits": {"progress": {"evaluator": "builtin:table-reachable"}},
    "trigger": {"type": "gate"},
}


def test_a_pipeline_that_one_replica_took_is_known_to_the_other_at_once(world: World):
    with _client(world) as one, _client(world) as other:
        assert other.get("/api/pipelines").status_code == 200, "from now on it has a list that is some seconds old"
        assert one.post("/api/pipelines", json=OWN).status_code == 201
        assert other.post("/api/pipelines/own/run", json={}).json()["status"] == "COMPLETED"
        assert one.delete("/api/pipelines/own").status_code == 204
        assert other.get("/api/pipelines/own").status_code == 404


def test_a_pipeline_can_be_registered_looked_at_and_removed_but_not_run_programs(http: TestClient):
    assert http.post("/api/pipelines", json=OWN).status_code == 201
    assert http.get("/api/pipelines/own").json()["trigger"] == "gate"
    assert http.post("/api/pipelines/own/run", json={}).json()["status"] == "COMPLETED"
    bad = {**OWN, "trigger": {"type": "command", "command": ["sh", "-c", "id"]}}
    refused = http.post("/api/pipelines", json=bad)
    assert (refused.status_code, len(refused.json()["errors"])) == (422, 1)
    assert http.delete("/api/pipelines/windows-current").status_code == 409
    assert http.delete("/api/pipelines/own").status_code == 204
    assert http.get("/api/pipelines/own").status_code == 404


def test_bad_names_and_dates_are_refused(http: TestClient):
    assert http.get("/api/pipelines/nobody/readiness").status_code == 404
    assert http.post("/api/pipelines/sales/run", json={"date": "tomorrow"}).status_code == 422
    assert http.post("/api/pipelines/sales/run", json={"scheduleId": "h99"}).status_code == 422
    assert http.post("/api/pipelines/sales/run", json={"colour": "red"}).status_code == 422
    assert http.get("/api/pipelines/sales/events", params={"limit": 501}).status_code == 422


def test_ledgers_can_be_read(http: TestClient, world: World):
    http.post("/api/pipelines/sales/run", json={})
    (row,) = http.get("/api/pipelines/sales/runlogs").json()
    assert (
        http.get(f"/api/pipelines/sales/runlogs/{TODAY}", params={"schedule": "daily"}).json()["runId"] == row["runId"]
    )
    assert [run["status"] for run in http.get("/api/pipelines/sales/runs").json()] == ["RUNNING"]
    assert http.get("/api/pipelines/sales/traits/fresh").json()[0]["status"] == "PASS"
    assert http.get("/openapi.json").json()["paths"].keys() >= {"/api/pipelines/{pipeline}/run", "/api/reruns"}
