"""Rules of the self-test: what a message means and what happens to it next.

Pure and total: no clock, no client, no Dagster. The sensor carries the decisions out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from lockstep.kernel.errors import InvalidInput
from lockstep.selftest.model import MAX_ATTEMPTS, MAX_ROWS, RunOutcome, SelftestRequest

_TOKEN = re.compile(r"[0-9a-z][0-9a-z-]{0,63}", re.ASCII)


class Launch(NamedTuple):
    """Ask for a run. The attempt is part of its key, so a failed run never blocks the next one."""

    attempt: int


class Wait(NamedTuple):
    """A run has it in hand: leave the message, it comes back if that run dies."""


class Forget(NamedTuple):
    """Nothing is left to do: the message may go."""

    reason: str


Decision = Launch | Wait | Forget


def parse_message(body: str) -> SelftestRequest:
    """Read a message body, or raise `InvalidInput` that lists every problem."""
    try:
        fields = json.loads(body)
    except ValueError:
        raise _refused(["the body is not JSON"]) from None
    if not isinstance(fields, dict):
        raise _refused(["the body is not a JSON object"])
    return parse_request(fields.get("id"), fields.get("rows"))


def parse_request(token: object, rows: object) -> SelftestRequest:
    """Check both values, or raise `InvalidInput` that lists every problem."""
    problems: list[str] = []
    if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
        problems.append("id: must be 1 to 64 lower-case letters, digits or hyphens")
    if not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= MAX_ROWS:
        problems.append(f"rows: must be a whole number from 1 to {MAX_ROWS}")
    if problems or not isinstance(token, str) or not isinstance(rows, int):
        raise _refused(problems)
    return SelftestRequest(token, rows)


def next_step(outcomes: Iterable[RunOutcome]) -> Decision:
    """Decide from the runs that already served this request; the message itself proves nothing."""
    seen = list(outcomes)
    if RunOutcome.SUCCEEDED in seen:
        return Forget("its rows are committed")
    if RunOutcome.IN_FLIGHT in seen:
        return Wait()
    if len(seen) >= MAX_ATTEMPTS:
        return Forget(f"all {MAX_ATTEMPTS} attempts failed")
    return Launch(attempt=len(seen) + 1)


def run_key(request: SelftestRequest, attempt: int) -> str:
    """The name under which Dagster starts at most one run."""
    return f"selftest:{request.id}:{attempt}"


def _refused(problems: list[str]) -> InvalidInput:
    return InvalidInput(
        "the self-test message is refused.",
        next_step='send {"id": "<token>", "rows": <n>}.',
        problems=problems,
    )
