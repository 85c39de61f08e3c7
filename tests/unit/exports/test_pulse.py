"""The heartbeat of a worker: what it learns, and what silence means."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import pytest

from lockstep.exports.model import Claim, Format, FormulaGuard
from lockstep.exports.worker import Cancelled, Pulse
from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import LostClaim, Transient

CLAIM = Claim(
    "J20260102_000001",
    "key=ABC:date=20250215",
    "ABC",
    date(2025, 2, 15),
    "f",
    "default",
    Format.CSV,
    FormulaGuard.NONE,
    1,
    1,
    datetime(2026, 1, 2, tzinfo=UTC),
)


class _Table:
    """Answers beats with what it is told to."""

    def __init__(self) -> None:
        self.answer: Any = False
        self.rows: list[int] = []

    def beat(self, claim: Claim, rows: int) -> bool:
        self.rows.append(rows)
        if isinstance(self.answer, Exception):
            raise self.answer
        return bool(self.answer)


def _pulse() -> tuple[Pulse, _Table, FakeClock]:
    table, clock = _Table(), FakeClock()
    pulse = Pulse(table, lease=60, clock=clock)
    pulse.hold(CLAIM)
    return pulse, table, clock


def test_a_beat_tells_progress_and_brings_back_cancel():
    pulse, table, _ = _pulse()
    pulse.rows = 42
    pulse.beat()
    pulse.check()
    table.answer = True
    pulse.beat()
    assert table.rows == [42, 42]
    with pytest.raises(Cancelled):
        pulse.check()


def test_a_lost_claim_stops_the_build():
    pulse, table, _ = _pulse()
    table.answer = LostClaim("gone")
    pulse.beat()
    with pytest.raises(LostClaim):
        pulse.check()


def test_silence_for_a_whole_lease_counts_as_lost_and_one_missed_beat_does_not():
    """Guards against a worker cut off from the table that goes on reading the source for nobody."""
    pulse, table, clock = _pulse()
    clock.advance(50)
    pulse.beat()
    table.answer = Transient("no answer")
    clock.advance(59)
    pulse.beat()
    pulse.check()
    clock.advance(1)
    pulse.beat()
    with pytest.raises(LostClaim):
        pulse.check()


def test_what_was_learned_about_one_chunk_is_not_held_against_the_next():
    pulse, table, clock = _pulse()
    table.answer = True
    pulse.beat()
    clock.advance(600)
    pulse.hold(CLAIM)
    pulse.check()
    pulse.hold(None)
    clock.advance(600)
    pulse.check()
    pulse.beat()
    assert len(table.rows) == 1
