"""Versioned SQL migrations: each package brings `migrations/NNNN_name.sql`, applied once, in order.

What belongs here: reading, checking and applying them under a lock. What does not: the SQL itself, which
lives in the package whose tables it makes. There is no way back down: a correction is the next number.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from pydantic import SecretStr

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.postgres import Connection, connect, identifier, translated

_FILE = re.compile(r"(?P<version>\d{4})_(?P<name>[a-z0-9_]+)\.sql")
_LOCK = 0x6C6F636B73746570  # "lockstep" in ASCII: one lock for all packages, replicas wait their turn
_LOCK_WAIT = "120s"

_CREATE_LEDGER = """
CREATE TABLE IF NOT EXISTS public.lockstep_migrations (
    package    text        NOT NULL,
    version    integer     NOT NULL,
    name       text        NOT NULL,
    sha256     text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (package, version)
)"""
_READ_LEDGER = "SELECT version, name, sha256 FROM public.lockstep_migrations WHERE package = %s ORDER BY version"
_RECORD = "INSERT INTO public.lockstep_migrations (package, version, name, sha256) VALUES (%s, %s, %s, %s)"


class Migration(NamedTuple):
    """One file: its number, its name and the checksum of what it does."""

    package: str
    version: int
    name: str
    sha256: str
    statement: str


def migrate(target: Connection | SecretStr | str, package: str) -> list[Migration]:
    """Bring the schema of `package` up to date and return what was applied now; nothing, if nothing was new.

    The schema is named after the last part of the package (`lockstep.kernel` owns schema `kernel`) and is
    first on the search path of each file. Any number of replicas may call this at once. Each file is one
    transaction, so a death in the middle leaves the files before it applied and the rest to the next start.

    Raises:
        InvalidInput: Numbers have a gap or a duplicate, or an applied file was changed, renamed or removed.
        Transient: The database could not be reached, or the lock was not free in time.
        Terminal: A statement of a file is wrong.
    """
    migrations = read_migrations(package)
    with _connection(target) as connection, translated(f"migrating {package}"), _locked(connection):
        connection.execute(_CREATE_LEDGER)
        applied = connection.execute(_READ_LEDGER, (package,)).fetchall()
        _refuse_changed_history(package, migrations, applied)
        pending = migrations[len(applied) :]
        for migration in pending:
            _apply(connection, migration)
        return pending


def read_migrations(package: str) -> list[Migration]:
    """The migration files of a package, in order. Raises `InvalidInput` that lists every bad name."""
    folder = importlib.resources.files(package) / "migrations"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    problems = check_names(names)
    if problems:
        raise InvalidInput("the migration files cannot be used.", unit=package, problems=problems)
    return [_read(package, name, (folder / name).read_text("utf-8")) for name in names]


def check_names(names: Sequence[str]) -> list[str]:
    """What is wrong with these file names: malformed, duplicate or missing numbers. Empty if nothing is."""
    problems = [f"{name}: not NNNN_name.sql" for name in names if _FILE.fullmatch(name) is None]
    versions = sorted(int(match["version"]) for name in names if (match := _FILE.fullmatch(name)))
    problems += [f"{one:04}: used twice" for one in sorted({v for v in versions if versions.count(v) > 1})]
    if versions:
        missing = sorted(set(range(1, versions[-1] + 1)) - set(versions))
        problems += [f"{one:04}: missing, numbers must run from 0001 without a gap" for one in missing]
        problems += ["0000: numbers start at 0001"] if versions[0] == 0 else []
    return problems


def schema_of(package: str) -> str:
    """The schema that a package owns."""
    return package.rpartition(".")[2]


def _read(package: str, file_name: str, text: str) -> Migration:
    match = _FILE.fullmatch(file_name)
    assert match is not None, file_name  # noqa: S101  # check_names saw it
    normal = text.replace("\r\n", "\n")  # a checkout with other line ends is not a change
    digest = hashlib.sha256(normal.encode()).hexdigest()
    return Migration(package, int(match["version"]), match["name"], digest, normal)


def _refuse_changed_history(
    package: str, migrations: Sequence[Migration], applied: Sequence[tuple[int, str, str]]
) -> None:
    problems = []
    for (version, name, digest), migration in zip(applied, migrations, strict=False):
        if (version, name) != (migration.version, migration.name):
            problems.append(f"{version:04}_{name}: applied, but the file is now {migration.name}")
        elif digest != migration.sha256:
            problems.append(f"{version:04}_{name}: changed after it was applied")
    problems += [f"{v:04}_{n}: applied, but its file is gone" for v, n, _ in applied[len(migrations) :]]
    if problems:
        raise InvalidInput(
            "the database and the migration files disagree; nothing was applied.",
            unit=package,
            next_step="restore the files of the release that ran here and add a new number instead.",
            problems=problems,
        )


def _apply(connection: Connection, migration: Migration) -> None:
    schema = identifier(schema_of(migration.package))
    with connection.transaction():
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(schema))
        connection.execute(sql.SQL("SET LOCAL search_path TO {}, public").format(schema))
        connection.execute("SET LOCAL statement_timeout TO 0")  # building an index may rightly take long
        connection.execute(migration.statement.encode())  # bytes: a file is not a template, % stays %
        connection.execute(_RECORD, (migration.package, migration.version, migration.name, migration.sha256))


@contextmanager
def _locked(connection: Connection) -> Iterator[None]:
    """Hold the session lock. It dies with the connection, so a killed replica blocks nobody."""
    with connection.transaction():
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (_LOCK_WAIT,))
        connection.execute("SELECT set_config('statement_timeout', '0', true)")
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
    try:
        yield
    finally:
        if not connection.closed and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            connection.execute("SELECT pg_advisory_unlock(%s)", (_LOCK,))


def _connection(target: Connection | SecretStr | str) -> Any:
    if isinstance(target, psycopg.Connection):
        idle = target.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if not (idle and target.autocommit):  # else each file would be a savepoint of the caller's transaction
            raise InvalidInput("migrations need an autocommit connection outside a transaction.")
        return nullcontext(target)
    return connect(target, application_name="lockstep-migrate")
