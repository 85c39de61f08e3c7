"""The words of refusals: whoever meets one at night reads what to do next."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.kernel.settings import PROJECT_ROOT

BLOCKS = PROJECT_ROOT / "lockstep" / "idempotency"
# InvalidInput of an argument says by itself what to write; a stateful refusal takes its words from the decision.
SAID_ELSEWHERE = {"InvalidInput"}


def raised() -> Iterator[tuple[str, ast.Call]]:
    """Every error that a block raises, with its place."""
    for path in sorted(BLOCKS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                yield f"{path.name}:{node.lineno} {node.exc.func.id}", node.exc


def test_an_error_of_a_block_says_what_to_do_next():
    """Guards the person who is called: what was refused is half of the words."""
    found = dict(raised())
    assert len(found) > 40
    mute = []
    for place, call in found.items():
        name = place.split()[1]
        decided = place.startswith("stateful.py") and name == "Refused"
        words = {keyword.arg for keyword in call.keywords} & {"next_step", "problems"}
        if name[0].isupper() and name not in SAID_ELSEWHERE and not decided and not words:
            mute.append(place)
    assert mute == []
