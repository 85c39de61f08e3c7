"""The readiness plane of this deployment: store, driver, control and watchdog over real clients.

What belongs here: which evaluators, triggers, probes and sinks there are. What does not: what they do
(lockstep/readiness). Used by the service, the command line and the Dagster doors alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import SecretStr

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.kernel.postgres import on_connect
from lockstep.kernel.settings import Settings
from lockstep.readiness import config, probes
from lockstep.readiness.alerts import AlertDoor, ConsoleSink, Dispatcher, FileSink, S3Sink, Sink, SnsSink, WebhookSink
from lockstep.readiness.catalogue import Catalogue
from lockstep.readiness.control import Control
from lockstep.readiness.evaluators.builtin import Builtins, Probe
from lockstep.readiness.evaluators.http import HttpEvaluator
from lockstep.readiness.evaluators.process import ProcessEvaluator
from lockstep.readiness.evaluators.runner import Runner
from lockstep.readiness.handlers import Handlers
from lockstep.readiness.plane import Plane
from lockstep.readiness.safety import guarded_client
from lockstep.readiness.store import Store
from lockstep.readiness.table import DynamoTable
from lockstep.readiness.triggers import aws
from lockstep.readiness.triggers.base import Trigger, Triggers
from lockstep.readiness.triggers.command import CommandTrigger
from lockstep.readiness.triggers.dagster import DagsterGraph, DagsterTrigger
from lockstep.readiness.triggers.web import AirflowTrigger, DatabricksTrigger, HttpTrigger
from lockstep.readiness.watchdog import Watchdog
from lockstep.readiness.worker import Driver, Limits
from resources.clients import aws_client

SECRET_VARIABLE = "READINESS_SECRET_"  # noqa: S105  # the prefix of variables, not a secret
TABLE = "readiness"
# A tick, and a run that has trouble enough, wait at most fifteen seconds for one call.
SHORT_CALLS: dict[str, Any] = {"connect_timeout": 2, "read_timeout": 5, "max_attempts": 2}
_DAGSTER_SECONDS = 10.0


@dataclass(frozen=True)
class Deployment:
    """The plane of this deployment and everything that a door may need."""

    plane: Plane
    catalogue: Catalogue
    driver: Driver
    control: Control
    watchdog: Watchdog
    dynamodb: Any
    table: str

    @property
    def store(self) -> Store:
        """The ledger."""
        return self.plane.store

    @property
    def clock(self) -> Clock:
        """The plane's time."""
        return self.plane.clock

    def stream_arn(self) -> str:
        """The address of the table's stream."""
        return str(self.dynamodb.describe_table(TableName=self.table)["Table"]["LatestStreamArn"])


def build_handlers(settings: Settings, **options: Any) -> Handlers:
    """The functions of the Step Functions form, over the same parts."""
    return Handlers(build_deployment(settings, **options).plane)


def build_deployment(
    settings: Settings,
    *,
    dynamodb: Any = None,
    clock: Clock | None = None,
    ids: IdSource | None = None,
    limits: Limits | None = None,
    table: str = TABLE,
) -> Deployment:
    """Wire everything. Nothing is called here; clients open at first use."""
    clock, ids = clock or SystemClock(), ids or SystemIds()
    dynamodb = dynamodb or aws_client("dynamodb", region=settings.aws_region, **SHORT_CALLS)
    store = Store(DynamoTable(dynamodb, table), ids)
    folders = [config.shipped_folder(), *([settings.readiness_config] if settings.readiness_config else [])]
    catalogue = Catalogue(config.load(folders), store, clock)
    web, graph = _web(settings), _dagster(settings)
    runner = Runner(
        clock,
        Builtins(store, _probes(settings, graph)),
        http=HttpEvaluator(web, clock),
        process=_programs(settings),
        allowed_modules=("lockstep.",),
    )
    dispatcher = Dispatcher(_sinks(settings, web), clock)
    triggers = Triggers(_triggers(settings, web, graph))
    plane = Plane(store, catalogue.plans, catalogue.plan, runner, triggers, dispatcher, clock, ids)
    driver = Driver(plane, limits)
    return Deployment(plane, catalogue, driver, Control(plane, driver), Watchdog(plane), dynamodb, table)


