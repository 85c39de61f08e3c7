"""Ticks and their parts in PostgreSQL: every statement on them, each with the condition that makes it safe.

What belongs here: SQL on `ticks.tick`, `ticks.part` and `ticks.bronze_table`. What does not: who may call
(projects.py), objects (parts.py), Spark (bronze.py), the order of steps (worker.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import psycopg
from psycopg.types.json import Json, Jsonb

from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import LostClaim, Terminal
from lockstep.kernel.lease import Lease, LeaseStore
from lockstep.kernel.outbox import Message, Outbox
from lockstep.kernel.postgres import Connection, Pool, transaction
from lockstep.ticks import rules
from lockstep.ticks.errors import (
    InFlight,
    NoSuch,
    NotCurrent,
    NotYet,
    OverLimit,
    OverQuota,
    PartConflict,
    PartsMissing,
    TickClosed,
)
from lockstep.ticks.model import (
    Column,
    Footer,
    Limits,
    Manifest,
    Mode,
    Part,
    Project,
    TableCommit,
    Tick,
    TickState,
)
from lockstep.ticks.rules import InvalidManifest

IN_FLIGHT_SECONDS = 2.0
QUOTA_SECONDS = 60.0

# Times that are kept or compared are the database's: a replica whose clock is wrong must not date a commit, nor forget
# an upload before its time.
_NOW = "SELECT clock_timestamp()"
_COLUMNS = """t.project_id, t.tick_id, t.org_id, t.state, t.attempt, t.generation, t.created_at, t.updated_at,
       t.manifest, t.manifest_sha256, t.mode, t.dt, t.result, t.error, t.sequence, t.prev_tick_id, t.commits,
       t.outbox_ids, t.committed_at"""
_FIND = f"SELECT {_COLUMNS} FROM ticks.tick AS t WHERE t.project_id = %s AND t.tick_id = %s"  # noqa: S608
_FIND_COMMITTED = f"SELECT {_COLUMNS} FROM ticks.tick AS t WHERE t.tick_id = %s AND t.state = 'committed'"  # noqa: S608
_CHAIN = f"""
SELECT {_COLUMNS} FROM ticks.tick AS t
 WHERE t.project_id = %s AND t.state = 'committed' AND t.sequence > %s ORDER BY t.sequence LIMIT %s"""  # noqa: S608
_PARTS = """
SELECT file_seq, sha256, bytes, object_key, row_count, uncompressed_bytes, row_groups, columns, problem, received_at
  FROM ticks.part WHERE project_id = %s AND tick_id = %s ORDER BY file_seq"""
_PART = """
SELECT file_seq, sha256, bytes, object_key, row_count, uncompressed_bytes, row_groups, columns, problem, received_at
  FROM ticks.part WHERE project_id = %s AND tick_id = %s AND file_seq = %s"""

# A finalize is under way only while its own lease is: a replica that died in the middle leaves the word `finalizing`
# behind, and its fence tells that nobody stands behind it any more.
_LOCK = """
SELECT t.state, t.attempt, t.part_count, t.part_bytes, t.manifest_sha256, EXISTS (
           SELECT 1 FROM kernel.lease AS l WHERE l.lane = %(lane)s AND l.fence = t.lane_fence
              AND l.owner IS NOT NULL AND l.lease_until > clock_timestamp())
  FROM ticks.tick AS t WHERE t.project_id = %(project)s AND t.tick_id = %(tick)s
   FOR NO KEY UPDATE OF t"""
_OPEN = """
INSERT INTO ticks.tick (project_id, tick_id, org_id) VALUES (%(project)s, %(tick)s, %(org)s) ON CONFLICT DO NOTHING"""
_REOPEN = """
UPDATE ticks.tick SET state = 'uploading', lane_fence = NULL, error = NULL,
       part_count = part_count + %(count)s, part_bytes = part_bytes + %(bytes)s, updated_at = clock_timestamp()
 WHERE project_id = %(project)s AND tick_id = %(tick)s"""
_OPEN_OF_ORG = """
SELECT count(*), coalesce(sum(part_bytes), 0)::bigint FROM ticks.tick WHERE org_id = %s AND state <> 'committed'"""
_PUT_PART = """
INSERT INTO ticks.part (project_id, tick_id, file_seq, sha256, bytes, object_key, row_count, uncompressed_bytes,
       row_groups, columns, problem)
