"""In words: why a pipeline is not running, and what would make it run. Pure; no I/O.

What belongs here: sentences about an execution. What does not: how they are printed or sent.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from lockstep.readiness import timing
from lockstep.readiness.model import Execution, Key, Plan, RunStatus, TraitPlan, TraitResult, TraitStatus

OVERDUE = timedelta(minutes=2)


def explain(plan: Plan, key: Key, state: Execution | None, now: datetime) -> list[str]:
    """Sentences, the most important first."""
    if state is None:
        return _not_opened(plan, key, now)
    lines = [*_status(state, now), *(["This is a dry run: nothing is started."] if state.dry_run else [])]
    if state.status is RunStatus.PENDING:
        lines += _waiting(state, now)
    lines += _deadlines(state, now)
    if state.history:
        last = state.history[-1]
        ended = f"{last.failure.category}: {last.failure.message}" if last.failure else "without a failure"
        lines.append(f"The last try ({last.attempt} of generation {last.generation}) ended {last.status}, {ended}.")
    return lines


def _not_opened(plan: Plan, key: Key, now: datetime) -> list[str]:
    schedule = plan.schedule(key.schedule)
    if schedule is None:
        names = ", ".join(known.name for known in plan.schedules)
        return [f"{plan.pipeline} has no schedule {key.schedule}; it has {names}."]
    if plan.exclusions.excludes(key.date):
        following = timing.next_activation(plan, schedule, now)
        then = f" The next date is {following.date}." if following else " No date in sight is allowed."
        return [f"{key.date} is excluded by its calendar, so it does not run.{then}"]
    starts = timing.activation(schedule, key.date)
    if now < starts:
        return [f"{key} becomes active at {_at(starts)}, {_in(starts - now)} from now. Nothing is looked at before."]
    if not plan.watched:
        return [f"{key} is not watched (watch.enabled is false). A marker or `lockstep readiness run` starts it."]
    return [
        f"{key} is active since {_at(starts)} and nobody has opened it.",
        "Either no driver runs (is the readiness sensor awake?), or the date is older than the driver looks back:"
        " then use backfill.",
    ]


def _status(state: Execution, now: datetime) -> list[str]:
    key, run = state.key, f"run {state.run_id}, try {state.attempt} of {state.plan.retry.max_attempts}"
    if state.status is RunStatus.COMPLETED:
        return [
            f"{key} has completed ({run}). It does not run again by itself; {_again(key)} does it.",
            *_next(state, now),
        ]
    if state.status is RunStatus.COMPLETED_MONITORING:
        return [f"{key} has completed ({run}) and is watched for drift until {_at(state.monitor_until)}."]
    if state.status.is_terminal:
        return _ended_badly(state, run)
    if state.status is RunStatus.PENDING:
        return [f"{key} is waiting ({run})."]
    stopping = " It is being stopped." if state.cancel else ""
    doing = "being started" if state.status is RunStatus.TRIGGERING else "running"
    heard = f", last heard of {_in(now - state.known_at)} ago" if state.known_at else ""
    return [f"{key} is {doing} ({run}){heard}.{stopping}"]


def _ended_badly(state: Execution, run: str) -> list[str]:
    key = state.key
    if state.status is RunStatus.FAILED:
        why = f"{state.failure.category}: {state.failure.message}" if state.failure else "for no recorded reason"
        left = "No try is left" if state.attempt >= state.plan.retry.max_attempts else "Such a failure is not retried"
        return [f"{key} has failed ({run}), {why}.", f"{left}: repair it, then {_again(key)}."]
    return [f"{key} was cancelled. {_again(key)} starts it again."]


def _again(key: Key) -> str:
    words = f"lockstep readiness rerun {key.pipeline} --date {key.date} --schedule {key.schedule} --reason …"
    return f"`{words}`"


def _next(state: Execution, now: datetime) -> list[str]:
    found = [timing.next_activation(state.plan, schedule, now) for schedule in state.plan.schedules]
    coming = [
        (timing.activation(schedule, key.date), key)
        for schedule, key in zip(state.plan.schedules, found, strict=True)
        if key
    ]
    if not coming or not state.plan.watched:
        return []
    moment, key = min(coming)
    return [f"The next one is {key}, at {_at(moment)}."]


def _waiting(state: Execution, now: datetime) -> list[str]:
    if now < state.started_at and state.failure is None and not state.history:
        return [f"Its time comes at {_at(state.started_at)}, in {_in(state.started_at - now)}."]
    if now < state.started_at:
        why = f" after {state.failure.category}: {state.failure.message}" if state.failure else ""
        return [f"The next try begins at {_at(state.started_at)}, in {_in(state.started_at - now)}{why}."]
    if state.readiness is None:
        return ["Its traits have not been looked at yet; the next tick does."]
    required = {trait.type: trait for trait in state.plan.traits if trait.required}
    blocking = [trait for trait in state.readiness.traits if trait.status is not TraitStatus.PASS]
    lines = [_trait(trait, required[trait.trait], state) for trait in blocking if trait.trait in required]
    due = state.next_at or now
    if due > now:
        lines.append(f"It is looked at again in {_in(due - now)}.")
    elif now - due > OVERDUE:
        lines.append(f"It should have been looked at {_in(now - due)} ago: is the readiness sensor awake?")
    return lines


def _trait(result: TraitResult, trait: TraitPlan, state: Execution) -> str:
    words = f" ({result.reason})" if result.reason else ""
    key = state.key
    command = f"lockstep readiness push {key.pipeline} {trait.type} PASS --date {key.date} --schedule {key.schedule}"
    pushed = f"`{command}` says so by hand"
    if result.status is TraitStatus.FAIL:
        return f"{trait.type} says not yet{words}. It runs when this passes; {pushed}."
    if result.status is TraitStatus.ERROR:
        broken = f"{trait.type} could not be evaluated{words}, {result.category}"
        return f"{broken}. Repair the evaluator {trait.evaluator}, or {pushed}."
    if trait.evaluator is None:
        return f"{trait.type} waits for a push: nobody has said PASS for it, or it has expired; {pushed}."
    return f"{trait.type} has no valid answer{words}."


def _deadlines(state: Execution, now: datetime) -> list[str]:
    lines = []
    for name, deadline in (("evaluation", state.deadlines.evaluation), ("completion", state.deadlines.completion)):
        if deadline is None or state.status.is_terminal or state.status.is_success:
            continue
        if name == "evaluation" and state.status is not RunStatus.PENDING:
            continue
        lines.append(
            f"The {name} deadline passed {_in(now - deadline)} ago."
            if now > deadline
            else f"The {name} deadline is {_at(deadline)}, in {_in(deadline - now)}."
        )
    return lines


def _at(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC" if moment else "an unknown time"


def _in(length: timedelta) -> str:
    minutes, seconds = divmod(max(0, int(length.total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
