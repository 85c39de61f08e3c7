"""The Dagster doors of the source side: their words, one run per vault, and when a gap is looked at again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from jobs.lanes import lane_pools
from jobs.windows_producer import build_produce_job, build_produce_schedule, produce_request
from lockstep.windows.model import Gap
from platform_assets.windows_source import build_vault_source_assets, raw_windows_key, source_key
from resources.assembly import build_resources
from sensors.windows_source import PATIENCE, build_sweep_sensor, is_due

VAULTS = ("1000020", "my-vault")
NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def definitions() -> dg.Definitions:
    from lockstep.kernel.settings import Settings

    job = build_produce_job(VAULTS)
    return dg.Definitions(
        assets=[asset for vault in VAULTS for asset in build_vault_source_assets(vault)],
        jobs=[job],
        schedules=[build_produce_schedule(VAULTS, job)],
        sensors=[build_sweep_sensor(VAULTS, job)],
        resources=build_resources(Settings()),
    )


def test_every_vault_has_its_source_and_its_raw_windows_with_lineage(definitions: dg.Definitions):
    specs = {spec.key: spec for spec in definitions.resolve_all_asset_specs()}
    for vault in VAULTS:
        raw, source = specs[raw_windows_key(vault)], specs[source_key(vault)]
        assert [dep.asset_key for dep in raw.deps] == [source_key(vault)]
        for spec in (raw, source):
            assert spec.owners
            assert spec.kinds
            assert spec.description
            assert spec.group_name == spec.key.path[0]


def test_two_runs_of_one_producer_wait_for_each_other_and_vaults_do_not(definitions: dg.Definitions):
    assert lane_pools(definitions) == ["produce_vault_1000020", "produce_vault_my_vault"]


def test_a_run_is_asked_for_once_per_vault_and_occasion():
    """Guards isolation: a vault that hangs holds up its own run and no other."""
    requests = [produce_request(vault, "schedule:202601011200") for vault in VAULTS]
    assert [request.run_key for request in requests] == [
        "produce:1000020:schedule:202601011200",
        "produce:my-vault:schedule:202601011200",
    ]
    assert [request.asset_selection for request in requests] == [[raw_windows_key(vault)] for vault in VAULTS]


@pytest.mark.parametrize(
    ("looked_ago", "retry_in", "due"),
    [
        (timedelta(0), None, False),
        (PATIENCE, None, True),
        (PATIENCE, timedelta(minutes=1), False),
        (PATIENCE, timedelta(minutes=-1), True),
        (timedelta(0), timedelta(minutes=-1), False),
        (None, None, True),
    ],
)
def test_a_gap_is_looked_at_again_when_its_time_has_come_and_not_in_a_loop(
    looked_ago: timedelta | None, retry_in: timedelta | None, due: bool
):
    gap = Gap(
        "v",
        NOW,
        "late",
        next_retry=None if retry_in is None else NOW + retry_in,
        last_seen=None if looked_ago is None else NOW - looked_ago,
    )
    assert is_due(gap, NOW) is due
