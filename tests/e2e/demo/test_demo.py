"""The demo itself, small, on the whole platform: every claim of every scene holds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stack.demo.play import SCENES, perform
from stack.demo.stage import SMALL

pytestmark = [pytest.mark.stack, pytest.mark.platform, pytest.mark.long]


def test_the_small_demo_holds_every_claim_and_leaves_the_stack_as_it_was(platform: Any, tmp_path: Path):
    """Guards what a newcomer sees first."""
    terminal, path = io.StringIO(), tmp_path / "demo.json"
    outcome = perform(platform, Console(file=terminal, width=160), keep=False, sizes=SMALL)
    outcome.write(path)
    assert outcome.holds, terminal.getvalue()
    assert {claim.scene for claim in outcome.claims} == set(SCENES)
    found = json.loads(path.read_text())
    assert set(found) == {"claims", "seconds", "links"}
    assert all(address.startswith("http://127.0.0.1:") for address in found["links"].values())
    assert platform.running(), "a stack that ran before stays up"
