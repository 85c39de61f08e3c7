"""Deliverers: what is sent, and which answers mean success, later or never."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import boto3
import httpx
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ParamValidationError, ReadTimeoutError
from botocore.stub import ANY, Stubber

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.deliver import DynamoDeliverer, SqsDeliverer, WebhookDeliverer, as_aws_error
from lockstep.kernel.errors import Terminal, Transient
from lockstep.kernel.outbox import Claimed, Destination

TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def claimed(destination: str, payload: Any, **headers: str) -> Claimed:
    scheme, _, address = destination.partition(":")
    return Claimed(
        id=42,
        lane="org-1",
        destination=Destination(scheme, address),
        payload=payload,
        headers={"traceparent": TRACE, **headers},
        on_exhausted="block",
        attempt=1,
        owner="relay",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def aws(service: str) -> Any:
    return boto3.client(service, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test")  # type: ignore[call-overload]


def refusal(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Op")  # type: ignore[typeddict-item]


@pytest.mark.parametrize("name", ["work", "work.fifo"])
def test_a_queue_receives_body_trace_id_and_lane(name: str) -> None:
    client = aws("sqs")
    order = {"MessageGroupId": "org-1", "MessageDeduplicationId": "42"} if name.endswith(".fifo") else {}
    attributes = {
        "traceparent": {"DataType": "String", "StringValue": TRACE},
        "lockstep-message-id": {"DataType": "String", "StringValue": "42"},
        "lockstep-lane": {"DataType": "String", "StringValue": "org-1"},
    }
    sent = {"QueueUrl": "https://q", "MessageBody": '{"a":1,"b":2}', "MessageAttributes": attributes, **order}
    with Stubber(client) as stub:
        stub.add_response("get_queue_url", {"QueueUrl": "https://q"}, {"QueueName": name})
        stub.add_response("send_message", {"MessageId": "1"}, sent)
        stub.add_response("send_message", {"MessageId": "2"}, sent)  # the address is asked for once
        deliverer = SqsDeliverer(client)
        deliverer.deliver(claimed(f"sqs:{name}", {"b": 2, "a": 1}))
        deliverer.deliver(claimed(f"sqs:{name}", {"b": 2, "a": 1}))


def test_too_many_headers_for_a_queue_are_final() -> None:
    """SQS refuses the eleventh attribute; retrying for hours would only hide that."""
    headers = {f"h{n}": "x" for n in range(8)}
    with pytest.raises(Terminal, match="attributes"):
        SqsDeliverer(aws("sqs")).deliver(claimed("sqs:work", 1, **headers))


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("ThrottlingException", 400, Transient),
        ("ProvisionedThroughputExceededException", 400, Transient),
        ("InternalError", 500, Transient),
        ("ServiceUnavailable", 503, Transient),
        ("TooMany", 429, Transient),
        ("AWS.SimpleQueueService.NonExistentQueue", 400, Transient),
        ("ExpiredTokenException", 400, Transient),
        ("InvalidMessageContents", 400, Terminal),
        ("ValidationException", 400, Terminal),
        ("SomethingNew", 400, Terminal),
    ],
)
def test_refusals_of_aws_are_told_apart(code: str, status: int, kind: type[Exception]) -> None:
    assert isinstance(as_aws_error(refusal(code, status)), kind)


def test_a_lost_answer_may_heal_and_a_malformed_request_may_not() -> None:
    assert isinstance(as_aws_error(EndpointConnectionError(endpoint_url="x")), Transient)
    assert isinstance(as_aws_error(ReadTimeoutError(endpoint_url="x")), Transient)
    assert isinstance(as_aws_error(ParamValidationError(report="x")), Terminal)


def test_an_item_is_written_by_condition_with_its_owner() -> None:
    client = aws("dynamodb")
    payload = {"key": {"org": "1"}, "attributes": {"rows": 3, "ratio": 0.1, "tags": ["x", {"y": 1.5}]}}
    with Stubber(client) as stub:
        stub.add_response(
            "put_item",
            {},
            {
                "TableName": "done",
                "Item": {
                    "org": {"S": "1"},
                    "rows": {"N": "3"},
                    "ratio": {"N": "0.1"},
                    "tags": {"L": [{"S": "x"}, {"M": {"y": {"N": "1.5"}}}]},
                    "lockstep_message": {"N": "42"},
                },
                "ConditionExpression": "attribute_not_exists(#key) OR #owner = :mine",
                "ExpressionAttributeNames": ANY,
                "ExpressionAttributeValues": ANY,
            },
        )
        DynamoDeliverer(client).deliver(claimed("dynamodb:done", payload))


@pytest.mark.parametrize(("mode", "kind"), [("once", Terminal), ("latest", None)])
def test_an_item_of_another_writer_is_a_conflict_unless_the_latest_wins(mode: str, kind: Any) -> None:
    client = aws("dynamodb")
    message = claimed("dynamodb:done", {"key": {"org": "1"}, "mode": mode})
    sign = "<=" if mode == "latest" else "="
    sent = {
        "TableName": "done",
        "Item": ANY,
        "ConditionExpression": f"attribute_not_exists(#key) OR #owner {sign} :mine",
        "ExpressionAttributeNames": {"#key": "org", "#owner": "lockstep_message"},
        "ExpressionAttributeValues": {":mine": {"N": "42"}},
    }
    with Stubber(client) as stub:
        stub.add_client_error("put_item", "ConditionalCheckFailedException", expected_params=sent)
        if kind is None:
            DynamoDeliverer(client).deliver(message)
        else:
            with pytest.raises(kind):
                DynamoDeliverer(client).deliver(message)


@pytest.mark.parametrize("payload", [None, [], {}, {"key": {}}, {"key": {"a": 1}, "mode": "x"}, {"key": 1}])
def test_a_payload_that_is_no_item_is_final(payload: Any) -> None:
    with pytest.raises(Terminal, match="no DynamoDB item"):
        DynamoDeliverer(aws("dynamodb")).deliver(claimed("dynamodb:done", payload))


def post(handler: Callable[[httpx.Request], httpx.Response], **options: Any) -> None:
    with httpx.Client(transport=httpx.MockTransport(handler)) as client:
        WebhookDeliverer(client, clock=FakeClock(), **options).deliver(
            claimed("webhook:https://hooks.example.com/x", {"b": 1, "a": "é"})
        )


def test_a_webhook_receives_body_id_time_trace_and_signature() -> None:
    seen: list[httpx.Request] = []

    def accept(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(204)

    post(accept, sign=lambda identity, moment, body: {"webhook-signature": f"{identity}/{moment}/{len(body)}"})
    (request,) = seen
    assert json.loads(request.content) == {"a": "é", "b": 1}
    assert request.headers["webhook-id"] == "42"
    assert request.headers["traceparent"] == TRACE
    moment = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())
    assert request.headers["webhook-timestamp"] == str(moment)
    assert request.headers["webhook-signature"] == f"42/{moment}/{len(request.content)}"


@pytest.mark.parametrize("status", [301, 400, 401, 404, 410, 413, 422])
def test_a_webhook_that_says_no_is_final(status: int) -> None:
    with pytest.raises(Terminal, match=str(status)):
        post(lambda _: httpx.Response(status, headers={"location": "https://elsewhere.example.com"}))


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_webhook_that_is_ill_may_heal(status: int) -> None:
    with pytest.raises(Transient, match=str(status)):
        post(lambda _: httpx.Response(status))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("Thu, 01 Jan 2026 00:02:00 GMT", 120.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
        ("99999999", 3600.0),
        ("soon", None),
        ("-5", None),
        ("", None),
    ],
)
def test_both_forms_of_retry_after_are_read_and_bounded(header: str, seconds: float | None) -> None:
    with pytest.raises(Transient) as caught:
        post(lambda _: httpx.Response(503, headers={"retry-after": header}))
    assert caught.value.retry_after == seconds


def test_a_webhook_that_cannot_be_reached_may_heal() -> None:
    def hang(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("slow", request=request)

    with pytest.raises(Transient):
        post(hang)


def test_an_answer_is_never_read() -> None:
    """A receiver that answers with an endless body would otherwise fill the relay's memory."""

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            pytest.fail("the body was read")

    post(lambda _: httpx.Response(200, stream=Endless()))
