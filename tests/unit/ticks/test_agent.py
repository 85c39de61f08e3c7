"""The agent without a network: its memory, its pages, its order, its bandwidth."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import rules
from lockstep.ticks.agent import AgentStore, LocalState, Pager, TickFinalizeError
from lockstep.ticks.agent.client import Throttle
from lockstep.ticks.agent.sender import Blocked, Idle, Next, next_tick
from lockstep.ticks.agent.state import AgentTick
from lockstep.ticks.model import Limits

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


def test_a_folder_without_its_marker_is_not_touched(pager: Pager, tmp_path: Path):
    """Guards against sending half of what an exporter is still writing."""
    (_folder(tmp_path, "t1", {"orders": _rows(1)}) / "tick.json").unlink()
    assert pager.collect(tmp_path) == []


def test_a_folder_is_collected_once_and_in_the_order_of_names(pager: Pager, store: AgentStore, tmp_path: Path):
    for name in ("t2", "t1"):
        _folder(tmp_path, name, {"orders": _rows(1)})
    assert pager.collect(tmp_path) == ["t1", "t2"]
    assert pager.collect(tmp_path) == []
    assert [tick.tick_id for tick in store.list_ready_ticks()] == ["t1", "t2"]


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


def test_a_finalize_error_says_what_to_do():
    conflict = TickFinalizeError(409, {"missing": [1], "mismatched_sha": [2]}, unit="t")
    assert (conflict.wants_parts, conflict.missing, conflict.mismatched_sha) == (True, [1], [2])
    assert TickFinalizeError(422, {"message": "bad"}, unit="t").is_final
    assert not TickFinalizeError(409, {"detail": "other"}, unit="t").wants_parts
