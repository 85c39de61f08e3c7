"""Metrics in Prometheus form: counters that code feeds, and gauges that are read from the ledgers at scrape time.

What belongs here: registries, the standard instruments and the reading of ledgers. What does not: the readings of one
pipeline, which live beside its store, and the HTTP door that serves them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from psycopg import sql

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.logs import get_logger
from lockstep.kernel.postgres import Pool, transaction

_log = get_logger(__name__)

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Sample = tuple[Sequence[str], float]
"""Label values, in the order of the reading's labels, and the value."""

_OUTBOX_MESSAGES = """
SELECT 'waiting', count(*) FROM kernel.outbox
 WHERE delivered_at IS NULL AND parked_at IS NULL AND blocked_at IS NULL
UNION ALL
SELECT 'blocked', count(*) FROM kernel.outbox
 WHERE delivered_at IS NULL AND parked_at IS NULL AND blocked_at IS NOT NULL
UNION ALL
SELECT 'parked', count(*) FROM kernel.outbox WHERE parked_at IS NOT NULL"""
_OUTBOX_AGE = """
SELECT coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)
  FROM kernel.outbox WHERE delivered_at IS NULL AND parked_at IS NULL"""
_LEASE_LANES = """
SELECT state, count(lease.lane) FROM unnest(ARRAY['held', 'expired', 'free']) AS state
  LEFT JOIN kernel.lease ON state = CASE WHEN owner IS NULL THEN 'free'
       WHEN lease_until <= clock_timestamp() THEN 'expired' ELSE 'held' END
 GROUP BY state"""
_LEASE_SILENCE = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - renewed_at)), 0)
  FROM kernel.lease WHERE owner IS NOT NULL"""


def new_registry(*, with_process: bool = True) -> CollectorRegistry:
    """A registry of its own, so that two services in one process, or two tests, do not collide."""
    registry = CollectorRegistry(auto_describe=False)
    if with_process:
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
    return registry


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The body of a scrape and its content type."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


class HttpMetrics:
    """Requests of one service. `route` is the template (`/jobs/{id}`), never the path: paths have no bound."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "lockstep_http_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "lockstep_http_request_seconds",
            "Time to answer.",
            ["method", "route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_progress = Gauge("lockstep_http_requests_in_progress", "Requests being answered.", registry=registry)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record one answer."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)


