"""What a victim meets at a crash point: it dies, it fails, or it sleeps while somebody else does its work.

What belongs here: arming a point and telling what came of it. What does not: what must hold afterwards, which only the
test of that package knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.kernel.crash import CrashInjected, armed, hanging_by
from lockstep.kernel.errors import LockstepError

DIES, FAILS, HANGS = "dies", "fails", "hangs"
MODES = (DIES, FAILS, HANGS)
_CHARGES = {DIES: "raise", FAILS: "error", HANGS: "hang"}


@dataclass
class Met:
    """What came of it. An error that is none of the product's own is not caught: it is a fault of the code."""

    victim: BaseException | None = None
    rival: BaseException | None = None


def meet(
    point: str,
    mode: str,
    victim: Callable[[], object],
    rival: Callable[[], object] | None = None,
    *,
    nth: int = 1,
    blocked_after: float = 2.0,
) -> Met:
    """Let the victim meet its fate at the nth pass of the point.

    Args:
        point: The crash point.
        mode: One of `MODES`.
        victim: What passes the point.
        rival: What another process does while the victim hangs there: it takes over whatever it may. None: nothing.
        nth: At which pass.
        blocked_after: Seconds for the rival. Where the victim holds locks the rival waits for it; after this time the
            victim wakes up first, as it would if its pause ended.
    """
    met = Met()

    def work() -> None:
        try:
            if rival is not None:
                rival()
        except BaseException as error:
            met.rival = error

    thread = threading.Thread(target=work, name=f"rival at {point}", daemon=True)

    def sleep(seconds: float) -> None:
        thread.start()
        thread.join(blocked_after)

    with armed(point, _CHARGES[mode], nth=nth) as charge, hanging_by(sleep):
        try:
            victim()
        except (CrashInjected, LockstepError) as error:
            met.victim = error
    if mode == HANGS and charge.fired:
        thread.join(120)
        assert not thread.is_alive(), f"{point}: the rival waits for somebody who is gone"
    assert charge.fired, f"{point} is not reached"
    assert isinstance(met.victim, CrashInjected) == (mode == DIES)
    if met.rival is not None and not isinstance(met.rival, LockstepError):
        raise met.rival
    return met
