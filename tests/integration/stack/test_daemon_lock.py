"""One Dagster daemon per instance: the second one is refused, and told who the first one is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import PROJECT_ROOT
from stack import daemon, doctor
from stack.lifecycle import Stack

pytestmark = pytest.mark.stack


@pytest.fixture
def instance(database: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where Dagster's storage would be, as its variables."""
    monkeypatch.setattr(daemon, "_PATIENCE_SECONDS", 0.3)
    parts: dict[str, Any] = conninfo_to_dict(database)
    names = {"HOST": "host", "PORT": "port", "USERNAME": "user", "PASSWORD": "password", "DB": "dbname"}
    return {f"DAGSTER_PG_{name}": str(parts[key]) for name, key in names.items()}


def test_a_second_daemon_is_refused_with_the_name_of_the_first(instance: dict[str, str]):
    first, second = daemon.DaemonLock(instance), daemon.DaemonLock(instance)
    first.take()
    with pytest.raises(InvalidInput, match=rf"another Dagster daemon .*:{os.getpid()} from 127\.0\.0\.1"):
        second.take()
    with pytest.raises(InvalidInput, match="stop that one first"):
        daemon.refuse_second(instance)


def test_a_daemon_that_died_makes_room_at_once(instance: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    code = (
        "import os, sys; from stack.daemon import DaemonLock; "
        "lock = DaemonLock(os.environ); lock.take(); print('taken', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | instance,
        cwd=PROJECT_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "taken\n"
    with pytest.raises(InvalidInput):
        daemon.refuse_second(instance)
    child.kill()
    child.communicate(timeout=30)
    monkeypatch.setattr(daemon, "_PATIENCE_SECONDS", 30.0)  # for the database of a busy machine
    daemon.refuse_second(instance)
    daemon.DaemonLock(instance).take()


def test_a_daemon_that_lost_its_lock_to_another_ends_itself(
    instance: dict[str, str], database: str, monkeypatch: pytest.MonkeyPatch
):
    """Guards two daemons after the database was away: the first one's lock went with its connection."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    first, second = daemon.DaemonLock(instance), daemon.DaemonLock(instance)
    first.take()
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name ~ 'lockstep-daemon'"
        )
    second.take()
    first._take_again()
    assert ended == [1]


@pytest.fixture
def stranger(platform: Stack) -> Iterator[str]:
    """The heartbeat of a daemon that somebody started without the lock."""
    storage = platform.site().environment["LOCKSTEP_POSTGRES_DSN"]
    with psycopg.connect(storage, dbname="dagster", autocommit=True) as connection:
        connection.execute(  # with the body of another: Dagster reads every one
            "INSERT INTO daemon_heartbeats (daemon_type, daemon_id, timestamp, body)"
            " SELECT 'TEST', 'a-stranger', %s, body FROM daemon_heartbeats LIMIT 1",
            [datetime.now(UTC).replace(tzinfo=None)],
        )
        yield "a-stranger"
        connection.execute("DELETE FROM daemon_heartbeats WHERE daemon_id = 'a-stranger'")


@pytest.mark.platform
def test_the_doctor_names_a_daemon_that_came_without_the_lock(platform: Stack, stranger: str):
    found = list(doctor._second_daemon(platform, ["postgres", "dagster-daemon"]))
    assert [finding.state for finding in found] == ["bad"]
    assert stranger in found[0].words


@pytest.mark.platform
def test_the_stack_s_own_daemon_holds_the_lock(platform: Stack):
    """A second `lockstep up` on the same database would start this very command."""
    command = [sys.executable, "-m", "stack.daemon", "run", "--workspace", str(PROJECT_ROOT / "workspace.yaml")]
    variables = os.environ | dict(platform.site().environment)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "another Dagster daemon works on this instance: lockstep-daemon" in done.stderr
