"""What the window pipeline asks of a warehouse, whichever it is. No SQL, no connection.

What belongs here: the calls that store.py (PostgreSQL) and redshift_store.py answer alike. What does not: how. A
connection never passes through here: a sink opens, breaks and reopens its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from lockstep.kernel.lease import Lease
from lockstep.warehouse.dialect import Step
from lockstep.warehouse.model import Table
from lockstep.windows.store import CHAIN, Applied, Claim, Lane, Staged


class Sink(Protocol):
    """Lanes with fences, the one transaction of a window, the ledger, and the audit."""

    def lane(self, vault: str) -> Lane | None:
        """The lane, or None if the vault was never opened."""
        ...

    def open_lane(self, vault: str, epoch: int, watermark: datetime, opened_by: str) -> bool:
        """Begin a vault's chain. False if it has begun already; it is then left alone."""
        ...

    def claim(self, vault: str, owner: str, ttl: float) -> Claim | None:
        """Take the lane if it is free or its lease ran out; each claim raises the fence."""
        ...

    def renew(self, lease: Lease) -> Lease:
        """Extend a lease; `LostClaim` if a newer fence exists."""
        ...

    def release(self, lease: Lease) -> None:
        """Give the lane back. A lane that a newer fence holds is left alone."""
        ...

    def apply(self, claim: Claim, staged: Staged, schema: str) -> Applied:
        """Apply one window in one transaction, the watermark under condition of start, fence and epoch."""
        ...

    def append(self, claim: Claim, staged: Staged, schema: str) -> Applied:
        """Apply a log archive in one transaction; the watermark stays."""
        ...

    def fill(self, staged: Staged, schema: str) -> dict[str, dict[str, int]]:
        """Move a staged window into tables that nobody reads yet."""
        ...

    def swap(self, claim: Claim, staged: Staged, counts: Mapping[str, Any], names: tuple[str, str, str]) -> Applied:
        """Put new tables in place of the live ones and set epoch and watermark, in one transaction."""
        ...

    def transact(self, steps: Iterable[Step], *, unit: str) -> Any:
        """Run the steps in one transaction: all of them, or none."""
        ...

    def renew_schema(self, name: str) -> None:
        """An empty schema of this name, whatever was there."""
        ...

    def drop_schemas(self, prefix: str) -> None:
        """Drop the schemas whose names begin so."""
        ...

    def tables(self, schema: str) -> dict[str, Table]:
        """The tables of a schema as they are now, by name."""
        ...

    def count(self, schema: str, table: str) -> int:
        """The rows of a table."""
        ...

    def only_in(self, schema: str, other: str, table: Table) -> int:
        """How many rows `schema` has that `other` does not have."""
        ...

    def find(self, vault: str, load_id: str) -> Applied | None:
        """The ledger row that one attempt wrote, or None."""
        ...

    def history(
        self,
        vault: str,
        *,
        epoch: int | None = None,
        after: datetime | None = None,
        until: datetime | None = None,
        kinds: Sequence[str] = CHAIN,
    ) -> list[Applied]:
        """Applied windows in order; of one epoch, or of all."""
        ...

    def skip(self, claim: Claim, window_start: datetime, stop: datetime) -> None:
        """Move the watermark over a hole that a person accepted; the ledger keeps the hole."""
        ...

    def rewind(self, claim: Claim, watermark: datetime, opened_by: str) -> int:
        """Open a new epoch at an earlier watermark. Returns the epoch."""
        ...

    def audit(
        self,
        action: str,
        vault: str,
        *,
        actor: str,
        reason: str = "",
        stop: datetime | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Write down who did what and why."""
        ...

    def audits(self, vault: str, limit: int = 20) -> list[tuple[Any, ...]]:
        """The newest audit rows: when, who, what, stop, why."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...
