"""Properties of the rules against plain oracles: calendar, paths, fairness, reuse."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, date, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from lockstep.exports import rules
from lockstep.exports.model import Candidate, Format, FormulaGuard, Limits

KEYS = st.from_regex(re.compile(rules.KEY_PATTERN, re.ASCII), fullmatch=True)
DAYS = st.dates(date(1900, 1, 1), date(2099, 12, 31))
VARIANTS = st.sampled_from(
    [(form, FormulaGuard.NONE) for form in Format]
    + [(Format.CSV, FormulaGuard.QUOTE), (Format.CSV_GZ, FormulaGuard.QUOTE)]
)


@given(st.text(alphabet="0123456789", min_size=8, max_size=8))
def test_the_pattern_of_dates_is_the_calendar(text: str):
    """Guards the schema that clients validate with: it must allow exactly what the service accepts."""
    try:
        real = datetime.strptime(text, "%Y%m%d").replace(tzinfo=UTC).year in range(1900, 2100)
    except ValueError:
        real = False
    assert bool(re.fullmatch(rules.DATE_PATTERN, text)) is real


@given(DAYS)
def test_every_day_of_two_centuries_is_accepted(day: date):
    assert re.fullmatch(rules.DATE_PATTERN, f"{day:%Y%m%d}" if day.year >= 1000 else "")


@given(st.tuples(KEYS, DAYS, VARIANTS), st.tuples(KEYS, DAYS, VARIANTS))
def test_two_files_never_share_a_path(one: tuple, other: tuple):
    """Guards against a client's file replaced by another's: the path can be read back to its parts."""
    paths = [rules.object_key("exports", key, day, *variant) for key, day, variant in (one, other)]
    assert (paths[0] == paths[1]) is (one == other)
    assert ".." not in paths[0].split("/")
    assert paths[0].count("/") == 4


MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2090, 1, 1), timezones=st.timezones())  # noqa: DTZ001


@given(DAYS, MOMENTS, st.integers(0, 400))
def test_the_reuse_window_is_the_documents_sentence(day: date, moment: datetime, window: int):
    current = moment.astimezone(UTC).date()
    must_regenerate = day >= current - timedelta(days=window)
    assert rules.reuse_allowed(day, as_of=moment, window_days=window) is not must_regenerate


CANDIDATES = st.lists(
    st.builds(
        lambda client, job, chunk: Candidate(f"c{client}", f"J{client}{job}", f"k{chunk}", f"{client}{job}{chunk}"),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 30),
    ),
    unique_by=lambda one: one.file_id,
    max_size=80,
)


@given(CANDIDATES, st.integers(0, 40))
def test_nobody_gets_two_more_than_somebody_who_still_waits(candidates: list[Candidate], limit: int):
    """Guards fairness: between clients that both have more to do, the shares differ by one at most."""
    chosen = rules.fair_order(candidates, limit=limit, busy_clients={}, busy_jobs={})
    assert len(chosen) == min(limit, len(candidates))
    assert len(set(chosen)) == len(chosen)
    share, left = Counter(one.client_id for one in chosen), {one.client_id for one in set(candidates) - set(chosen)}
    for waiting in left:
        assert all(share[other] <= share[waiting] + 1 for other in share)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(JSON | st.dictionaries(st.sampled_from(["items", "output", "force", "maxAge", "webhook"]), JSON))
def test_any_json_is_either_refused_with_places_or_accepted_with_chunks(body: object):
    """Guards against a body that crashes the rules instead of being refused by them."""
    try:
        submission = rules.parse_submission(body, Limits())
    except rules.BadSubmission as refusal:
        assert refusal.found
        assert all(one.pointer.startswith("#") for one in refusal.found)
    else:
        assert submission.chunks
