"""The sink's side of windows: lanes with fences, the one transaction of a window, the ledger of applied ones, audit.

What belongs here: SQL on schema `windows` of the warehouse, each write conditional on the fence. What does not: the
queue in DynamoDB (ledger.py), the order of work (worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from psycopg import Cursor, Pipeline
from psycopg.types.json import Jsonb

from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LostClaim, Terminal
from lockstep.kernel.lease import Lease
from lockstep.kernel.postgres import Connection, OwnConnection, transaction, translated
from lockstep.warehouse.dialect import DELETE, UPSERT, Change, Step, name_list, quoted
from lockstep.warehouse.evolve import read_tables
from lockstep.warehouse.model import Table
from lockstep.warehouse.postgres import PostgresDialect
from lockstep.windows.model import Window, WindowKind

_LANE = """
SELECT epoch, watermark, fence, owner, lease_until, opened_by,
       owner IS NOT NULL AND lease_until > clock_timestamp()
  FROM windows.apply_control WHERE vault = %(vault)s"""
_OPEN = """
INSERT INTO windows.apply_control (vault, epoch, watermark, opened_by)
VALUES (%(vault)s, %(epoch)s, %(watermark)s, %(opened_by)s) ON CONFLICT (vault) DO NOTHING RETURNING vault"""
# The locks are those of kernel.lease: a guarded transaction holds FOR KEY SHARE, with which a heartbeat is compatible
# and a takeover is not, so a fence cannot move under a window and a long window cannot starve its own heartbeat.
_CLAIM = """
WITH free AS (
    SELECT vault FROM windows.apply_control
     WHERE vault = %(vault)s AND (owner IS NULL OR lease_until <= clock_timestamp())
       FOR UPDATE SKIP LOCKED)
UPDATE windows.apply_control AS held
   SET owner = %(owner)s, fence = held.fence + 1, updated_at = clock_timestamp(),
       lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
  FROM free WHERE held.vault = free.vault
RETURNING held.fence, held.epoch, held.watermark, held.lease_until"""
_RENEW = """
UPDATE windows.apply_control SET lease_until = clock_timestamp() + make_interval(secs => %(ttl)s)
 WHERE vault = %(vault)s AND owner = %(owner)s AND fence = %(fence)s RETURNING lease_until"""
_RELEASE = """
UPDATE windows.apply_control SET owner = NULL, lease_until = NULL
 WHERE vault = %(vault)s AND owner = %(owner)s AND fence = %(fence)s"""
_GUARD = """
SELECT 1 FROM windows.apply_control
 WHERE vault = %(vault)s AND owner = %(owner)s AND fence = %(fence)s AND epoch = %(epoch)s
   FOR KEY SHARE"""
_RECORD = """
INSERT INTO windows.applied_window
       (vault, epoch, kind, start, stop, load_id, fence, rows, counts, sha256)
VALUES (%(vault)s, %(epoch)s, %(kind)s, %(start)s, %(stop)s, %(load_id)s, %(fence)s, %(rows)s, %(counts)s,
        %(sha256)s) RETURNING applied_at"""
_ADVANCE = """
UPDATE windows.apply_control SET watermark = %(stop)s, updated_at = clock_timestamp()
 WHERE vault = %(vault)s AND watermark = %(start)s AND fence = %(fence)s AND epoch = %(epoch)s"""
_REBASE = """
UPDATE windows.apply_control
   SET watermark = %(stop)s, epoch = %(new_epoch)s, opened_by = %(opened_by)s, updated_at = clock_timestamp()
 WHERE vault = %(vault)s AND fence = %(fence)s AND epoch = %(epoch)s"""
_COLUMNS = "vault, epoch, kind, start, stop, load_id, fence, rows, counts, sha256, applied_at"
_FIND = f"SELECT {_COLUMNS} FROM windows.applied_window WHERE vault = %s AND load_id = %s"  # noqa: S608
_HISTORY = f"""
SELECT {_COLUMNS} FROM windows.applied_window
 WHERE vault = %(vault)s AND epoch = coalesce(%(epoch)s, epoch) AND kind = ANY(%(kinds)s)
   AND stop > coalesce(%(after)s, '-infinity'::timestamptz) AND stop <= coalesce(%(until)s, 'infinity'::timestamptz)
 ORDER BY epoch, stop"""  # noqa: S608
_AUDIT = """
INSERT INTO windows.audit (actor, action, vault, stop, reason, detail)
VALUES (%(actor)s, %(action)s, %(vault)s, %(stop)s, %(reason)s, %(detail)s)"""
_AUDITS = """
SELECT at, actor, action, stop, reason FROM windows.audit WHERE vault = %s ORDER BY id DESC LIMIT %s"""

_SCHEMAS = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s) ORDER BY 1"

BEGINNING = datetime(2000, 1, 1, tzinfo=UTC)
"""Where every full archive starts; a lane there waits for its first full load."""

Answer = Cursor[Any]

CHAIN = (WindowKind.INCREMENTAL.value, "gap")


@dataclass(frozen=True)
class Lane:
    """A vault's lane as the sink has it."""

    vault: str
    epoch: int
    watermark: datetime
    fence: int
    owner: str | None
    lease_until: datetime | None
    opened_by: str
    is_held: bool

    @property
    def has_begun(self) -> bool:
        """Whether the lane stands after its full load, or began without one."""
        return self.watermark > BEGINNING


