"""The Step Functions form: a state machine of the same core, generated, with the handlers' functions as its tasks.

What belongs here: states and their order. What does not: what a task does (handlers.py). Failures end in Fail: an
execution that did not do its work is never green.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

ORCHESTRATOR: Final = "${OrchestratorFunctionArn}"
EVALUATOR: Final = "${EvaluatorFunctionArn}"
TRIGGER: Final = "${TriggerFunctionArn}"
RUN_CHECKER: Final = "${RunCheckerFunctionArn}"

State = dict[str, Any]

_RETRY: Final = [
    {
        "ErrorEquals": [
            "Lambda.ServiceException",
            "Lambda.AWSLambdaException",
            "Lambda.SdkClientException",
            "Lambda.TooManyRequestsException",
            "Transient",
            "LostClaim",
        ],
        "IntervalSeconds": 2,
        "MaxAttempts": 3,
        "BackoffRate": 2,
    }
]
_NAMES: Final = {"pipelineID.$": "$.pipelineID", "scheduleID.$": "$.scheduleID", "date.$": "$.date"}


def _task(resource: str, following: str, place: str, *, catch: str = "AlertError", **parameters: Any) -> State:
    return {
        "Type": "Task",
        "Resource": resource,
        "Parameters": {**_NAMES, **parameters},
        "ResultPath": f"$.{place}",
        "Retry": _RETRY,
        "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.errorInfo", "Next": catch}],
        "Next": following,
    }


def _ask(action: str, following: str, *, catch: str = "AlertError", **parameters: Any) -> State:
    return _task(ORCHESTRATOR, following, action, catch=catch, action=action, **parameters)


def _choose(place: str, default: str, **by_result: str) -> State:
    choices = [
        {"Variable": f"$.{place}.result", "StringEquals": result, "Next": following}
        for result, following in by_result.items()
    ]
    return {"Type": "Choice", "Choices": choices, "Default": default}


def _wait(place: str, following: str) -> State:
    return {"Type": "Wait", "SecondsPath": f"$.{place}.waitSeconds", "Next": following}


def _each_trait(following: str, catch: str) -> State:
    parameters = {**_NAMES, "traitType.$": "$$.Map.Item.Value"}
    inner = {
        **_task(EVALUATOR, "", "unused"),
        "ResultPath": "$",
        "Parameters": {**_NAMES, "traitType.$": "$.traitType"},
    }
    inner = {name: value for name, value in inner.items() if name not in ("Next", "Catch")} | {"End": True}
    return {
        "Type": "Map",
        "ItemsPath": "$.resolvePipeline.traits",
        "ItemSelector": parameters,
        "ItemProcessor": {
            "ProcessorConfig": {"Mode": "INLINE"},
            "StartAt": "EvaluateTrait",
            "States": {"EvaluateTrait": inner},
        },
        "ResultPath": "$.results",
        "Retry": [{"ErrorEquals": ["States.TaskFailed"], "IntervalSeconds": 2, "MaxAttempts": 1, "BackoffRate": 2}],
        "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.errorInfo", "Next": catch}],
        "Next": following,
    }


def machine() -> dict[str, Any]:
    """The whole definition. Every Choice names a failure as its default, so no answer falls through in silence."""
    return {
        "Comment": "Lockstep readiness: one execution of one pipeline, date and schedule.",
        "StartAt": "InitDefaults",
        "TimeoutSeconds": 14 * 3600,
        "States": {**_opening(), **_evaluation(), **_job(), **_afterwards(), **_ends()},
    }


def _opening() -> dict[str, State]:
    run = {"runID.$": "$.resolvePipeline.runID"}
    return {
        "InitDefaults": {
            "Type": "Pass",
            "Parameters": {**_NAMES, "errorInfo": {"Error": "none", "Cause": ""}, "acquireLock": {"token": "none"}},
            "Next": "CheckExclusion",
        },
        "CheckExclusion": _ask("checkExclusion", "IsExcluded", catch="AlertErrorUnlocked"),
        "IsExcluded": _choose("checkExclusion", "UnknownAnswerUnlocked", proceed="AcquireLock", skip="Excluded"),
        "AcquireLock": _ask("acquireLock", "IsLockAcquired", catch="AlertErrorUnlocked"),
        "IsLockAcquired": _choose("acquireLock", "UnknownAnswerUnlocked", proceed="CheckRunLog", skip="LockHeld"),
        "CheckRunLog": _ask("checkRunLog", "ShouldProceed"),
        "ShouldProceed": _choose(
            "checkRunLog",
            "UnknownAnswer",
            proceed="ResolvePipeline",
            wait="WaitForBackoff",
            poll="ResolveForPolling",
            monitor="ResolveForMonitoring",
            skip="ReleaseLock",
        ),
        "WaitForBackoff": _wait("checkRunLog", "CheckRunLog"),
        "ResolvePipeline": _ask("resolvePipeline", "IsResolved"),
        "IsResolved": _choose("resolvePipeline", "UnknownAnswer", proceed="EvaluateTraits"),
        "ResolveForPolling": _ask("resolvePipeline", "TriggerPipeline"),
        "ResolveForMonitoring": _ask("resolvePipeline", "MonitoringEvaluate"),
    } | {"TriggerPipeline": _task(TRIGGER, "IsTriggered", "trigger", **run)}


def _evaluation() -> dict[str, State]:
    answers = {"runID.$": "$.resolvePipeline.runID", "results.$": "$.results"}
    return {
        "EvaluateTraits": _each_trait("CheckEvaluationSLA", "AlertError"),
        "CheckEvaluationSLA": _ask("checkEvaluationSLA", "CheckValidationTimeout"),
        "CheckValidationTimeout": _ask("checkValidationTimeout", "IsValidationTimedOut"),
        "IsValidationTimedOut": _choose(
            "checkValidationTimeout", "UnknownAnswer", timeout="LogResult", proceed="CheckReadiness"
        ),
        "CheckReadiness": _ask("checkReadiness", "IsReady", **answers),
        "IsReady": _choose(
            "checkReadiness",
            "UnknownAnswer",
            proceed="TriggerPipeline",
            not_ready="WaitForReadiness",
            ended="LogResult",
        ),
        "WaitForReadiness": _wait("checkReadiness", "RenewForReadiness"),
        # The lock covers an evaluation, not the wait: the run log guards what lies between.
        "RenewForReadiness": _ask("releaseLock", "AcquireLock", **{"token.$": "$.acquireLock.token"}),
    }


def _job() -> dict[str, State]:
    run = {"runID.$": "$.resolvePipeline.runID"}
    return {
        "IsTriggered": _choose(
            "trigger", "UnknownAnswer", running="WaitForRun", ended="CheckCompletionSLA", unknown="WaitForTrigger"
        ),
        "WaitForTrigger": _wait("trigger", "RepeatTrigger"),
        "RepeatTrigger": _task(TRIGGER, "IsTriggered", "trigger", **run, resume=True),
        "WaitForRun": _wait("trigger", "PollRunStatus"),
        "PollRunStatus": _task(RUN_CHECKER, "EvaluatePollResult", "trigger", **run),
        "EvaluatePollResult": _choose(
            "trigger", "UnknownAnswer", running="CheckDeadlineWhileRunning", ended="CheckCompletionSLA"
        ),
        "CheckDeadlineWhileRunning": _ask("checkCompletionSLA", "WaitForRun"),
        "CheckCompletionSLA": _ask("checkCompletionSLA", "LogResult"),
        "LogResult": _ask("logResult", "HowDidItEnd"),
        "HowDidItEnd": _choose(
            "logResult",
            "UnknownAnswer",
            completed="ReleaseLock",
            failed="ReleaseLockAfterFailure",
            retry="ReleaseLockForRetry",
            monitor="ResolveForMonitoring",
        ),
        "ReleaseLockForRetry": _ask("releaseLock", "RetryBackoffWait", **{"token.$": "$.acquireLock.token"}),
        "RetryBackoffWait": _wait("logResult", "AcquireLock"),
    }


def _afterwards() -> dict[str, State]:
    answers = {"runID.$": "$.resolvePipeline.runID", "results.$": "$.results"}
    return {
        "MonitoringEvaluate": _each_trait("CheckDrift", "AlertError"),
        "CheckDrift": _ask("checkDrift", "IsDrifted", **answers),
        "IsDrifted": _choose(
            "checkDrift",
            "UnknownAnswer",
            drift="ReleaseLockForRerun",
            expired="ReleaseLock",
            **{"continue": "MonitoringWait"},
        ),
        "MonitoringWait": _wait("checkDrift", "MonitoringEvaluate"),
        "ReleaseLockForRerun": _ask("releaseLock", "AcquireLock", **{"token.$": "$.acquireLock.token"}),
    }


def _ends() -> dict[str, State]:
    token = {"token.$": "$.acquireLock.token"}
    unknown = {"Type": "Pass", "Result": {"Error": "UnknownAnswer", "Cause": "a task said what nobody expects"}}
    alert = {"error.$": "$.errorInfo"}
    return {
        "UnknownAnswer": {**unknown, "ResultPath": "$.errorInfo", "Next": "AlertError"},
        "UnknownAnswerUnlocked": {**unknown, "ResultPath": "$.errorInfo", "Next": "AlertErrorUnlocked"},
        "AlertError": _ask("alertError", "ReleaseLockAfterError", catch="ReleaseLockAfterError", **alert),
        "AlertErrorUnlocked": _ask("alertError", "MachineFailed", catch="MachineFailed", **alert),
        "ReleaseLock": _ask("releaseLock", "Done", catch="MachineFailed", **token),
        "ReleaseLockAfterFailure": _ask("releaseLock", "PipelineFailed", catch="PipelineFailed", **token),
        "ReleaseLockAfterError": _ask("releaseLock", "MachineFailed", catch="MachineFailed", **token),
        "Done": {"Type": "Succeed"},
        "Excluded": {"Type": "Succeed"},
        "LockHeld": {"Type": "Succeed"},
        "PipelineFailed": {"Type": "Fail", "Error": "PipelineFailed", "Cause": "The run log says why."},
        "MachineFailed": {"Type": "Fail", "Error": "MachineFailed", "Cause": "An alert was sent; see errorInfo."},
    }


_HANDLER = '''"""The {name} function: a door into lockstep.readiness.handlers."""

from lockstep.kernel.settings import load_settings
from resources.readiness import build_handlers

_handlers = build_handlers(load_settings())


def handle(event, context):
    """One call."""
    return _handlers.{method}(event)
'''

_ROUTER = '''"""The stream-router function: starts one execution of the state machine per marker."""

import json
import os

import boto3

from lockstep.kernel.settings import load_settings
from resources.readiness import build_handlers

_handlers = build_handlers(load_settings())
_states = boto3.client("stepfunctions")


def handle(event, context):
    """One batch of stream records; a name that exists was delivered before."""
    for request in _handlers.stream_router(event):
        try:
            _states.start_execution(
                stateMachineArn=os.environ["STATE_MACHINE_ARN"], name=request.name, input=json.dumps(request.input)
            )
        except _states.exceptions.ExecutionAlreadyExists:
            continue
'''


def export(folder: Path) -> list[Path]:
    """Write the definition and the five handlers; returns what was written."""
    (folder / "handlers").mkdir(parents=True, exist_ok=True)
    files = {folder / "statemachine.asl.json": json.dumps(machine(), indent=2) + "\n"}
    for method in ("orchestrator", "evaluator", "trigger", "run_checker"):
        files[folder / "handlers" / f"{method}.py"] = _HANDLER.format(name=method.replace("_", "-"), method=method)
    files[folder / "handlers" / "stream_router.py"] = _ROUTER
    for path, text in files.items():
        path.write_text(text)
    return sorted(files)
