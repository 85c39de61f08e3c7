"""Playing the demo: the stack comes up, four scenes play at the same time, their claims are summed up, all goes down.

What belongs here: the order of these, what the terminal shows meanwhile, and leaving nothing behind. What does not:
what a scene does.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from lockstep.kernel.errors import LockstepError
from stack.demo import exports, readiness, ticks, windows
from stack.demo.claims import Board, Claim, all_hold, broken, document, table
from stack.demo.stage import Interrupted, Sizes, Stage
from stack.lifecycle import Stack

Scene = Callable[[Stage], None]
SCENES: dict[str, Scene] = {
    windows.SCENE: windows.play,
    exports.SCENE: exports.play,
    ticks.SCENE: ticks.play,
    readiness.SCENE: readiness.play,
}
_REFRESH_SECONDS = 0.25
_QUIET_SECONDS = 5.0
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Outcome:
    """What a performance came to."""

    claims: list[Claim]
    seconds: float
    links: dict[str, str]

    @property
    def holds(self) -> bool:
        """Whether every claim holds."""
        return all_hold(self.claims)

    def write(self, path: Path) -> None:
        """Keep it for machines."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document(self.claims, self.seconds, self.links), indent=2) + "\n")


def perform(
    stack: Stack, console: Console, *, keep: bool, sizes: Sizes | None = None, pictures: Path | None = None
) -> Outcome:
    """Play everything. A stack that ran before stays up; one that was started here goes down unless it is kept."""
    started, own = time.monotonic(), not _runs(stack)
    try:
        console.print("[bold]The stack[/]: PostgreSQL, DynamoDB, SQS, S3, Spark, Dagster and the services, all real")
        console.print(f"  healthy after {stack.up():.1f} s", highlight=False)
        stage = Stage(stack, secrets.token_hex(3), sizes or Sizes(), pictures=pictures)
        console.print(f"[bold]Four scenes at once[/], every name of this run ends in {stage.token}")
        play(stage, console)
        stage.leave()
        outcome = Outcome(ordered(stage.board), time.monotonic() - started, _links(stage))
        console.print(table(outcome.claims))
        for words, address in outcome.links.items():
            console.print(f"  {words:<32} {address}", highlight=False, soft_wrap=True)
    except BaseException:
        if own:
            stack.down()
        raise
    if own and not keep:
        stack.down()
    return outcome


def _runs(stack: Stack) -> bool:
    try:
        stack.running()
    except LockstepError:
        return False
    return True


def play(stage: Stage, console: Console, scenes: dict[str, Scene] | None = None) -> None:
    """Play the scenes at the same time and return when all have ended. One that fails stops no other.

    Ctrl-C ends them all: their commands are terminated, what they changed at the vendor is put right.
    """
    scenes = scenes or SCENES
    with (
        _display(stage, console, list(scenes)) as show,
        ThreadPoolExecutor(len(scenes), thread_name_prefix="scene") as pool,
    ):
        running = {name: pool.submit(_guarded, stage, name, scene) for name, scene in scenes.items()}
        try:
            while any(not one.done() for one in running.values()):
                show(running)
                time.sleep(_REFRESH_SECONDS)
            show(running)
        except BaseException:
            stage.close()
            raise
    stage.close()


def _guarded(stage: Stage, name: str, scene: Scene) -> None:
    """Play one scene; whatever goes wrong becomes a claim that fails, with its reason."""
    try:
        scene(stage)
        stage.say(name, "done")
    except Interrupted:
        stage.say(name, "interrupted")
    except Exception as error:  # a scene must not take the others with it
        stage.board.add(broken(name, error))
        stage.say(name, f"failed: {error}")
    finally:
        if name == windows.SCENE:
            stage.backlog.give_up()
        if name == readiness.SCENE:
            stage.warned.give_up()


def ordered(board: Board) -> list[Claim]:
    """The claims scene by scene, each in the order in which they were made."""
    return [claim for name in SCENES for claim in board.claims(name)]


def _links(stage: Stage) -> dict[str, str]:
    base = stage.url("dagster")
    return {**stage.links, "all runs": f"{base}/runs", "sensors and schedules": f"{base}/automation"}


@contextmanager
def _display(stage: Stage, console: Console, names: list[str]) -> Iterator[Callable[[dict[str, Future[None]]], None]]:
    """What each scene is doing: a live table on a terminal, a line for each change where there is none."""
    doing, lock, started = dict.fromkeys(names, ""), threading.Lock(), time.monotonic()
    printed: dict[str, tuple[str, float]] = {}

    def say(scene: str, words: str) -> None:
        with lock:
            if doing.get(scene) == words:
                return
            doing[scene] = words
            shape, now = _DIGITS.sub("", words), time.monotonic()
            before, at = printed.get(scene, ("", 0.0))
            if shape == before and now - at < _QUIET_SECONDS:
                return  # a count that goes on; a log need not have every step of it
            printed[scene] = shape, now
        if not console.is_terminal:
            console.print(
                f"{time.monotonic() - started:6.1f} s  {scene:<10} {escape(words)}", highlight=False, soft_wrap=True
            )

    stage.say = say

    def picture(running: dict[str, Future[None]]) -> Table:
        shown = Table(box=None, pad_edge=False, show_header=False)
        with lock:
            lines = dict(doing)
        for name, words in lines.items():
            claims = stage.board.claims(name)
            bad = sum(not claim.ok for claim in claims)
            sign = "[green]done[/]" if running[name].done() else f"{time.monotonic() - started:.0f} s"
            score = f"[green]{len(claims) - bad}[/]" + (f" [red]{bad} failed[/]" if bad else "")
            shown.add_row(f"  [bold]{name}[/]", sign, score, escape(words))
        return shown

    if not console.is_terminal:
        yield lambda running: None
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield lambda running: live.update(picture(running))
