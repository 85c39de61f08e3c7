"""Every setting of the platform, in one validated class.

Sources, strongest first: `LOCKSTEP_*` variables, `lockstep.toml`, the defaults below. Nothing else reads the
environment. An address that is absent means "the embedded part": the stack fills it in for its children, so no code
can tell an embedded part from a real service.
"""

from __future__ import annotations

import os
import re
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from lockstep.kernel.errors import InvalidInput

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_HOME = PROJECT_ROOT / ".lockstep"
CONFIG_FILE = "lockstep.toml"

Port = Annotated[int, Field(ge=1, le=65535)]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,33}", re.ASCII)
AwsPart = Annotated[str, Field(examples=["embedded", "aws", "http://127.0.0.1:9000"])]


class Settings(BaseSettings):
    """The platform's settings. Field names are the variables' names in lower case, without `LOCKSTEP_`."""

    model_config = SettingsConfigDict(
        env_prefix="LOCKSTEP_", toml_file=CONFIG_FILE, extra="forbid", frozen=True, validate_default=True
    )

    home: Path = Field(
        default=DEFAULT_HOME,
        description="Folder that holds everything the embedded stack writes: data, logs, ports, credentials.",
        examples=[".lockstep"],
    )

    # --- where the parts are -----------------------------------------------------------------------------------
    postgres_dsn: SecretStr | None = Field(
        default=None,
        description="State database. Absent: the embedded PostgreSQL.",
        examples=["postgresql://user:password@db.example.com:5432/lockstep"],
    )
    postgres_options: str = Field(
        default="",
        pattern=r"^((^| )[a-z_.]+=\S+)*$",
        description="More settings of the embedded PostgreSQL, `name=value` with blanks between them; they win.",
        examples=["shared_buffers=1GB max_connections=400"],
    )
    source_dsn: SecretStr | None = Field(
        default=None,
        description="Database that exports read from. Absent: database `source` on the embedded PostgreSQL.",
        examples=["postgresql://reader:password@replica.example.com:5432/app"],
    )
    warehouse_dialect: Literal["postgres", "redshift"] = Field(
        default="postgres", description="SQL dialect of the warehouse.", examples=["postgres"]
    )
    warehouse_dsn: SecretStr | None = Field(
        default=None,
        description="The warehouse. Absent: database `warehouse` on the embedded PostgreSQL.",
        examples=["postgresql://loader:password@cluster.example.com:5439/warehouse"],
    )
    warehouse_iam_role: str = Field(
        default="default",
        description="Role under which a Redshift warehouse reads the bucket; `default` is the cluster's own.",
        examples=["arn:aws:iam::123456789012:role/loader"],
    )
    s3: AwsPart = Field(default="embedded", description="S3: `embedded`, `aws`, or an endpoint address.")
    sqs: AwsPart = Field(default="embedded", description="SQS: `embedded`, `aws`, or an endpoint address.")
    dynamodb: AwsPart = Field(default="embedded", description="DynamoDB: `embedded`, `aws`, or an endpoint address.")
    aws_region: str = Field(default="us-east-1", min_length=1, description="AWS region.", examples=["eu-west-1"])
    spark_mode: Literal["connect", "classic"] = Field(
        default="connect",
        description="`connect`: one warm Spark Connect server. `classic`: a JVM inside each run, without a server.",
        examples=["connect"],
    )
    spark_remote: str | None = Field(
        default=None,
        description="Spark Connect address. Absent: the embedded server.",
        examples=["sc://spark.example.com:15002"],
    )

    vault_user: str | None = Field(
        default=None,
        description="Login for every vault without LOCKSTEP_VAULT_<ID>_USER. Absent: the simulator's.",
        examples=["integration@example.com"],
    )
    vault_password: SecretStr | None = Field(
        default=None,
        description="Password for every vault without LOCKSTEP_VAULT_<ID>_PASSWORD.",
        examples=["…"],
    )

    # --- names that a deployment may change --------------------------------------------------------------------
    lake_bucket: str = Field(default="lockstep-lake", description="Bucket of the Delta tables.", examples=["acme-lake"])

    # --- windows -----------------------------------------------------------------------------------------------
    windows_bucket: str = Field(
        default="raw-ddapi",
        description="Bucket of the raw windows, and of what is staged for Redshift.",
        examples=["acme-raw-windows"],
    )
    vaults: str = Field(
        default="1001,1002",
        description="Vaults whose windows are applied, with commas. Each gets its assets, its lane and its schema.",
        examples=["1001,1002"],
    )
    vault_objects: str = Field(
        default="study__v,site__v,product__v,user__sys,document_version__sys,picklist__sys",
        description="Objects that are shown as assets of each vault, with commas. Others are applied all the same.",
        examples=["study__v,site__v"],
    )
    windows_start: date = Field(
        default=date(2026, 1, 1),
        description="First day whose windows are shown as partitions; the next 200 days are.",
        examples=["2026-01-01"],
    )

    # --- exports -----------------------------------------------------------------------------------------------
    exports_bucket: str = Field(
        default="lockstep-exports", description="Bucket of the exported files.", examples=["acme-exports"]
    )
    exports_base_path: str = Field(
        default="exports",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$",
        description="Folder of the exported files inside the bucket.",
        examples=["exports"],
    )

    # --- ticks -------------------------------------------------------------------------------------------------
    ticks_bucket: str = Field(
        default="lockstep-ticks", description="Bucket of the parts that agents send.", examples=["acme-ticks"]
    )
    ticks_keys: SecretStr | None = Field(
        default=None,
        description="Fernet keys that seal the secrets of projects, with commas; the first one seals, all open.",
        examples=["…"],
    )

    # --- readiness ---------------------------------------------------------------------------------------------
    dagster_url: str | None = Field(
        default=None,
        description="Address of the Dagster webserver. Absent: the embedded one.",
        examples=["https://dagster.example.com"],
    )
    readiness_config: Path | None = Field(
        default=None,
        description="Folder with own `archetypes/`, `calendars/`, `pipelines/`, `evaluators/`; the shipped ones stay.",
        examples=["/etc/lockstep/readiness"],
    )
    readiness_api_key: SecretStr | None = Field(
        default=None,
        description="Key that callers of the readiness service send as X-API-Key. Absent: only reading is allowed.",
        examples=["a-long-random-text"],
    )
    readiness_allowed_hosts: str = Field(
        default="",
        description="Private hosts that evaluators, triggers and alerts may call, as host or host:port, with commas.",
        examples=["airflow.internal,127.0.0.1:8080"],
    )
    readiness_commands: bool = Field(
        default=False, description="Whether pipelines in files may run programs of this machine.", examples=["true"]
    )
    readiness_alert_webhook: str | None = Field(
        default=None, description="Address that gets every alert as JSON.", examples=["https://pager.example.com/in"]
    )
    readiness_alert_file: Path | None = Field(
        default=None, description="File that gets every alert as a line of JSON.", examples=["/var/log/alerts.jsonl"]
    )
    readiness_alert_topic: str | None = Field(
        default=None,
        description="SNS topic that gets every alert.",
        examples=["arn:aws:sns:eu-west-1:123456789012:alerts"],
    )
    readiness_alert_bucket: str | None = Field(
        default=None, description="Bucket that gets every alert as an object.", examples=["acme-alerts"]
    )

    # --- ports of the embedded parts: absent = chosen free at first start, then kept --------------------------
    postgres_port: Port | None = Field(default=None, examples=["5432"])
    dynamodb_port: Port | None = Field(default=None, examples=["8000"])
    sqs_port: Port | None = Field(default=None, examples=["9324"])
    s3_port: Port | None = Field(default=None, examples=["9000"])
    spark_port: Port | None = Field(default=None, examples=["15002"])
    dagster_port: Port | None = Field(default=None, examples=["3000"])
    dagster_code_port: Port | None = Field(default=None, examples=["4266"])
    exports_port: Port | None = Field(default=None, examples=["8101"])
    ingest_port: Port | None = Field(default=None, examples=["8102"])
    readiness_port: Port | None = Field(default=None, examples=["8103"])
    vault_port: Port | None = Field(default=None, examples=["8104"])
    relay_port: Port | None = Field(default=None, examples=["8105"])
    supervisor_port: Port | None = Field(default=None, examples=["9001"])

    # --- behaviour -----------------------------------------------------------------------------------------------
    spark_memory: str = Field(
        default="1g", pattern=r"^\d+[mg]$", description="Heap of the embedded Spark server.", examples=["1g"]
    )
    spark_options: str = Field(
        default="",
        pattern=r"^((^| )spark\.[\w.]+=\S+)*$",
        description="More settings of the embedded Spark server, `name=value` with blanks between them; they win.",
        examples=["spark.sql.shuffle.partitions=8 spark.sql.adaptive.enabled=false"],
    )
    spark_cluster: bool = Field(
        default=False,
        description="Start the embedded Spark as a standalone master with two workers, as `up --spark-cluster` does.",
        examples=["false"],
    )
    exports_reuse_window_days: int = Field(
        default=7,
        ge=0,
        le=3650,
        description="Export files of days younger than this are always made anew; older ones may be reused.",
        examples=["7"],
    )
    exports_max_chunks: int = Field(
        default=20_000, ge=1, le=1_000_000, description="Most chunks that one export job may have.", examples=["20000"]
    )
    exports_max_attempts: int = Field(
        default=5, ge=1, le=100, description="Attempts of one export chunk before it has failed.", examples=["5"]
    )
    exports_connections: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="Connections that export workers may hold to the source database at the same time.",
        examples=["4"],
    )
    exports_requests_per_minute: int = Field(
        default=1200,
        ge=1,
        le=1_000_000,
        description="Requests that one client of the exports service may send in a minute; more are answered with 429.",
        examples=["1200"],
    )
    exports_private_webhooks: bool = Field(
        default=False,
        description="Let export webhooks call private addresses and plain http. For tests and closed networks.",
        examples=["false"],
    )
    ticks_max_part_mb: int = Field(
        default=128, ge=1, le=4096, description="Largest part of a tick, in MiB.", examples=["128"]
    )
    ticks_max_parts: int = Field(default=1000, ge=1, le=100_000, description="Most parts of a tick.", examples=["1000"])
    ticks_requests_per_second: float = Field(
        default=200.0,
        gt=0,
        description="Requests of one organisation that are answered; beyond twice as many at once, 429.",
        examples=["200"],
    )
    ticks_upload_days: float = Field(
        default=7.0, gt=0, description="Days after which an upload that nobody touches is forgotten.", examples=["7"]
    )
    ticks_lane_wait_seconds: float = Field(
        default=60.0,
        gt=0,
        description="How long a finalize waits for other ticks of its organisation before it answers 425.",
        examples=["60"],
    )
    ticks_parallel_commits: int = Field(
        default=4, ge=1, le=64, description="Ticks that one replica commits at the same time.", examples=["4"]
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severe log line that is written.", examples=["INFO"]
    )
    log_format: Literal["console", "json"] = Field(
        default="json", description="`json` for machines, `console` for people.", examples=["json"]
    )

    @field_validator("home")
    @classmethod
    def _absolute_home(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("s3", "sqs", "dynamodb")
    @classmethod
    def _known_place(cls, value: str) -> str:
        if value in ("embedded", "aws"):
            return value
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be `embedded`, `aws`, or an http(s) address")
        return value.rstrip("/")

    @field_validator("vaults", "vault_objects")
    @classmethod
    def _names_with_commas(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if not names or any(_NAME.fullmatch(name) is None for name in names) or len(set(names)) != len(names):
            raise ValueError("must be different names of letters, digits, hyphens or underscores, with commas")
        return ",".join(names)

    @field_validator("postgres_dsn", "source_dsn", "warehouse_dsn")
    @classmethod
    def _postgres_address(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and urlsplit(value.get_secret_value()).scheme not in ("postgresql", "postgres"):
            raise ValueError("must start with postgresql://")
        return value

    @field_validator("spark_remote")
    @classmethod
    def _connect_address(cls, value: str | None) -> str | None:
        if value is not None and (urlsplit(value).scheme != "sc" or not urlsplit(value).hostname):
            raise ValueError("must be a Spark Connect address that starts with sc://")
        return value

    @model_validator(mode="after")
    def _redshift_needs_an_address(self) -> Settings:
        if self.warehouse_dialect == "redshift" and self.warehouse_dsn is None:
            raise ValueError("warehouse_dsn: must be set when warehouse_dialect is redshift")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables win over the file; the file wins over defaults."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=_config_file())

    @property
    def vault_ids(self) -> tuple[str, ...]:
        """The ids in `vaults`."""
        return tuple(self.vaults.split(","))

    def external(self, part: str) -> bool:
        """Whether `part` is a service of the user's own, which the embedded stack must not start."""
        if part in ("s3", "sqs", "dynamodb"):
            return str(getattr(self, part)) != "embedded"
        if part == "postgres":
            return self.postgres_dsn is not None
        if part == "spark":
            return self.spark_remote is not None or self.spark_mode == "classic"
        return False


def load_settings(**overrides: Any) -> Settings:
    """Read the settings, or raise `InvalidInput` that names each bad variable, its problem and an example."""
    try:
        settings = Settings(**overrides)
    except ValidationError as error:
        raise InvalidInput(
            "some settings cannot be used.",
            next_step=f"correct the variables below, or the same keys in {CONFIG_FILE}.",
            problems=[_describe(problem) for problem in error.errors()],
        ) from None
    except (OSError, ValueError) as error:  # an unreadable or malformed TOML file
        raise InvalidInput(f"{_config_file()} cannot be read: {error}", next_step="correct or remove it.") from None
    _refuse_unknown_variables()
    return settings


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once."""
    return load_settings()


def _config_file() -> Path:
    here = Path.cwd() / CONFIG_FILE
    return here if here.exists() else PROJECT_ROOT / CONFIG_FILE


def _describe(problem: Any) -> str:
    # The input is never printed: it may be a secret.
    message = str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0]) if problem["loc"] else message.split(":", 1)[0]
    field = Settings.model_fields.get(name)
    if field is None:
        return f"{name} in {CONFIG_FILE}: unknown."
    example = field.examples[0] if field.examples else None
    hint = f" Example: LOCKSTEP_{name.upper()}={example}" if example else ""
    detail = message if problem["loc"] else message.split(":", 1)[-1].strip()
    return f"LOCKSTEP_{name.upper()}: {detail}.{hint}"


# Read outside this class: crash points are armed per process by fault tests; the member mark is set by the stack.
_OTHER_VARIABLES = {"LOCKSTEP_CRASH", "LOCKSTEP_STACK_MEMBER"}
# The login of one vault: any number of vaults, so these names cannot be listed (lockstep/vaults/registry.py).
_VAULT_LOGIN = re.compile(r"LOCKSTEP_VAULT_[A-Z0-9_]+_(USER|PASSWORD)", re.ASCII)


def _refuse_unknown_variables() -> None:
    """A misspelt variable must not be ignored in silence: it would start the wrong parts."""
    known = {f"LOCKSTEP_{name.upper()}" for name in Settings.model_fields} | _OTHER_VARIABLES
    ours = (name for name in os.environ if name.startswith("LOCKSTEP_") and name not in known)
    unknown = sorted(name for name in ours if _VAULT_LOGIN.fullmatch(name) is None)
    if unknown:
        raise InvalidInput(
            "some variables are not settings of Lockstep.",
            next_step="remove them, or see docs/settings.md for the names.",
            problems=[f"{name}: unknown" for name in unknown],
        )
