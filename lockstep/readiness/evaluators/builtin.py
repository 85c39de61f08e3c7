"""Builtin evaluators: questions that the platform can answer about itself.

What belongs here: the meaning of each builtin's configuration. What does not: how the other pipelines' ledgers are
read; those readings are passed in as probes, so this module knows no database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from typing import Any, Final, Protocol

from lockstep.readiness import codec, timing
from lockstep.readiness.evaluators.answer import Question, failed, from_mapping
from lockstep.readiness.model import Category, Key, RunStatus, TraitResult

Probe = Callable[[Mapping[str, Any], Key, datetime], Mapping[str, Any]]
"""Reads another ledger. Returns the numbers that the builtin of the same name compares."""


class Ledger(Protocol):
    """What builtins need of the store."""

    def status(self, key: Key, now: datetime) -> RunStatus | None:
        """Where an execution is."""
        ...

    def traits(self, pipeline: str, slot: Key, types: list[str], now: datetime) -> dict[str, TraitResult]:
        """Stored answers; a sensor is a trait that somebody pushes."""
        ...


class MissingKey(Exception):
    """The configuration lacks something that the builtin needs."""


Answer = dict[str, Any]


class Builtins:
    """The builtins, over a store and the readings of other ledgers."""

    def __init__(self, ledger: Ledger, probes: Mapping[str, Probe] | None = None) -> None:
        self._ledger = ledger
        self._probes = dict(probes or {})

    def evaluate(self, question: Question, name: str) -> TraitResult:
        """The answer. A missing key or name is a permanent error; what a probe raises is a transient one."""
        answer = _BUILTINS.get(name)
        if answer is None:
            return failed(question, Category.PERMANENT, f"there is no builtin {name}")
        try:
            return from_mapping(question, answer(self, question))
        except MissingKey as error:
            return failed(question, Category.PERMANENT, f"config: {error}")
        except Exception as error:  # whatever a driver raises: nobody could say
            return failed(question, Category.TRANSIENT, f"{name}: {type(error).__name__}: {error}")

    def upstream(self, question: Question) -> Answer:
        """PASS if the upstream's execution of the same date and schedule, or of the configured ones, completed."""
        config = question.trait.config
        day = date.fromisoformat(str(config["date"])) if "date" in config else question.key.date
        schedule = str(config.get("upstreamSchedule") or question.key.schedule)
        upstream = Key(str(_need(config, "upstreamPipeline")), day, schedule)
        status = self._ledger.status(upstream, question.now)
        value = {"upstream": str(upstream), "status": status.value if status else None}
        if status is not None and status.is_success:
            return _passed(value)
        return _not_yet(f"{upstream} is {status.value if status else 'not started'}", value)

    def sensor_threshold(self, question: Question) -> Answer:
        """PASS if the sensor's value lies within min and max, both included."""
        config, value = question.trait.config, self._sensor(question)
        number = value.get(str(config.get("field", "value")))
        if "min" not in config and "max" not in config:
            raise MissingKey("min or max is missing")
        if number is None or not _is_number(number):
            return _not_yet("the sensor has no number yet", value)
        low, high = config.get("min"), config.get("max")
        if (low is not None and number < low) or (high is not None and number > high):
            return _not_yet(f"{number} is outside {low} to {high}", value)
        return _passed(value)

    def sensor_freshness(self, question: Question) -> Answer:
        """PASS if the sensor spoke within maxAgeSeconds."""
        limit, result = _number(question, "maxAgeSeconds"), self._sensor_result(question)
        if result is None or result.evaluated_at is None:
            return _not_yet("the sensor has not spoken", {})
        age = (question.now - result.evaluated_at).total_seconds()
        value = {**result.value, "ageSeconds": age}
        return _passed(value) if age <= limit else _not_yet(f"the sensor last spoke {age:.0f} s ago", value)

    def window_completeness(self, question: Question) -> Answer:
        """PASS if every expected window, or enough of them, were reported."""
        config, value = question.trait.config, self._sensor(question)
        seen = value.get("windows") or []
        if "expectedWindows" in config:
            missing = sorted(set(map(str, config["expectedWindows"])) - set(map(str, seen)))
            return _not_yet(f"missing: {', '.join(missing)[:200]}", value) if missing else _passed(value)
        expected = _number(question, "expectedCount")
        count = len(set(map(str, seen)))
        return _passed(value) if count >= expected else _not_yet(f"{count} of {expected:g} windows", value)

    def data_quality(self, question: Question) -> Answer:
        """PASS if the null rate is low enough and the schema did not drift."""
        config, value = question.trait.config, self._sensor(question)
        rate = value.get("nullRate")
        if rate is None or not _is_number(rate):
            return _not_yet("no null rate was reported", value)
        if rate > _number(question, "maxNullRate"):
            return _not_yet(f"null rate {rate} is above {config['maxNullRate']}", value)
        if value.get("schemaDrift") and not config.get("allowSchemaDrift", False):
            return _not_yet("the schema drifted", value)
        return _passed(value)

    def lag(self, question: Question, name: str, limit_key: str) -> Answer:
        """PASS if the probe's lag is within the limit, or if it has come through the whole day that is asked for.

        `through: execution-day` (or `previous-day`): nothing of that day, in `timezone`, is left to do.
        """
        config = question.trait.config
        limit = None if "through" in config else _number(question, limit_key)
        boundary = _end_of_day(question) if "through" in config else None
        value = self._probe(question, name)
        lag = value.get("lagSeconds")
        if boundary is not None and question.now < boundary:
            return _not_yet(f"the day ends only at {boundary:%Y-%m-%d %H:%M} UTC", value)
        if lag is None:
            return _passed(value) if value.get("empty") else _not_yet("nothing was recorded yet", value)
        reached = question.now - timedelta(seconds=lag)
        if boundary is not None and reached < boundary:
            return _not_yet(f"come to {reached:%Y-%m-%d %H:%M}, {boundary:%Y-%m-%d %H:%M} UTC is needed", value)
        if limit is not None and lag > limit:
            return _not_yet(f"{lag:.0f} s behind, {limit:g} s allowed", value)
        return _passed(value)

    def export_jobs(self, question: Question) -> Answer:
        """PASS if no job is unfinished for too long; with `jobId`, if that job has completed."""
        if "jobId" not in question.trait.config:
            return self.lag(question, "export-jobs-done", "maxAgeSeconds")
        value = self._probe(question, "export-jobs-done")
        status, job = value.get("jobStatus"), question.trait.config["jobId"]
        if status == "COMPLETED":
            return _passed(value)
        return _not_yet(f"job {job} is {status}" if status else f"there is no job {job}", value)

    def asset_freshness(self, question: Question) -> Answer:
        """PASS if the asset, or the partition of it, was materialized within maxAgeSeconds (no limit if absent)."""
        value = self._probe(question, "dagster-asset-freshness")
        age, limit = value.get("ageSeconds"), question.trait.config.get("maxAgeSeconds")
        if age is None:
            return _not_yet("never materialized", value)
        return _passed(value) if limit is None or age <= limit else _not_yet(f"{age:.0f} s old", value)

    def check_result(self, question: Question) -> Answer:
        """PASS if the latest execution of the asset check succeeded."""
        value = self._probe(question, "dagster-check-result")
        if value.get("success") is None:
            return _not_yet("the check was never executed", value)
        return _passed(value) if value["success"] else _not_yet("the check failed", value)

    def reachable(self, question: Question) -> Answer:
        """PASS if the ledger answers at all."""
        self._ledger.status(question.key, question.now)
        return _passed({})

    def _probe(self, question: Question, name: str) -> Mapping[str, Any]:
        probe = self._probes.get(name)
        if probe is None:
            raise MissingKey(f"{name} is not connected in this deployment")
        return probe(question.trait.config, question.key, question.now)

    def _sensor(self, question: Question) -> Mapping[str, Any]:
        result = self._sensor_result(question)
        return {} if result is None else result.value

    def _sensor_result(self, question: Question) -> TraitResult | None:
        name = str(_need(question.trait.config, "sensorType"))
        return self._ledger.traits(question.key.pipeline, question.key, [name], question.now).get(name)


