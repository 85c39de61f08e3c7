"""How a message reaches SQS, DynamoDB or a webhook, and what each destination's errors mean.

What belongs here: one deliverer per scheme, and the classification of AWS errors. What does not: building
clients, timeouts and endpoints; clients are passed in, with timeouts well below the relay's claim ttl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

import httpx
from boto3.dynamodb.types import TypeSerializer
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import Terminal, Transient
from lockstep.kernel.outbox import Claimed, canonical_json

MESSAGE_ID = "lockstep-message-id"
"""SQS attribute with the outbox id: consumers drop ids that they have seen."""

LANE = "lockstep-lane"
"""SQS attribute with the lane."""

OWNER_ATTRIBUTE = "lockstep_message"
"""DynamoDB attribute with the outbox id of the message that wrote the item."""

_MOST_SQS_ATTRIBUTES = 10
_LONGEST_RETRY_AFTER = 3600.0

# Refusals that say nothing about the message: rights, credentials or the part itself are missing for the
# moment.
_AWS_TRANSIENT: Final = frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "AWS.SimpleQueueService.NonExistentQueue",
        "ExpiredToken",
        "ExpiredTokenException",
        "InternalServerError",
        "InvalidClientTokenId",
        "LimitExceededException",
        "OverLimit",
        "ProvisionedThroughputExceededException",
        "QueueDoesNotExist",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ResourceNotFoundException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
        "TransactionConflictException",
        "UnrecognizedClientException",
    }
)
_HTTP_TRANSIENT: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})

Sign = Callable[[str, int, bytes], Mapping[str, str]]
"""Makes the signature headers of a webhook from its id, its time in seconds and its body."""


class SqsDeliverer:
    """Sends the payload as JSON text, with trace, id and lane as attributes; FIFO queues also get a group."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._addresses: dict[str, str] = {}

    def deliver(self, claimed: Claimed) -> None:
        """Send. A lost answer means that the message is sent again, with the same id."""
        attributes = {**claimed.headers, MESSAGE_ID: str(claimed.id), LANE: claimed.lane}
        if len(attributes) > _MOST_SQS_ATTRIBUTES:
            raise Terminal(f"SQS allows {_MOST_SQS_ATTRIBUTES} attributes, not {len(attributes)}.", unit=claimed.lane)
        name = claimed.destination.address
        order = {"MessageGroupId": claimed.lane[:128], "MessageDeduplicationId": str(claimed.id)}
        try:
            self._client.send_message(
                QueueUrl=self._address(name),
                MessageBody=canonical_json(claimed.payload),
                MessageAttributes={
                    key: {"DataType": "String", "StringValue": value} for key, value in attributes.items()
                },
                **(order if name.endswith(".fifo") else {}),
            )
        except (ClientError, BotoCoreError) as error:
            self._addresses.pop(name, None)  # a queue that was made anew may have a new address
            raise as_aws_error(error, unit=claimed.lane) from error

    def _address(self, name: str) -> str:
        if name not in self._addresses:
            self._addresses[name] = self._client.get_queue_url(QueueName=name)["QueueUrl"]
        return self._addresses[name]


