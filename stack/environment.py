"""Where the parts of a stack are, said as the environment variables that its children and its users read.

boto3, psql and Dagster read most of these by themselves, so no code branches on embedded or real. No process is
started and nothing is written here.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from pydantic import SecretStr

from lockstep.kernel.settings import DEFAULT_HOME, Settings
from stack.home import Home

LOOPBACK = "127.0.0.1"
POSTGRES_USER = "lockstep"
STATE_DATABASE = "lockstep"
DATABASES = (STATE_DATABASE, "dagster", "warehouse", "source")

# Set by the stack in every process below its supervisor, so that none of them can be lost sight of.
MEMBER_MARK = "LOCKSTEP_STACK_MEMBER"


def embedded_dsn(home: Home, ports: dict[str, int], database: str = STATE_DATABASE) -> str:
    """The address of a database on the embedded PostgreSQL, password included."""
    password = quote(home.credentials()["postgres_password"], safe="")
    return f"postgresql://{POSTGRES_USER}:{password}@{LOOPBACK}:{ports['postgres']}/{database}"


def environment(settings: Settings, home: Home, ports: dict[str, int]) -> dict[str, str]:
    """The variables that point a process at this stack, external parts included."""
    variables = {
        "LOCKSTEP_HOME": str(home.root),
        "LOCKSTEP_DAGSTER_CODE_PORT": str(ports["dagster_code"]),
        "DAGSTER_HOME": str(home.dagster),
        "LOCKSTEP_DAGSTER_URL": settings.dagster_url or f"http://{LOOPBACK}:{ports['dagster']}",
    }
    parts = _postgres(settings, home, ports) | _aws(settings, home, ports) | _spark(settings, ports)
    return variables | parts | _vault_login(settings) | _ticks_keys(settings, home)


def adopt(settings: Settings, target: MutableMapping[str, str] = os.environ) -> bool:
    """Fill in what the user did not set, from the stack that was last started in this home."""
    home = Home(settings.home)
    ports = home.ports()
    if not ports:
        return False
    for name, value in environment(settings, home, ports).items():
        target.setdefault(name, value)
    return True


def forget_own(target: MutableMapping[str, str] = os.environ) -> None:
    """Drop variables that only repeat this stack's own addresses, as after `eval "$(lockstep env)"`.

    An address that is set means "this part is external, do not start it". The stack's own addresses must not be
    mistaken for that.
    """
    home = Home(Path(target.get("LOCKSTEP_HOME") or DEFAULT_HOME).expanduser().absolute())
    ports = home.ports()
    if not ports:
        return
    own = environment(Settings.model_construct(home=home.root), home, ports)
    for name in (
        "LOCKSTEP_POSTGRES_DSN",
        "LOCKSTEP_WAREHOUSE_DSN",
        "LOCKSTEP_SOURCE_DSN",
        "LOCKSTEP_SPARK_REMOTE",
    ):
        if target.get(name) == own[name]:
            del target[name]


def aws_credentials(settings: Settings, home: Home) -> tuple[str, str]:
    """The keys that the embedded parts accept: made ones, or the user's where a part is real AWS."""
    made = home.credentials()["aws_access_key_id"], home.credentials()["aws_secret_access_key"]
    if any(settings.external(part) for part in ("s3", "sqs", "dynamodb")):
        given = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
        return given if all(given) else made
    return made


def _postgres(settings: Settings, home: Home, ports: dict[str, int]) -> dict[str, str]:
    def address(given: SecretStr | None, database: str) -> str:
        return given.get_secret_value() if given is not None else _sibling(settings, home, ports, database)

    state = urlsplit(address(settings.postgres_dsn, STATE_DATABASE))
    user, password = unquote(state.username or ""), unquote(state.password or "")
    host, port = state.hostname or LOOPBACK, str(state.port or 5432)
    return {
        "LOCKSTEP_POSTGRES_DSN": address(settings.postgres_dsn, STATE_DATABASE),
        "LOCKSTEP_WAREHOUSE_DSN": address(settings.warehouse_dsn, "warehouse"),
        "LOCKSTEP_SOURCE_DSN": address(settings.source_dsn, "source"),
        "DAGSTER_PG_HOST": host,
        "DAGSTER_PG_PORT": port,
        "DAGSTER_PG_USERNAME": user,
        "DAGSTER_PG_PASSWORD": password,
        "DAGSTER_PG_DB": "dagster",
        "PGHOST": host,
        "PGPORT": port,
        "PGUSER": user,
        "PGPASSWORD": password,
        "PGDATABASE": state.path.lstrip("/"),
    }


def _sibling(settings: Settings, home: Home, ports: dict[str, int], database: str) -> str:
    """Another database on the server that holds the state."""
    if settings.postgres_dsn is None:
        return embedded_dsn(home, ports, database)
    base, _, query = settings.postgres_dsn.get_secret_value().partition("?")
    return base.rsplit("/", 1)[0] + f"/{database}" + (f"?{query}" if query else "")


def _aws(settings: Settings, home: Home, ports: dict[str, int]) -> dict[str, str]:
    places = {"s3": settings.s3, "sqs": settings.sqs, "dynamodb": settings.dynamodb}
    variables = {"AWS_DEFAULT_REGION": settings.aws_region, "AWS_REGION": settings.aws_region}
    for part, place in places.items():
        if place == "aws":
            continue
        address = f"http://{LOOPBACK}:{ports[part]}" if place == "embedded" else place
        variables[f"AWS_ENDPOINT_URL_{part.upper()}"] = address
        if part == "dynamodb":
            variables["AWS_ENDPOINT_URL_DYNAMODB_STREAMS"] = address
    if all(place == "embedded" for place in places.values()):
        variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"] = aws_credentials(settings, home)
    return variables


def _spark(settings: Settings, ports: dict[str, int]) -> dict[str, str]:
    if settings.spark_mode == "classic":
        return {"LOCKSTEP_SPARK_MODE": "classic"}
    return {"LOCKSTEP_SPARK_REMOTE": settings.spark_remote or f"sc://{LOOPBACK}:{ports['spark']}"}


def _vault_login(settings: Settings) -> dict[str, str]:
    """A login that the vault simulator takes; it takes any. The user's own wins."""
    password = settings.vault_password
    return {
        "LOCKSTEP_VAULT_USER": settings.vault_user or "simulator",
        "LOCKSTEP_VAULT_PASSWORD": password.get_secret_value() if password else "simulator",
    }


def _ticks_keys(settings: Settings, home: Home) -> dict[str, str]:
    """What seals the secrets of tick projects: the user's keys, else one made for this home."""
    given = settings.ticks_keys
    return {"LOCKSTEP_TICKS_KEYS": given.get_secret_value() if given else home.credentials()["ticks_key"]}
