"""The alert of a window that failed: what people are told, and what makes it one alert and not many. Pure.

What belongs here: words and identity. What does not: delivery (lockstep/readiness/alerts.py) and when it is raised
(worker.py).
"""

from __future__ import annotations

from datetime import datetime

from lockstep.kernel.errors import LockstepError
from lockstep.readiness.model import Alert, Key, Level
from lockstep.windows.ledger import redacted
from lockstep.windows.model import Window

FAILED = "WINDOW_FAILED"


def window_failed(window: Window, fence: int, error: LockstepError, now: datetime) -> Alert:
    """One alert per failed attempt: the fence is part of its identity, so a retry that fails again is heard again.

    The error is redacted as in the queue row: rows of a vault do not belong into a chat.
    """
    key = Key(f"windows-{window.vault.lower()}", window.stop.date(), f"{window.kind}-{window.stop:%H%M}")
    details = {"vault": window.vault, "stop": window.stoptime, "kind": str(window.kind), "fence": fence}
    words = f"{window} could not be applied and its lane stops: {redacted(error.what)}"
    return Alert(key, f"{FAILED}-{fence}", Level.ERROR, words, now, details)
