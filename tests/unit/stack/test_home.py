"""The folder of a stack: ports, credentials, and places that cannot be used."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import load_settings
from stack.environment import adopt, environment, forget_own
from stack.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.prepare()
    return home


def test_a_taken_port_that_the_user_set_is_refused_with_the_variable_to_change(home: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput) as refusal:
            home.choose_ports(load_settings(sqs_port=port))
    assert f"port {port} is taken" in str(refusal.value)
    assert "LOCKSTEP_SQS_PORT" in str(refusal.value)


def test_ports_are_kept_between_starts_and_a_taken_one_is_replaced(home: Home) -> None:
    first = home.choose_ports(load_settings())
    assert home.choose_ports(load_settings()) == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first["s3"]))
        taken.listen()
        second = home.choose_ports(load_settings())
    assert second["s3"] != first["s3"]
    assert {name for name in first if first[name] != second[name]} == {"s3"}


def test_a_half_written_record_of_ports_is_chosen_anew(home: Home) -> None:
    (home.root / "ports.json").write_text('{"postgres": 54')
    assert home.ports() == {}
    assert len(set(home.choose_ports(load_settings()).values())) == len(home.ports())


def test_credentials_are_made_once_and_readable_by_the_owner_only(home: Home) -> None:
    made = home.credentials()
    assert home.credentials() == made
    assert (home.root / "credentials.json").stat().st_mode & 0o077 == 0


def test_damaged_credentials_are_refused_and_never_replaced_in_silence(home: Home) -> None:
    """New credentials beside old data would lock the user out of the database."""
    path = home.root / "credentials.json"
    path.write_text("{")
    with pytest.raises(InvalidInput, match="damaged"):
        home.credentials()
    assert path.read_text() == "{"


def test_a_home_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"cannot write to .*LOCKSTEP_HOME"):
        Home(tmp_path / "file" / "home").prepare()


def test_addresses_of_one_s_own_stack_do_not_make_its_parts_external(home: Home) -> None:
    """After eval "$(lockstep env)", `lockstep up` must still start PostgreSQL."""
    ports = home.choose_ports(load_settings())
    variables = environment(load_settings(home=home.root), home, ports)
    variables["LOCKSTEP_WAREHOUSE_DSN"] = "postgresql://loader@elsewhere/warehouse"
    forget_own(variables)
    assert "LOCKSTEP_POSTGRES_DSN" not in variables
    assert "LOCKSTEP_SPARK_REMOTE" not in variables
    assert variables["LOCKSTEP_WAREHOUSE_DSN"].endswith("@elsewhere/warehouse")


def test_what_the_user_set_is_never_replaced_by_the_stack(home: Home) -> None:
    home.choose_ports(load_settings())
    target = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}
    assert adopt(load_settings(home=home.root), target)
    assert target["AWS_ENDPOINT_URL_S3"] == "http://127.0.0.1:1"
    assert target["LOCKSTEP_POSTGRES_DSN"].startswith("postgresql://lockstep:")


def test_real_aws_means_no_endpoint_and_no_made_up_keys(home: Home) -> None:
    ports = home.choose_ports(load_settings())
    variables = environment(load_settings(home=home.root, s3="aws"), home, ports)
    assert "AWS_ENDPOINT_URL_S3" not in variables
    assert "AWS_ACCESS_KEY_ID" not in variables
    assert variables["AWS_ENDPOINT_URL_SQS"] == f"http://127.0.0.1:{ports['sqs']}"


def test_an_external_postgres_holds_all_databases(home: Home) -> None:
    ports = home.choose_ports(load_settings())
    settings = load_settings(
        home=home.root, postgres_dsn="postgresql://me:pw%40@db.example.com:6432/lockstep?sslmode=require"
    )
    variables = environment(settings, home, ports)
    assert variables["LOCKSTEP_WAREHOUSE_DSN"] == "postgresql://me:pw%40@db.example.com:6432/warehouse?sslmode=require"
    assert variables["DAGSTER_PG_HOST"] == "db.example.com"
    assert variables["DAGSTER_PG_PASSWORD"] == "pw@"


def test_ports_file_is_plain_json(home: Home) -> None:
    home.choose_ports(load_settings())
    assert set(json.loads((home.root / "ports.json").read_text())) == set(home.ports())
