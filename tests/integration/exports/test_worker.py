"""A worker on the real parts: what it builds, what it reuses, what it does when things break."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.parquet as pq
import pytest

from lockstep.exports import rules
from lockstep.exports.claims import ClaimStore
from lockstep.exports.clients import ClientStore
from lockstep.exports.model import ChunkStatus, Format, JobStatus, Tally
from lockstep.exports.sink import NameMoved
from lockstep.kernel.errors import LostClaim, Transient
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

OLD, RECENT = "20250215", f"{datetime.now(UTC) - timedelta(days=1):%Y%m%d}"


def test_a_job_becomes_files_at_the_documents_paths(world: World):
    job_id = world.submit(("ABC", OLD), ("ABC", "20250315"), ("XYZ", OLD))
    assert world.job(job_id).status is JobStatus.SUBMITTED
    world.drain()
    job = world.job(job_id)
    assert (job.status, job.counts.done, job.generated) == (JobStatus.COMPLETED, 3, 3)
    assert world.names() == [
        "exports/2025/02/15/ABC_20250215.csv",
        "exports/2025/02/15/XYZ_20250215.csv",
        "exports/2025/03/15/ABC_20250315.csv",
    ]
    assert job.s3_base_path == f"s3://{world.bucket}/exports/"
    for chunk in world.jobs.chunks(job_id):
        data = world.read(str(chunk.object_key))
        assert hashlib.sha256(data).hexdigest() == chunk.sha256
        assert (len(data), data.count(b"\n") - 1) == (chunk.bytes, chunk.rows)
    assert job.rows == sum(chunk.rows or 0 for chunk in world.jobs.chunks(job_id))


def test_the_csv_dialect_keeps_null_and_empty_apart_and_the_order_total(world: World):
    job_id = world.submit(("ABC", OLD))
    world.drain()
    text = world.read("exports/2025/02/15/ABC_20250215.csv").decode()
    lines = text.splitlines()
    assert lines[0] == "line_no,account,product,quantity,price,traded_at,note"
    assert "\r" not in text
    assert text.endswith("\n")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [int(row["line_no"]) for row in rows] == list(range(1, len(rows) + 1))
    assert lines[1].endswith(',""')  # empty text
    assert lines[5].endswith(",")  # NULL
    assert world.job(job_id).rows == len(rows)


def test_the_same_data_gives_the_same_bytes_in_every_format(world: World):
    """Guards byte identity: it is what makes checksums, reuse and single flight mean something."""
    for form in ("CSV", "csv.gz", "ndjson", "parquet"):
        seen = set()
        for _ in range(2):
            job_id = world.submit(("ABC", OLD), output={"format": form}, force=True)
            world.drain()
            (chunk,) = world.jobs.chunks(job_id)
            seen.add(chunk.sha256)
        assert len(seen) == 1, form
    plain = world.read("exports/2025/02/15/ABC_20250215.csv")
    assert gzip.decompress(world.read("exports/2025/02/15/ABC_20250215.csv.gz")) == plain
    objects = [json.loads(line) for line in world.read("exports/2025/02/15/ABC_20250215.ndjson").splitlines()]
    table = pq.read_table(io.BytesIO(world.read("exports/2025/02/15/ABC_20250215.parquet")))
    assert len(objects) == table.num_rows == plain.count(b"\n") - 1
    assert [one["note"] for one in objects] == table.column("note").to_pylist()
    assert objects[4]["note"] is None
    assert objects[0]["note"] == ""


def test_a_json_value_written_over_several_lines_is_one_line_of_ndjson(world: World):
    """Guards readers that split at line ends: `json` keeps the text that was stored, with its line ends."""
    world.source("DROP FUNCTION export_rows(text, date)")
    world.source(
        "CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (a integer, j json) LANGUAGE sql AS"
        """ $$ VALUES (1, E'{\n "b": "x\\\\ny",\r\n "a": 1}'::json), (2, NULL) $$"""
    )
    job_id = world.submit(("ABC", OLD), output={"format": "ndjson"})
    world.drain()
    lines = world.read("exports/2025/02/15/ABC_20250215.ndjson").decode().splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 1, "j": {"b": "x\ny", "a": 1}}, {"a": 2, "j": None}]
    assert world.job(job_id).rows == len(lines)


def test_the_formula_guard_defuses_text_and_has_a_path_of_its_own(world: World):
    world.source("DROP FUNCTION export_rows(text, date)")
    world.source(
        "CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (a text, b integer)"
        " LANGUAGE sql AS $$ VALUES ('=1+1', -5), ('plain', 1), ('@x', 2) $$"
    )
    world.submit(("ABC", OLD), output={"formulaGuard": "quote"})
    world.submit(("ABC", OLD))
    world.drain()
    assert world.read("exports/2025/02/15/ABC_20250215.guarded.csv") == b"a,b\n'=1+1,-5\n'@x,2\nplain,1\n"
    assert world.read("exports/2025/02/15/ABC_20250215.csv") == b"a,b\n=1+1,-5\n@x,2\nplain,1\n"


def test_an_old_day_is_reused_and_a_recent_one_is_made_anew(world: World):
    first = world.submit(("ABC", OLD), ("ABC", RECENT))
    world.drain()
    second = world.submit(("ABC", OLD), ("ABC", RECENT))
    world.drain()
    assert (world.job(first).generated, world.job(first).reused) == (2, 0)
    assert (world.job(second).generated, world.job(second).reused) == (1, 1)
    old, recent = world.jobs.chunks(second)
    assert (old.reused, old.generation) == (True, 1)
    assert (recent.reused, recent.generation) == (False, 2)


@pytest.mark.parametrize("options", [{"force": True}, {"maxAge": 0}])
def test_a_client_can_refuse_reuse(module_world: World, options: dict[str, Any]):
    module_world.submit(("K0001", OLD))
    module_world.drain()
    job_id = module_world.submit(("K0001", OLD), **options)
    module_world.drain()
    assert module_world.job(job_id).generated == 1


def test_a_file_that_is_gone_changed_or_of_another_version_is_built_again(world: World):
    """Guards against DONE with nothing, or something else, behind it."""
    pairs = [("K0001", OLD), ("K0002", OLD), ("K0003", OLD)]
    world.submit(*pairs)
    world.drain()
    world.s3.delete_object(Bucket=world.bucket, Key="exports/2025/02/15/K0001_20250215.csv")
    world.s3.put_object(Bucket=world.bucket, Key="exports/2025/02/15/K0002_20250215.csv", Body=b"tampered")
    again = world.submit(*pairs)
    world.drain()
    assert (world.job(again).generated, world.job(again).reused) == (2, 1)
    world.source("COMMENT ON FUNCTION export_rows(text, date) IS 'same'")
    world.source("ALTER FUNCTION export_rows(text, date) COST 777")
    changed = world.submit(*pairs)
    world.drain()
    assert world.job(changed).generated == 3


def test_a_worker_that_stays_sees_that_the_function_was_replaced(world: World):
    """Guards a fleet that runs for days: its session is older than the function, its next batch must not be."""
    worker, claims = world.worker(), world.claims()

    def work() -> Tally:
        job_id = world.submit(("ABC", OLD))
        batch = claims.reserve(1)
        assert batch is not None
        tally = worker.work(batch.batch_id)
        assert world.job(job_id).status is JobStatus.COMPLETED
        return tally

    assert (work().built, work().reused) == (1, 1)
    _break_function(world, "")  # other columns
    assert work().built == 1
    assert world.read("exports/2025/02/15/ABC_20250215.csv") == b"a\n1\n"
    world.source("ALTER FUNCTION export_rows(text, date) COST 777")
    assert (work().built, work().reused) == (1, 1)
    worker._source.close()


@pytest.mark.parametrize("moment", ["last_generated_at", "as_of"])
def test_a_file_made_while_its_data_was_moving_is_never_reused(world: World, moment: str):
    """Also if it was read before its data was final and published after."""
    world.submit(("ABC", OLD))
    world.drain()
    world.ask(f"UPDATE exports.file_cache SET {moment} = '2025-02-20T00:00:00Z'")  # noqa: S608  # names of this module
    body = {"items": [{"key": "ABC", "effectiveDates": [OLD]}]}
    assert world.jobs.plan(world.client.client, rules.parse_submission(body, world.limits)).reusable == 0
    job_id = world.submit(("ABC", OLD))
    world.drain()
    assert world.job(job_id).generated == 1


def test_two_jobs_that_want_one_file_build_it_once(world: World):
    first, second = world.submit(("ABC", RECENT)), world.submit(("ABC", RECENT), ("XYZ", RECENT))
    tally = world.drain()
    assert (tally.built, tally.attached) == (2, 1)
    jobs = [world.job(first), world.job(second)]
    assert [job.status for job in jobs] == [JobStatus.COMPLETED] * 2
    assert sum(job.generated for job in jobs) == 2
    assert sum(job.reused for job in jobs) == 1


def test_a_job_submitted_after_a_build_began_is_not_served_by_it(world: World):
    """Guards freshness: a file read before the request may miss what the client knows is there."""
    world.submit(("ABC", RECENT))
    claims = world.claims()
    batch = claims.reserve(5)
    assert batch is not None
    claim = claims.claim(batch.batch_id)
    assert claim is not None
    late = world.submit(("ABC", RECENT))
    worker = world.worker(claims)
    worker._one(claim, Tally())
    assert world.job(late).counts.pending == 1
    world.drain()
    assert world.job(late).generated == 1


def test_a_chunk_whose_file_is_being_built_is_not_set_aside_in_vain(world: World):
    """Guards the database: a worker that can take nothing must find nothing, and wait, instead of asking on and on."""
    first = world.submit(("ABC", RECENT))
    claims = world.claims()
    batch = claims.reserve(5)
    assert batch is not None
    claim = claims.claim(batch.batch_id)
    assert claim is not None
    late = world.submit(("ABC", RECENT), ("XYZ", RECENT))
    idle = world.claims("idle")
    other = idle.reserve(5)
    assert other is not None
    assert other.size == 1, "the other file of the same job is not held up"
    assert idle.reserve(5) is None
    world.worker(claims)._one(claim, Tally())
    idle.release(other.batch_id)
    world.drain()
    assert {world.job(one).status for one in (first, late)} == {JobStatus.COMPLETED}


def test_files_are_not_shared_between_tenants(world: World):
    other = ClientStore(world.state).add("other", tenant="acme")
    world.submit(("ABC", OLD))
    world.drain()
    job_id = world.submit(("ABC", OLD), client=other)
    world.drain()
    assert world.job(job_id).generated == 1
    assert "exports/acme/2025/02/15/ABC_20250215.csv" in world.names()


def _break_function(world: World, body: str) -> None:
    world.source("DROP FUNCTION IF EXISTS export_rows(text, date)")
    world.source(
        "CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (a integer)"
        f" LANGUAGE plpgsql AS $$ BEGIN {body} RETURN QUERY SELECT 1; END $$"
    )


def test_a_chunk_fails_after_its_last_attempt_and_the_job_with_it(world: World):
    _break_function(world, "IF key = 'ABC' THEN RAISE EXCEPTION 'busy' USING ERRCODE = '40001'; END IF;")
    job_id = world.submit(("ABC", "20250315"), ("XYZ", OLD))
    for _ in range(world.limits.max_attempts + 2):
        world.drain()
        world.ask("UPDATE exports.job_chunk SET run_at = now() WHERE status = 'PENDING'")
    job = world.job(job_id)
    assert (job.status, job.counts.done, job.counts.failed) == (JobStatus.FAILED, 1, 1)
    assert job.error_message == "Chunk failed after retries: key=ABC date=2025-03-15"
    assert world.jobs.chunks(job_id)[0].attempts == world.limits.max_attempts
    parked = world.ask("SELECT payload FROM kernel.outbox WHERE destination = 'sqs:job-chunk-parking'")
    assert [(one["jobId"], one["key"], one["effectiveDate"]) for (one,) in parked] == [(job_id, "ABC", "20250315")]


def test_retry_runs_only_the_failed_chunks_and_the_job_completes(world: World):
    _break_function(world, "IF key = 'ABC' THEN RAISE EXCEPTION 'wrong'; END IF;")
    job_id = world.submit(("ABC", OLD), ("XYZ", OLD))
    world.drain()
    assert world.job(job_id).status is JobStatus.FAILED
    done_before = [one for one in world.jobs.chunks(job_id) if one.status == ChunkStatus.DONE]
    _break_function(world, "")
    assert world.jobs.retry(job_id).status is JobStatus.IN_PROGRESS
    world.drain()
    job = world.job(job_id)
    assert (job.status, job.counts.done, job.error_message) == (JobStatus.COMPLETED, 2, None)
    untouched = next(one for one in world.jobs.chunks(job_id) if one.key == "XYZ")
    assert untouched.completed_at == done_before[0].completed_at


def test_a_chunk_that_could_be_reused_fails_like_any_other_when_the_function_is_gone(world: World):
    """Guards against a job that never ends: the worker would die before it takes the chunk, again and again."""
    world.submit(("ABC", OLD))
    world.drain()
    world.source("DROP FUNCTION export_rows(text, date)")
    job_id = world.submit(("ABC", OLD))
    world.drain()
    (chunk,) = world.jobs.chunks(job_id)
    assert (world.job(job_id).status, chunk.status) == (JobStatus.FAILED, ChunkStatus.FAILED)
    assert "the source has no function export_rows" in str(chunk.error_message)


def _refused() -> Any:
    raise Transient("connection refused")


def test_an_outage_of_the_source_costs_time_and_no_attempts(world: World):
    """Guards against thirty seconds without a database burning five attempts of every chunk."""
    job_id = world.submit(("ABC", OLD), ("XYZ", OLD))
    worker = world.worker()
    worker._source._connect = _refused
    for _ in range(world.limits.max_attempts + 3):
        tally = world.drain(worker)
        world.ask("UPDATE exports.breaker SET open_until = now()")
        world.ask("UPDATE exports.job_chunk SET run_at = now() WHERE status = 'PENDING'")
    assert tally.postponed == 1, "one chunk at a time tries a part that was broken"
    assert [chunk.attempts for chunk in world.jobs.chunks(job_id)] == [0, 0]
    assert world.claims().breakers() == {"source": False}
    world.drain()
    assert world.job(job_id).status is JobStatus.COMPLETED
    assert world.claims().breakers() == {}


def test_a_chunk_whose_statement_ends_its_session_fails_in_the_end_and_the_others_are_built(world: World):
    """Guards everybody else: a chunk that kills the server's session must not be taken for an outage for ever."""
    _break_function(world, "IF key = 'ABC' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;")
    job_id = world.submit(("ABC", OLD), ("XYZ", OLD))
    for _ in range(world.limits.max_attempts + rules.MOST_REFUNDS):
        world.drain()
        world.ask("UPDATE exports.breaker SET open_until = now()")
        world.ask("UPDATE exports.job_chunk SET run_at = now() WHERE status = 'PENDING'")
    world.drain()
    poison, good = world.jobs.chunks(job_id)
    assert (poison.status, poison.attempts) == (ChunkStatus.FAILED, world.limits.max_attempts)
    assert "57P01" in str(poison.error_message)
    assert good.status == ChunkStatus.DONE
    assert world.job(job_id).status is JobStatus.FAILED
    world.jobs.retry(job_id)
    world.ask("UPDATE exports.breaker SET open_until = now()")
    assert world.drain().postponed == 1
    poison, _ = world.jobs.chunks(job_id)
    assert (poison.status, poison.attempts) == (ChunkStatus.PENDING, 0), "a retry begins with all that was used up"