VALUES (%(project)s, %(tick)s, %(seq)s, %(sha256)s, %(bytes)s, %(key)s, %(rows)s, %(uncompressed)s, %(groups)s,
       %(columns)s, %(problem)s)
ON CONFLICT (project_id, tick_id, file_seq) DO UPDATE SET sha256 = EXCLUDED.sha256, bytes = EXCLUDED.bytes,
       object_key = EXCLUDED.object_key, row_count = EXCLUDED.row_count, row_groups = EXCLUDED.row_groups,
       uncompressed_bytes = EXCLUDED.uncompressed_bytes, columns = EXCLUDED.columns, problem = EXCLUDED.problem,
       received_at = clock_timestamp()"""
_DELETE_PART = "DELETE FROM ticks.part WHERE project_id = %s AND tick_id = %s AND file_seq = %s"
_DELETE_TICK = "DELETE FROM ticks.tick WHERE project_id = %s AND tick_id = %s"

_LOCK_PROJECT = """
SELECT sequence, head_tick_id FROM ticks.project WHERE project_id = %s AND revoked_at IS NULL FOR NO KEY UPDATE"""
_STATE_OF = "SELECT state FROM ticks.tick WHERE project_id = %s AND tick_id = %s"
_TABLES = "SELECT name, columns, version FROM ticks.bronze_table WHERE project_id = %s AND name = ANY(%s)"
_REMEMBER = """
UPDATE ticks.tick SET manifest = %(body)s, manifest_sha256 = %(sha256)s, mode = %(mode)s, dt = %(dt)s,
       updated_at = clock_timestamp()
 WHERE project_id = %(project)s AND tick_id = %(tick)s AND state <> 'committed'"""
_BEGIN = """
UPDATE ticks.tick SET state = 'finalizing', attempt = attempt + 1, lane_fence = %(fence)s, error = NULL,
       manifest = %(body)s, manifest_sha256 = %(sha256)s, mode = %(mode)s, dt = %(dt)s, updated_at = clock_timestamp()
 WHERE project_id = %(project)s AND tick_id = %(tick)s RETURNING attempt"""
_ATTEMPT = """
INSERT INTO ticks.bronze_attempt (project_id, tick_id) VALUES (%(project)s, %(tick)s) ON CONFLICT DO NOTHING"""
_BEGIN_AGAIN = """
UPDATE ticks.tick SET attempt = attempt + 1, lane_fence = %(fence)s, updated_at = clock_timestamp()
 WHERE project_id = %(project)s AND tick_id = %(tick)s AND state = 'committed' RETURNING attempt"""
_ABANDON = """
UPDATE ticks.tick SET state = %(state)s, error = %(error)s, lane_fence = NULL, updated_at = clock_timestamp()
 WHERE project_id = %(project)s AND tick_id = %(tick)s AND state = 'finalizing' AND attempt = %(attempt)s"""
_REFUSE = """
UPDATE ticks.tick SET state = 'failed', error = %(error)s, updated_at = clock_timestamp()
 WHERE project_id = %(project)s AND tick_id = %(tick)s AND state IN ('uploading', 'failed')"""
_COMMIT = """
UPDATE ticks.tick SET state = 'committed', generation = 1, result = %(result)s, sequence = %(sequence)s,
       prev_tick_id = %(prev)s, commits = %(commits)s, bronze_key = %(key)s, bronze_etag = %(etag)s,
       bronze_version = %(version)s, outbox_ids = %(outbox)s, committed_at = %(now)s, updated_at = %(now)s
 WHERE project_id = %(project)s AND tick_id = %(tick)s AND state = 'finalizing' AND attempt = %(attempt)s"""
# The messages of the first commit stay the tick's: its answer waits for them too.
_RECOMMIT = """
UPDATE ticks.tick SET generation = generation + 1, commits = %(commits)s, bronze_key = %(key)s, bronze_etag = %(etag)s,
       bronze_version = %(version)s, outbox_ids = outbox_ids || %(outbox)s::bigint[], updated_at = %(now)s
 WHERE project_id = %(project)s AND tick_id = %(tick)s AND state = 'committed' AND attempt = %(attempt)s
