"""The Dagster UI as a person uses it at 3 a.m.: lineage, a red partition, one press of Materialize, green again.

Needs Chromium on the machine (package chromium, or LOCKSTEP_CHROMIUM); without one it fails and says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from stack.demo import windows
from stack.demo.browser import Page, browser, find_chromium
from stack.demo.stage import Sizes, Stage

pytestmark = [pytest.mark.stack, pytest.mark.platform, pytest.mark.long]

BACKLOG = 6


@pytest.fixture
def stage(platform: Any) -> Iterator[Stage]:
    """The doors of the running platform."""
    find_chromium()
    opened = Stage(platform, secrets.token_hex(3), Sizes(windows=BACKLOG))
    yield opened
    opened.leave()


@pytest.fixture
def poisoned(stage: Stage) -> windows.Backlog:
    """A backlog of a vault whose window in the middle is red, and the ones behind it wait."""
    _, backlog = windows.plan(stage)
    windows.unblock(stage, backlog)
    windows.vendor(stage, backlog, "poison", stop=backlog.minute(backlog.trouble))
    windows.vendor(stage, backlog, "publish", windows=backlog.count)
    stage.command("windows", "windows", "produce", "--vault", backlog.vault)
    red = backlog.partition(backlog.trouble)
    stage.wait(lambda: windows.colours(stage, backlog).get(red) == "FAILED", f"the red partition {red}")
    return backlog


def test_a_red_partition_is_seen_materialized_by_clicking_and_the_backlog_turns_green(
    stage: Stage, poisoned: windows.Backlog
):
    """Guards the whole of recovery by hand: the UI shows the failure, one press heals it, the lane drains."""
    red = poisoned.partition(poisoned.trouble)
    page_of_partitions = f"{stage.url('dagster')}/assets/{poisoned.group}/applied_windows?view=partitions"
    with browser() as page:
        _see_lineage(page, stage, poisoned.group)
        page.open(page_of_partitions)
        page.see("Failed (1)")
        page.open(f"{page_of_partitions}&status=FAILED&partition={red}")
        page.see("failed, and did not materialize this asset")
        page.see(red)
        windows.vendor(stage, poisoned, "heal", stop=poisoned.minute(poisoned.trouble))
        _press_materialize(page)
        stage.wait(lambda: "FAILED" not in windows.colours(stage, poisoned).values(), "the red partition to go")
        stage.wait(lambda: set(windows.colours(stage, poisoned).values()) == {"MATERIALIZED"}, "a green backlog")
        page.open(page_of_partitions)
        page.see("Failed (0)")
        page.open(f"{page_of_partitions}&partition={red}")
        page.see(red)
        page.see("load_id")  # the metadata of a window that was applied


def _see_lineage(page: Page, stage: Stage, group: str) -> None:
    page.open(f"{stage.url('dagster')}/locations/__repository__@lockstep/asset-groups/{group}/lineage")
    for asset in ("raw_windows", "applied_windows", "vault_activity"):
        page.see(asset)


def _press_materialize(page: Page) -> None:
    """Materialize, then Launch; the page asks first where a parent was not made by Dagster itself."""
    page.click("Materialize…", "button")
    page.wait("/Are you sure|Launch runs to materialize/.test(document.body.innerText)", "a dialog")
    if "Are you sure" in page.text():
        page.click("Confirm", "button")
    page.see("1 partition")
    page.click("Launch 1 run", "button")
    page.wait("!document.body.innerText.includes('Launch 1 run')", "the dialog to close")
