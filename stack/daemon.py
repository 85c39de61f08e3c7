"""The Dagster daemon behind a lock: one per instance; a second one refuses and says who is there.

What belongs here: the lock, kept for as long as the daemon lives. What does not: the daemon itself, which is Dagster's,
and starting it (parts.py). The lock is a session lock in Dagster's own database, so it ends with its holder.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping

import psycopg

from lockstep.kernel.errors import InvalidInput, LockstepError

_LOCK = (1819042676, 1684106606)  # "lock", "dagn": a pair that nobody else uses in this database
_PATIENCE_SECONDS = 5.0  # a daemon that has just died may hold its lock for a moment
_KEEP_SECONDS = 5.0

# Without these the database would keep the lock of a machine that lost its power for two hours.
_NOTICE_THE_DEAD = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"

_TAKE = "SELECT pg_try_advisory_lock(%s, %s)"
_HOLDER = """
SELECT a.application_name, host(a.client_addr), a.backend_start
  FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
 WHERE l.locktype = 'advisory' AND l.granted AND l.classid = %s AND l.objid = %s AND a.datname = current_database()"""


def refuse_second(variables: Mapping[str, str]) -> None:
    """Raise if another daemon works on this instance.

    Raises:
        InvalidInput: With the name and the address of the one that is there.
    """
    with _connect(variables, "lockstep-up") as connection:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (held := _holder(connection)) is not None:
            if time.monotonic() > deadline:
                raise _refusal(held)
            time.sleep(0.25)


class DaemonLock:
    """Taken before the daemon starts, watched while it runs."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._connection: psycopg.Connection | None = None

    def take(self) -> None:
        """Take the lock, or raise InvalidInput with the name of its holder."""
        connection = _connect(self._variables, f"lockstep-daemon {socket.gethostname()[:30]}:{os.getpid()}")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _taken(connection):
            held = _holder(connection)
            if held is not None and time.monotonic() > deadline:
                connection.close()
                raise _refusal(held)
            time.sleep(0.25)
        self._connection = connection

    def keep(self) -> None:
        """Hold the lock for ever; end this process if another daemon took it while the database was away."""
        while True:
            time.sleep(_KEEP_SECONDS)
            try:
                if self._connection is not None:
                    self._connection.execute("SELECT 1")
            except psycopg.Error:
                self._take_again()

    def _take_again(self) -> None:
        try:
            self.take()
        except psycopg.Error:
            return  # the database is still away; so is everybody else's
        except LockstepError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)  # not sys.exit: this is a thread, and the daemon must not ask for one run more


def _taken(connection: psycopg.Connection) -> bool:
    row = connection.execute(_TAKE, _LOCK).fetchone()
    return bool(row and row[0])


def _holder(connection: psycopg.Connection) -> tuple[str, str | None, object] | None:
    return connection.execute(_HOLDER, _LOCK).fetchone()


def _refusal(held: tuple[str, str | None, object]) -> InvalidInput:
    name, address, since = held
    return InvalidInput(
        f"another Dagster daemon works on this instance: {name} from {address}, since {since:%Y-%m-%d %H:%M:%S %Z}.",
        unit="dagster-daemon",
        next_step="stop that one first. One instance has one daemon: two would ask for everything twice.",
    )


def _connect(variables: Mapping[str, str], name: str) -> psycopg.Connection:
    return psycopg.connect(
        host=variables["DAGSTER_PG_HOST"],
        port=variables["DAGSTER_PG_PORT"],
        user=variables["DAGSTER_PG_USERNAME"],
        password=variables["DAGSTER_PG_PASSWORD"],
        dbname=variables["DAGSTER_PG_DB"],
        application_name=name[:63],
        connect_timeout=5,
        autocommit=True,
        options=_NOTICE_THE_DEAD,
    )


def main() -> None:
    """`python -m stack.daemon run …`: what `dagster-daemon run …` does, alone."""
    lock = DaemonLock(os.environ)
    try:
        lock.take()
    except LockstepError as error:
        sys.exit(str(error))
    threading.Thread(target=lock.keep, name="daemon-lock", daemon=True).start()
    from dagster._daemon.cli import main as dagster_daemon  # what the program dagster-daemon calls

    sys.argv[0] = "dagster-daemon"
    dagster_daemon()


if __name__ == "__main__":
    main()
