"""The eleven scenarios of the design, end to end over DynamoDB with its stream, real HTTP evaluators and triggers.

Time is a fake clock, so that a deadline does not take an hour; everything else is what a deployment has.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import boto3
import pytest

from lockstep.readiness import stream
from lockstep.readiness.model import (
    Budgets,
    DriftRule,
    ExclusionPlan,
    Key,
    MonitorPlan,
    Plan,
    Reason,
    RetryPlan,
    RunStatus,
    SlaPlan,
    TraitPlan,
    TriggerPlan,
)
from lockstep.readiness.safety import guarded_client
from lockstep.readiness.store import Marker
from lockstep.readiness.table import DynamoTable
from tests.integration.readiness.tables import table_named
from tests.unit.readiness.builders import DAY
from tests.unit.readiness.test_asl import both_forms_agree
from tests.unit.readiness.webserver import Seen, serving
from tests.unit.readiness.world import World

pytestmark = pytest.mark.stack

ONLY_TODAY = ExclusionPlan(dates=frozenset({DAY - timedelta(days=1)}))


class Site:
    """A team's own web service: evaluators that answer what they are told, and a job endpoint."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.job_status = 200
        self.jobs: list[str] = []

    def __call__(self, seen: Seen) -> tuple[int, Any]:
        if seen.path.startswith("/jobs"):
            if self.job_status < 300:
                self.jobs.append(seen.headers["idempotency-key"])
            return self.job_status, {}
        return 200, self.answers.get(seen.path, {"status": "PASS"})


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Site, str]]:
    own = Site()
    with serving(own) as (url, _):
        yield own, url


@pytest.fixture(scope="module")
def table_name(stack: Any) -> Iterator[str]:
    """One table for all scenarios; each has pipelines of its own in it."""
    name = f"readiness-{secrets.token_hex(4)}"
    with table_named(stack, name):
        yield name


@pytest.fixture
def table(table_name: str, dynamodb: Any) -> DynamoTable:
    return DynamoTable(dynamodb, table_name)


class Scene:
    """A world on DynamoDB whose traits and jobs are behind HTTP. Its pipelines have names that no other scene has."""

    def __init__(self, table: DynamoTable, site: Site, url: str, **plans: dict[str, Any]) -> None:
        site.answers.clear()
        site.jobs.clear()
        site.job_status = 200
        self.site, self.table, self._mark = site, table, secrets.token_hex(4)
        own = (self._plan(name, url, **changes) for name, changes in plans.items())
        self.world = World(*own, table=table, web=guarded_client(["127.0.0.1"]))

    def _plan(self, name: str, url: str, traits: tuple[str, ...] = ("fresh",), **changes: Any) -> Plan:
        options = {"url": f"{url}/jobs/{name}", "method": "POST", "body": "", "headers": {}, "completion": "response"}
        found = tuple(
            TraitPlan(trait, evaluator=f"{url}/{name}/{trait}", timeout=10)
            if ":" not in trait
            else self._upstream(trait)
            for trait in traits
        )
        given = {"traits": found, "trigger": TriggerPlan("http", options), "exclusions": ONLY_TODAY}
        return Plan(self.name(name), **{**given, **changes})

    def _upstream(self, text: str) -> TraitPlan:
        kind, upstream = text.split(":")
        config = {"upstreamPipeline": self.name(upstream)}
        return TraitPlan(kind, evaluator="builtin:upstream-job-log", config=config)

    def name(self, short: str) -> str:
        return f"{short}-{self._mark}"

    def key(self, short: str) -> Key:
        return Key(self.name(short), DAY, "daily")

    def say(self, path: str, status: str, **value: Any) -> None:
        self.site.answers[path] = {"status": status, "value": value}

    def status(self, short: str) -> RunStatus:
        return self.world.state(self.key(short)).status


def test_01_progressive_readiness(table: DynamoTable, site: Any):
    scene = Scene(table, *site, load={"traits": ("a", "b", "c")})
    for trait in "abc":
        scene.say(f"/load/{trait}", "FAIL")
    for trait, left in (("a", ("b", "c")), ("b", ("c",))):
        scene.say(f"/load/{trait}", "PASS")
        scene.world.tick(seconds=31)
        assert scene.world.state(scene.key("load")).readiness.blocking == left
    scene.say("/load/c", "PASS")
    scene.world.tick(seconds=31)
    assert (scene.status("load"), len(scene.site.jobs)) == (RunStatus.COMPLETED, 1)


def test_02_quality_drops_and_recovers_before_the_start(table: DynamoTable, site: Any):
    scene = Scene(table, *site, load={"traits": ("quality", "upload")})
    scene.say("/load/upload", "FAIL")
    scene.world.tick()
    scene.say("/load/quality", "FAIL")
    scene.say("/load/upload", "PASS")
    scene.world.tick(seconds=31)
    assert scene.world.state(scene.key("load")).readiness.blocking == ("quality",)
    scene.say("/load/quality", "PASS")
    scene.world.tick(seconds=31)
    assert scene.status("load") is RunStatus.COMPLETED


def test_03_a_date_runs_once_whatever_is_sent(table: DynamoTable, site: Any):
    scene = Scene(table, *site, load={})
    key = scene.key("load")
    for _ in range(3):
        now = scene.world.clock.now()
        scene.world.tick(Marker(key, "external", now), Marker(key, "other", now), seconds=31)
    assert len(scene.site.jobs) == 1


