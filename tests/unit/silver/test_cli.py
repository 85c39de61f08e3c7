"""`lockstep silver` without a stack: what its options mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from lockstep.ticks.silver import cli, operations
from lockstep.ticks.silver.model import Lane
from lockstep.ticks.silver.store import Actor


def test_a_replay_is_asked_for_as_alerts_and_errors_spell_it(monkeypatch: pytest.MonkeyPatch):
    """Guards the person on call: `silver replay --tick ID` stands in alerts, and must not ask for more."""
    asked: list[tuple[list[str], str]] = []

    @contextmanager
    def opened() -> Iterator[object]:
        yield object()

    def replay_ticks(parts: object, ticks: list[str], actor: Actor, *, named: bool) -> list[Lane]:
        asked.append((ticks, actor.reason))
        return [Lane("acme", "p", 4, 2)]

    monkeypatch.setattr(cli, "opened", opened)
    monkeypatch.setattr(cli, "find_stack", lambda: None)
    monkeypatch.setattr(operations, "replay_ticks", replay_ticks)
    for words, reason in ((["--tick", "t5"], "replay"), (["--tick", "t5", "--reason", "mended"], "mended")):
        done = CliRunner().invoke(cli.silver, ["replay", *words, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert json.loads(done.output)["replayed"][0]["from"] == 5
        assert asked.pop() == (["t5"], reason)
