"""The stack of the tests is stopped by the last run that uses it, and by no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.kernel.settings import PROJECT_ROOT
from tests.sharing import Users

JOIN = "import sys; from pathlib import Path; from tests.sharing import Users; u = Users(Path(sys.argv[1])); u.join()"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file whose lock is shared."""
    return tmp_path / "stack.users"


def test_a_run_that_is_alone_is_the_last(file: Path):
    users = Users(file)
    users.join()
    users.join()
    with users.leave() as last:
        assert last


def test_a_run_that_never_used_the_stack_does_not_stop_it_under_another(file: Path):
    """Guards what unit tests alone used to do: they ended, and took the stack of a long run with them."""
    with another(file) as process:
        with Users(file).leave() as last:
            assert not last
        process.kill()
        process.wait()
        with Users(file).leave() as last:
            assert last, "whoever was killed does not count any more"


def test_nobody_joins_while_the_stack_is_being_stopped(file: Path):
    users = Users(file)
    users.join()
    with users.leave() as last:
        assert last
        joining = subprocess.Popen(command(file), cwd=PROJECT_ROOT, stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            joining.wait(1.0)
    assert joining.communicate(timeout=30)[0] == b"joined\n"


def command(file: Path, then: str = "") -> list[str]:
    """A process that joins, says so, and does something more."""
    return [sys.executable, "-c", f"{JOIN}; print('joined', flush=True); {then}", str(file)]


@contextmanager
def another(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One that stays until it is killed."""
    with subprocess.Popen(
        command(file, "sys.stdin.read()"), cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"joined\n"
        yield process
        process.kill()
