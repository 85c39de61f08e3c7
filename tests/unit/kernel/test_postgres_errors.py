"""Which database errors are worth another try."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors

from lockstep.kernel.errors import InvalidInput, Terminal, Transient
from lockstep.kernel.postgres import as_lockstep_error, identifier, pool


@pytest.mark.parametrize(
    "kind",
    [
        errors.SerializationFailure,
        errors.DeadlockDetected,
        errors.AdminShutdown,
        errors.CrashShutdown,
        errors.CannotConnectNow,
        errors.ConnectionFailure,
        errors.TooManyConnections,
        errors.DiskFull,
        errors.OutOfMemory,
        errors.QueryCanceled,
        errors.LockNotAvailable,
        errors.ReadOnlySqlTransaction,
        errors.IdleInTransactionSessionTimeout,
        psycopg.OperationalError,
        psycopg.InterfaceError,
    ],
)
def test_faults_of_the_moment_are_transient(kind: type[psycopg.Error]) -> None:
    assert isinstance(as_lockstep_error(kind("x")), Transient)


@pytest.mark.parametrize(
    "kind",
    [
        errors.UniqueViolation,
        errors.ForeignKeyViolation,
        errors.CheckViolation,
        errors.NotNullViolation,
        errors.SyntaxError,
        errors.UndefinedTable,
        errors.InsufficientPrivilege,
        errors.NumericValueOutOfRange,
        errors.InvalidPassword,
        psycopg.ProgrammingError,
        psycopg.DataError,
    ],
)
def test_faults_of_the_statement_are_terminal(kind: type[psycopg.Error]) -> None:
    """Retrying these hides a bug behind an endless loop."""
    assert isinstance(as_lockstep_error(kind("x"), unit="u"), Terminal)


def test_names_from_outside_are_quoted_or_refused() -> None:
    assert identifier('a"; drop', "b").as_string(None) == '"a""; drop"."b"'
    with pytest.raises(InvalidInput):
        identifier("")


def test_building_a_pool_touches_no_server() -> None:
    assert pool("postgresql://nobody@127.0.0.1:1/x", application_name="tests").closed
