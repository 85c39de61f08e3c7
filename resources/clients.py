"""AWS clients with bounds on every call, for Dagster resources and HTTP services alike. Knows no Dagster.

What belongs here: timeouts, retries, pool sizes. What does not: endpoints and credentials, which boto3 reads
from the `AWS_*` variables by itself, so that nothing here can tell an embedded part from AWS.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import boto3
import botocore.loaders
import botocore.session
import urllib3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config

CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 30  # above 20 s, the longest long poll of SQS
MAX_ATTEMPTS = 4
# The descriptions of all services are read and parsed once per process: it is most of the work of making a client.
_DESCRIPTIONS = botocore.loaders.create_loader()
_QUICK_SOCKETS = 8
_PLACE = ("Bucket", "Key", "Body")
_HEADERS = {
    "ContentType": "Content-Type",
    "ChecksumSHA256": "x-amz-checksum-sha256",
    "IfMatch": "If-Match",
    "IfNoneMatch": "If-None-Match",
}
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


class QuickObjects:
    """An S3 client that also reads and writes whole small objects at a quarter to a half of the usual processor time.

    A window has a dozen small files, and botocore spends two to three milliseconds on each call, most of it on
    describing it. The short way signs with botocore and sends with urllib3. It is only a shorter way: whatever is not
    a plain 200 is asked again through the client, which retries and names the error. Callers compare a sha256.
    """

    def __init__(
        self, client: Any, region: str, credentials: Any, *, read_timeout: float = READ_TIMEOUT_SECONDS
    ) -> None:
        self._client = client
        self._region, self._credentials = region, credentials
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_SECONDS, read=read_timeout)
        self._pool = urllib3.PoolManager(maxsize=_QUICK_SOCKETS, timeout=timeout, retries=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get_whole(self, bucket: str, key: str) -> bytes:
        """The bytes of one object. Raises what the client raises."""
        answer = self._answer("GET", bucket, key)
        if answer is None:
            return bytes(self._client.get_object(Bucket=bucket, Key=key)["Body"].read())
        return answer.data

    def put_object(self, **call: Any) -> dict[str, Any]:
        """As the client's. A condition that the first, unanswered try made true itself is refused: the caller looks."""
        headers = {_HEADERS[name]: value for name, value in call.items() if name in _HEADERS}
        short = call.keys() <= {*_PLACE, *_HEADERS} and isinstance(call.get("Body"), bytes)
        answer = self._answer("PUT", call["Bucket"], call["Key"], headers, call["Body"]) if short else None
        if answer is None:
            return dict(self._client.put_object(**call))
        version = answer.headers.get("x-amz-version-id")
        return {"ETag": answer.headers["ETag"], **({"VersionId": version} if version else {})}

    def _answer(
        self, method: str, bucket: str, key: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> urllib3.BaseHTTPResponse | None:
        if self._credentials is None:
            return None
        address = f"{self._client.meta.endpoint_url}/{bucket}/{quote(key, safe='/~')}"
        request = AWSRequest(method, address, headers=headers or {}, data=body)
        request.context["client_config"] = self._client.meta.config  # whether the body is signed too
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
        try:
            answer = self._pool.request(method, request.url, body=body, headers=dict(request.headers))
        except (urllib3.exceptions.HTTPError, OSError):
            return None
        return answer if answer.status == HTTPStatus.OK else None


def object_reader(region: str) -> QuickObjects:
    """Reads small objects for callers who compare a sha256 of theirs."""
    return QuickObjects(aws_client("s3", region=region, guarded=False), region, aws_session(region).get_credentials())
