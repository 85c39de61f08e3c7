"""Death at every step of silver, a frozen worker that wakes up late, and what must hold afterwards.

Most deaths are `CrashInjected`, which no handler survives; some are a real SIGKILL or a lease slept through, in a
process of its own. Every crash point that the package declares must be killed by one of these tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from lockstep.idempotency import delta
from lockstep.kernel.clock import SystemClock
from lockstep.kernel.crash import VARIABLE, CrashInjected, armed, declared_points
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.settings import PROJECT_ROOT
from lockstep.ticks.parts import PartObjects
from lockstep.ticks.silver import operations, retention
from lockstep.ticks.silver.gold import Gold
from lockstep.ticks.silver.intake import sweep
from lockstep.ticks.silver.store import Actor
from tests.faults.modes import FAILS, HANGS, meet
from tests.faults.silver.drain_once import LOST
from tests.silver_world import Planned, Project, World, row

pytestmark = pytest.mark.stack

ACTOR = Actor("test", "a test")
PATIENCE_SECONDS = 180

# Each point with the tick during which the worker dies.
WORKER_POINTS = {
    "silver.table.created": Planned({"orders": [row(1, "a"), row(2, "b")]}),
    "silver.tick.before_claim": Planned({"orders": [row(1, "c")]}),
    "silver.tick.claimed": Planned({"orders": [row(3, "d")]}),
    "silver.table.columns_added": Planned({"orders": [row(4, "e", note="n")]}, columns={"note": "string"}),
    "silver.table.before_commit": Planned({"orders": [row(4, "f")]}),
    "silver.table.after_commit": Planned({"orders": [row(5, "g"), row(6, "h")]}, mode="full"),
    "silver.tick.table_applied": Planned({"orders": [row(6, "i"), row(7, "j")]}),
    "silver.tick.before_complete": Planned({"orders": [row(8, "k")]}),
    "silver.tick.completed": Planned({"orders": [row(8, "l")]}),
    "silver.tick.done": Planned({"orders": [row(9, "m")]}),
}
OTHER_POINTS = {
    "silver.tick.failure_recorded",
    "silver.intake.before_dispatch",
    "silver.intake.dispatched",
    "silver.replay.rewound",
    "silver.skip.recorded",
    "silver.table.put_back",
    "silver.redrive.sent",
    "silver.retention.table_forgotten",
    "silver.vacuum.table_done",
    "silver.gold.day_loaded",
}


def test_every_crash_point_of_silver_has_a_test():
    """Guards new steps: a point that nobody kills is a promise that nobody checked."""
    declared = declared_points(PROJECT_ROOT / "lockstep" / "ticks" / "silver")
    assert set(declared) == {*WORKER_POINTS, *OTHER_POINTS}


def test_a_worker_that_dies_at_any_step_loses_and_doubles_nothing(world: World):
    """One project, one tick for each point: the worker dies in the middle of it, the next one finishes it."""
    project = world.project()
    world.commit(project, *WORKER_POINTS.values())
    world.send(*project.ticks)
    assert [group.tick_ids for group in world.intake.look(lambda lane: False).groups] == [tuple(project.ticks)]
    for number, point in enumerate(WORKER_POINTS):
        with armed(point, "raise") as charge, pytest.raises(CrashInjected):
            world.drain(project, project.ticks[number])
        assert charge.fired, point
        assert world.store.lane(project.project_id).watermark in (number, number + 1), point
        world.drain(project, project.ticks[number])
        assert world.store.lane(project.project_id).watermark == number + 1, point
    world.assert_equals_oracle(project)
    # The worker that died between DONE and its message left that one behind: the sensor deletes it when it comes.
    last = world.dispatches.get_all(project.ticks, world.clock.now())[project.ticks[-1]]
    world.queue.hide([str(last.receipt_handle)], 0)
    world.intake.look(lambda lane: False)
    assert world.queue.depth().total == 0, "every message went away with its tick"


@pytest.fixture
def rival(world: World, stack: Any) -> Iterator[World]:
    """The same world through a Spark session of its own, as another process has one."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote(stack.site().environment["LOCKSTEP_SPARK_REMOTE"]).create()
    yield replace(world, spark=session)
    session.stop()