RETURNING generation"""
_ADVANCE = """
UPDATE ticks.project SET sequence = %(sequence)s, head_tick_id = %(tick)s
 WHERE project_id = %(project)s AND sequence = %(sequence)s - 1"""
_SAVE_TABLE = """
INSERT INTO ticks.bronze_table (project_id, name, columns, version) VALUES (%s, %s, %s, %s)
ON CONFLICT (project_id, name) DO UPDATE SET columns = EXCLUDED.columns, version = EXCLUDED.version"""

_STATUS = """
SELECT state, count(*), min(updated_at) FROM ticks.tick WHERE project_id = %s GROUP BY state"""
_EXPIRE = """
SELECT t.project_id, t.tick_id, t.org_id FROM ticks.tick AS t
 WHERE t.state <> 'committed' AND t.updated_at < %(before)s AND NOT EXISTS (
           SELECT 1 FROM kernel.lease AS l WHERE l.lane = 'ticks/' || t.org_id AND l.fence = t.lane_fence
              AND l.owner IS NOT NULL AND l.lease_until > clock_timestamp())
 ORDER BY t.updated_at LIMIT %(limit)s FOR UPDATE OF t SKIP LOCKED"""
_SETTLED = """
SELECT project_id, tick_id FROM ticks.tick
 WHERE state = 'committed' AND committed_at >= %s AND committed_at < %s ORDER BY committed_at LIMIT 1000"""
_WITH_OLD_PARTS = """
SELECT project_id, tick_id FROM ticks.tick AS t
 WHERE t.state = 'committed' AND t.committed_at < %(before)s
   AND EXISTS (SELECT 1 FROM ticks.part AS p WHERE p.project_id = t.project_id AND p.tick_id = t.tick_id)
 ORDER BY t.committed_at LIMIT %(limit)s"""
_DELETE_PARTS = "DELETE FROM ticks.part WHERE project_id = %s AND tick_id = %s"


def lane_of(org_id: str) -> str:
    """The lane in which the commits of an organisation follow each other."""
    return f"ticks/{org_id}"


class Received(NamedTuple):
    """A file as it arrived: hashed while it was read, its footer looked at."""

    file_seq: int
    sha256: str
    bytes: int
    footer: Footer | None
    problem: str | None


class Recorded(NamedTuple):
    """What became of a file: `created`, or an equal one was there. `obsolete` is an object that nothing names now."""

    part: Part
    created: bool
    obsolete: str | None


@dataclass(frozen=True)
class Target:
    """A bronze table that a tick writes: its columns once the tick is in it, and the last version known of it."""

    columns: tuple[Column, ...]
    grows: bool
    version: int


@dataclass(frozen=True)
class Begun:
    """A tick whose commit is under way. `(lease.fence, attempt)` stands in every condition that follows.

    `fresh`: bronze cannot hold rows of this tick, not even of an attempt that died or of a tick that was deleted.
    """

    manifest: Manifest
    attempt: int
    lease: Lease
    parts: Mapping[int, Part]
    targets: Mapping[str, Target]
    place: rules.Append
    replaced_rows: int
    fresh: bool


class Done(NamedTuple):
    """The tick is committed already, by this very manifest."""

    tick: Tick


class ProjectStatus(NamedTuple):
    """Ticks of a project by state, and since when the oldest of each state has not moved."""

    counts: Mapping[TickState, int]
    oldest: Mapping[TickState, datetime]


class TickStore:
    """Ticks in the state database. Every call is one transaction."""

    def __init__(
        self, source: Pool | Connection, *, limits: Limits | None = None, outbox: Outbox | None = None
    ) -> None:
        self._source, self._limits, self._outbox = source, limits or Limits(), outbox or Outbox()

    # --- reading ---------------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The time of the database, the same for every replica."""
        with transaction(self._source, what="asking for the time") as connection:
            row = connection.execute(_NOW).fetchone()
        assert row is not None  # noqa: S101  # a SELECT without FROM has its row
        moment: datetime = row[0]
        return moment

    def find(self, project_id: str, tick_id: str) -> Tick | None:
        """One tick of a project, in whatever state."""
        with transaction(self._source, what="reading a tick") as connection:
            row = connection.execute(_FIND, (project_id, tick_id)).fetchone()
        return as_tick(row) if row else None

    def committed(self, tick_id: str) -> Tick | None:
        """The committed tick of this id: ids of committed ticks are unique in the platform."""
        with transaction(self._source, what="reading a tick") as connection:
            row = connection.execute(_FIND_COMMITTED, (tick_id,)).fetchone()
        return as_tick(row) if row else None

    def chain(self, project_id: str, *, after: int = 0, limit: int = 100) -> list[Tick]:
        """Committed ticks of a project in their order, from the one after sequence number `after`."""
        with transaction(self._source, what="reading a chain of ticks") as connection:
            return [as_tick(row) for row in connection.execute(_CHAIN, (project_id, after, limit)).fetchall()]

    def parts(self, project_id: str, tick_id: str) -> dict[int, Part]:
        """The files received for a tick, by number."""
        with transaction(self._source, what="reading the parts of a tick") as connection:
            return read_parts(connection, project_id, tick_id)

    def part(self, project_id: str, tick_id: str, file_seq: int) -> Part | None:
        """One file of a tick."""
        with transaction(self._source, what="reading a part") as connection:
            row = connection.execute(_PART, (project_id, tick_id, file_seq)).fetchone()
        return _part(row) if row else None

    def status(self, project_id: str) -> ProjectStatus:
        """Where the ticks of a project stand."""
        with transaction(self._source, what="reading the status of a project") as connection:
            rows = connection.execute(_STATUS, (project_id,)).fetchall()
        return ProjectStatus({TickState(s): n for s, n, _ in rows}, {TickState(s): at for s, _, at in rows})

    # --- parts -----------------------------------------------------------------------------------------------------

    def check_room(self, project: Project, tick_id: str, file_seq: int, size: int, *, replaces: str | None) -> None:
        """Refuse a file before its bytes are stored, by what is known now; `record` decides again.

        Raises:
            TickClosed, InFlight, NotCurrent, OverLimit, OverQuota: see errors.py.
        """
        with transaction(self._source, what="checking for room") as connection:
            row = connection.execute(_LOCK, _keys(project, tick_id)).fetchone()
            held = connection.execute(_PART, (project.project_id, tick_id, file_seq)).fetchone()
            part = _part(held) if held else None
            _may_change(row, tick_id)
            _is_current(part, replaces, tick_id)
            self._check_sizes(connection, project, row, size, replaced=part)

    def record(self, project: Project, tick_id: str, received: Received, key: str, *, replaces: str | None) -> Recorded:
        """Say that a file is there; its bytes are stored under `key`. The last step of a PUT.

        Args:
            project: Whose tick it is.
            tick_id: The tick; opened by its first part.
            received: What arrived.
            key: The object that holds it.
            replaces: The sha256 that If-Match named: only that file may be replaced by another one.

        Raises:
            PartConflict: Another file is there. Nothing was changed; the new object is the caller's to remove.
        """
        unit = _unit(tick_id, received.file_seq)
        with transaction(self._source, what="recording a part") as connection:
            connection.execute(_OPEN, _keys(project, tick_id))
            row = connection.execute(_LOCK, _keys(project, tick_id)).fetchone()
            held = connection.execute(_PART, (project.project_id, tick_id, received.file_seq)).fetchone()
            part = _part(held) if held else None
            if part is not None and part.sha256 == received.sha256:
                return Recorded(part, created=False, obsolete=key)
            _may_change(row, tick_id)
            _is_current(part, replaces, tick_id)
            if part is not None and replaces is None:
                raise PartConflict("another file is stored under this number.", unit=unit, stored=part.sha256)
            self._check_sizes(connection, project, row, received.bytes, replaced=part)
            connection.execute(_PUT_PART, _part_row(project, tick_id, received, key))
            grown = {"count": 0 if part else 1, "bytes": received.bytes - (part.bytes if part else 0)}
            connection.execute(_REOPEN, _keys(project, tick_id) | grown)
            crash_point("ticks.part.before_record")
            row = connection.execute(_PART, (project.project_id, tick_id, received.file_seq)).fetchone()
        return Recorded(_part(row or ()), created=True, obsolete=part.object_key if part else None)

    def remove_part(self, project: Project, tick_id: str, file_seq: int, *, only: str | None = None) -> str:
        """Forget a file and return its object, which nothing names from now on. `only` is the sha256 of If-Match."""
        with transaction(self._source, what="removing a part") as connection:
            row = connection.execute(_LOCK, _keys(project, tick_id)).fetchone()
            held = connection.execute(_PART, (project.project_id, tick_id, file_seq)).fetchone()
            if row is None or held is None:
                raise NoSuch("there is no such part.", unit=_unit(tick_id, file_seq))
            part = _part(held)
            _may_change(row, tick_id)
            _is_current(part, only, tick_id)
            connection.execute(_DELETE_PART, (project.project_id, tick_id, file_seq))
            connection.execute(_REOPEN, _keys(project, tick_id) | {"count": -1, "bytes": -part.bytes})
        return part.object_key

    def remove_tick(self, project: Project, tick_id: str) -> list[str]:
        """Forget a tick that is not committed, and return its objects."""
        with transaction(self._source, what="removing a tick") as connection:
            row = connection.execute(_LOCK, _keys(project, tick_id)).fetchone()
            if row is None:
                raise NoSuch("there is no such tick.", unit=f"tick {tick_id}")
            _may_change(row, tick_id)
            parts = read_parts(connection, project.project_id, tick_id)
            connection.execute(_DELETE_TICK, (project.project_id, tick_id))
        return [part.object_key for part in parts.values()]

    def expire(self, *, idle_for: timedelta, now: datetime, limit: int = 100) -> list[tuple[str, str]]:
        """Forget uploads that nobody touched for so long, and return their ids: their objects may go."""
        with transaction(self._source, what="expiring uploads") as connection:
            rows = connection.execute(_EXPIRE, {"before": now - idle_for, "limit": limit}).fetchall()
            for project_id, tick_id, _ in rows:
                connection.execute(_DELETE_TICK, (project_id, tick_id))
        return [(project_id, tick_id) for project_id, tick_id, _ in rows]

    def settled(self, since: datetime, until: datetime) -> list[tuple[str, str]]:
        """Ticks committed in this time: what their parts do not name can go."""
        with transaction(self._source, what="reading committed ticks") as connection:
            return [(row[0], row[1]) for row in connection.execute(_SETTLED, (since, until)).fetchall()]

    def with_parts_before(self, before: datetime, *, limit: int = 1000) -> list[tuple[str, str]]:
        """Ticks committed before then whose parts are still kept, the oldest first."""
        with transaction(self._source, what="looking for old parts") as connection:
            rows = connection.execute(_WITH_OLD_PARTS, {"before": before, "limit": limit}).fetchall()
        return [(row[0], row[1]) for row in rows]

    def forget_parts(self, project_id: str, tick_id: str) -> None:
        """Forget the parts of a committed tick, whose objects are gone. It cannot be written again from then on."""
        with transaction(self._source, what="forgetting the parts of a tick") as connection:
            connection.execute(_DELETE_PARTS, (project_id, tick_id))

    # --- the commit ------------------------------------------------------------------------------------------------

    def begin(self, project: Project, manifest: Manifest, lease: Lease, leases: LeaseStore) -> Begun | Done:
        """Claim the tick for this attempt, if it may be committed now. Holds nothing when it raises.

        Raises:
            PartsMissing: Files are missing or differ; the manifest is remembered.
            NotYet: The tick that it follows is not committed.
            InvalidManifest: It can never be committed like this.
            LostClaim: The lane has a newer holder.
        """
        unit = f"tick {manifest.tick_id}"
        with _unless_taken(unit), transaction(self._source, what="beginning a commit") as connection:
            leases.guard(connection, lease)
            row = connection.execute(_LOCK, _keys(project, manifest.tick_id)).fetchone()
            if row is not None and row[0] == TickState.COMMITTED:
                return self._done(connection, manifest, row[4])
            parts = read_parts(connection, project.project_id, manifest.tick_id)
            difference = rules.compare_parts(manifest, parts)
            if not difference.is_complete:
                missing: PartsMissing | None = PartsMissing(difference, unit=unit)
                connection.execute(_REMEMBER, _manifest_row(manifest))
            else:
                missing = None
                begun = self._begin(connection, project, manifest, lease, parts)
        if missing:
            raise missing
        return begun

    def begin_again(self, tick: Tick, manifest: Manifest, lease: Lease, leases: LeaseStore) -> Begun:
        """Claim a committed tick for writing it again from its parts. Its place, answer and message stay."""
        with transaction(self._source, what="beginning a re-ingest") as connection:
            leases.guard(connection, lease)
            keys = {"project": tick.project_id, "tick": tick.tick_id, "fence": lease.fence}
            row = connection.execute(_BEGIN_AGAIN, keys).fetchone()
            if row is None:
                raise NoSuch("the tick is not committed.", unit=tick.unit)
            parts = read_parts(connection, tick.project_id, tick.tick_id)
            difference = rules.compare_parts(manifest, parts)
            if not difference.is_complete:
                raise Terminal(f"the stored parts are not complete: {difference}.", unit=tick.unit)
            targets = _targets(connection, manifest)
        place = rules.Append(tick.sequence or 0, tick.prev_tick_id)
        return Begun(manifest, row[0], lease, parts, targets, place, replaced_rows=manifest.rows, fresh=False)

    def commit(
        self,
        begun: Begun,
        commits: Sequence[TableCommit],
        messages: Sequence[Message],
        result: Mapping[str, Any],
        *,
        now: datetime,
        leases: LeaseStore,
    ) -> Tick:
        """Make the tick committed, its answer cached and its messages due: all of it, or none.

        Raises:
            LostClaim: A newer attempt or a newer holder of the lane exists; nothing is written.
        """
        manifest, keys = begun.manifest, _manifest_keys(begun.manifest)
        with transaction(self._source, what="committing a tick") as connection:
            leases.guard(connection, begun.lease)
            advanced = connection.execute(_ADVANCE, {**keys, "sequence": begun.place.sequence}).rowcount
            ids = self._outbox.put_all(connection, messages)
            values = _commit_row(begun, commits, ids, now) | {
                "result": Json(dict(result)),
                "sequence": begun.place.sequence,
                "prev": begun.place.prev_tick_id,
            }
            if advanced != 1 or connection.execute(_COMMIT, keys | values).rowcount != 1:
                raise _lost(begun)
            _save_tables(connection, begun, commits)
            crash_point("ticks.commit.before_transaction_end")
            row = connection.execute(_FIND, (manifest.project_id, manifest.tick_id)).fetchone()
        return as_tick(row or ())

    def commit_again(
        self,
        begun: Begun,
        commits: Sequence[TableCommit],
        messages: Sequence[Message],
        *,
        now: datetime,
        leases: LeaseStore,
    ) -> Tick:
        """Point a committed tick at the commits of its re-ingest. Raises `LostClaim`; nothing is written then."""
        keys = _manifest_keys(begun.manifest)
        with transaction(self._source, what="committing a re-ingest") as connection:
            leases.guard(connection, begun.lease)
            ids = self._outbox.put_all(connection, messages)
            if connection.execute(_RECOMMIT, keys | _commit_row(begun, commits, ids, now)).rowcount != 1:
                raise _lost(begun)
            _save_tables(connection, begun, commits)
            row = connection.execute(_FIND, (begun.manifest.project_id, begun.manifest.tick_id)).fetchone()
        return as_tick(row or ())

    def abandon(self, begun: Begun, error: InvalidManifest | None = None) -> None:
        """Give a tick back after an attempt that did not commit: open again, or failed with the reason."""
        state = TickState.FAILED if error else TickState.UPLOADING
        values = {"state": state, "error": _error_row(error) if error else None, "attempt": begun.attempt}
        with transaction(self._source, what="giving a tick back") as connection:
            connection.execute(_ABANDON, _manifest_keys(begun.manifest) | values)

    def refuse(self, project: Project, tick_id: str, error: InvalidManifest) -> None:
        """Remember why a tick was refused. It stays open: mended, it can be finalized."""
        with transaction(self._source, what="refusing a tick") as connection:
            connection.execute(_REFUSE, _keys(project, tick_id) | {"error": _error_row(error)})

    def undelivered(self, tick: Tick) -> int:
        """How many of the tick's messages have not left; they are due now, whatever their backoff was."""
        with transaction(self._source, what="looking after messages") as connection:
            return self._outbox.hasten(connection, tick.outbox_ids)

    def waiting(self, tick: Tick) -> int:
        """How many of the tick's messages have not left."""
        with transaction(self._source, what="looking after messages") as connection:
            return self._outbox.waiting(connection, tick.outbox_ids)

    def _begin(
        self, connection: Connection, project: Project, manifest: Manifest, lease: Lease, parts: Mapping[int, Part]
    ) -> Begun:
        rules.check_contents(manifest, parts, self._limits)
        targets = _targets(connection, manifest)
        place = _place(connection, manifest)
        row = connection.execute(_BEGIN, _manifest_row(manifest) | {"fence": lease.fence}).fetchone()
        attempt = int(row[0]) if row else 0
        fresh = connection.execute(_ATTEMPT, _manifest_keys(manifest)).rowcount == 1
        return Begun(manifest, attempt, lease, parts, targets, place, replaced_rows=0, fresh=fresh)

    def _done(self, connection: Connection, manifest: Manifest, committed_sha256: str) -> Done:
        if committed_sha256 != manifest.sha256:
            raise other_manifest(manifest.tick_id)
        row = connection.execute(_FIND, (manifest.project_id, manifest.tick_id)).fetchone()
        return Done(as_tick(row or ()))

    def _check_sizes(
        self, connection: Connection, project: Project, row: Sequence[Any] | None, size: int, *, replaced: Part | None
    ) -> None:
        count, held = (row[2], row[3]) if row else (0, 0)
        more = size - (replaced.bytes if replaced else 0)
        if count + (0 if replaced else 1) > self._limits.max_parts:
            raise OverLimit(f"a tick has at most {self._limits.max_parts} parts.", unit=project.project_id)
        if held + more > self._limits.max_tick_bytes:
            raise OverLimit(f"a tick has at most {self._limits.max_tick_bytes} bytes.", unit=project.project_id)
        ticks, open_bytes = connection.execute(_OPEN_OF_ORG, (project.org_id,)).fetchone() or (0, 0)
        opened = 0 if row else 1  # by the part that asks
        if ticks + opened > self._limits.max_open_ticks or open_bytes + more > self._limits.max_open_bytes:
            raise OverQuota(
                f"an organisation may have {self._limits.max_open_ticks} open ticks and "
                f"{self._limits.max_open_bytes} bytes in them.",
                unit=project.org_id,
                next_step="finalize or delete some, then put this part again.",
                retry_after=QUOTA_SECONDS,
            )


