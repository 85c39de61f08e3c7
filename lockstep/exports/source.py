"""The database that exports read: one session per worker, one COPY per chunk, rows never collected.

What belongs here: the session's fixed spelling, the function's columns and version, the raw COPY loop. What does not:
formats (dialect.py) and where the bytes go (sink.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from datetime import date
from typing import Any

import psycopg
from psycopg import pq, sql

from lockstep.exports.dialect import DIALECT, Column, copy_statement
from lockstep.exports.model import Format, FormulaGuard
from lockstep.kernel.errors import Terminal, Transient
from lockstep.kernel.logs import get_logger
from lockstep.kernel.postgres import Connection, translated

_log = get_logger(__name__)

FUNCTION = "export_rows"
_FLUSH = 256 * 1024
_CANCEL_SECONDS = 3.0
# Values must be spelled the same on every server and for every role, whatever their defaults are.
_SPELLING = """
SET TimeZone TO 'UTC';
SET DateStyle TO 'ISO, YMD';
SET IntervalStyle TO 'iso_8601';
SET extra_float_digits TO 1;
SET bytea_output TO 'hex';
SET client_encoding TO 'UTF8';
SET default_transaction_read_only TO on"""
_VERSION = "SELECT pg_get_functiondef(to_regprocedure(%s))"
_TYPES = """
SELECT format_type(o, m) FROM unnest(%s::oid[], %s::integer[]) WITH ORDINALITY AS t (o, m, place) ORDER BY place"""
# The server is going away or has no room: nothing that another try of the same chunk would change.
_OUTAGES = frozenset({"25006", "57P01", "57P02", "57P03"})
_CUT = frozenset({"40001", "40P01", "55P03", "57014"})


class SourceDown(Transient):
    """The source cannot be used right now; no chunk is to blame."""


class SessionLost(SourceDown):
    """The session ended in the middle of a chunk's statement: the server went away, or this statement ends sessions."""


class SourceSession:
    """A warm connection. Opened at first use and again after a failure; not safe to share between threads."""

    def __init__(self, connect: Callable[[], Connection], *, function: str = FUNCTION) -> None:
        self._connect = connect
        self._function = function
        self._connection: Connection | None = None
        self._columns: tuple[Column, ...] = ()
        self._version = ""
        self._interrupted = False
        self.rows = 0

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the function."""
        self._open()
        return self._columns

    @property
    def schema_version(self) -> str:
        """A name for the function's definition and our dialect: a file made under another one is never reused."""
        self._open()
        return self._version

    def refresh(self) -> None:
        """Look at the function again: a warm session outlives a definition. What fails here, the next use tells."""
        if self._connection is None:
            return
        try:
            self._describe(self._connection)
        except (psycopg.Error, Terminal):
            self.close()

    def copy(self, key: str, day: date, form: Format, guard: FormulaGuard) -> Generator[bytes]:
        """The rows of one chunk as COPY sends them, in pieces that end where rows end. Sets `rows` at the end.

        One statement is one snapshot. Leaving early closes the connection, which also stops the query.

        Raises:
            SourceDown: The server refuses connections.
            SessionLost: The session was opened, and ended before the statement did.
            Transient: This statement was cut, for example by its time limit.
            Terminal: The function or the data is wrong.
        """
        pgconn = self._open().pgconn
        columns = self._columns
        statement = copy_statement(sql.Identifier(self._function), columns, key, day, form, guard)
        finished = False
        try:
            self.rows = 0
            result = pgconn.exec_(statement.as_bytes(self._connection))
            if result.status != pq.ExecStatus.COPY_OUT:
                raise _failed(result, key)
            yield from _pieces(pgconn)
            self.rows = _finish(pgconn, key)
            finished = True
        except psycopg.Error as error:
            raise SessionLost(_words(error)) from error
        finally:
            if not finished:
                self.close()

    def interrupt(self) -> None:
        """End the statement that another thread waits for, if there is one; it fails with 57014."""
        connection = self._connection
        if connection is None:
            return
        self._interrupted = True
        try:
            connection.cancel_safe(timeout=_CANCEL_SECONDS)
        except psycopg.Error as error:
            _log.warning("statement not interrupted", error=str(error))

    def close(self) -> None:
        """Drop the connection; the next use opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> Connection:
        if self._interrupted:  # a cancel that came late would end the next statement on the same connection
            self._interrupted = False
            self.close()
        if self._connection is not None and not self._connection.closed:
            return self._connection
        try:
            connection = self._connect()
            connection.execute(_SPELLING.encode())
        except Transient as error:
            raise SourceDown(error.what, next_step="the source is asked again after a pause.") from error
        except psycopg.Error as error:
            raise SourceDown(_words(error)) from error
        with translated("reading the export function"):
            self._describe(connection)
        self._connection = connection
        return connection

    def _describe(self, connection: Connection) -> None:
        row = connection.execute(_VERSION, (f"{self._function}(text, date)",)).fetchone()
        if row is None or row[0] is None:
            connection.close()
            raise Terminal(
                f"the source has no function {self._function}(text, date).",
                next_step="create it, then retry the job.",
            )
        # Asked by a query, not from the catalogue: it also tells the precision of numbers where there is one.
        probe = sql.SQL("SELECT * FROM {}(NULL::text, NULL::date) LIMIT 0").format(sql.Identifier(self._function))
        result = connection.execute(probe).pgresult
        assert result is not None  # noqa: S101  # a SELECT has a result
        places = range(result.nfields)
        types = connection.execute(_TYPES, ([result.ftype(i) for i in places], [result.fmod(i) for i in places]))
        names = [(result.fname(i) or b"").decode() for i in places]
        self._columns = tuple(Column(name, str(kind)) for name, (kind,) in zip(names, types, strict=True))
        definition = f"{DIALECT}\n{row[0]}\n{self._columns!r}"
        self._version = hashlib.sha256(definition.encode()).hexdigest()[:16]


def _pieces(pgconn: Any) -> Iterator[bytes]:
    # One call per row is the price of the protocol; everything else here is once per quarter megabyte. A growing
    # buffer takes a row in half the time that an object and a list entry for each take, and a quarter of what
    # iterating `cursor.copy()` takes, which wraps every row.
    buffer, get = bytearray(), pgconn.get_copy_data
    while True:
        length, data = get(0)
        if length <= 0:
            break
        buffer += data
        if len(buffer) >= _FLUSH:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def _finish(pgconn: Any, key: str) -> int:
    rows = 0
    while (result := pgconn.get_result()) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise _failed(result, key)
        rows = int(result.command_tuples or 0)
    return rows


def _failed(result: Any, key: str) -> Transient | Terminal:
    state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    words = (result.error_message or b"").decode("utf-8", "replace").strip().splitlines()
    text = f"the export function failed: {words[0] if words else 'no message'} [{state or 'connection lost'}]"
    if not state or state[:2] in ("08", "53") or state in _OUTAGES:
        return SessionLost(text, unit=key)
    return Transient(text, unit=key) if state in _CUT else Terminal(text, unit=key)


def _words(error: psycopg.Error) -> str:
    return f"the source went away: {str(error).strip().splitlines()[0] if str(error) else repr(error)}"
