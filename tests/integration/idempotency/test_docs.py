"""The demos of the page on idempotency run as they are printed, each section against the real parts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lockstep.kernel.postgres import Connection
from lockstep.kernel.settings import PROJECT_ROOT

pytestmark = pytest.mark.stack

PAGE = PROJECT_ROOT / "docs" / "idempotency.md"
LONGEST_DEMO = 22  # lines of code, with the imports


def demos() -> dict[str, str]:
    """The Python of each section, by its heading."""
    sections = re.split(r"^## +(.+)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    blocks = {
        title.strip(): "\n".join(re.findall(r"^```python\n(.*?)^```", body, flags=re.MULTILINE | re.DOTALL))
        for title, body in zip(sections[1::2], sections[2::2], strict=True)
    }
    return {title: code for title, code in blocks.items() if code}


def test_the_page_has_demos_that_fit_a_screen():
    """Guards the test below against a page whose blocks it no longer finds."""
    found = demos()
    assert len(found) == 7, sorted(found)
    lengths = {title: sum(bool(line.strip()) for line in code.splitlines()) for title, code in found.items()}
    assert {title: length for title, length in lengths.items() if length > LONGEST_DEMO} == {}
    assert [title for title, code in found.items() if "assert " not in code] == []


@pytest.mark.parametrize("title", sorted(demos()))
def test_a_demo_runs_as_printed(title: str, spark: Any, s3: Any, bucket: str, dsn: str, connection: Connection):
    given = {"spark": spark, "s3": s3, "bucket": bucket, "dsn": dsn, "connection": connection}
    exec(compile(demos()[title], f"{PAGE.name}: {title}", "exec"), dict(given))  # noqa: S102
