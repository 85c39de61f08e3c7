"""The short way to small objects gives the same bytes and the same errors as the client, reading and writing."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from botocore.exceptions import ClientError

from resources.clients import QuickObjects, object_reader
from resources.exports import s3_client

pytestmark = pytest.mark.stack

KEYS = ["plain.csv", "vault=1/stoptime=202605071200/a b+c_upsert.csv", "ünï/100%/~tilde.csv", "empty"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_any_spelling_is_read_without_the_client(key: str, s3: Any, bucket: str, monkeypatch: Any):
    """Guards the signature: a key that is quoted otherwise than signed would be refused, and then asked for twice."""
    body = b"" if key == "empty" else key.encode() * 1000
    s3.put_object(Bucket=bucket, Key=key, Body=body)
    reader = object_reader("us-east-1")
    monkeypatch.setattr(reader, "_client", _NoCalls(reader._client.meta))
    assert reader.get_whole(bucket, key) == body


def test_what_is_missing_is_named_as_the_client_names_it(s3: Any, bucket: str):
    with pytest.raises(ClientError, match="NoSuchKey"):
        object_reader("us-east-1").get_whole(bucket, "nowhere")


def test_a_server_that_hangs_up_is_asked_again_through_the_client(s3: Any, bucket: str):
    s3.put_object(Bucket=bucket, Key="k", Body=b"bytes")
    reader = object_reader("us-east-1")
    reader._pool.request = _hang_up  # type: ignore[assignment]
    assert reader.get_whole(bucket, "k") == b"bytes"


def test_an_object_is_written_the_short_way_with_its_checksum_type_and_condition(s3: Any, bucket: str):
    """Guards what a signature or a header that was left out would cost: a file under no condition, or none at all."""
    objects = _writer()
    objects._client = _NoCalls(objects._client.meta)
    call = {"Bucket": bucket, "Key": "a b/ü.csv", "Body": b"1,2\n", "ContentType": "text/csv"}
    digest = base64.b64encode(hashlib.sha256(call["Body"]).digest()).decode()
    written = objects.put_object(**call, ChecksumSHA256=digest, IfNoneMatch="*")
    found = s3.get_object(Bucket=bucket, Key="a b/ü.csv")
    assert (found["ETag"], found["ContentType"], found["Body"].read()) == (written["ETag"], "text/csv", b"1,2\n")


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"IfNoneMatch": "*"}, "PreconditionFailed"),
        ({"IfMatch": '"other"'}, "PreconditionFailed"),
        ({"ChecksumSHA256": base64.b64encode(bytes(32)).decode()}, "BadDigest|InvalidDigest|XAmzContent"),
    ],
)
def test_a_refused_object_is_refused_in_the_client_s_words_and_changes_nothing(
    wrong: dict[str, str], code: str, s3: Any, bucket: str
):
    s3.put_object(Bucket=bucket, Key="k", Body=b"first")
    with pytest.raises(ClientError, match=code):
        _writer().put_object(Bucket=bucket, Key="k", Body=b"second", **wrong)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"first"


def test_a_call_that_has_no_short_way_goes_through_the_client(s3: Any, bucket: str):
    _writer().put_object(Bucket=bucket, Key="k", Body=b"x", Metadata={"a": "b"})
    assert s3.head_object(Bucket=bucket, Key="k")["Metadata"] == {"a": "b"}


def _writer() -> QuickObjects:
    objects: QuickObjects = s3_client("us-east-1")
    return objects


def _hang_up(*_: object, **__: object) -> None:
    raise ConnectionResetError("the other side hung up")


class _NoCalls:
    """Knows its endpoint and nothing else."""

    def __init__(self, meta: Any) -> None:
        self.meta = meta
