"""`silver_dispatched` in DynamoDB: DISPATCHING, RUNNING, DONE or FAILED, each write by condition on its fence.

What belongs here: reading and writing that table. What does not: order and truth: that a tick is in silver is decided
by the ledger (store.py). A row that is lost or late costs a second look, never a second effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.errors import LostClaim
from lockstep.kernel.logs import redact_text
from lockstep.ticks.model import SILVER_DISPATCHED
from lockstep.ticks.silver.model import (
    DISPATCH_TTL,
    LONGEST_LEASE,
    Dispatch,
    DispatchState,
    Lane,
)

_READ_AT_ONCE = 100
_LONGEST_ERROR = 600
_NAMES = {"#s": "state"}

# An item past its time is no item: DynamoDB deletes it hours or days later, and until then it must not be believed.
_NEVER_OR_OLDER = "attribute_not_exists(tick_id) OR expires_at <= :epoch OR generation < :generation"
# A lease beyond the longest that there is was written by a clock that ran ahead (rules.may_take says the same).
_SILENT = (
    "generation = :generation AND expires_at > :epoch AND #s <> :done"
    " AND (lease_until <= :now OR lease_until > :longest)"
)
_NOT_FENCED_OFF = "generation = :generation AND (attribute_not_exists(fence) OR fence <= :fence)"
_TAKE = (
    "SET org_id = :org, project_id = :project, #s = :dispatching, generation = :generation, attempt = {attempt},"
    " lease_until = :until, expires_at = :expires, updated_at = :now, receipt_handle = :handle{mark}"
    " REMOVE run_id, last_error, done_at"
)
_MINE = "generation = :generation AND attempt = :attempt AND #s <> :done"


class DispatchTable:
    """The rows of one deployment. `client` is a DynamoDB client, given by the caller."""

    def __init__(self, client: Any, table: str = SILVER_DISPATCHED) -> None:
        self._client = client
        self._table = table

    def get_all(self, tick_ids: Iterable[str], now: datetime) -> dict[str, Dispatch]:
        """The rows of these ticks that are still valid, read consistently, many in a call."""
        wanted = sorted(set(tick_ids))
        items: list[Any] = []
        for start in range(0, len(wanted), _READ_AT_ONCE):
            keys = [_key(tick) for tick in wanted[start : start + _READ_AT_ONCE]]
            asked: Any = {self._table: {"Keys": keys, "ConsistentRead": True}}
            while asked:
                answer = self._call("batch_get_item", RequestItems=asked)
                items += answer["Responses"].get(self._table, ())
                asked = answer.get("UnprocessedKeys")
        return {item["tick_id"]["S"]: _row(item) for item in items if int(item["expires_at"]["N"]) > now.timestamp()}

    def take(
        self,
        tick_id: str,
        lane: Lane,
        *,
        now: datetime,
        until: datetime,
        receipt_handle: str | None = None,
        fence: int | None = None,
    ) -> Dispatch | None:
        """Dispatch the tick: count an attempt and hold it until `until`. None if somebody has it, or it is done.

        Args:
            tick_id: Which.
            lane: Its lane, with the generation that is wanted.
            now: The time.
            until: Until when nobody else may dispatch it.
            receipt_handle: Of its message, for the worker that will delete it.
            fence: Of the lane's lease: whoever holds it takes the tick from whoever has it, unless that was a newer
                holder. The ledger has said that the tick is not in silver, so not even DONE is believed.
        """
        values = _times(now) | {
            ":org": _s(lane.org_id),
            ":project": _s(lane.project_id),
            ":dispatching": _s(DispatchState.DISPATCHING),
            ":generation": _n(lane.generation),
            ":until": _s(_instant(until)),
            ":expires": _n(int((now + DISPATCH_TTL).timestamp())),
            ":handle": {"NULL": True} if receipt_handle is None else _s(receipt_handle),
            ":one": _n(1),
        }
        mark = "" if fence is None else ", fence = :fence"
        values |= {} if fence is None else {":fence": _n(fence)}
        if fence is None:
            condition, again = (
                _SILENT,
                values | {":done": _s(DispatchState.DONE), ":longest": _s(_instant(now + LONGEST_LEASE))},
            )
        else:
            condition, again = _NOT_FENCED_OFF, {name: one for name, one in values.items() if name != ":epoch"}
        item = self._update(tick_id, _TAKE.format(attempt=":one", mark=mark), _NEVER_OR_OLDER, values) or self._update(
            tick_id, _TAKE.format(attempt="attempt + :one", mark=mark), condition, again
        )
        return _row(item) if item else None

    def start(self, row: Dispatch, *, run_id: str, now: datetime, until: datetime) -> Dispatch:
        """A worker begins. Raises `LostClaim` if a newer attempt or generation has the tick."""
        return self._mine(
            row,
            "SET #s = :state, run_id = :run, lease_until = :until, updated_at = :now",
            {
                ":state": _s(DispatchState.RUNNING),
                ":run": _s(run_id),
                ":until": _s(_instant(until)),
                ":now": _s(_instant(now)),
            },
        )

    def beat(self, row: Dispatch, *, now: datetime, until: datetime) -> Dispatch:
        """The worker is alive. Raises `LostClaim`."""
        values = {":until": _s(_instant(until)), ":now": _s(_instant(now))}
        return self._mine(row, "SET lease_until = :until, updated_at = :now", values)

    def done(self, row: Dispatch, *, now: datetime) -> Dispatch:
        """The tick is in silver: said by the worker that saw it there. Raises `LostClaim`."""
        return self._mine(
            row,
            "SET #s = :state, done_at = :now, updated_at = :now, lease_until = :now, expires_at = :expires"
            " REMOVE last_error",
            {
                ":state": _s(DispatchState.DONE),
                ":now": _s(_instant(now)),
                ":expires": _n(int((now + DISPATCH_TTL).timestamp())),
            },
        )

    def fail(self, row: Dispatch, error: str, *, now: datetime, retry_at: datetime) -> Dispatch:
        """The attempt failed; the next one may be taken from `retry_at` on. Raises `LostClaim`."""
        return self._mine(
            row,
            "SET #s = :state, lease_until = :until, last_error = :error, updated_at = :now",
            {
                ":state": _s(DispatchState.FAILED),
                ":until": _s(_instant(retry_at)),
                ":error": _s(redact_text(error)[:_LONGEST_ERROR]),
                ":now": _s(_instant(now)),
            },
        )

    def _mine(self, row: Dispatch, update: str, values: dict[str, Any]) -> Dispatch:
        fence = {":generation": _n(row.generation), ":attempt": _n(row.attempt), ":done": _s(DispatchState.DONE)}
        item = self._update(row.tick_id, update, _MINE, fence | values)
        if item is None:
            raise LostClaim(
                f"attempt {row.attempt} of generation {row.generation} no longer has the dispatch.",
                unit=row.tick_id,
                next_step="stop; the newer attempt continues from the ledger.",
            )
        return _row(item)

    def _update(self, tick_id: str, update: str, condition: str, values: dict[str, Any]) -> dict[str, Any] | None:
        """The item after the update, or None when the condition did not hold."""
        names = {"ExpressionAttributeNames": _NAMES} if "#s" in update + condition else {}
        try:
            answer = self._client.update_item(
                TableName=self._table,
                Key=_key(tick_id),
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeValues=values,
                ReturnValues="ALL_NEW",
                **names,
            )
        except self._client.exceptions.ConditionalCheckFailedException:
            return None
        except (ClientError, BotoCoreError) as error:
            raise as_aws_error(error, unit=tick_id) from error
        found: dict[str, Any] = answer["Attributes"]
        return found

    def _call(self, operation: str, **arguments: Any) -> Any:
        try:
            return getattr(self._client, operation)(**arguments)
        except (ClientError, BotoCoreError) as error:
            raise as_aws_error(error, unit=self._table) from error


def _row(item: dict[str, Any]) -> Dispatch:
    return Dispatch(
        tick_id=item["tick_id"]["S"],
        org_id=item["org_id"]["S"],
        project_id=item["project_id"]["S"],
        state=DispatchState(item["state"]["S"]),
        generation=int(item["generation"]["N"]),
        attempt=int(item["attempt"]["N"]),
        lease_until=datetime.fromisoformat(item["lease_until"]["S"]),
        receipt_handle=item.get("receipt_handle", {}).get("S"),
        run_id=item.get("run_id", {}).get("S"),
        error=item.get("last_error", {}).get("S"),
    )


def _times(now: datetime) -> dict[str, Any]:
    return {":now": _s(_instant(now)), ":epoch": _n(int(now.timestamp()))}


def _instant(at: datetime) -> str:
    """One width in UTC, so that text compares as time does."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")


def _key(tick_id: str) -> dict[str, Any]:
    return {"tick_id": _s(tick_id)}


def _s(value: str) -> dict[str, Any]:
    return {"S": str(value)}


def _n(value: int) -> dict[str, Any]:
    return {"N": str(value)}
