"""The sink on Redshift: the same lanes, ledger and audit as store.py, with what Redshift offers.

What belongs here: SQL on schema `windows` of a Redshift warehouse. What does not: staging (redshift_place.py), the
statements of a window (lockstep/warehouse/redshift.py). Redshift has no row locks that a heartbeat could share with a
long transaction, so the lease lives in the platform's own PostgreSQL; the fence, which protects the data, lives here
and is checked in every transaction under the control table's lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LostClaim, Transient
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.kernel.lease import Lease, LeaseStore
from lockstep.warehouse.dialect import Step, name_list, quoted
from lockstep.warehouse.evolve import read_tables
from lockstep.warehouse.model import Table
from lockstep.warehouse.redshift import CLAIM, LOCKED, RedshiftDialect, guarded, recorded
from lockstep.warehouse.session import Session
from lockstep.windows.redshift_place import sources
from lockstep.windows.store import CHAIN, Applied, Claim, Lane, Staged

CONTROL = (
    "CREATE SCHEMA IF NOT EXISTS windows",
    """CREATE TABLE IF NOT EXISTS windows.apply_control (
    vault VARCHAR(64) NOT NULL, epoch INTEGER NOT NULL, watermark TIMESTAMPTZ NOT NULL, fence BIGINT NOT NULL,
    opened_by VARCHAR(400) NOT NULL, updated_at TIMESTAMPTZ NOT NULL, PRIMARY KEY (vault))""",
    """CREATE TABLE IF NOT EXISTS windows.applied_window (
    vault VARCHAR(64) NOT NULL, epoch INTEGER NOT NULL, kind VARCHAR(20) NOT NULL, start TIMESTAMPTZ NOT NULL,
    "stop" TIMESTAMPTZ NOT NULL, load_id VARCHAR(80) NOT NULL, fence BIGINT NOT NULL, "rows" BIGINT NOT NULL,
    counts VARCHAR(65535) NOT NULL, sha256 VARCHAR(64) NOT NULL, applied_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (vault, epoch, kind, "stop"))""",
    """CREATE TABLE IF NOT EXISTS windows.audit (
    id VARCHAR(64) NOT NULL, "at" TIMESTAMPTZ NOT NULL, actor VARCHAR(400) NOT NULL, "action" VARCHAR(40) NOT NULL,
    vault VARCHAR(64) NOT NULL, "stop" TIMESTAMPTZ, reason VARCHAR(4000) NOT NULL, detail VARCHAR(65535) NOT NULL,
    PRIMARY KEY (id))""",
)
"""The control tables; keys are informational in Redshift, so every rule is a condition under the lock."""

_LANE = "SELECT epoch, watermark, fence, opened_by FROM windows.apply_control WHERE vault = %(vault)s"
_OPEN = """
INSERT INTO windows.apply_control (vault, epoch, watermark, fence, opened_by, updated_at)
VALUES (%(vault)s, %(epoch)s, %(watermark)s, 0, %(opened_by)s, %(now)s)"""
_FENCE = "UPDATE windows.apply_control SET fence = fence + 1, updated_at = %(now)s WHERE vault = %(vault)s"
_ADVANCE = """
UPDATE windows.apply_control SET watermark = %(stop)s
 WHERE vault = %(vault)s AND watermark = %(start)s AND fence = %(fence)s AND epoch = %(epoch)s"""
_REBASE = """
UPDATE windows.apply_control SET watermark = %(stop)s, epoch = %(new_epoch)s, opened_by = %(opened_by)s
 WHERE vault = %(vault)s AND fence = %(fence)s AND epoch = %(epoch)s"""
_HISTORY = """
SELECT vault, epoch, kind, start, "stop", load_id, fence, "rows", counts, sha256, applied_at
  FROM windows.applied_window WHERE vault = %(vault)s"""
_AUDIT = """
INSERT INTO windows.audit (id, "at", actor, "action", vault, "stop", reason, detail)
VALUES (%(id)s, %(now)s, %(actor)s, %(action)s, %(vault)s, %(stop)s, %(reason)s, %(detail)s)"""
_AUDITS = """
SELECT "at", actor, "action", "stop", reason FROM windows.audit WHERE vault = %(vault)s
 ORDER BY "at" DESC, id DESC LIMIT %(limit)s"""
_SCHEMAS = "SELECT nspname FROM pg_namespace WHERE left(nspname, %(length)s) = %(prefix)s ORDER BY 1"


class RedshiftStore:
    """Lanes, ledger and data of a Redshift warehouse. One thread at a time, except for `renew`."""

    def __init__(
        self,
        connect: Callable[[], Session],
        leases: LeaseStore,
        dialect: RedshiftDialect,
        *,
        bucket: str,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        self._connect = connect
        self._leases = leases
        self._dialect = dialect
        self._bucket = bucket
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds()
        self._session: Session | None = None

    def prepare(self) -> None:
        """Make the control tables if they are absent."""
        for statement in CONTROL:
            self._opened().execute(statement)

    # --- lanes -------------------------------------------------------------------------------------------------

    def lane(self, vault: str) -> Lane | None:
        """The lane, or None if the vault was never opened."""
        found = self._rows(_LANE, {"vault": vault})
        if not found:
            return None
        epoch, watermark, fence, opened_by = found[0]
        held = self._leases.holder(_lease_name(vault))
        owner, until, alive = held or (None, None, False)
        return Lane(vault, int(epoch), watermark, int(fence), owner, until, opened_by, alive)

    def open_lane(self, vault: str, epoch: int, watermark: datetime, opened_by: str) -> bool:
        """Begin a vault's chain at `watermark`. False if it has begun already; it is then left alone."""
        values = {"vault": vault, "epoch": epoch, "watermark": watermark, "opened_by": opened_by}
        absent = Step("SELECT count(*) FROM windows.apply_control WHERE vault = %(vault)s", {"vault": vault}, 0, CLAIM)
        try:
            self.transact([absent, Step(_OPEN, values | {"now": self._clock.now()}, 1, "lane")], unit=vault)
        except LostClaim:
            return False
        return True

    def claim(self, vault: str, owner: str, ttl: float) -> Claim | None:
        """Take the lane if it is free or its lease ran out; each claim raises the fence in the warehouse."""
        lease = self._leases.acquire(_lease_name(vault), owner, ttl)
        if lease is None:
            return None
        values = {"vault": vault, "now": self._clock.now()}
        # Read in the same transaction: a fence that another claim had raised in between would be held by two.
        found = self.transact([Step(_FENCE, values, 1, CLAIM), Step(_LANE, values)], unit=vault)
        epoch, watermark, fence, _ = found[0]
        return Claim(lease, int(epoch), watermark, vault, int(fence))

    def renew(self, lease: Lease) -> Lease:
        """Extend a lease; `LostClaim` if a newer owner has it."""
        return self._leases.renew(lease)

    def release(self, lease: Lease) -> None:
        """Give the lane back. A lane that somebody else holds is left alone."""
        self._leases.release(lease)

    # --- data --------------------------------------------------------------------------------------------------

    def apply(self, claim: Claim, staged: Staged, schema: str) -> Applied:
        """Apply one window in one transaction: deletes, merges, ledger row, watermark."""
        values, changes = self._values(claim, staged), staged.changes
        steps = self._dialect.window(schema, changes, sources(self._bucket, staged), values)
        crash_point("windows.apply.after_guard")
        self._opened().transact(steps, unit=str(staged.window))
        crash_point("windows.apply.after_commit")
        return _applied(values)

    def append(self, claim: Claim, staged: Staged, schema: str) -> Applied:
        """Apply a log archive: keyed rows and a ledger row in one transaction, the watermark untouched."""
        values = self._values(claim, staged)
        moves = self._dialect.moves(schema, staged.changes, sources(self._bucket, staged))
        self.transact([guarded(values), *moves, recorded(values)], unit=str(staged.window))
        return _applied(values)

    def fill(self, staged: Staged, schema: str) -> dict[str, dict[str, int]]:
        """Move a staged window into tables that nobody reads yet."""
        moves = self._dialect.moves(schema, staged.changes, sources(self._bucket, staged))
        self.transact(moves, unit=str(staged.window))
        return _counts(staged)

    def swap(self, claim: Claim, staged: Staged, counts: Mapping[str, Any], names: tuple[str, str, str]) -> Applied:
        """Put new tables in place of the live ones and set epoch and watermark, in one transaction."""
        fresh, live, old = names
        has_history = bool(self.history(claim.vault, kinds=("full", *CHAIN)))
        values = self._values(claim, staged) | {"counts": json.dumps(counts)}
        values |= {"new_epoch": claim.epoch + has_history, "opened_by": f"full load {staged.window.stoptime}"}
        moved = {**values, "epoch": values["new_epoch"]}
        present = self._rows("SELECT 1 FROM pg_namespace WHERE nspname = %(name)s", {"name": live})
        steps = [guarded(values)]
        steps += [Step(f"ALTER SCHEMA {quoted(live)} RENAME TO {quoted(old)}")] if present else []
        steps += [Step(f"ALTER SCHEMA {quoted(fresh)} RENAME TO {quoted(live)}"), recorded(moved)]
        self.transact([*steps, Step(_REBASE, values, 1, CLAIM)], unit=str(staged.window))
        crash_point("windows.swap.after_commit")
        return _applied(moved)

    def transact(self, steps: Iterable[Step], *, unit: str) -> Sequence[Any]:
        """Run the steps in one transaction, under the control table's lock; gives the rows that the last one read."""
        return self._opened().transact([*LOCKED, *steps, Step("COMMIT")], unit=unit)

    def renew_schema(self, name: str) -> None:
        """An empty schema of this name, whatever was there."""
        self._opened().execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE")
        self._opened().execute(f"CREATE SCHEMA {quoted(name)}")

    def drop_schemas(self, prefix: str) -> None:
        """Drop the schemas whose names begin so."""
        for (name,) in self._rows(_SCHEMAS, {"prefix": prefix, "length": len(prefix)}):
            self._opened().execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE")

    def tables(self, schema: str) -> dict[str, Table]:
        """The tables of a schema as they are now, by name."""
        return read_tables(self._opened(), schema)

    def count(self, schema: str, table: str) -> int:
        """The rows of a table."""
        return int(self._rows(f"SELECT count(*) FROM {quoted(schema, table)}", {})[0][0])  # noqa: S608

    def only_in(self, schema: str, other: str, table: Table) -> int:
        """How many different rows `schema` has that `other` does not have; Redshift's EXCEPT knows no ALL."""
        columns = name_list([column.name for column in table.columns])
        query = (
            f"SELECT count(*) FROM (SELECT {columns} FROM {quoted(schema, table.name)} "  # noqa: S608
            f"EXCEPT SELECT {columns} FROM {quoted(other, table.name)}) AS difference"
        )
        return int(self._rows(query, {})[0][0])

    # --- ledger and audit --------------------------------------------------------------------------------------

    def find(self, vault: str, load_id: str) -> Applied | None:
        """The ledger row that one attempt wrote, or None: what really happened when an answer was lost."""
        found = self._rows(_HISTORY + " AND load_id = %(load_id)s", {"vault": vault, "load_id": load_id})
        return _read(found[0]) if found else None

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
        values: dict[str, Any] = {"vault": vault, **{f"kind{place}": kind for place, kind in enumerate(kinds)}}
        query = _HISTORY + f" AND kind IN ({', '.join(f'%(kind{place})s' for place in range(len(kinds)))})"
        for words, value in (("epoch =", epoch), ('"stop" >', after), ('"stop" <=', until)):
            if value is not None:
                name = f"value{len(values)}"
                query += f" AND {words} %({name})s"
                values[name] = value
        return [_read(row) for row in self._rows(query + ' ORDER BY epoch, "stop"', values)]

    def skip(self, claim: Claim, window_start: datetime, stop: datetime) -> None:
        """Move the watermark over a hole that a person accepted; the ledger keeps the hole as a `gap`."""
        values = self._plain(claim) | {"kind": "gap", "start": window_start, "stop": stop, "rows": 0}
        values |= {"load_id": f"gap-{claim.fence}", "counts": "{}", "sha256": ""}
        self.transact([recorded(values), Step(_ADVANCE, values, 1, CLAIM)], unit=claim.vault)

    def rewind(self, claim: Claim, watermark: datetime, opened_by: str) -> int:
        """Open a new epoch at an earlier watermark, so that windows are applied again. Returns the epoch."""
        epoch = claim.epoch + 1
        values = self._plain(claim) | {"new_epoch": epoch, "stop": watermark, "opened_by": opened_by}
        self.transact([Step(_REBASE, values, 1, CLAIM)], unit=claim.vault)
        return epoch

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
        """Write down who did what and why. Rows are only ever added."""
        values = {"action": action, "vault": vault, "actor": actor, "reason": reason, "stop": stop}
        values |= {"id": self._ids.new_id(), "now": self._clock.now(), "detail": json.dumps(dict(detail or {}))}
        self._rows(_AUDIT, values)

    def audits(self, vault: str, limit: int = 20) -> list[tuple[Any, ...]]:
        """The newest audit rows: when, who, what, stop, why."""
        return [tuple(row) for row in self._rows(_AUDITS, {"vault": vault, "limit": limit})]

    def close(self) -> None:
        """Close the session and the leases' connection; leases run out by themselves."""
        self._leases.close()
        if self._session is not None:
            self._session.close()
            self._session = None

    # --- inside ------------------------------------------------------------------------------------------------

    def _rows(self, query: str, values: Mapping[str, Any]) -> Sequence[Any]:
        try:
            return self._opened().execute(query, values)
        except Transient:
            self._drop()
            raise

    def _opened(self) -> Session:
        if self._session is None or self._session.broken:
            self._drop()
            self._session = self._connect()
        return self._session

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _plain(self, claim: Claim) -> dict[str, Any]:
        return {"vault": claim.vault, "epoch": claim.epoch, "fence": claim.fence, "applied_at": self._clock.now()}

    def _values(self, claim: Claim, staged: Staged) -> dict[str, Any]:
        window, counts = staged.window, _counts(staged)
        return self._plain(claim) | {
            "kind": window.kind.value,
            "start": window.start,
            "stop": window.stop,
            "load_id": staged.load_id(claim.fence),
            "sha256": staged.sha256,
            "rows": sum(sum(one.values()) for one in counts.values()),
            "counts": json.dumps(counts),
        }


def _counts(staged: Staged) -> dict[str, dict[str, int]]:
    """What the manifest announces and the counts in the transaction prove; MERGE says nothing of what it changed."""
    return {
        one.table.name: {"upserts": one.upserts, "deletes": one.deletes}
        for one in sorted(staged.changes, key=lambda one: one.table.name)
        if one.upserts or one.deletes
    }


def _applied(values: Mapping[str, Any]) -> Applied:
    names = ("vault", "epoch", "kind", "start", "stop", "load_id", "fence", "rows", "sha256", "applied_at")
    return Applied(**{name: values[name] for name in names}, counts=json.loads(values["counts"]))


def _read(row: Sequence[Any]) -> Applied:
    found = Applied(*row)
    return replace(found, counts=json.loads(str(found.counts)))


def _lease_name(vault: str) -> str:
    return f"windows/{vault}"
