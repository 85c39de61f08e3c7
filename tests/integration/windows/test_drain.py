"""Draining a lane against the real parts: order, exactly once, poison, recovery. Staged in-process for speed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from lockstep.kernel.crash import armed
from lockstep.kernel.errors import Terminal
from lockstep.windows.model import Window
from lockstep.windows.worker import WindowFailed
from tests.windows_lane import LaneUnderTest
from tests.windows_world import Files, warehouse_rows

pytestmark = pytest.mark.stack


def _poison(lane: LaneUnderTest) -> Window:
    """A window whose number is no number."""
    row = lane.world.row("study__v", 1, budget__c="12,50 EUR")
    return lane.world.add(Files({"study__v": [row]}))


def test_a_backlog_becomes_the_oracle_in_order_and_once(lane: LaneUnderTest):
    lane.world.publish(15)
    seen: list[Any] = []
    report = lane.worker().drain(lane.vault, progress=seen.append)
    assert (report.applied, report.reason) == (15, "the lane is empty")
    assert [one.stop for one in seen] == [one.stop for one in lane.world.windows]
    lane.assert_equals_oracle()
    assert lane.worker().drain(lane.vault).applied == 0
    lane.assert_equals_oracle()


def test_spark_stages_what_the_process_itself_would(lane: LaneUnderTest, spark: Any):
    """Guards the real way: tasks on Spark's workers, results by number, rows under loads nobody else knows."""
    lane.world.publish(13)
    assert lane.worker(spark=lambda: spark).drain(lane.vault).applied == 13
    lane.assert_equals_oracle()


def test_a_window_without_records_moves_the_watermark(lane: LaneUnderTest):
    """Guards the chain: an empty window that leaves no row in the ledger would be a hole for ever."""
    lane.world.publish()
    lane.world.add(Files())
    lane.world.add(Files({"study__v": []}))
    lane.world.publish()
    assert lane.worker().drain(lane.vault).applied == 4
    lane.assert_equals_oracle()


def test_windows_around_midnight_follow_each_other(new_lane: Callable[..., LaneUnderTest]):
    """Guards names and partitions of a day: a window belongs to the chain by its times, not by its date."""
    lane = new_lane(start=datetime(2026, 12, 31, 23, 30, tzinfo=UTC))
    lane.world.publish(4)
    assert lane.worker().drain(lane.vault).applied == 4
    lane.assert_equals_oracle()
    assert [one.stoptime for one in lane.world.windows][1:3] == ["202701010000", "202701010015"]


def test_text_that_outgrows_its_declared_length_is_kept_whole(lane: LaneUnderTest):
    lane.world.publish(1)
    lane.world.columns["site__v"]["city__c"] = ("String", 4000)
    city = "x" * 3000
    lane.world.add(Files({"site__v": [lane.world.row("site__v", 1, city__c=city)]}))
    lane.worker().drain(lane.vault)
    lane.assert_equals_oracle()
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}")["site__v"]["SI0001"]["city__c"] == city


def test_a_late_window_holds_the_ones_behind_it_until_it_comes(lane: LaneUnderTest):
    """Guards the vendor's own case: 13:45 is published after 14:00."""
    lane.world.publish(2)
    (late,) = lane.world.publish(1, enqueue=False)
    lane.world.publish(2)
    report = lane.worker().drain(lane.vault)
    assert report.applied == 2
    assert "missing" in report.reason
    lane.assert_prefix()
    lane.world.enqueue([late])
    assert lane.worker().drain(lane.vault).applied == 3
    lane.assert_equals_oracle()


def test_a_poison_window_ends_a_drain_well_and_fails_alone(lane: LaneUnderTest):
    """Guards the look in the UI: the run that only passed by stays green, the window's own run turns red."""
    lane.world.publish(6)
    poison = _poison(lane)
    lane.world.publish(3)
    report = lane.worker().drain(lane.vault)
    assert report.applied == 6
    assert report.stopped_before == poison
    assert lane.world.statuses() == ["APPLIED"] * 6 + ["READY"] * 4
    with pytest.raises(WindowFailed, match="budget__c"):
        lane.worker().drain(lane.vault, own=poison.stop)
    assert lane.world.statuses() == ["APPLIED"] * 6 + ["FAILED"] + ["READY"] * 3
    assert lane.worker().drain(lane.vault).applied == 0
    lane.assert_prefix()