class RelayMetrics:
    """Messages of a relay; pass `observe` to `Relay(observe=...)`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._messages = Counter(
            "lockstep_relay_messages", "Messages handled by outcome.", ["scheme", "outcome"], registry=registry
        )
        self._seconds = Histogram(
            "lockstep_relay_delivery_seconds", "Time of one delivery.", ["scheme"], buckets=_SECONDS, registry=registry
        )

    def observe(self, scheme: str, outcome: str, seconds: float) -> None:
        """Record one message."""
        self._messages.labels(scheme, outcome).inc()
        self._seconds.labels(scheme).observe(seconds)


@dataclass(frozen=True)
class Reading:
    """One gauge that is read at scrape time. `read` returns a sample for each set of label values."""

    name: str
    documentation: str
    read: Callable[[], Iterable[Sample]]
    labels: Sequence[str] = ()


class LedgerGauges(Collector):
    """Reads ledgers when Prometheus asks, so that a gauge cannot disagree with the data it describes.

    A reading that fails or is late is left out and counted in `lockstep_ledger_read_errors_total`; the scrape itself
    never fails and never waits longer than `timeout`. A reading that hangs is not started a second time.
    """

    def __init__(self, readings: Sequence[Reading], *, timeout: float = 5.0, clock: Clock | None = None) -> None:
        self._readings = tuple(readings)
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._errors = {reading.name: 0 for reading in self._readings}
        self._pending: dict[str, _Attempt] = {}
        self._lock = threading.Lock()

    def describe(self) -> Iterator[Metric]:
        """What may be exported, without reading anything: registering must do no I/O."""
        for reading in self._readings:
            yield _family(reading)
        yield self._error_family()

    def collect(self) -> Iterator[Metric]:
        """Read everything side by side, within one deadline."""
        deadline = self._clock.monotonic() + self._timeout
        attempts = [(reading, self._begin(reading)) for reading in self._readings]
        for reading, attempt in attempts:
            family = self._finish(reading, attempt, max(0.0, deadline - self._clock.monotonic()))
            if family is not None:
                yield family
        yield self._error_family()

    def _begin(self, reading: Reading) -> _Attempt | None:
        with self._lock:
            pending = self._pending.get(reading.name)
            if pending is not None and not pending.done.is_set():
                return None
            attempt = self._pending[reading.name] = _Attempt()
        threading.Thread(target=attempt.run, args=(reading,), name=f"read {reading.name}", daemon=True).start()
        return attempt

    def _finish(self, reading: Reading, attempt: _Attempt | None, seconds: float) -> Metric | None:
        if attempt is not None and attempt.done.wait(seconds) and attempt.error is None:
            return attempt.family
        why = "still running" if attempt is None or attempt.error is None else repr(attempt.error)
        _log.warning("ledger reading failed", reading=reading.name, error=why)
        with self._lock:
            self._errors[reading.name] += 1
        return None

    def _error_family(self) -> Metric:
        family = CounterMetricFamily(
            "lockstep_ledger_read_errors", "Ledger readings that failed or were late.", labels=["reading"]
        )
        with self._lock:
            for name, count in sorted(self._errors.items()):
                family.add_metric([name], count)
        return family


class _Attempt:
    """One reading in a thread of its own, so that a hanging ledger cannot hang the scrape."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.family: Metric | None = None
        self.error: Exception | None = None

    def run(self, reading: Reading) -> None:
        try:
            family = _family(reading)
            for labels, value in reading.read():
                family.add_metric([str(label) for label in labels], float(value))
            self.family = family
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


def sql_reading(
    source: Pool,
    name: str,
    documentation: str,
    statement: str,
    *,
    labels: Sequence[str] = (),
    timeout: float = 5.0,
) -> Reading:
    """A reading by SQL: first the columns of the labels, in order, then one column with the value."""

    def read() -> Iterable[Sample]:
        with transaction(source, what=f"reading {name}") as connection:
            connection.execute(sql.SQL("SET TRANSACTION READ ONLY"))
            connection.execute("SELECT set_config('statement_timeout', %s, true)", (f"{round(timeout * 1000)}ms",))
            rows: list[tuple[Any, ...]] = connection.execute(statement.encode()).fetchall()
        return [(row[:-1], row[-1]) for row in rows]

    return Reading(name, documentation, read, tuple(labels))


def outbox_readings(source: Pool, *, timeout: float = 5.0) -> list[Reading]:
    """Depth by state and age of the oldest waiting message. Alert on age and on anything blocked or parked."""
    return [
        sql_reading(
            source,
            "lockstep_outbox_messages",
            "Messages not delivered, by state.",
            _OUTBOX_MESSAGES,
            labels=["state"],
            timeout=timeout,
        ),
        sql_reading(
            source,
            "lockstep_outbox_oldest_seconds",
            "Age of the oldest message that has not left.",
            _OUTBOX_AGE,
            timeout=timeout,
        ),
    ]


def lease_readings(source: Pool, *, timeout: float = 5.0) -> list[Reading]:
    """Lanes by state and the longest silence of a holder. Alert on lanes that stay expired."""
    return [
        sql_reading(
            source,
            "lockstep_lease_lanes",
            "Lanes by state of their lease.",
            _LEASE_LANES,
            labels=["state"],
            timeout=timeout,
        ),
        sql_reading(
            source,
            "lockstep_lease_silence_seconds",
            "Longest time since a holder last renewed.",
            _LEASE_SILENCE,
            timeout=timeout,
        ),
    ]


def _family(reading: Reading) -> GaugeMetricFamily:
    return GaugeMetricFamily(reading.name, reading.documentation, labels=list(reading.labels))
