"""How the platform talks to PostgreSQL: connections that cannot hang, errors that callers can branch on.

What belongs here: opening connections and pools, one transaction helper, classification of driver errors.
What does not: tables and queries; those live beside the store that runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout, TooManyRequests
from pydantic import SecretStr

from lockstep.kernel.errors import InvalidInput, Terminal, Transient

Connection = psycopg.Connection[Any]
Pool = ConnectionPool[Connection]

CONNECT_TIMEOUT = 10.0
STATEMENT_TIMEOUT = 60.0
LOCK_TIMEOUT = 30.0
IDLE_IN_TRANSACTION_TIMEOUT = 120.0
_LONGEST_NAME = 63  # bytes of an identifier

# SQLSTATE classes and codes after which the same statement may succeed on a new connection or a later try.
_TRANSIENT_CLASSES = frozenset(
    {
        "08",  # connection exception
        "53",  # insufficient resources: too many connections, disk full, out of memory
    }
)
_TRANSIENT_CODES = frozenset(
    {
        "25006",  # read-only transaction: we reached the standby during a failover
        "25P03",  # idle-in-transaction timeout ended the session
        "40001",  # serialization failure
        "40P01",  # deadlock
        "55006",  # object in use
        "55P03",  # lock not available within lock_timeout
        "57014",  # query cancelled, also by statement_timeout
        "57P01",  # admin shutdown
        "57P02",  # crash shutdown
        "57P03",  # cannot connect now: starting up
        "57P05",  # idle session timeout
        "58030",  # I/O error on the server
    }
)


def connect(
    dsn: SecretStr | str,
    *,
    application_name: str,
    connect_timeout: float = CONNECT_TIMEOUT,
    statement_timeout: float = STATEMENT_TIMEOUT,
    lock_timeout: float = LOCK_TIMEOUT,
    idle_in_transaction_timeout: float = IDLE_IN_TRANSACTION_TIMEOUT,
    autocommit: bool = True,
) -> Connection:
    """Open one connection on which nothing waits for ever. Raises `Transient` or `Terminal`.

    Connections start in autocommit so that no transaction begins by accident; use `transaction` for one.
    """
    parameters = _parameters(
        application_name, connect_timeout, statement_timeout, lock_timeout, idle_in_transaction_timeout
    )
    with translated(f"connecting as {application_name}"):
        return psycopg.connect(_plain(dsn), autocommit=autocommit, **parameters)


def pool(
    dsn: SecretStr | str,
    *,
    application_name: str,
    min_size: int = 1,
    max_size: int = 4,
    checkout_timeout: float = 10.0,
    connect_timeout: float = CONNECT_TIMEOUT,
    statement_timeout: float = STATEMENT_TIMEOUT,
    lock_timeout: float = LOCK_TIMEOUT,
) -> Pool:
    """A pool of such connections, closed until it is entered, so that building one does no I/O.

    A connection is checked when it is taken, so a server restart costs one reconnect and not one failed
    request.
    """
    parameters = _parameters(
        application_name, connect_timeout, statement_timeout, lock_timeout, IDLE_IN_TRANSACTION_TIMEOUT
    )
    return ConnectionPool(
        _plain(dsn),
        kwargs={"autocommit": True, **parameters},
        min_size=min_size,
        max_size=max_size,
        timeout=checkout_timeout,
        check=ConnectionPool.check_connection,
        name=application_name,
        open=False,
    )


@contextmanager
def transaction(
    source: Connection | Pool, *, isolation: psycopg.IsolationLevel | None = None, what: str = "transaction"
) -> Iterator[Connection]:
    """Run the block in one transaction: all of it, or none.

    If this raises `Transient` the outcome of the commit may be unknown (the answer can be lost). Read the
    data back and believe it; never assume either outcome.

    Args:
        source: A connection, or a pool to borrow one from.
        isolation: Level of this transaction only, when the default read committed is not enough.
        what: Words for the error message.
    """
    with translated(what):
        if isinstance(source, ConnectionPool):
            with source.connection() as borrowed, _begin(borrowed, isolation):
                yield borrowed
        else:
            with _begin(source, isolation):
                yield source


@contextmanager
def translated(what: str, *, unit: str | None = None) -> Iterator[None]:
    """Turn driver errors of the block into `Transient` or `Terminal`; let every other error pass."""
    try:
        yield
    except (psycopg.Error, PoolTimeout, PoolClosed, TooManyRequests) as error:
        raise as_lockstep_error(error, what=what, unit=unit) from error


def as_lockstep_error(
    error: psycopg.Error, *, what: str = "database call", unit: str | None = None
) -> Transient | Terminal:
    """Whether trying again can help.

    No SQLSTATE means that the server never answered: the connection broke or never stood, which is
    transient. An unknown code is terminal, because retrying a bug for ever hides it.
    """
    code = error.sqlstate or ""
    text = f"{what} failed: {_first_line(error)}"
    if is_transient_code(code) or _lost_connection(error):
        return Transient(text, unit=unit)
    return Terminal(f"{text} [{code or type(error).__name__}]", unit=unit)


def is_transient_code(code: str) -> bool:
    """Whether the same statement may succeed after an error with this SQLSTATE."""
    return code[:2] in _TRANSIENT_CLASSES or code in _TRANSIENT_CODES


def identifier(*parts: str) -> sql.Identifier:
    """A quoted, possibly qualified name; the only way a name from outside may enter a statement."""
    if not parts or any(not part or "\x00" in part for part in parts):
        raise InvalidInput(f"{parts!r} is not a database name.")
    return sql.Identifier(*parts)


def refuse_long_name(name: str, *, longest_suffix: int) -> None:
    """Raise `InvalidInput` if names made of this one would pass 63 bytes: PostgreSQL cuts them there without an error.

    Two names that differ only in what was cut off are one table.
    """
    room = _LONGEST_NAME - longest_suffix
    if len(name.encode()) > room:
        raise InvalidInput(
            "the name is too long: PostgreSQL would cut off what tells its tables apart.",
            unit=name,
            next_step=f"choose one of at most {room} bytes.",
        )


def on_connect(target: SecretStr | str, **options: Any) -> Callable[[], Connection]:
    """A factory of connections, for code that must be able to reconnect on its own."""
    return lambda: connect(target, **options)


class OwnConnection:
    """One connection of a store's own, in autocommit: opened at first use, and again after it broke. Thread-safe.

    Not shared with data work, so that a busy pool or a long transaction cannot starve a heartbeat.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def run(self, statement: str, parameters: Any, *, what: str, unit: str | None = None) -> list[Any]:
        """All rows of one statement. Raises `Transient` or `Terminal`; the call after a `Transient` connects anew."""
        with self._lock:
            try:
                with translated(what, unit=unit):
                    cursor = self._opened().execute(statement.encode(), parameters)
                    return cursor.fetchall() if cursor.description else []
            except Transient:
                self._drop()
                raise

    def close(self) -> None:
        """Close it; the next call opens another."""
        with self._lock:
            self._drop()

    def _opened(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
            self._connection.autocommit = True  # a lease that waits for a commit protects nobody
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextmanager
def _begin(connection: Connection, isolation: psycopg.IsolationLevel | None) -> Iterator[None]:
    with connection.transaction():
        if isolation is not None:
            level = sql.SQL(isolation.name.replace("_", " "))
            connection.execute(sql.SQL("SET TRANSACTION ISOLATION LEVEL {}").format(level))
        yield


def _parameters(
    application_name: str,
    connect_timeout: float,
    statement_timeout: float,
    lock_timeout: float,
    idle_in_transaction_timeout: float,
) -> dict[str, Any]:
    limits = {
        "statement_timeout": statement_timeout,
        "lock_timeout": lock_timeout,
        "idle_in_transaction_session_timeout": idle_in_transaction_timeout,
    }
    return {
        "application_name": application_name,
        "connect_timeout": max(2, round(connect_timeout)),  # libpq counts whole seconds and treats 1 as 2
        "options": " ".join(f"-c {name}={round(seconds * 1000)}" for name, seconds in limits.items()),
        # A peer that vanished without FIN is noticed after about idle + interval * count = 60 s, and unsent
        # data gives up after the user timeout; without these a worker waits for the kernel's two hours.
        "keepalives": 1,
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": 60_000,
    }


def _plain(dsn: SecretStr | str) -> str:
    text = dsn.get_secret_value() if isinstance(dsn, SecretStr) else dsn
    try:
        conninfo_to_dict(text)
    except psycopg.Error:
        # The driver repeats the whole string in its message, password included.
        raise InvalidInput(
            "the database address cannot be read.",
            next_step="write postgresql://user:password@host:port/name.",
        ) from None
    return text


def _lost_connection(error: psycopg.Error) -> bool:
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not error.sqlstate


def _first_line(error: psycopg.Error) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