def test_a_chunk_beyond_a_lowered_limit_of_attempts_fails_and_does_not_wait_for_ever(world: World):
    job_id = world.submit(("ABC", OLD), ("XYZ", OLD))
    world.ask("UPDATE exports.job_chunk SET attempts = %s WHERE key = 'ABC'", world.limits.max_attempts + 1)
    world.drain()
    job, (spent, good) = world.job(job_id), world.jobs.chunks(job_id)
    assert (job.status, job.error_message) == (
        JobStatus.FAILED,
        "Chunk failed after retries: key=ABC date=2025-02-15",
    )
    assert (spent.status, good.status) == (ChunkStatus.FAILED, ChunkStatus.DONE)
    parked = world.ask("SELECT payload FROM kernel.outbox WHERE destination = 'sqs:job-chunk-parking'")
    assert [one["key"] for (one,) in parked] == ["ABC"]
    assert world.jobs.retry(job_id).status is JobStatus.IN_PROGRESS
    world.drain()
    assert world.job(job_id).status is JobStatus.COMPLETED


def test_a_client_with_many_jobs_does_not_hide_the_only_job_of_another(world: World, monkeypatch: pytest.MonkeyPatch):
    """Guards fairness where it begins: a job that is not looked at is never chosen."""
    monkeypatch.setattr("lockstep.exports.claims._MOST_JOBS", 3)
    for number in range(1, 6):
        world.submit((f"K{number:04d}", OLD))
    only = world.submit(("ABC", OLD), client=ClientStore(world.state).add("other"))
    claims = world.claims()
    batch = claims.reserve(2)
    assert batch is not None
    assert only in {job for (job,) in world.ask("SELECT job_id FROM exports.job_chunk WHERE batch_id IS NOT NULL")}


