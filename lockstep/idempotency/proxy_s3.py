"""Proxy on S3: immutable folders behind one pointer object that moves by conditional put.

What belongs here: write-once objects, the pointer's content, garbage collection. What does not: the rules of moving,
which are proxy.py's. Object Lock gives no write-once keys (a PUT on a locked key succeeds and becomes the current
version), so objects are put with `If-None-Match: *`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from lockstep.idempotency import pointer
from lockstep.idempotency.proxy import (
    NOTHING_BEFORE,
    Decision,
    Refused,
    Version,
    decide,
    kept_versions,
    logical,
    previous,
    refusal,
)
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LostClaim, Transient

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_HISTORY = 200


class ObjectProxy:
    """A stable name on S3. Versions live under `<prefix>/<name>/<version>/`, the pointer is `<prefix>/<name>.json`."""

    def __init__(self, s3: S3Client, bucket: str, prefix: str, name: str) -> None:
        self._s3, self._bucket = s3, bucket
        self._root = f"{prefix.strip('/')}/{name}"

    def version(self, logical_date: date | datetime, *, run: str) -> Version:
        """The version that a run writes: its name comes from the run, so that a retry finds the same folder."""
        if not run or any(not (sign.isalnum() or sign in "-_.") for sign in run) or run.startswith("."):
            raise InvalidInput(f"{run!r} cannot name a folder.", next_step="use letters, digits, hyphens, _ and dots.")
        return Version(run, logical(logical_date))

    def folder(self, version: Version) -> str:
        """The key prefix of a version's objects."""
        return f"{self._root}/{version.name}/"

    def put_once(self, version: Version, name: str, body: bytes) -> None:
        """Write one object of a version. The same bytes again change nothing; other bytes are refused."""
        key = self.folder(version) + name
        with pointer.answered(key):
            if self._put(key, body) or self._s3.get_object(Bucket=self._bucket, Key=key)["Body"].read() == body:
                return
        raise LostClaim(
            "the object exists with other bytes; it was not changed.",
            unit=key,
            next_step="write other bytes as a version of their own, under another run.",
        )

    def _put(self, key: str, body: bytes) -> bool:
        """Whether the object was written; False means that one is there."""
        try:
            self._s3.put_object(Bucket=self._bucket, Key=key, Body=body, IfNoneMatch="*")
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == HTTPStatus.CONFLICT:
                raise Transient("another PUT is under way.", unit=key, next_step="repeat the call.") from error
            if status != HTTPStatus.PRECONDITION_FAILED:
                raise
            return False
        return True

    def current(self) -> Version | None:
        """The version that readers should read."""
        shown = self._moves(self._seen())
        return shown[0] if shown else None

    def point(self, version: Version, *, reason: str, told: bool = False) -> Decision:
        """Let the name show this version.

        Raises:
            Refused: The version is older than the one shown, or has no objects.
            LostClaim: Somebody moved the pointer at the same moment; nothing was moved.
        """
        return self._point(version, self._seen(), reason=reason, told=told)

    def _point(self, version: Version, seen: pointer.Seen | None, *, reason: str, told: bool) -> Decision:
        decision = decide(version, self._moves(seen), told=told)
        if decision is Decision.OLDER:
            raise refusal(self._root, version)
        if decision is Decision.MOVE:
            if not any(self._objects(self.folder(version))):
                raise Refused(f"{version.name} has no objects.", unit=self._root, next_step="write it first.")
            crash_point("proxy.object.before_move")
            self._move(version, reason, seen)
            crash_point("proxy.object.after_move")
        return decision

    def roll_back(self, *, reason: str) -> Version:
        """Point back to the version before the current one; once more goes one further.

        Raises:
            Refused: There is none.
            LostClaim: Somebody moved the pointer at the same moment; nothing was moved.
        """
        seen = self._seen()
        shown = [v for v in self._moves(seen) if any(self._objects(self.folder(v)))]
        before = previous(shown) if shown else None
        if before is None:
            raise Refused(NOTHING_BEFORE, unit=self._root, next_step="build a good version and point to it.")
        self._point(before, seen, reason=reason, told=True)
        return before

    def collect(self, *, keep: int, written_before: datetime) -> list[str]:
        """Delete old versions, never the current one; return their names.

        Args:
            keep: How many stay: of those shown last before the current one, and of those that roll backs go to.
            written_before: Only versions whose objects are all older go: one that is being written stays.
        """
        kept = kept_versions(self._moves(self._seen()), keep)
        folders: dict[str, list[Any]] = {}
        for item in self._objects(self._root + "/"):
            folders.setdefault(item["Key"].removeprefix(self._root + "/").split("/")[0], []).append(item)
        old = [n for n, items in folders.items() if n not in kept and _all_older(items, written_before)]
        for key in [item["Key"] for name in old for item in folders[name]]:
            self._s3.delete_object(Bucket=self._bucket, Key=key)
        return sorted(old)

    def _move(self, version: Version, reason: str, seen: pointer.Seen | None) -> None:
        entry = {"version": version.name, "logical_date": version.logical_date, "reason": reason}
        history = [entry, *(seen.content["moves"] if seen else [])][:_HISTORY]
        content = {"folder": self.folder(version), "moves": history, "serial": _serial(seen) + 1}
        pointer.move(self._s3, self._bucket, self._root + ".json", content, seen=seen)

    def _seen(self) -> pointer.Seen | None:
        return pointer.read(self._s3, self._bucket, self._root + ".json")

    def _moves(self, seen: pointer.Seen | None) -> list[Version]:
        return [Version(e["version"], e["logical_date"]) for e in (seen.content["moves"] if seen else [])]

    def _objects(self, prefix: str) -> Iterator[Any]:
        with pointer.answered(prefix):
            for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                yield from page.get("Contents", ())


def _serial(seen: pointer.Seen | None) -> int:
    # Makes every content different from all before it, so that an ETag never comes back.
    return int(seen.content["serial"]) if seen else 0


def _all_older(items: list[Any], moment: datetime) -> bool:
    return all(item["LastModified"] < moment for item in items)
