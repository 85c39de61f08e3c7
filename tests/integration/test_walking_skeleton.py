"""The self-test's pieces against the real parts, run by run, without the daemon."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest

from jobs.lanes import RUNS_PER_LANE, lane_pools, set_pool_limits
from lockstep.kernel.settings import PROJECT_ROOT, load_settings
from lockstep.selftest import worker
from lockstep.selftest.model import QUEUE, TABLE, SelftestRequest
from platform_assets.definitions import build_definitions, defs
from resources.lake import LakeResource

pytestmark = pytest.mark.stack

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def table(bucket: str) -> str:
    return LakeResource(bucket=bucket).table_path(TABLE)


def _request(rows: int) -> SelftestRequest:
    return SelftestRequest(f"t-{secrets.token_hex(4)}", rows)


def test_writing_an_id_again_replaces_its_rows_and_leaves_others_alone(spark: Any, table: str):
    """Guards idempotence: a run that is repeated after a lost answer must not double anything."""
    first, other = _request(20), _request(7)
    for request in (first, other, first, SelftestRequest(first.id, 5)):
        worker.write(spark, table, request, now=NOW)
    assert worker.count_rows(spark, table, first.id) == 5
    assert worker.count_rows(spark, table, other.id) == 7
    assert spark.read.format("delta").load(table).count() == 12


def test_old_self_tests_are_pruned_and_recent_ones_kept(spark: Any, table: str):
    """Guards the table's size: it is written for ever."""
    old, recent = _request(3), _request(4)
    worker.write(spark, table, old, now=NOW - timedelta(days=8))
    worker.write(spark, table, recent, now=NOW - timedelta(days=6))
    worker.prune(spark, table, now=NOW)
    assert worker.count_rows(spark, table, old.id) == 0
    assert worker.count_rows(spark, table, recent.id) == 4


def _run(bucket: str, instance: dg.DagsterInstance, **config: Any) -> dg.ExecuteInProcessResult:
    local = build_definitions(settings=load_settings(), resources={"lake": LakeResource(bucket=bucket)})
    job = local.resolve_job_def("selftest_job")
    run_config = {"ops": {TABLE: {"config": config}}}
    return job.execute_in_process(run_config, instance=instance, raise_on_error=False)


def test_a_run_commits_checks_and_only_then_deletes_its_message(sqs: Any, queue: Any, bucket: str, monkeypatch: Any):
    """Guards the order commit, then delete: the other way round, a crash between them loses the request."""
    monkeypatch.setattr("platform_assets.selftest.QUEUE", queue.name)
    sqs.send_message(QueueUrl=queue.url, MessageBody="{}")
    (message,) = sqs.receive_message(QueueUrl=queue.url, VisibilityTimeout=600)["Messages"]
    with dg.DagsterInstance.ephemeral() as instance:
        result = _run(bucket, instance, id="by-run", rows=12, receipt_handle=message["ReceiptHandle"])
    assert result.success
    (evaluation,) = result.get_asset_check_evaluations()
    assert evaluation.passed
    assert _messages_left(sqs, queue.url) == 0


def test_a_stale_receipt_handle_does_not_fail_a_committed_run(sqs: Any, queue: Any, bucket: str, monkeypatch: Any):
    """Guards what a cold stack showed: a run that outlived its message's visibility turned red, committed."""
    monkeypatch.setattr("platform_assets.selftest.QUEUE", queue.name)
    sqs.send_message(QueueUrl=queue.url, MessageBody="{}")
    stale = sqs.receive_message(QueueUrl=queue.url, VisibilityTimeout=0)["Messages"][0]["ReceiptHandle"]
    sqs.receive_message(QueueUrl=queue.url, VisibilityTimeout=600, WaitTimeSeconds=5)
    with dg.DagsterInstance.ephemeral() as instance:
        assert _run(bucket, instance, id="stale", rows=2, receipt_handle=stale).success


def test_a_refused_request_fails_before_it_writes(bucket: str, s3: Any):
    """Guards the table from an id that would close a quote in SQL."""
    with dg.DagsterInstance.ephemeral() as instance:
        assert not _run(bucket, instance, id="'; DROP", rows=1).success
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.mark.platform
def test_every_setting_of_the_instance_is_understood(stack: Any):
    """Guards against a key that Dagster ignores in silence: what matters is what the instance reports."""
    with dg.DagsterInstance.get() as instance:
        concurrency = instance.get_concurrency_config()
        queue = concurrency.run_queue_config
        assert queue is not None
        assert queue.max_concurrent_runs == 6
        assert queue.tag_concurrency_limits == [
            {"key": "lockstep/lane", "limit": 1, "value": {"applyLimitPerUniqueValue": True}}
        ]
        assert concurrency.pool_config.pool_granularity.value == "run"
        assert instance.run_coordinator.dequeue_interval_seconds == 1
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_settings["free_slots_after_run_end_seconds"] == 30
        assert not instance.run_retries_enabled
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert instance.freshness_enabled


@pytest.mark.platform
def test_the_stack_has_limited_every_lane_before_the_first_run(stack: Any):
    """Guards the bootstrap on the real storage, and that repeating it changes nothing."""
    with dg.DagsterInstance.get() as instance:
        limits = {pool.name: (pool.limit, pool.from_default) for pool in instance.event_log_storage.get_pool_limits()}
        assert {name: limits[name] for name in lane_pools(defs)} == {
            name: (RUNS_PER_LANE, False) for name in lane_pools(defs)
        }
        assert set_pool_limits(instance) == []


_CLASSIC = """
import dagster as dg
from lockstep.kernel.settings import PROJECT_ROOT, load_settings
from platform_assets.definitions import build_definitions

job = build_definitions(settings=load_settings(spark_mode="classic")).resolve_job_def("selftest_job")
config = {"ops": {"selftest_table": {"config": {"id": "classic", "rows": 9}}}}
with dg.DagsterInstance.ephemeral() as instance:
    (check,) = job.execute_in_process(config, instance=instance).get_asset_check_evaluations()
assert check.passed, check
"""


@pytest.mark.long
def test_the_same_asset_runs_on_a_jvm_inside_the_run(stack: Any):
    """Guards the classic mode, with the Java of the wheel: in its own process, because one process has one mode."""
    # A Connect session of an earlier test leaves SPARK_CONNECT_MODE_ENABLED behind, which a child would obey.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    done = subprocess.run(
        [sys.executable, "-c", _CLASSIC],
        cwd=PROJECT_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _messages_left(sqs: Any, url: str) -> int:
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    return sum(int(n) for n in sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"].values())


def test_the_queue_of_the_self_test_exists(sqs: Any):
    """Guards the name that sender, sensor and stack must agree on."""
    assert sqs.get_queue_url(QueueName=QUEUE)["QueueUrl"]
