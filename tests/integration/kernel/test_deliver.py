"""From a committed transaction to the real queue and table."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.kernel.deliver import DynamoDeliverer, SqsDeliverer
from lockstep.kernel.errors import Terminal
from lockstep.kernel.migrate import migrate
from lockstep.kernel.outbox import Message, Outbox, OutboxClaims
from lockstep.kernel.postgres import Pool, pool, transaction
from lockstep.kernel.relay import Relay
from lockstep.kernel.trace import bind_trace, parse_traceparent

pytestmark = pytest.mark.stack


@pytest.fixture
def shared(database: str) -> Iterator[Pool]:
    migrate(database, "lockstep.kernel")
    with pool(database, application_name="deliver-tests") as opened:
        yield opened


@pytest.fixture
def table(dynamodb: Any) -> Iterator[str]:
    name = f"kernel-{uuid.uuid4()}"
    dynamodb.create_table(
        TableName=name,
        KeySchema=[
            {"AttributeName": "org", "KeyType": "HASH"},
            {"AttributeName": "tick", "KeyType": "RANGE"},
        ],
        AttributeDefinitions=[
            {"AttributeName": "org", "AttributeType": "S"},
            {"AttributeName": "tick", "AttributeType": "S"},
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    dynamodb.get_waiter("table_exists").wait(TableName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 30})
    yield name
    dynamodb.delete_table(TableName=name)


def put(shared: Pool, destination: str, payload: Any) -> None:
    with transaction(shared) as connection:
        Outbox().put(connection, Message("lane", destination, payload))


def item(dynamodb: Any, table: str, tick: str) -> Any:
    key = {"org": {"S": "1"}, "tick": {"S": tick}}
    return dynamodb.get_item(TableName=table, Key=key, ConsistentRead=True).get("Item")


def test_a_message_reaches_the_queue_in_order_with_its_trace(shared: Pool, sqs: Any, queue: Any) -> None:
    with bind_trace("d" * 32):
        for number in range(3):
            put(shared, f"sqs:{queue.name}", {"number": number})
    assert Relay(shared, {"sqs": SqsDeliverer(sqs)}).run_once().delivered == 3
    received: list[Any] = []
    for _ in range(20):
        received += sqs.receive_message(
            QueueUrl=queue.url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=1,
            MessageAttributeNames=["All"],
        ).get("Messages", [])
        if len(received) == 3:
            break
    by_id = sorted(received, key=lambda m: int(m["MessageAttributes"]["lockstep-message-id"]["StringValue"]))
    assert [json.loads(m["Body"])["number"] for m in by_id] == [0, 1, 2]
    traces = {parse_traceparent(m["MessageAttributes"]["traceparent"]["StringValue"]) for m in received}
    assert traces == {"d" * 32}


def test_a_repeated_delivery_leaves_one_item_unchanged(shared: Pool, dynamodb: Any, table: str) -> None:
    put(
        shared,
        f"dynamodb:{table}",
        {"key": {"org": "1", "tick": "t"}, "attributes": {"rows": 3, "ratio": 0.5}},
    )
    (claim,) = OutboxClaims(shared, owner="x", claim_ttl=60).claim(1)
    for _ in range(2):
        DynamoDeliverer(dynamodb).deliver(claim)
    assert item(dynamodb, table, "t")["rows"] == {"N": "3"}


def test_another_message_cannot_replace_a_committed_item(shared: Pool, dynamodb: Any, table: str) -> None:
    """Two ticks under one key is a bug upstream; overwriting would hide it."""
    for rows in (1, 2):
        put(shared, f"dynamodb:{table}", {"key": {"org": "1", "tick": "t"}, "attributes": {"rows": rows}})
    report = Relay(shared, {"dynamodb": DynamoDeliverer(dynamodb)}).run_once()
    assert (report.delivered, report.blocked) == (1, 1)
    assert item(dynamodb, table, "t")["rows"] == {"N": "1"}


def test_a_late_repeat_cannot_set_the_latest_item_back(shared: Pool, dynamodb: Any, table: str) -> None:
    claims, deliverer = OutboxClaims(shared, owner="x", claim_ttl=60), DynamoDeliverer(dynamodb)
    taken = []
    for state in ("RUNNING", "DONE"):
        payload = {"key": {"org": "1", "tick": "t"}, "attributes": {"state": state}, "mode": "latest"}
        put(shared, f"dynamodb:{table}", payload)
        (claim,) = claims.claim(1)
        deliverer.deliver(claim)
        assert claims.delivered(claim)
        taken.append(claim)
    deliverer.deliver(taken[0])
    assert item(dynamodb, table, "t")["state"] == {"S": "DONE"}


def test_an_item_of_a_stranger_is_a_conflict(shared: Pool, dynamodb: Any, table: str) -> None:
    dynamodb.put_item(TableName=table, Item={"org": {"S": "1"}, "tick": {"S": "t"}})
    put(shared, f"dynamodb:{table}", {"key": {"org": "1", "tick": "t"}})
    (claim,) = OutboxClaims(shared, owner="x", claim_ttl=60).claim(1)
    with pytest.raises(Terminal, match="another writer"):
        DynamoDeliverer(dynamodb).deliver(claim)
