"""What silver talks about: a lane, a dispatch, what an applied tick left, and the names of its places.

What belongs here: values and names. What does not: decisions (rules.py), persistence (store.py, dispatch.py), Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from lockstep.ticks.model import LEDGER_DAYS, SILVER_COLUMNS, Mode

BRONZE_ASSET = "bronze_ticks"
SILVER_ASSET = "silver_ticks"
DAILY_ASSET = "ticks_daily"
SESSIONS_ASSET = "agent_sessions"
REPORT_ASSET = "ticks_report"

SILVER_PREFIX = "silver"
GOLD_PREFIX = "gold"

PROJECT, TICK, ORDER = SILVER_COLUMNS
"""What silver adds to every row: whose it is, which tick wrote it, and its place among all changes of its key."""

MAX_ATTEMPTS = 5
DISPATCH_SECONDS = 120.0
"""How long a dispatched tick waits for its run before it may be dispatched again."""

LEASE_SECONDS = 60.0
RETRY_CAP_SECONDS = 300.0
LONGEST_LEASE = timedelta(seconds=2 * RETRY_CAP_SECONDS)
"""Nobody holds a tick for longer. A row that says so was written by a clock that ran ahead, and is not believed."""

DISPATCH_TTL = timedelta(days=LEDGER_DAYS)


class Lane(NamedTuple):
    """A project's silver: everything up to `watermark`, a sequence number, is in; nothing after it is.

    `generation` rises with every replay. `parked` is the tick that stopped the lane, if one did.
    """

    org_id: str
    project_id: str
    watermark: int = 0
    generation: int = 1
    parked: str | None = None

    @property
    def name(self) -> str:
        """The kernel's lane: one worker at a time applies the ticks of a project."""
        return f"ticks-silver/{self.project_id}"


class DispatchState(StrEnum):
    """Where a dispatch is. DONE is written by the worker, and by nobody else."""

    DISPATCHING = "DISPATCHING"
    RUNNING = "RUNNING"
    FAILED = "FAILED"
    DONE = "DONE"


@dataclass(frozen=True)
class Dispatch:
    """A row of `silver_dispatched`. `(generation, attempt)` is the fence of every write to it."""

    tick_id: str
    org_id: str
    project_id: str
    state: DispatchState
    generation: int
    attempt: int
    lease_until: datetime
    receipt_handle: str | None = None
    run_id: str | None = None
    error: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether this generation is in silver."""
        return self.state is DispatchState.DONE


class TableState(NamedTuple):
    """A silver table as the ledger knows it after one tick. `epoch` names the base that merges stand on."""

    table: str
    sequence: int
    epoch: str
    key: tuple[str, ...]
    version: int
    rows: int


@dataclass(frozen=True)
class Applied:
    """A tick in silver, as the ledger has it. `skipped` says why silver goes on without its rows."""

    org_id: str
    project_id: str
    tick_id: str
    sequence: int
    generation: int
    mode: Mode
    dt: str
    rows: int
    fence: int
    applied_at: datetime
    committed_at: datetime
    tables: Mapping[str, int]
    skipped: str | None = None
