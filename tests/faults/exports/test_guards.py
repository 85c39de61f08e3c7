"""Every guard, with and without: each scenario holds as the code stands and breaks once its guard is taken out.

A guard whose removal no test notices is decoration. Where two guards stand behind each other, both are taken out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any, NamedTuple

import httpx
import psycopg
import pytest

from lockstep.exports import claims as claims_module
from lockstep.exports import janitor, ledger, rules, sink
from lockstep.exports import store as store_module
from lockstep.exports.claims import ClaimStore
from lockstep.exports.clients import ClientStore
from lockstep.exports.model import Claim, Format, JobStatus, Receipt, Tally
from lockstep.exports.store import KeyInFlight, KeyReused, NotFound
from lockstep.kernel.errors import LockstepError, LostClaim, Terminal
from lockstep.kernel.postgres import transaction
from services import webhooks
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

OLD, RECENT = "20250215", f"{datetime.now(UTC) - timedelta(days=1):%Y%m%d}"
RECEIPT = Receipt("exports/zombie.csv", 1, 1, "f" * 64, '"zombie"', None, "v0", [{"name": "a", "type": "text"}])
_keys = (f"G{n:04d}" for n in itertools.count())


class Guard(NamedTuple):
    """What must hold, and how to take out what makes it hold."""

    holds: Callable[[World], None]
    remove: Callable[[pytest.MonkeyPatch, World], None]


def _cut(module: ModuleType, name: str, *pieces: tuple[str, str]) -> Callable[[pytest.MonkeyPatch, World], None]:
    """Take pieces out of a statement."""

    def remove(patch: pytest.MonkeyPatch, world: World) -> None:
        text = getattr(module, name)
        for old, new in pieces:
            assert old in text, f"{name} has no {old!r} any more: this row proves nothing"
            text = text.replace(old, new)
        patch.setattr(module, name, text)

    return remove


def _all(*removals: Callable[[pytest.MonkeyPatch, World], None]) -> Callable[[pytest.MonkeyPatch, World], None]:
    def remove(patch: pytest.MonkeyPatch, world: World) -> None:
        for one in removals:
            one(patch, world)

    return remove


def _put(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch, World], None]:
    return lambda patch, world: patch.setattr(owner, name, value)


def _claim(world: World, owner: str) -> tuple[ClaimStore, Claim]:
    store = world.claims(owner)
    batch = store.reserve(1)
    assert batch is not None
    claim = store.claim(batch.batch_id)
    assert claim is not None
    return store, claim


def _replaced(world: World) -> tuple[ClaimStore, Claim, Claim]:
    """A worker that slept through its lease, and the newer attempt that holds its chunk now."""
    world.submit((next(_keys), RECENT))
    store, zombie = _claim(world, "zombie")
    world.ask("UPDATE exports.job_chunk SET lease_until = now() - interval '1 s'")
    assert world.claims("reaper").reap() == 1
    world.ask("UPDATE exports.job_chunk SET run_at = now()")
    _, newer = _claim(world, "newer")
    assert newer.chunk_key == zombie.chunk_key
    return store, zombie, newer


def _assert_held(world: World, claim: Claim) -> None:
    row = world.ask("SELECT status, fence, sha256 FROM exports.job_chunk WHERE chunk_key = %s", claim.chunk_key)
    assert row == [("RUNNING", claim.fence, None)]
    assert world.ask("SELECT count(*) FROM exports.file_cache WHERE file_id = %s", claim.file_id) == [(0,)]


# --- the attempt fence ----------------------------------------------------------------------------------------------


def a_replaced_worker_publishes_nothing(world: World) -> None:
    store, zombie, newer = _replaced(world)
    with suppress(LostClaim), store.publishing(zombie) as publication:
        publication.record(RECEIPT)
    _assert_held(world, newer)


def a_replaced_worker_keeps_nothing_alive(world: World) -> None:
    store, zombie, newer = _replaced(world)
    with pytest.raises(LostClaim):
        store.beat(zombie, 7)
    _assert_held(world, newer)


def a_replaced_worker_fails_nothing(world: World) -> None:
    store, zombie, newer = _replaced(world)
    with suppress(LostClaim):
        store.fail(zombie, "late", rules.GiveUp())
    _assert_held(world, newer)


# --- the publish condition ------------------------------------------------------------------------------------------


def an_older_upload_replaces_no_newer_file(world: World) -> None:
    objects, name = world.worker()._objects, f"exports/{next(_keys)}.csv"
    stale, fresh = objects.upload(name, Format.CSV), objects.upload(name, Format.CSV)
    stale.write(b"old")
    fresh.write(b"new")
    fresh.publish(seen=None)
    with suppress(sink.NameMoved):
        stale.publish(seen=None)
    assert world.read(name) == b"new"


def an_older_upload_in_parts_replaces_no_newer_file(world: World) -> None:
    objects, name = world.worker()._objects, f"exports/{next(_keys)}.csv"
    stale, fresh = objects.upload(name, Format.CSV), objects.upload(name, Format.CSV)
    stale.write(b"o" * sink.PART_BYTES)
    stale.write(b"ld")
    fresh.write(b"new")
    fresh.publish(seen=None)
    with suppress(sink.NameMoved):
        stale.publish(seen=None)
    stale.abort()
    assert world.read(name) == b"new"


def _unconditional(patch: pytest.MonkeyPatch, world: World) -> None:
    put, complete = sink.Upload._put, sink.Upload._complete
    patch.setattr(sink.Upload, "_put", lambda self, condition: put(self, {}))
    patch.setattr(sink.Upload, "_complete", lambda self, condition: complete(self, {}))


# --- the lease, single flight, attempts -----------------------------------------------------------------------------


def a_living_worker_keeps_its_chunk(world: World) -> None:
    world.submit((next(_keys), RECENT))
    store, claim = _claim(world, "alive")
    assert world.claims("reaper").reap() == 0
    assert store.beat(claim, 1) is False


def one_file_has_one_builder(world: World) -> None:
    key = next(_keys)
    first, second = world.claims("first"), world.claims("second")
    world.submit((key, RECENT))
    earlier = first.reserve(1)
    world.submit((key, RECENT))
    later = second.reserve(1)
    assert earlier is not None
    assert later is not None
    assert first.claim(earlier.batch_id) is not None
    assert second.claim(later.batch_id) is None


def _no_single_flight(patch: pytest.MonkeyPatch, world: World) -> None:
    world.ask("DROP INDEX exports.job_chunk_one_builder")
    _cut(claims_module, "_CLAIM", ("r.status = 'RUNNING'", "false"))(patch, world)


def spent_attempts_are_not_claimed_again(world: World) -> None:
    world.submit((next(_keys), RECENT))
    world.ask("UPDATE exports.job_chunk SET attempts = %s", world.limits.max_attempts)
    store = world.claims()
    batch = store.reserve(1)
    assert batch is None or store.claim(batch.batch_id) is None


# --- terminal states ------------------------------------------------------------------------------------------------


def a_cancelled_job_starts_nothing(world: World) -> None:
    job_id, store = world.submit((next(_keys), RECENT)), world.claims()
    batch = store.reserve(1)
    assert batch is not None
    world.jobs.cancel(job_id)
    with suppress(LockstepError):
        store.claim(batch.batch_id)
    assert world.job(job_id).status is JobStatus.CANCELLED


_OPEN_JOB = "status IN ('SUBMITTED', 'IN_PROGRESS') AND NOT {}cancel_requested"


def a_finished_job_never_changes(world: World) -> None:
    job_id = world.submit((next(_keys), RECENT))
    world.drain()
    before = world.job(job_id)
    with suppress(Terminal), transaction(world.state) as connection:
        ledger.settle(connection, {job_id: ledger.Delta(pending=1, done=-1, generated=-1)})
    assert world.job(job_id) == before
    assert before.status is JobStatus.COMPLETED


def _reopening(patch: pytest.MonkeyPatch, world: World) -> None:
    after = ledger._after
    patch.setattr(ledger, "_after", lambda row, delta: after(row, replace(delta, reopen=True)))


# --- idempotency keys -----------------------------------------------------------------------------------------------


def _submit(world: World, key: str, *, force: bool = False) -> str:
    body = {"items": [{"key": "ABC", "effectiveDates": [OLD]}], "force": force}
    submission = rules.parse_submission(body, world.limits)
    return world.jobs.submit(world.client.client, submission, body, idempotency_key=key).job_id


def a_repeated_key_makes_one_job(world: World) -> None:
    key = next(_keys)
    first, again = _submit(world, key), ""
    with suppress(LockstepError):
        again = _submit(world, key)
    assert again == first


def a_key_belongs_to_one_body(world: World) -> None:
    key = next(_keys)
    _submit(world, key)
    with pytest.raises(KeyReused):
        _submit(world, key, force=True)


def a_key_is_answered_by_one_request_at_a_time(world: World) -> None:
    key = next(_keys)
    with psycopg.connect(world.state_dsn) as other:
        other.execute(_HOLD_KEY, (world.client.client.client_id, key))
        with pytest.raises(KeyInFlight):
            _submit(world, key)


_HOLD_KEY = "SELECT pg_advisory_xact_lock(hashtextextended('exports.idempotency/' || %s || '/' || %s, 0))"


# --- tenants --------------------------------------------------------------------------------------------------------


def a_job_is_shown_to_its_client_only(world: World) -> None:
    job_id, other = world.submit((next(_keys), RECENT)), ClientStore(world.state).add(next(_keys))
    with pytest.raises(NotFound):
        world.jobs.get(job_id, client=other.client)
    with pytest.raises(NotFound):
        world.jobs.cancel(job_id, client=other.client)


def _blind(patch: pytest.MonkeyPatch, world: World) -> None:
    get = store_module._get
    patch.setattr(store_module, "_get", lambda connection, job_id, client: get(connection, job_id, None))


def files_stay_inside_their_tenant(world: World) -> None:
    key, other = next(_keys), ClientStore(world.state).add(next(_keys), tenant=f"t{next(_keys).lower()}")
    world.submit((key, OLD))
    world.drain()
    job_id = world.submit((key, OLD), client=other)
    world.drain()
    assert world.job(job_id).generated == 1


# --- reuse and freshness --------------------------------------------------------------------------------------------


def a_file_that_is_gone_is_not_handed_out(world: World) -> None:
    key = next(_keys)
    world.submit((key, OLD))
    world.drain()
    world.s3.delete_object(Bucket=world.bucket, Key=f"exports/2025/02/15/{key}_20250215.csv")
    job_id = world.submit((key, OLD))
    world.drain()
    assert world.job(job_id).generated == 1


def a_file_that_changed_after_the_look_is_not_handed_out(world: World) -> None:
    key = next(_keys)
    world.submit((key, OLD))
    world.drain()
    job_id, store = world.submit((key, OLD)), world.claims()
    batch = store.reserve(1)
    assert batch is not None
    seen = store.reuse_candidates(batch.batch_id)
    world.ask("UPDATE exports.file_cache SET generation = generation + 1")
    assert store.reuse(seen) == 0
    assert world.job(job_id).counts.pending == 1


def a_build_serves_nobody_who_asked_after_it_began(world: World) -> None:
    key = next(_keys)
    world.submit((key, RECENT))
    store, claim = _claim(world, "builder")
    late = world.submit((key, RECENT))
    world.worker(store)._one(claim, Tally())
    assert world.job(late).counts.pending == 1


# --- what is around the chunks --------------------------------------------------------------------------------------


def an_open_breaker_lets_nobody_through(world: World) -> None:
    world.submit((next(_keys), RECENT))
    world.claims().trip("s3", "away")
    assert world.claims().reserve(5) is None


def gc_waits_for_a_publication_and_sees_its_record(world: World) -> None:
    key = next(_keys)
    world.submit((key, OLD))
    store, claim = _claim(world, "builder")
    objects, name = world.worker()._objects, f"exports/2025/02/15/{key}_20250215.csv"
    world.s3.put_object(Bucket=world.bucket, Key=name, Body=b"x")
    waiting = (
        "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
        " WHERE d.datname = current_database() AND locktype = 'advisory' AND NOT granted"
    )
    with ThreadPoolExecutor(1) as other:
        with store.publishing(claim) as publication:
            gone = other.submit(janitor.remove, world.state, objects, name)
            while world.ask(waiting) == [(0,)] and not gone.done():
                time.sleep(0.01)
            publication.record(replace(RECEIPT, object_key=name))
        assert gone.result(timeout=30) is False
    assert world.read(name) == b"x"


def no_private_address_is_accepted(world: World) -> None:
    body = {
        "items": [{"key": "ABC", "effectiveDates": [OLD]}],
        "webhook": {"url": "https://169.254.169.254/latest"},
    }
    with pytest.raises(rules.BadSubmission):
        rules.parse_submission(body, world.limits)


def no_private_address_is_called(world: World) -> None:
    calls: list[httpx.Request] = []
    wire = httpx.MockTransport(lambda request: calls.append(request) or httpx.Response(204))
    guard = webhooks.PublicOnly(resolve=lambda host, port: ["10.0.0.1"], inner=wire)
    with suppress(httpx.UnsupportedProtocol), httpx.Client(transport=guard) as client:
        client.post("https://hooks.example.com/", json={})
    assert calls == []


_FENCE = ("c.fence = %(fence)s", "%(fence)s::bigint IS NOT NULL")

GUARDS = {
    "fence of publish": Guard(
        a_replaced_worker_publishes_nothing,
        _all(_cut(claims_module, "_GUARD", _FENCE), _cut(claims_module, "_DONE", _FENCE)),
    ),
    "fence of heartbeats": Guard(a_replaced_worker_keeps_nothing_alive, _cut(claims_module, "_BEAT", _FENCE)),
    "fence of failures": Guard(
        a_replaced_worker_fails_nothing, _cut(claims_module, "_FAIL", ("fence = %(fence)s", "%(fence)s::bigint > 0"))
    ),
    "publish condition": Guard(an_older_upload_replaces_no_newer_file, _unconditional),
    "publish condition of parts": Guard(an_older_upload_in_parts_replaces_no_newer_file, _unconditional),
    "claim lease": Guard(
        a_living_worker_keeps_its_chunk,
        _cut(claims_module, "_EXPIRED", ("AND c.lease_until <= clock_timestamp()", "")),
    ),
    "single flight": Guard(one_file_has_one_builder, _no_single_flight),
    "attempts at the claim": Guard(
        spent_attempts_are_not_claimed_again, _cut(claims_module, "_CLAIM", ("AND c.attempts < %(max)s", ""))
    ),
    "cancelled jobs": Guard(
        a_cancelled_job_starts_nothing,
        _all(
            _cut(claims_module, "_CLAIM", (f"j.{_OPEN_JOB.format('j.')}", "true")),
            _cut(claims_module, "_START", (_OPEN_JOB.format(""), "true")),
        ),
    ),
    "terminal states": Guard(a_finished_job_never_changes, _reopening),
    "idempotency key": Guard(
        a_repeated_key_makes_one_job,
        _cut(store_module, "_SEEN_KEY", ("idempotency_key = %s", "idempotency_key = %s AND false")),
    ),
    "body of an idempotency key": Guard(
        a_key_belongs_to_one_body, _put(store_module, "canonical_json", lambda value: '"the same"')
    ),
    "idempotency key in flight": Guard(
        a_key_is_answered_by_one_request_at_a_time,
        _put(store_module, "_TRY_KEY", "SELECT %s::text IS NOT NULL AND %s::text IS NOT NULL"),
    ),
    "owner of a job": Guard(a_job_is_shown_to_its_client_only, _blind),
    "tenant of a file": Guard(
        files_stay_inside_their_tenant,
        _put(rules, "file_id", lambda tenant, key, day, form, guard: f"{form.value}/{day:%Y%m%d}/{key}"),
    ),
    "objects that are there": Guard(
        a_file_that_is_gone_is_not_handed_out,
        _put(sink.ObjectStore, "present", lambda self, files: {one.file_id for one in files}),
    ),
    "generation of a reused file": Guard(
        a_file_that_changed_after_the_look_is_not_handed_out,
        _cut(claims_module, "_REUSE", ("AND f.generation = p.generation", "")),
    ),
    "freshness of a shared build": Guard(
        a_build_serves_nobody_who_asked_after_it_began,
        _cut(claims_module, "_ATTACH", ("AND c.created_at <= %(as_of)s", "")),
    ),
    "breaker": Guard(
        an_open_breaker_lets_nobody_through,
        _cut(claims_module, "_BROKEN", ("FROM exports.breaker", "FROM exports.breaker WHERE false")),
    ),
    "gc and publications": Guard(
        gc_waits_for_a_publication_and_sees_its_record,
        _cut(claims_module, "_GUARD", (f"pg_advisory_xact_lock_shared({claims_module.GC_LOCK})", "NULL")),
    ),
    "SSRF, by spelling": Guard(no_private_address_is_accepted, _put(rules, "_public_name", lambda host: True)),
    "SSRF, by address": Guard(no_private_address_is_called, _put(webhooks, "is_public", lambda address: True)),
}


@contextmanager
def _clean(world: World) -> Iterator[None]:
    world.ask("TRUNCATE exports.job, exports.file_cache, exports.breaker CASCADE")
    try:
        yield
    finally:
        world.ask("TRUNCATE exports.job, exports.file_cache, exports.breaker CASCADE")
        world.ask(
            "CREATE UNIQUE INDEX IF NOT EXISTS job_chunk_one_builder ON exports.job_chunk (file_id)"
            " WHERE status = 'RUNNING'"
        )


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_holds_and_its_scenario_breaks_without_it(
    module_world: World, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Guards the guards: a condition that somebody drops must not go unnoticed."""
    guard = GUARDS[name]
    with _clean(module_world):
        guard.holds(module_world)
    guard.remove(monkeypatch, module_world)
    with _clean(module_world), pytest.raises((AssertionError, pytest.fail.Exception)):
        guard.holds(module_world)
