"""How often somebody may ask: one bucket of tokens for each, in the database, so that all replicas share it.

What belongs here: spending and refilling. What does not: who is asking, and what HTTP says about it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.kernel.postgres import Connection, Pool, transaction

# One statement: refill by the time that passed, take one token if there is a whole one. `excluded.at` is now.
_SPEND = """
INSERT INTO kernel.request_budget AS b (owner, tokens, granted, at)
VALUES (%(owner)s, %(limit)s - 1, true, clock_timestamp())
ON CONFLICT (owner) DO UPDATE
   SET (tokens, granted, at) = (
       SELECT CASE WHEN full_to >= 1 THEN full_to - 1 ELSE full_to END, full_to >= 1, excluded.at
         FROM (SELECT least(%(limit)s::float8, b.tokens + greatest(0, extract(epoch FROM excluded.at - b.at)::float8)
                                               * %(per_second)s::float8)) AS refilled (full_to))
RETURNING tokens, granted"""


@dataclass(frozen=True)
class Budget:
    """What is left after a request; `granted` False: the request must wait."""

    limit: int
    per_second: float
    tokens: float
    granted: bool

    @property
    def remaining(self) -> int:
        """Requests that would be answered now."""
        return max(0, math.floor(self.tokens))

    @property
    def reset_seconds(self) -> int:
        """Until the budget is full again."""
        return math.ceil((self.limit - self.tokens) / self.per_second)

    @property
    def retry_seconds(self) -> int:
        """Until the next request is answered."""
        return max(1, math.ceil((1 - self.tokens) / self.per_second))


class BudgetStore:
    """Budgets of one kind of owners: `limit` requests at once, refilled at `per_second`."""

    def __init__(self, source: Pool | Connection, *, limit: int, per_second: float) -> None:
        self._source = source
        self._limit = limit
        self._per_second = per_second

    def spend(self, owner: str) -> Budget:
        """Count one request of the owner, such as `exports/CLIENT`, and say what is left."""
        parameters = {"owner": owner, "limit": self._limit, "per_second": self._per_second}
        with transaction(self._source, what="counting a request") as connection:
            row = connection.execute(_SPEND, parameters).fetchone()
        assert row is not None  # noqa: S101  # the upsert returns its row
        return Budget(self._limit, self._per_second, float(row[0]), bool(row[1]))
