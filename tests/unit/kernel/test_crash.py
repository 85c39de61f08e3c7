"""Crash points: armed ones fire exactly as told, unarmed ones do nothing, none can hide."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lockstep.kernel.crash import CrashInjected, armed, crash_point, declared_points
from lockstep.kernel.errors import InvalidInput, Transient

ROOT = Path(__file__).resolve().parents[3]


def run(spec: str, code: str) -> subprocess.CompletedProcess[str]:
    script = "from lockstep.kernel.crash import crash_point\n" + textwrap.dedent(code)
    environment = {**os.environ, "LOCKSTEP_CRASH": spec}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_unarmed_point_does_nothing() -> None:
    crash_point("demo.step.before")


def test_raise_cannot_be_swallowed_as_an_ordinary_error() -> None:
    """A handler that survives the injected death would make the crash test pass for the wrong reason."""
    with armed("demo.step.before", "raise") as charge, pytest.raises(CrashInjected):
        try:
            crash_point("demo.step.before")
        except Exception:
            pytest.fail("an `except Exception` survived")
    assert charge.fired


def test_error_is_an_ordinary_transient() -> None:
    with armed("demo.step.before", "error"), pytest.raises(Transient):
        crash_point("demo.step.before")


def test_a_point_fires_at_the_nth_pass_only() -> None:
    with armed("demo.step.before", "error", nth=3) as charge:
        crash_point("demo.step.before")
        crash_point("demo.step.before")
        assert not charge.fired
        with pytest.raises(Transient):
            crash_point("demo.step.before")
        crash_point("demo.step.before")
        assert charge.hits == 4


def test_arming_ends_with_the_block_and_nests() -> None:
    with armed("demo.step.before", "error", nth=9), armed("demo.step.after", "error"):
        crash_point("demo.step.before")
        with pytest.raises(Transient):
            crash_point("demo.step.after")
    crash_point("demo.step.after")


def test_hang_ends_at_its_deadline_and_goes_on() -> None:
    with armed("demo.step.before", "hang:0.05") as charge:
        crash_point("demo.step.before")
    assert charge.fired


def test_kill_and_exit_end_the_process_without_cleanup() -> None:
    code = """
    try:
        crash_point("demo.step.before")
        print("passed once", flush=True)
        crash_point("demo.step.before")
    finally:
        print("cleanup", flush=True)
    """
    killed = run("demo.step.before=kill@2", code)
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout == "passed once\n"
    left = run(" other.point.x=kill ; demo.step.before=exit ", code)
    assert (left.returncode, left.stdout) == (137, "")


@pytest.mark.parametrize(
    "spec",
    ["demo", "demo.a=explode", "demo.a=kill@0", "a b=kill", "demo.a=kill:3", "demo.a=hang:x", "x=kill"],
)
def test_a_malformed_order_is_refused_loudly(spec: str) -> None:
    """A typo that arms nothing would let a crash suite pass without a single crash."""
    result = run(spec, "crash_point('demo.a')")
    assert result.returncode != 0
    assert "InvalidInput" in result.stderr


def test_a_clean_process_settles_on_the_cheap_check() -> None:
    code = """
    from lockstep.kernel import crash
    crash_point("demo.step.before")
    print(crash._charges)
    """
    assert run("", code).stdout == "None\n"


def test_every_declared_point_is_listed_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('crash_point("part.step.one")\n\ncrash.crash_point("part.step.two")\n')
    (tmp_path / "b.py").write_text('crash_point("part.step.one")\n')
    assert declared_points(tmp_path) == {"part.step.one": ("a.py:1", "b.py:1"), "part.step.two": ("a.py:3",)}


@pytest.mark.parametrize(
    "source",
    [
        "crash_point(name)",
        'crash_point(f"part.{x}")',
        'crash_point("nodots")',
        "crash_point()",
        "from lockstep.kernel.crash import crash_point as cp",
    ],
)
def test_a_point_that_cannot_be_listed_is_an_error(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.py").write_text(source + "\n")
    with pytest.raises(InvalidInput):
        declared_points(tmp_path)


def test_the_domain_declares_only_listable_points() -> None:
    declared_points(ROOT / "lockstep")
