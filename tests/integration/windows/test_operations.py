"""What support does to a lane: full loads, rebaseline, skip, replay, look back, verify, rebuild the queue."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.kernel.errors import InvalidInput
from lockstep.windows import operations
from lockstep.windows.model import WindowKind
from lockstep.windows.operations import Doer
from lockstep.windows.raw import RawStore
from lockstep.windows.worker import WindowFailed
from tests.windows_lane import LaneUnderTest
from tests.windows_world import Files, expected, warehouse_rows

pytestmark = pytest.mark.stack

DOER = Doer("ada", "because")


def _full(lane: LaneUnderTest, count: int = 5) -> Any:
    rows = [lane.world.row("study__v", number, name__v="from full") for number in range(count)]
    return lane.world.add(Files({"study__v": rows}), kind=WindowKind.FULL)


def test_a_vault_begins_with_its_full_load_and_goes_on_from_its_stop(new_lane: Callable[..., LaneUnderTest]):
    lane = new_lane(begun=False)
    lane.world.publish(2)
    assert "no full load" in lane.worker().drain(lane.vault).reason
    early = lane.world.windows[:]
    _full(lane)
    lane.world.windows.clear()
    lane.world.start = early[-1].stop
    lane.world.publish(3)
    assert lane.worker().drain(lane.vault).applied == 3
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}") == expected(lane.world.oracle)
    lane.assert_prefix()


def test_a_rebaseline_swaps_tables_epoch_and_watermark_and_keeps_the_old_ones(lane: LaneUnderTest):
    """Guards a broken chain: a hole older than the vendor keeps is healed by a full load, not by hope."""
    lane.world.publish(2)
    lane.worker().drain(lane.vault)
    lane.world.publish(1, enqueue=False)  # never comes
    lane.world.publish(1)
    assert "missing" in lane.worker().drain(lane.vault).reason
    _full(lane)
    claim = operations.rebaseline(lane.worker(), lane.vault, DOER)
    assert (claim.epoch, claim.watermark) == (2, lane.world.windows[-1].stop)
    lane.world.publish(2)
    assert lane.worker().drain(lane.vault).applied == 2
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}") == expected(lane.world.oracle)
    kept = lane.warehouse("SELECT nspname FROM pg_namespace WHERE nspname LIKE %s", f"vault\\_{lane.vault}\\_epoch%")
    assert len(kept) == 1
    assert [one[2] for one in lane.store().audits(lane.vault)] == ["rebaseline"]


def test_logs_are_keyed_appends_that_do_not_move_the_watermark(lane: LaneUnderTest):
    lane.world.columns["login_audit__sys"] = {"id": ("String", 20), "modified_date__v": ("DateTime", 0)}
    rows = [lane.world.row("login_audit__sys", number) for number in range(4)]
    lane.world.add(Files({"login_audit__sys": rows}), kind=WindowKind.LOG, stop=lane.world.start + timedelta(days=1))
    del lane.world.columns["login_audit__sys"]
    lane.world.publish(1)
    lane.worker().drain(lane.vault)
    lane.worker().drain(lane.vault)
    lane.assert_equals_oracle()
    assert len(warehouse_rows(lane.dsn, f"vault_{lane.vault}_logs")["login_audit__sys"]) == 4
    assert len(lane.store().history(lane.vault, kinds=("log",))) == 1


def _failed(lane: LaneUnderTest) -> Any:
    lane.world.publish(1)
    lane.worker().drain(lane.vault)
    window = lane.world.add(
        Files({"study__v": [lane.world.row("study__v", 1)]}),
        tamper=lambda manifest: replace(manifest, files=tuple(replace(f, sha256="0" * 64) for f in manifest.files)),
    )
    lane.world.forget_after(window)
    with pytest.raises(WindowFailed):
        lane.worker().drain(lane.vault)
    return window


def test_skipping_needs_a_yes_and_a_reason_and_leaves_the_gap_on_record(lane: LaneUnderTest):
    window = _failed(lane)
    lane.world.publish(2)
    with pytest.raises(InvalidInput, match="without that stretch"):
        operations.skip(lane.worker(), lane.vault, window.stop, DOER, accept_gap=False)
    with pytest.raises(InvalidInput, match="reason"):
        Doer("ada", " ")
    with pytest.raises(InvalidInput, match="cannot be moved"):
        operations.skip(lane.worker(), lane.vault, lane.world.windows[-1].stop, DOER, accept_gap=True)
    operations.skip(lane.worker(), lane.vault, window.stop, DOER, accept_gap=True)
    assert lane.worker().drain(lane.vault).applied == 2
    assert [one.kind for one in lane.history()] == ["incremental", "gap", "incremental", "incremental"]
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}") == expected(lane.world.oracle)
    lane.assert_prefix()


def test_only_a_failed_window_can_be_retried_and_who_did_it_is_kept(lane: LaneUnderTest):
    window = _failed(lane)
    operations.retry(lane.worker(), window, DOER)
    assert lane.world.statuses()[-1] == "READY"
    with pytest.raises(InvalidInput, match="not FAILED"):
        operations.retry(lane.worker(), window, DOER)
    assert [one[1] for one in lane.store().audits(lane.vault) if one[2] == "retry"] == ["ada", "ada"]


def test_a_replay_applies_the_same_windows_again_and_ends_in_the_same_rows(lane: LaneUnderTest):
    lane.world.publish(6)
    lane.worker().drain(lane.vault)
    assert operations.replay(lane.worker(), lane.vault, lane.world.windows[2].start, DOER) == 2
    assert lane.world.statuses() == ["APPLIED"] * 2 + ["READY"] * 4
    assert lane.worker().drain(lane.vault).applied == 4
    assert warehouse_rows(lane.dsn, f"vault_{lane.vault}") == expected(lane.world.oracle)
    assert lane.world.statuses() == ["APPLIED"] * 6


def test_the_past_can_be_built_beside_the_present(lane: LaneUnderTest):
    lane.world.publish(6)
    lane.worker().drain(lane.vault)
    third = lane.world.windows[3]
    assert operations.as_of(lane.worker(), lane.vault, third.start, f"past_{lane.vault}") == 3
    assert warehouse_rows(lane.dsn, f"past_{lane.vault}") == expected(lane.world.before[third.stop])
    lane.assert_equals_oracle()


def test_verify_finds_one_changed_row_and_nothing_where_nothing_changed(lane: LaneUnderTest):
    lane.world.publish(4)
    lane.worker().drain(lane.vault)
    assert operations.verify(lane.worker(), lane.vault) == []
    lane.warehouse(
        f'UPDATE "vault_{lane.vault}".site__v SET city__c = $$elsewhere$$ '  # noqa: S608
        f'WHERE id = (SELECT min(id) FROM "vault_{lane.vault}".site__v) RETURNING 1'
    )
    problems = operations.verify(lane.worker(), lane.vault)
    assert any("site__v: 1 rows" in problem for problem in problems)


def test_a_queue_table_that_was_deleted_is_rebuilt_from_bucket_and_ledger(
    new_lane: Callable[..., LaneUnderTest], dynamodb: Any, s3: Any
):
    """Guards the one idea: the queue is a control plane, and can be lost."""
    table = f"queue_{secrets.token_hex(4)}"
    keys = [("vault_id", "HASH"), ("stoptime", "RANGE")]

    def create() -> None:
        dynamodb.create_table(
            TableName=table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name, _ in keys],
            KeySchema=[{"AttributeName": name, "KeyType": kind} for name, kind in keys],
        )

    create()
    lane = new_lane(table=table)
    lane.world.publish(3)
    lane.worker().drain(lane.vault)
    lane.world.publish(2)
    dynamodb.delete_table(TableName=table)
    create()
    raw = RawStore(s3, lane.world.bucket)
    added, repaired = operations.rebuild_queue(lane.worker(), raw, lane.world.queue, lane.vault, DOER)
    assert (added, repaired) == (5, 3)
    assert lane.world.statuses() == ["APPLIED"] * 3 + ["READY"] * 2
    assert lane.worker().drain(lane.vault).applied == 2
    lane.assert_equals_oracle()
    dynamodb.delete_table(TableName=table)


def test_the_command_line_shows_and_retries(lane: LaneUnderTest, monkeypatch: pytest.MonkeyPatch):
    """Guards the words of support: the same deeds, from a terminal, as JSON."""
    from lockstep.windows.cli import windows

    window = _failed(lane)
    monkeypatch.setenv("LOCKSTEP_WAREHOUSE_DSN", lane.dsn)
    run = CliRunner()

    def call(*words: str) -> Any:
        done = run.invoke(windows, [*words, "--vault", lane.vault, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    listed = call("list")
    assert [one["status"] for one in listed["windows"]] == ["APPLIED", "FAILED"]
    shown = call("show", "--stop", window.stoptime)
    assert shown["queue"]["status"] == "FAILED"
    assert shown["queue"]["attempts"] == 1
    assert call("retry", "--stop", window.stoptime, "--reason", "fixed")["status"] == "READY"
    assert [one["action"] for one in call("show", "--stop", window.stoptime)["audit"]] == ["retry", "failed"]