def other_manifest(tick_id: str) -> InvalidManifest:
    """The refusal of a second, different manifest for a committed tick."""
    return InvalidManifest(
        "ManifestConflict", "the tick is committed with another manifest; nothing was changed.", unit=f"tick {tick_id}"
    )


def read_parts(connection: Connection, project_id: str, tick_id: str) -> dict[int, Part]:
    """The files of a tick inside the caller's transaction."""
    rows = connection.execute(_PARTS, (project_id, tick_id)).fetchall()
    return {row[0]: _part(row) for row in rows}


def as_tick(row: Sequence[Any]) -> Tick:
    """A row of `ticks.tick`, in the order of the columns above."""
    (project, tick, org, state, attempt, generation, created, updated, manifest, digest, mode, dt, *rest) = row
    result, error, sequence, prev, commits, outbox, committed = rest
    return Tick(
        project_id=project,
        tick_id=tick,
        org_id=org,
        state=TickState(state),
        attempt=attempt,
        generation=generation,
        created_at=created,
        updated_at=updated,
        manifest=manifest,
        manifest_sha256=digest,
        mode=Mode(mode) if mode else None,
        dt=dt,
        result=result,
        error=error,
        sequence=sequence,
        prev_tick_id=prev,
        commits=tuple(TableCommit(**one) for one in commits or ()),
        outbox_ids=tuple(outbox),
        committed_at=committed,
    )


