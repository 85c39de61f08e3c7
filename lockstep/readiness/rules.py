"""The reducer: `step(state, event, now)` says what an execution becomes and what must be done about it.

Pure and total: no clock, no id source, no I/O. Facts among the effects are written together with the state; actions
are done afterwards and answer with events. What does not belong here: the order of I/O (worker.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from lockstep.readiness import timing, verdict
from lockstep.readiness.model import (
    EXECUTION_MOVES,
    NO_DEADLINES,
    RUN_MOVES,
    Alert,
    Callback,
    Cancel,
    CancelAnswered,
    CancelRequested,
    CancelRun,
    Category,
    Deadlines,
    DeliverAlerts,
    Delivered,
    Effect,
    Emit,
    Evaluate,
    Evaluated,
    Event,
    Execution,
    Failure,
    IllegalTransition,
    Key,
    LateData,
    Level,
    MarkDownstream,
    Plan,
    Polled,
    PollOutcome,
    PollRun,
    ReadinessStatus,
    Reason,
    RerunRecorded,
    RerunRequested,
    RunMoved,
    RunStatus,
    SchedulePlan,
    Started,
    StartFailed,
    StartRun,
    StartUnknown,
    Step,
    Tick,
    Try,
    Woken,
)

ERRORS_BEFORE_ALERT: Final = 3
UNKNOWN_POLLS_BEFORE_ALERT: Final = 5
CANCEL_TRIES: Final = 5
ALERT_LOOKBACK: Final = timedelta(minutes=15)
LONGEST_AHEAD: Final = timedelta(days=2)
HISTORY_LIMIT: Final = 50
CLOCK_TOLERANCE: Final = timedelta(minutes=5)

_NAMESPACE: Final = uuid.UUID("6f1c3a52-8b0e-5d57-9a4b-2f6c7f0e9d11")

_PENDING, _TRIGGERING, _RUNNING = RunStatus.PENDING, RunStatus.TRIGGERING, RunStatus.RUNNING
_COMPLETED, _MONITORING = RunStatus.COMPLETED, RunStatus.COMPLETED_MONITORING
_FAILED, _CANCELLED = RunStatus.FAILED, RunStatus.CANCELLED

Effects = list[Effect]


def run_id_of(key: Key, generation: int, attempt: int) -> str:
    """The id of one try: the same for whoever computes it, so a repeated step cannot make a second run."""
    return str(uuid.uuid5(_NAMESPACE, f"{key}#{generation}#{attempt}"))


def open_execution(
    plan: Plan, key: Key, now: datetime, reason: Reason = Reason.SCHEDULE, not_before: datetime | None = None
) -> Step:
    """A new execution, waiting to be ready. Deadlines long past are not promised any more: no flood of old alerts.

    Any past date may be opened. A coming one waits for its activation, unless a person wants it now.
    """
    schedule = _openable(plan, key, now)
    promised = timing.deadlines(plan, schedule, key.date)
    fresh = reason is not Reason.BACKFILL
    active = now if reason is Reason.MANUAL else timing.activation(schedule, key.date)
    start = max(now, active, not_before or now)
    state = Execution(
        plan=plan,
        key=key,
        opened_at=now,
        started_at=start,
        run_id=run_id_of(key, 0, 1),
        reason=reason,
        next_at=start,
        dry_run=plan.dry_run,
        deadlines=_forward_only(promised, now) if fresh else NO_DEADLINES,
        updated_at=now,
    )
    return Step(state, (Emit("EXECUTION_OPENED", f"opened by {reason.value}", state.run_id),))


def _openable(plan: Plan, key: Key, now: datetime) -> SchedulePlan:
    """The execution's schedule, or why it cannot be opened."""
    schedule = plan.schedule(key.schedule)
    if schedule is None:
        raise IllegalTransition(
            f"there is no schedule {key.schedule}.",
            unit=str(key),
            next_step=f"use one of {', '.join(known.name for known in plan.schedules)}.",
        )
    if plan.exclusions.excludes(key.date):
        raise IllegalTransition(
            "the date is excluded by the pipeline's calendar.", unit=str(key), next_step="choose another date."
        )
    active = timing.activation(schedule, key.date)
    if active > now + LONGEST_AHEAD:
        raise IllegalTransition(
            f"its time comes only at {active:%Y-%m-%d %H:%M} UTC.",
            unit=str(key),
            next_step=f"ask again at most {LONGEST_AHEAD.days} days before.",
        )
    return schedule


