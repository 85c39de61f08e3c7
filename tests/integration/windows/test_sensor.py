"""The window sensor's decision against real ledgers: when it asks for a run, under which key, and when it waits."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from jobs.lanes import LANE_TAG
from lockstep.kernel.clock import FakeClock, SystemClock
from platform_assets.window_events import partition_of, picture, start_of, window_partitions
from platform_assets.windows import ATTEMPT_TAG, VaultNames
from sensors.windows import UNIT_TAG, Cursor, look
from tests.windows_lane import LaneUnderTest

pytestmark = pytest.mark.stack


def _look(lane: LaneUnderTest, instance: dg.DagsterInstance, clock: Any = None) -> dg.RunRequest | str:
    return look(instance, lane.store(), lane.worker().ledger, lane.vault, clock or SystemClock())


def test_a_ready_window_at_the_watermark_is_asked_for_once_per_attempt(lane: LaneUnderTest):
    lane.world.publish(2)
    first = lane.world.windows[0]
    with dg.DagsterInstance.ephemeral() as instance:
        asked = _look(lane, instance)
        assert isinstance(asked, dg.RunRequest)
        assert asked.run_key == f"{lane.vault}:{first.stoptime}:1:0"
        assert asked.partition_key == partition_of(first.start)
        assert asked.tags[ATTEMPT_TAG] == "1"
        assert _look(lane, instance).run_key == asked.run_key  # type: ignore[union-attr]


def test_a_run_that_died_before_it_counted_is_repeated_later_under_another_key(lane: LaneUnderTest):
    """Guards a used run key: Dagster skips it for ever, and the lane would stand still."""
    lane.world.publish(1)
    unit = f"{lane.vault}:{lane.world.windows[0].stoptime}"
    clock = FakeClock(SystemClock().now())
    with dg.DagsterInstance.ephemeral() as instance:
        instance.create_run_for_job(_noop, tags={UNIT_TAG: unit, ATTEMPT_TAG: "1"}, status=dg.DagsterRunStatus.FAILURE)
        assert "ended without an attempt" in str(_look(lane, instance, clock))
        clock.advance(3600)
        asked = _look(lane, instance, clock)
        assert isinstance(asked, dg.RunRequest)
        assert asked.run_key == f"{unit}:1:1"


def test_nothing_is_asked_for_while_a_run_or_a_worker_has_the_lane(lane: LaneUnderTest):
    lane.world.publish(1)
    tags = {LANE_TAG: VaultNames(lane.vault).group}
    with dg.DagsterInstance.ephemeral() as instance:
        with lane.worker().held(lane.vault):
            assert "live worker" in str(_look(lane, instance))
        instance.create_run_for_job(_noop, tags=tags, status=dg.DagsterRunStatus.STARTED)
        assert _look(lane, instance) == "a run is under way"


def test_a_hole_and_a_vault_without_a_full_load_wait_and_say_why(lane: LaneUnderTest, new_lane: Any):
    lane.world.publish(1, enqueue=False)
    lane.world.publish(1)
    fresh = new_lane(begun=False)
    fresh.world.publish(1)
    with dg.DagsterInstance.ephemeral() as instance:
        assert "missing" in str(_look(lane, instance))
        assert "full load" in str(_look(fresh, instance))


@pytest.mark.parametrize("text", [None, "", "nonsense", "[]", '{"shards": 3}', '{"swept_at": "x"}'])
def test_a_cursor_that_cannot_be_read_starts_with_a_sweep(text: str | None):
    assert Cursor.parse(text) == Cursor()


def test_a_cursor_survives_its_own_text():
    cursor = Cursor({"shard": "17"}, 5.0)
    assert Cursor.parse(str(cursor)) == cursor


def test_partitions_are_bounded_and_named_by_their_start(lane: LaneUnderTest):
    """Guards the UI: it becomes slow above some twenty thousand partitions."""
    from datetime import date

    partitions = window_partitions(date(2026, 1, 1))
    assert partitions.get_num_partitions() <= 20_000
    assert partitions.has_partition_key(partition_of(lane.world.start))
    assert start_of(partition_of(lane.world.start)) == lane.world.start


def test_the_picture_shows_rows_and_lag_of_the_newest_windows(lane: LaneUnderTest):
    lane.world.publish(3)
    lane.worker().drain(lane.vault)
    text = str(picture(lane.history()).value)
    assert "3 windows" in text
    assert "| rows |" in text
    assert picture([]).value == "no window yet"


@dg.job
def _noop() -> None:
    """A job to hang runs on."""