def test_nothing_is_reserved_while_a_breaker_is_open(world: World):
    world.submit(("ABC", OLD))
    world.claims().trip("s3", "away")
    assert world.claims().reserve(5) is None


def test_files_that_are_reused_end_an_outage_too(world: World):
    """Guards a job that builds nothing: after an outage it would go on one chunk at a time, to its end."""
    days = [f"202502{n}" for n in range(10, 20)]
    world.submit(*(("ABC", day) for day in days))
    world.drain()
    job_id = world.submit(*(("ABC", day) for day in days))
    world.claims().trip("s3", "away")
    world.ask("UPDATE exports.breaker SET open_until = now()")
    claims, worker = world.claims(), world.worker()
    probe = claims.reserve(100)
    assert probe is not None
    assert probe.size == 1
    worker.work(probe.batch_id)
    rest = claims.reserve(100)
    assert rest is not None
    assert rest.size == len(days) - 1
    worker.work(rest.batch_id)
    worker._source.close()
    assert world.job(job_id).reused == len(days)
    assert world.claims().breakers() == {}


def test_cancel_before_any_work_ends_the_job_at_once_and_nothing_is_built(world: World):
    job_id = world.submit(("ABC", OLD))
    assert world.jobs.cancel(job_id).status is JobStatus.CANCELLED
    assert world.jobs.cancel(job_id).status is JobStatus.CANCELLED
    world.drain()
    assert world.names() == []


