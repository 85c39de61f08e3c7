"""Gaps of a chain against a plain oracle: whatever is known and announced, every minute is accounted for once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from lockstep.windows.listing import Missing, contiguous_until, find_gaps
from lockstep.windows.model import Window, WindowKind

T0 = datetime(2026, 1, 1, tzinfo=UTC)
STEP = timedelta(minutes=15)
STATES = st.lists(st.sampled_from(["known", "announced", "silent", "both"]), max_size=40)


def _window(number: int) -> Window:
    return Window("v", T0 + STEP * number, T0 + STEP * (number + 1))


def _missing(number: int) -> Missing:
    return Missing(f"v-{number}", WindowKind.INCREMENTAL, T0 + STEP * (number + 1), "late")


@given(states=STATES, behind=st.integers(0, 45), order=st.randoms(use_true_random=False))
def test_every_window_behind_the_watermark_is_known_or_in_exactly_one_gap(states, behind, order):
    """Guards the promise that no hole is silent: up to the last thing we know of, nothing is left out."""
    known = [_window(number) for number, state in enumerate(states) if state in ("known", "both")]
    announced = [_missing(number) for number, state in enumerate(states) if state == "announced"]
    order.shuffle(known)
    order.shuffle(announced)
    anchor = T0 + STEP * behind
    gaps = find_gaps("v", anchor, known, announced)
    seen = [number for number, state in enumerate(states) if state != "silent" and number >= behind]
    for number in range(behind, seen[-1] + 1 if seen else behind):
        window = _window(number)
        covering = [
            gap for gap in gaps if gap.start is not None and gap.start < window.stop and window.start < gap.stop
        ]
        assert len(covering) == (0 if states[number] in ("known", "both") else 1), number
    assert all(gap.stop > anchor for gap in gaps)


@given(states=STATES, order=st.randoms(use_true_random=False))
def test_the_chain_reaches_exactly_to_the_first_window_that_is_not_there(states, order):
    known = [_window(number) for number, state in enumerate(states) if state == "known"]
    order.shuffle(known)
    unbroken = next((number for number, state in enumerate(states) if state != "known"), len(states))
    assert contiguous_until(known, T0) == T0 + STEP * unbroken
