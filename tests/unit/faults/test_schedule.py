"""The world's rules: one step at a time, the dead do nothing more, a lost answer is no undone deed."""

from __future__ import annotations

import pytest

from lockstep.faults.schedule import PAUSE_SECONDS, Actor, Bound, Fault, Script, World, unreachable
from lockstep.kernel.errors import Transient


class _Part:
    def __init__(self) -> None:
        self.done: list[str] = []

    def do(self, what: str) -> str:
        self.done.append(what)
        return what


def _play(fault: Fault, nth: int = 1) -> tuple[_Part, Actor, World]:
    part, world = _Part(), World(seed=1, plan=Script(fault, nth))

    def body(actor: Actor) -> None:
        bound = Bound(world, actor, "part", part, lost=unreachable)
        try:
            bound.do("first")
        finally:
            bound.do("last words")

    actor = world.start("worker", body)
    world.run()
    return part, actor, world


def test_a_process_that_died_before_its_call_has_done_nothing_and_says_no_last_words():
    part, actor, _ = _play(Fault.CRASH_BEFORE)
    assert (part.done, actor.dead) == ([], True)


def test_a_process_that_died_after_its_call_has_done_it():
    assert _play(Fault.CRASH_AFTER)[0].done == ["first"]


def test_a_lost_request_did_nothing_and_a_lost_answer_did_everything():
    assert _play(Fault.LOST_REQUEST)[0].done == ["last words"]
    part, actor, _ = _play(Fault.LOST_ANSWER)
    assert part.done == ["first", "last words"]
    assert isinstance(actor.error, Transient)


def test_a_pause_lets_others_go_first():
    part, world = _Part(), World(seed=1, plan=Script(Fault.PAUSE, 1, actor="slow"))
    for name in ("slow", "quick"):
        world.start(name, lambda actor: Bound(world, actor, "part", part, lost=unreachable).do(actor.name))
    world.run()
    assert part.done == ["quick", "slow"]
    assert world.time.monotonic() >= PAUSE_SECONDS


def test_a_clock_jump_moves_one_wall_clock_and_no_duration():
    _, actor, world = _play(Fault.CLOCK_JUMP)
    assert actor.clock.now() != world.time.now()
    assert actor.clock.monotonic() == world.time.monotonic()


def test_an_unexpected_error_of_an_actor_is_kept_for_the_verdict():
    world = World(seed=1)
    world.start("broken", lambda actor: int("no number"))
    world.run()
    assert [type(one) for one in world.unexpected] == [ValueError]


@pytest.mark.parametrize("seed", range(3))
def test_the_seed_alone_decides_the_order(seed: int):
    def order() -> list[str]:
        part, world = _Part(), World(seed)
        for name in "abc":
            bound = lambda actor, name=name: [  # noqa: E731
                Bound(world, actor, "part", part, lost=unreachable).do(f"{name}{n}") for n in range(4)
            ]
            world.start(name, bound)
        world.run()
        return part.done

    first = order()
    assert first == order()
    assert sorted(first) == sorted(f"{name}{n}" for name in "abc" for n in range(4))
