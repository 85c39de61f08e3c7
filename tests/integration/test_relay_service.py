"""The relay of the running stack: a row written in a transaction arrives on its queue without anyone's help."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest

from lockstep.kernel.outbox import Message, Outbox

if TYPE_CHECKING:
    from stack.lifecycle import Stack
    from tests.conftest import FreshQueue

pytestmark = pytest.mark.stack


def test_committed_messages_arrive_in_order_and_rolled_back_ones_never(
    stack: Stack, sqs: Any, queue: FreshQueue
) -> None:
    lane = f"test/{secrets.token_hex(4)}"
    dsn = stack.site().environment["LOCKSTEP_POSTGRES_DSN"]
    with psycopg.connect(dsn) as connection:
        Outbox().put(connection, Message(lane=lane, destination=f"sqs:{queue.name}", payload={"n": "undone"}))
        connection.rollback()
        for number in range(3):
            Outbox().put(connection, Message(lane=lane, destination=f"sqs:{queue.name}", payload={"n": number}))
    arrived: list[Any] = []
    for _ in range(30):
        answer = sqs.receive_message(QueueUrl=queue.url, WaitTimeSeconds=1, MaxNumberOfMessages=10)
        arrived += [json.loads(message["Body"])["n"] for message in answer.get("Messages", [])]
        if len(arrived) >= 3:
            break
    assert arrived == [0, 1, 2]


def test_the_relay_shows_depth_and_age_of_the_outbox(stack: Stack) -> None:
    address = f"http://127.0.0.1:{stack.home.ports()['relay']}"
    assert "loop" in httpx.get(f"{address}/readyz").json()["checks"]
    assert "lockstep_outbox" in httpx.get(f"{address}/metrics").text
