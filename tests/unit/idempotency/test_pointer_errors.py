"""What a block says when S3 does not answer: whether the same call may succeed later."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from lockstep.idempotency import pointer
from lockstep.idempotency.proxy_s3 import ObjectProxy
from lockstep.kernel.errors import LockstepError, Terminal, Transient


def refused(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")  # type: ignore[typeddict-item]


class Broken:
    """A client whose every call fails alike."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_object(self, **_: Any) -> Any:
        raise self.error

    put_object = get_paginator = get_object


GONE = EndpointConnectionError(endpoint_url="http://s3")
BUSY, FORBIDDEN, WRONG = refused("SlowDown", 503), refused("AccessDenied", 403), refused("InvalidRequest", 400)


@pytest.mark.parametrize(
    ("error", "kind"), [(GONE, Transient), (BUSY, Transient), (FORBIDDEN, Transient), (WRONG, Terminal)]
)
def test_an_error_of_s3_says_whether_to_try_again(error: Exception, kind: type[LockstepError]):
    """Guards retries: a caller branches on the type, and an error of the client library stops a unit for good."""
    s3: Any = Broken(error)
    objects = ObjectProxy(s3, "b", "p", "devices")
    version = objects.version(date(2026, 3, 1), run="r1")
    for call in (
        lambda: pointer.read(s3, "b", "k"),
        lambda: pointer.move(s3, "b", "k", {}, seen=None),
        lambda: objects.put_once(version, "part-0", b"x"),
        objects.current,
    ):
        with pytest.raises(kind) as raised:
            call()
        assert raised.value.unit


def test_a_put_that_meets_another_one_is_repeated():
    s3: Any = Broken(refused("ConditionalRequestConflict", 409))
    objects = ObjectProxy(s3, "b", "p", "devices")
    with pytest.raises(Transient, match="repeat the call"):
        objects.put_once(objects.version(date(2026, 3, 1), run="r1"), "part-0", b"x")
