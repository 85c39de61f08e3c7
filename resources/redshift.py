"""The window pipeline on Redshift: sessions by the address that dagster-aws keeps, staging in the bucket.

What belongs here: which driver opens a session, and what the sink and the place receive. What does not: statements
(lockstep/warehouse/redshift.py) and what they mean (lockstep/windows/redshift_store.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from dagster_aws.redshift import RedshiftClientResource
from pydantic import Field

from lockstep.kernel import postgres
from lockstep.kernel.errors import Transient
from lockstep.kernel.lease import LeaseStore
from lockstep.warehouse.redshift import RedshiftDialect
from lockstep.warehouse.session import Session
from lockstep.windows.places import Place
from lockstep.windows.redshift_place import RedshiftPlace
from lockstep.windows.redshift_store import RedshiftStore
from lockstep.windows.sink import Sink
from resources.windows import WindowsResource

DEFAULT_PORT = 5439


def client_resource(dsn: str) -> RedshiftClientResource:
    """The dagster-aws resource of an address such as postgresql://user:password@host:5439/name?sslmode=require."""
    parts = urlsplit(dsn)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    return RedshiftClientResource(
        host=parts.hostname or "",
        port=parts.port or DEFAULT_PORT,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=parts.path.lstrip("/"),
        autocommit=True,
        sslmode=options.get("sslmode", "require"),
    )


def open_session(dsn: str) -> Session:
    """A session on the warehouse."""
    return Session(open_connection(dsn))


def open_connection(dsn: str) -> Any:
    """A connection by redshift_connector where it is installed, else by psycopg2, the driver of dagster-aws itself."""
    arguments = client_resource(dsn).get_client().conn_args
    try:
        return _connected(arguments)
    except Exception as error:  # the two drivers share no base class
        words = str(error).strip().splitlines()
        raise Transient(f"the warehouse cannot be reached: {words[0] if words else type(error).__name__}") from error


def _connected(arguments: dict[str, Any]) -> Any:
    try:
        import redshift_connector  # an extra of this package
    except ImportError:
        import psycopg2

        return psycopg2.connect(**arguments)
    redshift_connector.paramstyle = "pyformat"
    names = {"connect_timeout": "timeout"}
    known = {names.get(name, name): value for name, value in arguments.items() if name != "sslmode"}
    return redshift_connector.connect(**known, ssl=arguments["sslmode"] != "disable")


class RedshiftWindowsResource(WindowsResource):
    """Opens what applying windows to Redshift needs. Leases live in the platform's PostgreSQL."""

    state_dsn: str = Field(repr=False, description="Address of the platform's PostgreSQL. Give it as EnvVar.")
    iam_role: str = Field(default="default", description="Role under which COPY reads the bucket.")

    def open_store(self) -> Sink:
        """Lanes, ledger and data in Redshift, leases in PostgreSQL. The control tables are made if absent."""
        state = partial(postgres.connect, self.state_dsn, application_name="lockstep-windows-lease")
        store = RedshiftStore(self.session_factory(), LeaseStore(state), self._dialect(), bucket=self.bucket)
        store.prepare()
        return store

    def place(self) -> Place:
        """Files and COPY manifests in the bucket."""
        return RedshiftPlace(self.session_factory(), self._open_s3(), self.bucket, self._dialect())

    def session_factory(self) -> partial[Session]:
        """Opens sessions; the one thing that a test on PostgreSQL replaces, because COPY reads S3 there."""
        return partial(open_session, self.dsn)

    def _dialect(self) -> RedshiftDialect:
        return RedshiftDialect(self.iam_role, self.region_name)
