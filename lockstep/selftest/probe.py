"""The self-test from outside: send one message, then watch it arrive, with the time of every step.

What belongs here: the sender and the bounded wait, through SQS and Dagster's GraphQL address. What does not:
Dagster itself, which this module must not import, and printing, which is the command line's part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from lockstep.kernel import trace
from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import Terminal, Transient
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.selftest.model import CHECK, MAX_ATTEMPTS, QUEUE, TABLE, TOKEN_TAG
from lockstep.selftest.rules import parse_request

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

POLL_SECONDS = 0.5
REQUEST_TIMEOUT_SECONDS = 10.0

_QUERY = """
query Selftest($tags: [ExecutionTag!]!, $asset: AssetKeyInput!, $check: String!) {
  runsOrError(filter: {tags: $tags}, limit: 20) {
    __typename
    ... on Runs { results { runId status creationTime startTime endTime } }
    ... on PythonError { message }
  }
  assetCheckExecutions(assetKey: $asset, checkName: $check, limit: 20) {
    runId
    timestamp
    evaluation { success timestamp description targetMaterialization { timestamp } }
  }
}
"""


@dataclass(frozen=True)
class Progress:
    """Where a self-test stands, in seconds since the epoch. None: not reached yet."""

    run_id: str | None = None
    status: str = "no run yet"
    requested: float | None = None
    started: float | None = None
    written: float | None = None
    ended: float | None = None
    checked: float | None = None
    passed: bool | None = None
    detail: str = ""
    runs: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """A self-test that arrived: which run served it, and the seconds that each step took."""

    token: str
    run_id: str
    detail: str
    steps: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds from the message to the passed check."""
        return sum(self.steps.values())

    def describe(self) -> str:
        """The timings, one line per step, for a person."""
        lines = [f"  {name:<8}{seconds:6.1f} s" for name, seconds in self.steps.items()]
        return "\n".join([f"self-test {self.token}: {self.detail}", *lines, f"  {'total':<8}{self.total:6.1f} s"])


def submit(sqs: SQSClient, rows: int = 1000, *, ids: IdSource | None = None) -> str:
    """Send one self-test message and return its token. The queue is created if it is not there yet."""
    request = parse_request((ids or SystemIds()).new_id(), rows)
    sqs.send_message(
        QueueUrl=_queue_url(sqs),
        MessageBody=json.dumps({"id": request.id, "rows": request.rows}),
        MessageAttributes={
            trace.MESSAGE_ATTRIBUTE: {"DataType": "String", "StringValue": trace.traceparent()},
        },
    )
    return request.id


def await_result(
    dagster_url: str,
    token: str,
    *,
    sent_at: float,
    timeout: float = 180.0,
    clock: Clock | None = None,
    client: httpx.Client | None = None,
) -> ProbeResult:
    """Wait until the check of `token` passed.

    Args:
        dagster_url: Base address of the Dagster webserver.
        token: What `submit` returned.
        sent_at: When it was sent, in seconds since the epoch: the sensor's time counts from here.
        timeout: Longest wait, in seconds.
        clock: Where time comes from; the machine's clock by default.
        client: HTTP client, for tests; one with a timeout by default.

    Raises:
        Transient: Time is up. The error names the step that was waited for.
        Terminal: The check failed, or every attempt of the run did.
    """
    clock = clock or SystemClock()
    deadline = clock.monotonic() + timeout
    with client or httpx.Client(base_url=dagster_url, timeout=REQUEST_TIMEOUT_SECONDS) as http:
        last = Progress()
        while clock.monotonic() < deadline:
            last = _look(http, token) or last
            if (result := judge(token, last, sent_at)) is not None:
                return result
            clock.sleep(POLL_SECONDS)
    raise Transient(
        f"no result within {timeout:.0f} s: {waiting_for(last)}.",
        unit=f"self-test {token}",
        next_step="look at selftest_sensor and the run queue in the Dagster UI.",
    )


def judge(token: str, progress: Progress, sent_at: float) -> ProbeResult | None:
    """The result if the self-test has arrived, None while it is under way, `Terminal` if it cannot arrive."""
    unit = f"self-test {token}"
    if progress.passed is False:
        raise Terminal(f"the check failed: {progress.detail}", unit=unit, next_step=f"open run {progress.run_id}.")
    if progress.status in ("FAILURE", "CANCELED") and progress.runs >= MAX_ATTEMPTS:
        raise Terminal(f"{progress.runs} runs failed.", unit=unit, next_step=f"open run {progress.run_id}.")
    if not progress.passed or progress.run_id is None or progress.ended is None:
        return None
    return ProbeResult(token, progress.run_id, progress.detail, _durations(progress, sent_at))


def waiting_for(progress: Progress) -> str:
    """The step that has not happened yet, in words."""
    if progress.run_id is None:
        return "the sensor has requested no run"
    if progress.started is None:
        return f"run {progress.run_id} has not started ({progress.status})"
    if progress.checked is None:
        return f"run {progress.run_id} has not reached its check ({progress.status})"
    return f"run {progress.run_id} has not ended ({progress.status})"


def read_progress(data: dict[str, Any]) -> Progress:
    """Turn an answer of Dagster into progress: the newest run that serves the token, and its check."""
    runs = data["runsOrError"]
    if runs["__typename"] != "Runs":
        raise Transient(f"Dagster could not list runs: {runs.get('message', runs['__typename'])}")
    if not runs["results"]:
        return Progress()
    run = max(runs["results"], key=lambda candidate: float(candidate["creationTime"]))
    checks = [check for check in data["assetCheckExecutions"] if check["runId"] == run["runId"]]
    evaluation = (checks[0]["evaluation"] if checks else None) or {}
    return Progress(
        run_id=run["runId"],
        status=run["status"],
        requested=run["creationTime"],
        started=run["startTime"],
        written=(evaluation.get("targetMaterialization") or {}).get("timestamp"),
        ended=run["endTime"],
        checked=evaluation.get("timestamp"),
        passed=evaluation.get("success"),
        detail=evaluation.get("description") or "",
        runs=len(runs["results"]),
    )


def _queue_url(sqs: SQSClient) -> str:
    # Asked first: creating a queue that exists with other attributes is an error.
    try:
        return sqs.get_queue_url(QueueName=QUEUE)["QueueUrl"]
    except sqs.exceptions.QueueDoesNotExist:
        return sqs.create_queue(QueueName=QUEUE)["QueueUrl"]


def _look(http: httpx.Client, token: str) -> Progress | None:
    variables = {"tags": [{"key": TOKEN_TAG, "value": token}], "asset": {"path": [TABLE]}, "check": CHECK}
    try:
        answer = http.post("/graphql", json={"query": _QUERY, "variables": variables})
        answer.raise_for_status()
    except httpx.HTTPError:  # a webserver that restarts is not a failed self-test
        return None
    body = answer.json()
    if body.get("errors"):
        raise Terminal(f"Dagster refused the query: {body['errors'][0].get('message')}", unit=f"self-test {token}")
    return read_progress(body["data"])


def _durations(progress: Progress, sent_at: float) -> dict[str, float]:
    # Each step starts where the one before it ended, so the steps add up to the whole. Clocks of two machines
    # may disagree a little: a step is never shown as negative.
    marks = (sent_at, progress.requested, progress.started, progress.written, progress.checked)
    times = [mark for mark in marks if mark is not None]
    names = ("sensor", "queue", "run", "check")
    return {name: max(0.0, after - before) for name, before, after in zip(names, times, times[1:], strict=False)}
