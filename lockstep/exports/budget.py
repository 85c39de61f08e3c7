"""How often a client may ask: one bucket of tokens for each, in the database, so that all replicas share it.

What belongs here: spending and refilling. What does not: who the client is (clients.py) and HTTP headers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.exports.model import Client
from lockstep.kernel.postgres import Connection, Pool, transaction

WINDOW_SECONDS = 60

# One statement: refill by the time that passed, take one token if there is a whole one. `excluded.at` is now.
_SPEND = """
INSERT INTO exports.request_budget AS b (client_id, tokens, granted, at)
VALUES (%(client)s, %(limit)s - 1, true, clock_timestamp())
ON CONFLICT (client_id) DO UPDATE
   SET (tokens, granted, at) = (
       SELECT CASE WHEN full_to >= 1 THEN full_to - 1 ELSE full_to END, full_to >= 1, excluded.at
         FROM (SELECT least(%(limit)s::float8, b.tokens + greatest(0, extract(epoch FROM excluded.at - b.at)::float8)
                                               * %(limit)s::float8 / %(window)s)) AS refilled (full_to))
RETURNING tokens, granted"""


@dataclass(frozen=True)
class Budget:
    """What is left after a request; `granted` False: the request must wait."""

    limit: int
    tokens: float
    granted: bool

    @property
    def remaining(self) -> int:
        """Requests that would be answered now."""
        return max(0, math.floor(self.tokens))

    @property
    def reset_seconds(self) -> int:
        """Until the budget is full again."""
        return math.ceil((self.limit - self.tokens) * WINDOW_SECONDS / self.limit)

    @property
    def retry_seconds(self) -> int:
        """Until the next request is answered."""
        return max(1, math.ceil((1 - self.tokens) * WINDOW_SECONDS / self.limit))


class BudgetStore:
    """Budgets in the table `exports.request_budget`."""

    def __init__(self, source: Pool | Connection, *, per_minute: int) -> None:
        self._source = source
        self._limit = per_minute

    def spend(self, client: Client) -> Budget:
        """Count one request of a client and say what is left."""
        parameters = {"client": client.client_id, "limit": self._limit, "window": WINDOW_SECONDS}
        with transaction(self._source, what="counting a request") as connection:
            row = connection.execute(_SPEND, parameters).fetchone()
        assert row is not None  # noqa: S101  # the upsert returns its row
        return Budget(self._limit, float(row[0]), bool(row[1]))
