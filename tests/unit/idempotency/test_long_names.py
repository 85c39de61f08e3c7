"""Names that PostgreSQL would cut off are refused before a table is made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.idempotency.calendar import DAY
from lockstep.idempotency.cleaner import Dataset
from lockstep.idempotency.proxy import Proxy
from lockstep.idempotency.stateful import create_history
from lockstep.kernel.errors import InvalidInput


def history(name: str) -> None:
    server: Any = SimpleNamespace(info=SimpleNamespace(server_version=18_00_00))
    create_history(server, f"public.{name}")


@pytest.mark.parametrize(
    ("make", "room"),
    [
        (lambda name: Dataset("public", name, "shape", "day", DAY), 49),
        (lambda name: Proxy("public", name), 42),
        (history, 48),
    ],
)
def test_a_name_that_leaves_no_room_for_its_tables_is_refused(make: Any, room: int):
    """Guards units, versions and histories: cut to 63 bytes, two of them are one table."""
    for long in ("x" * (room + 1), "ü" * (room // 2 + 1)):
        with pytest.raises(InvalidInput, match=f"at most {room} bytes"):
            make(long)


@pytest.mark.parametrize("make", [lambda name: Dataset("public", name, "s", "day", DAY), lambda name: Proxy("p", name)])
def test_a_name_with_room_enough_is_taken(make: Any):
    make("x" * 42)
