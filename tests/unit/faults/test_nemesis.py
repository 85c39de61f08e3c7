"""The nemesis does what it counts, undoes what it did, and touches only its own processes."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.faults.nemesis import Child, Nemesis
from lockstep.faults.proxy import Dose, Toxic, ToxicProxy
from lockstep.kernel.errors import Transient

PATIENCE_SECONDS = 10


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log", 0.2)
    made.revive()
    yield made
    made.end()


def _status(child: Child) -> str:
    assert child.process is not None
    return psutil.Process(child.process.pid).status()


def _wait_for(child: Child, *states: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _status(child) not in states:
        assert time.monotonic() < deadline, _status(child)
        time.sleep(0.01)


def _nemesis(child: Child, **more: object) -> Nemesis:
    proxy = ToxicProxy("door", ("127.0.0.1", 1))
    return Nemesis(1, [child], [proxy], lambda part: None, ["postgres"], more.pop("deeds", {}))  # type: ignore[arg-type]


def test_a_child_that_was_ended_stays_so_when_the_nemesis_calms_down(child: Child):
    """Guards a lab that was interrupted: the nemesis undid its deeds after the end, and left a process behind."""
    child.end()
    _nemesis(child).calm()
    assert child.process is not None
    assert child.process.poll() is not None
    assert child.starts == 1


def test_a_killed_child_is_started_again(child: Child):
    assert not child.revive(), "it runs already"
    assert child.send(signal.SIGKILL)
    assert child.process is not None
    child.process.wait(PATIENCE_SECONDS)
    assert not child.send(signal.SIGKILL), "a dead child takes no signal"
    assert child.revive()
    assert child.starts == 2


def test_a_paused_child_wakes_up_by_itself(child: Child):
    nemesis = _nemesis(child)
    nemesis._pause(child)
    _wait_for(child, psutil.STATUS_STOPPED)
    _wait_for(child, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    assert nemesis.counts == {"pause beyond the lease (sleeper)": 1}


def test_calm_undoes_everything(child: Child):
    child.pause_seconds = 600
    nemesis = _nemesis(child)
    nemesis._pause(child)
    _wait_for(child, psutil.STATUS_STOPPED)
    nemesis.proxies[0].dose = Dose(Toxic.RESET)
    nemesis.calm()
    _wait_for(child, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
    assert nemesis.proxies[0].dose is None


def test_a_deed_that_fails_is_not_counted_and_stops_nothing(child: Child):
    def fail(chance: random.Random) -> bool:
        raise Transient("not now")

    nemesis = _nemesis(child, deeds={"a deed": fail})
    assert nemesis._do("a deed", random.Random(1)) is False


def test_it_stops_when_it_is_told_and_leaves_everybody_alive(child: Child):
    nemesis = _nemesis(child, deeds={"nothing": lambda chance: True})
    thread = threading.Thread(target=nemesis.work, daemon=True)
    thread.start()
    time.sleep(0.1)
    nemesis.over.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    _wait_for(child, psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)
