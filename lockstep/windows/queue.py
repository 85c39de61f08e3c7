"""The producer's side of `ddapi_queue`: new READY rows, gap records, plain reads.

What belongs here: how a row is spelled in DynamoDB, conditional inserts, reads. What does not: claims and transitions
of an apply (ledger.py). A row that exists is never touched here, so an APPLIED window cannot become READY again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from lockstep.windows.model import (
    GAP_PREFIX,
    QUEUE_TABLE,
    Gap,
    QueueRow,
    Window,
    WindowKind,
    WindowStatus,
    format_instant,
    parse_instant,
    parse_stoptime,
    stoptime,
)

# Sort keys of windows are twelve digits; `full#`, `gap#` and `log#` sort after every digit.
_FIRST_STOP = "000000000000"
_LAST_STOP = "999999999999"

Item = Mapping[str, Any]


class WindowQueue:
    """Queue rows as the producer needs them. `client` is a DynamoDB client, given by the caller."""

    def __init__(self, client: Any, table: str = QUEUE_TABLE) -> None:
        self._client = client
        self._table = table

    def add_ready(self, window: Window, checksum: str) -> bool:
        """Insert the READY row of a whole window. False if a row exists, in whatever state: it is left alone."""
        row = QueueRow(window, WindowStatus.READY, window.prefix, checksum)
        try:
            self._client.put_item(
                TableName=self._table, Item=to_item(row), ConditionExpression="attribute_not_exists(vault_id)"
            )
        except self._client.exceptions.ConditionalCheckFailedException:
            return False
        return True

    def get(self, window: Window) -> QueueRow | None:
        """The row of a window, read consistently."""
        return self._get(window.vault, window.sort_key)

    def rows(
        self, vault: str, *, after: datetime | None = None, kind: WindowKind = WindowKind.INCREMENTAL
    ) -> Iterator[QueueRow]:
        """Rows that stop after `after`, in order of their stop time. A key condition, never a filter over history."""
        lead = "" if kind is WindowKind.INCREMENTAL else f"{kind}#"
        first = _FIRST_STOP if after is None else stoptime(after)
        for item in self._between(vault, lead + first, lead + _LAST_STOP):
            row = from_item(item)
            if after is None or row.window.stop > after:
                yield row

    def last(self, vault: str) -> QueueRow | None:
        """The incremental with the latest stop time, found from the end without reading history."""
        found = self._client.query(
            TableName=self._table,
            KeyConditionExpression="vault_id = :vault AND stoptime BETWEEN :first AND :last",
            ExpressionAttributeValues={":vault": _s(vault), ":first": _s(_FIRST_STOP), ":last": _s(_LAST_STOP)},
            ConsistentRead=True,
            ScanIndexForward=False,
            Limit=1,
        )["Items"]
        return from_item(found[0]) if found else None

    def newest_known(self, vault: str) -> datetime | None:
        """The latest stop that the vault has listed, fetched or not: the vault's own clock, as far as we know it."""
        last, gaps = self.last(vault), self.gaps(vault)
        stops = [gap.stop for gap in gaps] + ([last.window.stop] if last else [])
        return max(stops, default=None)

    def replace(self, row: QueueRow, checksum: str) -> bool:
        """Point a row at raw files that were fetched anew. False if the row is no longer as it was read, or APPLIED."""
        if row.status is WindowStatus.APPLIED:
            return False
        try:
            self._client.update_item(
                TableName=self._table,
                Key=_key(row.window.vault, row.window.sort_key),
                UpdateExpression="SET checksum = :new",
                ConditionExpression="#status = :was AND checksum = :old",
                ExpressionAttributeNames={"#status": "status"},
                ExpressionAttributeValues={
                    ":new": _s(checksum),
                    ":old": _s(row.checksum),
                    ":was": _s(row.status.value),
                },
            )
        except self._client.exceptions.ConditionalCheckFailedException:
            return False
        return True

    def record_gap(self, gap: Gap, *, now: datetime) -> None:
        """Remember that a stretch is missing and why. Each call is one more attempt; the first sighting stays."""
        sets = {"reason": _s(gap.reason[:1000]), "last_seen": _s(format_instant(now)), "kind": _s("gap")}
        if gap.start is not None:
            sets["starttime"] = _s(stoptime(gap.start))
        if gap.next_retry is not None:
            sets["next_retry"] = _s(format_instant(gap.next_retry))
        words = ", ".join(f"#{name} = :{name}" for name in sets)
        self._client.update_item(
            TableName=self._table,
            Key=_key(gap.vault, gap.sort_key),
            UpdateExpression=f"SET {words}, first_seen = if_not_exists(first_seen, :now) ADD attempt_count :one",
            ExpressionAttributeNames={f"#{name}": name for name in sets},
            ExpressionAttributeValues={f":{name}": value for name, value in sets.items()}
            | {":now": _s(format_instant(now)), ":one": {"N": "1"}},
        )

    def close_gap(self, gap: Gap) -> None:
        """Forget a gap whose windows have rows now."""
        self._client.delete_item(TableName=self._table, Key=_key(gap.vault, gap.sort_key))

    def gaps(self, vault: str) -> list[Gap]:
        """The open gaps of a vault, in order."""
        found = self._between(vault, GAP_PREFIX + _FIRST_STOP, GAP_PREFIX + _LAST_STOP)
        return [_gap_from_item(item) for item in found]

    def _get(self, vault: str, sort_key: str) -> QueueRow | None:
        found = self._client.get_item(TableName=self._table, Key=_key(vault, sort_key), ConsistentRead=True)
        return from_item(found["Item"]) if "Item" in found else None

    def _between(self, vault: str, first: str, last: str) -> Iterator[Item]:
        pages = self._client.get_paginator("query").paginate(
            TableName=self._table,
            KeyConditionExpression="vault_id = :vault AND stoptime BETWEEN :first AND :last",
            ExpressionAttributeValues={":vault": _s(vault), ":first": _s(first), ":last": _s(last)},
            ConsistentRead=True,
        )
        for page in pages:
            yield from page["Items"]


