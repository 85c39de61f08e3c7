"""The commands about projects, against a real database."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from lockstep.kernel.errors import InvalidInput
from lockstep.ticks.cli import ticks
from lockstep.ticks.projects import Keyring, ProjectStore
from tests.ticks_world import World

pytestmark = pytest.mark.stack

PROJECT = "0192f0c4-7f3a-7c11-9d6e-0d5b8a3f4e21"
Run = Callable[..., Result]


@pytest.fixture
def lockstep(world: World, monkeypatch: pytest.MonkeyPatch) -> Run:
    assert world.settings.postgres_dsn is not None
    monkeypatch.setenv("LOCKSTEP_POSTGRES_DSN", world.settings.postgres_dsn.get_secret_value())
    return lambda *words: CliRunner().invoke(ticks, list(words), catch_exceptions=True)


def test_a_project_is_added_listed_rotated_and_revoked(world: World, lockstep: Run):
    store = ProjectStore(world.state, Keyring(world.settings.ticks_keys))
    made = json.loads(lockstep("project", "add", "--org", "cli-org", "--project", PROJECT, "--json").stdout)
    assert set(made) == {"org_id", "project_id", "api_secret"}
    assert (made["org_id"], made["project_id"]) == ("cli-org", PROJECT)
    assert store.authenticate("cli-org", made["api_secret"]) is not None
    assert isinstance(lockstep("project", "add", "--org", "cli-org", "--project", PROJECT).exception, InvalidInput)

    listed = lockstep("project", "list", "--json").stdout
    (one,) = [one for one in json.loads(listed) if one["project_id"] == PROJECT]
    assert (one["secrets"], one["ticks"], one["revoked"]) == (1, 0, None)
    assert made["api_secret"] not in listed + lockstep("project", "list").stdout

    again = json.loads(lockstep("project", "rotate", PROJECT, "--json").stdout)
    assert again["api_secret"] != made["api_secret"]
    assert store.authenticate("cli-org", made["api_secret"]) is not None
    assert lockstep("project", "revoke", PROJECT).exit_code == 0
    assert store.authenticate("cli-org", again["api_secret"]) is None
    assert isinstance(lockstep("project", "revoke", PROJECT).exception, InvalidInput)


@pytest.mark.parametrize(
    "words", [("--org", "../x"), ("--org", ""), ("--org", "a", "--project", "1"), ("--org", "a", "--tables", "a b")]
)
def test_bad_names_are_refused_and_nothing_is_added(world: World, lockstep: Run, words: tuple[str, ...]):
    before = world.ask("SELECT count(*) FROM ticks.project")
    assert isinstance(lockstep("project", "add", *words).exception, InvalidInput)
    assert world.ask("SELECT count(*) FROM ticks.project") == before
