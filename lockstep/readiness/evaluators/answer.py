"""The evaluators' contract: what is asked, and how an answer, good or bad, becomes a trait result.

What belongs here: the words of the protocol and the failure categories. What does not: transports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from lockstep.readiness.model import Category, Key, TraitPlan, TraitResult, TraitStatus

MAX_ANSWER_BYTES = 256 * 1024
_LONGEST_REASON = 500


class Question(NamedTuple):
    """One trait of one execution."""

    key: Key
    trait: TraitPlan
    now: datetime

    def body(self) -> dict[str, Any]:
        """What an evaluator receives. Both spellings of the pipeline's id are in use out there."""
        config = {**self.trait.config, "date": self.key.date.isoformat(), "scheduleID": self.key.schedule}
        name = self.key.pipeline
        return {"pipelineId": name, "pipelineID": name, "traitType": self.trait.type, "config": config}


def failed(question: Question, category: Category, reason: str) -> TraitResult:
    """The evaluator could not answer: ERROR, never FAIL."""
    return TraitResult(question.trait.type, TraitStatus.ERROR, reason[:_LONGEST_REASON], {}, category, question.now)


def parse(question: Question, body: bytes | str) -> TraitResult:
    """Read an answer. What is not one is a permanent error of the evaluator."""
    if len(body) > MAX_ANSWER_BYTES:
        return failed(question, Category.PERMANENT, "EVALUATOR_OUTPUT_INVALID: the answer is too large")
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return failed(question, Category.PERMANENT, "EVALUATOR_OUTPUT_INVALID: the answer is not JSON")
    return from_mapping(question, data)


def from_mapping(question: Question, data: Any) -> TraitResult:
    """Check the fields of an answer."""
    problem = _problem(data)
    if problem is not None:
        return failed(question, Category.PERMANENT, f"EVALUATOR_OUTPUT_INVALID: {problem}")
    category = data.get("failureCategory")
    return TraitResult(
        trait=question.trait.type,
        status=TraitStatus(data["status"]),
        reason=str(data.get("reason") or "")[:_LONGEST_REASON],
        value=data.get("value") or {},
        category=Category(category) if category else None,
        evaluated_at=question.now,
    )


def _problem(data: Any) -> str | None:
    if not isinstance(data, Mapping):
        return "the answer is not a JSON object"
    if data.get("status") not in ("PASS", "FAIL", "ERROR"):
        return "status must be PASS, FAIL or ERROR"
    if not isinstance(data.get("value") or {}, Mapping):
        return "value must be an object"
    category = data.get("failureCategory")
    if category and category not in set(Category):
        return f"failureCategory must be one of {', '.join(Category)}"
    return None
