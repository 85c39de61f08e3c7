"""A tick that silver cannot apply is left out when a person says so: on record, whole, and only that one."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.kernel.errors import InvalidInput, LostClaim
from lockstep.ticks.silver import operations
from lockstep.ticks.silver.store import Actor
from tests.silver_world import Planned, Project, World, row

pytestmark = pytest.mark.stack

ACTOR = Actor("ops", "its export was broken")


def _stopped(world: World, *, mode: str = "delta", orders: tuple[dict[str, Any], ...] = ()) -> Project:
    """A project stopped by its second tick; `orders` are rows that the failed attempt has left in silver."""
    project = world.project()

    def tables(people: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
        return ({"orders": list(others)} if orders else {}) | {"people": [people]}

    world.commit(
        project,
        Planned(tables(row(1, "p"), row(1, "a"))),
        Planned(tables(row(None), *orders), mode=mode),
        Planned(tables(row(2, "q"), row(2, "b"))),
    )
    world.send(*project.ticks)
    world.intake.look(lambda lane: False)
    assert world.drain(project).parked
    return project


def _skip(world: Any, project: Project) -> Any:
    lane = operations.skip_tick(world, project.ticks[1], ACTOR, accept_gap=True)
    world.leave_out(project, project.ticks[1])
    return lane


def _records(world: World, project: Project) -> Any:
    return world.ask(
        "SELECT (SELECT count(*) FROM ticks.audit), (SELECT count(*) FROM silver.skip), l.*"
        " FROM silver.lane AS l WHERE project_id = %s",
        project.project_id,
    )


@pytest.mark.parametrize("mode", ["delta", pytest.param("full", marks=pytest.mark.long)])
def test_a_skipped_tick_leaves_nothing_in_silver_and_the_lane_goes_on(world: World, mode: str):
    """Guards the half that was applied: tables commit one by one, so the first of them holds rows of a failed tick."""
    project = _stopped(world, mode=mode, orders=(row(1, "half"), row(9, "half")))
    assert {one["name"] for one in world.silver(project, "orders")} == {"half"}
    assert _skip(world, project).parked is None
    report = world.drain(project)
    assert [one.tick_id for one in report.applied] == project.ticks[1:]
    assert [one.skipped for one in report.applied] == [ACTOR.reason, None]
    world.assert_equals_oracle(project)
    status = operations.status(world)  # type: ignore[arg-type]  # a world has the parts
    (shown,) = [one for one in status.skipped if one.project_id == project.project_id]
    assert (shown.tick_id, shown.sequence, shown.reason, shown.by) == (project.ticks[1], 2, ACTOR.reason, "ops")
    assert project.project_id not in {one.lane.project_id for one in status.lanes}
    assert world.ask("SELECT actor, action, subject FROM ticks.audit ORDER BY id DESC LIMIT 1") == [
        ("ops", "silver-skip", project.ticks[1])
    ]
    world.intake.look(lambda lane: False)
    assert world.queue.depth().visible == 0, "its message went away like that of any other tick"


def test_a_table_that_only_the_skipped_tick_has_ends_empty(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)], "people": [row(None)]}), Planned({"people": [row(2)]}))
    world.drain(project)
    operations.skip_tick(world, project.ticks[0], ACTOR, accept_gap=True)  # type: ignore[arg-type]
    world.drain(project)
    assert world.silver(project, "orders") == []
    assert [one["id"] for one in world.silver(project, "people")] == [2]


def test_a_replay_passes_over_a_skipped_tick_again_until_somebody_names_it(world: Any):
    """Guards the decision itself: a replay of something else must neither stop at the tick nor bring it in."""
    project = _stopped(world)
    _skip(world, project)
    world.drain(project)
    operations.replay_ticks(world, [project.ticks[1]], ACTOR, named=False)  # a range happens to begin with it
    assert [one.skipped for one in world.drain(project).applied] == [ACTOR.reason, None]
    world.assert_equals_oracle(project)
    world.leave_out(project)
    world.correct(project, project.ticks[1], Planned({"people": [row(7, "mended")]}))
    operations.replay_ticks(world, [project.ticks[1]], ACTOR)
    assert [one.skipped for one in world.drain(project).applied] == [None, None]
    world.assert_equals_oracle(project)
    assert project.project_id not in {one.project_id for one in world.store.skipped()}


@pytest.mark.long
def test_a_replay_from_after_a_skipped_tick_finds_its_way_back(world: Any):
    """Guards the history of the table, which holds the failed merge and the way back from it."""
    project = _stopped(world, orders=(row(1, "half"),))
    _skip(world, project)
    world.drain(project)
    operations.replay_ticks(world, [project.ticks[2]], ACTOR)
    assert len(world.drain(project).applied) == 1
    world.assert_equals_oracle(project)


def test_gold_does_not_count_a_skipped_tick(world: Any):
    project = _stopped(world)
    _skip(world, project)
    world.drain(project)
    day = next(iter(world.store.applied([project.ticks[0]]).values())).committed_at
    of_day = world.store.applied_of_day(day.replace(hour=0, minute=0), day.replace(hour=23, minute=59))
    assert [one.tick_id for one in of_day if one.project_id == project.project_id] == [
        project.ticks[0],
        project.ticks[2],
    ]


def test_only_the_tick_that_stops_its_project_can_be_skipped_and_only_knowingly(world: Any):
    project = _stopped(world)
    good, stops, behind = project.ticks
    before = _records(world, project)
    for tick, reason, accept in (
        (stops, "because", False),
        (stops, "  ", True),
        (good, "because", True),
        (behind, "because", True),
        ("nobody", "because", True),
    ):
        with pytest.raises(InvalidInput):
            operations.skip_tick(world, tick, Actor("ops", reason), accept_gap=accept)
    assert _records(world, project) == before
    lane, tick = world.store.lane(project.project_id), world.store.ticks.committed(stops)
    world.store.rewind(lane, tick, ACTOR)
    with pytest.raises(LostClaim):
        world.store.skip(lane, tick, ACTOR)
    assert world.store.skipped(limit=1) == [] or world.store.skipped(limit=1)[0].project_id != project.project_id
