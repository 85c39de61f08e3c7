"""Many ticks of many projects with doubled, shuffled and lost messages and workers that die: everything arrives, once.

The seed is in the test's name; the same seed gives the same faults. The large form is `long`.
"""

from __future__ import annotations

import random

import pytest

from lockstep.kernel.crash import CrashInjected, armed
from lockstep.ticks.silver.intake import sweep
from tests.faults.silver.test_crashes import WORKER_POINTS
from tests.silver_world import Planned, Project, World, row

pytestmark = pytest.mark.stack

MOST_ROUNDS = 200


def _planned(chance: random.Random) -> Planned:
    rows = [row(chance.randint(1, 6), f"v{chance.randint(0, 99)}") for _ in range(chance.randint(1, 4))]
    return Planned({"orders": rows}, mode="full" if chance.random() < 0.15 else "delta")


@pytest.mark.parametrize(
    ("seed", "projects", "ticks", "deaths"),
    [(7, 2, 4, 0.3), pytest.param(11, 10, 50, 0.1, marks=pytest.mark.long)],
)
def test_every_committed_tick_is_silvered_once_whatever_happens_on_the_way(
    world: World, seed: int, projects: int, ticks: int, deaths: float
):
    chance = random.Random(seed)
    made = [world.project() for _ in range(projects)]
    for project in made:
        world.commit(project, *(_planned(chance) for _ in range(ticks)))
    messages = [tick for project in made for tick in project.ticks for _ in range(chance.randint(0, 2))]
    chance.shuffle(messages)
    world.send(*messages)
    for _ in range(MOST_ROUNDS):
        if all(_is_done(world, project) for project in made):
            break
        _round(world, made, chance, deaths)
    for project in made:
        world.assert_equals_oracle(project)
        applied = world.ask("SELECT count(*) FROM silver.applied WHERE project_id = %s", project.project_id)
        assert applied == [(ticks,)]


def _round(world: World, made: list[Project], chance: random.Random, deaths: float) -> None:
    """A look at the queue, a sweep as if time had passed, and workers for whatever was dispatched or is behind."""
    groups = {group.lane.project_id: group.tick_ids for group in world.intake.look(lambda lane: False).groups}
    world.ask("UPDATE silver.lane SET hinted_at = NULL")
    sweep(world.store, world.dispatches, world.queue, clock=world.clock)
    for project in made:
        wanted = groups.get(project.project_id, tuple(project.ticks))
        point = chance.choice(sorted(WORKER_POINTS))
        if chance.random() >= deaths:
            world.drain(project, *wanted)
            continue
        try:
            with armed(point, "raise", nth=chance.randint(1, 3)):
                world.drain(project, *wanted)
        except CrashInjected:
            continue


def _is_done(world: World, project: Project) -> bool:
    return world.states(project) == ["DONE"] * len(project.ticks)
