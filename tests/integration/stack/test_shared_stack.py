"""The whole stack at rest: what it tells about itself, what it listens on, what it created."""

from __future__ import annotations

import json
from typing import Any

import boto3
import httpx
import psutil
import psycopg
import pytest
from pydantic import SecretStr

from stack import orphans, provision
from stack.environment import environment
from stack.lifecycle import Stack
from stack.parts import PARTS, Site
from tests.integration.stack.test_small_stack import lockstep

pytestmark = [pytest.mark.stack, pytest.mark.platform]


def test_status_names_every_part_with_its_address(stack: Stack) -> None:
    answer = lockstep(stack.home.root, "status", "--json")
    described = json.loads(answer.stdout)
    assert answer.returncode == 0, described
    assert described["home"] == str(stack.home.root)
    by_name = {part["name"]: part for part in described["parts"]}
    for name in (
        "exports",
        "ingest",
        "readiness",
        "vault",
        "dagster",
        "s3",
        "sqs",
        "dynamodb",
        "postgres",
        "spark",
    ):
        assert "127.0.0.1:" in by_name[name]["address"]
    for part in by_name.values():
        assert set(part) >= {"name", "kind", "address", "pid", "healthy", "restarts", "rss_mb"}
        assert part["healthy"], part
        assert part["rss_mb"] > 0


def test_nothing_listens_beyond_loopback(stack: Stack) -> None:
    """DynamoDB Local alone would listen on every interface and has no option for it."""
    open_to_others = [
        (process.name(), connection.laddr)
        for process in orphans.members(stack.home)
        for connection in _listeners(process)
        if connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]
    assert open_to_others == []


def test_a_source_of_the_user_s_own_is_only_read(stack: Stack, database: str) -> None:
    """Guards a start that put the demo's function into whatever database `LOCKSTEP_SOURCE_DSN` named."""
    settings = stack.settings.model_copy(update={"source_dsn": SecretStr(database)})
    site = stack.site()
    provision.provision("postgres", Site(settings, site.home, site.ports, environment(settings, site.home, site.ports)))
    with psycopg.connect(database) as connection:
        found = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname IN ('demo', 'kernel')").fetchall()
        assert found == []
        assert connection.execute("SELECT to_regproc('public.export_rows')").fetchone() == (None,)


def _listeners(process: psutil.Process) -> list[Any]:
    try:
        return [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def test_every_part_writes_its_own_log(stack: Stack) -> None:
    for part in PARTS:
        assert stack.log_file(part.name).exists()


def test_no_log_holds_a_password_of_the_stack(stack: Stack) -> None:
    made = stack.home.credentials()
    hidden = [value for name, value in made.items() if name != "aws_access_key_id"]
    for log in stack.home.logs.iterdir():
        text = log.read_text(errors="replace")
        assert not [secret for secret in hidden if secret in text], log.name


def test_provisioning_again_changes_nothing(stack: Stack, sqs: Any, dynamodb: Any, s3: Any) -> None:
    before = _inventory(sqs, dynamodb, s3)
    for part in ("postgres", "s3", "sqs", "dynamodb", "dagster-code"):
        provision.provision(part, stack.site())
    assert _inventory(sqs, dynamodb, s3) == before


def _inventory(sqs: Any, dynamodb: Any, s3: Any) -> dict[str, Any]:
    queues = {
        url: sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["RedrivePolicy", "VisibilityTimeout"])["Attributes"]
        for url in sqs.list_queues().get("QueueUrls", [])
        if not url.rpartition("/")[2].startswith("test")
    }
    tables = {
        name: dynamodb.describe_table(TableName=name)["Table"]["CreationDateTime"]
        for name in dynamodb.list_tables()["TableNames"]
        if not name.startswith("test")
    }
    buckets = sorted(b["Name"] for b in s3.list_buckets()["Buckets"] if not b["Name"].startswith("test-"))
    return {"queues": queues, "tables": tables, "buckets": buckets}


