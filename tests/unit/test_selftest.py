"""The self-test's rules, sensor and probe, without any running part."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import dagster as dg
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import InvalidInput, Terminal, Transient
from lockstep.selftest import probe, rules
from lockstep.selftest.model import MAX_ATTEMPTS, MAX_ROWS, RunOutcome, SelftestRequest
from platform_assets.definitions import defs
from sensors.selftest import build_run_request, outcome_of, selftest_sensor

REQUEST = SelftestRequest("a1", 3)


@pytest.fixture(autouse=True)
def _spark_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's config is resolved when the run is made, and names Spark's address. Nothing connects to it."""
    monkeypatch.setenv("LOCKSTEP_SPARK_REMOTE", "sc://127.0.0.1:1")


@pytest.mark.parametrize("body", ["", "[]", "null", "{}", '{"id": "x"}', '{"id": "X y", "rows": 1}'])
def test_an_unreadable_message_is_refused(body: str):
    """Guards the table from ids that could close a quote, and the run from nonsense."""
    with pytest.raises(InvalidInput) as refusal:
        rules.parse_message(body)
    assert refusal.value.problems


def test_every_problem_of_a_message_is_listed():
    """Guards against fixing one field only to be told of the next."""
    with pytest.raises(InvalidInput) as refusal:
        rules.parse_message(json.dumps({"id": "'; --", "rows": MAX_ROWS + 1}))
    assert len(refusal.value.problems) == 2


@given(st.lists(st.sampled_from(RunOutcome), max_size=8))
def test_a_request_is_never_served_twice_and_never_without_end(outcomes: list[RunOutcome]):
    """Guards exactly-once from outside: no run beside a running one, none after success, few in all."""
    decision = rules.next_step(outcomes)
    if RunOutcome.SUCCEEDED in outcomes:
        assert isinstance(decision, rules.Forget)
    elif RunOutcome.IN_FLIGHT in outcomes:
        assert decision == rules.Wait()
    else:
        assert isinstance(decision, rules.Launch) == (len(outcomes) < MAX_ATTEMPTS)


def test_a_new_attempt_has_a_new_run_key():
    """Guards against issue 15982 of Dagster: a failed run would hold its key for ever."""
    assert rules.run_key(REQUEST, 1) != rules.run_key(REQUEST, 2)


@pytest.mark.parametrize("status", list(dg.DagsterRunStatus))
def test_every_status_of_a_run_has_a_meaning(status: dg.DagsterRunStatus):
    """Guards STARTING, NOT_STARTED and CANCELED, which are easily forgotten."""
    finished = status in (
        dg.DagsterRunStatus.SUCCESS,
        dg.DagsterRunStatus.FAILURE,
        dg.DagsterRunStatus.CANCELED,
    )
    assert (outcome_of(status) is not RunOutcome.IN_FLIGHT) == finished


def test_the_requested_run_fits_its_job():
    """Guards the hand-over between sensor and asset: a wrong op name or field fails only in the daemon."""
    request = build_run_request(REQUEST, 2, "handle", "b" * 32)
    assert dg.validate_run_config(defs.resolve_job_def("selftest_job"), request.run_config)
    assert request.run_key == "selftest:a1:2"
    assert request.tags["lockstep/lane"] == "selftest"


class OneMessageQueue:
    """A queue that hands out the same message again and again until it is deleted, as SQS does."""

    def __init__(self, body: str, copies: int = 1) -> None:
        self.body: str | None = body
        self._copies = copies
        self.exceptions = SimpleNamespace(QueueDoesNotExist=LookupError)
        self._polls = 0

    def get_queue_url(self, **_: Any) -> dict[str, str]:
        """It always exists."""
        return {"QueueUrl": "queue"}

    def receive_message(self, **_: Any) -> dict[str, Any]:
        """The message on every other poll, so that a tick ends."""
        self._polls += 1
        if self.body is None or self._polls % 2 == 0:
            return {}
        return {"Messages": [{"MessageId": "m", "ReceiptHandle": "h", "Body": self.body}] * self._copies}

    def delete_message(self, **_: Any) -> None:
        """Gone for good."""
        self.body = None


def _tick(queue: OneMessageQueue, instance: dg.DagsterInstance) -> dg.SensorResult:
    sqs = SimpleNamespace(get_client=lambda: queue)
    with dg.build_sensor_context(instance=instance, resources={"sqs": sqs}) as context:
        result = selftest_sensor(context)
    assert isinstance(result, dg.SensorResult)
    return result


