"""SQS and DynamoDB clients as Dagster resources. S3 comes from dagster_aws; see assembly.py.

What belongs here: building clients, with timeouts. What does not: queue names, table names, messages.
Endpoints and credentials are boto3's own business (`AWS_*` variables): nothing here can tell
embedded from AWS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import boto3
import dagster as dg
from botocore.config import Config
from pydantic import Field

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient
    from types_boto3_dynamodbstreams import DynamoDBStreamsClient
    from types_boto3_sqs import SQSClient


class AwsClientResource(dg.ConfigurableResource):
    """What every AWS client here shares: a region and bounds on every call."""

    region_name: str
    connect_timeout_seconds: int = Field(default=5, description="Longest wait for a connection.")
    read_timeout_seconds: int = Field(
        default=30, description="Longest wait for an answer. Above 20, the longest long poll of SQS."
    )
    max_attempts: int = Field(
        default=4, description="Calls in all, the first included, with backoff and jitter."
    )

    def _client(self, service: str) -> Any:
        config = Config(
            connect_timeout=self.connect_timeout_seconds,
            read_timeout=self.read_timeout_seconds,
            retries={"total_max_attempts": self.max_attempts, "mode": "standard"},
        )
        # A session of its own: boto3's default session is not safe to create from two sensor threads.
        return boto3.session.Session(region_name=self.region_name).client(service, config=config)


class SqsResource(AwsClientResource):
    """Queues."""

    def get_client(self) -> SQSClient:
        """A client with bounded calls, safe to share between threads."""
        client: SQSClient = self._client("sqs")
        return client


class DynamoDBResource(AwsClientResource):
    """Ledger tables and their streams."""

    def get_client(self) -> DynamoDBClient:
        """A client of the tables."""
        client: DynamoDBClient = self._client("dynamodb")
        return client

    def get_streams_client(self) -> DynamoDBStreamsClient:
        """A client of the tables' streams."""
        client: DynamoDBStreamsClient = self._client("dynamodbstreams")
        return client
