"""Raw files in S3: the vendor's CSVs as they came, and our own manifest as the last object of a window.

What belongs here: writing and reading objects, and whether a window is whole. What does not: what is in them
(archive.py), and the queue (queue.py). A window without our manifest does not exist for any reader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from lockstep.idempotency.keyed import KeyTaken, put_keyed
from lockstep.kernel.errors import LockstepError, LostClaim, Terminal, Transient
from lockstep.windows.model import MANIFEST_NAME, RawFile, RawManifest, Window

_ONE_CALL_BYTES = 32 * 1024 * 1024
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_LASTING = {"AccessDenied", "403", "NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch"}


class RawStore:
    """The bucket of raw windows. `client` is an S3 client, given by the caller."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def put_file(self, key: str, path: Path) -> None:
        """Write one file. Small ones go up in one call, large ones in parts; memory stays bounded either way."""
        with storage_errors(key):
            if path.stat().st_size > _ONE_CALL_BYTES:
                self._client.upload_file(str(path), self._bucket, key)
                return
            with path.open("rb") as body:
                self._client.put_object(Bucket=self._bucket, Key=key, Body=body)

    def put_manifest(self, manifest: RawManifest, *, replace: bool = False) -> bool:
        """Write the manifest, which makes the window exist. False if another producer was first: read theirs.

        With `replace`, exactly the manifest that is there now gives way; if somebody else replaces it at the same time,
        one of both is told so and tries again.
        """
        key = manifest.window.manifest_key
        try:
            with storage_errors(key):
                put_keyed(self._client, bucket=self._bucket, key=key, body=manifest.to_json(), replace=replace)
        except KeyTaken:
            return False
        except LostClaim as error:
            raise Transient("another producer replaced it at the same time.", unit=str(manifest.window)) from error
        return True

    def read_manifest(self, window: Window) -> RawManifest | None:
        """The manifest of a window; None if the window does not exist."""
        try:
            with storage_errors(window.manifest_key):
                body = self._client.get_object(Bucket=self._bucket, Key=window.manifest_key)["Body"].read()
        except _Absent:
            return None
        return RawManifest.from_json(body)

    def manifests(self, vault: str) -> Iterator[tuple[RawManifest, str]]:
        """Every window of a vault that exists, with the checksum that its queue row carries."""
        prefix = f"vault={vault}/"
        with storage_errors(prefix):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                for entry in page.get("Contents", ()):
                    if entry["Key"].endswith("/" + MANIFEST_NAME):
                        body = self._client.get_object(Bucket=self._bucket, Key=entry["Key"])["Body"].read()
                        yield RawManifest.from_json(body), hashlib.sha256(body).hexdigest()

    def is_intact(self, manifest: RawManifest) -> bool:
        """Whether every file of the manifest is there with its size."""
        sizes = self.sizes(manifest.window)
        expected: Iterable[RawFile] = (*manifest.files, *([manifest.schema] if manifest.schema else []))
        return all(sizes.get(file.key) == file.bytes for file in expected)

    def sizes(self, window: Window) -> dict[str, int]:
        """Every object under the window's prefix and its size."""
        with storage_errors(window.prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=window.prefix)
            return {one["Key"]: int(one["Size"]) for page in pages for one in page.get("Contents", ())}


class _Absent(Terminal):
    """There is no such object."""


@contextmanager
def storage_errors(unit: str) -> Iterator[None]:
    """Turn the driver's errors into ours: what may pass by itself is transient, a refusal is not."""
    try:
        yield
    except ClientError as error:
        raise _translated(error, unit) from error
    except (BotoCoreError, Boto3Error) as error:
        raise Transient(f"the service did not answer: {error}", unit=unit) from error


def _translated(error: ClientError, unit: str) -> LockstepError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code in _ABSENT:
        return _Absent("there is no such object.", unit=unit)
    if code in _LASTING:
        return Terminal(f"the service refuses: {error}", unit=unit, next_step="check bucket, table and permissions.")
    return Transient(f"the service failed: {error}", unit=unit)