def _part(row: Sequence[Any]) -> Part:
    number, sha256, size, key, rows, uncompressed, groups, columns, problem, received = row
    footer = None if columns is None else Footer(rows, uncompressed, groups, tuple(Column(*one) for one in columns))
    return Part(number, sha256, size, key, footer, problem, received)


def _keys(project: Project, tick_id: str) -> dict[str, Any]:
    return {"project": project.project_id, "org": project.org_id, "tick": tick_id, "lane": lane_of(project.org_id)}


def _manifest_keys(manifest: Manifest) -> dict[str, Any]:
    return {"project": manifest.project_id, "tick": manifest.tick_id}


def _manifest_row(manifest: Manifest) -> dict[str, Any]:
    return _manifest_keys(manifest) | {
        "body": Jsonb(dict(manifest.body)),
        "sha256": manifest.sha256,
        "mode": manifest.mode,
        "dt": manifest.dt,
    }


def _part_row(project: Project, tick_id: str, received: Received, key: str) -> dict[str, Any]:
    footer = received.footer
    return _keys(project, tick_id) | {
        "seq": received.file_seq,
        "sha256": received.sha256,
        "bytes": received.bytes,
        "key": key,
        "rows": footer.rows if footer else None,
        "uncompressed": footer.uncompressed_bytes if footer else None,
        "groups": footer.row_groups if footer else None,
        "columns": Jsonb([list(column) for column in footer.columns]) if footer else None,
        "problem": received.problem,
    }