def _forward_only(promised: Deadlines, now: datetime) -> Deadlines:
    oldest = now - ALERT_LOOKBACK
    evaluation, completion = promised.evaluation, promised.completion
    keep_evaluation = evaluation is not None and evaluation >= oldest
    keep_completion = completion is not None and completion >= oldest
    return Deadlines(
        evaluation if keep_evaluation else None,
        promised.evaluation_risk if keep_evaluation else None,
        completion if keep_completion else None,
        promised.completion_risk if keep_completion else None,
    )


def step(state: Execution, event: Event, now: datetime) -> Step:
    """Apply one event.

    Raises:
        IllegalTransition: A request (cancel, rerun, callback) does not fit the state. Answers that come too late, for
            a try that is over, are not requests: they change nothing.
    """
    effects: Effects = []
    after = _HANDLERS[type(event)](state, event, now, effects)
    if after is state:
        return Step(state, tuple(effects))
    if after.status not in EXECUTION_MOVES[state.status]:
        raise IllegalTransition(f"{state.status} cannot become {after.status}.", unit=str(state.key))
    if after.outbox and after.outbox is not state.outbox:
        effects.append(DeliverAlerts(after.outbox))
    return Step(after.changed(updated_at=now), tuple(effects))


def watch(state: Execution, now: datetime) -> Step:
    """Only the deadlines: for a watchdog that must not start, poll or evaluate anything in the driver's place."""
    effects: Effects = []
    after = state if state.status.is_terminal or state.status is _MONITORING else _watch_deadlines(state, now, effects)
    if after is state:
        return Step(state, ())
    effects.append(DeliverAlerts(after.outbox))
    return Step(after, tuple(effects))


# --- time ------------------------------------------------------------------------------------------------------------


def _tick(state: Execution, _: Tick, now: datetime, out: Effects) -> Execution:
    if not state.status.is_terminal and _waits_long(state, now + CLOCK_TOLERANCE):
        state = _in_our_time(state, now, out)
    status = state.status
    if status is _PENDING:
        return _tick_pending(state, now, out)
    if status is _RUNNING:
        return _tick_running(state, now, out)
    if status is _TRIGGERING:
        return _tick_triggering(state, now, out)
    if status is _MONITORING:
        return _tick_monitoring(state, now, out)
    if state.outbox:
        out.append(DeliverAlerts(state.outbox))
    return state


def _waits_long(state: Execution, soon: datetime) -> bool:
    """Few do, so that only they are looked at closely."""
    return (
        state.started_at > soon
        or (state.next_at is not None and state.next_at > soon)
        or (state.lease_until is not None and state.lease_until > soon)
        or (state.monitor_until is not None and state.monitor_until > soon)
    )


def _in_our_time(state: Execution, now: datetime, out: Effects) -> Execution:
    """No wait is longer than the plan says: one that is was written by a clock that ran ahead, and is cut to size."""
    plan, moved = state.plan, dict[str, datetime]()

    def believe(field: str, latest: datetime) -> datetime:
        moment: datetime | None = getattr(state, field)
        if moment is None or moment <= latest + CLOCK_TOLERANCE:
            return moment or latest
        moved[field] = latest
        return latest

    if state.status is _PENDING:
        start = state.started_at
        if state.attempt > 1:
            start = believe("started_at", now + plan.retry.backoff(state.attempt - 1))
        elif state.generation:
            start = believe("started_at", now)
        elif state.opened_at > now + CLOCK_TOLERANCE:
            start = believe("started_at", max(now, _activation(state) or now))
        believe("next_at", max(start, now + plan.interval))
    elif state.status is _TRIGGERING:
        believe("lease_until", now + max(plan.start_lease, plan.poll_interval))
    elif state.status is _RUNNING:
        believe("next_at", now + plan.poll_interval)
    else:
        believe("next_at", now + plan.interval)
        believe("monitor_until", now + plan.monitor.duration)
    if not moved:
        return state
    out.append(Emit("CLOCKS_DISAGREE", f"{', '.join(moved)}: later than the plan allows", state.run_id))
    return state.changed(**moved)


def _activation(state: Execution) -> datetime | None:
    schedule = state.plan.schedule(state.key.schedule)
    return None if schedule is None else timing.activation(schedule, state.key.date)


def _tick_pending(state: Execution, now: datetime, out: Effects) -> Execution:
    state = _watch_deadlines(state, now, out)
    limit = state.plan.sla.validation_timeout
    if limit is not None and now >= state.started_at + limit:
        state = _alert(state, "validation_timeout", Level.ERROR, "validation timed out", now, out, per_try=True)
        return _fail(state, Failure(Category.TIMEOUT, "validation timed out"), now, out)
    if state.next_at is None or now >= state.next_at:
        out.append(Evaluate(state.run_id))
    return _redeliver(state, out)


