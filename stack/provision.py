"""What must exist inside the parts before anyone uses them: databases, migrations, buckets, queues, tables, pools.

Everything is created if absent and left alone if present, so running this twice changes nothing. The names are the
ones the pipelines use; what flows through them is not known here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lockstep.kernel.errors import Terminal
from lockstep.kernel.settings import PROJECT_ROOT, Settings
from stack.environment import DATABASES, LOOPBACK
from stack.health import aws_client
from stack.parts import Site, prepare_dagster

DAY = 24 * 3600

# Packages with a `migrations` folder, and the database that each one's tables live in.
MIGRATIONS = (
    ("lockstep.kernel", "LOCKSTEP_POSTGRES_DSN"),
    ("lockstep.windows", "LOCKSTEP_WAREHOUSE_DSN"),
    ("lockstep.vaults", "LOCKSTEP_POSTGRES_DSN"),
    ("lockstep.exports", "LOCKSTEP_POSTGRES_DSN"),
    ("lockstep.exports.demo", "LOCKSTEP_SOURCE_DSN"),
    ("lockstep.idempotency", "LOCKSTEP_POSTGRES_DSN"),
    ("lockstep.ticks", "LOCKSTEP_POSTGRES_DSN"),
    ("lockstep.ticks.silver", "LOCKSTEP_POSTGRES_DSN"),
)


@dataclass(frozen=True)
class Queue:
    """A work queue and the queue that takes what was received too often."""

    name: str
    dead_letters: str | None = None
    max_receives: int = 5
    visibility_seconds: int = 900
    retention_seconds: int = 4 * DAY


@dataclass(frozen=True)
class Table:
    """A DynamoDB table; keys are strings."""

    name: str
    partition_key: str
    sort_key: str | None = None
    index: tuple[str, str, str] | None = None
    ttl: str | None = None
    stream: bool = False


def buckets(site: Site) -> tuple[str, ...]:
    """The buckets of the platform."""
    named = site.settings
    return (named.lake_bucket, named.windows_bucket, named.exports_bucket, named.ticks_bucket)


# A dead-letter queue keeps the original enqueue time, so it must retain for longer than its source.
QUEUES = (
    Queue("lockstep-selftest", dead_letters="lockstep-selftest-dlq", max_receives=20, visibility_seconds=60),
    Queue("job-chunk-work"),
    Queue("job-chunk-parking", retention_seconds=14 * DAY),
    Queue("bronze-completed", dead_letters="bronze-completed-dlq"),
)

TABLES = (
    Table("ddapi_queue", "vault_id", "stoptime", stream=True),
    Table("bronze_committed", "tick_id", ttl="expires_at", stream=True),
    Table("silver_dispatched", "tick_id", ttl="expires_at"),
    Table("readiness", "PK", "SK", index=("GSI1", "GSI1PK", "GSI1SK"), ttl="ttl", stream=True),
)


def provision(part: str, site: Site) -> None:
    """Create what belongs inside one part; parts without an entry need nothing."""
    _STEPS.get(part, lambda site: None)(site)


def _postgres(site: Site) -> None:
    import psycopg

    from lockstep.kernel.migrate import migrate

    state = site.environment["LOCKSTEP_POSTGRES_DSN"]
    with psycopg.connect(state, dbname="postgres", autocommit=True, connect_timeout=10) as connection:
        present = {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
        for database in DATABASES:
            if database not in present:
                with suppress(psycopg.errors.DuplicateDatabase):  # another starter was quicker
                    connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(database)))
    for package, variable in migrations(site.settings):
        migrate(site.environment[variable], package)


def migrations(settings: Settings) -> Iterator[tuple[str, str]]:
    """Which package's tables are made where.

    A source of the user's own is only ever read: it has its own `export_rows`, and a role that may write nothing. A
    Redshift sink makes its control tables itself.
    """
    for package, variable in MIGRATIONS:
        own_source = variable == "LOCKSTEP_SOURCE_DSN" and settings.source_dsn is not None
        redshift = variable == "LOCKSTEP_WAREHOUSE_DSN" and settings.warehouse_dialect != "postgres"
        if not (own_source or redshift):
            yield package, variable


def _s3(site: Site) -> None:
    with closing(aws_client("s3", site)) as client:
        present = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
        for name in buckets(site):
            if name not in present:
                region = site.settings.aws_region
                where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
                client.create_bucket(Bucket=name, **where)


def _sqs(site: Site) -> None:
    with closing(aws_client("sqs", site)) as client:
        for queue in QUEUES:
            attributes = {
                "VisibilityTimeout": str(queue.visibility_seconds),
                "MessageRetentionPeriod": str(queue.retention_seconds),
            }
            if queue.dead_letters:
                attributes["RedrivePolicy"] = _redrive(client, queue)
            ensure_queue(client, queue.name, attributes)


def _redrive(client: Any, queue: Queue) -> str:
    address = ensure_queue(client, queue.dead_letters, {"MessageRetentionPeriod": str(14 * DAY)})
    found = client.get_queue_attributes(QueueUrl=address, AttributeNames=["QueueArn"])
    return json.dumps(
        {"deadLetterTargetArn": found["Attributes"]["QueueArn"], "maxReceiveCount": str(queue.max_receives)}
    )


def ensure_queue(client: Any, name: str, attributes: dict[str, str]) -> str:
    """Create a queue, or bring the attributes of an existing one up to date; return its URL."""
    try:
        address = client.get_queue_url(QueueName=name)["QueueUrl"]
    except client.exceptions.QueueDoesNotExist:
        return str(client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])
    client.set_queue_attributes(QueueUrl=address, Attributes=attributes)
    return str(address)


def _dynamodb(site: Site) -> None:
    with closing(aws_client("dynamodb", site)) as client:
        for table in TABLES:
            with suppress(client.exceptions.ResourceInUseException):
                client.create_table(**definition(table))
            client.get_waiter("table_exists").wait(TableName=table.name, WaiterConfig={"Delay": 1, "MaxAttempts": 60})
            _ensure_ttl(client, table)


def definition(table: Table) -> dict[str, Any]:
    """What CreateTable takes."""
    keys = [key for key in (table.partition_key, table.sort_key) if key]
    index_keys = list(table.index[1:]) if table.index else []
    described: dict[str, Any] = {
        "TableName": table.name,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": [{"AttributeName": key, "AttributeType": "S"} for key in [*keys, *index_keys]],
        "KeySchema": _key_schema(keys),
    }
    if table.index:
        described["GlobalSecondaryIndexes"] = [
            {
                "IndexName": table.index[0],
                "KeySchema": _key_schema(index_keys),
                "Projection": {"ProjectionType": "ALL"},
            }
        ]
    if table.stream:
        described["StreamSpecification"] = {"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"}
    return described


def _key_schema(keys: list[str]) -> list[dict[str, str]]:
    return [{"AttributeName": key, "KeyType": kind} for key, kind in zip(keys, ("HASH", "RANGE"), strict=False)]


def _ensure_ttl(client: Any, table: Table) -> None:
    if not table.ttl:
        return
    found = client.describe_time_to_live(TableName=table.name)["TimeToLiveDescription"]
    if found.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
        client.update_time_to_live(
            TableName=table.name, TimeToLiveSpecification={"Enabled": True, "AttributeName": table.ttl}
        )


def _dagster(site: Site) -> None:
    """Create Dagster's own tables once, before webserver and daemon race for it, and limit every lane."""
    prepare_dagster(site)
    external = site.settings.external("postgres")  # then Dagster's database may be on another server than the state's
    given = {name: value for name, value in os.environ.items() if external and name.startswith("DAGSTER_PG_")}
    script = (
        "import dagster as dg\nfrom jobs.lanes import set_pool_limits\n"
        "with dg.DagsterInstance.get() as instance:\n    set_pool_limits(instance)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | dict(site.environment) | given,
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode:
        raise Terminal(f"Dagster's storage could not be prepared: {done.stderr.strip()[-600:]}", unit="dagster")


def _vault(site: Site) -> None:
    """Simulate the vaults of the settings and register them, unless somebody registered real ones."""
    import httpx

    from lockstep.kernel.postgres import connect
    from lockstep.vaults.registry import VaultRegistry

    controls = f"http://{LOOPBACK}:{site.ports['vault']}/_control/vaults"
    with connect(site.environment["LOCKSTEP_POSTGRES_DSN"], application_name="lockstep-stack") as connection:
        registry = VaultRegistry(connection)
        if any(urlsplit(one.url).hostname != LOOPBACK for one in registry.vaults()):
            return
        simulated = {one["id"] for one in httpx.get(controls, timeout=10).json()}
        for number, vault in enumerate(site.settings.vault_ids, start=1):
            if vault not in simulated:
                httpx.post(controls, json={"id": vault, "seed": number}, timeout=10).raise_for_status()
            found = httpx.get(f"{controls}/{vault}", timeout=10).json()
            registry.add(vault, found["url"], actor="stack")


_STEPS: dict[str, Callable[[Site], None]] = {
    "postgres": _postgres,
    "s3": _s3,
    "sqs": _sqs,
    "dynamodb": _dynamodb,
    "dagster-code": _dagster,
    "vault": _vault,
}