class DynamoDeliverer:
    """Writes one item by condition, so that a repeated delivery changes nothing.

    The payload is `{"key": {...}, "attributes": {...}, "mode": "once" | "latest"}`. `once` (the default)
    writes an item that is not there and accepts its own earlier write; an item of anybody else is a terminal
    conflict. `latest` also replaces an item of an older message, and gives way in silence to a newer one, so
    a late repeat cannot set the item back.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._serialize = TypeSerializer().serialize

    def deliver(self, claimed: Claimed) -> None:
        """Put the item unless it is there already."""
        key, attributes, mode = _item_parts(claimed)
        item = {**attributes, **key, OWNER_ATTRIBUTE: claimed.id}
        same_or_older = "<=" if mode == "latest" else "="
        try:
            self._client.put_item(
                TableName=claimed.destination.address,
                Item={name: self._serialize(_decimal(value)) for name, value in item.items()},
                ConditionExpression=f"attribute_not_exists(#key) OR #owner {same_or_older} :mine",
                ExpressionAttributeNames={"#key": next(iter(key)), "#owner": OWNER_ATTRIBUTE},
                ExpressionAttributeValues={":mine": {"N": str(claimed.id)}},
            )
        except ClientError as error:
            if error.response["Error"]["Code"] != "ConditionalCheckFailedException":
                raise as_aws_error(error, unit=claimed.lane) from error
            if mode == "once":
                raise Terminal(
                    f"another writer owns the item {key!r} of {claimed.destination.address}.",
                    unit=claimed.lane,
                ) from error
        except (BotoCoreError, TypeError) as error:
            raise as_aws_error(error, unit=claimed.lane) from error


class WebhookDeliverer:
    """Posts the payload as JSON. Redirects are refused: the address was checked, its target was not.

    Which addresses may be called at all (private networks, metadata services) is decided by the client's
    transport.
    """

    def __init__(self, client: httpx.Client, *, sign: Sign | None = None, clock: Clock | None = None) -> None:
        self._client = client
        self._sign = sign
        self._clock = clock or SystemClock()

    def deliver(self, claimed: Claimed) -> None:
        """Post once. 2xx is success; 408, 425, 429 and 5xx may heal; all else, 410 included, is final."""
        body = canonical_json(claimed.payload).encode()
        headers = self._headers(claimed, body)
        try:
            # Streamed and never read: the receiver's answer may be of any size and is of no interest.
            with self._client.stream(
                "POST", claimed.destination.address, content=body, headers=headers, follow_redirects=False
            ) as response:
                status, retry_after = response.status_code, response.headers.get("retry-after")
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise Terminal(f"the webhook's address cannot be used: {error}", unit=claimed.lane) from error
        except httpx.HTTPError as error:
            raise Transient(f"the webhook cannot be reached: {error!r}", unit=claimed.lane) from error
        self._judge(status, retry_after, claimed.lane)

    def _headers(self, claimed: Claimed, body: bytes) -> dict[str, str]:
        identity, moment = str(claimed.id), int(self._clock.now().timestamp())
        signature = self._sign(identity, moment, body) if self._sign else {}
        return {
            **claimed.headers,
            "content-type": "application/json",
            "webhook-id": identity,
            "webhook-timestamp": str(moment),
            **signature,
        }

    def _judge(self, status: int, retry_after: str | None, lane: str) -> None:
        if 200 <= status < 300:
            return
        if status in _HTTP_TRANSIENT or status >= 500:
            raise Transient(f"the webhook answered {status}.", unit=lane, retry_after=self._seconds_until(retry_after))
        raise Terminal(f"the webhook answered {status}.", unit=lane, next_step="correct it, then resume the lane.")

    def _seconds_until(self, retry_after: str | None) -> float | None:
        """Both forms of Retry-After, bounded: a receiver may not stop its lane for a year."""
        text = (retry_after or "").strip()
        if text.isascii() and text.isdigit():
            return min(float(text), _LONGEST_RETRY_AFTER)
        try:
            seconds = (parsedate_to_datetime(text) - self._clock.now()).total_seconds()
        except (ValueError, TypeError):
            return None
        return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)


def as_aws_error(error: Exception, *, unit: str | None = None) -> Transient | Terminal:
    """Whether trying again can help: throttling, outages, missing rights and lost answers may heal."""
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        healing = code in _AWS_TRANSIENT or status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS
        return Transient(str(error), unit=unit) if healing else Terminal(str(error), unit=unit)
    if isinstance(error, BotoCoreError) and not isinstance(error, ParamValidationError):
        return Transient(str(error), unit=unit)
    return Terminal(f"the request cannot be built: {error}", unit=unit)


def _item_parts(claimed: Claimed) -> tuple[dict[str, Any], dict[str, Any], str]:
    payload = claimed.payload if isinstance(claimed.payload, dict) else {}
    key, attributes = payload.get("key"), payload.get("attributes", {})
    mode = payload.get("mode", "once")
    if not (isinstance(key, dict) and key and isinstance(attributes, dict) and mode in ("once", "latest")):
        raise Terminal(
            "the payload is no DynamoDB item.",
            unit=claimed.lane,
            next_step='write {"key": {...}, "attributes": {...}, "mode": "once" or "latest"}.',
        )
    return key, attributes, mode


def _decimal(value: Any) -> Any:
    """DynamoDB numbers are decimal; a float is taken by its shortest spelling, as JSON shows it."""
    if isinstance(value, float):
        return Decimal(repr(value))
    if isinstance(value, dict):
        return {name: _decimal(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_decimal(item) for item in value]
    return value