def build_alerts(settings: Settings, *, table: str = TABLE) -> AlertDoor:
    """The door for alerts alone, for the other pipelines."""
    client = aws_client("dynamodb", region=settings.aws_region, **SHORT_CALLS)
    clock, ids = SystemClock(), SystemIds()
    return AlertDoor(
        Store(DynamoTable(client, table), ids), Dispatcher(_sinks(settings, _web(settings)), clock), clock, ids
    )


def _web(settings: Settings) -> httpx.Client:
    hosts = [host.strip() for host in settings.readiness_allowed_hosts.split(",") if host.strip()]
    return guarded_client(hosts)


def _dagster(settings: Settings) -> DagsterGraph | None:
    # Our own webserver, named by the deployment and not by a pipeline: no guard is needed on its address.
    return DagsterGraph(httpx.Client(timeout=_DAGSTER_SECONDS), settings.dagster_url) if settings.dagster_url else None


def _programs(settings: Settings) -> ProcessEvaluator | None:
    if settings.readiness_config is None or not settings.readiness_commands:
        return None
    return ProcessEvaluator(settings.readiness_config / "evaluators")


def _triggers(settings: Settings, web: httpx.Client, graph: DagsterGraph | None) -> dict[str, Trigger]:
    secrets = {
        name.removeprefix(SECRET_VARIABLE).lower().replace("_", "-"): value
        for name, value in os.environ.items()
        if name.startswith(SECRET_VARIABLE)
    }
    found: dict[str, Trigger] = {
        "http": HttpTrigger(web, secrets),
        "airflow": AirflowTrigger(web, secrets),
        "databricks": DatabricksTrigger(web, secrets),
        "glue": aws.GlueTrigger(_Lazy("glue", settings)),
        "emr": aws.EmrTrigger(_Lazy("emr", settings)),
        "emr-serverless": aws.EmrServerlessTrigger(_Lazy("emr-serverless", settings)),
        "step-function": aws.StepFunctionTrigger(_Lazy("stepfunctions", settings)),
        "lambda": aws.LambdaTrigger(_Lazy("lambda", settings)),
    }
    if graph is not None:
        found["dagster"] = DagsterTrigger(graph)
    if settings.readiness_commands:
        found["command"] = CommandTrigger()
    return found


class _Lazy:
    """A client that is built when it is first used: most deployments use few of them, and each costs 50 ms."""

    def __init__(self, service: str, settings: Settings) -> None:
        self._service, self._region, self._client = service, settings.aws_region, None

    def __getattr__(self, name: str) -> Any:
        if self._client is None:
            self._client = aws_client(self._service, region=self._region, max_attempts=1)
        return getattr(self._client, name)


def _sinks(settings: Settings, web: httpx.Client) -> list[Sink]:
    sinks: list[Sink] = [ConsoleSink()]
    if settings.readiness_alert_file:
        sinks.append(FileSink(settings.readiness_alert_file))
    if settings.readiness_alert_webhook:
        sinks.append(WebhookSink(web, settings.readiness_alert_webhook))
    if settings.readiness_alert_topic:
        sinks.append(SnsSink(_Lazy("sns", settings), settings.readiness_alert_topic))
    if settings.readiness_alert_bucket:
        sinks.append(S3Sink(_Lazy("s3", settings), settings.readiness_alert_bucket))
    return sinks


def _probes(settings: Settings, graph: DagsterGraph | None) -> dict[str, Probe]:
    """Readings of the other ledgers; one whose database is not known here answers that it is not connected."""
    found: dict[str, Probe] = {}
    if graph is not None:
        found |= {"dagster-asset-freshness": graph.asset_freshness, "dagster-check-result": graph.check_result}
    if settings.warehouse_dsn is not None:
        windows = probes.WindowProbe(_reader(settings.warehouse_dsn), settings.vault_ids)
        found |= {"window-watermark-lag": windows}
    if settings.postgres_dsn is not None:
        connect = _reader(settings.postgres_dsn)
        found |= {"export-jobs-done": probes.ExportProbe(connect), "tick-lag": probes.TickProbe(connect)}
    return found


def _reader(dsn: SecretStr) -> probes.Connect:
    return on_connect(dsn, application_name="lockstep-readiness", connect_timeout=3, statement_timeout=5)
