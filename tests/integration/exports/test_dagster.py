"""The Dagster doors on real parts: the sensor's batches, a partition rebuilt by hand, manifests and checks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from lockstep.exports import inspect
from lockstep.exports.model import CHUNKS_ASSET, JobStatus, Place, Tally
from lockstep.exports.queue import ChunkQueue, parse_message
from lockstep.exports.sink import ObjectStore, StoreDown
from platform_assets import exports as export_assets
from platform_assets.definitions import build_definitions
from platform_assets.export_events import chunk_partitions
from resources.aws import SqsResource
from resources.spark import SparkResource
from sensors.exports import build_run_request, export_chunks_sensor
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

OLD = "20250215"


@pytest.fixture
def deployed(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world as the settings of this process, as a run finds them."""
    monkeypatch.setenv("LOCKSTEP_POSTGRES_DSN", world.state_dsn)
    monkeypatch.setenv("LOCKSTEP_SOURCE_DSN", world.source_dsn)
    monkeypatch.setenv("LOCKSTEP_EXPORTS_BUCKET", world.bucket)
    return world


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def _tick(instance: dg.DagsterInstance) -> Any:
    context = dg.build_sensor_context(instance=instance, resources={"sqs": SqsResource(region_name="us-east-1")})
    return export_chunks_sensor(context)


def test_a_tick_reserves_a_batch_once_and_its_request_is_valid(deployed: World, instance: dg.DagsterInstance):
    deployed.submit(("ABC", OLD), ("XYZ", OLD))
    (request,) = _tick(instance).run_requests
    assert _tick(instance).run_requests == [], "what is reserved is not requested again"
    job = build_definitions().resolve_job_def("export_chunks_job")
    assert dg.validate_run_config(job, request.run_config)
    batch = request.tags["lockstep/export-batch"]
    assert request.run_key == f"exports:{batch}"
    assert deployed.worker().work(batch).built == 2


def test_a_reservation_whose_run_never_came_is_free_again(deployed: World, instance: dg.DagsterInstance):
    """Guards against chunks that a lost run would keep for ever."""
    deployed.submit(("ABC", OLD))
    (first,) = _tick(instance).run_requests
    deployed.ask("UPDATE exports.job_chunk SET reserved_until = now()")
    (second,) = _tick(instance).run_requests
    assert first.run_key != second.run_key


def test_a_batch_never_asks_for_more_tasks_than_the_budget_leaves():
    from lockstep.exports.claims import Batch

    assert build_run_request(Batch("b", 400), 1).tags["lockstep/export-tasks"] == "1"
    assert build_run_request(Batch("b", 1), 100).tags["lockstep/export-tasks"] == "1"


def _break(world: World, *, only: str | None) -> None:
    """The function fails for one key, or for none."""
    world.source("DROP FUNCTION export_rows(text, date)")
    wrong = f"IF key = '{only}' THEN RAISE EXCEPTION 'wrong'; END IF;" if only else ""
    world.source(
        "CREATE FUNCTION export_rows(key text, effective_date date) RETURNS TABLE (a integer)"
        f" LANGUAGE plpgsql AS $$ BEGIN {wrong} RETURN QUERY SELECT 1; END $$"
    )


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_materializing_a_failed_partition_by_hand_completes_its_job(
    deployed: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, zone: str
):
    """Also on a database that does not stand in UTC: a person who sees green must not have a job that stays red."""
    monkeypatch.setenv("PGTZ", zone)
    _break(deployed, only="ABC")
    job_id = deployed.submit(("ABC", OLD))
    deployed.drain()
    assert deployed.job(job_id).status is JobStatus.FAILED
    instance.add_dynamic_partitions(str(chunk_partitions.name), [f"ABC|{OLD}"])
    job = build_definitions().resolve_job_def("export_chunks_job")
    still = job.execute_in_process(partition_key=f"ABC|{OLD}", instance=instance, raise_on_error=False)
    assert not still.success, "a partition that still fails is red"
    _break(deployed, only=None)
    assert job.execute_in_process(partition_key=f"ABC|{OLD}", instance=instance).success
    assert deployed.job(job_id).status is JobStatus.COMPLETED
    assert job.execute_in_process(partition_key=f"ABC|{OLD}", instance=instance).success, "again: nothing to do"


