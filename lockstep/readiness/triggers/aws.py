"""Triggers on AWS: Glue, EMR, EMR Serverless, Step Functions, Lambda. Clients are passed in.

What belongs here: each service's calls, its own way to start once, and what its states mean. What does not: building
clients; see resources/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError

from lockstep.readiness.model import Category, Polled, PollOutcome, Started, StartFailed
from lockstep.readiness.triggers.base import Job, StartAnswer

TOKEN_ARGUMENT: Final = "--lockstep-token"  # noqa: S105  # the name of a job argument
_RUNNING, _OK, _BAD, _GONE = PollOutcome.RUNNING, PollOutcome.SUCCEEDED, PollOutcome.FAILED, PollOutcome.CANCELLED

Meaning = Mapping[str, tuple[PollOutcome, Category | None]]


def _meaning(
    *, running: str, succeeded: str, failed: str = "", timeout: str = "", cancelled: str = ""
) -> dict[str, tuple[PollOutcome, Category | None]]:
    return {
        **{state: (_RUNNING, None) for state in running.split()},
        **{state: (_OK, None) for state in succeeded.split()},
        **{state: (_BAD, Category.TRANSIENT) for state in failed.split()},
        **{state: (_BAD, Category.TIMEOUT) for state in timeout.split()},
        **{state: (_GONE, None) for state in cancelled.split()},
    }


_GLUE: Final = _meaning(
    running="STARTING RUNNING STOPPING WAITING",
    succeeded="SUCCEEDED",
    failed="FAILED ERROR EXPIRED",
    timeout="TIMEOUT",
    cancelled="STOPPED",
)
_EMR: Final = _meaning(
    running="PENDING RUNNING CANCEL_PENDING", succeeded="COMPLETED", failed="FAILED INTERRUPTED", cancelled="CANCELLED"
)
_EMR_SERVERLESS: Final = _meaning(
    running="SUBMITTED PENDING SCHEDULED RUNNING QUEUED CANCELLING",
    succeeded="SUCCESS",
    failed="FAILED",
    cancelled="CANCELLED",
)
_STEP_FUNCTION: Final = _meaning(
    running="RUNNING PENDING_REDRIVE", succeeded="SUCCEEDED", failed="FAILED", timeout="TIMED_OUT", cancelled="ABORTED"
)


def _polled(job: Job, meaning: Meaning, state: str, words: str = "") -> Polled:
    outcome, category = meaning.get(state, (PollOutcome.UNKNOWN, None))
    return Polled(job.token, outcome, category, f"{state} {words}".strip()[:300])


def _started(job: Job, start: Callable[[], StartAnswer]) -> StartAnswer:
    """A refusal is certain, and so is a connection that never stood; anything else is unknown to the caller."""
    try:
        return start()
    except (EndpointConnectionError, ConnectTimeoutError) as error:
        return StartFailed(job.token, Category.TRANSIENT, str(error)[:300])
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status >= 500:
            raise
        healing = status == 429 or "Throttl" in code or code in _HEALING
        return StartFailed(job.token, Category.TRANSIENT if healing else Category.PERMANENT, f"{code}: {error}"[:300])


_HEALING: Final = frozenset(
    {
        "ConcurrentRunsExceededException",
        "ExecutionLimitExceeded",
        "LimitExceededException",
        "OperationTimeoutException",
        "ResourceNumberLimitExceededException",
        "ServiceQuotaExceededException",
        "TooManyRequestsException",
    }
)


class GlueTrigger:
    """A Glue job run. Glue knows no token, so ours travels as an argument and a repeated start looks for it first."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def start(self, job: Job) -> StartAnswer:
        """Start the job run."""
        return _started(job, lambda: self._start(job))

    def _start(self, job: Job) -> StartAnswer:
        name = job.options["job_name"]
        if job.resume and (found := self._find(name, job.token)):
            return Started(job.token, {"glue_job_name": name, "glue_job_run_id": found})
        arguments = {**job.options["arguments"], TOKEN_ARGUMENT: job.token}
        answer = self._client.start_job_run(JobName=name, Arguments=arguments)
        return Started(job.token, {"glue_job_name": name, "glue_job_run_id": answer["JobRunId"]})

    def _find(self, name: str, token: str) -> str | None:
        for run in self._client.get_job_runs(JobName=name, MaxResults=100)["JobRuns"]:
            if run.get("Arguments", {}).get(TOKEN_ARGUMENT) == token:
                return str(run["Id"])
        return None

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """The job run's state. Its log is not searched: that once turned every good run into a failed one."""
        run = self._client.get_job_run(JobName=handle["glue_job_name"], RunId=handle["glue_job_run_id"])["JobRun"]
        return _polled(job, _GLUE, run["JobRunState"], run.get("ErrorMessage", ""))

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Stop it, then look."""
        self._client.batch_stop_job_run(JobName=handle["glue_job_name"], JobRunIds=[handle["glue_job_run_id"]])
        return _has_ended(self.status(job, handle))


class EmrTrigger:
    """A step on a running cluster; its name carries the token."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def start(self, job: Job) -> StartAnswer:
        """Add the step."""
        return _started(job, lambda: self._start(job))

    def _start(self, job: Job) -> StartAnswer:
        cluster, name = job.options["cluster_id"], f"{job.options['job_name']} {job.token}"
        if job.resume:
            for step in self._client.list_steps(ClusterId=cluster)["Steps"]:
                if step["Name"] == name:
                    return Started(job.token, {"emr_cluster_id": cluster, "emr_step_id": step["Id"]})
        jar = {"Jar": job.options["command"], "Args": list(job.options["arguments"])}
        step = {"Name": name, "ActionOnFailure": "CONTINUE", "HadoopJarStep": jar}
        answer = self._client.add_job_flow_steps(JobFlowId=cluster, Steps=[step])
        return Started(job.token, {"emr_cluster_id": cluster, "emr_step_id": answer["StepIds"][0]})

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """The step's state."""
        answer = self._client.describe_step(ClusterId=handle["emr_cluster_id"], StepId=handle["emr_step_id"])
        state = answer["Step"]["Status"]
        return _polled(job, _EMR, state["State"], state.get("FailureDetails", {}).get("Reason", ""))

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Cancel, then look."""
        self._client.cancel_steps(
            ClusterId=handle["emr_cluster_id"],
            StepIds=[handle["emr_step_id"]],
            StepCancellationOption="TERMINATE_PROCESS",
        )
        return _has_ended(self.status(job, handle))


class EmrServerlessTrigger:
    """A job run of an application; the service itself starts once per client token."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def start(self, job: Job) -> StartAnswer:
        """Start, or find the run of the same token."""
        return _started(job, lambda: self._start(job))

    def _start(self, job: Job) -> StartAnswer:
        options = job.options
        driver = {"entryPoint": options["entry_point"], "entryPointArguments": list(options["arguments"])}
        answer = self._client.start_job_run(
            applicationId=options["application_id"],
            clientToken=job.token,
            executionRoleArn=options["execution_role_arn"],
            jobDriver={"sparkSubmit": driver},
            name=options["job_name"],
        )
        handle = {"emr_sl_application_id": options["application_id"], "emr_sl_job_run_id": answer["jobRunId"]}
        return Started(job.token, handle)

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """The job run's state."""
        run = self._client.get_job_run(
            applicationId=handle["emr_sl_application_id"], jobRunId=handle["emr_sl_job_run_id"]
        )["jobRun"]
        return _polled(job, _EMR_SERVERLESS, run["state"], run.get("stateDetails", ""))

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Cancel, then look."""
        self._client.cancel_job_run(applicationId=handle["emr_sl_application_id"], jobRunId=handle["emr_sl_job_run_id"])
        return _has_ended(self.status(job, handle))


class StepFunctionTrigger:
    """An execution whose name is the token, so that the service refuses a second one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def start(self, job: Job) -> StartAnswer:
        """Start, or adopt the execution that has our name."""
        return _started(job, lambda: self._start(job))

    def _start(self, job: Job) -> StartAnswer:
        machine = job.options["state_machine_arn"]
        try:
            answer = self._client.start_execution(
                stateMachineArn=machine, name=job.token, input=json.dumps(job.options["arguments"])
            )
            arn = answer["executionArn"]
        except ClientError as error:
            if error.response["Error"]["Code"] != "ExecutionAlreadyExists":
                raise
            arn = f"{re.sub(':stateMachine:', ':execution:', machine, count=1)}:{job.token}"
        return Started(job.token, {"sfn_execution_arn": arn})

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """The execution's status."""
        answer = self._client.describe_execution(executionArn=handle["sfn_execution_arn"])
        return _polled(job, _STEP_FUNCTION, answer["status"], answer.get("cause", ""))

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Stop, then look."""
        self._client.stop_execution(executionArn=handle["sfn_execution_arn"], cause="cancelled by lockstep")
        return _has_ended(self.status(job, handle))


class LambdaTrigger:
    """A function, called and awaited. Nothing there knows our token, so a lost answer is never repeated."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def start(self, job: Job) -> StartAnswer:
        """Invoke and wait for the end."""
        return _started(job, lambda: self._start(job))

    def _start(self, job: Job) -> StartAnswer:
        answer = self._client.invoke(
            FunctionName=job.options["function_name"],
            InvocationType="RequestResponse",
            Payload=json.dumps({**job.options["payload"], "lockstepToken": job.token}).encode(),
        )
        if answer.get("FunctionError"):
            words = answer["Payload"].read().decode("utf-8", "replace")[:300]
            category = Category.TIMEOUT if "timed out" in words else Category.TRANSIENT
            return StartFailed(job.token, category, f"{answer['FunctionError']}: {words}")
        return Started(job.token, {"status": answer["StatusCode"]}, finished=True)

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """It had ended before anybody could ask."""
        return Polled(job.token, PollOutcome.UNKNOWN, message="a call of a function leaves no run")

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """A call cannot be taken back."""
        return False


def _has_ended(polled: Polled) -> bool:
    return polled.outcome not in (PollOutcome.RUNNING, PollOutcome.UNKNOWN)
