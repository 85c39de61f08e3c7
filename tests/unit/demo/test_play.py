"""Playing: a scene that fails stops no other, an interruption ends everything, and every wait has an end."""

from __future__ import annotations

import _thread
import io
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lockstep.kernel.errors import Terminal, Transient
from lockstep.readiness import config
from stack.demo import play as plays
from stack.demo import readiness
from stack.demo.stage import Interrupted, Promise, Sizes, Stage

NOW = datetime(2026, 3, 1, 12, 34, 56, tzinfo=UTC)


@pytest.fixture
def stage() -> Stage:
    """A stage whose stack is only addresses: nothing here talks to it."""
    site = SimpleNamespace(ports=dict.fromkeys(("dagster", "exports"), 1), environment={})
    home = SimpleNamespace(root="/nowhere")
    return Stage(SimpleNamespace(site=lambda: site, home=home), "abc123")  # type: ignore[arg-type]


def _quiet() -> Console:
    return Console(file=io.StringIO(), width=160)


def _good(stage: Stage) -> None:
    stage.claim("exports", "two is two", 2, 2)


def _bad(stage: Stage) -> None:
    raise Terminal("the source is gone.", unit="ticks", next_step="look for it.")


def _patient(stage: Stage) -> None:
    stage.wait(lambda: None, "never")


def test_a_scene_that_fails_is_a_failed_claim_and_the_others_go_on(stage: Stage):
    plays.play(stage, _quiet(), {"ticks": _bad, "exports": _good})
    claims = plays.ordered(stage.board)
    assert [(claim.scene, claim.ok) for claim in claims] == [("exports", True), ("ticks", False)]
    assert claims[1].found == "ticks: the source is gone. Next: look for it."


def test_a_scene_that_fails_breaks_its_promises_so_that_nobody_waits_for_it(stage: Stage):
    def waits(stage: Stage) -> None:
        stage.wait(lambda: stage.backlog.settled, "the backlog", 20)
        stage.claim("readiness", "no backlog was told", None, stage.backlog.value)

    plays.play(stage, _quiet(), {"windows": _bad, "readiness": waits})
    assert [claim.ok for claim in plays.ordered(stage.board)] == [False, True]


def test_ctrl_c_ends_every_scene_and_claims_nothing(stage: Stage):
    threading.Timer(0.5, _thread.interrupt_main).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        plays.play(stage, _quiet(), {"windows": _patient, "ticks": _patient})
    assert stage.over.is_set()
    assert stage.board.claims() == []
    assert time.monotonic() - started < 60, "nobody waited for the patience of a scene"


def test_closing_the_stage_ends_its_commands(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    """Guards "leaves nothing behind": a command that outlives the demo would write to a stack that goes down."""
    monkeypatch.setattr(stage, "_argv", lambda words: [sys.executable, "-c", "import time; time.sleep(120)"])
    threading.Timer(0.5, stage.close).start()
    with pytest.raises(Interrupted):
        stage.command("windows", "vault", "list")
    assert stage._children == set()
    with pytest.raises(Interrupted):
        stage.command("windows", "vault", "list")


def test_a_command_that_fails_says_which_and_why(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    program = "import sys; print('no such vault', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(stage, "_argv", lambda words: [sys.executable, "-c", program])
    with pytest.raises(Terminal, match=r"lockstep vault show.*no such vault"):
        stage.command("windows", "vault", "show")
    assert stage.command("windows", "vault", "show", codes=(0, 1)) is None


def test_a_wait_ends_and_tells_the_last_trouble(stage: Stage):
    def away() -> Any:
        raise Transient("the service is away")

    with pytest.raises(Transient, match=r"the lane: not seen within 0 s.*the service is away"):
        stage.wait(away, "the lane", 0.2)
    assert stage.wait(lambda: "there", "the lane", 0.2) == "there"


def test_a_promise_keeps_what_was_said_first():
    promise: Promise[int] = Promise()
    assert not promise.settled
    promise.tell(1)
    promise.tell(2)
    promise.give_up()
    assert (promise.value, promise.settled) == (1, True)


def test_the_demos_mart_is_a_pipeline_that_readiness_takes():
    targets = {"1001": NOW - timedelta(days=3), "1002": NOW - timedelta(days=2)}
    described = readiness.pipeline("demo-mart-abc123", targets, NOW)
    plan = config.parse_pipeline(described, config.load([config.shipped_folder()]))
    assert plan.pipeline == "demo-mart-abc123"
    limits = [trait.config["maxLagSeconds"] for trait in plan.traits if "vault" in trait.config]
    behind = [(NOW - stop + timedelta(minutes=15)).total_seconds() for stop in targets.values()]
    there = [(NOW - stop).total_seconds() for stop in targets.values()]
    assert all(here < limit < late for here, limit, late in zip(there, limits, behind, strict=True)), (
        "a vault that is through passes for a while, one that is a window behind does not"
    )


def test_the_demo_exports_two_hundred_files_by_default():
    assert Sizes().chunks == 200
