"""The parts' command lines: loopback only, no secret on them, and a database folder that is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import load_settings
from stack import parts
from stack.environment import environment
from stack.home import Home
from stack.java import java_home, java_home_warning
from stack.supervisor import render


@pytest.fixture
def site(home_folder: Path) -> parts.Site:
    settings = load_settings(home=home_folder / "home with 100% space")
    home = Home(settings.home)
    home.prepare()
    ports = home.choose_ports(settings)
    return parts.Site(settings, home, ports, environment(settings, home, ports))


def test_no_command_line_carries_a_secret(site: parts.Site) -> None:
    """Command lines are readable by every user of a machine."""
    made = site.home.credentials()
    hidden = {made["postgres_password"], made["aws_secret_access_key"], made["supervisor_password"]}
    for part in parts.PARTS:
        assert not hidden.intersection(" ".join(part.command(site)).split())
        assert not [secret for secret in hidden if secret in " ".join(part.command(site))]


def test_options_of_the_database_win_and_what_is_none_is_refused(site: parts.Site) -> None:
    settings = load_settings(home=site.home.root, postgres_options="max_connections=7 custom.pair=a=b")
    words = parts.PARTS[0].command(parts.Site(settings, site.home, site.ports, site.environment))
    assert {"max_connections=7", "custom.pair=a=b", "jit=off"} <= set(words)
    assert "max_connections=200" not in words
    for bad in ("fsync", "fsync off", "FSYNC=off", "a=1  b=2"):
        with pytest.raises(InvalidInput, match="LOCKSTEP_POSTGRES_OPTIONS"):
            load_settings(postgres_options=bad)


def test_the_process_manager_s_file_survives_percent_signs_and_spaces(site: parts.Site) -> None:
    from supervisor.options import UnhosedConfigParser

    parser = UnhosedConfigParser()
    parser.read_string(render(site, parts.PARTS))
    assert {f"program:{part.name}" for part in parts.PARTS} <= set(parser.sections())
    environment_line = parser.get("program:postgres", "environment", raw=True)
    assert str(site.home.root).replace("%", "%%") in environment_line


def test_asking_for_one_part_brings_what_it_needs_and_nothing_else() -> None:
    names = [part.name for part in parts.select(["dagster-daemon"], load_settings())]
    assert names == ["postgres", "dagster-code", "dagster-daemon"]


def test_an_unknown_part_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"unknown part: kafka.*postgres"):
        parts.select(["kafka"], load_settings())


def test_an_external_part_is_never_started() -> None:
    settings = load_settings(s3="aws", postgres_dsn="postgresql://db/lockstep", spark_mode="classic")
    names = {part.name for part in parts.select([], settings)}
    assert names.isdisjoint({"s3", "postgres", "spark"})
    assert {"sqs", "dynamodb", "dagster"} <= names


def _postgres(site: parts.Site) -> parts.Part:
    return next(part for part in parts.PARTS if part.name == "postgres")


def test_a_half_written_database_folder_is_moved_aside_and_a_whole_one_is_made(site: parts.Site) -> None:
    data = site.home.data("postgres")
    data.mkdir(parents=True)
    (data / "base").mkdir()
    (data.parent / "postgres.making-1").mkdir()
    parts.ensure_system_users([_postgres(site)])  # as a start does first: a new machine has no such user
    _postgres(site).prepare(site)
    assert (data / "PG_VERSION").exists()
    assert (data / "global" / "pg_control").exists()
    assert (data.parent / "postgres.incomplete-0" / "base").is_dir()
    assert not (data.parent / "postgres.making-1").exists()


def test_a_damaged_database_folder_is_refused_and_left_as_it_is(site: parts.Site) -> None:
    """Starting empty beside damaged data would look like data loss."""
    data = site.home.data("postgres")
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("18\n")
    with pytest.raises(InvalidInput, match="damaged"):
        _postgres(site).prepare(site)
    assert [path.name for path in data.iterdir()] == ["PG_VERSION"]


@pytest.mark.parametrize(("folder", "words"), [("/no/such/java", "is not a Java runtime"), (None, None)])
def test_a_wrong_java_home_is_named_and_ignored(
    folder: str | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", folder or java_home())
    warning = java_home_warning()
    assert (words in warning if words else warning is None) if warning else words is None


def test_the_page_of_settings_is_current() -> None:
    from stack.cli import settings_page

    assert (parts.PROJECT_ROOT / "docs" / "settings.md").read_text() == settings_page()