def _commit_row(begun: Begun, commits: Sequence[TableCommit], outbox: list[int], now: datetime) -> dict[str, Any]:
    last = commits[-1]
    return {
        "attempt": begun.attempt,
        "commits": Jsonb([commit._asdict() for commit in commits]),
        "key": last.key,
        "etag": last.etag,
        "version": last.version,
        "outbox": outbox,
        "now": now,
    }


def _error_row(error: InvalidManifest) -> Jsonb:
    return Jsonb({"error_class": error.error_class, "message": error.what, "problems": list(error.problems)})


def _may_change(row: Sequence[Any] | None, tick_id: str) -> None:
    if row is None:
        return
    state, live = TickState(row[0]), row[5]
    if state is TickState.COMMITTED:
        raise TickClosed("the tick is committed; its parts do not change any more.", unit=f"tick {tick_id}")
    if state is TickState.FINALIZING and live:
        raise InFlight("the tick is being finalized.", unit=f"tick {tick_id}", retry_after=IN_FLIGHT_SECONDS)


def _is_current(part: Part | None, wanted: str | None, tick_id: str) -> None:
    if wanted is not None and (part is None or part.sha256 != wanted):
        raise NotCurrent("If-Match names other bytes than those that are stored.", unit=f"tick {tick_id}")


