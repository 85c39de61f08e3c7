"""One connection of a Redshift driver, speaking our errors: psycopg2 or redshift_connector, both DB-API 2.

What belongs here: running steps in order, undoing them, telling transient from terminal. What does not: which
statements (redshift.py) and opening a connection (resources/redshift.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lockstep.kernel.errors import LockstepError, LostClaim, Terminal, Transient
from lockstep.kernel.postgres import is_transient_code
from lockstep.warehouse.dialect import Step
from lockstep.warehouse.redshift import CLAIM

# Redshift reports a lost race of two transactions as an internal error; the number is the message.
_SERIALIZATION = ("1023", "Serializable isolation violation")


class Session:
    """A connection in autocommit, for one thread: transactions are begun and ended by steps."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        connection.autocommit = True
        self.broken = False

    def execute(self, query: str | bytes, params: Any = None, /) -> Sequence[Any]:
        """Run one statement and give its rows."""
        return self._call(_text(query), params)[0]

    def transact(self, steps: Iterable[Step], *, unit: str) -> Sequence[Any]:
        """Run the steps of one transaction, BEGIN to COMMIT; if one fails, none of them happened.

        Gives the rows of the last step that had some.

        Raises:
            LostClaim: The step that moves the watermark changed nothing.
            Terminal: A step changed or counted another number of rows than it must.
            Transient: The outcome is unknown; the ledger tells it.
        """
        last: Sequence[Any] = []
        try:
            for step in steps:
                last = self._one(step, unit) or last
            return last
        except BaseException:
            with suppress(LockstepError):
                self._call("ROLLBACK", None)
            raise

    def close(self) -> None:
        """Close it; what was not committed is gone."""
        with suppress(Exception):  # a connection that is broken cannot be closed properly
            self._connection.close()

    def copy(self, statement: str) -> None:
        """Run a COPY: the warehouse itself reads the files."""
        self._call(statement, None)

    def _one(self, step: Step, unit: str) -> Sequence[Any]:
        if step.sql.startswith("COPY "):
            self.copy(step.sql)
            return []
        rows, count = self._call(step.sql, step.parameters or None)
        found = rows[0][0] if rows else count
        if step.expect is None or found == step.expect:
            return rows
        if step.what == CLAIM:
            raise LostClaim("the lane is no longer at this watermark, fence and epoch.", unit=unit)
        raise Terminal(f"{step.what}: {found} instead of {step.expect}.", unit=unit, next_step="retry the window.")

    def _call(self, statement: str, parameters: Mapping[str, Any] | Sequence[Any] | None) -> tuple[list[Any], int]:
        try:
            cursor = self._connection.cursor()
            try:
                cursor.execute(statement, parameters) if parameters else cursor.execute(statement)
                rows = [tuple(row) for row in cursor.fetchall()] if cursor.description else []
                return rows, int(cursor.rowcount)
            finally:
                cursor.close()
        except LockstepError:
            raise
        except Exception as error:  # the two drivers share no base class
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> LockstepError:
        code, words = _code(error), _first_line(error)
        silent = not code and type(error).__name__ in ("OperationalError", "InterfaceError", "ConnectionError")
        self.broken = self.broken or silent or code[:2] in ("08", "57")
        if silent or isinstance(error, OSError) or is_transient_code(code) or words.startswith(_SERIALIZATION):
            return Transient(f"the warehouse did not do it: {words}")
        return Terminal(f"the warehouse refuses: {words} [{code or type(error).__name__}]")


def _code(error: Exception) -> str:
    """The SQLSTATE: psycopg2 carries it as `pgcode`, redshift_connector in the fields of the server's message."""
    fields = error.args[0] if error.args and isinstance(error.args[0], dict) else {}
    return str(getattr(error, "pgcode", None) or fields.get("C") or "")


def _first_line(error: Exception) -> str:
    fields = error.args[0] if error.args and isinstance(error.args[0], dict) else None
    text = str(fields.get("M", "")) if fields else str(error)
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _text(query: str | bytes) -> str:
    return query.decode() if isinstance(query, bytes) else query
