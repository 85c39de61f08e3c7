"""The commands of people, on the real parts: what they print, and that scripts can rely on it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.exports import fleet
from lockstep.exports.cli import app
from lockstep.exports.clients import ClientStore, NewClient
from lockstep.kernel.errors import InvalidInput, Terminal
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

REQUEST = {"items": [{"key": "ABC", "effectiveDates": ["20250215", "20250315"]}]}


@pytest.fixture
def deployed(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("LOCKSTEP_POSTGRES_DSN", world.state_dsn)
    monkeypatch.setenv("LOCKSTEP_SOURCE_DSN", world.source_dsn)
    monkeypatch.setenv("LOCKSTEP_EXPORTS_BUCKET", world.bucket)
    return world


def _run(*arguments: str, given: bytes | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, input=given)
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


def test_every_command_has_an_answer_for_programs(deployed: World, tmp_path: Path):
    """Guards scripts: one JSON value whatever is found, and a list is a list also with one entry or none."""
    assert [one["client"] for one in json.loads(_run("client", "list", "--json"))] == ["tester"]
    job = json.loads(_run("submit", "-", "--json", given=json.dumps(REQUEST).encode()))["jobId"]
    assert json.loads(_run("cancel", job, "--json"))["status"] == "CANCELLED"
    other = json.loads(_run("submit", "-", "--json", given=json.dumps(REQUEST).encode()))["jobId"]
    deployed.ask("UPDATE exports.job_chunk SET attempts = 99 WHERE job_id = %s AND key = 'ABC'", other)
    assert json.loads(_run("work", "--until-idle", "--json"))["built"] == 0
    failed = json.loads(_run("status", other, "--json"))
    assert (failed["status"], len(failed["failedChunks"])) == ("FAILED", 2)
    assert json.loads(_run("retry", other, "--json"))["pending"] == 2
    assert json.loads(_run("work", "--until-idle", "--json"))["built"] == 2
    assert json.loads(_run("download", other, "--into", str(tmp_path), "--json"))["files"] == 2
    assert json.loads(_run("gc", "--json")) == {"dryRun": False, "objects": [], "uploads": 0, "keys": 0}
    assert json.loads(_run("client", "revoke", "operator", "--json")) == {"client": "operator", "revoked": True}


def test_two_first_commands_at_once_share_the_operator(deployed: World, monkeypatch: pytest.MonkeyPatch):
    """Guards scripts that submit side by side on a new deployment: whoever comes second finds what the first made."""
    add = ClientStore.add

    def late(self: ClientStore, name: str, *more: str) -> NewClient:
        add(ClientStore(deployed.state), name)  # the other command was a moment faster
        return add(self, name, *more)

    monkeypatch.setattr(ClientStore, "add", late)
    made = json.loads(_run("submit", "-", "--json", given=json.dumps(REQUEST).encode()))
    assert made["status"] == "SUBMITTED"
    names = [one.client.name for one in ClientStore(deployed.state).list()]
    assert sorted(names) == ["operator", "tester"]


@pytest.mark.parametrize("raw", [b"{", b'{"items": 1, "items": 2}', b"[" * 200_000], ids=["cut", "twice", "deep"])
def test_a_request_that_cannot_be_read_is_refused_in_a_sentence(deployed: World, tmp_path: Path, raw: bytes):
    request = tmp_path / "request.json"
    request.write_bytes(raw)
    with pytest.raises(InvalidInput, match="the body is refused"):
        _run("submit", str(request))


def test_a_fleet_without_addresses_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Guards against a fleet whose processes die of the same missing setting for ever."""
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path))  # no stack was ever started here
    monkeypatch.setenv("LOCKSTEP_POSTGRES_DSN", "postgresql://nobody@127.0.0.1:1/state")
    monkeypatch.setattr(fleet, "run_processes", lambda *_: pytest.fail("the fleet was started"))
    with pytest.raises(InvalidInput, match="LOCKSTEP_SOURCE_DSN"):
        _run("work")


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


def _age(world: World, stack: Any, name: str) -> None:
    """Make an object three days old where the store keeps it."""
    old = time.time() - 3 * 86400
    os.utime(stack.home.data("s3") / world.bucket / name, (old, old))


def test_gc_removes_what_no_record_knows_and_nothing_else(deployed: World, stack: Any):
    """Guards the files: whatever a record names stays, however old it is."""
    job_id = deployed.submit(("ABC", "20250215"))
    deployed.drain()
    lost, young = "exports/2025/02/15/LOST_20250215.csv", "exports/2025/02/15/YOUNG_20250215.csv"
    known, manifest = "exports/2025/02/15/ABC_20250215.csv", f"exports/_manifests/{job_id}.json"
    for name in (lost, young, manifest, "elsewhere/x.csv"):
        deployed.s3.put_object(Bucket=deployed.bucket, Key=name, Body=b"x")
    for name in (lost, known, manifest, "elsewhere/x.csv"):
        _age(deployed, stack, name)
    dead = deployed.s3.create_multipart_upload(Bucket=deployed.bucket, Key=known)
    assert "1 objects would go" in _run("gc", "--dry-run")
    assert lost in deployed.names()
    assert "1 objects removed" in _run("gc")
    assert sorted(deployed.names()) == sorted([known, young, manifest, "elsewhere/x.csv"])
    assert "0 objects removed" in _run("gc"), "again: nothing is left to do"
    assert json.loads(_run("verify", job_id, "--json"))["ok"] == 1
    deployed.s3.abort_multipart_upload(Bucket=deployed.bucket, Key=known, UploadId=dead["UploadId"])


def test_the_check_for_orphans_names_them_and_gc_answers_it(deployed: World, stack: Any):
    from platform_assets.exports import no_orphan_objects_check

    lost = "exports/2025/02/15/LOST_20250215.csv"
    deployed.s3.put_object(Bucket=deployed.bucket, Key=lost, Body=b"x")
    assert no_orphan_objects_check().passed, "younger than an hour: it may be on its way to a record"
    _age(deployed, stack, lost)
    verdict = no_orphan_objects_check()
    assert not verdict.passed
    assert lost in str(verdict.metadata["objects"])
    _run("gc")
    assert no_orphan_objects_check().passed


def test_gc_leaves_alone_what_may_still_be_on_its_way_to_a_record(deployed: World):
    job_id = deployed.submit(("ABC", "20250215"))
    deployed.drain()
    deployed.s3.put_object(Bucket=deployed.bucket, Key="exports/2025/02/15/LOST_20250215.csv", Body=b"x")
    assert "0 objects" in _run("gc", "--dry-run")
    assert deployed.job(job_id).counts.done == 1
    assert len(deployed.names()) == 2