def _tick_triggering(state: Execution, now: datetime, out: Effects) -> Execution:
    state = _watch_deadlines(state, now, out)
    if state.lease_until is None or now < state.lease_until:
        return _redeliver(state, out)
    # The starter died, or its answer is lost.
    if state.plan.trigger is None or not state.plan.trigger.resumable:
        return _unknown_start(state, "its starter died", now, out)
    out.append(Emit("TRIGGER_REPEATED", "the start is repeated with the same token", state.run_id))
    out.append(StartRun(state.run_id, resume=True))
    return state.changed(lease_until=now + state.plan.start_lease, in_doubt=True)


def _tick_running(state: Execution, now: datetime, out: Effects) -> Execution:
    state = _watch_deadlines(state, now, out)
    if state.next_at is None or now >= state.next_at:
        ask = CancelRun if state.cancel is not None else PollRun
        out.append(ask(state.run_id, state.handle))
    return _redeliver(state, out)


def _tick_monitoring(state: Execution, now: datetime, out: Effects) -> Execution:
    if state.monitor_until is not None and now >= state.monitor_until:
        _move_run(state, (_MONITORING, _COMPLETED), out)
        out.append(Emit("MONITORING_COMPLETED", "the watch after success has ended", state.run_id))
        return _redeliver(state.changed(status=_COMPLETED, next_at=None), out)
    if state.next_at is None or now >= state.next_at:
        out.append(Evaluate(state.run_id))
    return _redeliver(state, out)


def _watch_deadlines(state: Execution, now: datetime, out: Effects) -> Execution:
    """SLA of the original generation only: a rerun of an old day has nothing left to promise."""
    promised = state.deadlines
    if promised is NO_DEADLINES or state.generation:
        return state
    if state.status is _PENDING:
        state = _watch(state, "evaluation", promised.evaluation, promised.evaluation_risk, now, out)
        if promised.completion == promised.evaluation:
            return state  # one deadline for both: while nothing runs, one alert says it all
    return _watch(state, "completion", promised.completion, promised.completion_risk, now, out)


def _watch(
    state: Execution, what: str, deadline: datetime | None, risk: datetime | None, now: datetime, out: Effects
) -> Execution:
    if deadline is None or (now <= deadline and (risk is None or now <= risk)):
        return state
    blocking = ", ".join(state.readiness.blocking) if state.readiness else ""
    why = f"; waiting for {blocking}" if blocking and state.status is _PENDING else ""
    if now > deadline:
        kind, level, words = f"{what}_sla_breach", Level.ERROR, "passed"
    elif f"{what}_sla_breach" in state.alerted:
        return state
    else:
        kind, level, words = f"{what}_sla_at_risk", Level.WARNING, "is near"
    if kind in state.alerted:
        return state
    out.append(Emit("SLA_BREACHED" if now > deadline else "SLA_AT_RISK", what, state.run_id))
    message = f"the {what} deadline {deadline:%Y-%m-%d %H:%M} UTC {words}{why}"
    return _alert(state, kind, level, message, now, out)


def _redeliver(state: Execution, out: Effects) -> Execution:
    """Alerts that a dead driver left behind. `step` adds them itself when this step raised new ones."""
    if state.outbox and not any(isinstance(effect, Emit) and effect.kind == "ALERT" for effect in out):
        out.append(DeliverAlerts(state.outbox))
    return state


def _woken(state: Execution, event: Woken, now: datetime, out: Effects) -> Execution:
    if state.status is not _PENDING:
        return state
    when = max(now, event.not_before or now)
    if state.started_at > now:  # a retry waits out its backoff, whoever knocks
        return state
    if state.next_at is not None and state.next_at <= when:
        return state
    return state.changed(next_at=when)


# --- readiness -------------------------------------------------------------------------------------------------------


