"""Words of the self-test: its request, its receipt and the names it uses outside.

What belongs here: values and names, immutable. What does not: decisions (rules.py), Spark
(worker.py), HTTP (probe.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

QUEUE = "lockstep-selftest"
TABLE = "selftest_table"
CHECK = "selftest_rows_check"
LANE = "selftest"

TOKEN_TAG = "lockstep/selftest"  # noqa: S105  # the name of a run tag
"""Tag of a Dagster run that says which request it serves."""

MAX_ROWS = 100_000
MAX_ATTEMPTS = 3
RETENTION = timedelta(days=7)


@dataclass(frozen=True)
class SelftestRequest:
    """Write `rows` rows under `id`. The same id written twice leaves the rows of one write."""

    id: str
    rows: int


@dataclass(frozen=True)
class SelftestReceipt:
    """What a committed write left in the table."""

    table: str
    rows: int
    preview: Sequence[tuple[str, int, int]]


class RunOutcome(Enum):
    """What a run says about its request. Anything not yet finished is in flight, whatever its status."""

    IN_FLIGHT = "in flight"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
