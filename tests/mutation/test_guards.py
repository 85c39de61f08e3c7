"""Each guard of the table is taken out of a copy of the tree, and some test must fail.

A guard that nothing notices is a guard that the next change removes. Long, because every mutant runs tests of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.kernel.settings import PROJECT_ROOT
from tests.mutation.guards import GUARDS, Guard

_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".lockstep*", ".*_cache", "__pycache__", ".hypothesis", ".dagster*")
_TESTS_FAILED = 1  # pytest's exit code; 2 and more would be an error of the mutant itself


def _id(guard: Guard) -> str:
    return guard.name


@pytest.mark.parametrize("guard", GUARDS, ids=_id)
def test_the_guard_is_where_the_table_says(guard: Guard):
    assert (PROJECT_ROOT / guard.file).read_text().count(guard.text) == 1
    assert all((PROJECT_ROOT / test.split("::")[0]).exists() for test in guard.tests)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, once: what one mutant has compiled serves the next."""
    return shutil.copytree(PROJECT_ROOT, tmp_path_factory.mktemp("mutant") / "copy", ignore=_LEFT_OUT)


@contextmanager
def taken_out(guard: Guard, copy: Path) -> Iterator[None]:
    source = copy / guard.file
    whole = source.read_text()
    mutated = whole.replace(guard.text, guard.instead)
    compile(mutated, guard.file, "exec")
    source.write_text(mutated)
    try:
        yield
    finally:
        source.write_text(whole)


@pytest.mark.long
@pytest.mark.stack
@pytest.mark.parametrize("guard", GUARDS, ids=_id)
def test_some_test_notices_that_it_is_gone(guard: Guard, stack: object, copy: Path):
    with taken_out(guard, copy):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "--keep-stack", "-p", "no:cacheprovider", *guard.tests],
            cwd=copy,
            env=os.environ | {"LOCKSTEP_TEST_HOME": os.environ["LOCKSTEP_HOME"]},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == _TESTS_FAILED, f"nothing noticed (exit {done.returncode}): {done.stdout[-2000:]}"
