"""The few error types that everything raises, each with the words a person needs.

What belongs here: the types that callers branch on (retry, stop, give way, refuse). What does not: errors of one
pipeline, which subclass these beside the code that raises them.
"""

from __future__ import annotations

from collections.abc import Sequence


class LockstepError(Exception):
    """An expected failure: what happened, to which unit, and what to do next."""

    def __init__(self, what: str, *, unit: str | None = None, next_step: str | None = None) -> None:
        self.what = what
        self.unit = unit
        self.next_step = next_step
        super().__init__(what)

    def __str__(self) -> str:
        where = f"{self.unit}: " if self.unit else ""
        then = f" Next: {self.next_step}" if self.next_step else ""
        return f"{where}{self.what}{then}"


class Transient(LockstepError):
    """The same call may succeed later; nothing about the unit itself is wrong."""

    def __init__(
        self,
        what: str,
        *,
        unit: str | None = None,
        next_step: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(what, unit=unit, next_step=next_step)
        self.retry_after = retry_after


class Terminal(LockstepError):
    """Repeating the call cannot help: the unit stops here until a person or new data changes it."""


class LostClaim(LockstepError):
    """A newer attempt owns the unit. The loser stops at once; it has changed nothing."""


class InvalidInput(LockstepError):
    """The caller's input is refused and nothing was changed. Every problem is listed, not only the first."""

    def __init__(
        self,
        what: str,
        *,
        unit: str | None = None,
        next_step: str | None = None,
        problems: Sequence[str] = (),
    ) -> None:
        super().__init__(what, unit=unit, next_step=next_step)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        return f"{super().__str__()}{lines}"
