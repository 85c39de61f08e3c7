"""The stage: the doors of the platform that scenes go through, and what the scenes tell each other.

What belongs here: running a command, asking over HTTP, waiting with a bound, ending everything at once. What does not:
the plot of a scene, and its oracle. Nothing here writes to a store: commands and services do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
import psycopg

from lockstep.kernel.errors import LockstepError, Terminal, Transient
from lockstep.readiness.triggers.dagster import DagsterGraph
from stack.demo.claims import Board, Claim, judge
from stack.environment import LOOPBACK
from stack.lifecycle import Stack

PATIENCE_SECONDS = 420.0  # a bound, not a target: a busy machine takes five times as long
_COMMAND_SECONDS = 420.0
_POLL_SECONDS = 0.5
_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchPipelineExecution(executionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } } ... on InvalidSubsetError { message } }
}"""
_RUN = "query Run($id: ID!) { runOrError(runId: $id) { ... on Run { status startTime endTime } } }"

Say = Callable[[str, str], None]
Result = TypeVar("Result")


class Interrupted(LockstepError):
    """The demo was told to end."""


@dataclass(frozen=True)
class Sizes:
    """How much each scene does."""

    windows: int = 16
    keys: int = 40
    days: int = 5
    agents: int = 3
    ticks: int = 4
    rows: int = 6000
    loss: float = 0.35

    @property
    def chunks(self) -> int:
        """Files of one export job."""
        return self.keys * self.days


SMALL = Sizes(windows=8, keys=6, days=2, agents=2, ticks=2, rows=3000)


