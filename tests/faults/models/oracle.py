"""One oracle for every design: it sees what the source held, what the sink committed, and what the design believes.

What belongs here: counting. What does not: any knowledge of a design. A unit is counted at most once as lost or stuck.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Facts:
    """What is there when nothing moves any more.

    Attributes:
        expected: The units that the source published or the service acknowledged, in the source's order.
        effects: Units in the order in which the sink committed them, repeats included.
        finished: Units that the design itself regards as finished: nothing will be done about them again.
        spoiled: Units with an effect that is not whole, or not what the design's own records say.
        ordered: Whether the design promises order.
    """

    expected: list[str]
    effects: list[str] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    spoiled: set[str] = field(default_factory=set)
    ordered: bool = True


class Count(NamedTuple):
    """How many units went wrong, by kind."""

    lost: int = 0
    doubled: int = 0
    out_of_order: int = 0
    stuck: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def any(self) -> bool:
        return any(self)


def count(facts: Facts) -> Count:
    """Judge the facts.

    Lost: no whole effect, and the design believes that it is finished, or has passed it by. Stuck: no whole effect,
    not believed to be finished, and nothing moves any more. Doubled: committed more than once; an upsert hides that, an
    append or a trigger does not. Out of order: committed after a unit that comes later.
    """
    whole = [unit for unit in facts.effects if unit not in facts.spoiled]
    last_place = max((facts.expected.index(unit) for unit in whole if unit in facts.expected), default=-1)
    lost = stuck = 0
    for place, unit in enumerate(facts.expected):
        if unit in whole:
            continue
        passed_by = facts.ordered and place < last_place
        if unit in facts.finished or unit in facts.spoiled or passed_by:
            lost += 1
        else:
            stuck += 1
    doubled = sum(1 for times in Counter(facts.effects).values() if times > 1)
    return Count(lost, doubled, _late(facts) if facts.ordered else 0, stuck)


def _late(facts: Facts) -> int:
    """Units whose first effect came after the first effect of a later unit."""
    firsts = [unit for unit in dict.fromkeys(facts.effects) if unit in facts.expected]
    places = [facts.expected.index(unit) for unit in firsts]
    return sum(1 for number, place in enumerate(places) if place < max(places[: number + 1]))