def _evaluated(state: Execution, event: Evaluated, now: datetime, out: Effects) -> Execution:
    if event.run_id != state.run_id:
        return state  # answers for a try that is over
    if state.status is _MONITORING:
        return _compare(state, event, now, out)
    if state.status is not _PENDING or now < state.started_at:
        return state
    readiness = verdict.judge(state.plan, event.results, now)
    if state.readiness is None or readiness.signature != state.readiness.signature:
        details = {"status": readiness.status.value, "blocking": list(readiness.blocking)}
        out.append(Emit("READINESS_CHECKED", readiness.status.value, state.run_id, details))
    state = _count_errors(state.changed(readiness=readiness), now, out)
    limit = state.plan.sla.validation_timeout
    if limit is not None and now >= state.started_at + limit:
        return _tick_pending(state, now, out)  # an evaluator that is slower than the hard stop does not outrun it
    if readiness.status is ReadinessStatus.READY:
        return _claim(state, now, out)
    return _watch_deadlines(state.changed(next_at=now + state.plan.interval), now, out)


def _count_errors(state: Execution, now: datetime, out: Effects) -> Execution:
    readiness = state.readiness
    if readiness is None or readiness.status is not ReadinessStatus.ERROR:
        return state.changed(evaluator_errors=0) if state.evaluator_errors else state
    state = state.changed(evaluator_errors=state.evaluator_errors + 1)
    if state.evaluator_errors < ERRORS_BEFORE_ALERT and not verdict.is_hopeless(readiness):
        return state
    broken = "; ".join(f"{trait.trait}: {trait.reason}" for trait in readiness.traits if trait.status == "ERROR")
    return _alert(state, "evaluator_error", Level.ERROR, f"evaluators cannot answer: {broken}"[:500], now, out)


def _claim(state: Execution, now: datetime, out: Effects) -> Execution:
    if state.dry_run:
        out.append(Emit("DRY_RUN_WOULD_TRIGGER", "ready; nothing is started", state.run_id))
        return _succeed(state, now, out)
    _move_run(state, (_PENDING, _TRIGGERING), out, created=True)
    out.append(StartRun(state.run_id))
    return state.changed(
        status=_TRIGGERING,
        lease_until=now + state.plan.start_lease,
        in_doubt=False,
        triggered_at=now,
        next_at=None,
        failure=None,
    )


# --- the job ---------------------------------------------------------------------------------------------------------


def _started(state: Execution, event: Started, now: datetime, out: Effects) -> Execution:
    if event.run_id != state.run_id or state.status is not _TRIGGERING:
        if not _did_its_work(state, event.run_id):
            # The run was given up while its start was under way: what was started must not stay alive unseen.
            out.append(Emit("TRIGGER_LATE", "a start came back after its run was given up", event.run_id))
            out.append(CancelRun(event.run_id, event.handle))
        return state
    out.append(Emit("TRIGGER_FIRED", "", state.run_id, dict(event.handle)))
    state = state.changed(handle=event.handle, polls=0, unknown_polls=0, known_at=now, lease_until=None)
    if event.finished:
        return _finish(state, (_TRIGGERING, _RUNNING), now, out)
    _move_run(state, (_TRIGGERING, _RUNNING), out, handle=event.handle)
    wait = timedelta(0) if state.cancel else state.plan.poll_interval
    return state.changed(status=_RUNNING, next_at=now + wait)


def _did_its_work(state: Execution, run_id: str) -> bool:
    """Whether the run is alive in this execution or ended well there: then a late word about it needs no action."""
    if run_id == state.run_id:
        return state.status not in (_FAILED, _CANCELLED)
    return any(line.run_id == run_id and line.status is _COMPLETED for line in state.history)


def _start_failed(state: Execution, event: StartFailed, now: datetime, out: Effects) -> Execution:
    if event.run_id != state.run_id or state.status is not _TRIGGERING:
        return state
    if state.in_doubt:
        return _refused_in_doubt(state, event, now, out)
    out.append(Emit("TRIGGER_FAILED", event.message, state.run_id, {"category": event.category.value}))
    if state.cancel is not None:
        return _end_cancelled(state, (_TRIGGERING, _CANCELLED), now, out)
    return _fail(state, Failure(event.category, event.message), now, out)


def _refused_in_doubt(state: Execution, event: StartFailed, now: datetime, out: Effects) -> Execution:
    """This start did nothing, but another one of the same run may have: a new try could run beside it."""
    if event.category is Category.PERMANENT:
        return _unknown_start(state, event.message, now, out)
    out.append(Emit("TRIGGER_UNKNOWN", f"an earlier start may have worked; now: {event.message}", state.run_id))
    return state.changed(lease_until=now + state.plan.poll_interval)


