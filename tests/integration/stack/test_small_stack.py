"""A second, small stack beside the shared one: starting, stopping, interrupting, and what is kept.

These use the real command line in child processes, as a person would.
"""

from __future__ import annotations

import getpass
import json
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import boto3
import psutil
import psycopg
import pytest

from lockstep.kernel.settings import load_settings
from stack import orphans, parts
from stack.home import Home
from stack.lifecycle import Stack

LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))


def lockstep(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a given home."""
    return subprocess.run(
        [LOCKSTEP, *words],
        env=_environment(home) | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def _environment(home: Path) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "AWS_", "PG"))}
    return plain | {"LOCKSTEP_HOME": str(home)}


def _pids(home: Path) -> dict[str, int]:
    described = json.loads(lockstep(home, "status", "--json").stdout)
    return {part["name"]: part["pid"] for part in described["parts"] if part["pid"]}


def test_up_twice_is_a_no_op_and_data_survives_down_and_up(small_home: Path) -> None:
    first = lockstep(small_home, "up", "--only", "postgres,sqs")
    assert first.returncode == 0, first.stdout + first.stderr
    before = _pids(small_home)
    assert set(before) == {"postgres", "sqs"}
    assert lockstep(small_home, "up", "--only", "postgres,sqs").returncode == 0
    assert _pids(small_home) == before

    variables = json.loads(lockstep(small_home, "env", "--json").stdout)
    queue = _write(variables)
    assert lockstep(small_home, "down").returncode == 0
    assert orphans.members(Home(small_home)) == []

    assert lockstep(small_home, "up", "--only", "postgres,sqs").returncode == 0
    again = json.loads(lockstep(small_home, "env", "--json").stdout)
    assert _read(again, queue) == ("kept", "kept")
    assert again == variables, "addresses are stable across down and up"


def _sqs(variables: dict[str, str]) -> object:
    return boto3.client(
        "sqs",
        endpoint_url=variables["AWS_ENDPOINT_URL_SQS"],
        region_name=variables["AWS_REGION"],
        aws_access_key_id=variables["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=variables["AWS_SECRET_ACCESS_KEY"],
    )


def _write(variables: dict[str, str]) -> str:
    with psycopg.connect(variables["LOCKSTEP_POSTGRES_DSN"]) as connection:
        connection.execute("CREATE TABLE keepsake AS SELECT 'kept' AS word")
    client = _sqs(variables)
    client.send_message(QueueUrl=client.get_queue_url(QueueName="job-chunk-work")["QueueUrl"], MessageBody="kept")
    return "job-chunk-work"


def _read(variables: dict[str, str], queue: str) -> tuple[str, str]:
    with psycopg.connect(variables["LOCKSTEP_POSTGRES_DSN"]) as connection:
        (row,) = connection.execute("SELECT word FROM keepsake").fetchone()
    client = _sqs(variables)
    answer = client.receive_message(QueueUrl=client.get_queue_url(QueueName=queue)["QueueUrl"], WaitTimeSeconds=5)
    return row, answer["Messages"][0]["Body"]


@pytest.mark.parametrize(
    ("news", "signal_number"),
    [("postgres        starting", signal.SIGINT), ("dynamodb        ready", signal.SIGTERM)],
)
def test_interrupting_a_start_leaves_no_process(small_home: Path, news: str, signal_number: int) -> None:
    starting = subprocess.Popen(
        [LOCKSTEP, "up"],
        env=_environment(small_home) | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = next(line for line in starting.stdout if news in line)
    assert seen, "the start never came so far"
    starting.send_signal(signal_number)
    output, _ = starting.communicate(timeout=120)
    assert starting.returncode == 130, output
    assert "Traceback" not in output
    assert orphans.members(Home(small_home)) == []


def test_after_a_violent_death_of_the_supervisor_the_next_up_starts_clean(small_home: Path) -> None:
    """An orphan would hold the port or, worse, write to the same folder as its successor."""
    assert lockstep(small_home, "up", "--only", "postgres,dynamodb").returncode == 0
    left = orphans.members(Home(small_home))
    supervisor = next(process for process in left if "supervisord" in " ".join(process.cmdline()))
    supervisor.kill()
    supervisor.wait(10)
    assert [process for process in left if process.is_running() and process != supervisor], "parts outlive it"

    again = lockstep(small_home, "up", "--only", "postgres,dynamodb")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "left behind" in again.stdout
    assert not [process for process in left if process.is_running()]


def test_provisioning_an_external_part_needs_no_stack_and_says_what_is_wrong(small_home: Path) -> None:
    """Guards a deployment: there every part is external, and no stack ever started in that home."""
    answer = lockstep(
        small_home, "provision", "postgres", LOCKSTEP_POSTGRES_DSN="postgresql://nobody@127.0.0.1:1/lockstep"
    )
    assert answer.returncode == 1
    assert "it does not work: OperationalError" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_down_after_a_violent_death_of_the_supervisor_leaves_nothing(small_home: Path) -> None:
    assert lockstep(small_home, "up", "--only", "postgres").returncode == 0
    left = orphans.members(Home(small_home))
    for process in left:
        if "supervisord" in " ".join(process.cmdline()):
            process.kill()
    assert lockstep(small_home, "down").returncode == 0
    assert orphans.members(Home(small_home)) == []


def test_a_part_that_keeps_dying_is_given_up_visibly_and_named_with_its_last_words(small_home: Path) -> None:
    assert lockstep(small_home, "up", "--only", "postgres").returncode == 0
    home = Home(small_home)
    data = home.data("postgres")
    control = data / "global" / "pg_control"
    assert lockstep(small_home, "down").returncode == 0
    control.write_bytes(b"\0" * control.stat().st_size)  # PostgreSQL refuses to start from here on
    failed = lockstep(small_home, "up", "--only", "postgres")
    assert failed.returncode == 1
    assert "keeps dying" in failed.stderr
    assert "lockstep logs postgres" in failed.stderr
    shown = lockstep(small_home, "status")
    assert shown.returncode == 1
    assert "gave up after repeated crashes" in shown.stdout


def test_a_stale_pid_file_of_a_stranger_does_not_stop_the_database(small_home: Path) -> None:
    """PostgreSQL believes any living process with that number to be itself."""
    assert lockstep(small_home, "up", "--only", "postgres").returncode == 0
    assert lockstep(small_home, "down").returncode == 0
    stranger = os.getppid()
    (Home(small_home).data("postgres") / "postmaster.pid").write_text(f"{stranger}\n/nowhere\n0\n5432\n\n\n")
    (Home(small_home).run / "supervisord.pid").write_text(f"{stranger}\n")
    assert lockstep(small_home, "up", "--only", "postgres").returncode == 0
    assert psutil.pid_exists(stranger)


def test_a_wrong_java_home_is_ignored_with_a_warning(small_home: Path) -> None:
    done = lockstep(small_home, "up", "--only", "dynamodb", JAVA_HOME="/no/such/java")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "JAVA_HOME=/no/such/java" in done.stderr


def test_the_first_start_on_a_machine_makes_the_system_user_that_the_database_needs(
    small_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it was made only after supervisord, which knows no such user, had refused to start: as root nothing ran."""
    newcomer = f"lockstep-{secrets.token_hex(4)}"
    monkeypatch.setattr(parts, "POSTGRES_SYSTEM_USER", newcomer)
    known = [replace(part, system_user=newcomer) if part.system_user else part for part in parts.PARTS]
    monkeypatch.setattr(parts, "PARTS", tuple(known))
    stack = Stack(load_settings(home=small_home))
    try:
        stack.up(["postgres"])
        owner = psutil.Process(_pids(small_home)["postgres"]).username()
        assert owner == (newcomer if os.geteuid() == 0 else getpass.getuser())
    finally:
        stack.down()
        if os.geteuid() == 0:
            subprocess.run(["userdel", newcomer], check=True, capture_output=True)


def test_a_taken_port_is_refused_before_anything_starts(small_home: Path, stack: Stack) -> None:
    taken = str(stack.home.ports()["postgres"])
    refused = lockstep(small_home, "up", "--only", "postgres", LOCKSTEP_POSTGRES_PORT=taken)
    assert refused.returncode == 1
    assert f"port {taken} is taken" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert orphans.members(Home(small_home)) == []


def test_reset_asks_first_and_never_deletes_a_folder_that_is_not_a_stack(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    assert "reset --yes" in lockstep(precious, "reset").stderr
    refused = lockstep(precious, "reset", "--yes")
    assert refused.returncode == 1
    assert "nothing was deleted" in refused.stderr
    assert (precious / "thesis.txt").exists()


@pytest.mark.parametrize("words", [("status",), ("env",), ("logs", "postgres"), ("logs", "kafka")])
def test_without_a_stack_each_command_says_what_to_do(tmp_path: Path, words: tuple[str, ...]) -> None:
    answer = lockstep(tmp_path / "empty", *words)
    assert answer.returncode == 1
    assert "lockstep up" in answer.stdout + answer.stderr or "choose from" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_settings_of_the_small_stack_do_not_leak_into_the_test_process() -> None:
    assert load_settings().home.name == ".lockstep-test"
