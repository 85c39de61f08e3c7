"""Objects in S3: streamed in parts, invisible until published, published only over what the fence has seen.

What belongs here: uploads, conditional publication, checking that files exist. What does not: what is in them
(dialect.py) and who may publish (claims.py). The client is given.

An upload belongs to one attempt: its parts have no name that anyone could read. Completing it puts the whole object
under its stable name in one step, on the condition that the name still holds what the publisher saw. A copy from an
attempt's object to the stable name would write every byte twice, and S3Proxy ignores conditions on copies.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.exports.model import CachedFile, Format
from lockstep.idempotency import keyed
from lockstep.kernel.crash import crash_point
from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.errors import Terminal, Transient
from lockstep.kernel.logs import get_logger

PART_BYTES = 8 * 1024 * 1024
_LIST_FROM = 4  # from so many files of one day or month on, one listing is cheaper than asking for each
_WORTH_LISTING = 30  # an entry of a listing costs a thirtieth of a question
_LOOKERS = 8
_CHANGED = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})
_DAMAGED = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
_MISSING = frozenset({"404", "NoSuchKey", "NoSuchVersion", "NotFound", "NoSuchUpload"})
_CONTENT_TYPES = {
    Format.CSV: "text/csv; charset=utf-8",
    Format.CSV_GZ: "application/gzip",
    Format.NDJSON: "application/x-ndjson",
    Format.PARQUET: "application/vnd.apache.parquet",
}

_log = get_logger(__name__)


class StoreDown(Transient):
    """The object store cannot be used right now; no chunk is to blame."""


class NameMoved(Transient):
    """The stable name changed while we published; the next attempt sees the new state."""


@dataclass(frozen=True)
class Stored:
    """What the store answered about a published object."""

    etag: str
    version_id: str | None


class ObjectStore:
    """One bucket."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def upload(self, object_key: str, form: Format) -> Upload:
        """Begin one attempt's upload. Nothing is visible before `publish`."""
        return Upload(self._client, self._bucket, object_key, _CONTENT_TYPES[form])

    def etag(self, object_key: str) -> str | None:
        """What the name holds now; None for nothing."""
        try:
            return str(self._client.head_object(Bucket=self._bucket, Key=object_key)["ETag"])
        except ClientError as error:
            if _code(error) in _MISSING:
                return None
            raise _down(error) from error
        except BotoCoreError as error:
            raise _down(error) from error

    def assert_bucket(self) -> None:
        """Raises `Terminal` if the bucket itself is missing: asked for an object, S3 answers 404 to that as well."""
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except (ClientError, BotoCoreError) as error:
            raise _down(error) from error

    def present(self, files: Sequence[CachedFile]) -> set[str]:
        """The ids of those files whose object is there with the recorded tag and size."""
        days, rest = _grouped(files, lambda one: _folder(one.object_key))
        months, rest = _grouped(rest, lambda one: _folder(_folder(one.object_key)[:-1]))
        found: set[str] = set()
        with ThreadPoolExecutor(_LOOKERS, thread_name_prefix="look") as looking:
            listings = [looking.submit(self._listed, *group) for group in (*days.items(), *months.items())]
            for listing in listings:
                there, unseen = listing.result()
                found |= there
                rest += unseen
            tags = looking.map(lambda one: self.etag(one.object_key), rest)
            found |= {one.file_id for one, tag in zip(rest, tags, strict=True) if tag == one.etag}
        return found

    def names(self, prefix: str) -> Iterable[dict[str, Any]]:
        """Every object under a prefix: Key, ETag, Size, LastModified."""
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                yield from page.get("Contents", [])
        except (ClientError, BotoCoreError) as error:
            raise _down(error) from error

    def read(self, object_key: str, *, version_id: str | None = None) -> Iterable[bytes]:
        """The bytes of an object in pieces; of that version, if given. Raises `Terminal` if it is gone."""
        pinned = {"VersionId": version_id} if version_id else {}
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=object_key, **pinned)["Body"]
            yield from body.iter_chunks(1 << 20)
        except ClientError as error:
            if _code(error) in _MISSING:
                raise Terminal(f"{object_key} is gone.", unit=object_key) from error
            raise _down(error) from error
        except BotoCoreError as error:
            raise _down(error) from error

    def put_keyed(self, object_key: str, data: bytes) -> bool:
        """Write a small object named by its unit; whether anything changed.

        The block of keyed idempotency: the same bytes again change nothing, and others take the place of exactly
        those that were read just now, so a writer that was overtaken raises `LostClaim` and replaces nothing.
        """
        return keyed.put_keyed(self._client, bucket=self._bucket, key=object_key, body=data, replace=True).written

    def delete(self, object_key: str) -> None:
        """Remove an object."""
        try:
            self._client.delete_object(Bucket=self._bucket, Key=object_key)
        except (ClientError, BotoCoreError) as error:
            raise _down(error) from error

    def abort_uploads(self, prefix: str, *, older_than: datetime) -> int:
        """Remove the parts of attempts that died."""
        try:
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            stale = [one for page in pages for one in page.get("Uploads", []) if one["Initiated"] < older_than]
            for one in stale:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"])
        except (ClientError, BotoCoreError) as error:
            raise _down(error) from error
        return len(stale)

    def presign(self, object_key: str, *, seconds: int, version_id: str | None, file_name: str) -> str:
        """An address that anyone may read for a while. A versioned bucket pins the version."""
        parameters = {
            "Bucket": self._bucket,
            "Key": object_key,
            "ResponseContentDisposition": f'attachment; filename="{file_name}"',
            **({"VersionId": version_id} if version_id else {}),
        }
        return str(self._client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=seconds))

    def _listed(self, folder: str, files: list[CachedFile]) -> tuple[set[str], list[CachedFile]]:
        """Those that a listing shows as recorded, and those that it did not come to: a crowded folder is left early."""
        listing = list(islice(self.names(folder), _WORTH_LISTING * len(files)))
        there = {one["Key"]: (one["ETag"], one["Size"]) for one in listing}
        cut = listing[-1]["Key"] if len(listing) == _WORTH_LISTING * len(files) else None
        unseen = [one for one in files if cut is not None and one.object_key > cut]
        return {one.file_id for one in files if there.get(one.object_key) == (one.etag, one.bytes)}, unseen