def test_the_error_of_a_failed_window_names_file_row_and_column_but_no_value(lane: LaneUnderTest):
    """Guards a vault's rows from ending up in a control table."""
    poison = _poison(lane)
    with pytest.raises(WindowFailed):
        lane.worker().drain(lane.vault)
    row = lane.world.queue.get(poison)
    assert row is not None
    assert row.last_error is not None
    assert "study__v, row 1, column budget__c" in row.last_error
    assert "EUR" not in row.last_error
    assert row.attempt_count == 1


def test_one_vault_that_failed_does_not_touch_another(new_lane: Callable[..., LaneUnderTest]):
    bad, good = new_lane(), new_lane(seed=2)
    _poison(bad)
    good.world.publish(3)
    with pytest.raises(WindowFailed):
        bad.worker().drain(bad.vault)
    assert good.worker().drain(good.vault).applied == 3
    good.assert_equals_oracle()


def test_a_commit_whose_answer_was_lost_is_believed_and_not_repeated(lane: LaneUnderTest):
    """Guards unknown outcomes: the ledger in the sink tells, nobody guesses."""
    lane.world.publish(3)
    with armed("windows.apply.after_commit", "error", nth=2) as charge:
        assert lane.worker().drain(lane.vault).applied == 3
    assert charge.fired
    lane.assert_equals_oracle()


def test_a_transient_fault_before_the_commit_is_tried_again_within_the_budget(lane: LaneUnderTest):
    lane.world.publish(3)
    with armed("windows.apply.before_commit", "error", nth=2) as charge:
        assert lane.worker().drain(lane.vault).applied == 3
    assert charge.fired
    lane.assert_equals_oracle()


def test_only_one_worker_holds_a_lane(lane: LaneUnderTest):
    lane.world.publish(2)
    with lane.worker().held(lane.vault) as claim:
        assert claim is not None
        report = lane.worker().drain(lane.vault)
        assert (report.applied, report.reason) == (0, "a live worker holds the lane")
    assert lane.worker().drain(lane.vault).applied == 2


def test_many_workers_at_once_apply_each_window_once(lane: LaneUnderTest):
    """Guards two daemons: whoever wins the lane, the warehouse is the same."""
    lane.world.publish(12)
    reports: list[int] = []

    def work() -> None:
        for _ in range(3):
            reports.append(lane.worker().drain(lane.vault).applied)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sum(reports) == 12
    lane.assert_equals_oracle()


def test_rows_that_disagree_with_the_sink_are_put_right(lane: LaneUnderTest):
    """Guards W-3: COMMIT done, queue row lost. And a hand that wrote APPLIED too early."""
    lane.world.publish(4)
    lane.worker().drain(lane.vault)
    lane.world.publish(1)
    for window, status in ((lane.world.windows[1], "PROCESSING"), (lane.world.windows[4], "APPLIED")):
        lane.world.dynamodb.update_item(
            TableName=lane.world.table,
            Key={"vault_id": {"S": lane.vault}, "stoptime": {"S": window.sort_key}},
            UpdateExpression="SET #s = :s",
            ExpressionAttributeNames={"#s": "status"},
            ExpressionAttributeValues={":s": {"S": status}},
        )
    assert lane.worker().drain(lane.vault).applied == 1
    lane.assert_equals_oracle()


def test_an_id_deleted_and_updated_in_one_window_follows_the_later_of_both(lane: LaneUnderTest):
    world = lane.world
    world.add(Files({"study__v": [world.row("study__v", n) for n in range(3)]}))
    early, late = "2026-03-01T00:16:00.000Z", "2026-03-01T00:29:00.000Z"
    rows = [world.row("study__v", 0, modified_date__v=early), world.row("study__v", 1, modified_date__v=late)]
    gone = [{"id": "ST0000", "deleted_date": late}, {"id": "ST0001", "deleted_date": early}]
    world.add(Files({"study__v": rows}, {"study__v": [*gone, {"id": "ST0002", "deleted_date": late}]}))
    lane.worker().drain(lane.vault)
    assert set(world.oracle["study__v"]) == {"ST0001"}
    lane.assert_equals_oracle()


def test_a_key_twice_in_a_file_keeps_the_last_row(lane: LaneUnderTest):
    world = lane.world
    world.add(Files({"study__v": [world.row("study__v", 1, name__v=name) for name in ("first", "second", "last")]}))
    lane.worker().drain(lane.vault)
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}")["study__v"]["ST0001"]["name__v"] == "last"
    lane.assert_equals_oracle()