def test_a_running_build_stops_at_its_next_heartbeat(world: World):
    world.source("DROP FUNCTION export_rows(text, date)")
    world.source(
        "CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (a text) LANGUAGE sql AS "
        "$$ SELECT repeat(md5(n::text), 100) FROM generate_series(1, 200000) AS n $$"
    )
    job_id = world.submit(("ABC", OLD), ("XYZ", OLD))
    claims = world.claims()
    worker = world.worker(claims, every=0.05)
    with worker._pulse:
        running = threading.Thread(target=lambda: world.drain(worker))
        running.start()
        deadline = time.monotonic() + 60
        while world.job(job_id).counts.running == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert world.jobs.cancel(job_id).cancel_requested
        running.join(timeout=60)
    job = world.job(job_id)
    assert (job.status, job.counts.done) == (JobStatus.CANCELLED, 0)
    assert world.names() == []


def test_a_build_that_waits_for_its_first_row_is_interrupted(world: World):
    """Guards cancel against a slow function: no piece arrives, so nothing between pieces can notice anything."""
    world.source("DROP FUNCTION export_rows(text, date)")
    world.source(
        "CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (a integer) LANGUAGE sql AS"
        " $$ SELECT 1 FROM pg_sleep(CASE WHEN key = 'SLOW' THEN 600 ELSE 0 END) $$"
    )
    job_id = world.submit(("SLOW", OLD))
    worker = world.worker(every=0.1)
    with worker._pulse:
        running = threading.Thread(target=lambda: world.drain(worker))
        running.start()
        deadline = time.monotonic() + 30
        while world.job(job_id).counts.running == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        world.jobs.cancel(job_id)
        running.join(timeout=30)
        assert not running.is_alive()
        assert world.job(job_id).status is JobStatus.CANCELLED
        after = world.submit(("QUICK", OLD))
        world.drain(worker)
    assert world.job(after).status is JobStatus.COMPLETED, "the interrupt hits no later statement"
    assert [one.attempts for one in world.jobs.chunks(job_id)] == [0]


