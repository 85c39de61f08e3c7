"""Silver rules: which committed ticks may be applied next, who may take one, and how commits name themselves.

What belongs here: pure decisions over what the ledgers say. What does not: I/O. Bronze numbers a project's ticks
without a gap, so order is one comparison: the next tick has the number after the watermark, or the lane waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from lockstep.kernel.errors import LostClaim
from lockstep.ticks.model import Mode, Tick
from lockstep.ticks.silver.model import LONGEST_LEASE, RETRY_CAP_SECONDS, Dispatch, Lane, TableState

RETRY_BASE_SECONDS = 5.0
HIDDEN_SECONDS = 900
LONGEST_HIDDEN_SECONDS = 6 * 3600


class Why(StrEnum):
    """Why a lane does not move."""

    IDLE = "idle"  # nothing is committed beyond the watermark
    PARKED = "parked"  # a tick failed for good; a person must act
    GAP = "gap"  # the next number is missing: somebody removed a tick from bronze's ledger


class Plan(NamedTuple):
    """The ticks that may be applied, in order; without any, why, and at which tick or number."""

    ready: tuple[Tick, ...]
    why: Why | None = None
    at: str = ""


def plan(lane: Lane, chain: Sequence[Tick]) -> Plan:
    """What may be applied now: the unbroken run of numbers after the watermark.

    Args:
        lane: The project's lane.
        chain: Committed ticks with numbers above the watermark, in any order, repeats allowed.
    """
    if lane.parked is not None:
        return Plan((), Why.PARKED, lane.parked)
    by_number = {tick.sequence: tick for tick in chain if tick.sequence is not None and tick.sequence > lane.watermark}
    ready: list[Tick] = []
    while (tick := by_number.get(lane.watermark + len(ready) + 1)) is not None:
        ready.append(tick)
    if ready:
        return Plan(tuple(ready))
    if by_number:
        return Plan((), Why.GAP, str(lane.watermark + 1))
    return Plan((), Why.IDLE)


def may_take(row: Dispatch | None, generation: int, now: datetime) -> bool:
    """Whether a tick may be handed to a run: nobody has it, or whoever had it is silent for longer than its lease.

    A lease that ends later than any lease can was written by a clock that ran ahead; waiting for it may take hours.
    """
    if row is None or row.generation < generation:
        return True
    if row.generation > generation or row.is_done:
        return False
    return not now < row.lease_until <= now + LONGEST_LEASE


def retry_at(attempt: int, now: datetime) -> datetime:
    """When the next attempt may follow a failed one. No jitter: one lane has one worker."""
    return now + timedelta(seconds=min(RETRY_CAP_SECONDS, RETRY_BASE_SECONDS * 2.0 ** max(0, attempt - 1)))


def hidden_seconds(receives: int, base: int = HIDDEN_SECONDS) -> int:
    """How long the message of a tick that waits stays hidden: waiting must not use up its receives too soon."""
    return min(LONGEST_HIDDEN_SECONDS, base << 2 * min(10, max(0, receives - 1)))


def epoch_after(mode: Mode, sequence: int, generation: int, before: TableState | None) -> str:
    """The base that a table stands on after a tick: a full tick makes a new one, a delta tick keeps what there is."""
    if mode is Mode.FULL:
        return f"full-{sequence}-{generation}"
    return before.epoch if before is not None else "begin"


def previous_merge(before: TableState | None) -> str | None:
    """The merge that the next one follows in the table's history; None if it is the first one on its base."""
    if before is None or before.epoch.startswith(f"full-{before.sequence}-"):
        return None
    return execution(before.sequence)


def execution(sequence: int) -> str:
    """A number as the stateful merger orders it: text of one width."""
    return f"{sequence:012d}"


def request(tick_id: str, generation: int) -> str:
    """The wish to apply a tick: a retry carries the same one, a replay a new one."""
    return f"{tick_id}:{generation}"


def delta_fence(fence: int, number: int) -> int:
    """The lease's fence and the number of the commit under it as one number that only rises on a lane."""
    return fence * 1_000_000 + number


def overtaken(tick_id: str) -> LostClaim:
    """What a worker learns whose tick was replayed, or whose lane was taken, while it worked."""
    return LostClaim(
        "the lane has moved on while this worker was at it.",
        unit=tick_id,
        next_step="stop; whoever has the lane now continues from the ledger.",
    )
