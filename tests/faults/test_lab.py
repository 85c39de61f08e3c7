"""The fault lab in short form: real services and workers under the nemesis for a minute, then the checker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.faults.checker import Promise
from lockstep.kernel.settings import PROJECT_ROOT

pytestmark = [pytest.mark.long, pytest.mark.serial]

PATIENCE_SECONDS = 900


def test_a_minute_of_faults_breaks_no_promise_and_leaves_nothing_behind(tmp_path: Path):
    """Ticks are left to longer runs: their Spark would take most of the minute on two cores."""
    report = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "AWS_"))}
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("lockstep")),
            *("faults", "run", "--seed", "7", "--minutes", "1", "--no-ticks", "--json", str(report)),
        ],
        cwd=PROJECT_ROOT,
        env=environment | {"LOCKSTEP_HOME": str(tmp_path / "home")},
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
