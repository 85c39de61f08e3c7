"""The design document's ten objectives and six invariants, one named test each."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lockstep.kernel.crash import armed
from lockstep.windows import rules
from lockstep.windows.model import Window
from lockstep.windows.worker import WindowFailed
from sensors.windows import Cursor, read_hints
from tests.windows_lane import LaneUnderTest
from tests.windows_world import Files, as_csv, warehouse_rows

pytestmark = pytest.mark.stack


def _failed(lane: LaneUnderTest, before: int = 2) -> Window:
    """A lane with applied windows and one that failed behind them."""
    lane.world.publish(before)
    if before:
        lane.worker().drain(lane.vault)
    window = lane.world.add(Files({"study__v": [lane.world.row("study__v", 1, budget__c="poison")]}))
    with pytest.raises(WindowFailed):
        lane.worker().drain(lane.vault)
    return window


def _heal(lane: LaneUnderTest, window: Window) -> None:
    row = lane.world.oracle["study__v"]["ST0001"] | {"budget__c": "1"}
    lane.world.oracle["study__v"]["ST0001"] = row
    lane.world.rewrite(window, "study__v", as_csv(list(lane.world.columns["study__v"]), [row]))


def _set_ready(lane: LaneUnderTest, window: Window) -> None:
    """What support does: one plain update of the queue table."""
    lane.world.dynamodb.update_item(
        TableName=lane.world.table,
        Key={"vault_id": {"S": lane.vault}, "stoptime": {"S": window.sort_key}},
        UpdateExpression="SET #s = :ready",
        ConditionExpression="#s = :failed",
        ExpressionAttributeNames={"#s": "status"},
        ExpressionAttributeValues={":ready": {"S": "READY"}, ":failed": {"S": "FAILED"}},
    )


def _transactions(lane: LaneUnderTest) -> dict[Any, str]:
    """Which transaction committed each window, by stop."""
    query = "SELECT stop, xmin::text FROM windows.applied_window WHERE vault = %s"
    return dict(lane.warehouse(query, lane.vault))


def test_objective_1_every_window_is_applied_exactly_once(lane: LaneUnderTest):
    lane.world.publish(4)
    for _ in range(3):
        lane.worker().drain(lane.vault)
    lane.assert_equals_oracle()
    assert len(lane.history()) == 4


def test_objective_2_windows_are_applied_strictly_in_order(lane: LaneUnderTest):
    windows = lane.world.publish(5, enqueue=False)
    lane.world.enqueue([windows[index] for index in (3, 0, 4, 2, 1)])
    seen: list[Any] = []
    lane.worker().drain(lane.vault, progress=lambda one: seen.append(one.stop))
    assert seen == [one.stop for one in windows]


def test_objective_3_one_window_is_one_transaction(lane: LaneUnderTest):
    """Guards it by the database's own word: the rows of a window and its ledger row have one transaction number."""
    lane.world.publish(4)
    lane.worker().drain(lane.vault)
    committed = _transactions(lane)
    assert len(set(committed.values())) == 4
    last = lane.world.windows[-1]
    for table in ("study__v", "site__v"):
        found = lane.warehouse(f'SELECT DISTINCT xmin::text FROM "vault_{lane.vault}"."{table}"')  # noqa: S608
        assert {number for (number,) in found} <= set(committed.values())
        assert (committed[last.stop],) in found


def test_objective_4_a_failure_reloads_nothing(lane: LaneUnderTest):
    window = _failed(lane, before=3)
    before = _transactions(lane)
    _heal(lane, window)
    _set_ready(lane, window)
    lane.worker().drain(lane.vault)
    after = _transactions(lane)
    assert {stop: after[stop] for stop in before} == before
    assert len(after) == 4


def test_objective_5_a_failure_pauses_the_lane_and_its_repair_resumes_it(lane: LaneUnderTest):
    window = _failed(lane)
    lane.world.publish(3)
    assert lane.worker().drain(lane.vault).applied == 0
    _heal(lane, window)
    _set_ready(lane, window)
    assert lane.worker().drain(lane.vault).applied == 4
    assert len(lane.history()) == 6


def test_objective_6_recovery_is_an_event_in_the_stream(lane: LaneUnderTest, dynamodb: Any):
    import boto3

    window = _failed(lane, before=0)
    streams, cursor = boto3.client("dynamodbstreams"), Cursor()
    while read_hints(dynamodb, streams, cursor):
        pass
    _set_ready(lane, window)
    assert lane.vault in read_hints(dynamodb, streams, cursor)


