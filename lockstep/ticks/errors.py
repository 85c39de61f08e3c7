"""What can go wrong with a tick, as types that the HTTP door turns into its answers.

What belongs here: the errors of the tick pipeline. What does not: their status codes (services/ingest/contract.py).
"""

from __future__ import annotations

from lockstep.kernel.errors import InvalidInput, Transient
from lockstep.ticks.rules import PartsDiffer


class InFlight(Transient):
    """The tick is being finalized right now, or its organisation's lane is taken: ask again soon."""


class NotYet(Transient):
    """The tick follows one that is not committed yet. `waits_for` names it."""

    def __init__(self, what: str, *, unit: str, waits_for: str) -> None:
        super().__init__(
            what, unit=unit, next_step=f"finalize {waits_for} first, then this one again.", retry_after=5.0
        )
        self.waits_for = waits_for


class Undelivered(Transient):
    """The tick is committed, but its messages have not left yet. The same finalize answers once they have."""


class PartConflict(InvalidInput):
    """Another file is stored under this number. `stored` is its sha256."""

    def __init__(self, what: str, *, unit: str, stored: str) -> None:
        super().__init__(what, unit=unit, next_step=f'delete it, or put it again with If-Match: "{stored}".')
        self.stored = stored


class NotCurrent(InvalidInput):
    """If-Match names other bytes than those that are stored; nothing was changed."""


class TickClosed(InvalidInput):
    """The tick is committed: its parts do not change any more."""


class PartsMissing(InvalidInput):
    """The manifest names files that are not there or have other bytes. `difference` says which."""

    def __init__(self, difference: PartsDiffer, *, unit: str) -> None:
        super().__init__(
            f"{len(difference.missing)} parts are missing and {len(difference.mismatched_sha)} have other bytes.",
            unit=unit,
            next_step="put those parts, deleting the ones that differ, then finalize again.",
        )
        self.difference = difference


class NoSuch(InvalidInput):
    """There is no such tick or part in this project."""


class OverLimit(InvalidInput):
    """The file or the tick is larger than this deployment takes."""


class OverQuota(Transient):
    """The organisation has too much open at once, or asks too fast."""
