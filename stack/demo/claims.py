"""What the demo claims: expected, found, and whether both agree; as a table for people and as JSON for machines.

What belongs here: collecting claims from scenes that play at the same time, and showing them. What does not: how a
claim is examined (oracle.py and the scenes).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

_SHOWN = 400  # a reason longer than this is in the log of its part


@dataclass(frozen=True)
class Claim:
    """One thing that the demo says about the platform."""

    scene: str
    claim: str
    expected: str
    found: str
    ok: bool


class Board:
    """The claims of all scenes. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: list[Claim] = []

    def add(self, claim: Claim) -> None:
        """Remember one claim."""
        with self._lock:
            self._claims.append(claim)

    def claims(self, scene: str | None = None) -> list[Claim]:
        """Every claim so far, or those of one scene."""
        with self._lock:
            return [one for one in self._claims if scene is None or one.scene == scene]


def judge(scene: str, claim: str, expected: object, found: object) -> Claim:
    """A claim that holds if both values are equal."""
    return Claim(scene, claim, _words(expected), _words(found), expected == found)


def broken(scene: str, error: BaseException) -> Claim:
    """The claim of a scene that could not be played to its end: the reason, and what to do next."""
    words = str(error) or type(error).__name__
    if "Next:" not in words:
        words += (
            f" Next: play it again with `lockstep demo --keep`, then look at `lockstep status` and the runs of {scene}."
        )
    return Claim(scene, "the scene plays to its end", "no error", _words(words), False)


def all_hold(claims: list[Claim]) -> bool:
    """Whether the demo succeeded. A demo without claims has shown nothing."""
    return bool(claims) and all(one.ok for one in claims)


def document(claims: list[Claim], seconds: float, links: Mapping[str, str]) -> dict[str, Any]:
    """What `lockstep demo --json FILE` writes."""
    return {"claims": [asdict(one) for one in claims], "seconds": round(seconds, 1), "links": dict(links)}


def table(claims: list[Claim]) -> Table:
    """The summary for people."""
    shown = Table(title="What was claimed, and what an independent look found", title_justify="left")
    for title in ("scene", "claim", "expected", "found", ""):
        shown.add_column(title, overflow="fold")
    for one in claims:
        sign = "[green]ok[/]" if one.ok else "[red]FAILED[/]"
        shown.add_row(one.scene, *(escape(text) for text in (one.claim, one.expected, one.found)), sign)
    return shown


def _words(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