def _start_unknown(state: Execution, event: StartUnknown, now: datetime, out: Effects) -> Execution:
    if event.run_id != state.run_id or state.status is not _TRIGGERING:
        return state
    out.append(Emit("TRIGGER_UNKNOWN", event.message, state.run_id))
    if state.plan.trigger is None or not state.plan.trigger.resumable:
        return _unknown_start(state, event.message, now, out)
    # Nobody knows whether it runs: repeat with the same token, soon but not at once.
    return state.changed(lease_until=now + state.plan.poll_interval, in_doubt=True)


def _unknown_start(state: Execution, why: str, now: datetime, out: Effects) -> Execution:
    message = f"nobody knows whether the job was started ({why}); look there before running it again"
    return _fail(state, Failure(Category.PERMANENT, message), now, out)


def _polled(state: Execution, event: Polled, now: datetime, out: Effects) -> Execution:
    if event.run_id != state.run_id or state.status is not _RUNNING:
        return state
    outcome = event.outcome
    if outcome is PollOutcome.SUCCEEDED:
        return _finish(state, (_RUNNING,), now, out)
    if outcome is PollOutcome.FAILED or outcome is PollOutcome.CANCELLED:
        return _job_ended_badly(state, event, now, out)
    state = state.changed(polls=state.polls + 1, next_at=now + state.plan.poll_interval)
    if outcome is PollOutcome.RUNNING:
        return _stop_overdue(state.changed(unknown_polls=0, known_at=now), now, out)
    state = state.changed(unknown_polls=state.unknown_polls + 1)
    if state.unknown_polls < UNKNOWN_POLLS_BEFORE_ALERT:
        return state
    message = f"the job's state is unknown for {state.unknown_polls} polls: {event.message}"
    state = _alert(state, "status_unknown", Level.WARNING, message[:500], now, out, per_try=True)
    return _stop_overdue(state, now, out)


def _stop_overdue(state: Execution, now: datetime, out: Effects) -> Execution:
    """Stop a job that runs too long. Only its own answer leads here: it may have ended well while nobody looked."""
    if state.cancel is not None or now < (state.triggered_at or state.started_at) + state.plan.run_timeout:
        return state
    state = _alert(state, "run_timeout", Level.ERROR, "the job takes longer than it may", now, out, per_try=True)
    out.append(CancelRun(state.run_id, state.handle))
    return state.changed(cancel=Cancel("it takes longer than it may", by_timeout=True))


def _job_ended_badly(state: Execution, event: Polled, now: datetime, out: Effects) -> Execution:
    if state.cancel is not None:
        return _after_cancel(state, now, out)
    if event.outcome is PollOutcome.CANCELLED:
        out.append(Emit("RUN_CANCELLED_OUTSIDE", event.message, state.run_id))
        return _end_cancelled(state, (_RUNNING, _CANCELLED), now, out)
    failure = Failure(event.category or Category.TRANSIENT, event.message or "the job failed")
    return _fail(state, failure, now, out)


def _callback(state: Execution, event: Callback, now: datetime, out: Effects) -> Execution:
    if event.run_id != state.run_id or not state.status.is_live:
        raise IllegalTransition(
            f"run {event.run_id} is not waiting for a report: the execution is {state.status}"
            + ("" if event.run_id == state.run_id else f" in run {state.run_id}")
            + ".",
            unit=str(state.key),
            next_step="read the run's state; an ended run keeps its outcome.",
        )
    out.append(Emit("CALLBACK_RECEIVED", "success" if event.success else "failed", state.run_id))
    path = (_TRIGGERING, _RUNNING) if state.status is _TRIGGERING else (_RUNNING,)
    if event.success:
        return _finish(state, path, now, out)
    if state.cancel is not None:
        return _after_cancel(state, now, out)
    return _fail(state, Failure(event.category or Category.TRANSIENT, event.message or "reported failed"), now, out)


def _finish(state: Execution, path: tuple[RunStatus, ...], now: datetime, out: Effects) -> Execution:
    """The job succeeded; `path` is where its run has been in this step."""
    end = _MONITORING if state.plan.monitor.enabled and not state.late_data else _COMPLETED
    _move_run(state, (*path, end), out, handle=state.handle)
    return _succeed(state, now, out)


