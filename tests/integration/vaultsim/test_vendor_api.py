"""The simulator's contract over real HTTP: the vendor's words, its traps, and nothing that the vendor would not say."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from tests.simulator import Simulator, running_simulator

_ids = count(1)


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with running_simulator(tmp_path_factory.mktemp("vault")) as running:
        yield running


@pytest.fixture
def vault(simulator: Simulator) -> str:
    name = f"90{next(_ids):04d}"
    simulator.add(name, rows=4, empty_every=3)
    return name


class Caller:
    """A client that follows the vendor's documentation and nothing else."""

    def __init__(self, simulator: Simulator, vault: str) -> None:
        self.http = httpx.Client(base_url=simulator.address(vault) + "/api/v25.2", timeout=30)
        self.session = self.post_auth().json()["sessionId"]

    def post_auth(self, **form: str) -> httpx.Response:
        return self.http.post("/auth", data=form or {"username": "u", "password": "p"})

    def get(self, path: str, **query: str) -> httpx.Response:
        return self.http.get(path, params=query, headers={"Authorization": self.session})

    def files(self, **query: str) -> list[dict[str, Any]]:
        answer = self.get("/services/directdata/files", **query).json()
        assert answer["responseStatus"] == "SUCCESS", answer
        assert answer["responseDetails"]["total"] == len(answer["data"])
        found: list[dict[str, Any]] = answer["data"]
        return found

    def archive(self, entry: dict[str, Any]) -> bytes:
        parts = [self.get(f"/services/directdata/files/{one['name']}") for one in entry["filepart_details"]]
        return b"".join(part.content for part in parts)


@pytest.fixture
def caller(simulator: Simulator, vault: str) -> Iterator[Caller]:
    logged_in = Caller(simulator, vault)
    yield logged_in
    logged_in.http.close()


def test_a_window_is_listed_and_downloaded_as_documented(simulator: Simulator, vault: str, caller: Caller):
    simulator.do(vault, "publish", windows=2)
    entry = caller.files(extract_type="incremental_directdata")[1]
    assert entry["name"] == f"{vault}-20260101-0030-N"
    assert (entry["start_time"], entry["stop_time"]) == ("2026-01-01T00:15Z", "2026-01-01T00:30Z")
    answer = caller.get(f"/services/directdata/files/{entry['name']}.001")
    assert answer.headers["content-type"] == "application/octet-stream;charset=UTF-8"
    assert answer.headers["content-disposition"] == f'attachment; filename="{entry["name"]}.tar.gz.001"'
    assert int(answer.headers["x-vaultapi-burstlimitremaining"]) < int(answer.headers["x-vaultapi-burstlimit"])
    part = entry["filepart_details"][0]
    assert (len(answer.content), hashlib.md5(answer.content).hexdigest()) == (part["size"], part["md5checksum"])  # noqa: S324
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        names = tar.getnames()
    assert names[0] == "manifest.csv"
    assert "metadata_full.csv" in names
    assert "Object/study__v.csv" in names
    assert "Picklist/picklist__sys.csv" in names


def test_an_empty_window_has_no_records_and_still_an_archive(simulator: Simulator, vault: str, caller: Caller):
    simulator.do(vault, "publish", windows=3)
    entry = caller.files(extract_type="incremental_directdata")[2]
    assert entry["record_count"] == 0
    assert entry["size"] > 0
    with tarfile.open(fileobj=io.BytesIO(caller.archive(entry))) as tar:
        assert set(tar.getnames()) == {"manifest.csv", "metadata_full.csv"}


def test_a_withheld_window_has_a_name_and_an_error_and_nothing_else_until_its_release(
    simulator: Simulator, vault: str, caller: Caller
):
    simulator.do(vault, "publish", windows=2)
    before = caller.files(extract_type="incremental_directdata")
    simulator.do(vault, "withhold", stop="202601010015")
    hidden = caller.files(extract_type="incremental_directdata")[0]
    assert set(hidden) == {"name", "error"}
    assert set(hidden["error"]) == {"next_retry", "message"}
    refused = caller.get(f"/services/directdata/files/{hidden['name']}.001")
    assert "json" in refused.headers["content-type"]
    simulator.do(vault, "release", stop="202601010015")
    assert caller.files(extract_type="incremental_directdata") == before