def test_queues_send_what_was_received_too_often_to_their_dead_letters(sqs: Any) -> None:
    dead = sqs.get_queue_url(QueueName="bronze-completed-dlq")["QueueUrl"]
    url = sqs.get_queue_url(QueueName="bronze-completed")["QueueUrl"]
    policy = json.loads(
        sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["RedrivePolicy"])["Attributes"]["RedrivePolicy"]
    )
    assert int(policy["maxReceiveCount"]) == 5
    sqs.send_message(QueueUrl=url, MessageBody="poison")
    for _ in range(6):
        sqs.receive_message(QueueUrl=url, VisibilityTimeout=0, WaitTimeSeconds=1)
    found = sqs.receive_message(QueueUrl=dead, WaitTimeSeconds=5)["Messages"]
    assert found[0]["Body"] == "poison"
    sqs.purge_queue(QueueUrl=dead)


def test_tables_have_their_streams_and_expiry(dynamodb: Any) -> None:
    for table in provision.TABLES:
        described = dynamodb.describe_table(TableName=table.name)["Table"]
        assert described.get("StreamSpecification", {}).get("StreamEnabled", False) == table.stream
        ttl = dynamodb.describe_time_to_live(TableName=table.name)["TimeToLiveDescription"]
        assert ttl.get("AttributeName") == table.ttl


def test_a_change_of_a_table_is_seen_in_its_stream(dynamodb: Any) -> None:
    streams = boto3.client("dynamodbstreams", endpoint_url=dynamodb.meta.endpoint_url)
    arn = dynamodb.describe_table(TableName="ddapi_queue")["Table"]["LatestStreamArn"]
    key = {"vault_id": {"S": "stream-test"}, "stoptime": {"S": "202601010015"}}
    dynamodb.put_item(TableName="ddapi_queue", Item=key)
    shards = streams.describe_stream(StreamArn=arn)["StreamDescription"]["Shards"]
    seen = []
    for shard in shards:
        iterator = streams.get_shard_iterator(
            StreamArn=arn, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        seen += [record["dynamodb"]["Keys"] for record in streams.get_records(ShardIterator=iterator)["Records"]]
    assert key in seen
    dynamodb.delete_item(TableName="ddapi_queue", Key=key)


def test_spark_writes_and_merges_a_delta_table_on_s3(spark: Any, s3: Any, bucket: str) -> None:
    path = f"s3a://{bucket}/numbers"
    spark.range(10).write.format("delta").save(path)
    spark.sql(
        f"MERGE INTO delta.`{path}` t USING (SELECT id FROM range(5, 15)) s ON t.id = s.id "  # noqa: S608
        "WHEN NOT MATCHED THEN INSERT *"
    )
    assert spark.read.format("delta").load(path).count() == 15
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]]
    assert "numbers/_delta_log/00000000000000000001.json" in keys


def test_spark_tasks_import_the_domain(spark: Any) -> None:
    """Workers that cannot import lockstep fail only when the first real job reaches them."""

    def names(batches: Any) -> Any:
        import pyarrow as pa

        from lockstep.kernel.errors import Transient

        for batch in batches:
            yield pa.RecordBatch.from_pydict({"name": [Transient.__name__] * batch.num_rows})

    rows = spark.range(3).mapInArrow(names, "name string").collect()
    assert {row.name for row in rows} == {"Transient"}


def test_migrations_are_recorded(stack: Stack) -> None:
    with psycopg.connect(stack.site().environment["LOCKSTEP_POSTGRES_DSN"]) as connection:
        row = connection.execute("SELECT count(*) FROM lockstep_migrations").fetchone()
    assert row[0] > 0


def test_the_printed_environment_serves_a_plain_client(stack: Stack) -> None:
    printed = lockstep(stack.home.root, "env").stdout
    assert "export AWS_ENDPOINT_URL_S3=http://127.0.0.1:" in printed
    variables = json.loads(lockstep(stack.home.root, "env", "--json").stdout)
    for service in ("EXPORTS", "INGEST", "READINESS", "VAULT"):
        assert httpx.get(f"{variables[f'{service}_URL']}/healthz").status_code == 200
    with psycopg.connect("", **_libpq(variables)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def _libpq(variables: dict[str, str]) -> dict[str, str]:
    names = {
        "host": "PGHOST",
        "port": "PGPORT",
        "user": "PGUSER",
        "password": "PGPASSWORD",
        "dbname": "PGDATABASE",
    }
    return {name: variables[variable] for name, variable in names.items()}
