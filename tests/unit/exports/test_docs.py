"""The page about exports names tests; a name that no test has any more proves nothing."""

from __future__ import annotations

import re

from lockstep.kernel.settings import PROJECT_ROOT


def test_every_test_that_the_page_names_exists():
    page = (PROJECT_ROOT / "docs" / "exports.md").read_text()
    files = [path for folder in PROJECT_ROOT.glob("tests/*/exports") for path in folder.glob("*.py")]
    code = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r"::(test_\w+)", page))
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in code} == set()
    assert {name for name in re.findall(r"(test_\w+\.py)", page) if name not in {path.name for path in files}} == set()
    guards = {name for name in re.findall(r"`guards\[([^\]]+)\]`", page) if not name.endswith("…")}
    assert {name for name in guards if f'"{name}": Guard(' not in code} == set()
