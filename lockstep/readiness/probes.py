"""Readings of the other pipelines' ledgers: how far each has come. Every query follows an index or a row per lane.

What belongs here: the statements and what their rows mean. What does not: when that is good enough (evaluators/
builtin.py). Connections are given as factories; each reading opens one, with a short timeout, and closes it.

A reading answers `lagSeconds`: how long the oldest thing that is not through has been waiting. None with `empty` means
that nothing waits; None without it, that nobody can say yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

from lockstep.kernel.postgres import Connection, translated
from lockstep.readiness.model import Key

Connect = Callable[[], Connection]
Reading = Mapping[str, Any]

# One row per vault, by its primary key. A lane that was opened and never loaded stands at the beginning of time.
WATERMARKS: Final = "SELECT vault, watermark FROM windows.apply_control WHERE vault = ANY(%(vaults)s)"
_BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)

# The partial index `job_active` holds the unfinished jobs and nothing else, however many have ended.
UNFINISHED: Final = """
SELECT count(*), min(created_at), (array_agg(job_id ORDER BY created_at))[1] FROM exports.job
 WHERE status IN ('SUBMITTED', 'IN_PROGRESS')"""
JOB: Final = "SELECT status FROM exports.job WHERE job_id = %(job)s"

# Two counters for each project and one look at its next tick: the cost grows with projects, never with ticks.
WAITING_TICKS: Final = """
SELECT coalesce(sum(p.sequence - coalesce(l.watermark, 0)), 0)::bigint, min(t.committed_at),
       (array_agg(p.project_id ORDER BY t.committed_at))[1]
  FROM ticks.project AS p
  LEFT JOIN silver.lane AS l ON l.project_id = p.project_id
  JOIN ticks.tick AS t ON t.project_id = p.project_id AND t.sequence = coalesce(l.watermark, 0) + 1
 WHERE p.sequence > coalesce(l.watermark, 0)"""


class WindowProbe:
    """How far the vaults' watermarks lie back. `vault` names one; `ignoreNotBegun` leaves out those without data."""

    def __init__(self, connect: Connect, vaults: Sequence[str]) -> None:
        self._connect = connect
        self._vaults = list(vaults)

    def __call__(self, config: Mapping[str, Any], _: Key, now: datetime) -> Reading:
        """The vault that is furthest behind."""
        wanted = [str(config["vault"])] if "vault" in config else self._vaults
        rows = dict(_all(self._connect, WATERMARKS, {"vaults": wanted}))
        begun = {vault: moment for vault, moment in rows.items() if moment > _BEGINNING}
        missing = sorted(set(wanted) - begun.keys())
        if not begun or (missing and not config.get("ignoreNotBegun")):
            return {"lagSeconds": None, "empty": bool(config.get("ignoreNotBegun")), "notBegun": missing}
        vault, watermark = min(begun.items(), key=lambda row: row[1])
        return {"lagSeconds": _age(watermark, now), "vault": vault, "caughtUpTo": watermark, "notBegun": missing}


class ExportProbe:
    """How old the oldest unfinished export job is; or, with `jobId`, where that one is."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def __call__(self, config: Mapping[str, Any], _: Key, now: datetime) -> Reading:
        """The oldest unfinished job."""
        if "jobId" in config:
            found = _all(self._connect, JOB, {"job": str(config["jobId"])})
            return {"jobStatus": found[0][0] if found else None}
        ((waiting, oldest, job),) = _all(self._connect, UNFINISHED)
        return _oldest(waiting, oldest, now, job=job)


class TickProbe:
    """How long the oldest committed tick has been waiting for silver."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def __call__(self, _: Mapping[str, Any], __: Key, now: datetime) -> Reading:
        """The next tick of the project that waits longest."""
        ((waiting, oldest, project),) = _all(self._connect, WAITING_TICKS)
        return _oldest(waiting, oldest, now, project=project)


def _oldest(waiting: int, oldest: datetime | None, now: datetime, **named: Any) -> Reading:
    if oldest is None:
        return {"lagSeconds": None, "empty": True, "waiting": 0}
    return {"lagSeconds": _age(oldest, now), "waiting": waiting, "caughtUpTo": oldest, **named}


def _age(moment: datetime, now: datetime) -> float:
    return max(0.0, (now - moment).total_seconds())


def _all(connect: Connect, statement: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
    with translated("reading a ledger"), closing(connect()) as connection:
        return connection.execute(statement.encode(), values).fetchall()
