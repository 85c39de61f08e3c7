"""The IAM policies in docs/deploy/iam: valid, without a wildcard, about things that exist, and enough for the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.kernel.settings import PROJECT_ROOT, load_settings
from stack import provision
from stack.environment import environment
from stack.home import Home
from stack.parts import Site
from tests.unit.docs.pages import DOCS

POLICIES = sorted((DOCS / "deploy" / "iam").glob("*.json"))
ROOMS = ("lockstep", "platform_assets", "sensors", "jobs", "resources", "services", "stack")

# AWS knows no resource for these: they list names.
WITHOUT_RESOURCE = {"sqs:ListQueues", "dynamodb:ListTables", "s3:ListAllMyBuckets"}

# What a call of boto3 needs, where its name does not say it.
NEEDS = {
    "head_object": "s3:GetObject",
    "download_fileobj": "s3:GetObject",
    "head_bucket": "s3:ListBucket",
    "list_objects_v2": "s3:ListBucket",
    "list_buckets": "s3:ListAllMyBuckets",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "delete_objects": "s3:DeleteObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "send_message_batch": "sqs:SendMessage",
    "delete_message_batch": "sqs:DeleteMessage",
    "change_message_visibility_batch": "sqs:ChangeMessageVisibility",
}
PLAIN = {
    "s3": ("put_object", "get_object", "delete_object", "abort_multipart_upload", "create_bucket"),
    "sqs": (
        *("send_message", "receive_message", "delete_message", "get_queue_url", "get_queue_attributes"),
        *("set_queue_attributes", "create_queue", "list_queues"),
    ),
    "dynamodb": (
        *("put_item", "get_item", "update_item", "delete_item", "batch_get_item", "query", "describe_table"),
        *("create_table", "list_tables", "describe_time_to_live", "update_time_to_live"),
        *("describe_stream", "get_records", "get_shard_iterator"),
    ),
}


def _statements(policy: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(policy.read_text())["Statement"]
    return found


def _action(service: str, call: str) -> str:
    return f"{service}:" + "".join(word.capitalize() for word in call.split("_"))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names that the platform creates."""
    settings = load_settings(home=tmp_path_factory.mktemp("home"))
    home = Home(settings.home)
    home.prepare()
    ports = home.choose_ports(settings)
    site = Site(settings, home, ports, environment(settings, home, ports))
    queues = {queue.name for queue in provision.QUEUES} | {queue.dead_letters for queue in provision.QUEUES}
    return {
        "sqs": {name for name in queues if name},
        "dynamodb": {table.name for table in provision.TABLES},
        "s3": set(provision.buckets(site)),
    }


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.stem)
def test_a_policy_allows_named_actions_on_named_things(policy: Path, known: dict[str, set[str]]):
    document = json.loads(policy.read_text())
    assert document["Version"] == "2012-10-17"
    sids = [statement["Sid"] for statement in document["Statement"]]
    assert len(sids) == len(set(sids))
    for statement in document["Statement"]:
        assert statement.keys() == {"Sid", "Effect", "Action", "Resource"}
        assert statement["Effect"] == "Allow"
        assert all(re.fullmatch(r"(s3|sqs|dynamodb):[A-Za-z]+", action) for action in statement["Action"])
        if statement["Resource"] == "*":
            assert set(statement["Action"]) <= WITHOUT_RESOURCE
            continue
        assert not WITHOUT_RESOURCE.intersection(statement["Action"])
        for arn in statement["Resource"]:
            service, name = _named(arn)
            assert {action.split(":")[0] for action in statement["Action"]} == {service}
            assert name in known[service], arn


def _named(arn: str) -> tuple[str, str]:
    _, _, service, _, _, rest = arn.split(":", 5)
    parts = rest.split("/")
    return service, parts[1] if service == "dynamodb" else parts[0]


def test_every_queue_table_and_bucket_is_somebody_s(known: dict[str, set[str]]):
    told: dict[str, set[str]] = {"sqs": set(), "dynamodb": set(), "s3": set()}
    for policy in POLICIES:
        for statement in _statements(policy):
            for arn in statement["Resource"] if statement["Resource"] != "*" else ():
                service, name = _named(arn)
                told[service].add(name)
    assert told == known


def test_every_call_that_the_code_makes_is_allowed_to_some_role():
    """Guards a new call that works here, where everything is allowed, and is refused in production."""
    granted = {action for policy in POLICIES for statement in _statements(policy) for action in statement["Action"]}
    text = "\n".join(module.read_text() for room in ROOMS for module in (PROJECT_ROOT / room).rglob("*.py"))
    wanted = {_action(service, call): call for service, calls in PLAIN.items() for call in calls}
    wanted |= {action: call for call, action in NEEDS.items()}
    used = {action for action, call in wanted.items() if re.search(rf"(\.{call}\(|\"{call}\")", text)}
    assert {"s3:PutObject", "sqs:ReceiveMessage", "dynamodb:BatchGetItem", "dynamodb:GetRecords"} <= used
    assert used <= granted
