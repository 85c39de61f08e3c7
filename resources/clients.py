"""AWS clients with bounds on every call, for Dagster resources and HTTP services alike. Knows no Dagster.

What belongs here: timeouts, retries, pool sizes. What does not: endpoints and credentials, which boto3 reads
from the `AWS_*` variables by itself, so that nothing here can tell an embedded part from AWS.
"""

from __future__ import annotations

from typing import Any

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config

CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 30  # above 20 s, the longest long poll of SQS
MAX_ATTEMPTS = 4
# The descriptions of all services are read and parsed once per process: it is most of the work of making a client.
_DESCRIPTIONS = botocore.loaders.create_loader()
_CHECKSUMS = ("request_checksum_calculation", "response_checksum_validation")


def aws_client(
    service: str,
    *,
    region: str,
    connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
    read_timeout: float = READ_TIMEOUT_SECONDS,
    max_attempts: int = MAX_ATTEMPTS,
    guarded: bool = True,
) -> Any:
    """A client of `service`, safe to share between threads. `max_attempts` counts the first call too.

    With `guarded` off, S3 objects are sent and read without boto3's own checksums: for callers that compare a sha256 of
    theirs, for whom a second checksum is only time.
    """
    checks = {} if guarded else dict.fromkeys(_CHECKSUMS, "when_required")
    config = Config(
        **checks,
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        retries={"total_max_attempts": max_attempts, "mode": "standard"},
    )
    # A session of its own: boto3's default session is not safe to create from two threads at once.
    return aws_session(region).client(service, config=config)


def aws_session(region: str) -> boto3.session.Session:
    """A session that shares what every session of the process would read anew."""
    core = botocore.session.get_session()
    core.register_component("data_loader", _DESCRIPTIONS)
    return boto3.session.Session(botocore_session=core, region_name=region)
