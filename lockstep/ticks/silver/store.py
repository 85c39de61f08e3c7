"""The silver ledger in PostgreSQL: one watermark per project, and what each applied tick left. Fenced by the lease.

What belongs here: statements on schema `silver`. What does not: order (rules.py), DynamoDB (dispatch.py), Spark
(tables.py). Every write of a worker proves its lease in the same transaction, so a stale one changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.lease import Lease, LeaseStore
from lockstep.kernel.logs import redact_text
from lockstep.kernel.postgres import Connection, Pool, transaction
from lockstep.ticks.model import Mode, Tick
from lockstep.ticks.silver import rules
from lockstep.ticks.silver.model import Applied, Lane, TableState
from lockstep.ticks.store import TickStore

MOST_PENDING = 100
_LONGEST_ERROR = 2000

_LANE = """
SELECT p.org_id, p.project_id, coalesce(l.watermark, 0), coalesce(l.generation, 1), l.parked
  FROM ticks.project AS p LEFT JOIN silver.lane AS l ON l.project_id = p.project_id
 WHERE p.project_id = %(project)s"""
# Two counters for each project and one look at its next tick: the cost grows with projects, never with ticks.
_BEHIND = """
SELECT p.org_id, p.project_id, coalesce(l.watermark, 0), coalesce(l.generation, 1), l.parked
  FROM ticks.project AS p
  LEFT JOIN silver.lane AS l ON l.project_id = p.project_id
  LEFT JOIN ticks.tick AS t ON t.project_id = p.project_id AND t.sequence = coalesce(l.watermark, 0) + 1
 WHERE p.sequence > coalesce(l.watermark, 0)"""
_ALL_BEHIND = _BEHIND + " ORDER BY t.committed_at NULLS FIRST, p.project_id LIMIT %(limit)s"
_FORGOTTEN = (
    _BEHIND
    + """
   AND l.parked IS NULL AND t.committed_at <= %(committed)s
   AND (l.hinted_at IS NULL OR l.hinted_at NOT BETWEEN %(hinted)s AND %(ahead)s)
 ORDER BY l.hinted_at NULLS FIRST, t.committed_at LIMIT %(limit)s"""
)
_OPEN = """
INSERT INTO silver.lane (project_id, org_id) VALUES (%(project)s, %(org)s) ON CONFLICT (project_id) DO NOTHING"""
_BEFORE = """
SELECT name, sequence, epoch, key, version, rows FROM silver.table_state
 WHERE project_id = %(project)s AND name = %(table)s AND sequence < %(sequence)s ORDER BY sequence DESC LIMIT 1"""
_LATER = """
SELECT count(*) FROM silver.table_state
 WHERE project_id = %(project)s AND name = %(table)s AND sequence >= %(sequence)s"""
# Times of the ledger are the database's: by the clock of a worker that is wrong, ticks would stand in another order.
# The watermark itself is the fence against a replay: it moved if somebody rewound the lane meanwhile.
_ADVANCE = """
UPDATE silver.lane
   SET watermark = %(sequence)s, moved_at = clock_timestamp(), parked = NULL, parked_at = NULL, error = NULL
 WHERE project_id = %(project)s AND watermark = %(sequence)s - 1 AND generation = %(generation)s"""
_RECORD = """
INSERT INTO silver.applied (project_id, sequence, tick_id, generation, rows, tables, fence, applied_at)
VALUES (%(project)s, %(sequence)s, %(tick)s, %(generation)s, %(rows)s, %(tables)s::jsonb, %(fence)s, clock_timestamp())
ON CONFLICT (project_id, sequence) DO UPDATE
   SET generation = excluded.generation, rows = excluded.rows, tables = excluded.tables, fence = excluded.fence,
       applied_at = excluded.applied_at"""
_TABLE = """
INSERT INTO silver.table_state (project_id, name, sequence, epoch, key, version, rows)
VALUES (%(project)s, %(table)s, %(sequence)s, %(epoch)s, %(key)s, %(version)s, %(rows)s)
ON CONFLICT (project_id, name, sequence) DO UPDATE
   SET epoch = excluded.epoch, key = excluded.key, version = excluded.version, rows = excluded.rows"""
_UNDONE = """
DELETE FROM silver.table_state
 WHERE project_id = %(project)s AND name = %(table)s AND sequence > %(sequence)s"""
_FAIL = """
UPDATE silver.lane
   SET error = %(error)s, parked = CASE WHEN %(parks)s THEN %(tick)s END,
       parked_at = CASE WHEN %(parks)s THEN clock_timestamp() END
 WHERE project_id = %(project)s AND watermark = %(sequence)s - 1 AND generation = %(generation)s"""
_REWIND = """
UPDATE silver.lane
   SET watermark = least(watermark, %(sequence)s - 1), generation = generation + 1, parked = NULL, parked_at = NULL,
       error = NULL, moved_at = clock_timestamp()
 WHERE project_id = %(project)s AND generation = %(generation)s
