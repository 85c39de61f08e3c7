"""The agent without a network: its memory, its pages, its order, its bandwidth."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import cast

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import rules
from lockstep.ticks.agent import Agent, AgentStore, LocalState, Pager, TickFinalizeError
from lockstep.ticks.agent.cli import _round, default_work, retry
from lockstep.ticks.agent.client import IngestClient, Throttle
from lockstep.ticks.agent.pages import Described
from lockstep.ticks.agent.sender import Blocked, Idle, Next, next_tick
from lockstep.ticks.agent.state import AgentTick
from lockstep.ticks.model import Limits, Mode
from tests.ticks_fixtures import sha256

PROJECT = "0192f0c4-7f3a-7c11-9d6e-0d5b8a3f4e21"


def _tick(position: int, state: str) -> AgentTick:
    return AgentTick(position, f"t{position}", LocalState(state), {}, False, 0, None, None)


@pytest.fixture
def store(tmp_path: Path) -> AgentStore:
    return AgentStore(tmp_path / ".agent" / "state.sqlite")


@pytest.fixture
def pager(store: AgentStore, tmp_path: Path) -> Pager:
    return Pager(store, tmp_path / ".agent", org_id="acme", project_id=PROJECT, part_bytes=20_000)


def _folder(root: Path, name: str, tables: dict[str, pa.Table], **marker: object) -> Path:
    folder = root / name
    folder.mkdir()
    for table, rows in tables.items():
        pq.write_table(rows, folder / f"{table}.parquet")
    keys = {table: ["id"] for table in tables}
    (folder / "tick.json").write_text(json.dumps({"dt": "20260507", "primary_key": keys, **marker}))
    return folder


def _rows(count: int) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(count), pa.int64()),
            "at": pa.array([1_000_000_000 * one for one in range(count)], pa.timestamp("ns")),
        }
    )


def test_pages_cover_every_row_once_and_their_manifest_is_accepted(pager: Pager, store: AgentStore, tmp_path: Path):
    _folder(tmp_path, "t1", {"orders": _rows(5000), "empty": _rows(0)}, mode="full")
    assert pager.collect(tmp_path) == ["t1"]
    (tick,) = store.ticks()
    found = rules.parse_manifest(tick.manifest, org_id="acme", project_id=PROJECT, tick_id="t1", limits=Limits())
    parts = store.parts("t1")
    assert found.rows == 5000
    assert [part.path.name for part in parts][:2] == ["empty_seq=000.parquet", "orders_seq=001.parquet"]
    assert len(parts) > 3
    ids = [one for part in parts[1:] for one in pq.read_table(part.path)["id"].to_pylist()]
    assert ids == list(range(5000))
    assert dict(found.tables[1].columns) == {"id": "bigint", "at": "timestamp_ntz"}


def test_pages_of_large_rows_stay_small(pager: Pager, store: AgentStore, tmp_path: Path):
    """Guards rows of documents and pictures: a thousand of them would be more than the service takes as one part."""
    blobs = [random.Random(one).randbytes(15_000) for one in range(12)]
    _folder(tmp_path, "t1", {"orders": pa.table({"id": range(12), "blob": blobs})})
    pager.collect(tmp_path)
    assert max(part.bytes for part in store.parts("t1")) < 40_000
    assert sum(pq.read_metadata(part.path).num_rows for part in store.parts("t1")) == 12


def test_the_manifest_says_which_column_marks_deleted_rows(pager: Pager, store: AgentStore, tmp_path: Path):
    rows = pa.table({"id": pa.array([1], pa.int64()), "gone": [True]})
    _folder(tmp_path, "t1", {"orders": rows, "people": _rows(1)}, deleted_column={"orders": "gone"})
    pager.collect(tmp_path)
    (tick,) = store.ticks()
    found = rules.parse_manifest(tick.manifest, org_id="acme", project_id=PROJECT, tick_id="t1", limits=Limits())
    assert {table.name: table.deleted_column for table in found.tables} == {"orders": "gone", "people": None}
    _folder(tmp_path, "t2", {"orders": rows}, deleted_column={"people": "gone"})
    with pytest.raises(InvalidInput, match="does not have"):
        pager.collect(tmp_path)


def test_a_folder_without_its_marker_is_not_touched(pager: Pager, tmp_path: Path):
    """Guards against sending half of what an exporter is still writing."""
    (_folder(tmp_path, "t1", {"orders": _rows(1)}) / "tick.json").unlink()
    assert pager.collect(tmp_path) == []


def test_a_folder_is_collected_once_and_in_the_order_of_names(pager: Pager, store: AgentStore, tmp_path: Path):
    for name in ("t2", "t1"):
        _folder(tmp_path, name, {"orders": _rows(1)})
    assert pager.collect(tmp_path) == ["t1", "t2"]
    assert pager.collect(tmp_path) == []
    assert [tick.tick_id for tick in store.ticks()] == ["t1", "t2"]


@pytest.mark.parametrize(
    "marker", ["", "[]", '{"mode": "append", "primary_key": {}}', '{"primary_key": {"x": ["id"]}}']
)
def test_a_bad_marker_is_refused_with_an_example(pager: Pager, tmp_path: Path, marker: str):
    (_folder(tmp_path, "t1", {"orders": _rows(1)}) / "tick.json").write_text(marker)
    with pytest.raises(InvalidInput):
        pager.collect(tmp_path)


def test_the_memory_survives_the_process(tmp_path: Path):
    path = tmp_path / "state.sqlite"
    with AgentStore(path) as store:
        store.add("t1", {"a": 1}, [])
        store.begin("t1")
        store.chain("t1", {"a": 1, "prev_tick_id": None})
    with AgentStore(path) as store:
        tick = store.get("t1")
        assert tick is not None
        assert (tick.state, tick.attempts, tick.chained) == (LocalState.UPLOADING, 1, True)
        assert tick.manifest == {"a": 1, "prev_tick_id": None}


def test_a_failed_tick_waits_for_a_person(store: AgentStore):
    store.add("t1", {}, [])
    store.mark_tick_failed_manual("t1", "why")
    assert isinstance(next_tick(store.ticks()), Blocked)
    assert store.retry("t1")
    assert isinstance(next_tick(store.ticks()), Next)
    assert store.skip("t1")
    assert isinstance(next_tick(store.ticks()), Idle)
    assert not store.skip("unknown")


def test_ticks_go_in_order_and_none_overtakes_a_failed_one():
    assert next_tick([]) == Idle()
    assert next_tick([_tick(1, "committed"), _tick(2, "uploading"), _tick(3, "ready")]) == Next(_tick(2, "uploading"))
    assert next_tick([_tick(1, "failed_manual"), _tick(2, "ready")]) == Blocked(_tick(1, "failed_manual"))
    assert next_tick([_tick(1, "skipped"), _tick(2, "ready")]) == Next(_tick(2, "ready"))


def test_the_bandwidth_is_shared_and_kept():
    clock = FakeClock()
    throttle = Throttle(1000, clock)
    for _ in range(5):
        throttle.pass_through(500)
    assert clock.monotonic() == pytest.approx(2.0)
    Throttle(0, clock).pass_through(10**9)
    assert clock.monotonic() == pytest.approx(2.0)


@pytest.mark.parametrize("rate", [4_000, 10_000, 100_000, 10_000_000])
def test_a_small_bandwidth_lets_no_part_stand_still(rate: float):
    """Guards thin lines: a part that waits for its turn longer than the service does would be 408 at every attempt."""
    most_parts = 64
    assert most_parts * Throttle(rate).piece / rate < 30 / 2
    assert Throttle(0).piece == Throttle(10**9).piece


def test_a_finalize_error_says_what_to_do():
    conflict = TickFinalizeError(409, {"missing": [1], "mismatched_sha": [2]}, unit="t")
    assert (conflict.wants_parts, conflict.missing, conflict.mismatched_sha) == (True, [1], [2])
    assert TickFinalizeError(422, {"message": "bad"}, unit="t").is_final
    assert not TickFinalizeError(409, {"detail": "other"}, unit="t").wants_parts


def test_a_memory_serves_one_project(tmp_path: Path):
    """Guards a folder that is used for two projects: the ticks of one would be sent to the other, and be refused."""
    path = tmp_path / ".agent" / "state.sqlite"
    with AgentStore(path) as store:
        store.claim("acme", PROJECT)
    with AgentStore(path) as store:
        store.claim("acme", PROJECT)
    for org, project in (("acme", PROJECT.replace("0192", "0193")), ("umbrella", PROJECT)):
        with AgentStore(path) as store, pytest.raises(InvalidInput, match="belongs to project"):
            store.claim(org, project)


def test_two_agents_do_not_work_with_one_memory(tmp_path: Path):
    """Guards the second one: it would send pages that the first removes as soon as their tick is committed."""
    path = tmp_path / ".agent" / "state.sqlite"
    with AgentStore(path) as first, AgentStore(path) as second:
        first.claim("acme", PROJECT)
        with pytest.raises(InvalidInput, match="another agent is at work"):
            second.claim("acme", PROJECT)
        assert second.ticks() == [], "looking is always possible"
    with AgentStore(path) as second:
        second.claim("acme", PROJECT)


def test_push_remembers_by_project_and_not_in_the_folder_that_it_is_called_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Guards the user's own folder: it may be a repository, and another call may come from elsewhere."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_work(PROJECT) == tmp_path / "state" / "lockstep" / "agent" / PROJECT
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_work(PROJECT) == tmp_path / ".local" / "state" / "lockstep" / "agent" / PROJECT
    with pytest.raises(InvalidInput):
        default_work("../elsewhere")


class _Sent:
    """Takes everything."""

    def __init__(self) -> None:
        self.rounds = 0

    def send_all(self) -> Idle:
        self.rounds += 1
        return Idle()


def test_a_folder_that_cannot_be_used_stops_no_tick_before_it_and_no_agent(pager: Pager, tmp_path: Path):
    """Guards the daemon: one broken export must not end it, nor keep back what was complete."""
    _folder(tmp_path, "t1", {"orders": _rows(1)})
    (_folder(tmp_path, "t2", {"orders": _rows(1)}) / "tick.json").write_text("{")
    sender = _Sent()
    assert _round(tmp_path, pager, cast("Agent", sender), once=False) == Idle()
    with pytest.raises(InvalidInput, match=r"tick\.json"):
        _round(tmp_path, pager, cast("Agent", sender), once=True)
    assert sender.rounds == 2


def test_a_failed_tick_goes_again_as_its_folder_is_now(pager: Pager, store: AgentStore, tmp_path: Path):
    """Guards the mending: the pages that were refused would be sent again, and be refused again, for ever."""
    for name in ("t1", "t2"):
        _folder(tmp_path, name, {"orders": _rows(3)})
    pager.collect(tmp_path)
    store.chain("t1", {**store.ticks()[0].manifest, "prev_tick_id": None})
    store.mark_tick_failed_manual("t1", "SchemaMismatch")
    (tmp_path / "t2" / "tick.json").write_text("{")
    pq.write_table(_rows(7), tmp_path / "t1" / "orders.parquet")
    retry(tmp_path, "t1")
    first, second = store.ticks()
    assert (first.tick_id, first.state, first.chained, first.error) == ("t1", LocalState.READY, False, None)
    assert second.tick_id == "t2"
    assert first.manifest["tables"][0]["parquets"][0]["rows"] == 7
    (part,) = store.parts("t1")
    assert (pq.read_metadata(part.path).num_rows, part.sha256) == (7, sha256(part.path.read_bytes()))
    with pytest.raises(InvalidInput, match="has not failed"):
        retry(tmp_path, "t1")


def test_a_failed_tick_without_a_folder_goes_again_as_it_was(pager: Pager, store: AgentStore, tmp_path: Path):
    """The service was mended, not the files: more tables are allowed, or larger ticks."""
    source = _folder(tmp_path / "..", f"{tmp_path.name}-files", {"orders": _rows(3)})
    pager.stage(Described("t1", Mode.DELTA, "20260507", {"orders": source / "orders.parquet"}, {"orders": ["id"]}))
    store.mark_tick_failed_manual("t1", "TooLarge")
    before = store.parts("t1")
    retry(tmp_path, "t1")
    assert store.ticks()[0].state is LocalState.READY
    assert store.parts("t1") == before
    assert before[0].path.exists()


@pytest.mark.parametrize("state", ["ready", "committed"])
def test_other_files_under_a_known_id_are_refused_and_its_pages_stay(
    pager: Pager, store: AgentStore, tmp_path: Path, state: str
):
    """Guards `push --tick` of a used id: it said `committed`, and the files had not been sent."""
    source = tmp_path / "orders.parquet"
    pq.write_table(_rows(3), source)
    described = Described("t1", Mode.DELTA, "20260507", {"orders": source}, {"orders": ["id"]})
    pager.stage(described)
    if state == "committed":
        store.commit("t1", {})
    before = store.parts("t1")
    pager.stage(described._replace(dt="20260508"))  # the same call once more, a day later
    pq.write_table(_rows(4), source)
    with pytest.raises(InvalidInput, match="were not sent"):
        pager.stage(described)
    assert store.parts("t1") == before
    assert sha256(before[0].path.read_bytes()) == before[0].sha256
    assert [one.name for one in (tmp_path / ".agent" / "pages").iterdir()] == ["t1"]


class _Damaging:
    """A service behind a line that changes the first bytes that pass."""

    def __init__(self) -> None:
        self.puts = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            self.puts += 1
            if self.puts == 1 or sha256(request.read()) != request.headers["x-sha256"]:
                return httpx.Response(400, json={"type": "/problems/digest-mismatch", "detail": "other bytes"})
            return httpx.Response(202, json={"already_present": False})
        if request.method == "POST":
            return httpx.Response(200, json={"status": "committed"})
        return httpx.Response(200, json={"head_tick_id": None})


@pytest.mark.parametrize("where", ["on the way", "on the disk"])
def test_a_part_that_was_damaged_on_the_way_is_put_again_and_one_on_the_disk_is_not(
    pager: Pager, store: AgentStore, tmp_path: Path, where: str
):
    """Guards bad lines: `put it again` is what the service says, and it is no reason to call a person."""
    _folder(tmp_path, "t1", {"orders": _rows(3)})
    pager.collect(tmp_path)
    if where == "on the disk":
        store.parts("t1")[0].path.write_bytes(b"x")
    line = _Damaging()
    client = IngestClient(
        "http://service", org_id="acme", project_id=PROJECT, api_secret="s", transport=httpx.MockTransport(line)
    )
    with client:
        Agent(store, pager, client, parallel=1, clock=FakeClock()).send_all()
    committed = where == "on the way"
    assert store.ticks()[0].state is (LocalState.COMMITTED if committed else LocalState.FAILED_MANUAL)
    assert line.puts == (2 if committed else 1)


def test_a_page_that_is_gone_stops_its_tick_and_comes_back_from_the_folder(
    pager: Pager, store: AgentStore, tmp_path: Path
):
    """Guards the daemon: it ended with a traceback, and so did every start after it."""
    _folder(tmp_path, "t1", {"orders": _rows(3)})
    pager.collect(tmp_path)
    store.parts("t1")[0].path.unlink()
    client = IngestClient(
        "http://service", org_id="acme", project_id=PROJECT, api_secret="s", transport=httpx.MockTransport(_Damaging())
    )
    with client:
        agent = Agent(store, pager, client, parallel=1, clock=FakeClock())
        assert isinstance(agent.send_all(), Blocked)
        assert "cannot be read" in (store.ticks()[0].error or "")
        retry(tmp_path, "t1")
        assert agent.send_all() == Idle()
    assert store.ticks()[0].state is LocalState.COMMITTED
