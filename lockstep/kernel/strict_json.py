"""JSON from strangers, with one meaning or none.

What belongs here: reading a text that a client sent. What does not: what its fields mean, how a refusal is answered.
"""

from __future__ import annotations

import json
from collections import Counter

_MOST_NAMES_SHOWN, _LONGEST_NAME_SHOWN = 10, 100


class Unreadable(ValueError):
    """Why the text was refused, in words that follow "it"."""


def read(raw: bytes | str) -> object:
    """The value of a JSON text in UTF-8, or `Unreadable`.

    A name that stands twice in an object is refused: the library keeps the last one, a proxy may check the first.
    """
    repeated: set[str] = set()

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            repeated.update(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return found

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")  # the library would guess UTF-16 and UTF-32
        value: object = json.loads(text, parse_constant=_no_constant, object_pairs_hook=once)
    except RecursionError:
        raise Unreadable("is nested too deeply") from None
    except ValueError:
        raise Unreadable("is not JSON in UTF-8") from None
    if repeated:
        shown = ", ".join(f"'{printable(name)}'" for name in sorted(repeated)[:_MOST_NAMES_SHOWN])
        raise Unreadable(f"has {shown} more than once in one object")
    return value


def printable(name: str) -> str:
    """A name that a client made up, short and fit for an answer: half a surrogate pair is no UTF-8."""
    return name[:_LONGEST_NAME_SHOWN].encode("utf-8", "replace").decode("utf-8")


def _no_constant(name: str) -> object:
    raise ValueError(name)  # NaN and Infinity are no JSON
