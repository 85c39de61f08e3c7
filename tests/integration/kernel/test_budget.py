"""Budgets on the real database: shared by all who ask, refilled by time, each owner's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.kernel.budget import BudgetStore
from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import pool

pytestmark = pytest.mark.stack


def test_replicas_share_a_budget_that_fills_again_and_is_nobody_elses(database: str):
    """Guards the limit itself: counted per replica, it would grow with every replica."""
    migrate(database, "lockstep.kernel")
    with pool(database, application_name="one", max_size=4) as one, pool(database, application_name="two") as two:
        replicas = [BudgetStore(state, limit=5, per_second=0.001) for state in (one, two)]
        with ThreadPoolExecutor(6) as asking:
            granted = list(asking.map(lambda n: replicas[n % 2].spend("ticks/acme").granted, range(12)))
        assert sum(granted) == 5
        refused = replicas[0].spend("ticks/acme")
        assert (refused.granted, refused.remaining) == (False, 0)
        assert 900 < refused.retry_seconds <= 1000
        assert replicas[1].spend("ticks/other").remaining == 4
        with one.connection() as connection:
            connection.execute("UPDATE kernel.request_budget SET at = at - interval '2001 s'")
        assert [replicas[1].spend("ticks/acme").granted for _ in range(3)] == [True, True, False]
