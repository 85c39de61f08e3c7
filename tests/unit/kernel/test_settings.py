"""Settings: what a person sees when a value is wrong, and what nobody sees of a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import load_settings

DSN = "postgresql://app:hunter2@db.example.com/lockstep"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_any_setting_every_part_is_embedded() -> None:
    settings = load_settings()
    assert not any(settings.external(part) for part in ("postgres", "s3", "sqs", "dynamodb", "spark"))


@pytest.mark.parametrize(
    ("variable", "value", "example"),
    [
        ("LOCKSTEP_POSTGRES_PORT", "70000", "LOCKSTEP_POSTGRES_PORT=5432"),
        ("LOCKSTEP_SPARK_REMOTE", "http://spark:15002", "LOCKSTEP_SPARK_REMOTE=sc://"),
        ("LOCKSTEP_POSTGRES_DSN", "mysql://x", "LOCKSTEP_POSTGRES_DSN=postgresql://"),
        ("LOCKSTEP_S3", "minio", "LOCKSTEP_S3=embedded"),
        ("LOCKSTEP_WAREHOUSE_DIALECT", "oracle", "LOCKSTEP_WAREHOUSE_DIALECT=postgres"),
        ("LOCKSTEP_SPARK_MEMORY", "lots", "LOCKSTEP_SPARK_MEMORY=1g"),
    ],
)
def test_a_bad_value_is_named_with_an_example(
    variable: str, value: str, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidInput) as refusal:
        load_settings()
    assert f"{variable}:" in str(refusal.value)
    assert example in str(refusal.value)


def test_every_bad_value_is_listed_and_not_only_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_S3", "minio")
    monkeypatch.setenv("LOCKSTEP_SQS_PORT", "nine")
    with pytest.raises(InvalidInput) as refusal:
        load_settings()
    assert len(refusal.value.problems) == 2


def test_a_misspelt_variable_is_refused_instead_of_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against LOCKSTEP_POSTGRESS_DSN starting the embedded database in production."""
    monkeypatch.setenv("LOCKSTEP_POSTGRESS_DSN", DSN)
    with pytest.raises(InvalidInput, match="LOCKSTEP_POSTGRESS_DSN"):
        load_settings()


@pytest.mark.parametrize("variable", ["LOCKSTEP_VAULT_1000020_USER", "LOCKSTEP_VAULT_MY_VAULT_PASSWORD"])
def test_the_login_of_any_vault_is_a_known_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "x")
    load_settings()


@pytest.mark.parametrize("variable", ["LOCKSTEP_VAULT_1000020_PASWORD", "LOCKSTEP_VAULT_URL", "LOCKSTEP_VAULTS_USER"])
def test_a_misspelt_login_of_a_vault_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rule for vaults from opening the door to every typing error."""
    monkeypatch.setenv(variable, "x")
    with pytest.raises(InvalidInput, match=variable):
        load_settings()


def test_redshift_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_WAREHOUSE_DIALECT", "redshift")
    with pytest.raises(InvalidInput, match="LOCKSTEP_WAREHOUSE_DSN: must be set"):
        load_settings()


def test_a_secret_is_in_no_text_form_of_the_settings_nor_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_POSTGRES_DSN", DSN)
    settings = load_settings()
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    monkeypatch.setenv("LOCKSTEP_POSTGRES_DSN", DSN.replace("postgresql", "mysql"))
    with pytest.raises(InvalidInput) as refusal:
        load_settings()
    assert "hunter2" not in str(refusal.value)


def test_a_variable_wins_over_the_file_and_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lockstep.toml").write_text('aws_region = "eu-west-1"\nlake_bucket = "from-file"\n')
    monkeypatch.setenv("LOCKSTEP_LAKE_BUCKET", "from-variable")
    settings = load_settings()
    assert (settings.aws_region, settings.lake_bucket) == ("eu-west-1", "from-variable")


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "lockstep.toml").write_text("aws_region = eu-west-1\n")
    with pytest.raises(InvalidInput, match=r"lockstep\.toml cannot be read"):
        load_settings()


def test_a_key_of_the_file_that_no_setting_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lockstep.toml").write_text('postgress_dsn = "postgresql://x"\n')
    with pytest.raises(InvalidInput, match=r"postgress_dsn in lockstep\.toml: unknown"):
        load_settings()