@dataclass(frozen=True)
class Claim:
    """A lane held: every write of its holder carries the fence and the epoch in its condition."""

    lease: Lease
    epoch: int
    watermark: datetime
    vault: str
    fence: int
    """The number that rises with every claim, given by the sink itself."""


@dataclass(frozen=True)
class Staged:
    """A window whose rows wait in staging under `load`, whole and counted."""

    window: Window
    load: int
    sha256: str
    changes: tuple[Change, ...]
    schema: str

    def load_id(self, fence: int) -> str:
        """The name of this attempt in the ledger."""
        return f"{self.window.stoptime}-{fence}-{self.load:x}"


@dataclass(frozen=True)
class Applied:
    """One row of the ledger: a window that the warehouse holds."""

    vault: str
    epoch: int
    kind: str
    start: datetime
    stop: datetime
    load_id: str
    fence: int
    rows: int
    counts: Mapping[str, Mapping[str, int]] = field(hash=False)
    sha256: str
    applied_at: datetime


@dataclass
class _Moves:
    """The statements of a window that were sent, and what they answer once the pipeline is synchronized."""

    changes: Sequence[Change]
    staged: Answer | None = None
    deletes: dict[str, Answer] = field(default_factory=dict)
    upserts: dict[str, Answer] = field(default_factory=dict)

    def counts(self, window: Window) -> dict[str, dict[str, int]]:
        """Rows by table, after a comparison of what was staged with the manifest; raises `Terminal` if they differ."""
        _check_counts(window, self.changes, self.staged.fetchall() if self.staged is not None else [])
        found: dict[str, dict[str, int]] = {}
        for change in self.changes:
            name = change.table.name
            found[name] = {"upserts": change.upserts, "deletes": change.deletes}
            if name in self.deletes:
                found[name]["deleted"] = self.deletes[name].rowcount
            if name in self.upserts:
                found[name]["upserted"] = self.upserts[name].rowcount
        return found


