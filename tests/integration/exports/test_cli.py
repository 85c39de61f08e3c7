"""The commands of people, on the real parts: what they print, and that scripts can rely on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.exports.cli import app
from lockstep.kernel.errors import Terminal
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

REQUEST = {"items": [{"key": "ABC", "effectiveDates": ["20250215", "20250315"]}]}


@pytest.fixture
def deployed(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("LOCKSTEP_POSTGRES_DSN", world.state_dsn)
    monkeypatch.setenv("LOCKSTEP_SOURCE_DSN", world.source_dsn)
    monkeypatch.setenv("LOCKSTEP_EXPORTS_BUCKET", world.bucket)
    return world


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_job_goes_from_a_file_to_verified_files(deployed: World, tmp_path: Path):
    made = json.loads(_run("client", "add", "acme", "--json"))
    assert set(made) == {"client", "api_key"}
    assert made["client"] == "acme"
    assert "acme" in _run("client", "list")
    assert made["api_key"] not in _run("client", "list", "--json")
    request = tmp_path / "request.json"
    request.write_text(json.dumps(REQUEST))
    job = json.loads(_run("submit", str(request), "--client", "acme", "--json"))
    assert (job["status"], job["total"]) == ("SUBMITTED", 2)
    assert "2 built" in _run("work", "--until-idle")
    assert json.loads(_run("status", job["jobId"], "--json"))["status"] == "COMPLETED"
    assert json.loads(_run("verify", job["jobId"], "--json")) == {"job": job["jobId"], "files": 2, "ok": 2, "bad": {}}
    _run("download", job["jobId"], "--into", str(tmp_path / "files"))
    assert sorted(one.name for one in (tmp_path / "files").iterdir()) == ["ABC_20250215.csv", "ABC_20250315.csv"]
    _run("client", "revoke", "acme")


def test_verify_says_which_file_is_not_as_recorded(deployed: World, tmp_path: Path):
    """Guards the promise of the manifest: a byte that changed must not pass."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps(REQUEST))
    job = json.loads(_run("submit", str(request), "--json"))["jobId"]
    _run("work", "--until-idle")
    deployed.s3.put_object(Bucket=deployed.bucket, Key="exports/2025/02/15/ABC_20250215.csv", Body=b"changed")
    with pytest.raises(Terminal, match="key=ABC:date=20250215"):
        _run("verify", job)
    with pytest.raises(Terminal):
        _run("download", job, "--into", str(tmp_path / "files"))
    assert [one.name for one in (tmp_path / "files").iterdir()] == ["ABC_20250315.csv"]


def test_gc_leaves_alone_what_may_still_be_on_its_way_to_a_record(deployed: World):
    job_id = deployed.submit(("ABC", "20250215"))
    deployed.drain()
    deployed.s3.put_object(Bucket=deployed.bucket, Key="exports/2025/02/15/LOST_20250215.csv", Body=b"x")
    assert "0 objects" in _run("gc", "--dry-run")
    assert deployed.job(job_id).counts.done == 1
    assert len(deployed.names()) == 2
