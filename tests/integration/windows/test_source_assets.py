"""The source assets on the real parts: what a run shows, and what the sweep asks for."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from jobs.windows_producer import build_produce_job, build_produce_schedule
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.postgres import connect
from lockstep.vaults.registry import VaultRegistry
from platform_assets.windows_source import GAP_CHECK, build_vault_source_assets, raw_windows_key, source_key
from resources.aws import DynamoDBResource
from resources.databases import PostgresResource
from resources.vaults import VaultSourceResource
from resources.windows import WindowsResource
from sensors.windows_source import build_sweep_sensor
from tests.producer_world import Place
from tests.simulator import Simulator, running_simulator

pytestmark = pytest.mark.stack

VAULT = f"5{secrets.token_hex(4)}"  # the queue of a kept stack remembers earlier runs


@pytest.fixture
def registry(stack: Any) -> Iterator[VaultRegistry]:
    with connect(os.environ["LOCKSTEP_POSTGRES_DSN"], application_name="test") as connection:
        found = VaultRegistry(connection)
        yield found
        found.remove(VAULT)


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[Simulator]:
    with running_simulator(tmp_path / "vault") as running:
        running.add(VAULT, rows=3, base_rows=2, objects=["study__v"])
        yield running


def test_a_registered_vault_can_be_moved_listed_and_forgotten(registry: VaultRegistry):
    registry.add(VAULT, "https://one.example.com/", actor="me")
    registry.add(VAULT, "https://two.example.com", actor="you")
    found = [vault for vault in registry.vaults() if vault.id == VAULT]
    assert [(vault.url, vault.added_by) for vault in found] == [("https://two.example.com", "you")]
    for bad in ("not-an-address", "https://u:secret@x.example.com"):
        with pytest.raises(InvalidInput):
            registry.add(VAULT, bad, actor="me")
    assert registry.remove(VAULT)
    assert not registry.remove(VAULT)


def test_a_run_shows_what_came_and_what_is_missing_and_the_sweep_comes_back_for_it(
    registry: VaultRegistry, simulator: Simulator, tmp_path: Path
):
    registry.add(VAULT, simulator.address(VAULT), actor="test")
    simulator.do(VAULT, "publish", windows=3)
    simulator.do(VAULT, "withhold", stop="202601010030")
    place = Place().create()
    resources = {
        "vault_source": VaultSourceResource(
            region_name="us-east-1", bucket=place.bucket, work_folder=str(tmp_path / "work")
        ),
        "postgres": PostgresResource(dsn=os.environ["LOCKSTEP_POSTGRES_DSN"]),
        "windows": WindowsResource(dsn=os.environ["LOCKSTEP_WAREHOUSE_DSN"], bucket=place.bucket),
    }
    source, raw = build_vault_source_assets(VAULT)
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([raw], resources=resources, instance=instance)
        assert result.success
        metadata = result.asset_materializations_for_node(raw.node_def.name)[0].metadata
        assert metadata["new_windows"].value == 3  # two windows and the first full archive
        assert metadata["dagster/uri"].value == f"s3://{place.bucket}/vault={VAULT}/"
        manifests = [key for key in place.objects() if key.endswith("lockstep-manifest.json")]
        assert len(manifests) == 3, "the files are in the bucket that the resource was given"
        assert "202601010030" not in str(metadata["gaps"].value)
        assert "not published by the vendor" in str(metadata["gaps"].value)
        check = result.get_asset_check_evaluations()[0]
        assert (check.check_name, check.passed) == (GAP_CHECK, False)
        assert instance.fetch_observations(source_key(VAULT), limit=1).records
        look = dg.define_asset_job("look_job", selection=dg.AssetSelection.assets(source_key(VAULT)))
        jobs = dg.Definitions(assets=[source], jobs=[look], resources=resources)
        observed = jobs.resolve_job_def("look_job").execute_in_process(instance=instance)
        assert observed.success
        observation = observed.asset_observations_for_node(source.node_def.name)[0]
        assert observation.metadata["published"].value == 2
        assert observation.metadata["not_published"].value == 1
    requests = _swept()
    assert requests == []  # the gap was looked at a moment ago


def _swept() -> list[dg.RunRequest]:
    job = build_produce_job([VAULT])
    sensor = build_sweep_sensor([VAULT], job)
    context = dg.build_sensor_context(resources={"dynamodb": DynamoDBResource(region_name="us-east-1")})
    found = sensor.evaluate_tick(context).run_requests
    assert all(request.asset_selection == [raw_windows_key(VAULT)] for request in found or [])
    return list(found or [])


def test_the_schedule_asks_for_registered_vaults_only_and_once_per_tick(registry: VaultRegistry):
    """Guards against red runs of a vault that nobody has set up yet."""
    schedule = build_produce_schedule([VAULT, "nobody"], build_produce_job([VAULT, "nobody"]))
    postgres = PostgresResource(dsn=os.environ["LOCKSTEP_POSTGRES_DSN"])

    def tick() -> list[str | None]:
        moment = datetime(2026, 1, 1, 12, 5, tzinfo=UTC)
        with dg.build_schedule_context(scheduled_execution_time=moment, resources={"postgres": postgres}) as context:
            found = schedule(context)
        return [request.run_key for request in found] if isinstance(found, list) else []

    assert tick() == []
    registry.add(VAULT, "https://one.example.com", actor="test")
    assert tick() == tick() == [f"produce:{VAULT}:schedule:202601011205"]
