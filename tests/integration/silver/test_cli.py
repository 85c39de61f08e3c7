"""The commands of people: each says what it did, in words and in JSON, and each deed is in the audit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import operations_cli
from lockstep.ticks.silver.cli import silver
from tests.silver_world import Planned, World, row

pytestmark = pytest.mark.stack

ticks = typer.Typer()
operations_cli.register(ticks)


def _run(app: typer.Typer, *words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.output)


def test_status_replay_reconcile_redrive_and_retention_say_what_they_did(deployed: World):
    world, project = deployed, deployed.project()
    world.commit(project, Planned({"orders": [row(1)]}), Planned({"orders": [row(None)]}))
    world.drain(project)
    shown = _run(ticks, "status", code=1)
    (mine,) = [one for one in shown["projects"] if one["project"] == project.project_id]
    assert (mine["applied"], mine["waiting"], mine["next"]) == (1, 1, project.ticks[1])
    assert mine["state"].startswith("parked: ")
    world.correct(project, project.ticks[1], Planned({"orders": [row(2, "mended")]}))
    replayed = _run(silver, "replay", "--tick", project.ticks[1], "--reason", "mended")["replayed"]
    assert replayed[0]["from"] == 2
    assert world.queue.depth().total == 1
    world.drain(project)
    world.assert_equals_oracle(project)
    whole = _run(silver, "replay", "--project", project.project_id, "--reason", "all of it")["replayed"]
    assert (whole[0]["from"], whole[0]["generation"]) == (1, 3)
    world.drain(project)
    world.assert_equals_oracle(project)
    assert all(one["tick"] not in project.ticks for one in _run(ticks, "reconcile")["enqueued"])
    world.dead_letters.send([world.message(project.ticks[0])])
    assert _run(ticks, "redrive-dlq")["messages"] == [{"tick": project.ticks[0], "what": "dropped, it is in silver"}]
    would = _run(ticks, "retention", "--days", "1", "--dry-run")
    assert f"{project.project_id}/orders" in would["tables"]
    done = world.ask("SELECT action FROM ticks.audit ORDER BY id DESC LIMIT 4")
    assert [one[0] for one in done] == ["ticks-redrive-dlq", "ticks-reconcile", "silver-replay", "silver-replay"]


def test_skip_says_what_it_left_out_and_status_keeps_showing_it(deployed: World):
    world, project = deployed, deployed.project()
    world.commit(project, Planned({"orders": [row(None)]}), Planned({"orders": [row(2)]}))
    world.drain(project)
    words = ["skip", "--tick", project.ticks[0], "--reason", "a broken export"]
    with pytest.raises(InvalidInput, match="without the rows"):
        CliRunner().invoke(silver, words, catch_exceptions=False)
    (said,) = _run(silver, *words, "--accept-gap")["skipped"]
    assert (said["tick"], said["project"], said["generation"]) == (project.ticks[0], project.project_id, 2)
    world.leave_out(project, project.ticks[0])
    world.drain(project)
    world.assert_equals_oracle(project)
    result = CliRunner().invoke(ticks, ["status", "--json"], catch_exceptions=False)
    shown = json.loads(result.output)
    (mine,) = [one for one in shown["skipped"] if one["project_id"] == project.project_id]
    assert (mine["tick_id"], mine["reason"]) == (project.ticks[0], "a broken export")
    assert shown["skipped_ticks"] == len(shown["skipped"])
    plain = CliRunner().invoke(ticks, ["status"], catch_exceptions=False).output
    assert "a broken export" in plain


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "--reason", "x"],
        ["replay", "--tick", "nobody", "--reason", "x"],
        ["replay", "--tick", "a", "--project", "b", "--reason", "x"],
        ["replay", "--from", "yesterday", "--reason", "x"],
        ["replay", "--from", "2100-01-01", "--reason", "x"],
        ["replay", "--tick", "a", "--reason", " "],
    ],
)
def test_a_replay_that_names_nothing_sensible_is_refused_and_changes_nothing(deployed: World, words: list[str]):
    before = deployed.ask("SELECT count(*) FROM ticks.audit")
    with pytest.raises(InvalidInput):
        CliRunner().invoke(silver, words, catch_exceptions=False)
    assert deployed.ask("SELECT count(*) FROM ticks.audit") == before
