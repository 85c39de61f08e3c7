"""What Dagster is told of a tick: outcomes as they are, red ones as red."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from lockstep.readiness.model import (
    Category,
    Execution,
    Failure,
    Key,
    Readiness,
    ReadinessStatus,
    RunStatus,
    TraitResult,
    TraitStatus,
)
from lockstep.readiness.worker import Report
from platform_assets.readiness import EXECUTION_CHECK, plans
from sensors.readiness import _events
from tests.unit.readiness.builders import DAY, NOW, opened

PLAN = next(plan for plan in plans if plan.pipeline == "exports-daily")
KEY = Key("exports-daily", DAY)


def _told(before: RunStatus, after: RunStatus, **changes: Any) -> list[Any]:
    start = opened(PLAN, key=KEY)
    first: Execution = start._replace(status=before, **changes)
    failure = Failure(Category.PERMANENT, "no such job")
    return _events(Report(moved=[(first, first._replace(status=after, failure=failure))]))


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.CANCELLED])
def test_a_failed_execution_is_a_red_check_with_its_reason(status: RunStatus):
    """Guards against a green asset page above a failed night."""
    observation, check = _told(RunStatus.RUNNING, status)
    assert (observation.partition, observation.metadata["status"].value) == (DAY.isoformat(), status.value)
    assert (check.check_name, check.passed, check.severity) == (EXECUTION_CHECK, False, dg.AssetCheckSeverity.ERROR)
    assert check.metadata["failure"].value == "no such job"


def test_a_completed_execution_is_a_materialization_and_turns_the_check_green():
    made, check = _told(RunStatus.RUNNING, RunStatus.COMPLETED)
    assert (made.partition, check.check_name, check.passed) == (DAY.isoformat(), EXECUTION_CHECK, True)


def test_a_rehearsal_and_what_has_not_ended_tell_nothing():
    assert _told(RunStatus.PENDING, RunStatus.COMPLETED, dry_run=True) == []
    assert _told(RunStatus.PENDING, RunStatus.RUNNING) == []
    assert _told(RunStatus.COMPLETED_MONITORING, RunStatus.COMPLETED) == []


def test_a_new_verdict_tells_each_trait_and_the_same_one_nothing():
    start, answer = opened(PLAN, key=KEY), TraitResult("inputs-complete", TraitStatus.FAIL, "one is left")
    waits = Readiness(ReadinessStatus.NOT_READY, ("inputs-complete",), (answer,), NOW)
    seen = start._replace(readiness=waits)
    (check,) = _events(Report(moved=[(start, seen)]))
    assert (check.check_name, check.passed, check.severity) == (
        "inputs_complete_check",
        False,
        dg.AssetCheckSeverity.WARN,
    )
    assert _events(Report(moved=[(seen, seen._replace(polls=1))])) == []
