"""The kernel's own gauges, read from real tables."""

from __future__ import annotations

import pytest

from lockstep.kernel.errors import Terminal
from lockstep.kernel.lease import LeaseStore
from lockstep.kernel.metrics import (
    LedgerGauges,
    RelayMetrics,
    exposition,
    lease_readings,
    new_registry,
    outbox_readings,
    sql_reading,
)
from lockstep.kernel.migrate import migrate
from lockstep.kernel.outbox import Claimed, Message, Outbox
from lockstep.kernel.postgres import on_connect, pool, transaction
from lockstep.kernel.relay import Relay

pytestmark = pytest.mark.stack


class Refusing:
    """Refuses everything for good."""

    def deliver(self, claimed: Claimed) -> None:
        raise Terminal("no")


def test_the_kernel_shows_what_waits_what_stopped_and_who_holds(database: str) -> None:
    """A blocked lane that no gauge shows is found by its customer."""
    migrate(database, "lockstep.kernel")
    registry = new_registry(with_process=False)
    with (
        pool(database, application_name="tests") as shared,
        LeaseStore(on_connect(database, application_name="leases")) as leases,
    ):
        with transaction(shared) as connection:
            for lane, rule in (("a", "block"), ("b", "park")):
                for _ in range(2):
                    Outbox().put(connection, Message(lane, "sqs:q", 1, on_exhausted=rule))  # type: ignore[arg-type]
        Relay(shared, {"sqs": Refusing()}, observe=RelayMetrics(registry).observe).run_once()
        held = leases.acquire("x", "me", ttl=60)
        assert held is not None
        leases.acquire("y", "me", ttl=0.001)
        registry.register(LedgerGauges([*outbox_readings(shared), *lease_readings(shared)], timeout=30))
        text = exposition(registry)[0].decode()
    for line in (
        'lockstep_outbox_messages{state="waiting"} 1.0',
        'lockstep_outbox_messages{state="blocked"} 1.0',
        'lockstep_outbox_messages{state="parked"} 2.0',
        'lockstep_lease_lanes{state="held"} 1.0',
        'lockstep_lease_lanes{state="expired"} 1.0',
        'lockstep_lease_lanes{state="free"} 0.0',
        'lockstep_relay_messages_total{outcome="blocked",scheme="sqs"} 1.0',
        'lockstep_relay_messages_total{outcome="parked",scheme="sqs"} 2.0',
    ):
        assert line in text
    assert "lockstep_outbox_oldest_seconds" in text
    assert "lockstep_lease_silence_seconds" in text


def test_a_reading_cannot_write_and_cannot_run_for_long(database: str) -> None:
    with pool(database, application_name="tests") as shared:
        registry = new_registry(with_process=False)
        registry.register(
            LedgerGauges(
                [
                    sql_reading(shared, "lockstep_writes", "W.", "CREATE TABLE t AS SELECT 1"),
                    sql_reading(shared, "lockstep_sleeps", "S.", "SELECT 1 FROM pg_sleep(600)", timeout=0.05),
                    sql_reading(shared, "lockstep_percent", "P.", "SELECT 5 % 3"),
                ],
                timeout=30,
            )
        )
        text = exposition(registry)[0].decode()
    assert 'lockstep_ledger_read_errors_total{reading="lockstep_writes"} 1.0' in text
    assert 'lockstep_ledger_read_errors_total{reading="lockstep_sleeps"} 1.0' in text
    assert "lockstep_percent 2.0" in text
