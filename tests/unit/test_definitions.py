"""Loading the definitions: fast, offline and without Spark, because every run and reload pays for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
import yaml

from jobs.lanes import RUNS_PER_LANE, lane_pools, set_pool_limits
from platform_assets.definitions import build_definitions, defs
from resources.lake import LakeResource

ROOT = Path(__file__).resolve().parents[2]

_LOAD_OFFLINE = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("definitions opened a connection at import")

socket.socket.connect = refuse
socket.socket.connect_ex = refuse
socket.create_connection = refuse
socket.getaddrinfo = refuse

from platform_assets.definitions import defs

dg_defs = defs.get_repository_def()
heavy = sorted(name for name in ("pyspark", "py4j", "grpc_status", "pandas") if name in sys.modules)
assert not heavy, f"loaded at import: {heavy}"
"""


@pytest.mark.parametrize("mode", ["connect", "classic"])
def test_definitions_load_in_a_fresh_interpreter_offline_and_without_spark(mode: str, tmp_path: Path):
    """Guards against a client or a JVM that starts at import: it would start in every run and reload."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD_OFFLINE],
        env={"PATH": "", "PYTHONPATH": str(ROOT), "LOCKSTEP_SPARK_MODE": mode},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_resource_can_be_replaced_without_touching_the_others():
    """Guards the seam that tests and notebooks use instead of patching."""
    replaced = build_definitions(resources={"lake": LakeResource(bucket="elsewhere")})
    assert replaced.resources["lake"].bucket == "elsewhere"
    assert set(replaced.resources) == set(defs.resources)


def test_every_lane_gets_its_limit_before_its_first_run():
    """Guards a trap: a default limit does not protect a pool's first use, and two runs start together."""
    with dg.DagsterInstance.ephemeral() as instance:
        assert set_pool_limits(instance) == lane_pools(defs)
        limits = {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}
        assert limits == dict.fromkeys(lane_pools(defs), RUNS_PER_LANE)


def test_setting_limits_again_changes_nothing_and_keeps_a_paused_lane_paused():
    """Guards against a restart that silently opens a lane which an operator closed."""
    with dg.DagsterInstance.ephemeral() as instance:
        set_pool_limits(instance)
        assert set_pool_limits(instance) == []
        instance.event_log_storage.set_concurrency_slots("lane_selftest", 0)
        assert set_pool_limits(instance) == []
        instance.event_log_storage.set_concurrency_slots("lane_selftest", 3)
        assert set_pool_limits(instance) == ["lane_selftest"]


def test_the_workspace_points_at_the_code_server_of_the_stack():
    """Guards the one variable that ties webserver and daemon to the code server."""
    (location,) = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    assert location["grpc_server"] == {
        "host": "127.0.0.1",
        "port": {"env": "LOCKSTEP_DAGSTER_CODE_PORT"},
        "location_name": "lockstep",
    }
