"""Keys and sessions without a store: fixed values, injectivity, and independence of batches."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.idempotency import keyed
from lockstep.idempotency.keyed import Digest, Event, KeyOf, Kind, Session
from lockstep.idempotency.xxhash64 import xxhash64
from lockstep.kernel.errors import InvalidInput

ALL = KeyOf("probe", tuple((kind.name.lower(), kind) for kind in Kind))
TWO = KeyOf("pair", (("a", Kind.TEXT), ("b", Kind.TEXT)))
START = datetime(2024, 11, 20, 10, tzinfo=UTC)
GAP = timedelta(minutes=10)

values = st.fixed_dictionaries(
    {
        "text": st.none() | st.text(st.characters(exclude_categories=["Cs"])),
        "integer": st.none() | st.integers(-(2**63), 2**63 - 1),
        "boolean": st.none() | st.booleans(),
        "date": st.none() | st.dates(),
        "timestamp": st.none() | st.datetimes(timezones=st.just(UTC)),
        "binary": st.none() | st.binary(),
    }
)


def test_a_key_is_the_same_for_ever():
    """A changed encoding would orphan every row that was ever written under the old keys."""
    row = {
        "text": "naïve;s1:x",
        "integer": -7,
        "boolean": True,
        "date": date(1969, 12, 31),
        "timestamp": datetime(1960, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
        "binary": b"\x00\xff",
    }
    assert keyed.stable_key(ALL, row) == KNOWN_FULL
    assert keyed.stable_key(ALL, dict.fromkeys(row)) == KNOWN_EMPTY


KNOWN_FULL = "ce74a9c8f85b24c3345f3c34a0fa0db2d3c21f2f669ac1d50ed70b2e70230451"
KNOWN_EMPTY = "724e3fe2b5a7db6eadb1fabec1e612918ff5bec1f0b76458df612d1594dbd7a9"


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_xxhash64_is_the_published_one(data: bytes, digest: int):
    assert xxhash64(data, seed=0) == digest


def test_a_short_key_is_the_same_for_ever():
    short = KeyOf("pair", TWO.columns, Digest.XXHASH64)
    assert keyed.stable_key(short, {"a": "x", "b": None}) == "08850247e070fec5"


def test_a_key_does_not_depend_on_the_process():
    """Python's own `hash` of text differs from process to process."""
    program = (
        "from lockstep.idempotency.keyed import *\n"
        "print(stable_key(KeyOf('pair', (('a', Kind.TEXT), ('b', Kind.TEXT))), {'a': 'x', 'b': 'y'}))"
    )
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert run.stdout.strip() == keyed.stable_key(TWO, {"a": "x", "b": "y"})


@given(values, values)
def test_different_rows_have_different_keys_and_equal_rows_equal_ones(one: dict[str, Any], other: dict[str, Any]):
    assert (keyed.stable_key(ALL, one) == keyed.stable_key(ALL, other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "ab", "b": "c"}, {"a": "a", "b": "bc"}),
        ({"a": None, "b": ""}, {"a": "", "b": None}),
        ({"a": "x;s1:y", "b": ""}, {"a": "x", "b": "y"}),
        ({"a": "n;", "b": None}, {"a": None, "b": "n;"}),
    ],
)
def test_what_looks_alike_when_joined_stays_apart(one: dict[str, Any], other: dict[str, Any]):
    """Guards the lengths in the encoding: joined text collides."""
    assert keyed.stable_key(TWO, one) != keyed.stable_key(TWO, other)


def test_families_do_not_share_keys_and_renamed_columns_keep_theirs():
    renamed = KeyOf("pair", (("c", Kind.TEXT), ("d", Kind.TEXT)))
    other = KeyOf("other", TWO.columns)
    key = keyed.stable_key(TWO, {"a": "x", "b": "y"})
    assert keyed.stable_key(renamed, {"c": "x", "d": "y"}) == key
    assert keyed.stable_key(other, {"a": "x", "b": "y"}) != key