def _record_run(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> None:
    run = instance.create_run_for_job(
        defs.resolve_job_def("selftest_job"), tags={"lockstep/selftest": "a1"}, status=status
    )
    assert run.status == status


@pytest.mark.parametrize(
    ("statuses", "asked", "kept"),
    [
        ([], ["selftest:a1:1"], True),
        (["STARTED"], [], True),
        (["STARTING"], [], True),
        (["FAILURE"], ["selftest:a1:2"], True),
        (["CANCELED", "FAILURE"], ["selftest:a1:3"], True),
        (["FAILURE"] * MAX_ATTEMPTS, [], False),
        (["FAILURE", "SUCCESS"], [], False),
    ],
)
def test_a_message_stays_until_its_work_is_done(statuses: list[str], asked: list[str], kept: bool):
    """Guards redelivery: a message that came back never doubles a run, nor is lost before the commit."""
    queue = OneMessageQueue('{"id": "a1", "rows": 3}')
    with dg.DagsterInstance.ephemeral() as instance:
        for status in statuses:
            _record_run(instance, dg.DagsterRunStatus(status))
        result = _tick(queue, instance)
    assert [request.run_key for request in result.run_requests or ()] == asked
    assert (queue.body is not None) == kept


def test_copies_of_a_message_in_one_tick_ask_for_one_run():
    """Guards exactly-once inside a tick: Dagster compares run keys with runs that exist, not with each other."""
    queue = OneMessageQueue('{"id": "a1", "rows": 3}', copies=3)
    with dg.DagsterInstance.ephemeral() as instance:
        result = _tick(queue, instance)
    assert [request.run_key for request in result.run_requests or ()] == ["selftest:a1:1"]


def test_a_malformed_message_does_not_stop_the_sensor():
    """Guards against one poison message that fails every tick."""
    queue = OneMessageQueue("not json")
    with dg.DagsterInstance.ephemeral() as instance:
        assert not _tick(queue, instance).run_requests
    assert queue.body is None


def _answer(status: str | None, *, success: bool | None = None, runs: int = 1) -> dict[str, Any]:
    run = {"runId": "r1", "status": status, "creationTime": 2.0, "startTime": 3.0, "endTime": 9.0}
    evaluation = {
        "success": success,
        "timestamp": 8.0,
        "description": "words",
        "targetMaterialization": {"timestamp": 6.0},
    }
    return {
        "runsOrError": {"__typename": "Runs", "results": [run] * runs if status else []},
        "assetCheckExecutions": [{"runId": "r1", "evaluation": evaluation}] if success is not None else [],
    }


def _client(*answers: dict[str, Any] | None) -> httpx.Client:
    queue = list(answers)

    def reply(_: httpx.Request) -> httpx.Response:
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        return httpx.Response(503) if answer is None else httpx.Response(200, json={"data": answer})

    return httpx.Client(transport=httpx.MockTransport(reply), base_url="http://dagster")


def _wait(*answers: dict[str, Any] | None) -> probe.ProbeResult:
    return probe.await_result("", "t", sent_at=1.0, timeout=30, clock=FakeClock(), client=_client(*answers))


def test_the_probe_waits_through_every_step_and_adds_them_up():
    """Guards the timings that a person reads: the steps must sum to the whole, restarts must not fail it."""
    result = _wait(None, _answer(None), _answer("QUEUED"), _answer("STARTED"), _answer("SUCCESS", success=True))
    assert result.steps == {"sensor": 1.0, "queue": 1.0, "run": 3.0, "check": 2.0}
    assert result.total == 7.0
    assert "queue" in result.describe()


@pytest.mark.parametrize(
    ("answer", "words"),
    [(_answer(None), "no run"), (None, "no run"), (_answer("STARTED"), "has not reached its check")],
)
def test_the_probe_gives_up_in_time_and_names_the_step(answer: dict[str, Any] | None, words: str):
    """Guards `doctor` from hanging, and its reader from guessing."""
    with pytest.raises(Transient, match=words):
        _wait(answer)


@pytest.mark.parametrize("answer", [_answer("SUCCESS", success=False), _answer("FAILURE", runs=MAX_ATTEMPTS)])
def test_the_probe_reports_a_failure_at_once(answer: dict[str, Any]):
    """Guards against waiting for the timeout when the outcome is already known."""
    with pytest.raises(Terminal):
        _wait(answer)
