"""What is made inside the parts, and what is left to whoever owns them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from lockstep.kernel.errors import Terminal
from lockstep.kernel.settings import Settings, load_settings
from stack.environment import environment
from stack.home import Home
from stack.parts import Site
from stack.provision import MIGRATIONS, buckets, migrations, provision

ELSEWHERE = SecretStr("postgresql://reader:word@db.example.com:5432/app")
NOBODY = SecretStr("postgresql://user:word@127.0.0.1:1/lockstep")


def test_everything_is_made_in_the_embedded_databases(tmp_path: Path):
    assert list(migrations(load_settings(home=tmp_path))) == list(MIGRATIONS)


def test_a_source_of_the_user_s_own_is_left_alone(tmp_path: Path):
    """Guards the demo's function, made beside the user's, or refused because the role may only read: no start then."""
    left = set(MIGRATIONS) - set(migrations(load_settings(home=tmp_path, source_dsn=ELSEWHERE)))
    assert left == {("lockstep.exports.demo", "LOCKSTEP_SOURCE_DSN")}


def test_a_redshift_warehouse_makes_its_tables_itself(tmp_path: Path):
    redshift = load_settings(home=tmp_path, warehouse_dialect="redshift", warehouse_dsn=ELSEWHERE)
    assert set(MIGRATIONS) - set(migrations(redshift)) == {("lockstep.windows", "LOCKSTEP_WAREHOUSE_DSN")}


def test_every_bucket_has_the_name_that_the_deployment_gave_it(home_folder: Path):
    """Guards AWS, where a name belongs to one account: a bucket without a setting cannot be made there."""
    names = {field: f"acme-{field}" for field in Settings.model_fields if field.endswith("_bucket")}
    own = {name for field, name in names.items() if field != "readiness_alert_bucket"}  # that one is the user's own
    settings = load_settings(home=home_folder, **names)
    home = Home(settings.home)
    home.prepare()
    ports = home.choose_ports(settings)
    assert set(buckets(Site(settings, home, ports, environment(settings, home, ports)))) == own


def test_dagster_is_prepared_in_its_database_also_where_no_stack_ever_started(home_folder: Path):
    """Guards a deployment: without our `dagster.yaml` Dagster made files of its own, and every lane went unlimited."""
    settings = load_settings(home=home_folder, postgres_dsn=NOBODY)
    home = Home(settings.home)
    home.prepare()
    ports = home.choose_ports(settings)
    with pytest.raises(Terminal, match="could not be prepared"):
        provision("dagster-code", Site(settings, home, ports, environment(settings, home, ports)))
    assert [file.name for file in home.dagster.iterdir()] == ["dagster.yaml"]
