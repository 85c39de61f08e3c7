"""The consumer's side of `ddapi_queue`: PROCESSING, APPLIED, FAILED and READY again, each by condition.

What belongs here: transitions that mirror what the sink has decided, and repairing the mirror. What does not: inserting
rows (queue.py) and deciding (rules.py). A lost or late write here costs time, never data: the sink is the truth.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

from lockstep.kernel.logs import get_logger
from lockstep.windows.model import QUEUE_TABLE, QueueRow, Window, WindowKind, WindowStatus, format_instant
from lockstep.windows.queue import WindowQueue

_log = get_logger(__name__)

MAX_ERROR = 600
_TRANSACTION_ITEMS = 100
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")

_APPLIED = "SET #s = :applied, fence = :fence REMOVE lease_until, #o, last_error"
_NOT_NEWER = "attribute_exists(vault_id) AND (attribute_not_exists(fence) OR fence <= :fence)"


class WindowLedger:
    """Queue rows as the consumer needs them. `client` is a DynamoDB client, given by the caller."""

    def __init__(self, client: Any, table: str = QUEUE_TABLE) -> None:
        self._client = client
        self._table = table
        self._queue = WindowQueue(client, table)

    def pending(
        self, vault: str, after: datetime | None, *, kind: WindowKind = WindowKind.INCREMENTAL
    ) -> list[QueueRow]:
        """Rows that stop after the watermark, whatever their status, in order."""
        return list(self._queue.rows(vault, after=after, kind=kind))

    def get(self, window: Window) -> QueueRow | None:
        """One row, read consistently."""
        return self._queue.get(window)

    def processing(self, row: QueueRow, *, fence: int, owner: str, lease_until: datetime, attempt: bool) -> bool:
        """Show that a fence works on this window; `attempt` counts one. False if a newer fence has it."""
        return self._update(
            row.window,
            "SET #s = :processing, fence = :fence, #o = :owner, lease_until = :until" + _count(attempt),
            _NOT_NEWER + " AND #s <> :applied",
            {
                ":processing": _s(WindowStatus.PROCESSING),
                ":applied": _s(WindowStatus.APPLIED),
                ":fence": _n(fence),
                ":owner": _s(owner),
                ":until": _s(format_instant(lease_until)),
            }
            | ({":one": _n(1)} if attempt else {}),
        )

    def applied(self, windows: Sequence[Window], *, fence: int) -> None:
        """Show that the sink has these windows, many in a call. Rows that a newer fence wrote are left alone."""
        for start in range(0, len(windows), _TRANSACTION_ITEMS):
            chunk = windows[start : start + _TRANSACTION_ITEMS]
            try:
                self._client.transact_write_items(TransactItems=[self._applied_item(one, fence) for one in chunk])
            except self._client.exceptions.TransactionCanceledException:
                for window in chunk:  # one row stands in the way: the others must not wait for it
                    self._one_applied(window, fence)

    def failed(self, window: Window, *, fence: int, error: str) -> bool:
        """Stop the lane here, in sight of everybody. Never after a newer fence."""
        return self._update(
            window,
            "SET #s = :failed, fence = :fence, last_error = :error REMOVE lease_until, #o",
            _NOT_NEWER + " AND #s <> :applied",
            {
                ":failed": _s(WindowStatus.FAILED),
                ":applied": _s(WindowStatus.APPLIED),
                ":fence": _n(fence),
                ":error": _s(redacted(error)),
            },
        )

    def ready(self, window: Window, *, fence: int, error: str | None = None, was: WindowStatus) -> bool:
        """Give a window back: from PROCESSING when a drain ends before it, from FAILED when a person retries it."""
        note = ", last_error = :error" if error else ""
        return self._update(
            window,
            f"SET #s = :ready, fence = :fence{note} REMOVE lease_until, #o",
            _NOT_NEWER + " AND #s = :was",
            {":ready": _s(WindowStatus.READY), ":was": _s(was), ":fence": _n(fence)}
            | ({":error": _s(redacted(error))} if error else {}),
            names={"#s": "status", "#o": "owner"},
        )

    def repair(self, rows: Iterable[QueueRow], applied: Collection[datetime], watermark: datetime, fence: int) -> int:
        """Make rows agree with the sink: applied ones APPLIED, and nothing above the watermark APPLIED."""
        behind = [row.window for row in rows if row.status is not WindowStatus.APPLIED and row.window.stop in applied]
        self.applied(behind, fence=fence)
        ahead = [
            row.window
            for row in rows
            if row.status is WindowStatus.APPLIED
            and row.window.kind is WindowKind.INCREMENTAL
            and row.window.stop > watermark
        ]
        for window in ahead:
            self.ready(window, fence=fence, was=WindowStatus.APPLIED)
        if behind or ahead:
            _log.warning("queue rows repaired from the sink", behind=len(behind), ahead=len(ahead))
        return len(behind) + len(ahead)

    def _applied_item(self, window: Window, fence: int) -> dict[str, Any]:
        return {
            "Update": {
                "TableName": self._table,
                "Key": _key(window),
                "UpdateExpression": _APPLIED,
                "ConditionExpression": _NOT_NEWER,
                "ExpressionAttributeNames": {"#s": "status", "#o": "owner"},
                "ExpressionAttributeValues": {":applied": _s(WindowStatus.APPLIED), ":fence": _n(fence)},
            }
        }

    def _one_applied(self, window: Window, fence: int) -> bool:
        return self._update(window, _APPLIED, _NOT_NEWER, {":applied": _s(WindowStatus.APPLIED), ":fence": _n(fence)})

    def _update(
        self,
        window: Window,
        update: str,
        condition: str,
        values: dict[str, Any],
        names: dict[str, str] | None = None,
    ) -> bool:
        try:
            self._client.update_item(
                TableName=self._table,
                Key=_key(window),
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeNames=names or {"#s": "status", "#o": "owner"},
                ExpressionAttributeValues=values,
            )
        except self._client.exceptions.ConditionalCheckFailedException:
            return False
        return True


def redacted(error: str) -> str:
    """An error without the values that it quotes: rows of a vault are not for a control table."""
    return _QUOTED.sub("'…'", error)[:MAX_ERROR]


def _count(attempt: bool) -> str:
    return " ADD attempt_count :one" if attempt else ""


def _key(window: Window) -> dict[str, Any]:
    return {"vault_id": _s(window.vault), "stoptime": _s(window.sort_key)}


def _s(text: str) -> dict[str, str]:
    return {"S": str(text)}


def _n(number: int) -> dict[str, str]:
    return {"N": str(number)}
