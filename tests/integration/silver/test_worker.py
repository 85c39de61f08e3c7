"""The silver worker on real parts: order, modes, repeats, failures, zombies, replays. The oracle is plain Python."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from lockstep.kernel.errors import InvalidInput, LostClaim, Transient
from lockstep.ticks.silver import operations
from lockstep.ticks.silver.model import MAX_ATTEMPTS, DispatchState, TableState
from lockstep.ticks.silver.store import Actor
from lockstep.ticks.silver.tables import Step, manifest_of
from lockstep.ticks.silver.worker import SilverWorker
from tests.silver_world import Planned, Project, World, row

pytestmark = pytest.mark.stack

ACTOR = Actor("test", "a test")


def test_the_watermark_moves_only_over_the_next_tick(world: World):
    """Guards the ledger itself, below all plans: completing the second tick first changes nothing."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}), Planned({"orders": [row(2)]}))
    lane = world.store.lane(project.project_id)
    world.store.open(lane)
    lease = world.store.leases.acquire(lane.name, "mine", 60)
    second = world.store.ticks.committed(project.ticks[1])
    assert lease is not None
    assert second is not None
    with pytest.raises(LostClaim):
        world.store.complete(lease, lane, second, [])
    assert world.store.lane(project.project_id).watermark == 0
    world.store.leases.release(lease)


def _ledger(world: World, project: Project) -> list[Any]:
    return world.ask("SELECT * FROM silver.table_state WHERE project_id = %s ORDER BY 1, 2, 3", project.project_id)


def test_delta_and_full_ticks_are_applied_in_order_and_a_repeat_changes_nothing(world: World):
    """Guards typing, deduplication (the last row of a key), both modes, and a column that comes later."""
    project = world.project()
    world.commit(
        project,
        Planned({"orders": [row(1, "a"), row(2, "b"), row(2, "b2")], "people": [row(7, "p")]}),
        Planned({"orders": [row(1, "a2"), row(3, "c")]}),
        Planned({"orders": [row(3, "only"), row(4, "left")]}, mode="full"),
        Planned({"orders": [row(4, "newer", note="late")]}, columns={"note": "string"}),
    )
    world.send(*project.ticks)
    report = world.drain(project)
    assert [one.tick_id for one in report.applied] == project.ticks, report
    world.assert_equals_oracle(project)
    before = _ledger(world, project)
    assert world.drain(project, *project.ticks).already == sorted(project.ticks)
    assert _ledger(world, project) == before


def test_what_a_dead_creator_left_behind_does_not_stop_the_next_one(world: World):
    """Guards the creation of a table: a log folder without any commit is neither a table nor an obstacle."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1, "a")]}))
    log = world.tables.path(project.project_id, "orders").removeprefix(f"s3a://{world.lake}/") + "/_delta_log/"
    world.s3.put_object(Bucket=world.lake, Key=log, Body=b"")
    world.s3.put_object(Bucket=world.lake, Key=f"{log}.00000000000000000000.json.tmp", Body=b"half a comm")
    world.drain(project)
    world.assert_equals_oracle(project)


def test_a_worker_applies_exactly_the_ticks_of_its_run(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}), Planned({"orders": [row(2)]}))
    first, second = project.ticks
    assert world.drain(project, second).applied == [], "the second waits for the first"
    assert [one.tick_id for one in world.drain(project, first).applied] == [first]
    assert [one.tick_id for one in world.drain(project, second).applied] == [second]
    world.assert_equals_oracle(project)


def test_a_poison_tick_parks_its_own_project_and_no_other(world: World):
    """Guards the neighbours: a tick that can never be applied must not use up anybody else's time."""
    bad, good = world.project(), world.project()
    world.commit(bad, Planned({"orders": [row(1)]}), Planned({"orders": [row(None)]}), Planned({"orders": [row(2)]}))
    world.commit(good, Planned({"orders": [row(1)]}))
    report = world.drain(bad)
    assert ([one.tick_id for one in report.applied], report.failed, report.parked) == (
        bad.ticks[:1],
        bad.ticks[1],
        True,
    )
    assert world.states(bad) == ["DONE", "FAILED", "-"], "what came before it stays"
    errors = {one.lane.project_id: one.error for one in world.store.backlog()}
    assert "no key" in str(errors[bad.project_id])
    assert world.drain(bad).applied == [], "a parked lane waits for a person"
    world.drain(good)
    world.assert_equals_oracle(good)