def test_objective_7_only_one_job_works_on_a_lane(lane: LaneUnderTest):
    lane.world.publish(6)
    working, most, lock = [0], [0], threading.Lock()

    def watch(_: Any) -> None:
        with lock:
            working[0] += 1
            most[0] = max(most[0], working[0])
        with lock:
            working[0] -= 1

    threads = [
        threading.Thread(target=lambda: lane.worker().drain(lane.vault, progress=watch), daemon=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert most[0] == 1
    lane.worker().drain(lane.vault)
    assert len({one.fence for one in lane.history()}) <= 2
    lane.assert_equals_oracle()


def test_objective_8_a_window_that_could_not_be_fetched_does_not_stop_earlier_ones(lane: LaneUnderTest):
    lane.world.publish(2)
    lane.world.publish(1, enqueue=False)
    lane.world.publish(1)
    report = lane.worker().drain(lane.vault)
    assert (report.applied, lane.world.statuses()) == (2, ["APPLIED", "APPLIED", "-", "READY"])


def test_objective_9_a_failed_apply_blocks_what_is_behind_it(lane: LaneUnderTest):
    _failed(lane, before=1)
    lane.world.publish(2)
    before = warehouse_rows(lane.dsn, f"vault_{lane.vault}")
    assert lane.worker().drain(lane.vault).applied == 0
    assert lane.world.statuses() == ["APPLIED", "FAILED", "READY", "READY"]
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}") == before


def test_objective_10_support_needs_one_plain_update(lane: LaneUnderTest):
    window = _failed(lane, before=1)
    _heal(lane, window)
    _set_ready(lane, window)
    assert lane.worker().drain(lane.vault).applied == 1
    assert lane.world.statuses() == ["APPLIED", "APPLIED"]


def test_invariant_1_the_producer_never_blocks(lane: LaneUnderTest):
    _failed(lane, before=0)
    with lane.worker().held(lane.vault):
        lane.world.publish(3)
    assert lane.world.statuses() == ["FAILED", "READY", "READY", "READY"]


def test_invariant_2_the_consumer_applies_one_window_at_a_time(lane: LaneUnderTest):
    """Guards readers: after each commit the watermark, the ledger and nothing more have moved by one window."""
    lane.world.publish(4)
    reader = lane.store()
    seen: list[int] = []

    def look(_: Any) -> None:
        known = reader.lane(lane.vault)
        history = reader.history(lane.vault)
        assert known is not None
        assert known.watermark == history[-1].stop
        seen.append(len(history))

    lane.worker().drain(lane.vault, progress=look)
    assert seen == [1, 2, 3, 4]


def test_invariant_3_the_watermark_moves_with_the_commit_and_not_before(lane: LaneUnderTest):
    lane.world.publish(1)
    with armed("windows.apply.before_commit", "raise"), pytest.raises(BaseException, match="before_commit"):
        lane.worker().drain(lane.vault)
    known = lane.store().lane(lane.vault)
    assert known is not None
    assert (known.watermark, lane.history()) == (lane.world.start, [])
    lane.worker().drain(lane.vault)
    lane.assert_equals_oracle()


def test_invariant_4_no_window_after_a_failed_one_is_applied(lane: LaneUnderTest):
    window = _failed(lane, before=1)
    lane.world.publish(3)
    for later in lane.world.windows[2:]:
        assert lane.worker().drain(lane.vault, own=later.stop, by_hand=True).applied == 0
    assert max(one.stop for one in lane.history()) == window.start


def test_invariant_5_ready_is_not_allowed_to_process(lane: LaneUnderTest):
    lane.world.publish(1, enqueue=False)
    lane.world.publish(1)
    rows = lane.worker().ledger.pending(lane.vault, lane.world.start)
    assert [str(row.status) for row in rows] == ["READY"]
    decision = rules.next_step(lane.world.start, rows, lane.worker().clock.now())
    assert isinstance(decision, rules.Blocked)
    assert lane.worker().drain(lane.vault).applied == 0


def test_invariant_6_stopping_is_refusing_to_advance(lane: LaneUnderTest):
    """Guards that nothing is switched off: a stopped lane is claimed, looked at and released like any other."""
    _failed(lane, before=0)
    before = lane.store().lane(lane.vault)
    report = lane.worker().drain(lane.vault)
    after = lane.store().lane(lane.vault)
    assert before is not None
    assert after is not None
    assert "FAILED" in report.reason
    assert (after.watermark, after.is_held) == (before.watermark, False)
    assert after.fence == before.fence + 1
