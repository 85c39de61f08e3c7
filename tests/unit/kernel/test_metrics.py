"""Metrics: a scrape always answers, and what it could not read it counts."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry

from lockstep.kernel.metrics import (
    HttpMetrics,
    LedgerGauges,
    Reading,
    RelayMetrics,
    Sample,
    exposition,
    lease_readings,
    new_registry,
    outbox_readings,
)
from lockstep.kernel.postgres import pool


def scrape(registry: CollectorRegistry) -> str:
    return exposition(registry)[0].decode()


def ledger(*readings: Reading, timeout: float = 5.0) -> CollectorRegistry:
    registry = new_registry(with_process=False)
    registry.register(LedgerGauges(readings, timeout=timeout))
    return registry


def test_a_reading_is_exported_with_its_labels() -> None:
    def read() -> Iterable[Sample]:
        return [(("acme",), 3), (("other",), 0)]

    text = scrape(ledger(Reading("lockstep_lag_seconds", "Lag.", read, ["vault"])))
    assert 'lockstep_lag_seconds{vault="acme"} 3.0' in text
    assert 'lockstep_ledger_read_errors_total{reading="lockstep_lag_seconds"} 0.0' in text


def test_a_failing_reading_leaves_the_others_and_is_counted() -> None:
    """A scrape that fails as a whole blinds every alert just when one ledger is ill."""

    def fail() -> Iterable[Sample]:
        raise RuntimeError("database is down")

    registry = ledger(Reading("lockstep_bad", "Bad.", fail), Reading("lockstep_good", "Good.", lambda: [((), 7)]))
    scrape(registry)
    text = scrape(registry)
    assert "lockstep_good 7.0" in text
    assert "\nlockstep_bad " not in text
    assert 'lockstep_ledger_read_errors_total{reading="lockstep_bad"} 2.0' in text


@pytest.mark.parametrize("samples", [[(("a", "b"), 1)], [((), "many")], None])
def test_a_reading_of_the_wrong_shape_is_an_error_not_a_crash(samples: object) -> None:
    def read() -> Iterable[Sample]:
        return samples  # type: ignore[return-value]

    text = scrape(ledger(Reading("lockstep_odd", "Odd.", read, ["one"])))
    assert 'lockstep_ledger_read_errors_total{reading="lockstep_odd"}' in text


def test_a_hanging_reading_does_not_hang_the_scrape_and_is_not_doubled() -> None:
    """One thread per scrape on a dead ledger would end in thousands of threads."""
    release, started = threading.Event(), []

    def hang() -> Iterable[Sample]:
        started.append(1)
        release.wait(60)
        return [((), 1)]

    registry = ledger(Reading("lockstep_slow", "Slow.", hang), timeout=0.05)
    for _ in range(5):
        text = scrape(registry)
    release.set()
    assert started == [1]
    assert 'lockstep_ledger_read_errors_total{reading="lockstep_slow"} 5.0' in text


def test_registering_reads_nothing() -> None:
    def explode() -> Iterable[Sample]:
        pytest.fail("registering did I/O")

    ledger(Reading("lockstep_x", "X.", explode))
    closed = pool("postgresql://nobody@127.0.0.1:1/x", application_name="tests")
    new_registry().register(LedgerGauges([*outbox_readings(closed), *lease_readings(closed)]))


def test_requests_and_messages_are_counted() -> None:
    registry = new_registry()
    http, relay = HttpMetrics(registry), RelayMetrics(registry)
    with http.in_progress.track_inprogress():
        http.observe("GET", "/jobs/{id}", 200, 0.01)
    relay.observe("sqs", "delivered", 0.02)
    text = scrape(registry)
    assert 'lockstep_http_requests_total{method="GET",route="/jobs/{id}",status="200"} 1.0' in text
    assert 'lockstep_relay_messages_total{outcome="delivered",scheme="sqs"} 1.0' in text
    assert "process_cpu_seconds_total" in text


def test_two_registries_do_not_collide() -> None:
    HttpMetrics(new_registry())
    HttpMetrics(new_registry())