def _succeed(state: Execution, now: datetime, out: Effects) -> Execution:
    if state.generation == 0:
        state = _watch(state, "completion", state.deadlines.completion, None, now, out)
    out.append(Emit("PIPELINE_COMPLETED", f"try {state.attempt}", state.run_id))
    _notify_downstream(state, now, out)
    monitored = state.plan.monitor.enabled and not state.late_data
    state = _remember(state, _COMPLETED, None, now)
    state = state.changed(
        status=_MONITORING if monitored else _COMPLETED,
        next_at=now if monitored else None,
        monitor_until=now + state.plan.monitor.duration if monitored else None,
        baseline=None,
        lease_until=None,
        cancel=None,
        failure=None,
    )
    state = _close_rerun(state, "COMPLETED", out)
    if monitored:
        out.append(Emit("MONITORING_STARTED", f"until {state.monitor_until:%Y-%m-%d %H:%M} UTC", state.run_id))
    if state.late_data:
        late = f"late-{run_id_of(state.key, state.generation, 0)}"
        return _spend(state.changed(late_data=False), Reason.LATE_DATA, late, "input arrived during the run", now, out)
    return state


def _notify_downstream(state: Execution, now: datetime, out: Effects) -> None:
    for place, pipeline in enumerate(state.plan.downstream):
        if state.dry_run:
            out.append(Emit("DRY_RUN_WOULD_CASCADE", pipeline, state.run_id))
            continue
        delay = state.plan.cascade_delay * place
        out.append(MarkDownstream(pipeline, now + delay if delay else None))


def _fail(state: Execution, failure: Failure, now: datetime, out: Effects) -> Execution:
    """The try is over. Another follows if the failure may heal and tries are left; attempts are counted only here."""
    if state.status.is_live:
        _move_run(state, (state.status, _FAILED), out, failure=failure)
    state = _remember(state, _FAILED, failure, now)
    retry = state.plan.retry
    if failure.category in retry.categories and state.attempt < retry.max_attempts:
        wait = retry.backoff(state.attempt)
        kind = "DRY_RUN_WOULD_RETRY" if state.dry_run else "RETRY_SCHEDULED"
        details = {"category": failure.category.value, "backoffSeconds": wait.total_seconds()}
        out.append(Emit(kind, failure.message, state.run_id, details))
        return _wait_again(state, state.generation, state.attempt + 1, now + wait).changed(failure=failure)
    out.append(Emit("PIPELINE_FAILED", failure.message, state.run_id, {"category": failure.category.value}))
    if failure.category in retry.categories:
        out.append(Emit("RETRY_EXHAUSTED", f"{state.attempt} tries", state.run_id))
    message = f"failed after try {state.attempt}: {failure.message}"
    state = _alert(state, "pipeline_failed", Level.ERROR, message[:500], now, out, per_try=True)
    state = state.changed(status=_FAILED, failure=failure, next_at=None, lease_until=None, cancel=None)
    return _close_rerun(state, "FAILED", out)


def _wait_again(state: Execution, generation: int, attempt: int, start: datetime) -> Execution:
    return state.changed(
        status=_PENDING,
        generation=generation,
        attempt=attempt,
        run_id=run_id_of(state.key, generation, attempt),
        started_at=start,
        next_at=start,
        triggered_at=None,
        lease_until=None,
        in_doubt=False,
        handle={},
        polls=0,
        unknown_polls=0,
        known_at=None,
        cancel=None,
        readiness=None,
        evaluator_errors=0,
        baseline=None,
        monitor_until=None,
    )


# --- after success ---------------------------------------------------------------------------------------------------


def _compare(state: Execution, event: Evaluated, now: datetime, out: Effects) -> Execution:
    rules = state.plan.monitor.rules
    if state.monitor_until is not None and now >= state.monitor_until:
        return _tick_monitoring(state, now, out)
    if state.baseline is None:
        baseline = verdict.baseline_of(rules, event.results)
        out.append(Emit("BASELINE_CAPTURED", "", state.run_id, baseline))
        if missing := verdict.missing_fields(rules, baseline):
            out.append(Emit("BASELINE_INCOMPLETE", ", ".join(missing), state.run_id))
            message = f"no baseline for {', '.join(missing)}: drift there cannot be seen"
            state = _alert(state, "baseline_incomplete", Level.WARNING, message, now, out)
        return state.changed(baseline=baseline, next_at=now + state.plan.interval)
    moved = verdict.drifts(rules, state.baseline, event.results)
    if not moved:
        return state.changed(next_at=now + state.plan.interval)
    words = "; ".join(f"{drift.trait}.{drift.field}: {drift.before!r} became {drift.after!r}" for drift in moved)
    out.append(Emit("MONITORING_DRIFT_DETECTED", words, state.run_id))
    state = _alert(state, "trait_drift", Level.WARNING, words[:500], now, out, per_try=True)
    rerun_id = f"drift-{run_id_of(state.key, state.generation, 0)}"
    return _spend(_end_monitoring(state, out), Reason.DRIFT, rerun_id, words, now, out)


