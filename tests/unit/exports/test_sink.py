"""What is asked of the object store where the embedded one cannot show it: it keeps no versions."""

from __future__ import annotations

import io
from typing import Any

from botocore.response import StreamingBody

from lockstep.exports.sink import ObjectStore


class Versioned:
    """A bucket that keeps every version of one object."""

    def __init__(self, **versions: bytes) -> None:
        self._versions = versions

    def get_object(self, *, Bucket: str, Key: str, VersionId: str | None = None) -> dict[str, Any]:
        data = self._versions[VersionId or list(self._versions)[-1]]
        return {"Body": StreamingBody(io.BytesIO(data), len(data))}


def test_a_version_that_a_chunk_recorded_is_read_and_not_the_newest():
    """Guards `verify` and `download` on a versioned bucket: the bytes of a job stay its own after a later job."""
    objects = ObjectStore(Versioned(v1=b"recorded", v2=b"newer"), "bucket")
    assert b"".join(objects.read("x.csv", version_id="v1")) == b"recorded"
    assert b"".join(objects.read("x.csv")) == b"newer"