def test_04_an_excluded_day_is_dormant(table: DynamoTable, site: Any):
    scene = Scene(table, *site, load={"exclusions": ExclusionPlan(days=frozenset(range(7)))})
    report = scene.world.tick(Marker(scene.key("load"), "external", scene.world.clock.now()))
    assert ("excluded" in report.refused[0], scene.site.jobs) == (True, [])


def test_05_an_unknown_pipeline_is_refused_aloud(table: DynamoTable, site: Any):
    scene = Scene(table, *site, load={})
    report = scene.world.tick(Marker(scene.key("nobody"), "external", scene.world.clock.now()))
    assert report.refused == [f"{scene.key('nobody')}: there is no such pipeline"]


def test_06_a_marker_in_the_table_drives_through_the_stream(table: DynamoTable, site: Any, dynamodb: Any):
    scene = Scene(table, *site, load={"watched": False})
    key = scene.key("load")
    scene.world.tick()
    assert scene.site.jobs == []
    scene.world.control.mark(key, "file-arrived")
    client = boto3.client("dynamodbstreams")
    arn = dynamodb.describe_table(TableName=scene.table._name)["Table"]["LatestStreamArn"]
    found = stream.read(client, arn, "not a cursor")
    markers = [marker for marker in found.markers if marker.key == key]  # others have marked here before
    assert len(markers) == 1
    scene.world.tick(*markers)
    assert (scene.status("load"), len(scene.site.jobs)) == (RunStatus.COMPLETED, 1)
    assert stream.read(client, arn, found.cursor).markers == []
    assert stream.read(client, arn, None, go_on=lambda: False) == stream.Read([], "{}"), "out of time: next time"
    assert scene.world.store.markers(scene.name("load"), scene.world.clock.now()).markers == []


def test_07_silver_wakes_gold_of_the_same_schedule(table: DynamoTable, site: Any):
    gold = {"traits": ("up:silver",), "watched": False}
    scene = Scene(table, *site, silver={}, gold=gold)
    scene.world.tick()
    (marker,) = scene.world.store.markers(scene.name("gold"), scene.world.clock.now()).markers
    assert (marker.key, marker.source) == (scene.key("gold"), f"cascade:{scene.name('silver')}")
    scene.world.tick(marker)
    assert (scene.status("gold"), len(scene.site.jobs)) == (RunStatus.COMPLETED, 2)


def test_08_a_job_endpoint_that_fails_is_tried_again_with_backoff(table: DynamoTable, site: Any):
    scene = Scene(table, *site, load={"retry": RetryPlan(max_attempts=3, backoff_seconds=60)})
    scene.site.job_status = 500
    scene.world.tick()
    state = scene.world.state(scene.key("load"))
    assert (state.status, state.attempt, state.failure.category) == (RunStatus.PENDING, 2, "TRANSIENT")
    scene.site.job_status = 200
    scene.world.tick(seconds=30)
    assert scene.site.jobs == []
    scene.world.tick(seconds=31)
    assert (scene.status("load"), len(scene.site.jobs)) == (RunStatus.COMPLETED, 1)


def test_09_drift_after_success_runs_once_more_and_the_budget_ends_it(table: DynamoTable, site: Any):
    watch = MonitorPlan(True, timedelta(hours=2), (DriftRule("fresh", "rows", 10),))
    scene = Scene(table, *site, load={"monitor": watch, "budgets": Budgets(drift=1)})
    scene.say("/load/fresh", "PASS", rows=100)
    scene.world.tick()
    scene.world.tick(seconds=31)
    assert scene.status("load") is RunStatus.COMPLETED_MONITORING
    for rows in (200, 400):
        scene.say("/load/fresh", "PASS", rows=rows)
        for _ in range(3):
            scene.world.tick(seconds=31)
    assert (scene.status("load"), len(scene.site.jobs)) == (RunStatus.COMPLETED, 2)
    assert scene.world.pager.kinds == ["trait_drift", "trait_drift_g1", "rerun_cap_reached_drift"]


def test_10_a_replay_runs_a_completed_date_again(table: DynamoTable, site: Any):
    scene = Scene(table, *site, load={})
    scene.world.tick()
    scene.world.clock.advance(5 * 86400)
    state = scene.world.control.rerun(scene.key("load"), Reason.REPLAY, "schema change")
    assert (state.status, state.generation, len(set(scene.site.jobs))) == (RunStatus.COMPLETED, 1, 2)
    (rerun,) = scene.world.store.reruns(scene.world.clock.now(), scene.name("load"))
    assert (rerun["status"], rerun["reason"]) == ("COMPLETED", "replay")


def test_11_an_evaluation_deadline_passes_and_one_alert_says_so(table: DynamoTable, site: Any):
    scene = Scene(table, *site, load={"sla": SlaPlan(evaluation="08:30")})
    scene.say("/load/fresh", "FAIL")
    for _ in range(5):
        scene.world.tick(seconds=600)
        scene.world.watchdog.check()
    assert scene.world.pager.kinds == ["evaluation_sla_breach"]
    assert "SLA_BREACHED" in scene.world.kinds(scene.key("load"))
    scene.say("/load/fresh", "PASS")
    scene.world.tick(seconds=31)
    assert scene.status("load") is RunStatus.COMPLETED


@pytest.mark.parametrize("case", ["fails twice", "monitored"])
def test_both_forms_leave_the_same_history_on_dynamodb(stack: Any, dynamodb: Any, case: str):
    """Guards the Step Functions form where it will live: on the real table's conditions."""
    names = [f"readiness-{secrets.token_hex(4)}" for _ in range(2)]
    with table_named(stack, names[0]), table_named(stack, names[1]):
        both_forms_agree(case, *(DynamoTable(dynamodb, name) for name in names))
