"""Properties of tick rules against plain-Python oracles."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.ticks import rules, types
from lockstep.ticks.model import TickState
from lockstep.ticks.rules import Append, Refused, TooEarly

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def _shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        items = list(value.items())
        order.shuffle(items)
        return {name: _shuffled(item, order) for name, item in items}
    return [_shuffled(item, order) for item in value] if isinstance(value, list) else value


@given(JSON, st.randoms(use_true_random=False))
def test_one_manifest_has_one_hash_however_it_is_written(value: Any, order: random.Random):
    again = json.loads(json.dumps(_shuffled(value, order), indent=order.choice([None, 2])))
    assert rules.manifest_hash(again) == rules.manifest_hash(value)


@given(JSON, JSON)
def test_two_manifests_have_two_hashes(one: Any, other: Any):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (rules.manifest_hash(one) == rules.manifest_hash(other)) is same


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 7), st.none() | st.integers(0, 7)), max_size=25))
def test_a_chain_has_no_gap_no_fork_and_no_way_back(finalizes: list[tuple[int, int | None]]):
    """The oracle is a list: a tick may be appended if what it names is the last of it, or if it names nothing."""
    chain: list[int] = []
    for tick, wanted in finalizes:
        if tick in chain or tick == wanted:
            continue
        head = str(chain[-1]) if chain else None
        state = None if wanted is None or wanted not in chain else TickState.COMMITTED
        found = rules.next_in_chain(len(chain), head, None if wanted is None else str(wanted), state)
        if wanted is None or (chain and wanted == chain[-1]):
            assert found == Append(len(chain) + 1, head)
            chain.append(tick)
        elif wanted in chain:
            assert isinstance(found, Refused)
        else:
            assert found == TooEarly(str(wanted))


@given(st.text(max_size=30))
def test_an_id_never_contains_what_a_path_or_a_statement_could_read_otherwise(text: str):
    for kind in ("org_id", "project_id", "tick_id", "file_seq", "table", "column"):
        if rules.is_id(kind, text):
            assert text.isascii()
            assert text.isprintable()
            assert not set(text) & set("/\\'\"`;%*?<>|&$ \t\n\0")
            assert text not in (".", "..")


KINDS = st.sampled_from(
    ["tinyint", "smallint", "int", "bigint", "float", "double", "string", "date", "timestamp", "timestamp_ntz"]
) | st.builds(lambda p, s: f"decimal({p},{min(p, s)})", st.integers(1, 38), st.integers(0, 38))


@given(KINDS, KINDS, KINDS)
def test_widening_is_an_order(one: str, two: str, three: str):
    """Reflexive, transitive, and never both ways: else a column could change its type step by step."""
    assert types.fits(one, one)
    if types.fits(one, two) and types.fits(two, three):
        assert types.fits(one, three)
    if one != two:
        assert not (types.fits(one, two) and types.fits(two, one))


@given(st.text(max_size=40))
def test_reading_a_type_never_fails_and_is_stable(text: str):
    found = types.canonical(text)
    assert found is None or types.canonical(found) == found
