"""`make setup`: the one line that a newcomer reads when it cannot go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stack import bootstrap


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (2, 7)])
def test_a_wrong_python_is_refused_in_one_line(version: tuple[int, int]) -> None:
    with pytest.raises(bootstrap.SetupError) as refusal:
        bootstrap.check_python(version)
    assert "3.11 to 3.13" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(bootstrap.SetupError, match=r"disk full: .* 1\.0 GB free"):
        bootstrap.check_disk(tmp_path, free_bytes=10**9)
    bootstrap.check_disk(tmp_path, free_bytes=10**11)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("error: Failed to fetch: `…`\n  Caused by: dns error", "no network"),
        ("ERROR: No matching distribution found for uv==1", "no network"),
        ("OSError: [Errno 28] No space left on device", "disk full"),
        ("error: Failed to install\n Caused by: No space left on device (os error 28)", "disk full"),
        ("The virtual environment was not created: ensurepip is not available.", "python3-venv"),
        ("line one\nsomething else broke\n", "something else broke"),
    ],
)
def test_a_tool_s_failure_becomes_one_line_that_says_what_to_do(output: str, words: str) -> None:
    line = bootstrap.explain(output, "the Python packages")
    assert words in line
    assert "\n" not in line


def test_without_a_network_the_whole_command_ends_with_one_line(tmp_path: Path) -> None:
    """Runs the real script in an empty folder whose only way out is a closed port."""
    (tmp_path / "stack").mkdir()
    script = tmp_path / "stack" / "bootstrap.py"
    script.write_text(Path(bootstrap.__file__).read_text())
    for name in ("requirements.lock", "pyproject.toml", "stack/jars.lock"):
        (tmp_path / name).write_bytes((bootstrap.ROOT / name).read_bytes())
    closed = "http://127.0.0.1:9"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"PATH": "/usr/bin:/bin", "HTTPS_PROXY": closed, "HTTP_PROXY": closed, "PIP_RETRIES": "0"}
        | {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("setup: no network")
    assert done.stderr.count("\n") == 1


def test_the_pinned_block_of_a_package_carries_its_hashes() -> None:
    lock = "aaa==1 \\\n    --hash=sha256:1\nuv==0.9 \\\n    --hash=sha256:2 \\\n    --hash=sha256:3\nzzz==1\n"
    assert bootstrap.requirement_block("uv", lock) == "uv==0.9 \\\n    --hash=sha256:2 \\\n    --hash=sha256:3"


def test_the_locks_name_packages_and_no_address() -> None:
    """A lock with an index address would break every machine behind a mirror."""
    for name in ("requirements.lock", "stack/jars.lock"):
        assert "://" not in (bootstrap.ROOT / name).read_text()