def _end_monitoring(state: Execution, out: Effects) -> Execution:
    if state.status is not _MONITORING:
        return state
    _move_run(state, (_MONITORING, _COMPLETED), out)
    return state.changed(status=_COMPLETED, next_at=None, monitor_until=None)


def _late_data(state: Execution, event: LateData, now: datetime, out: Effects) -> Execution:
    if state.status is _PENDING or state.status in (_FAILED, _CANCELLED):
        return state  # the next try, if there is one, reads everything anyway
    if event.at is not None:
        if state.late_seen is not None and event.at <= state.late_seen:
            return state  # the same arrival, told again by a marker that was left behind or a stream read anew
        state = state.changed(late_seen=event.at)
    if state.status.is_live:
        if state.late_data:
            return state
        out.append(Emit("LATE_DATA_IN_FLIGHT", event.why, state.run_id))
        return state.changed(late_data=True)
    out.append(Emit("LATE_DATA_ARRIVAL", event.why, state.run_id))
    return _spend(_end_monitoring(state, out), Reason.LATE_DATA, event.rerun_id, event.why, now, out)


# --- reruns and cancel -----------------------------------------------------------------------------------------------


def _rerun_requested(state: Execution, event: RerunRequested, now: datetime, out: Effects) -> Execution:
    if event.rerun_id == state.rerun_id:
        return state  # the same request, delivered again
    if not state.status.is_terminal and state.status is not _MONITORING:
        raise IllegalTransition(
            f"the execution is {state.status}: a second run beside it would be a duplicate.",
            unit=str(state.key),
            next_step="wait for its end, or cancel it first.",
        )
    if state.plan.exclusions.excludes(state.key.date):
        raise IllegalTransition("the date is excluded by the pipeline's calendar.", unit=str(state.key))
    allowed, used = state.plan.budgets.allowed(event.reason), state.reruns.get(event.reason.value, 0)
    if used >= allowed:
        raise IllegalTransition(
            f"its budget of {allowed} {event.reason.value} reruns is used up.",
            unit=str(state.key),
            next_step="raise the budget in the pipeline's configuration.",
        )
    return _spend(_end_monitoring(state, out), event.reason, event.rerun_id, event.why, now, out)


def _spend(state: Execution, reason: Reason, rerun_id: str, why: str, now: datetime, out: Effects) -> Execution:
    """Start a further generation if the reason's own budget allows it; say so if it does not."""
    used = state.reruns.get(reason.value, 0)
    if used >= state.plan.budgets.allowed(reason):
        out.append(Emit("RERUN_REJECTED", f"the budget of {reason.value} reruns is used up", state.run_id))
        message = f"no {reason.value} rerun: {used} were made already"
        return _alert(state, f"rerun_cap_reached_{reason.value}", Level.WARNING, message, now, out)
    if state.dry_run:
        out.append(Emit("DRY_RUN_WOULD_RERUN", f"{reason.value}: {why}", state.run_id))
        return state.changed(reruns={**state.reruns, reason.value: used + 1})
    state = _wait_again(state, state.generation + 1, 1, now).changed(
        reason=reason, rerun_id=rerun_id, reruns={**state.reruns, reason.value: used + 1}, late_data=False, failure=None
    )
    out.append(RerunRecorded(rerun_id, reason, "PENDING", why, state.run_id))
    out.append(Emit("RERUN_ACCEPTED", f"{reason.value}: {why}", state.run_id, {"rerunId": rerun_id}))
    return state


def _close_rerun(state: Execution, status: str, out: Effects) -> Execution:
    if state.rerun_id is not None and state.generation:
        out.append(RerunRecorded(state.rerun_id, state.reason, status, "", state.run_id))
        out.append(Emit("RERUN_COMPLETED", status, state.run_id, {"rerunId": state.rerun_id}))
    return state


def _cancel_requested(state: Execution, event: CancelRequested, now: datetime, out: Effects) -> Execution:
    if state.status.is_terminal or state.status is _MONITORING:
        raise IllegalTransition(f"the execution is {state.status}: there is nothing left to stop.", unit=str(state.key))
    if state.cancel is not None:
        return state
    out.append(Emit("CANCEL_REQUESTED", event.why, state.run_id))
    if state.status is _PENDING:
        return _end_cancelled(state, (), now, out)
    # What runs must be seen to stop first; until then the execution still counts as live.
    state = state.changed(cancel=Cancel(event.why))
    if state.status is _RUNNING:
        out.append(CancelRun(state.run_id, state.handle))
        return state.changed(next_at=now + state.plan.poll_interval)
    return state