class Promise(Generic[Result]):
    """Something that one scene tells another. A scene that ends without telling it breaks it, so that nobody waits."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._value: Result | None = None

    def tell(self, value: Result) -> None:
        """Say it. What was said first counts."""
        if not self._told.is_set():
            self._value = value
            self._told.set()

    def give_up(self) -> None:
        """It will not be said any more."""
        self._told.set()

    @property
    def value(self) -> Result | None:
        """What was said; None if it was not, or never will be."""
        return self._value

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._told.is_set()


@dataclass
class Stage:
    """One performance: a running stack, a token that makes every name fresh, and the board of claims."""

    stack: Stack
    token: str
    sizes: Sizes = Sizes()
    board: Board = field(default_factory=Board)
    say: Say = lambda scene, words: None
    over: threading.Event = field(default_factory=threading.Event)
    links: dict[str, str] = field(default_factory=dict)
    pictures: Path | None = None
    """Where pictures for the documentation go; None: none are taken."""
    backlog: Promise[dict[str, datetime]] = field(default_factory=Promise)
    """The windows scene tells where each vault's watermark will stand at the end."""
    warned: Promise[datetime] = field(default_factory=Promise)
    """The readiness scene tells when the warning was seen: the operator's call."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[str]] = set()
        self._site = self.stack.site()
        self._web = httpx.Client(timeout=30.0)
        self.graph = DagsterGraph(self._web, self.url("dagster"))

    # --- where things are ---------------------------------------------------------------------------------------

    def url(self, part: str) -> str:
        """The address of a service."""
        return f"http://{LOOPBACK}:{self._site.ports[part]}"

    def port(self, part: str) -> int:
        """The port of a service."""
        return self._site.ports[part]

    def setting(self, name: str) -> str:
        """One variable of the stack's environment: an address, for oracles to read from."""
        return self._site.environment[name]

    # --- doors --------------------------------------------------------------------------------------------------

    def command(
        self, scene: str, *words: str, environment: Mapping[str, str] | None = None, codes: tuple[int, ...] = (0,)
    ) -> Any:
        """Run `lockstep …` as a person would, and return what it says as JSON."""
        self.say(scene, "$ lockstep " + " ".join(words))
        done, said, errors = self._run([*words, "--json"], environment or {})
        if done not in codes:
            raise Terminal(
                f"`lockstep {' '.join(words)}` ended with {done}: {(errors or said).strip()[-300:]}",
                next_step="run the command by hand on a stack that is up.",
            )
        return json.loads(said) if said.strip() else None

    def run_quietly(self, *words: str) -> None:
        """Run a command while leaving, whatever comes of it."""
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(self._argv(words), env=self._environment({}), capture_output=True, check=False, timeout=30)

    def _argv(self, words: Iterable[str]) -> list[str]:
        return [sys.executable, "-m", "lockstep.cli", *words]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return os.environ | {"LOCKSTEP_HOME": str(self.stack.home.root)} | dict(more)

    def _run(self, words: list[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        with self._lock:
            self.check()
            child = subprocess.Popen(self._argv(words), env=self._environment(environment), text=True, **pipes)
            self._children.add(child)
        try:
            said, errors = child.communicate(timeout=_COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise Transient(f"`lockstep {words[0]} {words[1]}` did not end in {_COMMAND_SECONDS:.0f} s.") from None
        finally:
            with self._lock:
                self._children.discard(child)
        self.check()
        return child.returncode, said, errors

    def get(self, part: str, path: str, **options: Any) -> Any:
        """Ask a service."""
        answer = self._web.get(self.url(part) + path, **options)
        answer.raise_for_status()
        return answer.json()

    def post(self, part: str, path: str, body: Mapping[str, Any]) -> Any:
        """Tell a service something."""
        answer = self._web.post(self.url(part) + path, json=body, timeout=120)
        answer.raise_for_status()
        return answer.json()

    def post_quietly(self, part: str, path: str, body: Mapping[str, Any]) -> None:
        """Tell a service something while leaving; a service that is gone needs no telling."""
        with suppress(httpx.HTTPError):
            self._web.post(self.url(part) + path, json=body, timeout=5)

    def materialize(self, asset: tuple[str, ...], partition: str) -> str:
        """Press Materialize on one partition: the same call that the Dagster UI makes. Returns the run."""
        selector = {
            "repositoryLocationName": "lockstep",
            "repositoryName": "__repository__",
            "jobName": "__ASSET_JOB",
            "assetSelection": [{"path": list(asset)}],
            "assetCheckSelection": [],
        }
        tags = [{"key": "dagster/partition", "value": partition}]
        params = {"selector": selector, "mode": "default", "executionMetadata": {"tags": tags}}
        answer = self.graph.ask(_LAUNCH, params=params)["launchPipelineExecution"]
        if answer["__typename"] != "LaunchRunSuccess":
            raise Terminal(f"Dagster did not start the run: {answer}", unit="/".join(asset))
        return str(answer["run"]["runId"])

    def finished(self, run_id: str, what: str) -> Mapping[str, Any]:
        """Wait for a run's end. Raises `Terminal` if it did not succeed."""
        run = self.wait(lambda: _ended(self.graph.ask(_RUN, id=run_id)["runOrError"]), what)
        if run["status"] != "SUCCESS":
            raise Terminal(
                f"{what}: the run ended with {run['status']}.", next_step=f"open {self.url('dagster')}/runs/{run_id}."
            )
        return run

    @contextmanager
    def reading(self, database: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection for an oracle, which may only read."""
        with psycopg.connect(self.setting(database), autocommit=True, connect_timeout=10) as connection:
            connection.execute("SET default_transaction_read_only = on")
            connection.execute("SET TimeZone = 'UTC'")
            yield connection

    # --- time ---------------------------------------------------------------------------------------------------

    def wait(self, look: Callable[[], Result | None], what: str, seconds: float = PATIENCE_SECONDS) -> Result:
        """Look again and again until there is something to see. A service that hiccups is asked again."""
        deadline, trouble = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            self.check()
            try:
                found, trouble = look(), ""
            except (httpx.HTTPError, Transient, psycopg.OperationalError) as error:
                found, trouble = None, f" (last answer: {error})"
            if found:
                return found
            self.over.wait(_POLL_SECONDS)
        raise Transient(
            f"{what}: not seen within {seconds:.0f} s{trouble}.",
            next_step=f"open {self.url('dagster')}/runs and `lockstep status`.",
        )

    def check(self) -> None:
        """Raise if the demo was told to end."""
        if self.over.is_set():
            raise Interrupted("the demo was interrupted.")

    def close(self) -> None:
        """End every command that still runs, and wake every scene that waits."""
        self.over.set()
        with self._lock:
            for child in self._children:
                child.terminate()

    def leave(self) -> None:
        """Give back the connections, when every scene has ended."""
        self._web.close()

    # --- claims -------------------------------------------------------------------------------------------------

    def claim(self, scene: str, words: str, expected: object, found: object) -> None:
        """Claim that both are equal."""
        self.board.add(judge(scene, words, expected, found))

    def claim_that(self, scene: str, words: str, expected: str, found: object, holds: bool) -> None:
        """Claim something that is not an equality."""
        self.board.add(Claim(scene, words, expected, str(found), holds))


def _ended(run: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return run if run.get("endTime") is not None else None
