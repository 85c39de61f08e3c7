"""The self-test's sensor: reads messages, looks at the runs that served them, requests runs.

What belongs here: receiving, asking Dagster, carrying out decisions. What does not: the decisions themselves
(lockstep/selftest/rules.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from jobs.lanes import LANE_TAG
from jobs.selftest import selftest_job
from lockstep.kernel import trace
from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import InvalidInput
from lockstep.selftest import rules
from lockstep.selftest.model import LANE, QUEUE, TABLE, TOKEN_TAG, RunOutcome, SelftestRequest
from platform_assets.selftest import SelftestConfig
from resources.aws import SqsResource
from sensors import EVERY_LOOP_SECONDS

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

DEADLINE_SECONDS = 40  # a tick is cut at 60 s, and what it had decided by then would be lost
MAX_MESSAGES = 20
HIDDEN_SECONDS = 30  # how soon a message comes back when its run died; longer than a tick, so a tick sees it once

_FAILED = {dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}


@dg.sensor(
    name="selftest_sensor",
    job=selftest_job,
    minimum_interval_seconds=EVERY_LOOP_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Turns self-test messages into runs. A message goes away only when its work is done.",
)
def selftest_sensor(context: dg.SensorEvaluationContext, sqs: SqsResource) -> dg.SensorResult:
    """One bounded pass over the queue."""
    client = sqs.get_client()
    url = _queue_url(client)
    if url is None:
        return dg.SensorResult(skip_reason=f"queue {QUEUE} does not exist yet")
    requests: dict[str, dg.RunRequest] = {}  # by token: one message sent twice may come twice in one tick
    for message in _receive(client, url, SystemClock()):
        _serve(context, client, url, message, requests)
    return dg.SensorResult(run_requests=list(requests.values()), skip_reason=None if requests else "nothing to start")


def outcome_of(status: dg.DagsterRunStatus) -> RunOutcome:
    """Every status that is not final is in flight, including those that Dagster may add."""
    if status == dg.DagsterRunStatus.SUCCESS:
        return RunOutcome.SUCCEEDED
    return RunOutcome.FAILED if status in _FAILED else RunOutcome.IN_FLIGHT


def build_run_request(request: SelftestRequest, attempt: int, receipt_handle: str, trace_id: str) -> dg.RunRequest:
    """The run that serves `request`, found again later by its token tag."""
    config = SelftestConfig(id=request.id, rows=request.rows, receipt_handle=receipt_handle)
    return dg.RunRequest(
        run_key=rules.run_key(request, attempt),
        run_config=dg.RunConfig(ops={TABLE: config}),
        tags={
            LANE_TAG: LANE,
            TOKEN_TAG: request.id,
            "lockstep/attempt": str(attempt),
            trace.RUN_TAG: trace_id,
        },
    )


def _serve(
    context: dg.SensorEvaluationContext,
    client: SQSClient,
    url: str,
    message: dict[str, Any],
    requests: dict[str, dg.RunRequest],
) -> None:
    """Add the run that this message needs, or delete the message, or leave it for later."""
    handle = message["ReceiptHandle"]
    try:
        request = rules.parse_message(message["Body"])
    except InvalidInput as refusal:
        # A self-test message carries no data: an unreadable one is dropped, its reason in the tick's log.
        context.log.error("message %s dropped: %s", message["MessageId"], refusal)
        client.delete_message(QueueUrl=url, ReceiptHandle=handle)
        return
    asked = [RunOutcome.IN_FLIGHT] if request.id in requests else []
    decision = rules.next_step([*asked, *_outcomes(context.instance, request)])
    if isinstance(decision, rules.Launch):
        requests[request.id] = build_run_request(request, decision.attempt, handle, _trace_of(message))
    elif isinstance(decision, rules.Forget):
        context.log.info("self-test %s: message deleted, %s", request.id, decision.reason)
        client.delete_message(QueueUrl=url, ReceiptHandle=handle)


def _outcomes(instance: dg.DagsterInstance, request: SelftestRequest) -> list[RunOutcome]:
    runs = instance.get_runs(filters=dg.RunsFilter(tags={TOKEN_TAG: request.id}), limit=20)
    return [outcome_of(run.status) for run in runs]


def _queue_url(client: SQSClient) -> str | None:
    try:
        return client.get_queue_url(QueueName=QUEUE)["QueueUrl"]
    except client.exceptions.QueueDoesNotExist:
        return None


def _receive(client: SQSClient, url: str, clock: Clock) -> Iterator[dict[str, Any]]:
    """Messages until the queue is empty, the batch is full or the deadline has passed."""
    deadline, received = clock.monotonic() + DEADLINE_SECONDS, 0
    while received < MAX_MESSAGES and clock.monotonic() < deadline:
        batch = client.receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=min(10, MAX_MESSAGES - received),
            VisibilityTimeout=HIDDEN_SECONDS,
            WaitTimeSeconds=1,
            MessageAttributeNames=[trace.MESSAGE_ATTRIBUTE],
        ).get("Messages", [])
        if not batch:
            return
        received += len(batch)
        yield from batch


def _trace_of(message: dict[str, Any]) -> str:
    attribute = message.get("MessageAttributes", {}).get(trace.MESSAGE_ATTRIBUTE, {})
    return trace.parse_traceparent(attribute.get("StringValue")) or trace.new_trace()


sensors = [selftest_sensor]