@pytest.mark.long
@pytest.mark.parametrize("mode", [FAILS, HANGS])
def test_a_worker_that_fails_or_sleeps_through_its_lease_inside_a_table_loses_and_doubles_nothing(
    world: World, rival: World, mode: str
):
    """Points of the ledger fail and hang in the simulation; these are inside Delta. One tick for each of them."""
    project = world.project()
    points = [point for point in WORKER_POINTS if point.startswith("silver.table.")]
    world.commit(project, *(WORKER_POINTS[point] for point in points))

    def overtake(number: int) -> None:
        world.ask(
            "UPDATE kernel.lease SET lease_until = clock_timestamp() WHERE lane LIKE %s", f"%{project.project_id}"
        )
        rival.drain(project, project.ticks[number])

    for number, point in enumerate(points):
        tick = project.ticks[number]
        meet(point, mode, lambda: world.drain(project, tick), lambda: overtake(number), blocked_after=60)  # noqa: B023
        world.ask(
            "UPDATE kernel.lease SET lease_until = clock_timestamp() WHERE lane LIKE %s", f"%{project.project_id}"
        )
        world.drain(project, tick)
        assert world.store.lane(project.project_id).watermark == number + 1, point
    world.assert_equals_oracle(project)


def _half_applied(world: World) -> Project:
    """A project that is stopped by its second tick, one table of which is in silver already."""
    project = world.project()
    world.commit(
        project,
        Planned({"orders": [row(1, "a")], "people": [row(1)]}),
        Planned({"orders": [row(1, "poison"), row(2)], "people": [row(None)]}),
        Planned({"orders": [row(3, "after")]}),
    )
    assert world.drain(project).parked
    assert [one["name"] for one in world.silver(project, "orders")] == ["poison", "x"], "the table committed by itself"
    world.leave_out(project, project.ticks[1])
    return project


def test_a_skip_that_dies_at_any_step_is_finished_by_whoever_comes_next(world: World):
    """Guards both halves: the decision without its message, and the table that went back without its ledger."""
    project = _half_applied(world)
    with armed("silver.skip.recorded", "raise"), pytest.raises(CrashInjected):
        operations.skip_tick(_parts(world), project.ticks[1], ACTOR, accept_gap=True)
    assert sweep(world.store, world.dispatches, world.queue, clock=world.clock).enqueued == tuple(project.ticks[1:])
    with armed("silver.table.put_back", "raise"), pytest.raises(CrashInjected):
        world.drain(project)
    versions = len(delta.history(world.spark, world.tables.path(project.project_id, "orders")))
    world.drain(project)
    world.assert_equals_oracle(project)
    history = delta.history(world.spark, world.tables.path(project.project_id, "orders"))
    assert [one.operation for one in history[: len(history) - versions]] == ["MERGE"], "it went back once"
    _empty(world)


@pytest.mark.long
@pytest.mark.parametrize("mode", [FAILS, HANGS])
def test_a_skip_that_fails_or_hangs_while_another_worker_does_it_ends_as_one(world: World, rival: World, mode: str):
    project = _half_applied(world)

    def skip() -> None:
        operations.skip_tick(_parts(world), project.ticks[1], ACTOR, accept_gap=True)

    def second() -> None:
        with pytest.raises(InvalidInput):
            skip()

    meet("silver.skip.recorded", mode, skip, second)

    def overtake() -> None:
        world.ask(
            "UPDATE kernel.lease SET lease_until = clock_timestamp() WHERE lane LIKE %s", f"%{project.project_id}"
        )
        rival.drain(project)

    meet("silver.table.put_back", mode, lambda: world.drain(project), overtake, blocked_after=60)
    overtake()
    world.drain(project)
    world.assert_equals_oracle(project)
    _empty(world)


@pytest.mark.parametrize("mode", [FAILS, HANGS])
def test_a_redrive_that_fails_or_hangs_while_another_one_runs_loses_no_tick(world: World, mode: str):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    world.dead_letters.send([world.message(project.ticks[0])])

    def redrive() -> None:
        operations.redrive(_parts(world), ACTOR)

    meet("silver.redrive.sent", mode, redrive, redrive)
    (group,) = world.intake.look(lambda lane: False).groups
    world.drain(project, *group.tick_ids)
    world.assert_equals_oracle(project)
    _empty(world)


