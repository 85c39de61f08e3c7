"""A small JSON object on S3 that names immutable data and moves only by compare-and-set.

What belongs here: reading it with its ETag and replacing it under that condition. What does not: what it points to; the
blocks decide that (overwrite.py: the files of a unit, proxy.py: the version behind a name).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.errors import LostClaim, Terminal

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_LOST = frozenset({"412", "409", "PreconditionFailed", "ConditionalRequestConflict"})
_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})


class Seen(NamedTuple):
    """A pointer as it was read: its content, and the ETag that a move must still find."""

    content: dict[str, Any]
    etag: str


def read(s3: S3Client, bucket: str, key: str) -> Seen | None:
    """The pointer as it is now; None when there is none yet."""
    with answered(f"s3://{bucket}/{key}"):
        try:
            answer = s3.get_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if _code(error) in _ABSENT:
                return None
            raise
        text = answer["Body"].read()
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise Terminal("the pointer holds no JSON object.", unit=f"s3://{bucket}/{key}", next_step="restore it.")
    return Seen(content, answer["ETag"])


def move(s3: S3Client, bucket: str, key: str, content: dict[str, Any], *, seen: Seen | None) -> None:
    """Replace the pointer if it still is what was `seen`; None stands for absent.

    A refused condition is looked into before it is believed: the client repeats a PUT whose answer was lost, and the
    repetition is refused because of our own first one.

    Raises:
        LostClaim: Somebody moved it since; nothing was changed.
        Transient: S3 did not answer. Nothing is known; the same call again finds out.
    """
    body = json.dumps(content, sort_keys=True).encode()
    try:
        if seen is None:
            s3.put_object(Bucket=bucket, Key=key, Body=body, ContentType="application/json", IfNoneMatch="*")
        else:
            s3.put_object(Bucket=bucket, Key=key, Body=body, ContentType="application/json", IfMatch=seen.etag)
    except BotoCoreError as error:
        raise as_aws_error(error, unit=f"s3://{bucket}/{key}") from error
    except ClientError as error:
        if _code(error) not in _LOST | _ABSENT:  # If-Match on a key that has gone answers 404
            raise as_aws_error(error, unit=f"s3://{bucket}/{key}") from error
        now = read(s3, bucket, key)
        if now is None or now.content != content:
            raise LostClaim(
                "the pointer was moved by somebody else; nothing was changed.",
                unit=f"s3://{bucket}/{key}",
                next_step="read it again and decide anew.",
            ) from error


@contextmanager
def answered(unit: str) -> Iterator[None]:
    """Errors of S3 in the block become `Transient` or `Terminal`, so that callers know whether to try again."""
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise as_aws_error(error, unit=unit) from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
