"""Executions, runs and results as JSON and back. Strict: what does not read back as it was written is an error.

What belongs here: the stored form. What does not: keys and conditions (store.py). The plan is never stored with an
execution: it is joined at load, so a corrected configuration takes effect at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any

from lockstep.readiness.model import (
    NO_DEADLINES,
    Alert,
    Cancel,
    Category,
    Deadlines,
    Execution,
    Failure,
    Key,
    Level,
    Plan,
    Readiness,
    ReadinessStatus,
    Reason,
    RunStatus,
    TraitResult,
    TraitStatus,
    Try,
)


def instant(value: datetime | None) -> str | None:
    """An instant as text that sorts by time."""
    return None if value is None else value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_instant(text: str | None) -> datetime | None:
    """The other way."""
    return None if text is None else datetime.fromisoformat(text)  # a hundred times as fast as strptime


def read_instant(text: object) -> datetime | None:
    """An instant that somebody else wrote, in any ISO form; None if it is none."""
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


def decode_instants(data: Mapping[str, str]) -> dict[str, datetime]:
    """Named instants."""
    return {name: _moment(text) for name, text in data.items()}


def _moment(text: str) -> datetime:
    found = parse_instant(text)
    if found is None:
        raise ValueError("an instant is missing")
    return found


def dumps(value: Any) -> str:
    """Compact JSON in a fixed order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def encode_result(result: TraitResult) -> dict[str, Any]:
    """A trait's answer."""
    return {
        "trait": result.trait,
        "status": result.status.value,
        "reason": result.reason,
        "value": dict(result.value),
        "failureCategory": result.category.value if result.category else None,
        "evaluatedAt": instant(result.evaluated_at),
        "expiresAt": instant(result.expires_at),
        "pushed": result.pushed,
    }


def decode_result(data: Mapping[str, Any]) -> TraitResult:
    """The other way."""
    return TraitResult(
        data["trait"],
        TraitStatus(data["status"]),
        data.get("reason", ""),
        data.get("value") or {},
        Category(data["failureCategory"]) if data.get("failureCategory") else None,
        parse_instant(data.get("evaluatedAt")),
        parse_instant(data.get("expiresAt")),
        bool(data.get("pushed")),
    )


def encode_readiness(readiness: Readiness | None) -> dict[str, Any] | None:
    """A verdict with the answers that it rests on."""
    if readiness is None:
        return None
    return {
        "status": readiness.status.value,
        "blocking": list(readiness.blocking),
        "traits": [encode_result(trait) for trait in readiness.traits],
        "evaluatedAt": instant(readiness.evaluated_at),
    }


def decode_readiness(data: Mapping[str, Any] | None) -> Readiness | None:
    """The other way."""
    if data is None:
        return None
    return Readiness(
        ReadinessStatus(data["status"]),
        tuple(data["blocking"]),
        tuple(decode_result(trait) for trait in data["traits"]),
        parse_instant(data["evaluatedAt"]),
    )


def encode_failure(failure: Failure | None) -> list[str] | None:
    """Category and message."""
    return None if failure is None else [failure.category.value, failure.message]


def _decode_failure(data: Any) -> Failure | None:
    return None if data is None else Failure(Category(data[0]), data[1])


def encode_alert(alert: Alert) -> dict[str, Any]:
    """An alert as sinks and outboxes see it."""
    return {
        "alertId": alert.id,
        "pipelineId": alert.key.pipeline,
        "date": alert.key.date.isoformat(),
        "scheduleId": alert.key.schedule,
        "alertType": alert.kind,
        "level": alert.level.value,
        "message": alert.message,
        "details": dict(alert.details),
        "timestamp": instant(alert.at),
    }


def decode_alert(data: Mapping[str, Any]) -> Alert:
    """The other way."""
    key = Key(data["pipelineId"], date.fromisoformat(data["date"]), data["scheduleId"])
    moment = _moment(data["timestamp"])
    return Alert(key, data["alertType"], Level(data["level"]), data["message"], moment, data["details"])