def _targets(connection: Connection, manifest: Manifest) -> dict[str, Target]:
    names = [table.name for table in manifest.tables]
    known = {
        name: (tuple(Column(*one) for one in columns), version)
        for name, columns, version in connection.execute(_TABLES, (manifest.project_id, names)).fetchall()
    }
    found = {}
    for table in manifest.tables:
        columns, version = known.get(table.name, ((), -1))
        evolved = rules.evolve(columns, table, unit=f"tick {manifest.tick_id}")
        found[table.name] = Target(evolved, len(evolved) > len(columns), version)
    return found


def _place(connection: Connection, manifest: Manifest) -> rules.Append:
    row = connection.execute(_LOCK_PROJECT, (manifest.project_id,)).fetchone()
    if row is None:
        raise NoSuch("the project is revoked.", unit=manifest.project_id)
    wanted = manifest.prev_tick_id
    before = connection.execute(_STATE_OF, (manifest.project_id, wanted)).fetchone() if wanted else None
    place = rules.next_in_chain(row[0], row[1], wanted, TickState(before[0]) if before else None)
    unit = f"tick {manifest.tick_id}"
    if isinstance(place, rules.TooEarly):
        raise NotYet(f"{place.waits_for} comes before it and is not committed.", unit=unit, waits_for=place.waits_for)
    if isinstance(place, rules.Refused):
        raise InvalidManifest("BrokenChain", f"{place.reason}.", unit=unit)
    return place


def _save_tables(connection: Connection, begun: Begun, commits: Sequence[TableCommit]) -> None:
    for commit in commits:
        columns = Jsonb([list(column) for column in begun.targets[commit.table].columns])
        connection.execute(_SAVE_TABLE, (begun.manifest.project_id, commit.table, columns, commit.version))


def _lost(begun: Begun) -> LostClaim:
    return LostClaim(
        f"attempt {begun.attempt} is no longer the newest.",
        unit=f"tick {begun.manifest.tick_id}",
        next_step="finalize again: the answer is the newer attempt's.",
    )


@contextmanager
def _unless_taken(unit: str) -> Iterator[None]:
    try:
        yield
    except Terminal as error:
        if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
            raise
        raise InvalidManifest("TickIdTaken", "another project has a tick of this id.", unit=unit) from None


def _unit(tick_id: str, file_seq: int) -> str:
    return f"part {file_seq} of tick {tick_id}"
