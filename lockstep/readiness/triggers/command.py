"""The command trigger: a program on this machine, as a list of arguments. Only where the deployment allows it.

What belongs here: one bounded run without a shell. What does not: the permission, which the assembly decides by having
this trigger or not.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lockstep.readiness.model import Category, Polled, PollOutcome, Started, StartFailed
from lockstep.readiness.safety import check_argv
from lockstep.readiness.triggers.base import Job, StartAnswer

_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")


class CommandTrigger:
    """Runs the program and waits. A lost answer is never repeated: the program may have done its work."""

    def start(self, job: Job) -> StartAnswer:
        """Success is exit code 0 within the timeout."""
        try:
            argv = check_argv(list(job.options["command"]))
        except ValueError as error:
            return StartFailed(job.token, Category.PERMANENT, str(error))
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**environment, "LOCKSTEP_TOKEN": job.token},
                start_new_session=True,
            )
        except OSError as error:
            return StartFailed(job.token, Category.PERMANENT, f"cannot start: {error.strerror}")
        try:
            _, errors = child.communicate(timeout=job.timeout)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate(timeout=10)
            return StartFailed(job.token, Category.TIMEOUT, f"ended after {job.timeout} s")
        if child.returncode == 0:
            return Started(job.token, {"exit_code": 0}, finished=True)
        words = errors.decode("utf-8", "replace").strip()[-200:]
        return StartFailed(job.token, Category.TRANSIENT, f"exit code {child.returncode}: {words}")

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """It had ended before anybody could ask."""
        return Polled(job.token, PollOutcome.UNKNOWN, message="a command leaves no run")

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """The command runs inside the call that started it."""
        return False