def _encode_try(line: Try) -> dict[str, Any]:
    return {
        "generation": line.generation,
        "attempt": line.attempt,
        "runId": line.run_id,
        "status": line.status.value,
        "reason": line.reason.value,
        "startedAt": instant(line.started_at),
        "completedAt": instant(line.ended_at),
        "failure": encode_failure(line.failure),
    }


def _decode_try(data: Mapping[str, Any]) -> Try:
    return Try(
        data["generation"],
        data["attempt"],
        data["runId"],
        RunStatus(data["status"]),
        Reason(data["reason"]),
        _moment(data["startedAt"]),
        _moment(data["completedAt"]),
        _decode_failure(data["failure"]),
    )


def encode_execution(state: Execution) -> dict[str, Any]:
    """The run log's row."""
    promised = state.deadlines
    return {
        "pipelineId": state.key.pipeline,
        "date": state.key.date.isoformat(),
        "scheduleId": state.key.schedule,
        "status": state.status.value,
        "reason": state.reason.value,
        "generation": state.generation,
        "attemptNumber": state.attempt,
        "runId": state.run_id,
        "openedAt": instant(state.opened_at),
        "startedAt": instant(state.started_at),
        "nextAt": instant(state.next_at),
        "triggeredAt": instant(state.triggered_at),
        "leaseUntil": instant(state.lease_until),
        "inDoubt": state.in_doubt,
        "handle": dict(state.handle),
        "polls": state.polls,
        "unknownPolls": state.unknown_polls,
        "knownAt": instant(state.known_at),
        "cancel": list(state.cancel) if state.cancel else None,
        "readiness": encode_readiness(state.readiness),
        "evaluatorErrors": state.evaluator_errors,
        "baseline": None if state.baseline is None else dict(state.baseline),
        "monitorUntil": instant(state.monitor_until),
        "lateData": state.late_data,
        "lateSeen": instant(state.late_seen),
        "reruns": dict(state.reruns),
        "rerunId": state.rerun_id,
        "alerted": sorted(state.alerted),
        "outbox": [encode_alert(alert) for alert in state.outbox],
        "retryHistory": [_encode_try(line) for line in state.history],
        "failure": encode_failure(state.failure),
        "dryRun": state.dry_run,
        "deadlines": [instant(moment) for moment in promised],
        "updatedAt": instant(state.updated_at),
    }


def decode_execution(data: Mapping[str, Any], plan: Plan, version: int) -> Execution:
    """The other way, with the pipeline's plan of today."""
    promised = Deadlines(*(parse_instant(moment) for moment in data["deadlines"]))
    return Execution(
        plan=plan,
        key=Key(data["pipelineId"], date.fromisoformat(data["date"]), data["scheduleId"]),
        opened_at=_moment(data["openedAt"]),
        started_at=_moment(data["startedAt"]),
        run_id=data["runId"],
        status=RunStatus(data["status"]),
        reason=Reason(data["reason"]),
        generation=data["generation"],
        attempt=data["attemptNumber"],
        next_at=parse_instant(data["nextAt"]),
        triggered_at=parse_instant(data["triggeredAt"]),
        lease_until=parse_instant(data["leaseUntil"]),
        in_doubt=data.get("inDoubt", False),  # rows of before the field was there
        handle=data["handle"],
        polls=data["polls"],
        unknown_polls=data["unknownPolls"],
        known_at=parse_instant(data["knownAt"]),
        cancel=Cancel(*data["cancel"]) if data["cancel"] else None,
        readiness=decode_readiness(data["readiness"]),
        evaluator_errors=data["evaluatorErrors"],
        baseline=data["baseline"],
        monitor_until=parse_instant(data["monitorUntil"]),
        late_data=data["lateData"],
        late_seen=parse_instant(data["lateSeen"]),
        reruns=data["reruns"],
        rerun_id=data["rerunId"],
        alerted=frozenset(data["alerted"]),
        outbox=tuple(decode_alert(alert) for alert in data["outbox"]),
        history=tuple(_decode_try(line) for line in data["retryHistory"]),
        failure=_decode_failure(data["failure"]),
        dry_run=data["dryRun"],
        deadlines=NO_DEADLINES if promised == NO_DEADLINES else promised,
        updated_at=parse_instant(data["updatedAt"]),
        version=version,
    )
