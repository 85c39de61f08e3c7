"""The fault lab in short form: real services and workers under the nemesis for a minute, then the checker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lockstep.faults.checker import Promise
from lockstep.kernel.settings import PROJECT_ROOT

pytestmark = [pytest.mark.long, pytest.mark.serial]

PATIENCE_SECONDS = 900


def _words(*options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("lockstep")), "faults", "run", "--seed", "7", "--no-ticks", *options]


def _environment(home: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "AWS_"))}
    return own | {"LOCKSTEP_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def test_a_lab_that_is_told_to_end_takes_everything_with_it(tmp_path: Path):
    """Guards SIGTERM, as a CI that gives up sends it: services and workers of the lab have sessions of their own."""
    home = tmp_path / "home"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(_words("--minutes", "5"), cwd=PROJECT_ROOT, env=_environment(home), **pipes) as lab:
        assert any("clients write and faults happen" in line for line in lab.stdout)
        lab.send_signal(signal.SIGTERM)
        lab.communicate(timeout=PATIENCE_SECONDS)
    assert lab.returncode == 130
    assert not (home / "faults-7").exists()
    assert [process for process in psutil.process_iter() if _home_of(process).startswith(str(home))] == []


def _home_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("LOCKSTEP_HOME", "")
    except psutil.Error:
        return ""


def test_a_minute_of_faults_breaks_no_promise_and_leaves_nothing_behind(tmp_path: Path):
    """Ticks are left to longer runs: their Spark would take most of the minute on two cores."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        _words("--minutes", "1", "--json", str(report)),
        cwd=PROJECT_ROOT,
        env=_environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(report.read_text("utf-8"))
    assert found["by_promise"] == dict.fromkeys((promise.value for promise in Promise), 0)
    assert found["fault_count"] >= 10
    assert found["operations"]["write"]["ok"] >= 10
    assert found["units"]["windows"] >= 5
    assert found["units"]["executions"] >= 5
    assert found["units"]["job starts"] >= 3
    assert not (tmp_path / "home" / "faults-7").exists()
