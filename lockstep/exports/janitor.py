"""Removing what no record knows: objects of attempts that died between their object and their commit, and dead parts.

What belongs here: the deletions of gc. What does not: finding what is wrong (inspect.py), which also checks use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from lockstep.exports import inspect
from lockstep.exports.claims import GC_LOCK
from lockstep.exports.model import Place
from lockstep.exports.sink import ObjectStore
from lockstep.exports.store import JobStore
from lockstep.kernel.postgres import Connection, Pool, transaction

_ALONE = f"SELECT pg_advisory_xact_lock({GC_LOCK})"
_KNOWN = "SELECT 1 FROM exports.file_cache WHERE s3_object_key = %s"


@dataclass(frozen=True)
class Removed:
    """What one pass removed, or would remove."""

    objects: Sequence[str]
    uploads: int = 0
    keys: int = 0


def sweep(
    source: Pool | Connection,
    jobs: JobStore,
    objects: ObjectStore,
    place: Place,
    *,
    older_than: datetime,
    dry_run: bool = False,
) -> Removed:
    """Remove orphans, parts of dead uploads, and idempotency keys past their time."""
    found = inspect.orphans(source, objects, place, older_than=older_than)
    if dry_run:
        return Removed(found)
    gone = [name for name in found if remove(source, objects, name)]
    prefix = place.base_path.strip("/") + "/"
    return Removed(gone, objects.abort_uploads(prefix, older_than=older_than), jobs.forget_keys())


def remove(source: Pool | Connection, objects: ObjectStore, name: str) -> bool:
    """Delete one object unless it has got a record since it was found; whether it is gone.

    No publication is under way meanwhile: one that began earlier is waited for, so its record is seen.
    """
    with transaction(source, what="removing an orphan") as connection:
        connection.execute(_ALONE)
        if connection.execute(_KNOWN, (name,)).fetchone() is not None:
            return False
        objects.delete(name)
    return True