def _claimed(world: World, claims: ClaimStore) -> Any:
    batch = claims.reserve(1)
    assert batch is not None
    claim = claims.claim(batch.batch_id)
    assert claim is not None
    return claim


def _expire(world: World) -> None:
    world.ask("UPDATE exports.job_chunk SET lease_until = now() - interval '1 s' WHERE status = 'RUNNING'")
    assert world.claims("reaper").reap() >= 1
    world.ask("UPDATE exports.job_chunk SET run_at = now() WHERE status = 'PENDING'")


def test_a_worker_that_was_replaced_changes_nothing(world: World):
    """Guards every write of a zombie: beat, publish and fail; the newer attempt's file stays."""
    job_id = world.submit(("ABC", RECENT))
    zombie_store = world.claims("zombie")
    zombie = _claimed(world, zombie_store)
    _expire(world)
    world.drain()
    before = (world.job(job_id), world.read(world.names()[0]), world.ask("SELECT * FROM exports.file_cache"))
    with pytest.raises(LostClaim):
        zombie_store.beat(zombie, 5)
    with pytest.raises(LostClaim), zombie_store.publishing(zombie):
        pytest.fail("a zombie may not publish")
    with pytest.raises(LostClaim):
        zombie_store.fail(zombie, "late", rules.GiveUp())
    assert before == (world.job(job_id), world.read(world.names()[0]), world.ask("SELECT * FROM exports.file_cache"))


