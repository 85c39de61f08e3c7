"""What every trigger promises, and the table of the triggers that a deployment has.

What belongs here: the protocol and its honesty about unknown outcomes. What does not: any service's wire format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from lockstep.kernel.logs import get_logger
from lockstep.readiness.model import (
    Category,
    Execution,
    Key,
    Polled,
    PollOutcome,
    Started,
    StartFailed,
    StartUnknown,
)
from lockstep.readiness.safety import fill_in

_log = get_logger(__name__)
_HOUR = re.compile(r"h([01]\d|2[0-3])")

StartAnswer = Started | StartFailed | StartUnknown


class Job(NamedTuple):
    """What a trigger is asked to run. `token` is the same for every repetition of this try."""

    key: Key
    token: str
    attempt: int
    options: Mapping[str, Any]
    timeout: int
    resume: bool = False


class Trigger(Protocol):
    """A place where jobs run."""

    def start(self, job: Job) -> StartAnswer:
        """Start the job once per token. `StartFailed` only if it certainly does not run."""
        ...

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """How it is doing. What cannot be read, or is no known state, is UNKNOWN."""
        ...

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Ask it to stop; True if it is known to have stopped."""
        ...


class Triggers:
    """The triggers of a deployment by type. Whatever one raises becomes an answer; nothing escapes to the driver."""

    def __init__(self, by_type: Mapping[str, Trigger]) -> None:
        self._by_type = {"gate": Gate(), **by_type}

    def start(self, state: Execution, *, resume: bool) -> StartAnswer:
        """Start the current try of an execution."""
        trigger = self._trigger(state)
        if trigger is None:
            kind = state.plan.trigger.type if state.plan.trigger else "none"
            return StartFailed(state.run_id, Category.PERMANENT, f"{kind} triggers are not enabled here")
        try:
            return trigger.start(job_of(state, resume=resume))
        except Exception as error:  # the request may have been sent: that is all anybody knows
            _log.warning("start of unknown outcome", execution=str(state.key), error=repr(error))
            return StartUnknown(state.run_id, f"{type(error).__name__}: {error}"[:300])

    def status(self, state: Execution, run_id: str, handle: Mapping[str, Any]) -> Polled:
        """Ask after a run; a hiccup is not a failure."""
        trigger = self._trigger(state)
        if trigger is None:
            return Polled(run_id, PollOutcome.UNKNOWN, message="its trigger is not enabled here")
        try:
            return trigger.status(job_of(state)._replace(token=run_id), handle)
        except Exception as error:
            return Polled(run_id, PollOutcome.UNKNOWN, message=f"{type(error).__name__}: {error}"[:300])

    def cancel(self, state: Execution, run_id: str, handle: Mapping[str, Any]) -> bool:
        """Stop a run; False if it is not known to have stopped."""
        trigger = self._trigger(state)
        if trigger is None:
            return False
        try:
            return trigger.cancel(job_of(state)._replace(token=run_id), handle)
        except Exception as error:
            _log.warning("cancel of unknown outcome", execution=str(state.key), error=repr(error))
            return False

    def _trigger(self, state: Execution) -> Trigger | None:
        return self._by_type.get(state.plan.trigger.type) if state.plan.trigger else None


def job_of(state: Execution, *, resume: bool = False) -> Job:
    """The job of an execution's current try, template variables filled in."""
    options: Mapping[str, Any] = state.plan.trigger.options if state.plan.trigger else {}
    hour = _HOUR.fullmatch(state.key.schedule)
    variables = {
        "date": state.key.date.isoformat(),
        "hour": hour[1] if hour else "",
        "scheduleID": state.key.schedule,
        "pipelineID": state.key.pipeline,
        "runID": state.run_id,
        "attempt": str(state.attempt),
    }
    timeout = state.plan.trigger.timeout if state.plan.trigger else 30
    return Job(state.key, state.run_id, state.attempt, fill_in(options, variables), timeout, resume)


class Gate:
    """No job: being ready is the result."""

    def start(self, job: Job) -> StartAnswer:
        """Done at once."""
        return Started(job.token, {}, finished=True)

    def status(self, job: Job, handle: Mapping[str, Any]) -> Polled:
        """There was nothing to fail."""
        return Polled(job.token, PollOutcome.SUCCEEDED)

    def cancel(self, job: Job, handle: Mapping[str, Any]) -> bool:
        """Nothing runs."""
        return True