RETURNING org_id, project_id, watermark, generation, parked"""
# Nothing but the tick that stopped the lane can be skipped; the new generation gives it attempts of its own.
_UNPARK = """
UPDATE silver.lane
   SET generation = generation + 1, parked = NULL, parked_at = NULL, error = NULL, moved_at = clock_timestamp()
 WHERE project_id = %(project)s AND generation = %(generation)s AND parked = %(tick)s
RETURNING org_id, project_id, watermark, generation, parked"""
_SKIP = """
INSERT INTO silver.skip (tick_id, project_id, sequence, reason, skipped_by, skipped_at)
VALUES (%(tick)s, %(project)s, %(sequence)s, %(reason)s, %(actor)s, clock_timestamp())"""
_SKIPPED = """
SELECT project_id, tick_id, sequence, reason, skipped_by, skipped_at FROM silver.skip
 ORDER BY skipped_at DESC, tick_id LIMIT %(limit)s"""
_IS_SKIPPED = "SELECT count(*) FROM silver.skip WHERE tick_id = %(tick)s"
_NO_LONGER_SKIPPED = "DELETE FROM silver.skip WHERE tick_id = ANY(%(ticks)s)"
_LEFT_NOTHING = """
DELETE FROM silver.table_state
 WHERE project_id = %(project)s AND name = ANY(%(names)s) AND sequence >= %(sequence)s"""
_HINT = """
INSERT INTO silver.lane AS l (project_id, org_id, hinted_at) VALUES (%(project)s, %(org)s, %(now)s)
ON CONFLICT (project_id) DO UPDATE SET hinted_at = excluded.hinted_at
 WHERE l.hinted_at IS NULL OR l.hinted_at NOT BETWEEN %(hinted)s AND %(ahead)s"""
_BACKLOG = """
SELECT p.org_id, p.project_id, coalesce(l.watermark, 0), coalesce(l.generation, 1), l.parked,
       p.sequence - coalesce(l.watermark, 0), t.tick_id, t.committed_at, l.error
  FROM ticks.project AS p
  LEFT JOIN silver.lane AS l ON l.project_id = p.project_id
  LEFT JOIN ticks.tick AS t ON t.project_id = p.project_id AND t.sequence = coalesce(l.watermark, 0) + 1
 WHERE p.sequence > coalesce(l.watermark, 0)
 ORDER BY t.committed_at NULLS FIRST, p.project_id LIMIT %(limit)s"""
_OLD_TABLES = """
SELECT DISTINCT t.project_id, c ->> 'table' FROM ticks.tick AS t, jsonb_array_elements(t.commits) AS c
 WHERE t.state = 'committed' AND t.dt < %(before)s ORDER BY 1, 2"""
_TABLES_OF_TICKS = """
SELECT DISTINCT t.project_id, c ->> 'table' FROM ticks.tick AS t, jsonb_array_elements(t.commits) AS c
 WHERE t.state = 'committed' AND (%(project)s::text IS NULL OR t.project_id = %(project)s) ORDER BY 1, 2"""
_FIRST_COMMITTED = """
SELECT DISTINCT ON (project_id) tick_id FROM ticks.tick
 WHERE state = 'committed' AND (%(start)s::timestamptz IS NULL OR committed_at >= %(start)s)
   AND (%(end)s::timestamptz IS NULL OR committed_at < %(end)s)
   AND (%(project)s::text IS NULL OR project_id = %(project)s)
 ORDER BY project_id, sequence"""
_AUDIT = """
INSERT INTO ticks.audit (actor, action, subject, details)
VALUES (%(actor)s, %(action)s, %(subject)s, %(details)s::jsonb)"""
_APPLIED = """
SELECT t.org_id, t.project_id, t.tick_id, s.sequence, s.generation, t.mode, t.dt, s.rows, s.fence, s.applied_at,
       t.committed_at, s.tables, k.reason
  FROM silver.applied AS s
  JOIN silver.lane AS l ON l.project_id = s.project_id AND s.sequence <= l.watermark
  JOIN ticks.tick AS t ON t.project_id = s.project_id AND t.tick_id = s.tick_id
  LEFT JOIN silver.skip AS k ON k.tick_id = s.tick_id"""
_OF_TICKS = _APPLIED + " WHERE s.tick_id = ANY(%(ticks)s)"
_SINCE = _APPLIED + " WHERE s.applied_at > %(since)s ORDER BY s.applied_at, s.tick_id LIMIT %(limit)s"
_NEWEST = _APPLIED + " WHERE s.applied_at > %(since)s ORDER BY s.applied_at DESC, s.tick_id DESC LIMIT %(limit)s"
_OF_DAY = (
    _APPLIED
    + " WHERE t.committed_at >= %(start)s AND t.committed_at < %(end)s AND k.tick_id IS NULL"
    + " ORDER BY s.applied_at, s.tick_id"
)


class Actor(NamedTuple):
    """Who does it and why; both are kept."""

    name: str
    reason: str


class Backlog(NamedTuple):
    """A lane that is behind: how many ticks wait, which is next, since when, and what stopped it."""

    lane: Lane
    waiting: int
    next_tick: str | None
    oldest: datetime | None
    error: str | None


class Skipped(NamedTuple):
    """A tick that silver goes on without: its rows are missing, and somebody wanted it so."""

    project_id: str
    tick_id: str
    sequence: int
    reason: str
    by: str
    at: datetime


class SilverStore:
    """The ledger. `source` and `leases` are on the database that holds schema `ticks`."""

    def __init__(self, source: Pool, leases: LeaseStore) -> None:
        self._source = source
        self.leases = leases
        self.ticks = TickStore(source)

    def lane(self, project_id: str) -> Lane:
        """The project's lane, at its beginning if nothing was applied yet. Raises `InvalidInput` if nobody knows it."""
        with transaction(self._source, what="reading a silver lane") as connection:
            row = connection.execute(_LANE, {"project": project_id}).fetchone()
        if row is None:
            raise InvalidInput("there is no such project.", unit=project_id, next_step="see `lockstep ticks status`.")
        return Lane(*row)

    def behind(self, *, limit: int = 1000) -> list[Lane]:
        """Lanes with committed ticks that are not in silver, the one that waits longest first; parked ones included."""
        with transaction(self._source, what="looking for silver that is behind") as connection:
            rows = connection.execute(_ALL_BEHIND, {"limit": limit}).fetchall()
        return [Lane(*row) for row in rows]

    def backlog(self, *, limit: int = 1000) -> list[Backlog]:
        """The same lanes, with what people want to know about them."""
        with transaction(self._source, what="reading the backlog of silver") as connection:
            rows = connection.execute(_BACKLOG, {"limit": limit}).fetchall()
        return [Backlog(Lane(*row[:5]), *row[5:]) for row in rows]

    def bronze_tables_before(self, dt: str) -> list[tuple[str, str]]:
        """Bronze tables, by project and name, that were given ticks of days before `dt`."""
        with transaction(self._source, what="looking for old ticks") as connection:
            return [(row[0], row[1]) for row in connection.execute(_OLD_TABLES, {"before": dt}).fetchall()]

    def tables_of_ticks(self, project_id: str | None = None) -> list[tuple[str, str]]:
        """Tables, by project and name, that were ever given a tick; those of one project if it is named."""
        with transaction(self._source, what="looking for tables") as connection:
            rows = connection.execute(_TABLES_OF_TICKS, {"project": project_id}).fetchall()
        return [(row[0], row[1]) for row in rows]

    def forgotten(self, *, committed: datetime, now: datetime, again_after: timedelta, limit: int) -> list[Lane]:
        """Lanes whose next tick was committed before then, and that nobody was told about for `again_after`."""
        parameters = {"committed": committed, "limit": limit} | _around(now, again_after)
        with transaction(self._source, what="looking for forgotten ticks") as connection:
            rows = connection.execute(_FORGOTTEN, parameters).fetchall()
        return [Lane(*row) for row in rows]

    def plan(self, lane: Lane, *, limit: int = MOST_PENDING) -> rules.Plan:
        """What of the lane may be applied now, in order."""
        return rules.plan(lane, self.ticks.chain(lane.project_id, after=lane.watermark, limit=limit))

    def before(self, tick: Tick, table: str) -> TableState | None:
        """The table as it was before this tick; None if silver had none."""
        with transaction(self._source, what="reading a silver table's state") as connection:
            row = connection.execute(_BEFORE, _of_table(tick, table)).fetchone()
        return None if row is None else TableState(row[0], row[1], row[2], tuple(row[3]), row[4], row[5])

    def was_applied(self, tick: Tick, table: str) -> bool:
        """Whether the table may hold this tick or a later one of an earlier generation: then it must go back first."""
        with transaction(self._source, what="reading a silver table's state") as connection:
            row = connection.execute(_LATER, _of_table(tick, table)).fetchone()
        return bool(row and row[0])

    def may_hint(self, lane: Lane, *, now: datetime, again_after: timedelta) -> bool:
        """Whether a sweep may enqueue ticks of the lane now: the first sweeper in a while may, the others may not."""
        parameters = {"project": lane.project_id, "org": lane.org_id, "now": now} | _around(now, again_after)
        with transaction(self._source, what="hinting at a silver lane") as connection:
            return connection.execute(_HINT, parameters).rowcount == 1

    def open(self, lane: Lane) -> None:
        """Make the row of a lane that has none yet."""
        with transaction(self._source, what="opening a silver lane") as connection:
            connection.execute(_OPEN, {"project": lane.project_id, "org": lane.org_id})

    def complete(self, lease: Lease, lane: Lane, tick: Tick, states: Sequence[TableState]) -> Lane:
        """The tick is in silver: move the watermark over it.

        Raises:
            LostClaim: A newer worker has the lane, or a replay has begun meanwhile. Nothing was changed.
        """
        base = _of_tick(lane, tick)
        with transaction(self._source, what="completing a tick") as connection:
            self._move_over(connection, lease, base, {one.table: one.rows for one in states})
            for one in states:
                connection.execute(_TABLE, base | one._asdict() | {"key": list(one.key)})
                connection.execute(_UNDONE, base | {"table": one.table})
        return lane._replace(watermark=int(tick.sequence or 0), parked=None)

    def pass_over(self, lease: Lease, lane: Lane, tick: Tick, tables: Sequence[str]) -> Lane:
        """A skipped tick leaves nothing in its tables: move the watermark over it. Raises `LostClaim` as `complete`."""
        base = _of_tick(lane, tick)
        with transaction(self._source, what="passing over a tick") as connection:
            self._move_over(connection, lease, base, {})
            connection.execute(_LEFT_NOTHING, base | {"names": list(tables)})
        return lane._replace(watermark=int(tick.sequence or 0), parked=None)

    def _move_over(self, connection: Connection, lease: Lease, base: dict[str, Any], rows: dict[str, int]) -> None:
        self.leases.guard(connection, lease)
        if connection.execute(_ADVANCE, base).rowcount != 1:
            raise rules.overtaken(base["tick"])
        recorded = {"rows": sum(rows.values()), "tables": json.dumps(rows), "fence": lease.fence}
        connection.execute(_RECORD, base | recorded)

    def fail(self, lease: Lease, lane: Lane, tick: Tick, error: str, *, parks: bool) -> None:
        """Keep the words of a failed attempt; `parks` stops the lane before the tick. Raises `LostClaim`."""
        text = redact_text(error.replace("\x00", ""))[:_LONGEST_ERROR]
        with transaction(self._source, what="recording a failed tick") as connection:
            self.leases.guard(connection, lease)
            parameters = _of_tick(lane, tick) | {"error": text, "parks": parks}
            if connection.execute(_FAIL, parameters).rowcount != 1:
                raise rules.overtaken(tick.tick_id)

    def rewind(self, lane: Lane, tick: Tick, actor: Actor, *, no_longer_skipped: Sequence[str] = ()) -> Lane:
        """Let everything from this tick on be applied again, in a new generation. The deed and its audit are one.

        Raises:
            LostClaim: Somebody else rewound the lane at the same time.
        """
        parameters = _of_tick(lane, tick)
        with transaction(self._source, what="rewinding a silver lane") as connection:
            connection.execute(_OPEN, parameters)
            row = connection.execute(_REWIND, parameters).fetchone()
            if row is None:
                raise rules.overtaken(tick.tick_id)
            connection.execute(_NO_LONGER_SKIPPED, {"ticks": list(no_longer_skipped)})
            details = {"project": lane.project_id, "generation": row[3], "from": tick.sequence}
            _audit(connection, actor, "silver-replay", tick.tick_id, details)
        return Lane(*row)

    def skip(self, lane: Lane, tick: Tick, actor: Actor) -> Lane:
        """Let the lane go on without the tick that stopped it. The deed, its reason and its audit are one.

        Raises:
            LostClaim: The lane is not stopped by this tick any more. Nothing was changed.
        """
        parameters = _of_tick(lane, tick) | {"reason": actor.reason, "actor": actor.name}
        with transaction(self._source, what="skipping a tick") as connection:
            row = connection.execute(_UNPARK, parameters).fetchone()
            if row is None:
                raise rules.overtaken(tick.tick_id)
            connection.execute(_SKIP, parameters)
            details = {"project": lane.project_id, "generation": row[3], "sequence": tick.sequence}
            _audit(connection, actor, "silver-skip", tick.tick_id, details)
        return Lane(*row)

    def is_skipped(self, tick: Tick) -> bool:
        """Whether somebody decided to go on without this tick."""
        with transaction(self._source, what="looking for a skipped tick") as connection:
            row = connection.execute(_IS_SKIPPED, {"tick": tick.tick_id}).fetchone()
        return bool(row and row[0])

    def skipped(self, *, limit: int = 1000) -> list[Skipped]:
        """Ticks that silver goes on without, the newest decision first."""
        with transaction(self._source, what="reading skipped ticks") as connection:
            return [Skipped(*row) for row in connection.execute(_SKIPPED, {"limit": limit}).fetchall()]

    def audit(self, actor: Actor, action: str, subject: str, details: dict[str, Any]) -> None:
        """Write down what a person did."""
        with transaction(self._source, what="writing the audit") as connection:
            _audit(connection, actor, action, subject, details)

    def first_committed(
        self, start: datetime | None, end: datetime | None, *, project_id: str | None = None
    ) -> list[str]:
        """The first tick that each project committed in that stretch."""
        parameters = {"start": start, "end": end, "project": project_id}
        with transaction(self._source, what="looking for committed ticks") as connection:
            return [row[0] for row in connection.execute(_FIRST_COMMITTED, parameters).fetchall()]

    def applied(self, tick_ids: Iterable[str]) -> dict[str, Applied]:
        """Those of the ticks that are in silver."""
        with transaction(self._source, what="reading applied ticks") as connection:
            rows = connection.execute(_OF_TICKS, {"ticks": sorted(set(tick_ids))}).fetchall()
        return {row[2]: _applied(row) for row in rows}

    def applied_since(self, since: datetime, *, limit: int = 5000) -> list[Applied]:
        """What was applied after that instant, oldest first."""
        with transaction(self._source, what="reading applied ticks") as connection:
            rows = connection.execute(_SINCE, {"since": since, "limit": limit}).fetchall()
        return [_applied(row) for row in rows]

    def applied_pages(self, since: datetime, *, limit: int = 5000) -> Iterator[Applied]:
        """All that was applied after that instant, oldest first, read in pages."""
        while page := self.applied_since(since, limit=limit):
            yield from page
            since = page[-1].applied_at

    def newest(self, since: datetime, *, limit: int) -> list[Applied]:
        """The newest of what was applied after that instant, oldest first."""
        with transaction(self._source, what="reading applied ticks") as connection:
            rows = connection.execute(_NEWEST, {"since": since, "limit": limit}).fetchall()
        return [_applied(row) for row in reversed(rows)]

    def applied_of_day(self, start: datetime, end: datetime) -> list[Applied]:
        """What bronze committed in that stretch, as far as it is in silver; skipped ticks are not."""
        with transaction(self._source, what="reading applied ticks") as connection:
            rows = connection.execute(_OF_DAY, {"start": start, "end": end}).fetchall()
        return [_applied(row) for row in rows]


def _audit(connection: Connection, actor: Actor, action: str, subject: str, details: dict[str, Any]) -> None:
    words = {"actor": actor.name, "action": action, "subject": subject}
    connection.execute(_AUDIT, words | {"details": json.dumps({"reason": actor.reason, **details})})


def _of_tick(lane: Lane, tick: Tick) -> dict[str, Any]:
    return {
        "project": lane.project_id,
        "org": lane.org_id,
        "generation": lane.generation,
        "tick": tick.tick_id,
        "sequence": tick.sequence,
    }


def _around(now: datetime, again_after: timedelta) -> dict[str, datetime]:
    """When a lane counts as hinted at. A hint from the future is that of a clock that ran ahead, and counts as none."""
    return {"hinted": now - again_after, "ahead": now + again_after}


def _of_table(tick: Tick, table: str) -> dict[str, Any]:
    return {"project": tick.project_id, "table": table, "sequence": tick.sequence}


def _applied(row: Sequence[Any]) -> Applied:
    org, project, tick, sequence, generation, mode, dt, *rest = row
    return Applied(org, project, tick, sequence, generation, Mode(mode), dt, *rest)
