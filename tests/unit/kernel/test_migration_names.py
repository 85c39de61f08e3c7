"""Migration file names: every problem is found before a database is touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.migrate import check_names, read_migrations, schema_of


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["0001_a.sql", "0003_c.sql"], "0002: missing"),
        (["0002_b.sql"], "0001: missing"),
        (["0001_a.sql", "0001_b.sql"], "0001: used twice"),
        (["1_a.sql"], "not NNNN_name.sql"),
        (["0001_A.sql"], "not NNNN_name.sql"),
        (["0000_a.sql", "0001_b.sql"], "start at 0001"),
    ],
)
def test_a_bad_set_of_names_is_described(names: list[str], problem: str) -> None:
    """A gap is a late merge whose change would never run on a database that is already ahead."""
    assert any(problem in one for one in check_names(names))


@given(st.integers(0, 40))
def test_a_gapless_run_is_accepted(count: int) -> None:
    assert check_names([f"{n:04}_step.sql" for n in range(1, count + 1)]) == []


def test_the_kernel_ships_its_migrations() -> None:
    assert [one.name for one in read_migrations("lockstep.kernel")] == ["lease", "outbox", "budget"]
    assert schema_of("lockstep.kernel") == "kernel"
