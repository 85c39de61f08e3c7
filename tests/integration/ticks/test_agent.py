"""The agent against the real service: whole ticks, resuming, mending, order, and what it tells its operator."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import Terminal, Transient
from lockstep.kernel.retry import RetryPolicy
from lockstep.kernel.settings import PROJECT_ROOT
from lockstep.ticks import bronze
from lockstep.ticks.agent import Agent, AgentStore, IngestClient, LocalState, Pager
from lockstep.ticks.agent.sender import Blocked, Idle, Patience
from lockstep.ticks.model import TickState
from tests.ticks_fixtures import people
from tests.ticks_world import Sender, World

pytestmark = pytest.mark.stack

QUICK = Patience(
    RetryPolicy(max_attempts=4, base_seconds=0.1, cap_seconds=1),
    RetryPolicy(max_attempts=4, base_seconds=0.1, cap_seconds=1),
)


class Flaky(httpx.BaseTransport):
    """A bad network in front of the real service: some requests never leave, some answers never arrive."""

    def __init__(self) -> None:
        self._real = httpx.HTTPTransport()
        self.plan: list[str] = []
        self.seen: list[tuple[str, str]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append((request.method, request.url.path.rsplit("/ticks/", 1)[-1]))
        fate = self.plan.pop(0) if self.plan else "good"
        if fate == "lost request":
            raise httpx.ConnectError("no route")
        answer = self._real.handle_request(request)
        if fate == "lost answer":
            answer.read()
            raise httpx.ReadError("reset")
        return answer


class Site:
    """An agent with its folder."""

    def __init__(self, sender: Sender, folder: Path) -> None:
        self.sender, self.folder, self.network = sender, folder, Flaky()
        self.store = AgentStore(folder / ".agent" / "state.sqlite")
        secret = sender.secret
        self.pager = Pager(
            self.store, folder / ".agent", org_id=secret.org_id, project_id=secret.project_id, part_bytes=20_000
        )
        self.client = IngestClient(
            sender.url,
            org_id=secret.org_id,
            project_id=secret.project_id,
            api_secret=secret.api_secret,
            transport=self.network,
        )
        self.agent = Agent(self.store, self.pager, self.client, parallel=2, clock=FakeClock(), patience=QUICK)

    def drop(self, name: str, rows: int = 3000, **marker: Any) -> None:
        folder = self.folder / name
        folder.mkdir()
        pq.write_table(
            pa.table({"id": range(rows), "name": [f"n{one}" for one in range(rows)]}), folder / "people.parquet"
        )
        (folder / "tick.json").write_text(json.dumps({"dt": "20260507", "primary_key": {"people": ["id"]}, **marker}))

    def states(self) -> dict[str, str]:
        return {tick.tick_id: tick.state.value for tick in self.store.ticks()}


@pytest.fixture
def site(sender: Sender, tmp_path: Path) -> Iterator[Site]:
    made = Site(sender, tmp_path)
    with made.store, made.client:
        yield made


def _names(site: Site, *names: str) -> list[str]:
    token = site.sender.secret.org_id
    return [f"{name}-{token}" for name in names]


def test_ticks_arrive_whole_and_in_order(site: Site, world: World, spark: Any):
    first, second = _names(site, "t1", "t2")
    site.drop(second, rows=10)
    site.drop(first, rows=6000)
    assert site.pager.collect(site.folder) == [first, second]
    assert site.agent.send_all() == Idle()
    assert site.states() == {first: "committed", second: "committed"}
    chain = world.store.chain(site.sender.secret.project_id)
    assert [(tick.tick_id, tick.prev_tick_id) for tick in chain] == [(first, None), (second, first)]
    assert bronze.read_tick(spark, world.settings.lake_bucket, chain[0], "people").count() == 6000
    assert not (site.folder / ".agent" / "pages" / first).exists()
    assert len([one for one in site.network.seen if one[0] == "PUT"]) > 3


def test_a_lost_answer_is_asked_for_again_and_commits_once(site: Site, world: World):
    (tick,) = _names(site, "t1")
    site.drop(tick, rows=10)
    site.pager.collect(site.folder)
    # status of the tick, put, head of the chain, finalize: the answer of the finalize is lost.
    site.network.plan = ["lost request", "good", "lost answer", "good", "good", "lost answer"]
    assert site.agent.send_all() == Idle()
    assert site.states() == {tick: "committed"}
    assert len(world.store.chain(site.sender.secret.project_id)) == 1


def test_only_what_is_missing_is_put_after_a_crash(site: Site):
    (tick,) = _names(site, "t1")
    site.drop(tick, rows=6000)
    site.pager.collect(site.folder)
    parts = site.store.parts(tick)
    for part in parts[:-1]:
        site.client.put_tick_part(tick, part.file_seq, part.path, part.sha256)
    site.network.seen.clear()
    site.agent.send_all()
    puts = [path for method, path in site.network.seen if method == "PUT"]
    assert puts == [f"{tick}/parts/{parts[-1].file_seq}"]


def test_other_bytes_at_the_service_are_replaced_by_ours(site: Site):
    (tick,) = _names(site, "t1")
    site.drop(tick, rows=10)
    site.pager.collect(site.folder)
    site.sender.put(tick, 0, people(99))
    assert site.agent.send_all() == Idle()
    assert site.states() == {tick: "committed"}


def test_a_409_is_mended_with_just_those_parts(site: Site, world: World):
    """The service loses a part between the agent's question and its finalize."""
    (tick,) = _names(site, "t1")
    site.drop(tick, rows=6000)
    site.pager.collect(site.folder)
    real = site.client.finalize_tick
    removed: list[int] = []

    def finalize(tick_id: str, manifest: Any) -> Any:
        if not removed:
            removed.append(1)
            site.sender.http.delete(site.sender.path(tick, "parts", 1), headers=site.sender.headers)
            site.network.seen.clear()
        return real(tick_id, manifest)

    site.client.finalize_tick = finalize  # type: ignore[method-assign]
    assert site.agent.send_all() == Idle()
    assert [path for method, path in site.network.seen if method == "PUT"] == [f"{tick}/parts/1"]


