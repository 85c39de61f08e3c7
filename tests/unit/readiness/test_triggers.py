"""Triggers against faithful fakes of each service's wire: start once, unknown is unknown, stop is seen to stop."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import httpx
import pytest
from botocore.response import StreamingBody
from botocore.stub import Stubber

from lockstep.readiness.model import Category, Key, PollOutcome, Started, StartFailed, StartUnknown
from lockstep.readiness.safety import guarded_client
from lockstep.readiness.triggers.aws import (
    TOKEN_ARGUMENT,
    EmrServerlessTrigger,
    EmrTrigger,
    GlueTrigger,
    LambdaTrigger,
    StepFunctionTrigger,
)
from lockstep.readiness.triggers.base import Job, Triggers, job_of
from lockstep.readiness.triggers.command import CommandTrigger
from lockstep.readiness.triggers.dagster import TOKEN_TAG, DagsterGraph, DagsterTrigger
from lockstep.readiness.triggers.web import AirflowTrigger, DatabricksTrigger, HttpTrigger
from tests.unit.readiness.builders import DAY, plan, running
from tests.unit.readiness.webserver import Seen, serving

KEY = Key("sales", DAY, "h06")


def _job(*, resume: bool = False, **options: Any) -> Job:
    return Job(KEY, "token-1", 1, options, 5, resume)


@contextmanager
def _stubbed(service: str) -> Iterator[tuple[Any, Stubber]]:
    client = boto3.client(service, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test")
    with Stubber(client) as stubber:
        yield client, stubber
        stubber.assert_no_pending_responses()


def test_template_variables_are_filled_in_from_the_execution():
    state = running(plan(trigger=plan().trigger._replace(options={"a": ["${date}/${hour}", {"b": "${pipelineID}"}]})))
    state = state._replace(key=state.key._replace(schedule="h06"))
    assert job_of(state).options == {"a": ["2026-03-10/06", {"b": "sales"}]}


def test_a_trigger_that_is_not_enabled_is_a_permanent_failure_and_whatever_one_raises_is_unknown():
    class Broken:
        def start(self, job: Job) -> Started:
            raise OSError("lost")

        status = cancel = start

    state = running()
    assert Triggers({}).start(state, resume=False).category is Category.PERMANENT
    broken = Triggers({"http": Broken()})
    assert isinstance(broken.start(state, resume=False), StartUnknown)
    assert broken.status(state, "r", {}).outcome is PollOutcome.UNKNOWN
    assert broken.cancel(state, "r", {}) is False


# --- Glue ---


def test_glue_starts_with_its_token_and_finds_it_again():
    handle = {"glue_job_name": "load", "glue_job_run_id": "jr1"}
    with _stubbed("glue") as (client, stub):
        sent = {"JobName": "load", "Arguments": {"--day": "x", TOKEN_ARGUMENT: "token-1"}}
        stub.add_response("start_job_run", {"JobRunId": "jr1"}, sent)
        runs = {"JobRuns": [{"Id": "jr0"}, {"Id": "jr1", "Arguments": {TOKEN_ARGUMENT: "token-1"}}]}
        stub.add_response("get_job_runs", runs, {"JobName": "load", "MaxResults": 100})
        glue = GlueTrigger(client)
        job = _job(job_name="load", arguments={"--day": "x"})
        assert glue.start(job) == Started("token-1", handle)
        assert glue.start(job._replace(resume=True)) == Started("token-1", handle)


@pytest.mark.parametrize(
    ("state", "outcome", "category"),
    [
        ("RUNNING", "running", None),
        ("SUCCEEDED", "succeeded", None),
        ("FAILED", "failed", Category.TRANSIENT),
        ("TIMEOUT", "failed", Category.TIMEOUT),
        ("STOPPED", "cancelled", None),
        ("NEW_ONE", "unknown", None),
    ],
)
def test_glue_states(state, outcome, category):
    """Guards trap 6: a state that nobody knows is unknown, not failed."""
    with _stubbed("glue") as (client, stub):
        stub.add_response("get_job_run", {"JobRun": {"JobRunState": state}}, {"JobName": "j", "RunId": "r"})
        polled = GlueTrigger(client).status(_job(), {"glue_job_name": "j", "glue_job_run_id": "r"})
    assert (polled.outcome, polled.category) == (outcome, category)


@pytest.mark.parametrize(
    ("code", "status", "category"),
    [
        ("EntityNotFoundException", 400, Category.PERMANENT),
        ("ConcurrentRunsExceededException", 400, Category.TRANSIENT),
        ("ThrottlingException", 400, Category.TRANSIENT),
    ],
)
def test_a_refusal_of_aws_is_certain(code, status, category):
    with _stubbed("glue") as (client, stub):
        stub.add_client_error("start_job_run", code, http_status_code=status)
        answer = GlueTrigger(client).start(_job(job_name="j", arguments={}))
    assert isinstance(answer, StartFailed)
    assert answer.category is category


def test_an_internal_error_of_aws_is_unknown():
    with _stubbed("glue") as (client, stub):
        stub.add_client_error("start_job_run", "InternalServiceException", http_status_code=500)
        state = running(plan(trigger=plan().trigger._replace(type="glue", options={"job_name": "j", "arguments": {}})))
        assert isinstance(Triggers({"glue": GlueTrigger(client)}).start(state, resume=False), StartUnknown)


def test_glue_is_seen_to_stop():
    with _stubbed("glue") as (client, stub):
        stub.add_response("batch_stop_job_run", {}, {"JobName": "j", "JobRunIds": ["r"]})
        stub.add_response("get_job_run", {"JobRun": {"JobRunState": "STOPPING"}})
        assert not GlueTrigger(client).cancel(_job(), {"glue_job_name": "j", "glue_job_run_id": "r"})


# --- EMR, EMR Serverless, Step Functions, Lambda ---


def test_emr_adds_a_step_named_by_its_token_and_finds_it_again():
    options = {"cluster_id": "c", "job_name": "load", "command": "x.jar", "arguments": ["a"]}
    step = {"Name": "load token-1", "ActionOnFailure": "CONTINUE", "HadoopJarStep": {"Jar": "x.jar", "Args": ["a"]}}
    with _stubbed("emr") as (client, stub):
        stub.add_response("add_job_flow_steps", {"StepIds": ["s1"]}, {"JobFlowId": "c", "Steps": [step]})
        stub.add_response("list_steps", {"Steps": [{"Id": "s1", "Name": "load token-1"}]}, {"ClusterId": "c"})
        stub.add_response("describe_step", {"Step": {"Status": {"State": "COMPLETED"}}})
        stub.add_response("cancel_steps", {})
        stub.add_response("describe_step", {"Step": {"Status": {"State": "CANCELLED"}}})
        emr = EmrTrigger(client)
        handle = {"emr_cluster_id": "c", "emr_step_id": "s1"}
        assert emr.start(_job(**options)) == Started("token-1", handle)
        assert emr.start(_job(resume=True, **options)) == Started("token-1", handle)
        assert emr.status(_job(), handle).outcome is PollOutcome.SUCCEEDED
        assert emr.cancel(_job(), handle)


def test_emr_serverless_starts_once_per_client_token():
    options = {
        "application_id": "a",
        "job_name": "load",
        "execution_role_arn": "arn:aws:iam::123456789012:role/job",
        "entry_point": "s3://b/x.py",
        "arguments": [],
    }
    with _stubbed("emr-serverless") as (client, stub):
        answer = {
            "applicationId": "a",
            "jobRunId": "j1",
            "arn": "arn:aws:emr-serverless:us-east-1:123456789012:/applications/a/jobruns/j1",
        }
        stub.add_response(
            "start_job_run",
            answer,
            {
                "applicationId": "a",
                "clientToken": "token-1",
                "executionRoleArn": options["execution_role_arn"],
                "jobDriver": {"sparkSubmit": {"entryPoint": "s3://b/x.py", "entryPointArguments": []}},
                "name": "load",
            },
        )
        handle = {"emr_sl_application_id": "a", "emr_sl_job_run_id": "j1"}
        assert EmrServerlessTrigger(client).start(_job(**options)) == Started("token-1", handle)


def test_step_functions_adopt_the_execution_of_the_same_name():
    machine = "arn:aws:states:us-east-1:123456789012:stateMachine:load"
    options = {"state_machine_arn": machine, "arguments": {"day": "x"}}
    with _stubbed("stepfunctions") as (client, stub):
        stub.add_client_error("start_execution", "ExecutionAlreadyExists")
        arn = "arn:aws:states:us-east-1:123456789012:execution:load:token-1"
        description = {"executionArn": arn, "stateMachineArn": machine, "status": "TIMED_OUT", "startDate": 0}
        stub.add_response("describe_execution", description, {"executionArn": arn})
        trigger = StepFunctionTrigger(client)
        started = trigger.start(_job(**options))
        assert started == Started("token-1", {"sfn_execution_arn": arn})
        polled = trigger.status(_job(), started.handle)
    assert (polled.outcome, polled.category) == (PollOutcome.FAILED, Category.TIMEOUT)


@pytest.mark.parametrize(("error", "answer"), [(None, Started), ("Unhandled", StartFailed)])
def test_a_function_is_called_and_awaited(error, answer):
    body = StreamingBody(io.BytesIO(b'{"errorMessage": "Task timed out after 3 s"}'), 44)
    response = {"StatusCode": 200, "Payload": body, **({"FunctionError": error} if error else {})}
    with _stubbed("lambda") as (client, stub):
        stub.add_response("invoke", response)
        result = LambdaTrigger(client).start(_job(function_name="f", payload={"a": 1}))
    assert isinstance(result, answer)
    assert getattr(result, "finished", None) or result.category is Category.TIMEOUT


# --- HTTP, Airflow, Databricks ---


def _http_job(url: str, **changes: Any) -> Job:
    options = {
        "url": url,
        "method": "POST",
        "body": {"a": 1},
        "headers": {"X-Key": "secret:k"},
        "completion": "response",
    }
    return _job(**{**options, **changes})


def test_an_http_trigger_sends_its_token_and_its_secret():
    with serving(lambda _: (202, {})) as (url, seen), guarded_client(["127.0.0.1"]) as client:
        trigger = HttpTrigger(client, {"k": "hush"})
        assert trigger.start(_http_job(url)).finished
        assert not trigger.start(_http_job(url, completion="callback")).finished
        missing = trigger.start(_http_job(url, headers={"X-Key": "secret:other"}))
    assert missing.category is Category.PERMANENT
    assert (seen[0].headers["idempotency-key"], seen[0].headers["x-key"]) == ("token-1", "hush")
    assert seen[0].body == {"a": 1}


@pytest.mark.parametrize(
    ("status", "kind", "category"),
    [(400, StartFailed, Category.PERMANENT), (500, StartFailed, Category.TRANSIENT), (504, StartUnknown, None)],
)
def test_what_an_http_status_says_about_the_job(status, kind, category):
    with serving(lambda _: (status, {})) as (url, _), guarded_client(["127.0.0.1"]) as client:
        answer = HttpTrigger(client, {"k": "x"}).start(_http_job(url))
    assert isinstance(answer, kind)
    assert getattr(answer, "category", None) is category


def test_an_http_trigger_does_not_reach_private_addresses():
    """Guards trap 23: a trigger is a request that configuration chooses."""
    with serving(lambda _: (200, {})) as (url, seen), guarded_client() as client:
        answer = HttpTrigger(client, {"k": "x"}).start(_http_job(url))
    assert (answer.category, seen) == (Category.PERMANENT, [])


def test_airflow_runs_a_dag_once_per_token():
    runs: dict[str, str] = {}

    def airflow(seen: Seen) -> tuple[int, Any]:
        if seen.method == "POST":
            run_id = seen.body["dag_run_id"]
            if run_id in runs:
                return 409, {"title": "DAGRun already exists"}
            runs[run_id] = "queued"
            return 200, {"dag_run_id": run_id, "state": "queued"}
        run_id = seen.path.rsplit("/", 1)[1]
        if seen.method == "PATCH":
            runs[run_id] = seen.body["state"]
        return 200, {"dag_run_id": run_id, "state": runs[run_id]}

    with serving(airflow) as (url, seen), guarded_client(["127.0.0.1"]) as client:
        trigger = AirflowTrigger(client)
        job = _job(url=url, dag_id="load", body={"day": "x"}, headers={}, api="v1")
        started = trigger.start(job)
        assert isinstance(trigger.start(job), Started)
        assert trigger.status(job, started.handle).outcome is PollOutcome.RUNNING
        runs["token-1"] = "success"
        assert trigger.status(job, started.handle).outcome is PollOutcome.SUCCEEDED
        runs["token-1"] = "running"
        assert trigger.cancel(job, started.handle)
    assert (len(runs), seen[0].path) == (1, "/api/v1/dags/load/dagRuns")


@pytest.mark.parametrize(
    ("state", "outcome", "category"),
    [
        ({"life_cycle_state": "RUNNING"}, "running", None),
        ({"life_cycle_state": "TERMINATED", "result_state": "SUCCESS"}, "succeeded", None),
        ({"life_cycle_state": "TERMINATED", "result_state": "TIMEDOUT"}, "failed", Category.TIMEOUT),
        ({"life_cycle_state": "SKIPPED"}, "failed", Category.PERMANENT),
        ({"life_cycle_state": "SOMETHING"}, "unknown", None),
    ],
)
def test_databricks_runs_now_and_reads_its_states(state, outcome, category):
    def databricks(seen: Seen) -> tuple[int, Any]:
        return (200, {"run_id": 77}) if seen.path.endswith("run-now") else (200, {"state": state})

    with serving(databricks) as (url, seen), guarded_client(["127.0.0.1"]) as client:
        trigger = DatabricksTrigger(client)
        job = _job(workspace_url=url, job_id=5, headers={}, arguments={})
        started = trigger.start(job)
        polled = trigger.status(job, started.handle)
    assert seen[0].body["idempotency_token"] == "token-1"
    assert (polled.outcome, polled.category) == (outcome, category)


# --- commands, Dagster ---


@pytest.mark.parametrize(
    ("argv", "category"),
    [
        ([sys.executable, "-c", "raise SystemExit(0)"], None),
        ([sys.executable, "-c", "raise SystemExit(3)"], Category.TRANSIENT),
        (["/no/such/program"], Category.PERMANENT),
        (["sh", "-c", "true"], Category.PERMANENT),
    ],
)
def test_a_command_is_a_list_of_arguments_and_never_a_shell(argv, category):
    answer = CommandTrigger().start(_job(command=argv))
    assert getattr(answer, "category", None) is category


def test_a_command_that_hangs_is_ended():
    job = _job(command=[sys.executable, "-c", "import time; time.sleep(60)"])._replace(timeout=1)
    assert CommandTrigger().start(job).category is Category.TIMEOUT


def _dagster(url: str, **options: Any) -> tuple[DagsterTrigger, Job]:
    given = {"job": "load_job", "assets": [], "partition": "2026-03-10", "run_config": {}, "tags": {}}
    place = {"location": "lockstep", "repository": "__repository__"}
    return DagsterTrigger(DagsterGraph(httpx.Client(), url)), _job(**{**given, **place, **options})


def test_a_dagster_run_that_carries_the_token_is_adopted_and_not_launched_again():
    launched: list[dict[str, Any]] = []

    def webserver(seen: Seen) -> tuple[int, Any]:
        query, variables = seen.body["query"], seen.body["variables"]
        if "runsOrError" in query:
            found = [{"runId": "run-1", "status": "STARTED"}] if launched else []
            return 200, {"data": {"runsOrError": {"__typename": "Runs", "results": found}}}
        launched.append(variables["params"])
        answer = {"__typename": "LaunchRunSuccess", "run": {"runId": "run-1"}}
        return 200, {"data": {"launchPipelineExecution": answer}}

    with serving(webserver) as (url, _):
        trigger, job = _dagster(url)
        assert trigger.start(job) == trigger.start(job) == Started("token-1", {"dagster_run_id": "run-1"})
    (params,) = launched
    tags = {tag["key"]: tag["value"] for tag in params["executionMetadata"]["tags"]}
    assert (tags[TOKEN_TAG], tags["dagster/partition"]) == ("token-1", "2026-03-10")


@pytest.mark.parametrize(
    ("typename", "category"), [("PipelineNotFoundError", Category.PERMANENT), ("PythonError", Category.TRANSIENT)]
)
def test_what_dagster_refuses_was_not_started(typename, category):
    def webserver(seen: Seen) -> tuple[int, Any]:
        if "runsOrError" in seen.body["query"]:
            return 200, {"data": {"runsOrError": {"__typename": "Runs", "results": []}}}
        return 200, {"data": {"launchPipelineExecution": {"__typename": typename, "message": "no"}}}

    with serving(webserver) as (url, _):
        trigger, job = _dagster(url)
        assert trigger.start(job).category is category


def test_a_dagster_that_is_down_is_not_reached_and_so_nothing_was_started():
    with serving(lambda _: (200, {})) as (url, _):
        pass
    trigger, job = _dagster(url)
    assert trigger.start(job).category is Category.TRANSIENT
