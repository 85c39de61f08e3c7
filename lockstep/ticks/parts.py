"""The bytes of parts on S3: one object for each attempt to put a part, never changed, removed by name only.

What belongs here: keys and the calls to the object store. What does not: which part is the right one (store.py). An
object that no row names is an orphan of an attempt that died; `sweep` removes it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from datetime import datetime
from typing import Any, BinaryIO

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.ids import IdSource
from lockstep.ticks.model import PARTS_PREFIX


class PartObjects:
    """Parts in one bucket. `bucket` is public: Spark reads the same objects."""

    def __init__(self, s3: Any, bucket: str, *, ids: IdSource) -> None:
        self._s3, self.bucket, self._ids = s3, bucket, ids

    def put(self, project_id: str, tick_id: str, file_seq: int, body: BinaryIO) -> str:
        """Store the bytes under a key of their own and return it. Raises `Transient`."""
        key = f"{folder(project_id, tick_id)}{file_seq:06}-{self._ids.new_id()}.parquet"
        body.seek(0)
        whole = body.getvalue() if isinstance(body, io.BytesIO) else body  # bytes are sent at once, a file in pieces
        try:
            self._s3.put_object(Bucket=self.bucket, Key=key, Body=whole, IfNoneMatch="*")
        except ClientError as error:
            # 412: our own first try arrived and its answer was lost; nobody else knows this key.
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != 412:
                raise as_aws_error(error, unit=key) from error
        except BotoCoreError as error:
            raise as_aws_error(error, unit=key) from error
        return key

    def address(self, key: str) -> str:
        """An object as Spark spells it."""
        return f"s3a://{self.bucket}/{key}"

    def remove(self, keys: Iterable[str]) -> None:
        """Delete objects; what is gone already is no error. Raises `Transient`."""
        try:
            for key in keys:
                self._s3.delete_object(Bucket=self.bucket, Key=key)
        except (ClientError, BotoCoreError) as error:
            raise as_aws_error(error) from error

    def sweep(self, project_id: str, tick_id: str, *, keep: Iterable[str], before: datetime) -> int:
        """Delete the objects of a tick that nothing names and that are older than `before`; return how many."""
        kept = set(keep)
        doomed = [
            item["Key"]
            for item in self._list(folder(project_id, tick_id))
            if item["Key"] not in kept and item["LastModified"] < before
        ]
        self.remove(doomed)
        return len(doomed)

    def _list(self, prefix: str) -> list[Any]:
        try:
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
            return [item for page in pages for item in page.get("Contents", ())]
        except (ClientError, BotoCoreError) as error:
            raise as_aws_error(error, unit=prefix) from error


def folder(project_id: str, tick_id: str) -> str:
    """The folder of a tick. Both ids were checked: neither can leave it."""
    return f"{PARTS_PREFIX}/{project_id}/{tick_id}/"
