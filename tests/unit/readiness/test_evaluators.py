"""Evaluators: every way an answer can go wrong has its category, and none of them looks like "not ready"."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.kernel.clock import FakeClock, SystemClock
from lockstep.readiness.evaluators.answer import Question, parse
from lockstep.readiness.evaluators.breaker import Breaker
from lockstep.readiness.evaluators.builtin import Builtins
from lockstep.readiness.evaluators.http import HttpEvaluator
from lockstep.readiness.evaluators.process import ProcessEvaluator
from lockstep.readiness.evaluators.runner import Runner
from lockstep.readiness.model import Category, Key, RunStatus, TraitPlan, TraitResult, TraitStatus
from lockstep.readiness.safety import Forbidden, GuardedTransport, guarded_client, is_public
from lockstep.readiness.store import Store
from lockstep.readiness.table import MemoryTable
from tests.unit.readiness.builders import DAY, NOW, opened, plan
from tests.unit.readiness.webserver import serving
from tests.unit.readiness.world import World, pipeline

QUESTION = Question(Key("sales", DAY, "h06"), TraitPlan("fresh", config={"maxLag": 5}, timeout=5), NOW)
PASS = {"status": "PASS", "value": {"rows": 0}, "reason": "fine"}


def _asked(url: str, clock: Any = None) -> TraitResult:
    with guarded_client(["127.0.0.1"]) as client:
        return HttpEvaluator(client, clock or FakeClock()).evaluate(QUESTION, url)


def test_the_question_carries_pipeline_trait_date_and_schedule():
    with serving(lambda _: (200, PASS)) as (url, seen):
        result = _asked(url + "/fresh")
    assert (result.status, result.value) == (TraitStatus.PASS, {"rows": 0})
    body = seen[0].body
    assert (body["pipelineId"], body["pipelineID"], body["traitType"]) == ("sales", "sales", "fresh")
    assert body["config"] == {"maxLag": 5, "date": "2026-03-10", "scheduleID": "h06"}


@pytest.mark.parametrize(
    ("status", "category", "calls"),
    [
        (400, Category.PERMANENT, 1),
        (404, Category.PERMANENT, 1),
        (302, Category.PERMANENT, 1),
        (429, Category.TRANSIENT, 3),
        (503, Category.TRANSIENT, 3),
        (501, Category.TRANSIENT, 1),
    ],
)
def test_a_bad_status_is_an_error_with_its_category_and_retried_if_it_may_heal(status, category, calls):
    with serving(lambda _: (status, {})) as (url, seen):
        result = _asked(url)
    assert (result.status, result.category, len(seen)) == (TraitStatus.ERROR, category, calls)
    assert result.reason == f"EVALUATOR_HTTP_ERROR: status {status}"


def test_a_burst_of_429_heals_inside_the_timeout():
    answers = iter([(429, {}), (502, {}), (200, PASS)])
    with serving(lambda _: next(answers)) as (url, _):
        assert _asked(url).status is TraitStatus.PASS


def test_retries_never_pass_the_timeout():
    clock = FakeClock()
    slow = QUESTION._replace(trait=QUESTION.trait._replace(timeout=1))
    with serving(lambda _: (503, {})) as (url, seen), guarded_client(["127.0.0.1"]) as client:
        HttpEvaluator(client, clock).evaluate(slow, url)
    assert clock.monotonic() < 1
    assert len(seen) == 2


@pytest.mark.parametrize("body", [b"not json", b"[]", b'{"status": "MAYBE"}', b'{"status": "PASS", "value": 3}'])
def test_an_answer_that_is_none_is_a_permanent_error(body: bytes):
    result = parse(QUESTION, body)
    assert (result.status, result.category) == (TraitStatus.ERROR, Category.PERMANENT)
    assert result.reason.startswith("EVALUATOR_OUTPUT_INVALID")


def test_an_address_that_nobody_serves_is_transient():
    with serving(lambda _: (200, PASS)) as (url, _):
        pass
    assert _asked(url).category is Category.TRANSIENT


# --- where calls may go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00::1", "::ffff:10.0.0.1", "100.64.0.1"],
)
def test_private_addresses_are_not_public(address: str):
    assert not is_public(address)


def test_a_private_address_is_refused_before_any_connection():
    """Guards trap 23: an evaluator's address must not reach the metadata service."""
    with serving(lambda _: (200, PASS)) as (url, seen), guarded_client() as client:
        result = HttpEvaluator(client, SystemClock()).evaluate(QUESTION, url)
        with pytest.raises(Forbidden):
            client.get("http://169.254.169.254/latest/meta-data/")
    assert (result.status, result.category, seen) == (TraitStatus.ERROR, Category.PERMANENT, [])


