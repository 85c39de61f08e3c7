"""Connections and errors against a real PostgreSQL."""

from __future__ import annotations

import psycopg
import pytest
from pydantic import SecretStr

from lockstep.kernel.errors import InvalidInput, Terminal, Transient
from lockstep.kernel.postgres import connect, pool, transaction

pytestmark = pytest.mark.stack


def test_every_connection_has_its_limits_set(database: str) -> None:
    """A connection without limits waits for ever behind a lock that a dead client holds."""
    with connect(SecretStr(database), application_name="tests", statement_timeout=7, lock_timeout=3) as connection:
        shown = [
            connection.execute(f"SHOW {name}").fetchone()
            for name in ("application_name", "statement_timeout", "lock_timeout")
        ]
        idle = connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
        keepalive = connection.info.get_parameters()
    assert shown == [("tests",), ("7s",), ("3s",)]
    assert idle == ("2min",)
    assert (keepalive["keepalives_idle"], keepalive["tcp_user_timeout"]) == ("30", "60000")


def test_a_transaction_is_all_or_nothing(database: str) -> None:
    with connect(database, application_name="tests") as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        with pytest.raises(Terminal, match="23505"), transaction(connection):
            connection.execute("INSERT INTO t VALUES (1)")
            connection.execute("INSERT INTO t VALUES (1)")
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_a_transaction_may_ask_for_its_isolation(database: str) -> None:
    with pool(database, application_name="tests") as shared:
        with transaction(shared, isolation=psycopg.IsolationLevel.SERIALIZABLE) as connection:
            assert connection.execute("SHOW transaction_isolation").fetchone() == ("serializable",)
        with transaction(shared) as connection:
            assert connection.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


def test_real_faults_are_told_apart(database: str) -> None:
    with connect(database, application_name="one") as one, connect(database, application_name="two") as two:
        one.execute("CREATE TABLE t (id int PRIMARY KEY)")
        one.execute("INSERT INTO t VALUES (1), (2)")
        with pytest.raises(Terminal, match="42601"), transaction(one):
            one.execute("SELEC 1")
        with pytest.raises(Transient, match="timeout"), transaction(one):
            one.execute("SET LOCAL statement_timeout = 50")
            one.execute("SELECT pg_sleep(20)")
        with pytest.raises(Transient), transaction(one, isolation=psycopg.IsolationLevel.REPEATABLE_READ):
            one.execute("SELECT count(*) FROM t")
            two.execute("UPDATE t SET id = 3 WHERE id = 1")
            one.execute("UPDATE t SET id = 4 WHERE id = 1")
        two.execute("SELECT pg_terminate_backend(%s)", (one.info.backend_pid,))
        with pytest.raises(Transient), transaction(one):
            one.execute("SELECT 1")


def test_a_pool_replaces_a_connection_that_died(database: str) -> None:
    with pool(database, application_name="tests", max_size=1) as shared:
        with transaction(shared) as connection:
            pid = connection.info.backend_pid
        with connect(database, application_name="killer") as killer:
            killer.execute("SELECT pg_terminate_backend(%s)", (pid,))
        with transaction(shared) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_an_unreachable_server_is_transient() -> None:
    with pytest.raises(Transient):
        connect("postgresql://nobody:planted-pw@127.0.0.1:1/x", application_name="tests", connect_timeout=2)


def test_a_malformed_address_is_refused_without_repeating_it() -> None:
    """The driver's own message contains the whole string, password included."""
    with pytest.raises(InvalidInput) as caught:
        connect("postgresql://u:planted-pw@h:notaport/x?=%", application_name="tests")
    assert "planted-pw" not in str(caught.value)
    assert caught.value.__cause__ is None
