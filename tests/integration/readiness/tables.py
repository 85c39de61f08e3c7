"""Tables of the readiness plane for one test or one module: as declared, under another name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import boto3

from stack import provision


@contextmanager
def table_named(stack: Any, name: str) -> Iterator[None]:
    """Make the table on the stack's DynamoDB and remove it afterwards. Needs no variables, so any scope may use it."""
    environment = stack.site().environment
    client = boto3.client(
        "dynamodb",
        endpoint_url=environment["AWS_ENDPOINT_URL_DYNAMODB"],
        region_name=environment["AWS_DEFAULT_REGION"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
    )
    declared = next(table for table in provision.TABLES if table.name == "readiness")
    client.create_table(**provision.definition(replace(declared, name=name)))
    try:
        yield
    finally:
        client.delete_table(TableName=name)
