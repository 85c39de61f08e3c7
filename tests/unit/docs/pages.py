"""The documentation as the tests read it: pages, links, anchors, and the commands that it tells people to run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.kernel.settings import PROJECT_ROOT

DOCS = PROJECT_ROOT / "docs"
PAGES = sorted([PROJECT_ROOT / "README.md", *DOCS.rglob("*.md")])

_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")
_INDENTED = re.compile(r"^    (lockstep .*)$", re.MULTILINE)


def name_of(page: Path) -> str:
    """A page as a test's id."""
    return str(page.relative_to(PROJECT_ROOT))


def links(page: Path) -> list[str]:
    """Every link of a page that does not leave the project."""
    prose = _FENCE.sub("", page.read_text())
    return [link for link in _LINK.findall(prose) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ +(.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[str]:
    """Every `lockstep …` of a page: lines of its code blocks, and code within its sentences."""
    text = page.read_text()
    blocks = "\n".join(_FENCE.findall(text))
    found = [*blocks.splitlines(), *_INDENTED.findall(text), *_INLINE.findall(_FENCE.sub("", text))]
    for line in found:
        for part in re.split(r"\$\(| \| |;|&&|\)", line.split("#")[0].replace("\\|", "|")):
            stripped = part.strip()
            if stripped.startswith("lockstep "):
                yield stripped
