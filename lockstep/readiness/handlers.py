"""Thin handlers for the Step Functions form: each call loads, asks the same core, writes, and answers in a few words.

What belongs here: the actions of the state machine that asl.py writes. What does not: any rule (rules.py). What
happens through here leaves the same event history as the driver does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from lockstep.kernel.errors import InvalidInput, LostClaim
from lockstep.readiness import codec, rules, stream
from lockstep.readiness.model import (
    FACTS,
    Alert,
    CancelAnswered,
    DeliverAlerts,
    Delivered,
    Evaluated,
    Event,
    Execution,
    IllegalTransition,
    Key,
    Level,
    Plan,
    Reason,
    RunStatus,
    Step,
    Tick,
    parse_key,
)
from lockstep.readiness.plane import Plane

LOCK_TTL = timedelta(minutes=5)
_TRIES = 3

Answer = dict[str, Any]


class StartRequest(NamedTuple):
    """An execution of the state machine to start. The name drops what is delivered twice, not what is asked again."""

    name: str
    input: dict[str, str]


class Handlers:
    """The five functions. Errors are raised, so that the state machine's Catch sees them."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._store = plane.store
        self._clock = plane.clock

    # --- stream-router ---

    def stream_router(self, event: Mapping[str, Any]) -> list[StartRequest]:
        """The executions that a batch of stream records asks for."""
        markers = [marker for record in event["Records"] if (marker := stream.marker_of(record)) is not None]
        requests = []
        for marker in markers:
            key, moment = marker.key, int(marker.at.timestamp() * 1000) if marker.at else 0
            name = re.sub(r"[^A-Za-z0-9_-]", "-", f"{key.pipeline}_{key.date}_{key.schedule}")[:64] + f"_{moment}"
            fields = {"pipelineID": key.pipeline, "scheduleID": key.schedule, "date": key.date.isoformat()}
            requests.append(StartRequest(name, {**fields, "markerSource": marker.source}))
        return requests

    # --- orchestrator ---

    def orchestrator(self, event: Mapping[str, Any]) -> Answer:
        """Dispatch one action of the state machine."""
        action = _ACTIONS.get(str(event.get("action")))
        if action is None:
            raise InvalidInput(f"there is no action {event.get('action')}.", next_step=f"one of {', '.join(_ACTIONS)}.")
        return action(self, event)

    def check_exclusion(self, event: Mapping[str, Any]) -> Answer:
        """Whether the execution date is excluded."""
        key = self._key(event)
        return _answer("skip" if self._plan(key).exclusions.excludes(key.date) else "proceed")

    def acquire_lock(self, event: Mapping[str, Any]) -> Answer:
        """Take the lock; its token travels through the state machine and gives it back."""
        owner = self._plane.ids.new_id()
        taken = self._store.acquire(_lock(self._key(event)), owner, LOCK_TTL, self._clock.now())
        return _answer("proceed" if taken else "skip", token=owner if taken else None)

    def release_lock(self, event: Mapping[str, Any]) -> Answer:
        """Give the lock back; one that was lost meanwhile is left to its new owner."""
        return _answer("proceed", released=self._store.release(_lock(self._key(event)), str(event["token"])))

    def check_run_log(self, event: Mapping[str, Any]) -> Answer:
        """Open the execution, or say where it is: evaluate, wait, poll, monitor or skip."""
        state = self._load(self._key(event), open_it=True)
        now = self._clock.now()
        if state.status is RunStatus.PENDING:
            wait = (state.started_at - now).total_seconds()
            return _answer("wait" if wait > 0 else "proceed", waitSeconds=max(1, round(wait)))
        if state.status is RunStatus.COMPLETED_MONITORING:
            return _answer("monitor")
        return _answer("poll" if state.status.is_live else "skip")

    def resolve_pipeline(self, event: Mapping[str, Any]) -> Answer:
        """The traits to look at and the run's id."""
        state = self._load(self._key(event))
        return _answer("proceed", runID=state.run_id, traits=[trait.type for trait in state.plan.traits])

    def check_evaluation_sla(self, event: Mapping[str, Any]) -> Answer:
        """Deadlines; an alert, never a stop."""
        state = self._write(self._key(event), lambda state: rules.watch(state, self._clock.now()))
        return _answer("proceed", alerted=sorted(state.alerted))

    def check_validation_timeout(self, event: Mapping[str, Any]) -> Answer:
        """The hard stop while waiting to be ready."""
        before = self._load(self._key(event))
        after = self._step(before.key, Tick())
        over = (after.status, after.run_id) != (before.status, before.run_id)
        return _answer("timeout" if over else "proceed")

    def check_readiness(self, event: Mapping[str, Any]) -> Answer:
        """The verdict over the answers that the Map state collected."""
        results = tuple(codec.decode_result(result) for result in event["results"])
        after = self._step(self._key(event), Evaluated(str(event["runID"]), results))
        if after.status is RunStatus.TRIGGERING:
            return _answer("proceed")
        if after.status is RunStatus.PENDING and after.run_id == event["runID"]:
            wait = (after.next_at - self._clock.now()).total_seconds() if after.next_at else 30
            return _answer("not_ready", waitSeconds=max(1, round(wait)))
        return _answer("ended")

    def log_result(self, event: Mapping[str, Any]) -> Answer:
        """Where the execution stands after its job: it was logged with the step that ended it."""
        state, now = self._load(self._key(event)), self._clock.now()
        if state.status is RunStatus.PENDING:
            return _answer("retry", waitSeconds=max(1, round((state.started_at - now).total_seconds())))
        if state.status is RunStatus.COMPLETED_MONITORING:
            return _answer("monitor")
        return _answer("completed" if state.status.is_success else "failed", status=state.status.value)

    def check_drift(self, event: Mapping[str, Any]) -> Answer:
        """Compare with the baseline, or end the watch when its time is over."""
        results = tuple(codec.decode_result(result) for result in event["results"])
        after = self._step(self._key(event), Evaluated(str(event["runID"]), results))
        if after.status is RunStatus.COMPLETED_MONITORING:
            after = self._step(after.key, Tick())
        if after.status is RunStatus.COMPLETED_MONITORING:
            return _answer("continue", waitSeconds=max(1, round(after.plan.interval.total_seconds())))
        return _answer("drift" if after.status is RunStatus.PENDING else "expired")

    def alert_error(self, event: Mapping[str, Any]) -> Answer:
        """Tell people that the machinery itself failed."""
        key, now = self._key(event), self._clock.now()
        words = f"the state machine failed: {event.get('error')}"[:500]
        self._plane.alerts.raise_alert(Alert(key, "machine_error", Level.ERROR, words, now))
        return _answer("proceed")

    # --- evaluator, trigger, run-checker ---

    def evaluator(self, event: Mapping[str, Any]) -> Answer:
        """Evaluate one trait, keep the answer and return it."""
        state, now = self._load(self._key(event)), self._clock.now()
        wanted = str(event["traitType"])
        one = state._replace(plan=state.plan._replace(traits=tuple(t for t in state.plan.traits if t.type == wanted)))
        stored = self._store.traits(state.key.pipeline, state.key, [wanted], now)
        (result,) = self._plane.runner.evaluate(one, stored)
        if not result.pushed and stored.get(wanted) is not result:
            self._store.put_traits(state.key.pipeline, state.key, [result], now)
        return codec.encode_result(result)

    def trigger(self, event: Mapping[str, Any]) -> Answer:
        """Start the job of an execution that has been claimed; a repeated call repeats the same token."""
        state = self._load(self._key(event))
        if state.status is RunStatus.TRIGGERING:
            state = self._step(state.key, self._plane.triggers.start(state, resume=bool(event.get("resume", False))))
        if state.status is RunStatus.TRIGGERING:
            return _answer("unknown", waitSeconds=max(1, round(state.plan.poll_interval.total_seconds())))
        return self._job_answer(state, state.run_id if state.status.is_live else str(event["runID"]))

    def run_checker(self, event: Mapping[str, Any]) -> Answer:
        """Ask after the job, and stop it if it must not go on."""
        state = self._load(self._key(event))
        if state.status is not RunStatus.RUNNING:
            return self._job_answer(state, str(event["runID"]))
        run_id = state.run_id
        polled = self._plane.triggers.status(state, run_id, state.handle)
        state = self._step(state.key, polled)
        if state.cancel is not None and state.run_id == run_id:
            stopped = self._plane.triggers.cancel(state, run_id, state.handle)
            state = self._step(state.key, CancelAnswered(run_id, stopped))
        return self._job_answer(self._step(state.key, Tick()), run_id)

    def _job_answer(self, state: Execution, run_id: str) -> Answer:
        if state.status.is_live and state.run_id == run_id:
            return _answer("running", waitSeconds=max(1, round(state.plan.poll_interval.total_seconds())))
        return _answer("ended")

    # --- shared ---

    def _key(self, event: Mapping[str, Any]) -> Key:
        return parse_key(str(event["pipelineID"]), str(event["date"]), str(event["scheduleID"]))

    def _plan(self, key: Key) -> Plan:
        plan = self._plane.plan(key.pipeline)
        if plan is None:
            raise InvalidInput("there is no such pipeline.", unit=key.pipeline)
        return plan

    def _load(self, key: Key, *, open_it: bool = False) -> Execution:
        plan, now = self._plan(key), self._clock.now()
        state = self._store.load(key, plan, now)
        if state is None and open_it:
            opened = rules.open_execution(plan, key, now, Reason.MARKER)
            return self._store.commit(
                None, opened.state, [fact for fact in opened.effects if isinstance(fact, FACTS)], now
            )
        if state is None:
            raise IllegalTransition("there is no such execution.", unit=str(key))
        return state

    def _step(self, key: Key, event: Event) -> Execution:
        return self._write(key, lambda state: rules.step(state, event, self._clock.now()))

    def _write(self, key: Key, decide: Callable[[Execution], Step]) -> Execution:
        for last in (False,) * (_TRIES - 1) + (True,):
            before = self._load(key)
            step = decide(before)
            facts = [effect for effect in step.effects if isinstance(effect, FACTS)]
            try:
                after = (
                    before
                    if step.state is before and not facts
                    else self._store.commit(before, step.state, facts, self._clock.now())
                )
            except LostClaim:
                if last:
                    raise
                continue
            return self._deliver(after, step)
        raise AssertionError("unreachable: the last round returns or raises")

    def _deliver(self, state: Execution, step: Step) -> Execution:
        for effect in step.effects:
            if isinstance(effect, DeliverAlerts):
                ids = self._plane.dispatcher.dispatch(effect.alerts)
                return self._step(state.key, Delivered(ids)) if ids else state
        return state


_ACTIONS: dict[str, Callable[[Handlers, Mapping[str, Any]], Answer]] = {
    "checkExclusion": Handlers.check_exclusion,
    "acquireLock": Handlers.acquire_lock,
    "checkRunLog": Handlers.check_run_log,
    "resolvePipeline": Handlers.resolve_pipeline,
    "checkReadiness": Handlers.check_readiness,
    "checkEvaluationSLA": Handlers.check_evaluation_sla,
    "checkCompletionSLA": Handlers.check_evaluation_sla,
    "checkValidationTimeout": Handlers.check_validation_timeout,
    "logResult": Handlers.log_result,
    "releaseLock": Handlers.release_lock,
    "checkDrift": Handlers.check_drift,
    "alertError": Handlers.alert_error,
}


def _answer(result: str, **payload: Any) -> Answer:
    return {"result": result, **payload}


def _lock(key: Key) -> str:
    return f"eval:{key.pipeline}:{key.schedule}"