_BUILTINS: Final[dict[str, Callable[[Builtins, Question], Answer]]] = {
    "upstream-job-log": Builtins.upstream,
    "sensor-threshold": Builtins.sensor_threshold,
    "sensor-freshness": Builtins.sensor_freshness,
    "window-completeness": Builtins.window_completeness,
    "data-quality": Builtins.data_quality,
    "window-watermark-lag": lambda own, asked: own.lag(asked, "window-watermark-lag", "maxLagSeconds"),
    "export-jobs-done": Builtins.export_jobs,
    "tick-lag": lambda own, asked: own.lag(asked, "tick-lag", "maxLagSeconds"),
    "dagster-asset-freshness": Builtins.asset_freshness,
    "dagster-check-result": Builtins.check_result,
    "table-reachable": Builtins.reachable,
}
NAMES: Final = frozenset(_BUILTINS)


def _passed(value: Mapping[str, Any]) -> Answer:
    return {"status": "PASS", "value": json_ready(value)}


def _not_yet(reason: str, value: Mapping[str, Any]) -> Answer:
    return {"status": "FAIL", "reason": reason, "value": json_ready(value)}


def json_ready(value: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON values; instants as text."""
    return {key: codec.instant(item) if isinstance(item, datetime) else item for key, item in value.items()}


def _end_of_day(question: Question) -> datetime:
    config, days = question.trait.config, {"previous-day": 0, "execution-day": 1}
    if config["through"] not in days:
        raise MissingKey(f"through must be one of {', '.join(days)}")
    midnight = timing.ClockTime(0, 0, days[config["through"]])
    return timing.local_instant(question.key.date, midnight, str(config.get("timezone", "UTC")))


def _need(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise MissingKey(f"{key} is missing")
    return config[key]


def _number(question: Question, key: str) -> float:
    value = _need(question.trait.config, key)
    if not _is_number(value):
        raise MissingKey(f"{key} must be a number")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