def test_a_422_stops_the_lane_until_a_person_decides(site: Site, world: World):
    bad, good = _names(site, "t1", "t2")
    site.drop(bad, rows=5)
    site.drop(good, rows=5)
    site.pager.collect(site.folder)
    manifest = site.store.ticks()[0].manifest
    site.store.chain(bad, {**manifest, "dt": "20260231"})
    end = site.agent.send_all()
    assert isinstance(end, Blocked)
    assert site.states() == {bad: "failed_manual", good: "ready"}
    assert "dt" in (site.store.ticks()[0].error or "")
    assert site.store.skip(bad)
    assert site.agent.send_all() == Idle()
    assert site.store.get(good).state is LocalState.COMMITTED  # type: ignore[union-attr]
    assert world.store.find(site.sender.secret.project_id, bad).state is TickState.FAILED  # type: ignore[union-attr]


def test_a_service_that_stays_away_is_transient_and_a_wrong_secret_is_not(site: Site):
    (tick,) = _names(site, "t1")
    site.drop(tick, rows=5)
    site.pager.collect(site.folder)
    site.network.plan = ["lost request"] * 50
    with pytest.raises(Transient):
        site.agent.send_all()
    assert site.states() == {tick: "uploading"}
    site.client._http.headers["X-Api-Secret"] = "wrong"
    site.network.plan = []
    with pytest.raises(Terminal, match="not accepted"):
        site.agent.send_all()
    assert site.states() == {tick: "uploading"}


def test_an_agent_that_lost_its_memory_sends_nothing_twice_and_goes_on(site: Site, sender: Sender):
    """Guards a disk that was replaced: the folders are still there, and their ticks are committed long ago."""
    first, second, third = _names(site, "t1", "t2", "t3")
    for name in (first, second):
        site.drop(name)
    site.pager.collect(site.folder)
    assert site.agent.send_all() == Idle()
    shutil.rmtree(site.folder / ".agent")
    again = Site(sender, site.folder)
    with again.store, again.client:
        again.drop(third)
        again.pager.collect(again.folder)
        assert again.agent.send_all() == Idle()
        assert again.states() == dict.fromkeys((first, second, third), "committed")
    assert sender.tick(third).prev_tick_id == second
    assert [method for method, path in again.network.seen if not path.startswith(third)] == ["GET", "GET"]


def test_the_command_sends_a_folder_and_says_so(world: World, sender: Sender, tmp_path: Path):
    first, second = (f"{name}-{sender.secret.org_id}" for name in ("c1", "c2"))
    site = Site(sender, tmp_path)
    site.drop(first, rows=4)
    site.store.__exit__()
    line = [
        *(sys.executable, "-m", "lockstep.cli", "agent"),
        *("--url", world.url, "--org", sender.secret.org_id, "--project", sender.secret.project_id, "--json"),
    ]
    environment = {"AGENT_SECRET": sender.secret.api_secret, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROJECT_ROOT)}

    def lockstep(command: str, *more: str) -> Any:
        done = subprocess.run(
            [*line[:4], command, *more, *line[4:]],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert sender.secret.api_secret not in done.stdout + done.stderr
        return json.loads(done.stdout)

    assert lockstep("run", str(tmp_path), "--once") == [
        {"tick_id": first, "state": "committed", "attempts": 1, "error": None}
    ]
    files = tmp_path / first / "people.parquet"
    (pushed,) = lockstep("push", str(files), "--key", "id", "--tick", second, "--work", str(tmp_path))
    assert (pushed["tick_id"], pushed["state"]) == (second, "committed")
    assert sender.tick(second).prev_tick_id == first