def test_a_partition_that_an_outage_kept_from_its_file_is_not_green(
    deployed: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    """Guards a person against green: the file was to be reused, and the store could not be asked for it."""
    deployed.submit(("ABC", OLD))
    deployed.drain()
    job_id = deployed.submit(("ABC", OLD))
    instance.add_dynamic_partitions(str(chunk_partitions.name), [f"ABC|{OLD}"])
    job = build_definitions().resolve_job_def("export_chunks_job")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "present", _away)
        refused = job.execute_in_process(partition_key=f"ABC|{OLD}", instance=instance, raise_on_error=False)
    assert not refused.success
    assert job.execute_in_process(partition_key=f"ABC|{OLD}", instance=instance).success
    assert deployed.job(job_id).status is JobStatus.COMPLETED


def _away(*_: object) -> None:
    raise StoreDown("the store is away.")


def _status(instance: dg.DagsterInstance) -> dict[str, set[str]]:
    """Partitions as the UI paints them."""
    from dagster._core.definitions.partitions.context import partition_loading_context
    from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value

    known = dg.AssetKey(CHUNKS_ASSET)
    with partition_loading_context(dynamic_partitions_store=instance):
        cached = get_and_update_asset_status_cache_value(instance, known, chunk_partitions)
        assert cached is not None
        green = cached.deserialize_materialized_partition_subsets(chunk_partitions).get_partition_keys()
        red = cached.deserialize_failed_partition_subsets(chunk_partitions).get_partition_keys()
    return {"green": set(green), "red": set(red)}


class NoSpark(SparkResource):
    """Stands where the session is asked for and not used."""

    @property
    def spark_session(self) -> Any:
        return None