def _cancel_answered(state: Execution, event: CancelAnswered, now: datetime, out: Effects) -> Execution:
    if event.run_id != state.run_id or state.cancel is None or state.status is not _RUNNING:
        return state
    if event.stopped:
        return _after_cancel(state, now, out)
    cancel = state.cancel._replace(tries=state.cancel.tries + 1)
    if cancel.tries < CANCEL_TRIES:
        return state.changed(cancel=cancel, next_at=now + state.plan.poll_interval)
    message = "the job could not be seen to stop; look there before running it again"
    out.append(Emit("CANCEL_UNCONFIRMED", message, state.run_id))
    if cancel.by_timeout:
        return _fail(state, Failure(Category.PERMANENT, message), now, out)
    state = _alert(state, "cancel_unconfirmed", Level.ERROR, message, now, out, per_try=True)
    return _end_cancelled(state, (_RUNNING, _CANCELLED), now, out)


def _after_cancel(state: Execution, now: datetime, out: Effects) -> Execution:
    if state.cancel is not None and state.cancel.by_timeout:
        return _fail(state, Failure(Category.TIMEOUT, "stopped: it took longer than it may"), now, out)
    return _end_cancelled(state, (state.status, _CANCELLED), now, out)


def _end_cancelled(state: Execution, path: tuple[RunStatus, ...], now: datetime, out: Effects) -> Execution:
    if path:
        _move_run(state, path, out, handle=state.handle)
    out.append(Emit("PIPELINE_CANCELLED", state.cancel.why if state.cancel else "", state.run_id))
    state = _remember(state, _CANCELLED, None, now)
    state = state.changed(status=_CANCELLED, next_at=None, lease_until=None, cancel=None)
    return _close_rerun(state, "CANCELLED", out)


# --- alerts ----------------------------------------------------------------------------------------------------------


def _alert(
    state: Execution,
    kind: str,
    level: Level,
    message: str,
    now: datetime,
    out: Effects,
    *,
    per_try: bool = False,
    details: Mapping[str, Any] | None = None,
) -> Execution:
    """Raise an alert once per execution and kind; what may happen again in a later generation says so in its kind."""
    if per_try and state.generation:
        kind = f"{kind}_g{state.generation}"
    if kind in state.alerted:
        return state
    if state.dry_run:
        out.append(Emit("DRY_RUN_WOULD_ALERT", f"{kind}: {message}", state.run_id))
        return state.changed(alerted=state.alerted | {kind})
    alert = Alert(state.key, kind, level, message, now, details or {"runId": state.run_id})
    out.append(Emit("ALERT", message, state.run_id, {"kind": kind, "level": level.value, "alertId": alert.id}))
    return state.changed(alerted=state.alerted | {kind}, outbox=(*state.outbox, alert))


def _delivered(state: Execution, event: Delivered, _: datetime, __: Effects) -> Execution:
    left = tuple(alert for alert in state.outbox if alert.id not in event.ids)
    return state if len(left) == len(state.outbox) else state.changed(outbox=left)


def _move_run(
    state: Execution,
    path: tuple[RunStatus, ...],
    out: Effects,
    *,
    created: bool = False,
    handle: Mapping[str, Any] | None = None,
    failure: Failure | None = None,
) -> None:
    """Move the run's own row along. A dry run has none."""
    if not state.dry_run:
        out.append(RunMoved(state.run_id, path, state.attempt, state.generation, created, handle or {}, failure))


def _remember(state: Execution, status: RunStatus, failure: Failure | None, now: datetime) -> Execution:
    line = Try(state.generation, state.attempt, state.run_id, status, state.reason, state.started_at, now, failure)
    return state.changed(history=(*state.history, line)[-HISTORY_LIMIT:])


def is_legal_path(path: tuple[RunStatus, ...]) -> bool:
    """Whether every hop of a run is allowed."""
    return all(after in RUN_MOVES[before] for before, after in pairwise(path))


_HANDLERS: Final[dict[type, Callable[[Execution, Any, datetime, Effects], Execution]]] = {
    Tick: _tick,
    Woken: _woken,
    Evaluated: _evaluated,
    Started: _started,
    StartFailed: _start_failed,
    StartUnknown: _start_unknown,
    Polled: _polled,
    Callback: _callback,
    CancelRequested: _cancel_requested,
    CancelAnswered: _cancel_answered,
    RerunRequested: _rerun_requested,
    LateData: _late_data,
    Delivered: _delivered,
}