@pytest.mark.long
@pytest.mark.parametrize("mode", [FAILS, HANGS])
def test_gold_and_retention_that_fail_or_hang_while_another_one_works_end_as_one(world: World, rival: World, mode: str):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)], "people": [row(2)]}), ago=timedelta(days=2))
    world.drain(project)
    applied = list(world.store.applied(project.ticks).values())
    day = applied[0].committed_at.date()

    def load(hands: World) -> Callable[[], object]:
        return lambda: Gold(hands.spark, hands.lake).load_day(day, applied)

    meet("silver.gold.day_loaded", mode, load(world), load(rival), blocked_after=60)
    assert load(world)() == 0, "it is there, whoever loaded it"
    daily = world.spark.read.format("delta").load(Gold(world.spark, world.lake).daily.path)
    assert daily.where(f"day = '{day}'").count() == 1
    world.ask("UPDATE ticks.tick SET dt = '20260507' RETURNING 1")

    def forget(hands: World) -> Callable[[], object]:
        return lambda: retention.retain(_parts(world), hands.spark, world.lake, _objects(world), ACTOR, days=1)

    meet("silver.retention.table_forgotten", mode, forget(world), forget(rival), blocked_after=60)
    forget(world)()

    def free(hands: World) -> Callable[[], object]:
        return lambda: retention.vacuum_tables(
            _parts(world), hands.spark, world.lake, ACTOR, project_id=project.project_id
        )

    meet("silver.vacuum.table_done", mode, free(world), free(rival), blocked_after=60)
    for table in ("orders", "people"):
        path = f"s3a://{world.lake}/bronze/{project.project_id}/{table}"
        assert world.spark.read.format("delta").load(path).count() == 0
    world.assert_equals_oracle(project)


def test_a_failure_whose_record_was_the_last_deed_is_still_counted_and_parked(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(None)]}))
    with armed("silver.tick.failure_recorded", "raise"), pytest.raises(CrashInjected):
        world.drain(project)
    assert world.store.lane(project.project_id).parked == project.ticks[0]
    assert world.drain(project).parked


class _Later(SystemClock):
    """The same clock, some time later."""

    def __init__(self, by: timedelta) -> None:
        self._by = by

    def now(self) -> datetime:
        return super().now() + self._by