def test_parts_are_raw_splits_and_join_to_the_same_archive(simulator: Simulator, vault: str, caller: Caller):
    simulator.do(vault, "publish", windows=1)
    whole = caller.archive(caller.files(extract_type="incremental_directdata")[0])
    simulator.do(vault, "knobs", part_size=700, md5=False)
    entry = caller.files(extract_type="incremental_directdata")[0]
    assert entry["fileparts"] == len(entry["filepart_details"]) > 2
    assert "md5checksum" not in entry["filepart_details"][0]
    assert caller.archive(entry) == whole


def test_errors_are_http_200_with_a_failure_inside(simulator: Simulator, vault: str, caller: Caller):
    """Guards clients that look at the status code alone."""
    caller.session = "not-a-session"
    answer = caller.get("/services/directdata/files")
    assert answer.status_code == 200
    assert answer.json()["responseStatus"] == "FAILURE"
    assert answer.json()["errors"][0]["type"] == "INVALID_SESSION_ID"
    assert caller.post_auth(username="u", password="").json()["responseStatus"] == "FAILURE"


def test_a_login_may_open_another_vault_without_a_word(simulator: Simulator, vault: str, caller: Caller):
    simulator.add(f"{vault}0", rows=1)
    simulator.do(vault, "knobs", wrong_vault=f"{vault}0")
    answer = caller.post_auth().json()
    assert (answer["responseStatus"], answer["vaultId"]) == ("SUCCESS", f"{vault}0")


def test_a_session_dies_after_its_calls_and_a_burst_limit_refuses(simulator: Simulator, vault: str, caller: Caller):
    simulator.do(vault, "knobs", session_calls=2)
    caller.files()
    caller.files()
    assert caller.get("/services/directdata/files").json()["errors"][0]["type"] == "INVALID_SESSION_ID"
    simulator.do(vault, "knobs", session_calls=0, burst_limit=1)
    assert caller.post_auth().json()["errors"][0]["type"] == "API_LIMIT_EXCEEDED"


def test_full_and_log_archives_are_listed_by_their_type(simulator: Simulator, vault: str, caller: Caller):
    simulator.do(vault, "publish", windows=4)
    simulator.do(vault, "full")
    simulator.do(vault, "log")
    fulls = caller.files(extract_type="full_directdata")
    assert [one["stop_time"] for one in fulls] == ["2026-01-01T00:00Z", "2026-01-01T01:00Z"]
    assert {one["start_time"] for one in fulls} == {"2000-01-01T00:00Z"}
    assert caller.files(extract_type="full_directdata", start_time="2026-01-01T00:00:00Z") == []
    with tarfile.open(fileobj=io.BytesIO(caller.archive(fulls[1]))) as tar:
        assert "Metadata/metadata.csv" in tar.getnames()
    log = caller.files(extract_type="log_directdata")[0]
    with tarfile.open(fileobj=io.BytesIO(caller.archive(log))) as tar:
        assert "Log/login_audit_trail__sys.csv" in tar.getnames()
    assert len(caller.files()) == 7


def test_a_listing_can_be_out_of_order_and_name_files_twice(simulator: Simulator, vault: str, caller: Caller):
    simulator.do(vault, "publish", windows=6)
    simulator.do(vault, "knobs", shuffle=True, duplicates=True)
    names = [one["name"] for one in caller.files(extract_type="incremental_directdata")]
    assert len(names) == 12
    assert len(set(names)) == 6
    assert names != sorted(names)


def test_old_windows_disappear_after_ten_days(simulator: Simulator, vault: str, caller: Caller):
    simulator.do(vault, "knobs", retention_days=1)
    simulator.do(vault, "publish", windows=130)
    listed = caller.files(extract_type="incremental_directdata")
    assert 90 < len(listed) < 100
    assert listed[-1]["stop_time"] == "2026-01-02T08:30Z"


def test_a_change_of_the_schema_comes_with_its_metadata(simulator: Simulator, vault: str, caller: Caller):
    simulator.do(vault, "publish", windows=1)
    simulator.do(vault, "evolve", kind="column", object="study__v", column="brand_new__c")
    simulator.do(vault, "publish", windows=1)
    with tarfile.open(
        fileobj=io.BytesIO(caller.archive(caller.files(extract_type="incremental_directdata")[1]))
    ) as tar:
        delta = tar.extractfile("Metadata/metadata.csv").read().decode()  # type: ignore[union-attr]
        header = tar.extractfile("Object/study__v.csv").readline().decode()  # type: ignore[union-attr]
    assert delta.count("\n") == 2
    assert "brand_new__c" in delta
    assert "brand_new__c" in header
