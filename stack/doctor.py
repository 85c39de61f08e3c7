"""Examines the machine and the stack, and says what to do about each finding. Changes nothing but damaged jars."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from lockstep.kernel.errors import LockstepError
from lockstep.selftest.probe import await_result, submit
from stack import jars, java
from stack.environment import LOOPBACK
from stack.health import aws_client, daemon_beats
from stack.lifecycle import Stack

DEEP_SECONDS = 300
DEEP_NEEDS = ("postgres", "sqs", "s3", "spark", "dagster-code", "dagster", "dagster-daemon")


class Finding(NamedTuple):
    """One line of the examination."""

    state: str
    subject: str
    words: str


def examine(stack: Stack, *, deep: bool) -> list[Finding]:
    """Look at everything, from the interpreter to the stack's own work."""
    findings = [*_machine(stack), *_parts(stack)]
    if deep:
        missing = [f.subject for f in findings if f.state != "ok" and f.subject in DEEP_NEEDS]
        findings += _deep(stack) if not missing and stack.home.ports() else [_not_deep(missing)]
    return findings


def _machine(stack: Stack) -> Iterator[Finding]:
    yield Finding("ok", "python", sys.version.split()[0])
    version = subprocess.run([java.java(), "-version"], capture_output=True, text=True, check=False)
    good = version.returncode == 0
    yield Finding("ok" if good else "bad", "java", version.stderr.splitlines()[0] if good else "run `make setup`")
    warning = java.java_home_warning()
    if warning:
        yield Finding("warn", "java", warning)
    yield _archives()
    free = shutil.disk_usage(stack.home.root if stack.home.root.exists() else stack.home.root.parent).free / 1e9
    yield Finding("ok" if free > 2 else "bad", "disk", f"{free:.1f} GB free" + ("" if free > 2 else "; free some"))
    try:
        stack.home.prepare()
        yield Finding("ok", "home", str(stack.home.root))
    except LockstepError as error:
        yield Finding("bad", "home", str(error))


def _archives() -> Finding:
    try:
        fetched = jars.fetch()
    except LockstepError as error:
        return Finding("bad", "jars", str(error))
    words = f"{fetched} missing or damaged archives fetched again" if fetched else "all archives match their checksums"
    return Finding("warn" if fetched else "ok", "jars", words)


def _parts(stack: Stack) -> Iterator[Finding]:
    lines = stack.status()
    if not lines:
        yield Finding("warn", "stack", "not started yet; `lockstep up` starts it")
    for line in lines:
        words = line.address or "works" if line.healthy else f"{line.detail}; see `lockstep logs {line.name}`"
        yield Finding("ok" if line.healthy else "bad", line.name, words)
    yield from _second_daemon(stack, [line.name for line in lines if line.healthy])


def _second_daemon(stack: Stack, healthy: list[str]) -> Iterator[Finding]:
    """Another daemon on the same Dagster storage: data is safe, but everything is asked for twice."""
    if not {"postgres", "dagster-daemon"}.issubset(healthy):
        return
    beats = daemon_beats(stack.site(), since=stack.started("dagster-daemon"))
    if len(beats) > 1:
        words = (
            f"{len(beats)} daemons work on one Dagster instance ({', '.join(sorted(beats))}); stop all but the stack's"
        )
        yield Finding("bad", "dagster-daemon", words)


def _deep(stack: Stack) -> list[Finding]:
    """Send one message through SQS, the sensor, a run, Spark, Delta on S3 and an asset check; show where time went."""
    site = stack.site()
    with closing(aws_client("sqs", site)) as sqs:
        token = submit(sqs)
    address = f"http://{LOOPBACK}:{site.ports['dagster']}"
    try:
        result = await_result(address, token, sent_at=time.time(), timeout=DEEP_SECONDS)
    except LockstepError as error:
        return [Finding("bad", "self-test", str(error))]
    steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.steps.items())
    return [
        Finding("ok", "self-test", f"{result.detail} in {result.total:.1f} s ({steps})"),
        Finding("ok", "look", f"{address}/runs/{result.run_id}"),
    ]


def _not_deep(missing: list[str]) -> Finding:
    why = f"it needs {', '.join(missing)}" if missing else "the stack is not started"
    return Finding("bad", "self-test", f"not run: {why}; `lockstep up` starts it")