def test_the_address_that_was_checked_is_the_one_that_is_called():
    """Guards against a name that resolves differently the second time."""
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])
    called: list[str] = []

    def inner(request: httpx.Request) -> httpx.Response:
        called.append(request.url.host)
        return httpx.Response(200)

    transport = GuardedTransport(inner=httpx.MockTransport(inner), resolve=lambda *_: next(answers))
    with httpx.Client(transport=transport) as client:
        client.get("https://rebind.example.com/x")
        with pytest.raises(Forbidden):
            client.get("https://rebind.example.com/x")
    assert called == ["93.184.216.34"]


# --- programs ---


def _program(folder: Path, text: str) -> str:
    path = folder / "check"
    path.write_text("#!/usr/bin/env python3\nimport json, os, sys, time, signal\nasked = json.load(sys.stdin)\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return "./check"


@pytest.mark.parametrize(
    ("text", "status", "category"),
    [
        ("print(json.dumps({'status': 'PASS', 'value': asked['config']}))", "PASS", None),
        ("print(json.dumps({'status': 'FAIL', 'reason': 'late'}))", "FAIL", None),
        ("sys.exit(2)", "ERROR", "PERMANENT"),
        ("sys.exit(1)", "ERROR", "TRANSIENT"),
        ("sys.exit(137)", "ERROR", "EVALUATOR_CRASH"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ERROR", "EVALUATOR_CRASH"),
        ("print('hello')", "ERROR", "PERMANENT"),
        (
            "print(json.dumps({'status': 'PASS' if 'AWS_SECRET_ACCESS_KEY' not in os.environ else 'FAIL'}))",
            "PASS",
            None,
        ),
    ],
)
def test_a_program_answers_by_output_and_exit_code(tmp_path, monkeypatch, text, status, category):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-for-children")
    result = ProcessEvaluator(tmp_path).evaluate(QUESTION, _program(tmp_path, text))
    assert (result.status, result.category) == (status, category), result


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path):
    quick = QUESTION._replace(trait=QUESTION.trait._replace(timeout=1))
    result = ProcessEvaluator(tmp_path).evaluate(quick, _program(tmp_path, "time.sleep(60)"))
    assert (result.status, result.category) == (TraitStatus.ERROR, Category.TIMEOUT)


def test_a_program_outside_its_folder_is_not_run(tmp_path: Path):
    inner = tmp_path / "inner"
    inner.mkdir()
    _program(tmp_path, "print('{}')")
    result = ProcessEvaluator(inner).evaluate(QUESTION, "./../check")
    assert (result.category, "outside" in result.reason) == (Category.PERMANENT, True)
    missing = ProcessEvaluator(inner).evaluate(QUESTION, "./nothing")
    assert missing.status is TraitStatus.ERROR


# --- functions, builtins, the runner ---


def answer_of_a_function(asked: dict[str, Any]) -> dict[str, Any]:
    return {"status": "PASS", "value": {"who": asked["pipelineId"]}}


def hang(_: dict[str, Any]) -> dict[str, Any]:
    threading.Event().wait(30)
    return {"status": "PASS"}


def _run(evaluator: str, *, allowed: tuple[str, ...] = ("tests.",), timeout: int = 5, **config: Any) -> TraitResult:
    runner = Runner(SystemClock(), Builtins(Store(MemoryTable())), allowed_modules=allowed)
    state = opened(plan(traits=(TraitPlan("fresh", evaluator=evaluator, config=config, timeout=timeout),)))
    (result,) = runner.evaluate(state, {})
    return result


def test_a_function_answers_if_its_module_is_allowed():
    name = f"python:{__name__}:answer_of_a_function"
    assert _run(name).value == {"who": "sales"}
    assert _run(name, allowed=()).category is Category.PERMANENT
    assert _run("python:os.path:join", allowed=("tests.",)).category is Category.PERMANENT
    assert _run(f"python:{__name__}:missing").category is Category.EVALUATOR_CRASH


def test_a_function_that_hangs_is_a_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.readiness.evaluators.runner.GRACE_SECONDS", 0.0)
    assert _run(f"python:{__name__}:hang", timeout=1).category is Category.TIMEOUT


def test_too_many_hanging_evaluators_are_refused_and_not_collected():
    runner = Runner(SystemClock(), Builtins(Store(MemoryTable())), most_at_once=1)
    runner._slots.acquire()
    (result,) = runner.evaluate(opened(plan(traits=(TraitPlan("fresh", evaluator="builtin:table-reachable"),))), {})
    assert "hang already" in result.reason


def test_a_builtin_without_its_configuration_is_a_permanent_error():
    assert _run("builtin:upstream-job-log").category is Category.PERMANENT
    assert _run("builtin:tick-lag", maxLagSeconds=5).reason.endswith("not connected in this deployment")
    assert _run("builtin:table-reachable").status is TraitStatus.PASS


@pytest.mark.parametrize(
    ("builtin", "config", "value", "status"),
    [
        ("sensor-threshold", {"min": 10}, {"value": 10}, "PASS"),
        ("sensor-threshold", {"max": 10}, {"value": 10.5}, "FAIL"),
        ("sensor-threshold", {"min": 0}, {"value": 0}, "PASS"),
        ("sensor-threshold", {"min": 0}, {}, "FAIL"),
        ("sensor-freshness", {"maxAgeSeconds": 60}, {}, "PASS"),
        ("window-completeness", {"expectedWindows": ["a", "b"]}, {"windows": ["b", "a"]}, "PASS"),
        ("window-completeness", {"expectedCount": 2}, {"windows": ["a", "a"]}, "FAIL"),
        ("data-quality", {"maxNullRate": 0.1}, {"nullRate": 0.1}, "PASS"),
        ("data-quality", {"maxNullRate": 0.1}, {"nullRate": 0.0, "schemaDrift": True}, "FAIL"),
        ("data-quality", {"maxNullRate": 0.1, "allowSchemaDrift": True}, {"nullRate": 0, "schemaDrift": True}, "PASS"),
    ],
)
def test_sensors_are_pushed_traits_that_builtins_judge(builtin, config, value, status):
    """Guards boundaries: inclusive limits, 0 as a value, duplicates that are no second window."""
    sensor = TraitPlan("fresh", evaluator=f"builtin:{builtin}", config={"sensorType": "meter", **config})
    world = World(pipeline("sales", sensor))
    key = Key("sales", DAY, "daily")
    world.control.push("sales", "meter", TraitStatus.PASS, value=value, key=key)
    assert world.control.evaluate(key).traits[0].status == status


def test_upstream_passes_when_the_same_schedule_of_the_same_date_completed():
    gate = TraitPlan("up", evaluator="builtin:upstream-job-log", config={"upstreamPipeline": "sales"})
    world = World(pipeline("sales"), pipeline("gold", gate))
    key = Key("gold", DAY, "daily")
    assert world.control.evaluate(key).traits[0].reason == "sales/2026-03-10/daily is not started"
    world.tick()
    world.jobs.end()
    world.tick(seconds=31)
    assert world.store.status(key._replace(pipeline="sales"), world.clock.now()) is RunStatus.COMPLETED
    assert world.control.evaluate(key).traits[0].status is TraitStatus.PASS


# --- the circuit breaker ---


def _result(status: TraitStatus, category: Category | None = None) -> TraitResult:
    return TraitResult("x", status, category=category)


def test_the_circuit_opens_after_five_failures_and_lets_one_try_through_later():
    clock = FakeClock()
    breaker = Breaker(clock)
    failure = _result(TraitStatus.ERROR, Category.TRANSIENT)
    assert [breaker.record("e", failure) for _ in range(5)] == [False] * 4 + [True]
    assert not breaker.allows("e")
    clock.advance(31)
    assert (breaker.allows("e"), breaker.allows("e")) == (True, False)
    breaker.record("e", _result(TraitStatus.FAIL))
    assert breaker.allows("e")
    assert not breaker.is_open("e")


def test_an_honest_fail_and_a_permanent_error_do_not_open_the_circuit():
    """Guards against punishing an evaluator for saying "not yet" many times."""
    breaker = Breaker(FakeClock())
    for result in (_result(TraitStatus.FAIL), _result(TraitStatus.ERROR, Category.PERMANENT)) * 20:
        breaker.record("e", result)
    assert not breaker.is_open("e")


def test_old_failures_are_forgotten():
    clock = FakeClock()
    breaker = Breaker(clock)
    for _ in range(10):
        breaker.record("e", _result(TraitStatus.ERROR, Category.TIMEOUT))
        clock.advance(61)
    assert not breaker.is_open("e")