@pytest.mark.parametrize("point", ["silver.intake.before_dispatch", "silver.intake.dispatched"])
def test_a_sensor_that_dies_while_it_dispatches_leaves_the_tick_to_the_sweep(world: World, point: str):
    """Guards the gap between the dispatch and the run: the message is hidden, and nobody works."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    world.send(*project.ticks)
    with armed(point, "raise"), pytest.raises(CrashInjected):
        world.intake.look(lambda lane: False)
    later = _Later(timedelta(minutes=10))
    swept = sweep(world.store, world.dispatches, world.queue, clock=later)
    assert project.ticks[0] in swept.enqueued
    (group,) = (
        type(world.intake)(world.store, world.dispatches, world.queue, clock=later).look(lambda lane: False).groups
    )
    assert group.tick_ids == tuple(project.ticks)
    assert group.attempt == (1 if point.endswith("before_dispatch") else 2)
    world.drain(project, *group.tick_ids)
    assert world.states(project) == ["DONE"]
    _empty(world)


def test_a_replay_that_dies_before_its_message_is_found_by_the_sweep(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}), Planned({"orders": [row(2)]}))
    world.drain(project)
    with armed("silver.replay.rewound", "raise"), pytest.raises(CrashInjected):
        operations.replay_ticks(_parts(world), [project.ticks[1]], ACTOR)
    assert world.store.lane(project.project_id).watermark == 1
    assert sweep(world.store, world.dispatches, world.queue, clock=world.clock).enqueued == (project.ticks[1],)
    world.drain(project)
    world.assert_equals_oracle(project)
    _empty(world)


def test_a_redrive_that_dies_after_sending_doubles_a_message_and_nothing_else(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)]}))
    world.dead_letters.send([world.message(project.ticks[0])])
    with armed("silver.redrive.sent", "raise"), pytest.raises(CrashInjected):
        operations.redrive(_parts(world), ACTOR)
    world.sqs.purge_queue(QueueUrl=world.sqs.get_queue_url(QueueName=world.dead_name)["QueueUrl"])
    world.dead_letters.send([world.message(project.ticks[0])])
    assert operations.redrive(_parts(world), ACTOR).sent == tuple(project.ticks)
    assert world.queue.depth().total == 2
    (group,) = world.intake.look(lambda lane: False).groups
    world.drain(project, *group.tick_ids)
    world.assert_equals_oracle(project)
    _empty(world)


def test_gold_and_retention_that_die_in_the_middle_are_finished_by_a_repeat(world: World):
    project = world.project()
    world.commit(project, Planned({"orders": [row(1)], "people": [row(2)]}), ago=timedelta(days=2))
    world.drain(project)
    gold = Gold(world.spark, world.lake)
    applied = list(world.store.applied(project.ticks).values())
    day = applied[0].committed_at.date()
    with armed("silver.gold.day_loaded", "raise"), pytest.raises(CrashInjected):
        gold.load_day(day, applied)
    assert gold.load_day(day, applied) == 0, "the same ticks again change nothing"
    assert world.spark.read.format("delta").load(gold.daily.path).where(f"day = '{day}'").count() == 1

    def forget() -> retention.Forgotten:
        return retention.retain(_parts(world), world.spark, world.lake, _objects(world), ACTOR, days=1)

    world.ask("UPDATE ticks.tick SET dt = '20260507' RETURNING 1")
    with armed("silver.retention.table_forgotten", "raise"), pytest.raises(CrashInjected):
        forget()
    again = forget()
    assert f"{project.project_id}/people" in again.tables

    def free() -> retention.Vacuumed:
        return retention.vacuum_tables(_parts(world), world.spark, world.lake, ACTOR, project_id=project.project_id)

    with armed("silver.vacuum.table_done", "raise"), pytest.raises(CrashInjected):
        free()
    assert len(free().tables) == 4
    for table in ("orders", "people"):
        path = f"s3a://{world.lake}/bronze/{project.project_id}/{table}"
        assert world.spark.read.format("delta").load(path).count() == 0
    assert world.spark.read.format("delta").load(gold.daily.path).where(f"day = '{day}'").count() == 0
    world.assert_equals_oracle(project)


@pytest.mark.parametrize(
    "point",
    [
        "silver.table.after_commit",
        *(pytest.param(point, marks=pytest.mark.long) for point in WORKER_POINTS if "columns" not in point),
    ],
)
def test_a_killed_worker_is_replaced_and_nothing_shows_it(world: World, point: str):
    """A real SIGKILL: no lease is given back, no connection is closed."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1, "a")]}), Planned({"orders": [row(1, "b"), row(2)]}, mode="full"))
    victim = _victim(world, project, f"{point}=kill", ttl=30)
    assert victim.wait(PATIENCE_SECONDS) == -signal.SIGKILL, f"{point} was never reached"
    assert world.drain(project).reason == "another worker has the lane", "its lease still holds"
    world.ask("UPDATE kernel.lease SET lease_until = clock_timestamp() WHERE lane LIKE %s", f"%{project.project_id}")
    world.drain(project, *project.ticks)
    world.assert_equals_oracle(project)


def test_a_worker_that_sleeps_through_its_lease_wakes_up_and_changes_nothing(world: World):
    """A real zombie: it has read its rows and only needs to merge when its lane is taken over."""
    project = world.project()
    world.commit(project, Planned({"orders": [row(1, "a")]}), Planned({"orders": [row(2, "full")]}, mode="full"))
    victim = _victim(world, project, "silver.table.before_commit=hang:1", ttl=600)
    _wait_for(lambda: world.states(project)[0] == "RUNNING")
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        world.ask(
            "UPDATE kernel.lease SET lease_until = clock_timestamp() WHERE lane LIKE %s", f"%{project.project_id}"
        )
        assert len(world.drain(project).applied) == 2
        world.assert_equals_oracle(project)
        before = _all(world, project)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    assert victim.wait(PATIENCE_SECONDS) == LOST, "the zombie must learn that it lost"
    assert _all(world, project) == before
    world.assert_equals_oracle(project)


def _all(world: World, project: Project) -> list[Any]:
    return world.ask("SELECT * FROM silver.applied WHERE project_id = %s ORDER BY sequence", project.project_id)


def _victim(world: World, project: Project, crash: str, ttl: float) -> subprocess.Popen[bytes]:
    words = [world.dsn, world.lake, world.queue_name, project.project_id, str(ttl)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.silver.drain_once", *words],
        cwd=PROJECT_ROOT,
        env={**os.environ, VARIABLE: crash},
    )


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


def _empty(world: World) -> None:
    world.sqs.purge_queue(QueueUrl=world.sqs.get_queue_url(QueueName=world.queue_name)["QueueUrl"])


def _parts(world: World) -> Any:
    return world


def _objects(world: World) -> PartObjects:
    return PartObjects(world.s3, world.lake, ids=SystemIds())
