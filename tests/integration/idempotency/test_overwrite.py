"""Data overwrite on a real Delta table and real S3: whole units, or nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from lockstep.idempotency import delta, pointer
from lockstep.idempotency.overwrite import FileUnits, OutsideUnit, overwrite_delta
from lockstep.kernel.clock import FakeClock
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import InvalidInput, LostClaim
from lockstep.kernel.ids import SeededIds

pytestmark = pytest.mark.stack

CHECK = "spark.databricks.delta.replaceWhere.constraintCheck.enabled"


def devices(spark: Any, *rows: tuple[int, str]) -> Any:
    return spark.createDataFrame(list(rows), "id INT, execution_time STRING")


def state(spark: Any, table: str) -> list[tuple[int, str]]:
    return sorted((row.id, row.execution_time) for row in delta.read(spark, table).collect())


def write(spark: Any, table: str, day: str, *ids: int, run: str = "r") -> Any:
    frame = devices(spark, *[(one, day) for one in ids])
    return overwrite_delta(spark, table, frame, {"execution_time": day}, run=run, partition_by=["execution_time"])


def test_a_delta_unit_is_replaced_whole_cleared_by_nothing_and_retried_after_any_crash(spark: Any, lake: str):
    """Guards replays that shrink: dynamic partition overwrite would keep the rows of a unit that became empty."""
    table = f"{lake}/devices"
    assert write(spark, table, "20240101", 1, 2).rows == 2
    write(spark, table, "20240102", 3)
    for point in ("overwrite.delta.before_write", "overwrite.delta.after_commit"):
        with pytest.raises(CrashInjected), armed(point, "raise") as charge:
            write(spark, table, "20240101", 7, 8, 9, run=point)
        assert charge.fired
    again = write(spark, table, "20240101", 7, 8, 9, run="retry")
    assert again.changed
    assert state(spark, table) == [(3, "20240102"), (7, "20240101"), (8, "20240101"), (9, "20240101")]
    newest = delta.history(spark, table, limit=1)[0]
    assert newest.version == again.version
    assert newest.stamp == {"lockstep": "overwrite", "run": "retry", "unit": "`execution_time` = '20240101'"}
    assert write(spark, table, "20240101").rows == 0
    assert state(spark, table) == [(3, "20240102")]
    assert not write(spark, table, "20240101", run="empty again").changed


def test_a_write_that_fails_or_strays_leaves_the_old_rows_readable(spark: Any, lake: str):
    """Guards the check itself: with the session's check switched off a plain write lets a foreign row in."""
    table = f"{lake}/devices"
    write(spark, table, "20240101", 1)
    failing = spark.range(2).selectExpr(
        "CAST(IF(id = 1, raise_error('bad row'), id) AS INT) AS id", "'20240101' AS execution_time"
    )
    with pytest.raises(Exception, match="bad row"):
        overwrite_delta(spark, table, failing, {"execution_time": "20240101"}, run="fails")
    stray = devices(spark, (5, "20240101"), (6, "20240103"))
    spark.conf.set(CHECK, "false")
    try:
        with pytest.raises(OutsideUnit, match="nothing was written"):
            overwrite_delta(spark, table, stray, {"execution_time": "20240101"}, run="strays")
        assert spark.conf.get(CHECK) == "false"  # the caller's session is left as it was
        assert state(spark, table) == [(1, "20240101")]
        naive = stray.write.format("delta").mode("overwrite").option("replaceWhere", "execution_time = '20240101'")
        naive.save(table)
    finally:
        spark.conf.unset(CHECK)
    assert (6, "20240103") in state(spark, table)


@pytest.mark.parametrize("unit", [{}, "", "  "])
def test_a_unit_without_a_predicate_is_refused(unit: Any):
    """Guards the whole table: an empty predicate would replace all of it."""
    with pytest.raises(InvalidInput):
        overwrite_delta(None, "s3a://b/t", None, unit, run="r")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def units(s3: Any, bucket: str, clock: FakeClock) -> FileUnits:
    return FileUnits(s3, bucket, "visits", ids=SeededIds(1), clock=clock)


def put(s3: Any, bucket: str, folder: str, text: str) -> None:
    s3.put_object(Bucket=bucket, Key=f"{folder}part-0", Body=text.encode())


def contents(s3: Any, bucket: str, units: FileUnits, unit: str) -> list[str]:
    manifest = units.read(unit)
    assert manifest is not None
    return [s3.get_object(Bucket=bucket, Key=file.key)["Body"].read().decode() for file in manifest.files]


