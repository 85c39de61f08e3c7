"""Every demo of docs/idempotency-merging.md runs as printed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lockstep.kernel.settings import PROJECT_ROOT

pytestmark = pytest.mark.stack

PAGE = PROJECT_ROOT / "docs" / "idempotency-merging.md"
DEMOS = {
    section.split("`")[1]: block
    for section in re.split(r"^## \d\. ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
}


def test_each_block_has_a_demo():
    assert sorted(DEMOS) == ["keyed.py", "merger.py", "stateful.py"]


@pytest.mark.parametrize("module", sorted(DEMOS))
def test_the_demo_runs(module: str, database: str, spark: Any, s3: Any, bucket: str):
    names = {"dsn": database, "spark": spark, "s3": s3, "bucket": bucket}
    exec(compile(DEMOS[module], f"{PAGE.name}:{module}", "exec"), names)  # noqa: S102  # our own page
