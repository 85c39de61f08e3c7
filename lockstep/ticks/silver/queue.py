"""The queue `bronze-completed`: hints that ticks were committed. A message goes away only when its tick is in silver.

What belongs here: receiving, hiding, deleting, sending, counting. What does not: what to do about a message. A lost
message costs a sweep, a repeated one is deleted when its tick turns out to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel import trace
from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.outbox import canonical_json
from lockstep.ticks.model import DEAD_LETTERS, QUEUE, Tick, TickMessage
from lockstep.ticks.silver.rules import HIDDEN_SECONDS

AT_ONCE = 10
_Item = TypeVar("_Item")


class Received(NamedTuple):
    """One delivery. `message` is None when the body is none of ours; `problem` says why."""

    message_id: str
    receipt_handle: str
    receives: int
    sent_at: datetime
    body: str
    message: TickMessage | None
    problem: str | None
    trace_id: str | None


class Depth(NamedTuple):
    """What a queue holds: visible, hidden and not yet visible messages."""

    visible: int
    hidden: int
    delayed: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.visible + self.hidden + self.delayed


class TickQueue:
    """One queue by name; `client` is an SQS client, given by the caller."""

    def __init__(self, client: Any, name: str = QUEUE) -> None:
        self._client = client
        self.name = name
        self._address: str | None = None

    @classmethod
    def dead_letters(cls, client: Any) -> TickQueue:
        """The queue of messages that were received too often."""
        return cls(client, DEAD_LETTERS)

    def receive(self, *, wait: int = 0, hidden: int = HIDDEN_SECONDS) -> list[Received]:
        """Up to ten messages, hidden from everybody else for `hidden` seconds."""
        answer = self._call(
            "receive_message",
            MaxNumberOfMessages=AT_ONCE,
            VisibilityTimeout=hidden,
            WaitTimeSeconds=wait,
            AttributeNames=["ApproximateReceiveCount", "SentTimestamp"],
            MessageAttributeNames=[trace.MESSAGE_ATTRIBUTE],
        )
        return [_received(one) for one in answer.get("Messages", ())]

    def delete(self, receipt_handles: Sequence[str]) -> list[str]:
        """Delete; returns the handles that the queue no longer takes, because the message was received again."""
        return self._batch("delete_message_batch", receipt_handles)

    def hide(self, receipt_handles: Sequence[str], seconds: int) -> list[str]:
        """Keep messages hidden for so long from now on; returns the handles that are stale."""
        return self._batch("change_message_visibility_batch", receipt_handles, VisibilityTimeout=seconds)

    def send(self, messages: Sequence[TickMessage]) -> None:
        """Send. Raises `Transient` if one was not taken; sending all of them again is harmless."""
        attribute = {trace.MESSAGE_ATTRIBUTE: {"DataType": "String", "StringValue": trace.traceparent()}}
        for chunk in _chunks(messages):
            entries = [
                {"Id": str(number), "MessageBody": canonical_json(one.render()), "MessageAttributes": attribute}
                for number, one in enumerate(chunk)
            ]
            failed = self._call("send_message_batch", Entries=entries).get("Failed", ())
            if failed:
                raise as_aws_error(BotoCoreError(), unit=f"{self.name}: {len(failed)} messages were not taken")

    def send_again(self, received: Sequence[Received]) -> None:
        """Send bodies as they came: for messages that leave the dead letters."""
        for chunk in _chunks(received):
            entries = [{"Id": str(number), "MessageBody": one.body} for number, one in enumerate(chunk)]
            failed = self._call("send_message_batch", Entries=entries).get("Failed", ())
            if failed:
                raise as_aws_error(BotoCoreError(), unit=f"{self.name}: {len(failed)} messages were not taken")

    def depth(self) -> Depth:
        """What the queue holds, approximately, as SQS says."""
        names = {
            "visible": "ApproximateNumberOfMessages",
            "hidden": "ApproximateNumberOfMessagesNotVisible",
            "delayed": "ApproximateNumberOfMessagesDelayed",
        }
        found = self._call("get_queue_attributes", AttributeNames=list(names.values()))["Attributes"]
        return Depth(**{name: int(found.get(attribute, 0)) for name, attribute in names.items()})

    def _batch(self, operation: str, receipt_handles: Sequence[str], **more: Any) -> list[str]:
        stale: list[str] = []
        for chunk in _chunks(receipt_handles):
            entries = [{"Id": str(number), "ReceiptHandle": one, **more} for number, one in enumerate(chunk)]
            answer = self._call(operation, Entries=entries)
            stale += [chunk[int(failed["Id"])] for failed in answer.get("Failed", ())]
        return stale

    def _call(self, operation: str, **arguments: Any) -> Any:
        call: Callable[..., Any] = getattr(self._client, operation)
        try:
            if self._address is None:
                self._address = self._client.get_queue_url(QueueName=self.name)["QueueUrl"]
            return call(QueueUrl=self._address, **arguments)
        except (ClientError, BotoCoreError) as error:
            self._address = None  # a queue that was made anew may have a new address
            raise as_aws_error(error, unit=self.name) from error


def message_of(tick: Tick, now: datetime) -> TickMessage:
    """The message of a committed tick, as bronze sends it: it names the last table's commit."""
    if not tick.commits or tick.mode is None:
        raise InvalidInput("the tick is not committed.", unit=tick.unit)
    last = tick.commits[-1]
    return TickMessage(
        org_id=tick.org_id,
        project_id=tick.project_id,
        tick_id=tick.tick_id,
        mode=tick.mode,
        dt=str(tick.dt),
        bronze_db_key=last.key,
        bronze_db_etag=last.etag,
        emitted_at=now,
    )


def _received(one: Any) -> Received:
    attributes = one.get("Attributes", {})
    header = one.get("MessageAttributes", {}).get(trace.MESSAGE_ATTRIBUTE, {}).get("StringValue")
    message, problem = None, None
    try:
        message = TickMessage.parse(one["Body"])
    except InvalidInput as refusal:
        problem = str(refusal)
    return Received(
        message_id=one["MessageId"],
        receipt_handle=one["ReceiptHandle"],
        receives=int(attributes.get("ApproximateReceiveCount", 1)),
        sent_at=datetime.fromtimestamp(int(attributes.get("SentTimestamp", 0)) / 1000, UTC),
        body=one["Body"],
        message=message,
        problem=problem,
        trace_id=trace.parse_traceparent(header),
    )


def _chunks(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), AT_ONCE):
        yield items[start : start + AT_ONCE]