def test_spark_files_written_aside_become_the_unit_all_at_once(spark: Any, s3: Any, bucket: str, units: FileUnits):
    """Guards the old data: Spark's own overwrite deletes it first, and a failure then leaves nothing at all."""
    staged = units.stage("date=2026-03-01", run="first")
    spark.range(10).write.mode("append").parquet(units.address(staged.folder))
    manifest = units.publish(staged)
    assert manifest.files
    assert all(file.key.endswith(".parquet") for file in manifest.files)
    failing = spark.range(4).selectExpr("IF(id = 3, raise_error('bad row'), id) AS id")
    with pytest.raises(Exception, match="bad row"):
        failing.write.mode("append").parquet(units.address(units.stage("date=2026-03-01", run="second").folder))
    now = units.read("date=2026-03-01")
    assert now == manifest
    assert spark.read.parquet(*[units.address(file.key) for file in now.files]).count() == 10

    plain = f"s3a://{bucket}/naive"
    spark.range(10).write.parquet(plain)
    with pytest.raises(Exception, match="bad row"):
        failing.write.mode("overwrite").parquet(plain)
    assert not [i for i in s3.list_objects_v2(Bucket=bucket, Prefix="naive/part").get("Contents", [])]


def test_an_overtaken_worker_publishes_nothing(s3: Any, bucket: str, units: FileUnits, monkeypatch: Any):
    """Guards the condition of the put: without it the old worker's files replace the newer ones."""
    slow, quick = units.stage("d=1", run="slow"), units.stage("d=1", run="quick")
    put(s3, bucket, slow.folder, "old")
    put(s3, bucket, quick.folder, "new")
    units.publish(quick)
    with pytest.raises(LostClaim, match="nothing was changed"):
        units.publish(slow)
    assert contents(s3, bucket, units, "d=1") == ["new"]
    with monkeypatch.context() as without:
        without.setattr(pointer, "move", _unconditional)
        units.publish(slow)
    assert contents(s3, bucket, units, "d=1") == ["old"]


def _unconditional(s3: Any, bucket: str, key: str, content: Any, *, seen: Any) -> None:
    import json

    s3.put_object(Bucket=bucket, Key=key, Body=json.dumps(content).encode())


def test_a_publication_whose_answer_was_lost_is_recognised(s3: Any, bucket: str, units: FileUnits):
    """Guards the client's own retry: its second PUT is refused because of its first, which had succeeded."""
    staged = units.stage("d=1", run="r")
    put(s3, bucket, staged.folder, "x")
    first = units.publish(staged)
    assert units.publish(staged) == first


def test_a_publication_that_is_repeated_later_is_recognised(s3: Any, bucket: str, units: FileUnits, clock: FakeClock):
    """Guards the caller's retry: by then the manifest would say another time, and differ from the one it finds."""
    staged = units.stage("d=1", run="r")
    put(s3, bucket, staged.folder, "x")
    with pytest.raises(CrashInjected), armed("overwrite.files.after_publish", "raise"):
        units.publish(staged)
    clock.advance(60)
    assert units.publish(staged) == units.read("d=1")
    assert contents(s3, bucket, units, "d=1") == ["x"]


def test_sweeping_removes_losers_and_spares_readers_neighbours_and_attempts_under_way(
    s3: Any, bucket: str, units: FileUnits, clock: FakeClock
):
    """Guards an attempt that is slower than any retention: its files stay until it can no longer publish."""
    for unit in ("d=1", "d=1/h=2"):
        staged = units.stage(unit, run="first")
        put(s3, bucket, staged.folder, unit)
        units.publish(staged)
    dead, winner = units.stage("d=1", run="dead"), units.stage("d=1", run="winner")
    put(s3, bucket, dead.folder, "dead")
    put(s3, bucket, winner.folder, "second")
    assert units.sweep("d=1", superseded_before=clock.now() + timedelta(days=999)) == 0  # both may still publish
    units.publish(winner)
    under_way = units.stage("d=1", run="slow")
    put(s3, bucket, under_way.folder, "third")
    assert units.sweep("d=1", superseded_before=clock.now()) == 0  # a reader may still follow the first manifest
    clock.advance(3600)
    assert units.sweep("d=1", superseded_before=clock.now()) == 2
    assert contents(s3, bucket, units, "d=1/h=2") == ["d=1/h=2"]
    units.publish(under_way)
    assert contents(s3, bucket, units, "d=1") == ["third"]


@pytest.mark.parametrize("unit", ["", "/", "a//b", "../x", "_staged", "a/_manifest.json"])
def test_a_name_that_could_leave_its_folder_is_no_unit(units: FileUnits, unit: str):
    with pytest.raises(InvalidInput):
        units.stage(unit, run="r")
