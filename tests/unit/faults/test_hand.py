"""The worker of the lab: what it can do that nobody can do from outside."""

from __future__ import annotations

import subprocess
import sys

_JUMPS = """
import os, signal
from datetime import UTC, datetime
from lockstep.faults import hand
from lockstep.kernel.clock import SystemClock

hand._let_the_clock_jump()
clock, began = SystemClock(), SystemClock().monotonic()
for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2, signal.SIGUSR2):
    os.kill(os.getpid(), number)
    print(round((clock.now() - datetime.now(UTC)).total_seconds() / 3600), clock.monotonic() - began < 60)
"""


def test_the_wall_clock_jumps_both_ways_and_durations_do_not():
    done = subprocess.run([sys.executable, "-c", _JUMPS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["2 True", "4 True", "2 True", "0 True", "-2 True"]
