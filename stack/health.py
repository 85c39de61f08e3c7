"""How each part proves that it works: by doing its job once, not by opening a port.

A probe returns None when the part is healthy, else the reason in a few words. Probes are bounded in time and never
raise. What is created inside a healthy part is in provision.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

from stack.environment import LOOPBACK
from stack.parts import Site

Probe = Callable[[Site], str | None]

# The Dagster daemon writes a heartbeat every 30 seconds.
DAEMON_SILENCE = timedelta(seconds=90)


def probe(part: str, site: Site, started: datetime | None = None) -> str | None:
    """Ask one part for a sign of life; None means healthy.

    `started` is when its process began: signs that an earlier process left behind do not count.
    """
    try:
        if part == "dagster-daemon":
            return _dagster_daemon(site, started)
        if not site.settings.external(part) and not _port_is_open(site.ports[part.replace("-", "_")]):
            return "its port is closed"  # a cheap look first: real probes while a JVM boots would only slow it down
        return _PROBES[part](site)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _port_is_open(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as knock:
        knock.settimeout(2)
        return knock.connect_ex((LOOPBACK, port)) == 0


def aws_client(service: str, site: Site) -> Any:
    """A boto3 client with short timeouts that speaks to this stack."""
    import boto3
    from botocore.config import Config

    variable = f"AWS_ENDPOINT_URL_{service.upper().replace('STREAMS', '_STREAMS')}"
    quick = Config(connect_timeout=2, read_timeout=10, retries={"max_attempts": 1})
    session = boto3.Session(
        aws_access_key_id=site.environment.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=site.environment.get("AWS_SECRET_ACCESS_KEY"),
        region_name=site.settings.aws_region,
    )
    return session.client(service, endpoint_url=site.environment.get(variable), config=quick)


def _postgres(site: Site) -> str | None:
    import psycopg

    with psycopg.connect(site.environment["LOCKSTEP_POSTGRES_DSN"], dbname="postgres", connect_timeout=3) as connection:
        connection.execute("SELECT 1")
    return None


def _dynamodb(site: Site) -> str | None:
    with closing(aws_client("dynamodb", site)) as client:
        client.list_tables(Limit=1)
    return None


def _sqs(site: Site) -> str | None:
    with closing(aws_client("sqs", site)) as client:
        client.list_queues(MaxResults=1)
    return None


def _s3(site: Site) -> str | None:
    with closing(aws_client("s3", site)) as client:
        client.list_buckets()
    return None


def _spark(site: Site) -> str | None:
    """Run a query: the port opens seconds before the server can, and stays open when its executors are dead."""
    from pyspark.sql.connect.proto import base_pb2, base_pb2_grpc

    if site.settings.spark_mode == "classic":
        return None  # there is no server: each run starts a session of its own

    request = base_pb2.ExecutePlanRequest(session_id="00112233-4455-6677-8899-aabbccddeeff", client_type="health")
    request.user_context.user_id = "health"
    request.plan.root.sql.query = "SELECT count(*) FROM range(10)"
    with _spark_channel(site) as channel:
        stub = base_pb2_grpc.SparkConnectServiceStub(channel)
        rows = sum(answer.arrow_batch.row_count for answer in stub.ExecutePlan(request, timeout=30))
    return None if rows == 1 else "the query gave no row"


def _spark_master(site: Site) -> str | None:
    state = _cluster(site)["status"]
    return None if state == "ALIVE" else f"the master is {state}"


def _spark_worker(number: int) -> Probe:
    """A worker works when the master counts on it."""

    def registered(site: Site) -> str | None:
        port = site.ports[f"spark_worker_{number}"]
        states = [worker["state"] for worker in _cluster(site)["workers"] if worker["port"] == port]
        return None if "ALIVE" in states else "the master does not know it"

    return registered


def _cluster(site: Site) -> Any:
    import httpx

    answer = httpx.get(f"http://{LOOPBACK}:{site.ports['spark_master_ui']}/json/", timeout=5)
    return answer.raise_for_status().json()


def _spark_channel(site: Site) -> Any:
    import grpc

    if not site.settings.external("spark"):
        return grpc.insecure_channel(f"{LOOPBACK}:{site.ports['spark']}")
    from pyspark.sql.connect.client import DefaultChannelBuilder  # knows tokens and TLS

    return DefaultChannelBuilder(site.environment["LOCKSTEP_SPARK_REMOTE"]).toChannel()


def _dagster_code(site: Site) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"{LOOPBACK}:{site.ports['dagster_code']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="DagsterApi"), timeout=5)
    return None if answer.status == health_pb2.HealthCheckResponse.SERVING else "not serving"


def _dagster(site: Site) -> str | None:
    return _http(f"http://{LOOPBACK}:{site.ports['dagster']}/server_info")


def daemon_beats(site: Site, since: datetime | None = None) -> dict[str, datetime]:
    """The newest heartbeat of each Dagster daemon, by the id that a daemon gives itself when it starts."""
    import psycopg

    with psycopg.connect(site.environment["LOCKSTEP_POSTGRES_DSN"], dbname="dagster", connect_timeout=3) as connection:
        rows = connection.execute("SELECT daemon_id, max(timestamp) FROM daemon_heartbeats GROUP BY 1").fetchall()
    beats = {str(daemon): beat.replace(tzinfo=UTC) for daemon, beat in rows}
    return {daemon: beat for daemon, beat in beats.items() if since is None or beat >= since}


def _dagster_daemon(site: Site, started: datetime | None) -> str | None:
    """Read the heartbeats that the daemon leaves in its storage."""
    beats = daemon_beats(site)
    if not beats:
        return "no heartbeat yet"
    beat = max(beats.values())
    if started is not None and beat < started:
        return "no heartbeat since its start"
    age = datetime.now(UTC) - beat
    return None if age < DAEMON_SILENCE else f"last heartbeat {age.total_seconds():.0f} s ago"


def _service(name: str) -> Probe:
    return lambda site: _http(f"http://{LOOPBACK}:{site.ports[name]}/readyz")


def _http(url: str) -> str | None:
    import httpx

    answer = httpx.get(url, timeout=5)
    return None if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text[:150]}"


_PROBES: dict[str, Probe] = {
    "postgres": _postgres,
    "dynamodb": _dynamodb,
    "sqs": _sqs,
    "s3": _s3,
    "spark": _spark,
    "spark-master": _spark_master,
    "spark-worker-1": _spark_worker(1),
    "spark-worker-2": _spark_worker(2),
    "dagster-code": _dagster_code,
    "dagster": _dagster,
    "relay": _service("relay"),
    "exports": _service("exports"),
    "ingest": _service("ingest"),
    "readiness": _service("readiness"),
    "vault": _service("vault"),
}
