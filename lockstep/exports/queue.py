"""Messages of exports: hints that chunks exist. The table decides; a message goes away when its chunk has ended.

What belongs here: receiving, looking up, hiding and deleting messages. What does not: taking work, which is done from
the table. So a lost message costs nothing, a repeated one is deleted when it comes, a late one finds its chunk done.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from lockstep.exports.claims import ClaimStore, MessageState
from lockstep.exports.model import ChunkStatus, JobStatus
from lockstep.exports.rules import DATE_PATTERN, JOB_ID_PATTERN, KEY_PATTERN
from lockstep.kernel.clock import Clock, SystemClock

HIDDEN_SECONDS = 60
_LONGEST_HIDE = 900
_JOB = re.compile(JOB_ID_PATTERN)
_KEY = re.compile(KEY_PATTERN)
_DATE = re.compile(DATE_PATTERN)


@dataclass(frozen=True)
class QueueReport:
    """What one pass over the queue did."""

    received: int = 0
    deleted: int = 0
    kept: int = 0
    unreadable: int = 0


class ChunkQueue:
    """The work queue of one deployment."""

    def __init__(self, client: Any, url: str, *, clock: Clock | None = None) -> None:
        self._client = client
        self._url = url
        self._clock = clock or SystemClock()

    def settle(self, claims: ClaimStore, *, most: int = 500, seconds: float = 15.0) -> QueueReport:
        """Receive messages within a bound, delete those whose chunk has ended, hide the others while they wait.

        A chunk in work keeps its message hidden for as long as its lease, so it stays in the queue, unseen, until
        the work is done; if nobody ever finishes it, it comes back.
        """
        deadline = self._clock.monotonic() + seconds
        received = deleted = kept = unreadable = 0
        while received < most and self._clock.monotonic() < deadline:
            batch = self._client.receive_message(
                QueueUrl=self._url, MaxNumberOfMessages=10, VisibilityTimeout=HIDDEN_SECONDS, WaitTimeSeconds=0
            ).get("Messages", [])
            if not batch:
                break
            received += len(batch)
            named = {message["MessageId"]: parse_message(message["Body"]) for message in batch}
            unreadable += sum(name is None for name in named.values())
            states = _states(claims, [name for name in named.values() if name is not None])
            gone = [one for one in batch if _ended(states, named[one["MessageId"]])]
            rest = [one for one in batch if one not in gone]
            self._delete(gone)
            self._hide(rest, named, states)
            deleted, kept = deleted + len(gone), kept + len(rest)
        return QueueReport(received, deleted, kept, unreadable)

    def _delete(self, messages: list[dict[str, Any]]) -> None:
        if messages:
            entries = [{"Id": str(n), "ReceiptHandle": one["ReceiptHandle"]} for n, one in enumerate(messages)]
            self._client.delete_message_batch(QueueUrl=self._url, Entries=entries)

    def _hide(self, messages: list[dict[str, Any]], named: dict[str, Any], states: dict[Any, MessageState]) -> None:
        entries = []
        for number, one in enumerate(messages):
            wait = states[named[one["MessageId"]]].wait or 0.0
            hidden = min(_LONGEST_HIDE, max(HIDDEN_SECONDS, int(wait) + 1))
            entries.append({"Id": str(number), "ReceiptHandle": one["ReceiptHandle"], "VisibilityTimeout": hidden})
        if entries:
            self._client.change_message_visibility_batch(QueueUrl=self._url, Entries=entries)


def parse_message(body: str) -> tuple[str, str] | None:
    """(job, chunk) of a message; None for anything that no job of ours wrote."""
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    job, key, day = (fields.get(name) for name in ("jobId", "key", "effectiveDate"))
    if not all(isinstance(value, str) for value in (job, key, day)):
        return None
    if not (_JOB.fullmatch(str(job)) and _KEY.fullmatch(str(key)) and _DATE.fullmatch(str(day))):
        return None
    return str(job), f"key={key}:date={day}"


def _states(claims: ClaimStore, named: list[tuple[str, str]]) -> dict[Any, MessageState]:
    return {(one.job_id, one.chunk_key): one for one in claims.message_states(named)} if named else {}


def _ended(states: dict[Any, MessageState], name: tuple[str, str] | None) -> bool:
    """Unreadable messages and those of chunks that nobody knows are dropped: the table holds all work there is."""
    if name is None:
        return True
    state = states[name]
    if state.status is None or state.job_status is None:
        return True
    return ChunkStatus(state.status).is_terminal or JobStatus(state.job_status).is_terminal
