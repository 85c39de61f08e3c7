"""The document that exports are built from, rule by rule, where no other test already has the rule's name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from lockstep.exports import rules
from lockstep.exports.fleet import run_loop
from lockstep.exports.model import PARKING_QUEUE, WORK_QUEUE, JobStatus, Place
from lockstep.exports.store import JobStore
from lockstep.kernel.postgres import connect
from lockstep.kernel.settings import load_settings
from services.exports import create_app
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

OLD, RECENT = "20250215", f"{datetime.now(UTC) - timedelta(days=1):%Y%m%d}"

COLUMNS = {
    "job": {
        "job_id": "character varying",
        "status": "character varying",
        "request_json": "jsonb",
        "created_at": "timestamp with time zone",
        "updated_at": "timestamp with time zone",
        "s3_base_path": "text",
        "error_message": "text",
    },
    "job_chunk": {
        "job_id": "character varying",
        "chunk_key": "character varying",
        "key": "character varying",
        "effective_date": "date",
        "status": "character varying",
        "attempts": "integer",
        "locked_at": "timestamp with time zone",
        "lock_owner": "character varying",
        "started_at": "timestamp with time zone",
        "completed_at": "timestamp with time zone",
        "s3_object_key": "text",
        "row_count": "bigint",
        "reused": "boolean",
        "error_message": "text",
    },
    "file_cache": {
        "key": "character varying",
        "effective_date": "date",
        "s3_object_key": "text",
        "row_count": "bigint",
        "created_at": "timestamp with time zone",
        "last_generated_at": "timestamp with time zone",
    },
}
_COLUMNS = (
    "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = 'exports' AND table_name = %s"
)
_INDEXES = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'exports' AND tablename = %s"
INDEXES = {
    "job": ["(job_id)", "(status)", "(created_at)"],
    "job_chunk": ["(job_id, chunk_key)", "(job_id, status)", "(key, effective_date)"],
    "file_cache": ["(tenant, key, effective_date, format, formula_guard)"],
}


@pytest.mark.parametrize("table", COLUMNS)
def test_the_tables_have_the_documents_columns_and_indexes(module_world: World, table: str):
    """Section 7. `row_count` is wider than the document's int; the cache's key also has what makes it tenant-safe."""
    found = dict(module_world.ask(_COLUMNS, table))
    assert {name: found.get(name) for name in COLUMNS[table]} == COLUMNS[table]
    defined = " ".join(text for (text,) in module_world.ask(_INDEXES, table))
    assert [one for one in INDEXES[table] if one not in defined] == []


@pytest.mark.parametrize(("table", "state"), [("job", "LOST"), ("job_chunk", "CANCELLING")])
def test_no_state_but_the_documents_can_be_stored(module_world: World, table: str, state: str):
    import psycopg

    module_world.submit(("ABC", OLD))
    with pytest.raises(psycopg.errors.CheckViolation):
        module_world.ask(f"UPDATE exports.{table} SET status = '{state}'")  # noqa: S608  # names of this module


def test_the_queues_have_the_documents_names_in_the_spelling_of_sqs(stack: Any, sqs: Any):
    assert (WORK_QUEUE.replace("-", "."), PARKING_QUEUE.replace("-", ".")) == ("job.chunk.work", "job.chunk.parking")
    for name in (WORK_QUEUE, PARKING_QUEUE):
        assert sqs.get_queue_url(QueueName=name)["QueueUrl"].endswith(name)


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "Pacific/Kiritimati"])
def test_the_day_of_a_job_id_is_the_utc_day_of_the_job_wherever_the_server_stands(world: World, zone: str):
    """Section 4.1. At any hour it is another day in one of these zones; numbers never start again at a new day."""
    body = {"items": [{"key": "ABC", "effectiveDates": [OLD]}]}
    submission = rules.parse_submission(body, world.limits)
    with connect(world.state_dsn, application_name="test") as session:
        session.execute("SELECT set_config('TimeZone', %s, false)", (zone,))
        jobs = JobStore(session, place=Place(world.bucket), limits=world.limits)
        made = [jobs.get(jobs.submit(world.client.client, submission, body).job_id) for _ in range(3)]
    assert [one.job_id for one in made] == [
        f"J{one.created_at.astimezone(UTC):%Y%m%d}_{one.number:06d}" for one in made
    ]
    assert len({one.number for one in made}) == len(made)


def test_a_chunk_is_one_call_of_the_function_and_one_file(world: World):
    """Section 2.2: also when other jobs want the same pair, and when the same message comes again."""
    first, second = world.submit(("ABC", RECENT), ("XYZ", RECENT)), world.submit(("ABC", RECENT))
    worker = world.worker()
    copy, calls = worker._source.copy, []

    def counted(*arguments: Any) -> Iterator[bytes]:
        calls.append(arguments[:2])
        return copy(*arguments)

    worker._source.copy = counted  # type: ignore[method-assign]
    world.drain(worker)
    assert sorted(key for key, _ in calls) == ["ABC", "XYZ"]
    assert len(world.names()) == 2
    assert {world.job(one).status for one in (first, second)} == {JobStatus.COMPLETED}


def test_the_service_neither_calls_the_function_nor_writes_files(world: World):
    """Section 3.1: it has no source at all, and the bucket stays empty until a worker comes."""
    settings = load_settings(postgres_dsn=world.state_dsn, source_dsn=None, exports_bucket=world.bucket)
    with TestClient(create_app(settings), headers={"X-Api-Key": world.client.api_key}) as http:
        job_id = http.post("/jobs", json={"items": [{"key": "ABC", "effectiveDates": [OLD]}]}).json()["jobId"]
        assert world.names() == []
        world.drain()
        assert http.get(f"/jobs/{job_id}").json()["status"] == "COMPLETED"
        assert len(http.get(f"/jobs/{job_id}/manifest").json()["files"]) == 1


def test_the_states_of_a_job_follow_its_chunks(world: World):
    """Section 12.1, with its hole closed: FAILED is told when nothing of the job moves any more."""
    world.source("DROP FUNCTION export_rows(text, date)")
    world.source(
        "CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (a integer) LANGUAGE plpgsql AS"
        " $$ BEGIN IF key = 'BAD' THEN RAISE EXCEPTION 'wrong'; END IF; RETURN QUERY SELECT 1; END $$"
    )
    job_id, seen = world.submit(("BAD", OLD), ("GOOD", OLD), ("LAST", OLD)), []
    seen.append(world.job(job_id).status)
    worker, claims = world.worker(), world.claims()
    for _ in range(3):
        batch = claims.reserve(1)
        assert batch is not None
        worker.work(batch.batch_id)
        job = world.job(job_id)
        seen.append(job.status)
        assert job.counts.pending + job.counts.running + job.counts.done + job.counts.failed == job.counts.total
    worker._source.close()
    assert seen == [JobStatus.SUBMITTED, JobStatus.IN_PROGRESS, JobStatus.IN_PROGRESS, JobStatus.FAILED]


def test_competing_workers_share_the_chunks_and_build_none_twice(world: World):
    """Section 13: any number of threads and processes work on one queue without discrepancies."""
    pairs = [(f"K{n:04d}", RECENT) for n in range(1, 25)]
    job_id = world.submit(*pairs)
    workers = [world.worker(world.claims(f"w{n}")) for n in range(4)]
    threads = [
        threading.Thread(
            target=run_loop,
            args=(worker, world.claims(f"l{n}"), threading.Event()),
            kwargs={"until_idle": True, "batch": 2},
        )
        for n, worker in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    world.drain()
    for worker in workers:
        worker._source.close()
    job = world.job(job_id)
    assert (job.status, job.generated) == (JobStatus.COMPLETED, len(pairs))
    assert {(one.attempts, one.generation) for one in world.jobs.chunks(job_id)} == {(1, 1)}


def test_a_chunk_whose_worker_died_is_taken_by_another_after_its_lease(world: World):
    """Section 11.2."""
    job_id, dead = world.submit(("ABC", RECENT)), world.claims("dead", lease=0.2)
    batch = dead.reserve(1)
    assert batch is not None
    assert dead.claim(batch.batch_id) is not None
    assert world.claims().reserve(1) is None, "while the lease lasts nobody takes it"
    deadline = datetime.now(UTC) + timedelta(seconds=20)
    while world.job(job_id).status is not JobStatus.COMPLETED and datetime.now(UTC) < deadline:
        world.drain()
        world.ask("UPDATE exports.job_chunk SET run_at = now() WHERE status = 'PENDING'")
    (chunk,) = world.jobs.chunks(job_id)
    assert (world.job(job_id).status, chunk.attempts) == (JobStatus.COMPLETED, 2)


def test_the_window_is_a_setting_and_not_in_the_code(world: World):
    """Section 7.3: with a window of zero days yesterday's file may be reused."""
    from dataclasses import replace

    world.limits = replace(world.limits, reuse_window_days=0)
    world.submit(("ABC", RECENT))
    world.drain()
    job_id = world.submit(("ABC", RECENT))
    world.drain()
    assert world.job(job_id).reused == 1


def test_progress_never_goes_back(world: World):
    """Also when a worker dies, its chunk is built again, and a failed job is retried."""
    job_id, seen = world.submit(("ABC", RECENT), ("XYZ", RECENT)), [0]
    claims = world.claims("mortal")

    def look() -> None:
        job = world.job(job_id)
        seen.append(job.counts.done)

    batch = claims.reserve(1)
    assert batch is not None
    assert claims.claim(batch.batch_id) is not None
    look()
    world.ask("UPDATE exports.job_chunk SET lease_until = now() WHERE status = 'RUNNING'")
    assert world.claims("reaper").reap() == 1
    look()
    world.drain()
    look()
    world.ask("UPDATE exports.job_chunk SET run_at = now() WHERE status = 'PENDING'")
    world.drain()
    look()
    assert seen == sorted(seen)
    assert seen[-1] == 2
