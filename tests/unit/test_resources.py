"""The resources: bounded calls, secrets out of sight, sessions released."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import Settings
from platform_assets.definitions import build_definitions
from resources.assembly import build_resources
from resources.aws import DynamoDBResource, SqsResource
from resources.databases import PostgresResource, WarehouseResource
from resources.lake import LakeResource
from resources.spark import SparkResource

SECRET = "postgresql://user:hunter2-secret@db.example.com/lockstep"


class FakeSession:
    """Stands in for a Spark session where only opening, tagging and releasing matter."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.stopped = False

    def addTag(self, tag: str) -> None:
        """Remember the tag."""
        self.tags.append(tag)

    def stop(self) -> None:
        """Remember the release."""
        self.stopped = True


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    fake = FakeSession()
    monkeypatch.setattr("dagster_pyspark.resources.spark_session_from_config", lambda config: fake)
    monkeypatch.setattr("resources.spark._session_exists", lambda: False)
    return fake


def _run_with_spark(tags: dict[str, str], *, use: bool) -> dg.ExecuteInProcessResult:
    @dg.op
    def work(spark: SparkResource) -> None:
        if use:
            assert spark.spark_session is spark.spark_session

    @dg.job(resource_defs={"spark": SparkResource(remote="sc://127.0.0.1:1")})
    def work_job() -> None:
        work()

    return work_job.execute_in_process(tags=tags)


def test_spark_work_carries_the_trace_of_the_run_and_is_released(session: FakeSession):
    """Guards against sessions that pile up on the server, and Spark jobs that no one can tie to a run."""
    _run_with_spark({"lockstep/trace": "a" * 32}, use=True)
    assert session.tags == ["lockstep-trace-" + "a" * 32]
    assert session.stopped


def test_a_run_launched_by_hand_is_traced_by_its_own_id(session: FakeSession):
    """Guards against untraced Spark work: ad-hoc runs carry no tags."""
    result = _run_with_spark({}, use=True)
    assert session.tags == ["lockstep-trace-" + result.run_id.replace("-", "")]


def test_a_run_that_never_asks_for_spark_opens_no_session(session: FakeSession):
    """Guards the price of a run that only moves messages."""
    _run_with_spark({}, use=False)
    assert session.tags == []
    assert not session.stopped


def test_a_session_that_was_there_before_is_left_alone(session: FakeSession, monkeypatch: pytest.MonkeyPatch):
    """Guards whoever opened the session: a notebook, a test, a service."""
    monkeypatch.setattr("resources.spark._session_exists", lambda: True)
    _run_with_spark({}, use=True)
    assert not session.stopped


@pytest.mark.parametrize("resource", [SqsResource, DynamoDBResource])
def test_every_call_to_aws_has_bounds(resource: type[SqsResource | DynamoDBResource]):
    """Guards against botocore's default of 60 s per call and against unbounded retries."""
    config = resource(region_name="eu-west-1").get_client().meta.config
    assert (config.connect_timeout, config.read_timeout) == (5, 30)
    assert config.retries["total_max_attempts"] == 4


def test_no_secret_reaches_what_dagster_shows(monkeypatch: pytest.MonkeyPatch):
    """Guards the UI and run configs: an address with a password is named there by its variable only."""
    for name in ("LOCKSTEP_POSTGRES_DSN", "LOCKSTEP_SOURCE_DSN", "LOCKSTEP_WAREHOUSE_DSN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("LOCKSTEP_SPARK_REMOTE", "sc://127.0.0.1:1/;token=hunter2-secret")
    repository = build_definitions(settings=Settings()).get_repository_def()
    shown = repr({key: res.get_config_field_to_config() for key, res in _pythonic(repository).items()})
    assert "hunter2" not in shown
    assert "LOCKSTEP_POSTGRES_DSN" in shown


def _pythonic(repository: dg.RepositoryDefinition) -> dict[str, Any]:
    from dagster._config.pythonic_config import ConfigurableResourceFactoryResourceDefinition

    found = repository.get_top_level_resources()
    assert found
    return {
        key: SimpleNamespace(get_config_field_to_config=lambda r=res: r.config_schema.default_value)
        for key, res in found.items()
        if isinstance(res, ConfigurableResourceFactoryResourceDefinition)
    }


def test_the_address_of_a_database_is_not_part_of_its_representation():
    """Guards tracebacks, which print the arguments of failing calls."""
    assert "hunter2" not in repr(PostgresResource(dsn=SECRET))
    assert "hunter2" not in repr(WarehouseResource(dsn=SECRET))


def test_a_redshift_warehouse_is_refused_by_the_postgres_driver():
    """Guards against a connection that half works: Redshift is not PostgreSQL 18."""
    warehouse = WarehouseResource(dsn=SECRET, dialect="redshift")
    with pytest.raises(InvalidInput, match="redshift"), warehouse.connect():
        pass


def test_classic_spark_is_one_setting(monkeypatch: pytest.MonkeyPatch):
    """Guards the promise that no asset knows which kind of session it received."""
    monkeypatch.setenv("LOCKSTEP_SPARK_REMOTE", "sc://127.0.0.1:1")
    assert build_resources(Settings(spark_mode="classic"))["spark"].mode == "classic"
    assert build_resources(Settings(spark_mode="connect"))["spark"].mode == "connect"


def test_table_addresses_are_spelled_in_one_place():
    """Guards against two spellings of one table, which would be two tables."""
    assert LakeResource(bucket="lake").table_path("silver", "orders") == "s3a://lake/silver/orders"
