"""What every Dagster object must say about itself, asserted over all of them."""

from __future__ import annotations

import dagster as dg
import pytest

from platform_assets.definitions import defs
from sensors import EVERY_LOOP_SECONDS

SPECS = {spec.key.to_user_string(): spec for spec in sorted(defs.resolve_all_asset_specs(), key=lambda one: one.key)}


@pytest.mark.parametrize("name", SPECS)
def test_every_asset_says_what_it_is_and_whose_it_is(name: str):
    """Guards against an asset that nobody can find, read or be asked about."""
    spec = SPECS[name]
    assert spec.group_name not in (None, "default")
    assert spec.kinds, "kinds"
    assert spec.owners, "owners"
    assert spec.description, "description"


def _names() -> list[tuple[str, str]]:
    checks = sorted(
        {key.name for key in defs.resolve_asset_graph().asset_check_keys}
    )  # a set: every process has its own order
    jobs = sorted(job.name for job in defs.resolve_all_job_defs() if not job.name.startswith("__"))
    return [
        *(("_check", name) for name in checks),
        *(("_job", name) for name in jobs),
        *(("_sensor", sensor.name) for sensor in defs.sensors or ()),
        *(("_schedule", schedule.name) for schedule in defs.schedules or ()),
    ]


@pytest.mark.parametrize(("suffix", "name"), _names())
def test_every_name_ends_with_its_kind(suffix: str, name: str):
    """Guards the naming that lets a person tell a job from a sensor in a log line."""
    assert name.endswith(suffix)


def test_every_job_runs_in_one_process_and_says_what_it_does():
    """Guards against the multiprocess executor, which opens a Spark session per step."""
    for job in defs.resolve_all_job_defs():
        assert job.executor_def == dg.in_process_executor, job.name
        assert job.name.startswith("__") or job.description, job.name


def test_every_sensor_is_described_and_awake_from_the_start():
    """Guards against a platform that looks healthy and moves nothing."""
    for sensor in defs.sensors or ():
        assert sensor.description, sensor.name
        assert sensor.default_status == dg.DefaultSensorStatus.RUNNING, sensor.name
        assert (sensor.minimum_interval_seconds or 0) >= EVERY_LOOP_SECONDS, sensor.name
