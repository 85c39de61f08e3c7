"""The newest commits of a Delta table, read from its log by plain GETs: what the forward step asks for at every tick.

What belongs here: commit files from a known version on. What does not: the whole history, which Spark reads when a
replay needs it. One or two small objects for each tick, however long the history is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from lockstep.idempotency import delta
from lockstep.ticks.bronze import commit_info, read_object


class DeltaLog:
    """The log of one table. `s3` is a client, given by the caller."""

    def __init__(self, s3: Any, bucket: str, key: str) -> None:
        self._s3 = s3
        self._bucket = bucket
        self._prefix = f"{key}/_delta_log"

    def since(self, version: int) -> list[delta.Commit] | None:
        """The commits from this version on, oldest first; None when that version's file is no longer kept.

        Raises:
            Transient: S3 does not answer.
        """
        found: list[delta.Commit] = []
        while (file := read_object(self._s3, self._bucket, self._key(version + len(found)))) is not None:
            found.append(_commit(version + len(found), file[0]))
        return found or None

    def _key(self, version: int) -> str:
        return f"{self._prefix}/{version:020}.json"


def _commit(version: int, body: str) -> delta.Commit:
    info = commit_info(body)
    return delta.Commit(
        version=version,
        operation=str(info.get("operation", "")),
        timestamp=datetime.fromtimestamp(int(info.get("timestamp", 0)) / 1000, UTC),
        stamp=delta.read_stamp(info.get("userMetadata")),
        parameters={name: str(value) for name, value in (info.get("operationParameters") or {}).items()},
        metrics={name: str(value) for name, value in (info.get("operationMetrics") or {}).items()},
    )
