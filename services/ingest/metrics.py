"""Metrics of ingest: what this replica did, and what the ledgers say about all of them.

What belongs here: instruments and readings. What does not: serving them (services/shell.py).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from lockstep.kernel.metrics import Reading, sql_reading
from lockstep.kernel.postgres import Pool

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)

_TICKS = """
SELECT state, count(t.tick_id) FROM unnest(ARRAY['uploading', 'finalizing', 'failed']) AS state
  LEFT JOIN ticks.tick AS t USING (state) GROUP BY state"""
_OLDEST = """
SELECT coalesce(extract(epoch FROM clock_timestamp() - min(updated_at)), 0)
  FROM ticks.tick WHERE state <> 'committed'"""
_UNSENT = """
SELECT count(*) FROM kernel.outbox WHERE lane LIKE 'ticks/%' AND delivered_at IS NULL AND parked_at IS NULL"""


class IngestMetrics:
    """Counters and histograms of one replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.part_bytes = Counter("lockstep_tick_part_bytes", "Bytes of stored parts.", registry=registry)
        self.finalized = Counter("lockstep_tick_finalizes", "Finalizes by outcome.", ["outcome"], registry=registry)
        self._finalize = Histogram(
            "lockstep_tick_finalize_seconds", "Whole finalizes.", buckets=_SECONDS, registry=registry
        )
        self._phases = Histogram(
            "lockstep_tick_phase_seconds",
            "Time of one phase of a finalize.",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )

    def phase(self, name: str, seconds: float) -> None:
        """Record one phase of a commit."""
        self._phases.labels(name).observe(seconds)

    def finalize(self, outcome: str, seconds: float) -> None:
        """Record one finalize."""
        self.finalized.labels(outcome).inc()
        self._finalize.observe(seconds)


def ingest_readings(source: Pool) -> list[Reading]:
    """Open ticks by state, age of the oldest one, and messages of committed ticks that have not left."""
    return [
        sql_reading(source, "lockstep_ticks_open", "Ticks that are not committed.", _TICKS, labels=["state"]),
        sql_reading(source, "lockstep_ticks_oldest_open_seconds", "Longest time an open tick did not move.", _OLDEST),
        sql_reading(source, "lockstep_ticks_unsent_messages", "Messages of committed ticks still waiting.", _UNSENT),
    ]