def _run_batch(deployed: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    """The sensor's run with the worker in this process in Spark's place: what is looked at is what Dagster shows."""

    def here(spark: Any, batch_id: str, *, tasks: int, opener: Any) -> Tally:
        if how.get("breaks"):
            claim = deployed.claims("spark").claim(batch_id)
            assert claim is not None
            raise ConnectionError("Spark went away")
        return deployed.worker().work(batch_id)

    monkeypatch.setattr(export_assets, "run_on_spark", here)
    (request,) = _tick(instance).run_requests
    job = build_definitions(resources={"spark": NoSpark()}).resolve_job_def("export_chunks_job")
    return job.execute_in_process(
        instance=instance, run_config=request.run_config, tags=dict(request.tags), raise_on_error=False
    )


def test_a_failed_chunk_of_a_batch_turns_its_partition_red_and_the_others_green(
    deployed: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    """Guards the picture: a red partition is where a person begins; rebuilding it by hand completes its job."""
    _break(deployed, only="BAD")
    job_id = deployed.submit(("BAD", OLD), ("GOOD", OLD), ("GOOD", "20250216"))
    result = _run_batch(deployed, instance, monkeypatch)
    assert not result.success
    (failure,) = result.get_step_failure_events()
    assert f"BAD|{OLD}: " in str(failure.event_specific_data.error)
    assert _status(instance) == {"green": {f"GOOD|{OLD}", "GOOD|20250216"}, "red": {f"BAD|{OLD}"}}
    assert deployed.job(job_id).status is JobStatus.FAILED
    _break(deployed, only=None)
    job = build_definitions().resolve_job_def("export_chunks_job")
    assert job.execute_in_process(partition_key=f"BAD|{OLD}", instance=instance).success
    assert _status(instance) == {"green": {f"GOOD|{OLD}", "GOOD|20250216", f"BAD|{OLD}"}, "red": set()}
    assert deployed.job(job_id).status is JobStatus.COMPLETED


def test_a_run_that_broke_gives_back_its_chunks_and_shows_what_it_held(
    deployed: World, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
):
    deployed.submit(("ABC", OLD), ("XYZ", OLD))
    assert not _run_batch(deployed, instance, monkeypatch, breaks=True).success
    assert _status(instance)["red"] == {f"ABC|{OLD}"}, "the chunk in work is red until another run builds it"
    deployed.ask("UPDATE exports.job_chunk SET lease_until = now() WHERE status = 'RUNNING'")
    assert deployed.claims().reap() == 1
    deployed.ask("UPDATE exports.job_chunk SET run_at = now()")
    assert _run_batch(deployed, instance, monkeypatch).success, "what was not begun is free at once"
    assert _status(instance) == {"green": {f"ABC|{OLD}", f"XYZ|{OLD}"}, "red": set()}


def test_what_a_killed_run_left_is_free_at_the_next_tick_and_what_a_queued_run_holds_is_kept(
    deployed: World, instance: dg.DagsterInstance
):
    """Guards against a run that died without a word: its chunks must not wait for their reservation to end."""
    deployed.submit(("ABC", OLD))
    (request,) = _tick(instance).run_requests
    job = build_definitions().resolve_job_def("export_chunks_job")
    run = instance.create_run_for_job(job, run_config=request.run_config, tags=dict(request.tags))
    deployed.ask("UPDATE exports.job_chunk SET reserved_until = now() + interval '1 s'")
    assert _tick(instance).run_requests == []
    ((left,),) = deployed.ask("SELECT extract(epoch FROM reserved_until - now()) FROM exports.job_chunk")
    assert left > 10, "the run waits in the queue, so its chunks wait for it"
    instance.report_run_failed(run)
    (again,) = _tick(instance).run_requests
    assert again.run_key != request.run_key


def test_files_whose_run_died_before_it_reported_are_shown_by_housekeeping(
    deployed: World, instance: dg.DagsterInstance
):
    """Guards the picture against the control plane's loss: it is drawn again from the table."""
    deployed.submit(("ABC", OLD), ("XYZ", OLD))
    deployed.drain()
    job = build_definitions().resolve_job_def("export_housekeeping_job")
    assert job.execute_in_process(instance=instance).success
    assert _status(instance)["green"] == {f"ABC|{OLD}", f"XYZ|{OLD}"}


def test_housekeeping_writes_manifests_and_its_checks_see_what_is_wrong(deployed: World, instance: dg.DagsterInstance):
    job_id = deployed.submit(("ABC", OLD), ("XYZ", OLD))
    deployed.drain()
    instance.add_dynamic_partitions(str(chunk_partitions.name), [f"ABC|{OLD}", "GONE|20200101"])
    job = build_definitions().resolve_job_def("export_housekeeping_job")
    first = job.execute_in_process(instance=instance)
    assert {one.check_name: one.passed for one in first.get_asset_check_evaluations()} == {
        "no_failed_chunks_check": True,
        "files_match_cache_check": True,
        "no_orphan_objects_check": True,
    }
    manifest = json.loads(deployed.read(f"exports/_manifests/{job_id}.json"))
    assert [one["key"] for one in manifest["files"]] == ["ABC", "XYZ"]
    assert instance.get_dynamic_partitions(str(chunk_partitions.name)) == [f"ABC|{OLD}", f"XYZ|{OLD}"]
    deployed.s3.delete_object(Bucket=deployed.bucket, Key="exports/2025/02/15/ABC_20250215.csv")
    second = job.execute_in_process(instance=instance, raise_on_error=False)
    verdicts = {one.check_name: one.passed for one in second.get_asset_check_evaluations()}
    assert verdicts["files_match_cache_check"] is False


def test_jobs_beyond_one_pass_get_their_manifests_from_the_next(deployed: World, monkeypatch: pytest.MonkeyPatch):
    """Guards a busy hour: a job that is not among the newest must not stay without a manifest."""
    monkeypatch.setattr("lockstep.exports.inspect._MOST_MANIFESTS", 2)
    made = [deployed.submit(("ABC", OLD)) for _ in range(3)]
    deployed.drain()
    place, objects = Place(deployed.bucket), ObjectStore(deployed.s3, deployed.bucket)
    passes = [inspect.write_manifests(deployed.state, deployed.jobs, objects, place) for _ in range(3)]
    assert [len(one) for one in passes] == [2, 1, 0]
    assert sorted(job for one in passes for job in one) == sorted(made)


def test_the_asset_key_is_what_the_events_say():
    assert dg.AssetKey(CHUNKS_ASSET) in build_definitions().resolve_asset_graph().get_all_asset_keys()


def test_a_message_goes_away_only_when_its_chunk_has_ended(world: World, sqs: Any, queue: Any):
    """Guards the contract of the queue: until the work is done the message is hidden, not gone."""
    job_id = world.submit(("ABC", OLD))
    body = json.dumps({"jobId": job_id, "key": "ABC", "effectiveDate": OLD})
    for text in (body, body, "not JSON", json.dumps({"jobId": "J20200101_000001", "key": "X", "effectiveDate": OLD})):
        sqs.send_message(QueueUrl=queue.url, MessageBody=text)
    hints = ChunkQueue(sqs, queue.url)
    first = hints.settle(world.claims())
    assert (first.received, first.deleted, first.kept) == (4, 2, 2)
    assert hints.settle(world.claims()).received == 0, "a kept message is hidden"
    world.drain()
    other = sqs.send_message(QueueUrl=queue.url, MessageBody=body)
    assert other["MessageId"]
    assert hints.settle(world.claims()).deleted == 1


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"jobId": "../x", "key": "A", "effectiveDate": "20250215"}', "null"])
def test_a_message_that_no_job_wrote_is_not_understood(body: str):
    assert parse_message(body) is None
