"""From messages to runs on real queues: grouping, duplicates, reordering, poison, sweeps, dead letters, commands."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from lockstep.kernel.clock import SystemClock
from lockstep.ticks.silver import operations
from lockstep.ticks.silver.intake import Intake, sweep
from lockstep.ticks.silver.metrics import silver_readings
from lockstep.ticks.silver.store import Actor
from lockstep.ticks.silver.worker import SilverWorker
from tests.silver_world import Planned, Project, World, row

pytestmark = pytest.mark.stack

ACTOR = Actor("test", "a test")


def _idle(lane: Any) -> bool:
    return False


def _look(world: World, busy: Any = _idle) -> Any:
    """A pass of the sensor on an SQS that hides nothing from it."""
    return world.intake.look(busy)


def _apply_all(world: World, *projects: Project) -> None:
    for project in projects:
        world.drain(project)


@pytest.fixture(autouse=True)
def _empty_queues(world: World) -> None:
    for name in (world.queue_name, world.dead_name):
        world.sqs.purge_queue(QueueUrl=world.sqs.get_queue_url(QueueName=name)["QueueUrl"])


def test_messages_of_many_projects_in_any_order_become_one_ordered_group_each(world: World):
    """Guards N+1 before N: SQS keeps no order, so the ledger gives it."""
    first, second = world.project(), world.project("other")
    world.commit(first, *(Planned({"orders": [row(n)]}) for n in range(3)))
    world.commit(second, Planned({"orders": [row(1)]}))
    world.send(first.ticks[2], second.ticks[0], first.ticks[0], first.ticks[2])
    found = _look(world)
    groups = {group.lane.project_id: group.tick_ids for group in found.groups}
    assert groups == {first.project_id: tuple(first.ticks), second.project_id: tuple(second.ticks)}
    assert world.states(first) == ["DISPATCHING"] * 3
    world.send(*first.ticks)
    again = _look(world)
    assert again.groups == [], "what is dispatched is not dispatched again"
    _apply_all(world, first, second)
    world.assert_equals_oracle(first)
    world.send(*first.ticks, *second.ticks)
    assert _look(world).deleted >= 4, "a message of a finished tick goes away"


def test_a_lane_that_is_at_work_is_left_alone_and_others_are_not(world: World):
    busy, free = world.project(), world.project()
    for one in (busy, free):
        world.commit(one, Planned({"orders": [row(1)]}))
    world.send(*busy.ticks, *free.ticks)
    found = _look(world, lambda lane: lane.project_id == busy.project_id)
    assert [group.lane.project_id for group in found.groups] == [free.project_id]
    assert world.queue.depth().total == 2, "no message is deleted before its tick is done"


def test_a_lane_goes_on_as_soon_as_its_run_has_ended(world: World):
    """Guards a wait of minutes: the messages that came during the run are hidden for longer than the run takes."""
    project = world.project()
    world.commit(project, *(Planned({"orders": [row(n)]}) for n in range(2)))
    world.send(*project.ticks)
    first = _look(world, lambda lane: True)
    assert (first.groups, first.later) == ([], [project.project_id])
    assert _look(world).groups == [], "its messages are hidden"
    second = world.intake.look(_idle, first.later)
    assert [group.tick_ids for group in second.groups] == [tuple(project.ticks)]
    assert world.intake.look(_idle, second.later).groups == [], "what is dispatched is not dispatched again"
    world.drain(project)
    assert world.intake.look(_idle, [project.project_id, "nobody"]).later == [], "nothing is left to wait for"
    world.assert_equals_oracle(project)


def test_a_late_message_of_a_finished_tick_does_not_make_its_lane_forgotten(world: World):
    project = world.project()
    world.commit(project, *(Planned({"orders": [row(n)]}) for n in range(2)))
    world.drain(project, project.ticks[0])
    world.send(project.ticks[0])
    found = world.intake.look(_idle, [project.project_id])
    assert found.deleted == 1
    assert [group.tick_ids for group in found.groups] == [(project.ticks[1],)]
    assert found.later == [project.project_id]


def test_a_message_that_nobody_understands_stays_for_the_dead_letters(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    url = world.sqs.get_queue_url(QueueName=world.queue_name)["QueueUrl"]
    stranger = {**world.message(project.ticks[0]).render(), "project_id": "nobody"}
    for body in ("not JSON", json.dumps({"schema_version": "1.0"}), json.dumps(stranger)):
        world.sqs.send_message(QueueUrl=url, MessageBody=body)
    world.send(*project.ticks)
    found = _look(world)
    assert (len(found.groups), len(found.waiting), found.deleted) == (1, 3, 0)
    assert world.queue.depth().total == 4


class _Later(SystemClock):
    def __init__(self, by: timedelta) -> None:
        self._by = by

    def now(self) -> Any:
        return super().now() + self._by


def _swept(world: World, by: timedelta = timedelta(0)) -> tuple[str, ...]:
    return sweep(world.store, world.dispatches, world.queue, clock=_Later(by)).enqueued


def test_a_sweep_finds_every_committed_tick_that_nobody_works_on_once(world: World):
    """Guards a purged queue: what bronze acknowledged reaches silver although no message is left."""
    lost, young, parked = world.project(), world.project(), world.project()
    world.commit(lost, Planned({"orders": [row(1)]}), Planned({"orders": [row(2)]}))
    world.commit(young, Planned({"orders": [row(1)]}), ago=timedelta(0))
    world.commit(parked, Planned({"orders": [row(None)]}))
    world.drain(parked)
    found = set(_swept(world))
    assert set(lost.ticks) <= found
    assert not found & {*young.ticks, *parked.ticks}
    assert _swept(world) == (), "not again so soon"
    group = next(group for group in _look(world).groups if group.lane.project_id == lost.project_id)
    assert set(_swept(world, timedelta(seconds=90))) & set(lost.ticks) == set(), "a run is on its way"
    later = set(_swept(world, timedelta(minutes=20)))
    assert {*lost.ticks, *young.ticks} <= later, "the run never came"
    _apply_all(world, lost, young)
    world.assert_equals_oracle(lost)
    assert set(_swept(world, timedelta(days=1))) & {*lost.ticks, *young.ticks} == set()
    assert group.tick_ids == tuple(lost.ticks)


def test_a_clock_that_ran_ahead_holds_up_nobody_when_it_is_right_again(world: World):
    """Guards leases and hints from the future: the one who wrote them died, and their hours must not be waited for."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    ahead = Intake(world.store, world.dispatches, world.queue, clock=_Later(timedelta(hours=2)))
    assert project.ticks[0] in _swept(world, timedelta(hours=2))
    assert tuple(project.ticks) in [group.tick_ids for group in ahead.look(_idle).groups]
    assert project.ticks[0] in _swept(world)
    assert tuple(project.ticks) in [group.tick_ids for group in _look(world).groups]


