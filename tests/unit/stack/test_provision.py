"""What is made inside the parts, and what is left to whoever owns them."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from lockstep.kernel.settings import load_settings
from stack.provision import MIGRATIONS, migrations

ELSEWHERE = SecretStr("postgresql://reader:word@db.example.com:5432/app")


def test_everything_is_made_in_the_embedded_databases(tmp_path: Path):
    assert list(migrations(load_settings(home=tmp_path))) == list(MIGRATIONS)


def test_a_source_of_the_user_s_own_is_left_alone(tmp_path: Path):
    """Guards the demo's function, made beside the user's, or refused because the role may only read: no start then."""
    left = set(MIGRATIONS) - set(migrations(load_settings(home=tmp_path, source_dsn=ELSEWHERE)))
    assert left == {("lockstep.exports.demo", "LOCKSTEP_SOURCE_DSN")}


def test_a_redshift_warehouse_makes_its_tables_itself(tmp_path: Path):
    redshift = load_settings(home=tmp_path, warehouse_dialect="redshift", warehouse_dsn=ELSEWHERE)
    assert set(MIGRATIONS) - set(migrations(redshift)) == {("lockstep.windows", "LOCKSTEP_WAREHOUSE_DSN")}
