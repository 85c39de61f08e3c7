"""The checks of a vault's applied windows, called as Dagster calls them, against real ledgers."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import dagster as dg
import pytest

from lockstep.windows.model import Gap
from platform_assets.window_events import partition_of, window_partitions
from platform_assets.windows import VaultNames, build_checks
from resources.aws import DynamoDBResource
from resources.windows import WindowsResource
from tests.windows_lane import LaneUnderTest

pytestmark = pytest.mark.stack


def _check(lane: LaneUnderTest, name: str, first: date = date(2026, 3, 1), *arguments: Any) -> dg.AssetCheckResult:
    checks = {one.check_specs.__iter__().__next__().name: one for one in _checks(lane, first)}
    resources: dict[str, Any] = {"windows": WindowsResource(dsn=lane.dsn, bucket=lane.world.bucket)}
    if name == "lag_check":
        resources["dynamodb"] = DynamoDBResource(region_name="us-east-1")
    found = checks[name](*arguments, **resources)
    assert isinstance(found, dg.AssetCheckResult)
    return found


def _checks(lane: LaneUnderTest, first: date) -> list[dg.AssetChecksDefinition]:
    return build_checks(VaultNames(lane.vault), window_partitions(first))


def test_the_lag_is_measured_against_what_the_vault_lists_and_not_against_our_clock(lane: LaneUnderTest):
    """Guards vaults whose time is not ours: a simulator of last winter that is drained to the end is not late."""
    lane.world.publish(2)
    lane.worker().drain(lane.vault)
    assert _check(lane, "lag_check").passed
    lane.world.publish(1, enqueue=False)
    lane.world.publish(6)
    late = _check(lane, "lag_check")
    assert not late.passed
    assert "105 minutes behind" in str(late.description)


def test_a_window_that_is_announced_but_not_there_counts_as_lag(lane: LaneUnderTest):
    lane.world.publish(1)
    lane.worker().drain(lane.vault)
    stop = lane.world.windows[-1].stop + timedelta(days=2)
    lane.world.queue.record_gap(Gap(lane.vault, stop, "withheld"), now=stop)
    found = _check(lane, "lag_check")
    assert not found.passed
    assert found.severity is dg.AssetCheckSeverity.ERROR


def test_windows_outside_the_days_that_are_shown_do_not_turn_the_ledger_check_red(lane: LaneUnderTest):
    lane.world.publish(2)
    lane.worker().drain(lane.vault)
    key = VaultNames(lane.vault).key("applied_windows")
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_asset_check_context(instance=instance)
        assert not _check(lane, "ledger_check", date(2026, 3, 1), context).passed
        assert _check(lane, "ledger_check", date(2027, 3, 1), context).passed
        for window in lane.world.windows:
            event = dg.AssetMaterialization(key, partition=partition_of(window.start))
            instance.report_runless_asset_event(event)
        assert _check(lane, "ledger_check", date(2026, 3, 1), context).passed


def test_chain_and_counts_are_sound_after_a_drain_and_a_changed_manifest_is_noticed(lane: LaneUnderTest):
    lane.world.publish(3)
    lane.worker().drain(lane.vault)
    assert _check(lane, "chain_check").passed
    assert _check(lane, "counts_check").passed
    window = lane.world.windows[1]
    lane.world.s3.put_object(Bucket=lane.world.bucket, Key=window.manifest_key, Body=b"{}")
    assert window.stoptime in str(_check(lane, "counts_check").description)
