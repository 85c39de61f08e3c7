"""Evaluators that are programs: JSON on standard input, JSON on standard output, categories by exit code. No shell.

What belongs here: running one program with a bound on time and output. What does not: which programs there are; only
files inside the evaluators' folder are ever run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from lockstep.readiness.evaluators.answer import Question, failed, parse
from lockstep.readiness.model import Category, TraitResult

# The child sees no secret of ours: nothing of the environment is handed on but what programs need to start at all.
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SYSTEMROOT")
_EXIT_PERMANENT: Final = 2
_EXIT_SIGNAL: Final = 128


class ProcessEvaluator:
    """Runs programs of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def evaluate(self, question: Question, program: str) -> TraitResult:
        """The answer, or an ERROR with its category. The whole process group is gone after the trait's timeout."""
        path = (self._folder / program).resolve()
        if not path.is_relative_to(self._folder):
            return failed(question, Category.PERMANENT, "EVALUATOR_ERROR: the program is outside its folder")
        try:
            child = self._start(path)
        except OSError as error:
            return failed(question, Category.PERMANENT, f"EVALUATOR_ERROR: cannot start: {error.strerror}")
        try:
            output, errors = child.communicate(json.dumps(question.body()).encode(), timeout=question.trait.timeout)
        except subprocess.TimeoutExpired:
            _end(child)
            words = f"EVALUATOR_TIMEOUT: no answer within {question.trait.timeout} s"
            return failed(question, Category.TIMEOUT, words)
        return self._judge(question, child.returncode, output, errors)

    def _start(self, path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            start_new_session=True,  # so that its own children end with it
        )

    def _judge(self, question: Question, code: int, output: bytes, errors: bytes) -> TraitResult:
        if code == 0:
            return parse(question, output)
        words = errors.decode("utf-8", "replace").strip()[-200:]
        if code < 0 or code >= _EXIT_SIGNAL:
            category, what = Category.EVALUATOR_CRASH, f"killed by signal {-code if code < 0 else code - _EXIT_SIGNAL}"
        elif code == _EXIT_PERMANENT:
            category, what = Category.PERMANENT, f"exit code {code}"
        else:
            category, what = Category.TRANSIENT, f"exit code {code}"
        return failed(question, category, f"EVALUATOR_ERROR: {what} {words}".strip())


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.communicate(timeout=5)
    except subprocess.TimeoutExpired:  # stuck in the kernel; nothing more can be done about it
        child.poll()
