"""The limits under which the transactional writer talks to PostgreSQL, without a database."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.idempotency import transactional
from lockstep.idempotency.transactional import Key, StageTask, append, write
from lockstep.kernel.ids import SystemIds


class Asked(Exception):
    """A connection was asked for; nothing more is needed."""


def test_a_publication_may_take_as_long_as_the_staging_before_it(monkeypatch: pytest.MonkeyPatch):
    """Guards large units: the driver's one statement was ended after a minute, as transient, so every retry was too."""
    limits: list[float] = []

    def connect(dsn: str, *, statement_timeout: float = 0.0, **_: Any) -> Any:
        limits.append(statement_timeout)
        raise Asked

    monkeypatch.setattr(transactional, "connect", connect)
    nothing: Any = None
    with pytest.raises(Asked):
        StageTask("dsn", "stage_1", ("id",)).copy([], 0, 0)
    with pytest.raises(Asked):
        write(nothing, "dsn", ("public", "visits"), Key("p", "u"), run="r", how=append(), ids=SystemIds())
    staging, publishing = limits
    assert publishing == staging > 0
