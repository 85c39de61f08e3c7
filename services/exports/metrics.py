"""Gauges of exports, read from the tables when Prometheus asks: depth, age and what is broken.

What belongs here: readings. What does not: serving them (services/shell.py).
"""

from __future__ import annotations

from lockstep.kernel.metrics import Reading, sql_reading
from lockstep.kernel.postgres import Pool

_CHUNKS = """
SELECT state, coalesce(sum(n), 0) FROM (VALUES ('pending'), ('running')) AS s (state)
  LEFT JOIN (SELECT pending, running FROM exports.job WHERE status IN ('SUBMITTED', 'IN_PROGRESS')) AS j ON true
 CROSS JOIN LATERAL (SELECT CASE state WHEN 'pending' THEN j.pending ELSE j.running END) AS v (n)
 GROUP BY state"""
_OLDEST = """
SELECT coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)
  FROM exports.job WHERE status IN ('SUBMITTED', 'IN_PROGRESS')"""
_BREAKERS = """
SELECT part, (EXISTS (SELECT 1 FROM exports.breaker AS b WHERE b.part = p.part AND open_until > clock_timestamp()))::int
  FROM (VALUES ('source'), ('s3')) AS p (part)"""


def export_readings(source: Pool) -> list[Reading]:
    """Chunks of open jobs by state, age of the oldest open job, and parts that workers keep away from."""
    return [
        sql_reading(source, "lockstep_export_chunks", "Chunks of open jobs.", _CHUNKS, labels=["state"]),
        sql_reading(source, "lockstep_export_oldest_job_seconds", "Age of the oldest open job.", _OLDEST),
        sql_reading(source, "lockstep_export_breaker_open", "1 while workers pause.", _BREAKERS, labels=["part"]),
    ]