def test_an_old_upload_cannot_replace_a_newer_file(world: World):
    """Guards the name itself: even a publisher that passed the fence before it was paused is refused by the store."""
    world.submit(("ABC", RECENT))
    stale = world.worker()._objects.upload("exports/x.csv", Format.CSV)
    stale.write(b"old")
    fresh = world.worker()._objects.upload("exports/x.csv", Format.CSV)
    fresh.write(b"new")
    fresh.publish(seen=None)
    with pytest.raises(NameMoved):
        stale.publish(seen=None)
    assert world.read("exports/x.csv") == b"new"


def test_bytes_that_no_record_knows_are_replaced_by_the_next_attempt(world: World):
    """Guards the crash between object and commit: the record and the file must agree again."""
    key = "exports/2025/02/15/ABC_20250215.csv"
    world.s3.put_object(Bucket=world.bucket, Key=key, Body=b"left behind")
    job_id = world.submit(("ABC", OLD))
    world.drain()
    (chunk,) = world.jobs.chunks(job_id)
    assert hashlib.sha256(world.read(key)).hexdigest() == chunk.sha256


def test_a_worker_that_dies_again_and_again_cannot_spend_more_than_its_attempts(world: World):
    """Guards against a chunk that kills its worker: no error path ever runs, the claim must count."""
    job_id = world.submit(("ABC", OLD))
    for _ in range(world.limits.max_attempts):
        _claimed(world, world.claims())
        _expire(world)
    assert world.claims().reserve(1) is None
    job = world.job(job_id)
    assert (job.status, job.counts.failed) == (JobStatus.FAILED, 1)


def test_a_large_chunk_goes_up_in_parts_and_is_whole(world: World):
    world.source("DROP FUNCTION export_rows(text, date)")
    world.source(
        "CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (n integer, a text) LANGUAGE sql AS "
        "$$ SELECT n, repeat(md5(n::text), 20) FROM generate_series(1, 30000) AS n $$"
    )
    job_id = world.submit(("ABC", OLD))
    world.drain()
    (chunk,) = world.jobs.chunks(job_id)
    assert (chunk.bytes or 0) > 16 * 2**20
    assert hashlib.sha256(world.read(str(chunk.object_key))).hexdigest() == chunk.sha256
    again = world.submit(("ABC", OLD))
    world.drain()
    assert world.job(again).reused == 1


def test_the_messages_of_a_job_name_its_chunks_as_documented(world: World):
    job_id = world.submit(("ABC", OLD))
    ((payload,),) = world.ask("SELECT payload FROM kernel.outbox WHERE destination = 'sqs:job-chunk-work'")
    assert payload == {"jobId": job_id, "key": "ABC", "effectiveDate": OLD}