def to_item(row: QueueRow) -> dict[str, Any]:
    """A row as DynamoDB stores it. Absent values are absent attributes."""
    window = row.window
    item = {
        **_key(window.vault, window.sort_key),
        "status": _s(row.status.value),
        "s3_prefix": _s(row.s3_prefix),
        "checksum": _s(row.checksum),
        "attempt_count": _n(row.attempt_count),
        "starttime": _s(stoptime(window.start)),
        "epoch": _n(window.epoch),
        "fence": _n(row.fence),
        "kind": _s(window.kind.value),
    }
    if row.last_error is not None:
        item["last_error"] = _s(row.last_error)
    if row.lease_until is not None:
        item["lease_until"] = _s(format_instant(row.lease_until))
    if row.owner is not None:
        item["owner"] = _s(row.owner)
    return item


def from_item(item: Item) -> QueueRow:
    """The row behind an item; the reverse of `to_item`, tolerant of numbers that a person's update left out."""
    lease = _text(item, "lease_until")
    window = Window(
        vault=str(item["vault_id"]["S"]),
        start=parse_stoptime(str(item["starttime"]["S"])),
        stop=parse_stoptime(str(item["stoptime"]["S"]).rpartition("#")[2]),
        epoch=int(item["epoch"]["N"]),
        kind=WindowKind(_text(item, "kind") or WindowKind.INCREMENTAL),
    )
    return QueueRow(
        window=window,
        status=WindowStatus(str(item["status"]["S"])),
        s3_prefix=str(item["s3_prefix"]["S"]),
        checksum=str(item["checksum"]["S"]),
        attempt_count=_number(item, "attempt_count"),
        last_error=_text(item, "last_error"),
        fence=_number(item, "fence"),
        lease_until=parse_instant(lease) if lease else None,
        owner=_text(item, "owner"),
    )


def _gap_from_item(item: Item) -> Gap:
    times = {name: _text(item, name) for name in ("next_retry", "first_seen", "last_seen")}
    start = _text(item, "starttime")
    return Gap(
        vault=str(item["vault_id"]["S"]),
        stop=parse_stoptime(str(item["stoptime"]["S"]).removeprefix(GAP_PREFIX)),
        reason=_text(item, "reason") or "",
        start=parse_stoptime(start) if start else None,
        attempt_count=_number(item, "attempt_count"),
        **{name: parse_instant(text) if text else None for name, text in times.items()},
    )


def _key(vault: str, sort_key: str) -> dict[str, Any]:
    return {"vault_id": _s(vault), "stoptime": _s(sort_key)}


def _s(text: str) -> dict[str, str]:
    return {"S": text}


def _n(number: int) -> dict[str, str]:
    return {"N": str(number)}


def _text(item: Item, name: str) -> str | None:
    value = item.get(name, {}).get("S")
    return None if value is None else str(value)


def _number(item: Item, name: str) -> int:
    return int(item.get(name, {}).get("N", "0"))
