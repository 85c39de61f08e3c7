"""The short way to small objects gives the same bytes and the same errors as the client."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from resources.clients import ObjectReader

pytestmark = pytest.mark.stack

KEYS = ["plain.csv", "vault=1/stoptime=202605071200/a b+c_upsert.csv", "ünï/100%/~tilde.csv", "empty"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_any_spelling_is_read_without_the_client(key: str, s3: Any, bucket: str, monkeypatch: Any):
    """Guards the signature: a key that is quoted otherwise than signed would be refused, and then asked for twice."""
    body = b"" if key == "empty" else key.encode() * 1000
    s3.put_object(Bucket=bucket, Key=key, Body=body)
    reader = ObjectReader("us-east-1")
    monkeypatch.setattr(reader, "_client", _NoGets(reader._client.meta))
    assert reader.get_whole(bucket, key) == body


def test_what_is_missing_is_named_as_the_client_names_it(s3: Any, bucket: str):
    with pytest.raises(ClientError, match="NoSuchKey"):
        ObjectReader("us-east-1").get_whole(bucket, "nowhere")


def test_a_server_that_hangs_up_is_asked_again_through_the_client(s3: Any, bucket: str):
    s3.put_object(Bucket=bucket, Key="k", Body=b"bytes")
    reader = ObjectReader("us-east-1")
    reader._pool.request = _hang_up  # type: ignore[assignment]
    assert reader.get_whole(bucket, "k") == b"bytes"


def _hang_up(*_: object, **__: object) -> None:
    raise ConnectionResetError("the other side hung up")


class _NoGets:
    """Knows its endpoint and nothing else."""

    def __init__(self, meta: Any) -> None:
        self.meta = meta
