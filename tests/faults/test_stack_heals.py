"""kill -9 of every part and of the supervisor, on the shared stack: it heals by itself and no data is lost."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import Any

import boto3
import psycopg
import pytest

from stack import doctor, orphans
from stack.health import probe
from stack.lifecycle import Stack
from stack.parts import PARTS

pytestmark = [pytest.mark.stack, pytest.mark.platform, pytest.mark.serial]

HEAL_SECONDS = 120


class Keepsakes:
    """One datum in each store, written before the fault and read after it."""

    def __init__(self, stack: Stack, token: str) -> None:
        self.token = token
        self._dsn = stack.site().environment["LOCKSTEP_POSTGRES_DSN"]

    def write(self) -> None:
        with psycopg.connect(self._dsn) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS public.keepsake (token text)")
            connection.execute("INSERT INTO public.keepsake VALUES (%s)", [self.token])
        boto3.client("dynamodb").put_item(TableName="bronze_committed", Item={"tick_id": {"S": self.token}})
        sqs = boto3.client("sqs")
        sqs.send_message(QueueUrl=_keepsake_queue(sqs, self.token), MessageBody=self.token)
        boto3.client("s3").put_object(Bucket="lockstep-lake", Key=f"keepsake/{self.token}", Body=b"kept")

    def check(self) -> None:
        with psycopg.connect(self._dsn) as connection:
            found = connection.execute("SELECT 1 FROM public.keepsake WHERE token = %s", [self.token]).fetchone()
        assert found, "PostgreSQL lost an acknowledged row"
        item = boto3.client("dynamodb").get_item(
            TableName="bronze_committed", Key={"tick_id": {"S": self.token}}, ConsistentRead=True
        )
        assert "Item" in item, "DynamoDB lost an acknowledged item"
        sqs = boto3.client("sqs")
        messages = sqs.receive_message(QueueUrl=_keepsake_queue(sqs, self.token), WaitTimeSeconds=5).get("Messages")
        assert messages and messages[0]["Body"] == self.token, "SQS lost an acknowledged message"
        body = boto3.client("s3").get_object(Bucket="lockstep-lake", Key=f"keepsake/{self.token}")["Body"].read()
        assert body == b"kept", "S3 lost an acknowledged object"


def _keepsake_queue(sqs: Any, token: str) -> str:
    return sqs.create_queue(QueueName=f"test-keepsake-{token}")["QueueUrl"]


def _wait(what: Callable[[], Any], words: str) -> Any:
    deadline = time.monotonic() + HEAL_SECONDS
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.3)
    raise AssertionError(f"not within {HEAL_SECONDS} s: {words}")


SERVICES = [part.name for part in PARTS if part.kind == "service"]
DAGSTER = [part.name for part in PARTS if part.name.startswith("dagster")]
STORES = [[part.name] for part in PARTS if part.name not in (*SERVICES, *DAGSTER)]


@pytest.mark.parametrize("names", [*STORES, DAGSTER, SERVICES], ids="+".join)
def test_killed_parts_come_back_and_nothing_acknowledged_is_lost(stack: Stack, names: list[str]) -> None:
    keepsakes = Keepsakes(stack, secrets.token_hex(4))
    keepsakes.write()
    supervisor = stack.running()
    pids = {name: supervisor.processes()[name]["pid"] for name in names}
    restarts = supervisor.restarts()

    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)

    for name in names:
        _wait(lambda name=name: supervisor.restarts()[name] > restarts[name], f"{name} is started again")
        _wait(lambda name=name: probe(name, stack.site()) is None, f"{name} is healthy again")
        assert supervisor.processes()[name]["pid"] != pids[name]
    keepsakes.check()


def test_a_killed_supervisor_is_replaced_and_nothing_acknowledged_is_lost(stack: Stack) -> None:
    keepsakes = Keepsakes(stack, secrets.token_hex(4))
    keepsakes.write()
    before = {process.pid for process in orphans.members(stack.home)}
    supervisor_pid = int((stack.home.run / "supervisord.pid").read_text())

    os.kill(supervisor_pid, signal.SIGKILL)
    stack.up()

    survivors = before & {process.pid for process in orphans.members(stack.home)}
    assert survivors == set(), "every process of the dead supervisor is gone"
    assert all(line.healthy for line in stack.status())
    keepsakes.check()


def test_after_all_of_that_a_message_still_walks_through_every_part(stack: Stack) -> None:
    stack.up()
    findings = doctor.examine(stack, deep=True)
    assert [finding for finding in findings if finding.state == "bad"] == []
    assert "self-test" in [finding.subject for finding in findings]