def test_a_new_column_and_a_new_object_appear_before_their_window_is_applied(lane: LaneUnderTest):
    """Guards additive change in the middle of a batch, and columns whose places shift."""
    world = lane.world
    world.publish(2)
    world.columns["study__v"] = {
        "id": ("String", 20),
        "modified_date__v": ("DateTime", 0),
        "added__c": ("Number", 0),
        **{name: kind for name, kind in world.columns["study__v"].items() if name not in ("id", "modified_date__v")},
    }
    world.columns["visit__v"] = {"id": ("String", 20), "modified_date__v": ("DateTime", 0), "day__c": ("Date", 0)}
    world.publish(3)
    assert lane.worker().drain(lane.vault).applied == 5
    for rows in world.oracle.values():
        for row in rows.values():
            row.setdefault("added__c", None) if "budget__c" in row else None
    lane.assert_equals_oracle()
    kinds = lane.warehouse(
        "SELECT data_type FROM information_schema.columns WHERE table_schema = %s AND column_name = 'added__c'",
        f"vault_{lane.vault}",
    )
    assert kinds == [("numeric",)]


def test_nothing_and_the_empty_string_stay_different(lane: LaneUnderTest):
    world = lane.world
    world.add(Files({"study__v": [world.row("study__v", 1, name__v=""), world.row("study__v", 2, name__v=None)]}))
    lane.worker().drain(lane.vault)
    rows = warehouse_rows(lane.dsn, f"vault_{lane.vault}")["study__v"]
    assert (rows["ST0001"]["name__v"], rows["ST0002"]["name__v"]) == ("", None)


def test_decimals_keep_every_digit(lane: LaneUnderTest):
    number = "12345678901234567890123456789.012345678901234567"
    lane.world.add(Files({"study__v": [lane.world.row("study__v", 1, budget__c=number)]}))
    lane.worker().drain(lane.vault)
    assert lane.warehouse(f'SELECT budget__c::text FROM "vault_{lane.vault}".study__v') == [(number,)]  # noqa: S608


_HOSTILE: dict[str, Callable[[Any], Any]] = {
    "other digest": lambda file: replace(file, sha256="0" * 64),
    "more rows than there are": lambda file: replace(file, rows=file.rows + 1),
    "another header": lambda file: replace(file, columns=tuple(reversed(file.columns))),
    "missing file": lambda file: replace(file, key=file.key + ".gone"),
    "a column that closes quotes": lambda file: replace(file, columns=(*file.columns, 'x"; DROP TABLE y; --')),
    "five thousand columns": lambda file: replace(file, columns=(*file.columns, *(f"c{n}" for n in range(5000)))),
    "a table that closes quotes": lambda file: replace(file, object='x"; DROP SCHEMA y; --'),
}


@pytest.mark.parametrize("fault", list(_HOSTILE))
def test_a_lying_manifest_is_refused_with_its_window_named_and_nothing_applied(lane: LaneUnderTest, fault: str):
    lane.world.publish(1)
    before = warehouse_rows(lane.dsn, f"vault_{lane.vault}") if lane.worker().drain(lane.vault).applied else {}
    files = Files({"study__v": [lane.world.row("study__v", 1)]})
    window = lane.world.add(
        files, tamper=lambda manifest: replace(manifest, files=tuple(map(_HOSTILE[fault], manifest.files)))
    )
    with pytest.raises(Terminal, match=window.stoptime):
        lane.worker().drain(lane.vault)
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}") == before
    assert lane.world.statuses() == ["APPLIED", "FAILED"]


@pytest.mark.parametrize("body", [b"\xff\xfe\x00binary", b"id\n", b'id,modified_date__v,name__v\n"open'])
def test_a_file_that_is_no_table_is_refused_and_nothing_applied(lane: LaneUnderTest, body: bytes):
    (window,) = lane.world.publish(1)
    lane.world.rewrite(window, "study__v", body)
    with pytest.raises(WindowFailed, match="study__v_upsert"):
        lane.worker().drain(lane.vault)
    assert lane.history() == []


def test_a_large_file_goes_through_the_disk_in_blocks(lane: LaneUnderTest, monkeypatch: pytest.MonkeyPatch):
    """Guards bounded memory: the same rows arrive whether a file is read whole or in blocks."""
    monkeypatch.setattr("lockstep.windows.staging.WHOLE_BYTES", 500)
    monkeypatch.setattr("lockstep.windows.staging.BLOCK_BYTES", 2000)
    lane.world.add(Files({"study__v": [lane.world.row("study__v", n) for n in range(200)]}))
    lane.world.publish(1)
    assert lane.worker().drain(lane.vault).applied == 2
    lane.assert_equals_oracle()


def test_staging_leaves_nothing_behind(lane: LaneUnderTest):
    lane.world.publish(3)
    lane.worker().drain(lane.vault)
    assert (
        lane.warehouse("SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)", f"stage:{lane.vault}") == []
    )
