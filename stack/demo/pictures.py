"""Pictures for the documentation, taken by a headless browser while the demo plays: the lineage and a failed partition.

What belongs here: which pages, when they are complete, and their names. What does not: the browser itself (browser.py).
"""

from __future__ import annotations

from pathlib import Path

from stack.demo.browser import browser
from stack.demo.stage import Stage

LINEAGE = "lineage.png"
FAILED = "failed-partition.png"


def take_failed_partition(stage: Stage, group: str, partition: str, folder: Path) -> None:
    """The red partition of a vault, and how many are green and wait."""
    address = f"{stage.url('dagster')}/assets/{group}/applied_windows?view=partitions"
    with browser() as page:
        page.open(f"{address}&status=FAILED&partition={partition}")
        page.see("failed, and did not materialize this asset")
        page.settle()
        page.picture(folder / FAILED)


def take_lineage(stage: Stage, group: str, folder: Path) -> None:
    """The assets of one vault and how they hang together."""
    with browser(height=1050) as page:
        page.open(f"{stage.url('dagster')}/locations/__repository__@lockstep/asset-groups/{group}/lineage")
        page.see("applied_windows")
        page.settle()
        page.picture(folder / LINEAGE)
