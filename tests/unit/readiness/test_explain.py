"""The words: a person reads why nothing happens, and what would make it happen."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lockstep.readiness.explain import explain
from lockstep.readiness.model import Category, ExclusionPlan, RetryPlan, SchedulePlan, SlaPlan, StartFailed, TraitPlan
from tests.unit.readiness.builders import DAY, HOUR, KEY, NOW, after, evaluated, opened, plan, running


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exclusions": ExclusionPlan(dates=frozenset({DAY}))}, "excluded by its calendar"),
        ({"schedules": (SchedulePlan("daily", "09:00"),)}, "becomes active at 2026-03-10 09:00 UTC, 1 h 0 min"),
        ({"watched": False}, "not watched"),
        ({}, "nobody has opened it"),
        ({"schedules": (SchedulePlan("h06"),)}, "has no schedule daily"),
    ],
)
def test_what_was_never_opened_is_explained(changes, words):
    assert words in explain(plan(**changes), KEY, None, NOW)[0]


def test_what_waits_names_each_trait_and_its_deadline():
    state = opened(plan(sla=SlaPlan(evaluation="08:30"), traits=(*plan().traits, TraitPlan("pushed"))))
    state = after(state, evaluated(state, "FAIL", "ERROR"))
    text = "\n".join(explain(state.plan, KEY, state, NOW))
    assert "fresh says not yet" in text
    assert "upstream could not be evaluated, TRANSIENT. Repair the evaluator builtin:x" in text
    assert "pushed waits for a push" in text
    assert "looked at again in 30 s" in text
    assert "evaluation deadline is 2026-03-10 08:30 UTC, in 30 min" in text
    assert "passed 30 min" in "\n".join(explain(state.plan, KEY, state, NOW + HOUR))


def test_what_failed_runs_or_backs_off_is_explained():
    state = running()
    assert "is running" in explain(state.plan, KEY, state, NOW + timedelta(seconds=5))[0]
    claimed = opened(plan(retry=RetryPlan(max_attempts=2)))
    claimed = after(claimed, evaluated(claimed))
    waiting = after(claimed, StartFailed(claimed.run_id, Category.TRANSIENT, "busy"))
    assert "The next try begins at" in "\n".join(explain(waiting.plan, KEY, waiting, NOW))
    failed = after(claimed, StartFailed(claimed.run_id, Category.PERMANENT, "no such job"))
    assert "PERMANENT: no such job" in explain(failed.plan, KEY, failed, NOW)[0]
