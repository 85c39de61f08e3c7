"""The rules of exports, one by one: what a request means, what may be reused, what follows a failure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from lockstep.exports import rules
from lockstep.exports.model import (
    CachedFile,
    Candidate,
    Claim,
    Counts,
    Format,
    FormulaGuard,
    JobStatus,
    Limits,
    Place,
)

LIMITS = Limits(max_chunks=10)
NOW = datetime(2026, 1, 15, 12, 0, tzinfo=UTC)


def _body(**changes: Any) -> dict[str, Any]:
    return {"items": [{"key": "ABC", "effectiveDates": ["20250215"]}], **changes}


def _pointers(body: object) -> list[str]:
    with pytest.raises(rules.BadSubmission) as caught:
        rules.parse_submission(body, LIMITS)
    return [one.pointer for one in caught.value.found]


def test_keys_are_trimmed_and_duplicates_are_removed_and_counted():
    items = [
        {"key": " ABC\t", "effectiveDates": ["20250315", "20250215", "20250215"]},
        {"key": "ABC", "effectiveDates": ["20250215"]},
    ]
    submission = rules.parse_submission({"items": items}, LIMITS)
    assert [one.chunk_key for one in submission.chunks] == ["key=ABC:date=20250215", "key=ABC:date=20250315"]
    assert submission.duplicates_removed == 2


def test_a_body_that_cannot_be_read_is_refused_in_one_sentence():
    with pytest.raises(
        rules.UnreadableBody, match=r"the body is refused: it has 'items' more than once in one object\."
    ):
        rules.read_json(b'{"items": [], "items": []}')


def test_a_made_up_name_is_told_in_words_that_can_be_sent():
    """Guards the answer: half a surrogate pair in it would turn a refusal into an internal error."""
    (pointer,) = _pointers(_body(**{"\ud800/~" + "x" * 1000: 1}))
    assert pointer.startswith("#/?~1~0xxx")
    assert len(pointer.encode()) < 120


@pytest.mark.parametrize("items", [None, [], {}, "ABC", 1])
def test_items_must_be_a_non_empty_list(items: object):
    assert _pointers({"items": items}) == ["#/items"]


@pytest.mark.parametrize("dates", [None, [], "20250215", {}])
def test_dates_must_be_a_non_empty_list(dates: object):
    assert _pointers({"items": [{"key": "ABC", "effectiveDates": dates}]}) == ["#/items/0/effectiveDates"]


@pytest.mark.parametrize(
    "day", ["20250230", "20250229", "2025-02-15", "20251301", "20250100", "", 20250215, None, "\uff12\uff10250215"]
)
def test_a_date_must_be_a_real_day(day: object):
    assert _pointers({"items": [{"key": "ABC", "effectiveDates": [day]}]}) == ["#/items/0/effectiveDates/0"]


def test_the_leap_day_of_a_leap_year_is_a_real_day():
    assert rules.parse_submission({"items": [{"key": "A", "effectiveDates": ["20240229"]}]}, LIMITS).chunks


HOSTILE_KEYS = [
    "",
    "   ",
    "..",
    "../etc",
    "a/b",
    "a\\b",
    "a\x00b",
    "a\nb",
    "%2e%2e",
    "ＡＢＣ",  # noqa: RUF001  # full-width look-alikes
    "АBC",  # noqa: RUF001  # a Cyrillic letter
    "A" * 65,
    "-rf",
    ".hidden",
    "=1+1",
    None,
    7,
    ["ABC"],
]


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_a_key_that_is_no_plain_file_name_is_refused(key: object):
    """Guards the path: a key becomes part of one."""
    assert _pointers({"items": [{"key": key, "effectiveDates": ["20250215"]}]}) == ["#/items/0/key"]


def test_every_bad_place_is_listed_not_only_the_first():
    body = {
        "items": [{"key": "../x", "effectiveDates": ["20259999"]}, {"key": "ABC"}, 5],
        "output": {"format": "xls"},
        "force": "yes",
        "maxAge": -1,
        "nonsense": 1,
    }
    assert set(_pointers(body)) == {
        "#/nonsense",
        "#/items/0/key",
        "#/items/0/effectiveDates/0",
        "#/items/1/effectiveDates",
        "#/items/2",
        "#/output/format",
        "#/force",
        "#/maxAge",
    }


def test_a_job_with_too_many_chunks_is_refused_by_its_own_kind():
    items = [{"key": f"K{n}", "effectiveDates": ["20250215"]} for n in range(11)]
    with pytest.raises(rules.BadSubmission) as caught:
        rules.parse_submission({"items": items}, LIMITS)
    assert caught.value.kind == "too-many-chunks"


@pytest.mark.parametrize(("text", "form"), [("CSV", Format.CSV), ("csv.gz", Format.CSV_GZ), ("NDJSON", Format.NDJSON)])
def test_formats_are_known_in_any_case(text: str, form: Format):
    assert rules.parse_submission(_body(output={"format": text}), LIMITS).format is form


def test_the_formula_guard_is_for_csv_only():
    assert _pointers(_body(output={"format": "parquet", "formulaGuard": "quote"})) == ["#/output/formulaGuard"]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/x",
        "https://127.0.0.1/x",
        "https://10.0.0.1/",
        "https://169.254.169.254/latest",
        "https://[::1]/",
        "https://localhost/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://user:pw@example.com/",
        "https://example.com/#x",
        "ftp://example.com/",
        "https://",
        "https://exa mple.com/",
    ],
)
def test_a_webhook_must_be_a_public_https_address(url: str):
    """Guards against our relay being used to reach what only it can reach."""
    assert _pointers(_body(webhook={"url": url})) == ["#/webhook/url"]


def test_the_path_is_the_documents():
    day, folder = date(2025, 2, 15), rules.tenant_path(Place("b"), "default", "default")
    plain = rules.object_key(folder, "ABC", day, Format.CSV, FormulaGuard.NONE)
    assert plain == "exports/2025/02/15/ABC_20250215.csv"
    assert rules.tenant_path(Place("b"), "acme", "default") == "exports/acme"
    assert rules.object_key(folder, "ABC", day, Format.CSV, FormulaGuard.QUOTE) != plain


def test_the_job_id_is_the_documents():
    assert rules.job_id(date(2026, 1, 2), 123) == "J20260102_000123"


@pytest.mark.parametrize(
    ("day", "allowed"),
    [(date(2026, 1, 15), False), (date(2026, 1, 8), False), (date(2026, 1, 7), True), (date(2025, 1, 1), True)],
)
def test_days_inside_the_window_are_always_made_anew(day: date, allowed: bool):
    assert rules.reuse_allowed(day, as_of=NOW, window_days=7) is allowed
    assert rules.reuse_allowed(day, as_of=NOW, window_days=7, force=True) is False


def test_the_window_is_counted_in_utc_wherever_the_clock_stands():
    """Guards against chunks of one job deciding differently around midnight."""
    tokyo = datetime.fromisoformat("2026-01-16T08:00:00+09:00")  # still the 15th in UTC
    assert rules.reuse_allowed(date(2026, 1, 8), as_of=tokyo, window_days=7) is False


def _file(**changes: Any) -> CachedFile:
    values = {
        "file_id": "f",
        "effective_date": date(2025, 2, 15),
        "object_key": "k",
        "schema_version": "v1",
        "etag": "e",
        "bytes": 1,
        "generation": 1,
        "last_generated_at": datetime(2025, 2, 22, tzinfo=UTC),
    }
    return CachedFile(**{**values, **changes})


def _may(file: CachedFile, **changes: Any) -> bool:
    values = {"as_of": NOW, "window_days": 7, "max_age": None, "schema_version": "v1"}
    return rules.may_reuse(file, **{**values, **changes})


def test_a_file_counts_only_if_it_was_made_after_its_data_was_final():
    """Guards against a file of moving data that is handed out for ever."""
    assert _may(_file())
    assert not _may(_file(last_generated_at=datetime(2025, 2, 21, 23, 59, 59, tzinfo=UTC)))


def test_a_file_of_another_function_version_or_too_old_does_not_count():
    assert not _may(_file(), schema_version="v2")
    assert not _may(_file(), max_age=timedelta(days=1))
    assert _may(_file(last_generated_at=NOW - timedelta(hours=1)), max_age=timedelta(days=1))


@pytest.mark.parametrize(
    ("counts", "cancel", "expected"),
    [
        (Counts(2, pending=2), False, JobStatus.SUBMITTED),
        (Counts(2, pending=2), True, JobStatus.CANCELLED),
        (Counts(2, pending=1, running=1), True, JobStatus.IN_PROGRESS),
        (Counts(2, pending=1, failed=1), False, JobStatus.IN_PROGRESS),
        (Counts(2, running=1, failed=1), False, JobStatus.IN_PROGRESS),
        (Counts(2, done=1, failed=1), False, JobStatus.FAILED),
        (Counts(2, done=2), False, JobStatus.COMPLETED),
        (Counts(2, done=2), True, JobStatus.COMPLETED),
        (Counts(2, done=1, failed=1), True, JobStatus.CANCELLED),
    ],
)
def test_a_job_ends_only_when_no_worker_holds_any_of_it(counts: Counts, cancel: bool, expected: JobStatus):
    assert rules.job_status(counts, cancel_requested=cancel, started=False) is expected


def test_an_outage_gives_the_attempt_back_and_a_terminal_error_ends_at_once():
    assert rules.after_failure(attempts=5, max_attempts=5, infrastructure=True).refund
    assert rules.after_failure(attempts=1, max_attempts=5, terminal=True) == rules.GiveUp()
    assert rules.after_failure(attempts=5, max_attempts=5) == rules.GiveUp()
    assert rules.after_failure(attempts=4, max_attempts=5).refund is False


def test_a_chunk_that_ends_its_session_again_and_again_pays_in_the_end():
    """Guards against a statement that crashes its server: taken for an outage, it would be tried for ever."""
    told = [
        rules.after_failure(attempts=1, max_attempts=5, infrastructure=True, suspect_refunds=refunds).refund
        for refunds in range(rules.MOST_REFUNDS + 2)
    ]
    assert told == [True] * rules.MOST_REFUNDS + [False, False]


def test_a_retry_begins_with_all_refunds_again():
    """Guards a retried chunk: its fence stays high for ever, which must not make it pay for the next outage."""
    claim = Claim("J", "c", "ABC", date(2025, 2, 15), "f", "default", Format.CSV, FormulaGuard.NONE, 1, 9, NOW)
    assert claim.refunds == 8
    assert replace(claim, counted_from=8).refunds == 0


def test_a_thousand_chunks_of_one_job_do_not_stand_before_one_of_another():
    big = [Candidate("a", "J1", f"c{n}", f"f{n}") for n in range(1000)]
    small = [Candidate("b", "J2", "only", "g"), Candidate("a", "J3", "mine", "h")]
    chosen = rules.fair_order([*big, *small], limit=4, busy_clients={}, busy_jobs={})
    assert {one.chunk_key for one in chosen} == {"c0", "only", "mine", "c1"}
    assert [one.client_id for one in chosen[:2]] == ["a", "b"]


def test_a_client_with_work_in_hand_waits_for_one_without():
    ready = [Candidate("a", "J1", "x", "f1"), Candidate("b", "J2", "y", "f2")]
    (first,) = rules.fair_order(ready, limit=1, busy_clients={"a": 3}, busy_jobs={"J1": 3})
    assert first.client_id == "b"


def test_two_chunks_of_one_file_are_never_chosen_together():
    ready = [Candidate("a", "J1", "x", "same"), Candidate("b", "J2", "x", "same")]
    assert len(rules.fair_order(ready, limit=5, busy_clients={}, busy_jobs={})) == 1


def test_percent_and_eta_follow_the_counters():
    counts = Counts(4, pending=1, running=1, done=2)
    assert rules.percent(counts) == 50
    assert rules.eta_seconds(counts, started_at=NOW, updated_at=NOW + timedelta(seconds=10)) == 10
    assert rules.eta_seconds(Counts(4, pending=4), started_at=None, updated_at=NOW) is None
