"""The readings behind the builtins against the real stores: what they say, and that they follow an index."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from lockstep.kernel.migrate import migrate
from lockstep.kernel.postgres import on_connect
from lockstep.kernel.settings import load_settings
from lockstep.readiness import probes
from lockstep.readiness.evaluators.answer import Question
from lockstep.readiness.evaluators.builtin import Builtins
from lockstep.readiness.model import Execution, TraitPlan, TraitResult
from lockstep.readiness.store import Store
from lockstep.readiness.table import MemoryTable
from lockstep.windows.store import BEGINNING
from resources.readiness import build_deployment
from tests.unit.readiness.builders import KEY

pytestmark = pytest.mark.stack

NOW = datetime(2026, 3, 11, 8, 0, tzinfo=UTC)
MIDNIGHT = datetime(2026, 3, 11, tzinfo=UTC)
MANY = 20_000
CLIENT = (
    "INSERT INTO exports.client (client_id, name, tenant, key_sha256, webhook_secret) VALUES ('c', 'c', 't', '', '')"
)


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as opened:
        yield opened


def _ask(probe: Any, builtin: str, **config: Any) -> TraitResult:
    builtins = Builtins(Store(MemoryTable()), {builtin: probe})
    return builtins.evaluate(Question(KEY, TraitPlan("progress", config=config), NOW), builtin)


def _plan_of(connection: psycopg.Connection[Any], statement: str, **values: Any) -> str:
    connection.execute("ANALYZE")
    rows = connection.execute(f"EXPLAIN {statement}".encode(), values).fetchall()
    return "\n".join(row[0] for row in rows)


def test_the_furthest_vault_decides_how_current_windows_are(database: str, connection: psycopg.Connection[Any]):
    migrate(database, "lockstep.windows")
    probe = probes.WindowProbe(on_connect(database, application_name="test"), ["1001", "1002"])
    assert _ask(probe, "window-watermark-lag", maxLagSeconds=60).reason == "nothing was recorded yet"
    assert _ask(probe, "window-watermark-lag", maxLagSeconds=60, ignoreNotBegun=True).status == "PASS"
    lanes = {"1001": NOW - timedelta(minutes=20), "1002": BEGINNING, "9999": MIDNIGHT - timedelta(days=30)}
    for vault, watermark in lanes.items():
        connection.execute(
            "INSERT INTO windows.apply_control (vault, epoch, watermark, opened_by) VALUES (%s, 1, %s, 'test')",
            (vault, watermark),
        )
    one = _ask(probe, "window-watermark-lag", maxLagSeconds=3600)
    assert (one.status, one.value["notBegun"]) == ("FAIL", ["1002"]), "a vault without data is not current"
    assert _ask(probe, "window-watermark-lag", maxLagSeconds=3600, vault="1001").status == "PASS"
    connection.execute("UPDATE windows.apply_control SET watermark = %s WHERE vault = '1002'", (MIDNIGHT,))
    late = _ask(probe, "window-watermark-lag", maxLagSeconds=3600)
    assert (late.status, late.value["vault"], late.value["lagSeconds"]) == ("FAIL", "1002", 8 * 3600)
    assert _ask(probe, "window-watermark-lag", through="execution-day").status == "PASS"
    connection.execute(
        "UPDATE windows.apply_control SET watermark = watermark - interval '15 min' WHERE vault = '1002'"
    )
    waiting = _ask(probe, "window-watermark-lag", through="execution-day")
    assert (waiting.status, waiting.reason) == ("FAIL", "come to 2026-03-10 23:45, 2026-03-11 00:00 UTC is needed")
    assert _ask(probe, "window-watermark-lag", through="previous-day").status == "PASS"
    connection.execute(
        "INSERT INTO windows.apply_control (vault, epoch, watermark, opened_by)"
        " SELECT 'v' || n, 1, now(), 'test' FROM generate_series(1, %s) AS n",
        (MANY,),
    )
    assert "apply_control_pkey" in _plan_of(connection, probes.WATERMARKS, vaults=["1001", "1002"])


def _submit(connection: psycopg.Connection[Any], count: int, status: str, at: datetime, *, first: int = 1) -> None:
    done, active = status == "COMPLETED", status in ("SUBMITTED", "IN_PROGRESS")
    connection.execute(
        """
        INSERT INTO exports.job (job_id, number, client_id, tenant, status, request_json, created_at, updated_at, as_of,
            reuse_window_days, force, format, formula_guard, s3_base_path, duplicates_removed,
            total, pending, done, failed, generated)
        SELECT 'J' || n, n, 'c', 't', %(status)s, '{}', %(at)s, %(at)s, %(at)s, 7, false, 'csv', 'off', 'x', 0,
               1, %(pending)s, %(done)s, %(failed)s, %(done)s
          FROM generate_series(%(first)s::bigint, %(first)s::bigint + %(count)s - 1) AS n""",
        {
            "status": status,
            "at": at,
            "first": first,
            "count": count,
            "pending": int(active),
            "done": int(done),
            "failed": int(not done and not active),
        },
    )


def test_exports_are_done_when_no_job_is_unfinished(database: str, connection: psycopg.Connection[Any]):
    migrate(database, "lockstep.exports")
    connection.execute(CLIENT)
    probe = probes.ExportProbe(on_connect(database, application_name="test"))
    _submit(connection, MANY, "COMPLETED", MIDNIGHT - timedelta(days=3))
    assert _ask(probe, "export-jobs-done", maxAgeSeconds=60).status == "PASS"
    _submit(connection, 1, "IN_PROGRESS", NOW - timedelta(hours=1), first=MANY + 1)
    late = _ask(probe, "export-jobs-done", maxAgeSeconds=60)
    assert (late.status, late.value["job"], late.value["waiting"]) == ("FAIL", f"J{MANY + 1}", 1)
    assert _ask(probe, "export-jobs-done", maxAgeSeconds=7200).status == "PASS"
    assert _ask(probe, "export-jobs-done", through="execution-day").status == "PASS", "it is of the next day"
    assert "job_active" in _plan_of(connection, probes.UNFINISHED)
    assert "job_pkey" in _plan_of(connection, probes.JOB, job="J7")


def test_a_named_export_job_is_done_only_when_it_has_completed(database: str, connection: psycopg.Connection[Any]):
    """Guards the opposite of done: a job that failed is not unfinished either, and must not open the gate."""
    migrate(database, "lockstep.exports")
    connection.execute(CLIENT)
    probe = probes.ExportProbe(on_connect(database, application_name="test"))
    for number, status in enumerate(("COMPLETED", "FAILED", "CANCELLED", "IN_PROGRESS"), start=1):
        _submit(connection, 1, status, NOW, first=number)
    answers = {job: _ask(probe, "export-jobs-done", jobId=job) for job in ("J1", "J2", "J3", "J4", "J5")}
    assert [answer.status for answer in answers.values()] == ["PASS", "FAIL", "FAIL", "FAIL", "FAIL"]
    assert (answers["J2"].reason, answers["J5"].reason) == ("job J2 is FAILED", "there is no job J5")


def _commit_ticks(connection: psycopg.Connection[Any], projects: int, ticks: int) -> None:
    """So many ticks of each project, one a minute, the last one now."""
    connection.execute(
        "INSERT INTO ticks.project (project_id, org_id, sequence)"
        " SELECT 'p' || n, 'o', %s::bigint FROM generate_series(1, %s::bigint) AS n",
        (ticks, projects),
    )
    connection.execute(
        """
        INSERT INTO ticks.tick (project_id, tick_id, org_id, state, sequence, committed_at, result, manifest_sha256,
            commits, bronze_key, bronze_etag)
        SELECT 'p' || p, p || '-' || s, 'o', 'committed', s,
               %(now)s::timestamptz - (%(last)s::bigint - s) * interval '1 minute', '{}', 'x', '[]', 'k', 'e'
          FROM generate_series(1, %(projects)s::bigint) AS p, generate_series(1, %(last)s::bigint) AS s""",
        {"now": NOW, "projects": projects, "last": ticks},
    )


def _silvered(connection: psycopg.Connection[Any], first: int, last: int, watermark: int) -> None:
    connection.execute(
        "INSERT INTO silver.lane (project_id, org_id, watermark)"
        " SELECT 'p' || n, 'o', %s::bigint FROM generate_series(%s::bigint, %s::bigint) AS n",
        (watermark, first, last),
    )


def test_ticks_lag_by_the_oldest_one_that_silver_has_not_taken(database: str, connection: psycopg.Connection[Any]):
    migrate(database, "lockstep.kernel")
    migrate(database, "lockstep.ticks")
    migrate(database, "lockstep.ticks.silver")
    probe = probes.TickProbe(on_connect(database, application_name="test"))
    assert _ask(probe, "tick-lag", maxLagSeconds=60).status == "PASS", "nothing waits where nothing is"
    _commit_ticks(connection, projects=50, ticks=100)
    _silvered(connection, 1, 48, watermark=100)
    _silvered(connection, 49, 49, watermark=90)
    late = _ask(probe, "tick-lag", maxLagSeconds=60)
    assert (late.value["project"], late.value["waiting"], late.value["lagSeconds"]) == ("p50", 110, 99 * 60)
    assert _ask(probe, "tick-lag", through="execution-day").status == "PASS"
    _silvered(connection, 50, 50, watermark=100)
    assert _ask(probe, "tick-lag", maxLagSeconds=600).status == "PASS"
    assert "tick_project_id_sequence_key" in _plan_of(connection, probes.WAITING_TICKS)


def test_a_database_that_is_away_is_an_error_and_not_a_no():
    probe = probes.ExportProbe(on_connect("postgresql://x@127.0.0.1:9/none", application_name="t", connect_timeout=1))
    answer = _ask(probe, "export-jobs-done", maxAgeSeconds=60)
    assert (answer.status, answer.category) == ("ERROR", "TRANSIENT")


def test_the_shipped_pipelines_read_the_stacks_own_ledgers(stack: Any):
    """Guards the wiring: every shipped evaluator finds its store on a fresh deployment and can say something."""
    deployment = build_deployment(load_settings())
    for name, plan in deployment.catalogue.registry.plans.items():
        now, key = deployment.clock.now(), deployment.control.key(name, None, None)
        answers = deployment.plane.runner.evaluate(Execution(plan, key, now, now, "none"), {})
        assert {answer.status for answer in answers} <= {"PASS", "FAIL"}, (name, answers)
