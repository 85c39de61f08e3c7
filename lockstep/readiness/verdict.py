"""Verdicts over trait results: ready or not and why, drifted or not and in which field. Pure and total.

What belongs here: combining answers. What does not: getting them (evaluators/), acting on them (rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from lockstep.readiness.model import (
    Category,
    DriftRule,
    Plan,
    Readiness,
    ReadinessStatus,
    TraitPlan,
    TraitResult,
    TraitStatus,
)

MAJORITY = "majority-pass"

MISSING = TraitStatus.STALE, "no result is stored"


def as_of(result: TraitResult, now: datetime) -> TraitResult:
    """The result, or STALE in its place if it has expired: an answer that came too late answers nothing."""
    if result.expires_at is None or now < result.expires_at or result.status is TraitStatus.STALE:
        return result
    return result._replace(status=TraitStatus.STALE, reason=f"expired at {result.expires_at:%H:%M:%S} UTC")


def judge(plan: Plan, results: Sequence[TraitResult], now: datetime) -> Readiness:
    """Combine the required traits by the archetype's rule. Optional traits are shown and never block."""
    by_type = {result.trait: result for result in results}
    seen: list[TraitResult] = []
    blocking: list[str] = []
    passed = required = 0
    failed_to_say = False
    for trait in plan.traits:
        found = by_type.get(trait.type)
        result = as_of(found, now) if found is not None else TraitResult(trait.type, *MISSING)
        seen.append(result)
        if not trait.required:
            continue
        required += 1
        if result.status is TraitStatus.PASS:
            passed += 1
        else:
            blocking.append(trait.type if result.status is TraitStatus.FAIL else f"{trait.type} ({result.status})")
            failed_to_say = failed_to_say or result.status is TraitStatus.ERROR
    if passed >= _needed(plan, required):
        status, blocking = ReadinessStatus.READY, []
    else:
        status = ReadinessStatus.ERROR if failed_to_say else ReadinessStatus.NOT_READY
    return Readiness(status, tuple(blocking), tuple(seen), now)


def _needed(plan: Plan, required: int) -> int:
    if plan.rule.type == MAJORITY:
        # More than half: two of four is a tie, not a majority.
        return plan.rule.threshold if plan.rule.threshold is not None else required // 2 + 1
    return required


def is_hopeless(readiness: Readiness) -> bool:
    """Whether an evaluator failed in a way that waiting cannot heal."""
    return any(trait.status is TraitStatus.ERROR and trait.category is Category.PERMANENT for trait in readiness.traits)


class Drift(NamedTuple):
    """A field that moved away from its baseline."""

    trait: str
    field: str
    before: Any
    after: Any


def baseline_of(rules: Sequence[DriftRule], results: Sequence[TraitResult]) -> dict[str, Any]:
    """The watched fields as they are now. A field that is not there is left out; 0 is a value."""
    by_type = {result.trait: result for result in results}
    found: dict[str, Any] = {}
    for rule in rules:
        result = by_type.get(rule.trait)
        if result is not None and rule.field in result.value and result.value[rule.field] is not None:
            found[_field_key(rule)] = result.value[rule.field]
    return found


def drifts(rules: Sequence[DriftRule], baseline: Mapping[str, Any], results: Sequence[TraitResult]) -> list[Drift]:
    """Fields further from the baseline than their threshold. A field missing on either side is not drift."""
    current = baseline_of(rules, results)
    moved = []
    for rule in rules:
        key = _field_key(rule)
        if key in baseline and key in current and _moved(baseline[key], current[key], rule.threshold):
            moved.append(Drift(rule.trait, rule.field, baseline[key], current[key]))
    return moved


def missing_fields(rules: Sequence[DriftRule], found: Mapping[str, Any]) -> list[str]:
    """Watched fields that nothing reported: said aloud, because a rule on them can never fire."""
    return [_field_key(rule) for rule in rules if _field_key(rule) not in found]


def _field_key(rule: DriftRule) -> str:
    # Both parts, so that two traits with a field of the same name cannot share a baseline.
    return f"{rule.trait}.{rule.field}"


def _moved(before: Any, after: Any, threshold: float) -> bool:
    if _is_number(before) and _is_number(after):
        return bool(abs(after - before) > threshold)
    return bool(before != after)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def required_traits(plan: Plan) -> tuple[TraitPlan, ...]:
    """The traits that can block."""
    return tuple(trait for trait in plan.traits if trait.required)