def test_one_instant_has_one_key_in_every_time_zone():
    key = KeyOf("when", (("t", Kind.TIMESTAMP),))
    east = START.astimezone(timezone(timedelta(hours=9)))
    assert keyed.stable_key(key, {"t": START}) == keyed.stable_key(key, {"t": east})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind.TEXT, 7),
        (Kind.TEXT, "\ud800"),
        (Kind.INTEGER, True),
        (Kind.INTEGER, 7.0),
        (Kind.INTEGER, 2**63),
        (Kind.TIMESTAMP, datetime(2024, 1, 1)),  # noqa: DTZ001  # the point
        (Kind.DATE, START),
        (Kind.BINARY, "x"),
    ],
)
def test_a_value_of_doubtful_equality_is_refused(kind: Kind, value: object):
    with pytest.raises(InvalidInput):
        keyed.stable_key(KeyOf("k", (("c", kind),)), {"c": value})


def test_a_missing_column_and_a_key_of_nothing_are_refused():
    with pytest.raises(InvalidInput, match="no column b"):
        keyed.stable_key(TWO, {"a": "x"})
    with pytest.raises(InvalidInput):
        KeyOf("k", ())
    with pytest.raises(InvalidInput):
        KeyOf("k", (("a", Kind.TEXT), ("a", Kind.TEXT)))


def event(minute: float, position: int, user: str = "u") -> Event:
    return Event(user, START + timedelta(minutes=minute), position, f"{user}-{position}")


def test_figure_4_8_a_late_event_joins_a_session_without_renaming_it():
    """Keys from the first event time change when an earlier event comes late; keys from the first append do not."""
    before = [event(9, 1), event(12, 2)]
    (old,) = keyed.sessions(before, GAP)
    (new,) = keyed.sessions([*before, event(-5 + 9, 3)], GAP)
    assert new.key == old.key
    assert (new.first, new.events) == (START + timedelta(minutes=4), 3)


def test_a_late_event_that_joins_two_sessions_leaves_the_older_key():
    first, second = keyed.sessions([event(0, 1), event(18, 2)], GAP)
    (joined,) = keyed.sessions([event(0, 1), event(18, 2), event(9, 3)], GAP)
    assert (joined.key, joined.events) == (first.key, 3)
    assert joined.key != second.key


def test_a_pause_of_exactly_the_gap_does_not_part_a_session():
    assert len(keyed.sessions([event(0, 1), event(10, 2)], GAP)) == 1
    assert len(keyed.sessions([event(0, 1), event(10.001, 2)], GAP)) == 2


def test_an_event_appended_twice_counts_once_at_its_first_position():
    """A producer that retries appends the same event again, further back in the log."""
    twice = event(0, 1)._replace(position=9)
    assert keyed.sessions([twice, event(0, 1), event(3, 2)], GAP) == keyed.sessions([event(0, 1), event(3, 2)], GAP)


class Port:
    """The two tables in memory; dies between its two commits when told to."""

    def __init__(self) -> None:
        self.events: set[Event] = set()
        self.sessions: dict[str, Session] = {}

    def fold(self, batch: list[Event], *, dies: bool = False) -> None:
        self.events |= set(batch)
        if dies:
            return
        users = {event.user for event in batch}
        known = [event for event in self.events if event.user in users]
        others = {key: session for key, session in self.sessions.items() if session.user not in users}
        self.sessions = others | {session.key: session for session in keyed.sessions(known, GAP)}


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[Event], list[list[Event]], list[tuple[int, bool]]]:
    """Events, any split of them into batches in any order, and a walk: batches repeated, some dying half-way."""
    spec = draw(st.lists(st.tuples(st.integers(0, 90), st.sampled_from("ab")), max_size=12))
    log = [event(minute, position, user) for position, (minute, user) in enumerate(spec)]
    shuffled = draw(st.permutations(log))
    cuts = sorted(draw(st.sets(st.integers(0, len(log)), max_size=5)) | {0, len(log)})
    batches = [list(shuffled[a:b]) for a, b in pairwise(cuts)] or [[]]
    walk = draw(st.lists(st.tuples(st.integers(0, len(batches) - 1), st.booleans()), max_size=8))
    return log, batches, walk


@given(arrivals())
def test_keys_and_contents_of_sessions_do_not_depend_on_batches_order_crashes_or_replays(
    arrival: tuple[list[Event], list[list[Event]], list[tuple[int, bool]]],
):
    log, batches, walk = arrival
    port = Port()
    for index, dies in walk:
        port.fold(batches[index], dies=dies)
    for batch in batches:
        port.fold(batch)
    assert sorted(port.sessions.values()) == sorted(keyed.sessions(log, GAP))