class _Broken:
    """Spark that is away."""

    def apply(self, step: Step) -> TableState:
        raise Transient("Spark is away.", unit=step.unit)


def test_attempts_are_counted_and_the_last_one_parks_the_lane(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    broken = SilverWorker(world.store, world.dispatches, world.queue, _Broken(), clock=world.clock)
    parked = [broken.drain(project.project_id, run_id=f"r{n}").parked for n in range(MAX_ATTEMPTS)]
    assert parked == [False] * (MAX_ATTEMPTS - 1) + [True]
    assert world.drain(project).applied == []
    operations.replay_ticks(_parts(world), project.ticks, ACTOR)
    world.drain(project)
    world.assert_equals_oracle(project)


def test_workers_that_died_without_a_word_are_counted_and_stop_the_lane(world: World):
    """Guards a tick that kills its worker, for example by memory: nobody is left to count, so the claim does."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    lane, now = world.store.lane(project.project_id), world.clock.now()
    for _ in range(MAX_ATTEMPTS):
        taken = world.dispatches.take(project.ticks[0], lane, now=now, until=now)
        assert taken is not None
        world.dispatches.start(taken, run_id="dead", now=now, until=now)
    report = world.drain(project)
    assert (report.applied, report.parked) == ([], True)
    assert "attempts ended without a result" in report.reason


def test_an_expired_row_is_not_believed(world: World):
    """Guards the time between a row's expiry and its deletion by DynamoDB, which takes days."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    lane, now = world.store.lane(project.project_id), world.clock.now()
    past = now - timedelta(days=40)
    old = world.dispatches.take(project.ticks[0], lane, now=past, until=past)
    assert old is not None
    world.dispatches.done(old, now=past)
    assert world.dispatches.get_all(project.ticks, now) == {}
    again = world.dispatches.take(project.ticks[0], lane, now=now, until=now + timedelta(minutes=1))
    assert again is not None
    assert (again.attempt, again.state) == (1, DispatchState.DISPATCHING)
    assert world.dispatches.take(project.ticks[0], lane, now=now, until=now) is None, "somebody has it"


def test_who_holds_the_lane_takes_a_tick_from_anybody_but_a_newer_holder(world: World):
    """Guards both ways: a DONE that the ledger does not know stops nobody, and a zombie does not undo a newer DONE."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    lane, now = world.store.lane(project.project_id), world.clock.now()
    for fence in (3, 5):
        taken = world.dispatches.take(project.ticks[0], lane, now=now, until=now, fence=fence)
        assert taken is not None
        world.dispatches.done(taken, now=now)
    assert world.dispatches.take(project.ticks[0], lane, now=now, until=now, fence=4) is None
    assert world.states(project) == ["DONE"]
    assert world.dispatches.take(project.ticks[0], lane, now=now, until=now) is None, "the sensor believes it"


def test_a_zombie_changes_neither_table_nor_ledger_nor_dispatch(world: World):
    """Guards what a paused worker does when it wakes up: its merge is dropped by Delta, and it learns that it lost."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1, "first")]}), Planned({"orders": [row(5, "full")]}, mode="full"))
    stale = world.store.leases.acquire(world.store.lane(project.project_id).name, "zombie", 0.01)
    assert stale is not None
    time.sleep(0.1)
    world.drain(project)
    world.assert_equals_oracle(project)
    lane = world.store.lane(project.project_id)._replace(watermark=0)
    before, versions = _ledger(world, project), world.silver(project, "orders")
    for tick_id in project.ticks:
        tick = world.store.ticks.committed(tick_id)
        assert tick is not None

        step = Step(tick, manifest_of(tick).tables[0], lane, None, False, stale.fence, lambda: None)
        # A new generation, so that the zombie does not recognise the commit as its own and really writes.
        step = Step(**{**vars(step), "lane": lane._replace(generation=9)})
        with pytest.raises(LostClaim):
            world.tables.apply(step)
        with pytest.raises(LostClaim):
            world.store.complete(stale, lane, tick, [])
    assert (_ledger(world, project), world.silver(project, "orders")) == (before, versions)
    world.assert_equals_oracle(project)


def test_a_replay_goes_back_first_so_that_rows_of_a_wrong_tick_do_not_stay(world: World):
    """Guards the smaller correction: merging it over the wrong rows would keep those that it no longer has."""
    project = world.project()
    world.commit(
        project,
        Planned({"orders": [row(1, "a")], "people": [row(9, "untouched")]}),
        Planned({"orders": [row(2, "wrong"), row(3, "wrong too")]}),
        Planned({"orders": [row(1, "a3", note="n")]}, columns={"note": "string"}),
    )
    world.drain(project)
    world.correct(project, project.ticks[1], Planned({"orders": [row(2, "right")]}))
    (lane,) = operations.replay_ticks(_parts(world), [project.ticks[1]], ACTOR)
    assert (lane.watermark, lane.generation) == (1, 2)
    report = world.drain(project)
    assert [one.tick_id for one in report.applied] == project.ticks[1:], report
    world.assert_equals_oracle(project)
    assert world.ask("SELECT action, details ->> 'reason' FROM ticks.audit ORDER BY id DESC LIMIT 1") == [
        ("silver-replay", "a test")
    ]


def _with_deletes(*rows: dict[str, Any], mode: str = "delta") -> Planned:
    return Planned({"orders": list(rows)}, mode=mode, columns={"gone": "boolean"}, deleted="gone")


def test_rows_that_a_tick_marks_as_deleted_leave_silver_and_may_come_back(world: World):
    """Guards delta mode with deletes: the last row of a key decides, NULL is not true, the mark is no column."""
    project = world.project()
    world.commit(
        project,
        Planned({"orders": [row(1, "a"), row(2, "b"), row(3, "c"), row(4, "d")]}),
        _with_deletes(row(1, gone=True), row(2, "kept", gone=None), row(9, gone=True), row(5, "new", gone=False)),
        _with_deletes(row(3, gone=True), row(3, "again", gone=False), row(4, "x", gone=False), row(4, gone=True)),
        Planned({"orders": [row(1, "back")]}),
    )
    world.drain(project)
    world.assert_equals_oracle(project)
    held = {one["id"]: one["name"] for one in world.silver(project, "orders")}
    assert held == {1: "back", 2: "kept", 3: "again", 5: "new"}
    assert "gone" not in world.silver(project, "orders")[0]
    before = _ledger(world, project)
    operations.replay_ticks(_parts(world), [project.ticks[1]], ACTOR)
    assert len(world.drain(project).applied) == 3
    world.assert_equals_oracle(project)
    assert len(_ledger(world, project)) == len(before)


def test_a_full_tick_leaves_out_the_rows_that_it_marks_as_deleted(world: World):
    """Guards the tick of which nothing stays, also over a table that was empty: no commit is no lost claim then."""
    project = world.project()
    world.commit(
        project,
        _with_deletes(row(1, gone=True), mode="full"),
        _with_deletes(row(1, "a", gone=False), row(2, gone=True), mode="full"),
        _with_deletes(row(1, gone=True), row(2, gone=True), mode="full"),
    )
    for left in ([], [1], []):
        world.drain(project, project.ticks[world.store.lane(project.project_id).watermark])
        assert [one["id"] for one in world.silver(project, "orders")] == left
    world.assert_equals_oracle(project)


def test_a_replay_of_what_bronze_no_longer_keeps_is_refused_before_the_lane_goes_back(world: World):
    """Guards a trap: the lane would stand at a tick that nobody can read, and every newer one behind it."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    world.commit(project, Planned({"orders": [row(2)]}))
    world.drain(project)
    first = world.store.ticks.committed(project.ticks[0])
    assert first is not None
    world.s3.delete_object(Bucket=world.lake, Key=first.commits[0].key)
    lane = world.store.lane(project.project_id)
    with pytest.raises(InvalidInput, match="no longer keeps"):
        operations.replay_ticks(_parts(world), project.ticks, ACTOR)
    assert world.store.lane(project.project_id) == lane
    assert operations.replay_ticks(_parts(world), project.ticks[1:], ACTOR)[0].watermark == 1


@pytest.mark.long
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_replay_may_go_back_over_a_full_tick(world: World, start: int):
    """From a delta tick before the full one, from the full one itself, from the one after it."""
    project = world.project()
    world.commit(
        project,
        Planned({"orders": [row(1, "a")]}),
        Planned({"orders": [row(1, "b"), row(2, "b")]}),
        Planned({"orders": [row(3, "full")]}, mode="full"),
        Planned({"orders": [row(4, "after")]}),
    )
    world.drain(project)
    operations.replay_ticks(_parts(world), [project.ticks[start]], ACTOR)
    report = world.drain(project)
    assert len(report.applied) == 4 - start, report
    world.assert_equals_oracle(project)


def _parts(world: World) -> Any:
    return world