class WindowStore:
    """Lanes, ledger and data of a PostgreSQL warehouse. Reopens its connections when they break.

    Lanes and ledger are thread-safe. Windows are applied on a second connection, by one thread at a time, so that a
    heartbeat never waits for data.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._own = OwnConnection(connect)
        self._data: Connection | None = None
        self._dialect = PostgresDialect()

    def lane(self, vault: str) -> Lane | None:
        """The lane, or None if the vault was never opened."""
        found = self._run(_LANE, {"vault": vault})
        return Lane(vault, *found[0]) if found else None

    def open_lane(self, vault: str, epoch: int, watermark: datetime, opened_by: str) -> bool:
        """Begin a vault's chain at `watermark`. False if it has begun already; it is then left alone."""
        values = {"vault": vault, "epoch": epoch, "watermark": watermark, "opened_by": opened_by}
        return bool(self._run(_OPEN, values))

    def claim(self, vault: str, owner: str, ttl: float) -> Claim | None:
        """Take the lane if it is free or its lease ran out by the database's clock; each claim raises the fence."""
        found = self._run(_CLAIM, {"vault": vault, "owner": owner, "ttl": ttl})
        if not found:
            return None
        fence, epoch, watermark, until = found[0]
        return Claim(Lease(vault, owner, int(fence), ttl, until), int(epoch), watermark, vault, int(fence))

    def renew(self, lease: Lease) -> Lease:
        """Extend a lease; `LostClaim` if a newer fence exists. The kernel's `Heartbeat` calls this."""
        found = self._run(_RENEW, {"vault": lease.lane, "owner": lease.owner, "fence": lease.fence, "ttl": lease.ttl})
        if not found:
            raise _lost(lease.lane, lease.fence)
        return lease

    def release(self, lease: Lease) -> None:
        """Give the lane back. A lane that a newer fence holds is left alone."""
        self._run(_RELEASE, {"vault": lease.lane, "owner": lease.owner, "fence": lease.fence})

    def apply(self, claim: Claim, staged: Staged, schema: str) -> Applied:
        """Apply one window in one transaction: deletes, upserts, ledger row, watermark.

        Raises:
            LostClaim: The fence, the epoch or the watermark is not what the claim says; nothing was written.
            Terminal: The data cannot be applied; nothing was written.
            Transient: The outcome is unknown; `find` tells it.
        """
        values = self._values(claim, staged)
        with self._writing(f"applying {staged.window}") as (connection, pipeline):
            guard = self._guard(connection, claim)
            crash_point("windows.apply.after_guard")
            moves = self._queue_moves(connection, staged, schema)
            pipeline.sync()
            self._check_guard(guard, claim)
            counts = moves.counts(staged.window)
            values |= {"counts": Jsonb(counts), "rows": _changed(counts)}
            recorded, advanced = connection.execute(_RECORD, values), connection.execute(_ADVANCE, values)
            pipeline.sync()
            if advanced.rowcount != 1:
                raise _lost(claim.vault, claim.fence)
            values["applied_at"] = _first(recorded)
            crash_point("windows.apply.before_commit")
        crash_point("windows.apply.after_commit")
        return self._applied(values, counts)

    def append(self, claim: Claim, staged: Staged, schema: str) -> Applied:
        """Apply a log archive: keyed rows and a ledger row in one transaction, the watermark untouched."""
        values = self._values(claim, staged)
        with self._writing(f"appending {staged.window}") as (connection, pipeline):
            guard = self._guard(connection, claim)
            moves = self._queue_moves(connection, staged, schema)
            pipeline.sync()
            self._check_guard(guard, claim)
            counts = moves.counts(staged.window)
            values |= {"counts": Jsonb(counts), "rows": _changed(counts)}
            values["applied_at"] = _first(connection.execute(_RECORD, values))
        return self._applied(values, counts)

    def fill(self, staged: Staged, schema: str) -> dict[str, dict[str, int]]:
        """Move a staged window into tables that nobody reads yet."""
        with self._writing(f"filling {staged.window}") as (connection, pipeline):
            moves = self._queue_moves(connection, staged, schema)
            pipeline.sync()
            return moves.counts(staged.window)

    def swap(self, claim: Claim, staged: Staged, counts: Mapping[str, Any], names: tuple[str, str, str]) -> Applied:
        """Put the new tables in place of the old ones and set epoch and watermark, in one transaction.

        Args:
            claim: The lane; its fence and epoch are the condition.
            staged: The full load.
            counts: What `fill` moved.
            names: The schemas: new tables, live tables, where the live ones go.
        """
        fresh, live, old = names
        values = self._values(claim, staged)
        has_history = bool(self.history(claim.vault, kinds=("full", *CHAIN)))
        values |= {"new_epoch": claim.epoch + has_history, "opened_by": f"full load {staged.window.stoptime}"}
        values |= {"counts": Jsonb(dict(counts)), "rows": _changed(counts)}
        with self._writing(f"swapping {staged.window}") as (connection, _):
            self._check_guard(self._guard(connection, claim), claim)
            if connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (live,)).fetchone():
                connection.execute(f"ALTER SCHEMA {quoted(live)} RENAME TO {quoted(old)}".encode())
            connection.execute(f"ALTER SCHEMA {quoted(fresh)} RENAME TO {quoted(live)}".encode())
            recorded = connection.execute(_RECORD, values | {"epoch": values["new_epoch"]})
            connection.execute(_REBASE, values)  # the guard holds the row: fence and epoch cannot have moved
            values["applied_at"] = _first(recorded)
            crash_point("windows.swap.before_commit")
        crash_point("windows.swap.after_commit")
        return self._applied(values | {"epoch": values["new_epoch"]}, counts)

    def transact(self, steps: Iterable[Step], *, unit: str) -> None:
        """Run the steps in one transaction: all of them, or none."""
        with self._writing(f"writing for {unit}") as (connection, _):
            for step in steps:
                connection.execute(step.sql.encode(), step.parameters or None)

    def renew_schema(self, name: str) -> None:
        """An empty schema of this name, whatever was there."""
        with self._writing(f"making {name}") as (connection, _):
            connection.execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE".encode())
            connection.execute(f"CREATE SCHEMA {quoted(name)}".encode())

    def drop_schemas(self, prefix: str) -> None:
        """Drop the schemas whose names begin so: what dead workers left, or scratch tables."""
        for (name,) in self._run(_SCHEMAS, (prefix,)):
            self._run(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE", None)

    def tables(self, schema: str) -> dict[str, Table]:
        """The tables of a schema as they are now, by name."""
        return read_tables(self._opened(), schema)

    def count(self, schema: str, table: str) -> int:
        """The rows of a table."""
        return int(self._run(f"SELECT count(*) FROM {quoted(schema, table)}", None)[0][0])  # noqa: S608

    def only_in(self, schema: str, other: str, table: Table) -> int:
        """How many rows `schema` has that `other` does not have."""
        columns = name_list([column.name for column in table.columns])
        query = (
            f"SELECT count(*) FROM (SELECT {columns} FROM {quoted(schema, table.name)} "  # noqa: S608
            f"EXCEPT ALL SELECT {columns} FROM {quoted(other, table.name)}) AS difference"
        )
        return int(self._run(query, None)[0][0])

    def find(self, vault: str, load_id: str) -> Applied | None:
        """The ledger row that one attempt wrote, or None: what really happened when an answer was lost."""
        found = self._run(_FIND, (vault, load_id))
        return Applied(*found[0]) if found else None

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
        values = {"vault": vault, "epoch": epoch, "after": after, "until": until, "kinds": list(kinds)}
        return [Applied(*row) for row in self._run(_HISTORY, values)]

    def skip(self, claim: Claim, window_start: datetime, stop: datetime) -> None:
        """Move the watermark over a hole that a person accepted; the ledger keeps the hole as a `gap`."""
        values: dict[str, Any] = {
            "vault": claim.vault,
            "epoch": claim.epoch,
            "fence": claim.fence,
            "kind": "gap",
            "start": window_start,
            "stop": stop,
            "load_id": f"gap-{claim.fence}",
            "rows": 0,
            "counts": Jsonb({}),
            "sha256": "",
        }
        with self._writing("skipping") as (connection, pipeline):
            self._check_guard(self._guard(connection, claim), claim)
            connection.execute(_RECORD, values)
            advanced = connection.execute(_ADVANCE, values)
            pipeline.sync()
            if advanced.rowcount != 1:
                raise _lost(claim.vault, claim.fence)

    def rewind(self, claim: Claim, watermark: datetime, opened_by: str) -> int:
        """Open a new epoch at an earlier watermark, so that windows are applied again. Returns the epoch."""
        values = {
            "vault": claim.vault,
            "fence": claim.fence,
            "epoch": claim.epoch,
            "new_epoch": claim.epoch + 1,
            "stop": watermark,
            "opened_by": opened_by,
        }
        self._run(_REBASE, values)
        lane = self.lane(claim.vault)
        if lane is None or lane.epoch != claim.epoch + 1:
            raise _lost(claim.vault, claim.fence)
        return lane.epoch

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
        self._run(_AUDIT, values | {"detail": Jsonb(dict(detail or {}))})

    def audits(self, vault: str, limit: int = 20) -> list[tuple[Any, ...]]:
        """The newest audit rows: when, who, what, stop, why."""
        return self._run(_AUDITS, (vault, limit))

    def close(self) -> None:
        """Close both connections; the next call opens what it needs."""
        self._own.close()
        if self._data is not None:
            self._data.close()

    @contextmanager
    def _writing(self, what: str) -> Iterator[tuple[Connection, Pipeline]]:
        """One transaction on the data connection, its statements sent without waiting for each answer.

        After an error the connection is dropped: what a broken pipeline still holds must not meet the next window.
        """
        connection = self._opened()
        try:
            with translated(what), connection.pipeline() as pipeline, transaction(connection, what=what):
                yield connection, pipeline
        except BaseException:
            connection.close()
            raise

    def _opened(self) -> Connection:
        if self._data is None or self._data.closed or self._data.broken:
            self._data = self._connect()
        return self._data

    def _values(self, claim: Claim, staged: Staged) -> dict[str, Any]:
        window = staged.window
        return {
            "vault": claim.vault,
            "epoch": claim.epoch,
            "fence": claim.fence,
            "kind": window.kind.value,
            "start": window.start,
            "stop": window.stop,
            "load_id": staged.load_id(claim.fence),
            "sha256": staged.sha256,
        }

    def _guard(self, connection: Connection, claim: Claim) -> Answer:
        lease = claim.lease
        values = {"vault": lease.lane, "owner": lease.owner, "fence": lease.fence, "epoch": claim.epoch}
        return connection.execute(_GUARD, values)

    def _check_guard(self, guard: Answer, claim: Claim) -> None:
        if guard.fetchone() is None:
            raise _lost(claim.vault, claim.fence)

    def _queue_moves(self, connection: Connection, staged: Staged, schema: str) -> _Moves:
        """Send the count of what is staged, then deletes and upserts table by table, in one fixed order."""
        changes = sorted((one for one in staged.changes if one.upserts or one.deletes), key=lambda one: one.table.name)
        moves, load = _Moves(changes), {"load": staged.load}
        if not changes:
            return moves
        moves.staged = connection.execute(self._dialect.count_staged(staged.schema, changes).encode(), load)
        for change in changes:
            if change.deletes:
                step = self._dialect.delete(schema, staged.schema, change)
                moves.deletes[change.table.name] = connection.execute(step.sql.encode(), load)
        crash_point("windows.apply.after_deletes")
        for change in changes:
            if change.upserts:
                step = self._dialect.upsert(schema, staged.schema, change)
                moves.upserts[change.table.name] = connection.execute(step.sql.encode(), load)
        return moves

    def _applied(self, values: Mapping[str, Any], counts: Mapping[str, Any]) -> Applied:
        plain = {name: values[name] for name in ("vault", "epoch", "kind", "start", "stop", "load_id", "fence", "rows")}
        return Applied(**plain, counts=counts, sha256=values["sha256"], applied_at=values["applied_at"])

    def _run(self, statement: str, parameters: Any) -> list[Any]:
        return self._own.run(statement, parameters, what="ledger call")


def _changed(counts: Mapping[str, Mapping[str, int]]) -> int:
    """Rows that a window really changed; `upserts` and `deletes` beside them are what the manifest announced."""
    return sum(one.get("upserted", 0) + one.get("deleted", 0) for one in counts.values())


def _first(answer: Answer) -> Any:
    row = answer.fetchone()
    assert row is not None  # noqa: S101  # RETURNING of one inserted row
    return row[0]


def _check_counts(window: Window, changes: Sequence[Change], found: Sequence[tuple[int, Any, int]]) -> None:
    staged = {(index, kind.decode() if isinstance(kind, bytes) else kind): count for index, kind, count in found}
    for index, change in enumerate(changes):
        for kind, wanted in ((UPSERT, change.upserts), (DELETE, change.deletes)):
            present = staged.get((index, kind), 0)
            if present != wanted:
                raise Terminal(
                    f"{change.table.name}: {present} rows are staged, the manifest says {wanted}.",
                    unit=str(window),
                    next_step="retry the window; if it repeats, produce it again.",
                )


def _lost(vault: str, fence: int) -> LostClaim:
    return LostClaim(
        f"fence {fence} no longer holds the lane at this watermark.",
        unit=vault,
        next_step="stop; the newer owner continues from the data.",
    )
