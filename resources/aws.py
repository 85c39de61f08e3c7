"""SQS and DynamoDB as Dagster resources. S3 comes from dagster_aws; see assembly.py.

What belongs here: which client an asset or sensor receives. What does not: how it is built (clients.py),
queue names, table names, messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from resources import clients

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient
    from types_boto3_dynamodbstreams import DynamoDBStreamsClient
    from types_boto3_sqs import SQSClient


class AwsClientResource(dg.ConfigurableResource):
    """What every AWS client here shares: a region and bounds on every call."""

    region_name: str
    connect_timeout_seconds: int = Field(
        default=clients.CONNECT_TIMEOUT_SECONDS, description="Longest wait for a connection."
    )
    read_timeout_seconds: int = Field(
        default=clients.READ_TIMEOUT_SECONDS,
        description="Longest wait for an answer. Above 20, the longest long poll of SQS.",
    )
    max_attempts: int = Field(
        default=clients.MAX_ATTEMPTS, description="Calls in all, the first included, with backoff and jitter."
    )

    def _client(self, service: str) -> Any:
        return clients.aws_client(
            service,
            region=self.region_name,
            connect_timeout=self.connect_timeout_seconds,
            read_timeout=self.read_timeout_seconds,
            max_attempts=self.max_attempts,
        )


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
