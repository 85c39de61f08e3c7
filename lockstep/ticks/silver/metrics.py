"""Gauges of silver, read when Prometheus asks: depths of the queues, and how far silver is behind bronze.

What belongs here: readings. What does not: serving them (services/relay.py) and the rules that watch them
(docs/alerts/ticks.rules.yml).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.metrics import Reading, Sample, sql_reading
from lockstep.kernel.postgres import Pool
from lockstep.ticks.silver.queue import TickQueue

_BEHIND = """
  FROM ticks.project AS p
  LEFT JOIN silver.lane AS l ON l.project_id = p.project_id
  LEFT JOIN ticks.tick AS t ON t.project_id = p.project_id AND t.sequence = coalesce(l.watermark, 0) + 1
 WHERE p.sequence > coalesce(l.watermark, 0)"""
_LAG = "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - t.committed_at)), 0)" + _BEHIND  # noqa: S608
_WAITING = "SELECT coalesce(sum(p.sequence - coalesce(l.watermark, 0)), 0)" + _BEHIND
_PARKED = "SELECT count(*) FROM silver.lane WHERE parked IS NOT NULL"
_SKIPPED = "SELECT count(*) FROM silver.skip"


def silver_readings(
    source: Pool, queue: TickQueue, dead_letters: TickQueue, *, clock: Clock | None = None
) -> list[Reading]:
    """Lag, backlog, parked lanes, skipped ticks; messages by queue and state; age of the oldest dead letter."""
    now = (clock or SystemClock()).now
    return [
        sql_reading(source, "lockstep_silver_lag_seconds", "Longest wait of a committed tick for silver.", _LAG),
        sql_reading(source, "lockstep_silver_waiting_ticks", "Committed ticks that are not in silver.", _WAITING),
        sql_reading(source, "lockstep_silver_parked_lanes", "Projects stopped by a tick that failed.", _PARKED),
        sql_reading(source, "lockstep_silver_skipped_ticks", "Ticks that silver goes on without.", _SKIPPED),
        Reading(
            "lockstep_tick_queue_messages",
            "Messages of committed ticks.",
            lambda: [*_depth("work", queue), *_depth("dead", dead_letters)],
            ("queue", "state"),
        ),
        Reading(
            "lockstep_tick_dead_letter_age_seconds",
            "Age of the oldest dead letter.",
            lambda: [((), dead_letter_age(dead_letters, now()))],
        ),
    ]


def dead_letter_age(dead_letters: TickQueue, now: datetime) -> float:
    """Seconds since the oldest dead letter that a look can see was sent; 0 without any.

    SQS tells the age to CloudWatch only, so up to ten are looked at and left where they are.
    """
    if dead_letters.depth().visible == 0:
        return 0.0
    return max(((now - one.sent_at).total_seconds() for one in dead_letters.receive(hidden=0)), default=0.0)


def _depth(name: str, queue: TickQueue) -> Iterable[Sample]:
    for state, count in queue.depth()._asdict().items():
        yield (name, state), float(count)