def test_a_worker_whose_clock_is_hours_behind_changes_neither_the_order_of_the_ledger_nor_what_is_new_in_it(
    world: World,
):
    """Guards who reads the ledger by time: with the worker's own time the tick would stand before its predecessor."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}), Planned({"orders": [row(2)]}))
    world.drain(project, project.ticks[0])
    begun = world.clock.now()
    late = SilverWorker(
        world.store, world.dispatches, world.queue, world.tables, clock=_Later(timedelta(hours=-2)), lease_seconds=30
    )
    late.drain(project.project_id, None, run_id="late")
    order = "SELECT tick_id FROM silver.applied WHERE project_id = %s ORDER BY applied_at"
    assert [one[0] for one in world.ask(order, project.project_id)] == project.ticks
    assert project.ticks[1] in {one.tick_id for one in world.store.applied_since(begun - timedelta(minutes=1))}


def test_a_worker_that_died_before_it_said_done_is_heard_later(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    world.drain(project)
    key = {"tick_id": {"S": project.ticks[0]}}
    world.dynamodb.delete_item(TableName="silver_dispatched", Key=key)
    assert operations.not_said(_parts(world), world.clock.now() - timedelta(hours=1)) == tuple(project.ticks)
    found = operations.reconcile(_parts(world), ACTOR)
    assert found.not_said == tuple(project.ticks)
    assert _look(world).deleted >= 1
    world.assert_equals_oracle(project)


def test_dead_letters_come_back_unless_their_tick_is_done(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}), Planned({"orders": [row(2)]}))
    world.drain(project, project.ticks[0])
    world.dead_letters.send([world.message(one) for one in project.ticks])
    found = operations.redrive(_parts(world), ACTOR)
    assert (found.sent, found.finished) == ((project.ticks[1],), (project.ticks[0],))
    assert (world.queue.depth().total, world.dead_letters.depth().total) == (1, 0)
    world.drain(project)


def test_the_gauges_and_the_status_say_what_the_ledger_says(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(None)]}), Planned({"orders": [row(1)]}), ago=timedelta(minutes=50))
    world.drain(project)
    readings = {one.name: dict(one.read()) for one in silver_readings(world.source, world.queue, world.dead_letters)}
    assert readings["lockstep_silver_lag_seconds"][()] > 2900
    assert readings["lockstep_silver_waiting_ticks"][()] >= 2
    assert readings["lockstep_silver_parked_lanes"][()] >= 1
    assert readings["lockstep_tick_queue_messages"][("dead", "visible")] == 0
    assert readings["lockstep_tick_dead_letter_age_seconds"][()] == 0
    status = operations.status(_parts(world))
    mine = next(one for one in status.lanes if one.lane.project_id == project.project_id)
    assert (mine.waiting, mine.next_tick, mine.lane.parked) == (2, project.ticks[0], project.ticks[0])


def _parts(world: World) -> Any:
    return world