class Upload:
    """One attempt's bytes on their way: at most one part in memory, hashed as they pass."""

    def __init__(self, client: Any, bucket: str, object_key: str, content_type: str) -> None:
        self._client = client
        self._where = {"Bucket": bucket, "Key": object_key}
        self._type = content_type
        self._waiting: list[bytes] = []
        self._size = 0
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._hash = hashlib.sha256()
        self.object_key = object_key
        self.bytes = 0

    @property
    def sha256(self) -> str:
        """Of everything written so far."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Take bytes; send a part when one is full."""
        if not data:
            return
        self._hash.update(data)
        self._waiting.append(data)
        self._size += len(data)
        self.bytes += len(data)
        if self._size >= PART_BYTES:
            self._send_part()

    def publish(self, *, seen: str | None) -> Stored:
        """Make the object visible under its name, if the name still holds `seen` (None: nothing).

        The store compares what arrived with our hash before it shows anything. Raises `NameMoved` if the name holds
        something else; nothing is changed then.
        """
        condition = {"IfMatch": seen} if seen else {"IfNoneMatch": "*"}
        try:
            return self._complete(condition) if self._upload_id else self._put(condition)
        except ClientError as error:
            if _code(error) in _CHANGED | _MISSING:
                raise NameMoved(f"{self.object_key} holds something else now.", unit=self.object_key) from error
            raise _down(error) from error
        except BotoCoreError as error:
            raise _down(error) from error

    def abort(self) -> None:
        """Forget the parts. What cannot be removed now is removed by gc."""
        self._waiting.clear()
        if self._upload_id is None:
            return
        try:
            self._client.abort_multipart_upload(**self._where, UploadId=self._upload_id)
        except (ClientError, BotoCoreError) as error:
            _log.warning("upload not aborted, gc will", object=self.object_key, error=str(error))
        self._upload_id = None

    def _send_part(self) -> None:
        try:
            if self._upload_id is None:
                begun = self._client.create_multipart_upload(**self._where, ContentType=self._type)
                self._upload_id = begun["UploadId"]
                crash_point("exports.upload.begun")
            number, body = len(self._parts) + 1, b"".join(self._waiting)
            self._waiting.clear()
            self._size = 0
            # The whole file's sha256 is not known yet; this is the check that every store does for a part.
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            sent = self._client.upload_part(
                **self._where, UploadId=self._upload_id, PartNumber=number, Body=body, ContentMD5=digest
            )
        except (ClientError, BotoCoreError) as error:
            raise _down(error) from error
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})

    def _put(self, condition: dict[str, str]) -> Stored:
        body, digest = b"".join(self._waiting), base64.b64encode(self._hash.digest()).decode()
        return _stored(
            self._client.put_object(
                **self._where, Body=body, ContentType=self._type, ChecksumSHA256=digest, **condition
            )
        )

    def _complete(self, condition: dict[str, str]) -> Stored:
        if self._waiting:
            self._send_part()
        answer = self._client.complete_multipart_upload(
            **self._where, UploadId=self._upload_id, MultipartUpload={"Parts": self._parts}, **condition
        )
        self._upload_id = None  # nothing is left to abort
        return _stored(answer)


def _stored(answer: dict[str, Any]) -> Stored:
    return Stored(str(answer["ETag"]), answer.get("VersionId"))


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _down(error: Exception) -> Transient | Terminal:
    if isinstance(error, ClientError) and _code(error) in _DAMAGED:
        return Transient("the bytes arrived damaged and were refused.", next_step="they are sent again.")
    known = as_aws_error(error)
    return (
        StoreDown(known.what, next_step="the store is asked again after a pause.")
        if isinstance(known, Transient)
        else known
    )


def _grouped(
    files: Iterable[CachedFile], folder: Callable[[CachedFile], str]
) -> tuple[dict[str, list[CachedFile]], list[CachedFile]]:
    """Files by folder where a listing is worth it, and the others."""
    groups: dict[str, list[CachedFile]] = {}
    for one in files:
        groups.setdefault(folder(one), []).append(one)
    worth = {name: group for name, group in groups.items() if len(group) >= _LIST_FROM}
    return worth, [one for name, group in groups.items() if name not in worth for one in group]


def _folder(object_key: str) -> str:
    return object_key.rpartition("/")[0] + "/"
