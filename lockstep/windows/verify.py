"""Proving a lane: the chain in the ledger, and the counts against the raw manifests.

What belongs here: finding what disagrees, in words. What does not: putting it right (worker.py, operations.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from lockstep.kernel.errors import LockstepError
from lockstep.windows.model import FileType, QueueRow, RawManifest, Window, WindowStatus
from lockstep.windows.store import Applied

if TYPE_CHECKING:
    from lockstep.windows.worker import WindowWorker


def find_gaps(history: Sequence[Applied], watermark: datetime | None) -> list[str]:
    """Where a chain breaks; accepted gaps are part of it. Empty if it is whole and ends at the watermark."""
    problems = []
    for before, after in itertools.pairwise(history):
        if after.start != before.stop:
            problems.append(f"{after.stop:%Y%m%d%H%M} starts at {after.start:%H:%M}, not at {before.stop:%H:%M}")
    if history and watermark is not None and history[-1].stop != watermark:
        problems.append(f"the watermark is {watermark:%Y%m%d%H%M}, the last window {history[-1].stop:%Y%m%d%H%M}")
    return problems


def count_problems(worker: WindowWorker, vault: str, newest: int | None = None) -> list[str]:
    """Applied windows whose manifest announces other rows than the ledger holds, or whose raw files changed since."""
    history = [one for one in worker.store.history(vault) if one.kind == "incremental"]
    problems = []
    for one in history[-newest:] if newest else history:
        window = Window(vault, one.start, one.stop)
        row = QueueRow(window, WindowStatus.APPLIED, window.prefix, one.sha256)
        try:
            found = announced(worker.preparer.read_manifest(row))
        except LockstepError as error:
            problems.append(f"{window.stoptime}: {error.what}")
            continue
        held = {name: (count.get("upserts", 0), count.get("deletes", 0)) for name, count in one.counts.items()}
        if found != held:
            problems.append(f"{window.stoptime}: the manifest announces {found}, the ledger holds {held}")
    return problems


def announced(manifest: RawManifest) -> dict[str, tuple[int, int]]:
    """Rows by object: upserts and deletes, objects without rows left out."""
    found: dict[str, tuple[int, int]] = {}
    for file in manifest.files:
        upserts, deletes = found.get(file.object, (0, 0))
        found[file.object] = (upserts + file.rows, deletes) if file.type is FileType.UPSERT else (upserts, file.rows)
    return {name: rows for name, rows in found.items() if rows != (0, 0)}
