"""The single table as a few operations with conditions: on DynamoDB, and in memory with the same meaning.

What belongs here: items, conditions, transactions, paging, TTL-on-read. What does not: what the items mean (store.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from boto3.dynamodb.types import TypeDeserializer, TypeSerializer
from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.errors import InvalidInput, Transient

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

Item = dict[str, Any]
ItemKey = tuple[str, str]

TTL = "ttl"
INDEX = "GSI1"
_MOST_IN_TRANSACTION = 100
_MOST_IN_BATCH = 100
_CONFLICT_TRIES = 4


class Absent(NamedTuple):
    """No such item yet."""


class Equals(NamedTuple):
    """An attribute has this value; an item that does not exist fails it."""

    name: str
    value: str | int


class Free(NamedTuple):
    """No such item, or its time is over, or it ends after `latest`: whoever wrote it had a wrong clock."""

    now: int
    latest: int | None = None


class Lacks(NamedTuple):
    """No such item, or one without this attribute. A set that has lost its last member is not there any more."""

    name: str


Condition = Absent | Equals | Free | Lacks | None


class Put(NamedTuple):
    """Write the whole item."""

    item: Item
    condition: Condition = None


class Merge(NamedTuple):
    """Change some attributes and leave the rest; makes the item if it is not there and no condition forbids it."""

    pk: str
    sk: str
    values: Mapping[str, Any] = {}
    add: Mapping[str, Any] = {}
    remove_members: Mapping[str, set[str]] = {}
    condition: Condition = None


class Delete(NamedTuple):
    """Remove the item."""

    pk: str
    sk: str
    condition: Condition = None


Write = Put | Merge | Delete


class Table(Protocol):
    """What a store needs. Every read leaves out what has expired; every write happens whole or not at all."""

    def get(self, pk: str, sk: str, now: int) -> Item | None:
        """One item, as of the last write."""
        ...

    def get_many(self, keys: Iterable[ItemKey], now: int) -> dict[ItemKey, Item]:
        """Many items, as of the last write; missing ones are left out."""
        ...

    def query(self, pk: str, prefix: str, now: int, *, limit: int | None = None, newest: bool = False) -> list[Item]:
        """Items under one key whose sort key begins so, in its order or backwards; all pages, up to `limit`."""
        ...

    def index(self, pk: str, now: int, *, limit: int | None = None) -> list[Item]:
        """Items of one partition of GSI1, in the order of its sort key. May lag behind the table."""
        ...

    def write(self, writes: Sequence[Write]) -> bool:
        """All writes or none. False if a condition did not hold."""
        ...


def is_alive(item: Mapping[str, Any], now: int) -> bool:
    """TTL deletes lag by hours, so a reader decides itself."""
    expires = int(item.get(TTL, 0) or 0)
    return expires == 0 or expires > now


# --- DynamoDB --------------------------------------------------------------------------------------------------------


class DynamoTable:
    """The table on DynamoDB. Counts the items it reads and writes, for those who want to know what a step costs."""

    def __init__(
        self, client: DynamoDBClient, name: str = "readiness", *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._client: Any = client
        self._name = name
        self._sleep = sleep
        self._dump = TypeSerializer().serialize
        self._load = TypeDeserializer().deserialize
        self.items_read = 0
        self.items_written = 0

    def get(self, pk: str, sk: str, now: int) -> Item | None:
        """One item, strongly consistent."""
        answer = self._call("get_item", TableName=self._name, Key=self._key(pk, sk), ConsistentRead=True)
        self.items_read += 1
        item = self._plain(answer["Item"]) if "Item" in answer else None
        return item if item is not None and is_alive(item, now) else None

    def get_many(self, keys: Iterable[ItemKey], now: int) -> dict[ItemKey, Item]:
        """Batches of 100, strongly consistent; what DynamoDB leaves unprocessed is asked for again."""
        todo = [self._key(pk, sk) for pk, sk in dict.fromkeys(keys)]
        found: dict[ItemKey, Item] = {}
        idle = 0
        while todo:
            batch, todo = todo[:_MOST_IN_BATCH], todo[_MOST_IN_BATCH:]
            request = {self._name: {"Keys": batch, "ConsistentRead": True}}
            answer = self._call("batch_get_item", RequestItems=request)
            rows = answer["Responses"].get(self._name, [])
            self.items_read += len(rows)
            left = answer.get("UnprocessedKeys", {}).get(self._name, {}).get("Keys", [])
            idle = idle + 1 if len(left) == len(batch) else 0
            if idle > _CONFLICT_TRIES:
                raise Transient("DynamoDB processed none of the keys.", unit=self._name)
            if left:
                self._sleep(0.05 * 2**idle)
            todo += left
            for row in rows:
                item = self._plain(row)
                if is_alive(item, now):
                    found[(item["PK"], item["SK"])] = item
        return found

    def query(self, pk: str, prefix: str, now: int, *, limit: int | None = None, newest: bool = False) -> list[Item]:
        """All pages."""
        condition = {"expression": "PK = :pk", "values": {":pk": pk}}
        if prefix:  # an empty text is no valid key value
            condition = {"expression": "PK = :pk AND begins_with(SK, :sk)", "values": {":pk": pk, ":sk": prefix}}
        return self._pages(condition, now, limit, ConsistentRead=True, ScanIndexForward=not newest)

    def index(self, pk: str, now: int, *, limit: int | None = None) -> list[Item]:
        """All pages of the index."""
        return self._pages({"expression": "GSI1PK = :pk", "values": {":pk": pk}}, now, limit, IndexName=INDEX)

    def write(self, writes: Sequence[Write]) -> bool:
        """One call for one item, a transaction for several."""
        if not writes:
            return True
        if len(writes) > _MOST_IN_TRANSACTION:
            raise InvalidInput(f"{len(writes)} items do not fit into one transaction.", unit=self._name)
        requests = [self._request(write) for write in writes]
        self.items_written += len(writes)
        if len(requests) == 1:
            ((kind, request),) = requests
            return self._conditional(f"{kind.lower()}_item", request)
        return self._transaction([{kind: request} for kind, request in requests])

    def _transaction(self, items: list[dict[str, Any]]) -> bool:
        for attempt in range(_CONFLICT_TRIES):
            try:
                self._client.transact_write_items(TransactItems=items)
                return True
            except ClientError as error:
                if error.response["Error"]["Code"] != "TransactionCanceledException":
                    raise as_aws_error(error, unit=self._name) from error
                codes = {reason.get("Code") for reason in error.response.get("CancellationReasons", [])}
                if "ConditionalCheckFailed" in codes:
                    return False
                if not codes & {"TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"}:
                    raise as_aws_error(error, unit=self._name) from error
                self._sleep(0.05 * 2**attempt)
            except BotoCoreError as error:
                raise as_aws_error(error, unit=self._name) from error
        raise Transient("another transaction kept the same items.", unit=self._name)

    def _conditional(self, operation: str, request: dict[str, Any]) -> bool:
        try:
            getattr(self._client, operation)(**request)
        except ClientError as error:
            if error.response["Error"]["Code"] == "ConditionalCheckFailedException":
                return False
            raise as_aws_error(error, unit=self._name) from error
        except BotoCoreError as error:
            raise as_aws_error(error, unit=self._name) from error
        return True

    def _request(self, write: Write) -> tuple[str, dict[str, Any]]:
        expression = _Expression(self._dump)
        request: dict[str, Any] = {"TableName": self._name}
        if isinstance(write, Put):
            kind, request["Item"] = "Put", {name: self._dump(value) for name, value in write.item.items()}
        elif isinstance(write, Delete):
            kind, request["Key"] = "Delete", self._key(write.pk, write.sk)
        else:
            kind, request["Key"] = "Update", self._key(write.pk, write.sk)
            request["UpdateExpression"] = expression.update(write)
        condition = expression.condition(write.condition)
        if condition:
            request["ConditionExpression"] = condition
        return kind, {**request, **expression.attributes()}

    def _pages(self, condition: Mapping[str, Any], now: int, limit: int | None, **options: Any) -> list[Item]:
        found: list[Item] = []
        start: dict[str, Any] = {}
        while True:
            answer = self._call(
                "query",
                TableName=self._name,
                KeyConditionExpression=condition["expression"],
                ExpressionAttributeValues={name: {"S": value} for name, value in condition["values"].items()},
                **({"Limit": limit} if limit else {}),
                **options,
                **start,
            )
            self.items_read += len(answer["Items"])
            found += [item for row in answer["Items"] if is_alive(item := self._plain(row), now)]
            if "LastEvaluatedKey" not in answer or (limit is not None and len(found) >= limit):
                return found[:limit]
            start = {"ExclusiveStartKey": answer["LastEvaluatedKey"]}

    def _call(self, operation: str, **request: Any) -> Any:
        try:
            return getattr(self._client, operation)(**request)
        except (ClientError, BotoCoreError) as error:
            raise as_aws_error(error, unit=self._name) from error

    def _key(self, pk: str, sk: str) -> dict[str, Any]:
        return {"PK": {"S": pk}, "SK": {"S": sk}}

    def _plain(self, row: Mapping[str, Any]) -> Item:
        # Numbers come back as Decimal; all of ours are whole.
        return {
            name: int(value["N"]) if "N" in value else value["S"] if "S" in value else self._load(value)
            for name, value in row.items()
        }


class _Expression:
    """Names and values of one request's expressions."""

    def __init__(self, dump: Callable[[Any], Any]) -> None:
        self._dump = dump
        self._names: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    def attributes(self) -> dict[str, Any]:
        return {
            **({"ExpressionAttributeNames": self._names} if self._names else {}),
            **({"ExpressionAttributeValues": self._values} if self._values else {}),
        }

    def condition(self, condition: Condition) -> str:
        if condition is None:
            return ""
        if isinstance(condition, Absent):
            return f"attribute_not_exists({self._name('PK')})"
        if isinstance(condition, Lacks):
            return f"attribute_not_exists({self._name(condition.name)})"
        if isinstance(condition, Free):
            free = f"attribute_not_exists({self._name('PK')}) OR {self._name(TTL)} < {self._value(condition.now)}"
            return (
                free if condition.latest is None else f"{free} OR {self._name(TTL)} > {self._value(condition.latest)}"
            )
        return f"{self._name(condition.name)} = {self._value(condition.value)}"

    def update(self, write: Merge) -> str:
        parts = []
        if write.values:
            parts.append("SET " + ", ".join(f"{self._name(n)} = {self._value(v)}" for n, v in write.values.items()))
        if write.add:
            parts.append("ADD " + ", ".join(f"{self._name(n)} {self._value(v)}" for n, v in write.add.items()))
        if write.remove_members:
            removed = write.remove_members.items()
            parts.append("DELETE " + ", ".join(f"{self._name(n)} {self._value(v)}" for n, v in removed))
        return " ".join(parts)

    def _name(self, name: str) -> str:
        mark = f"#n{len(self._names)}"
        self._names[mark] = name
        return mark

    def _value(self, value: Any) -> str:
        mark = f":v{len(self._values)}"
        self._values[mark] = self._dump(value)
        return mark


# --- memory ----------------------------------------------------------------------------------------------------------


class MemoryTable:
    """The same in one process: for simulations and dry looks. The conformance suite holds both to the same answers."""

    def __init__(self) -> None:
        self._items: dict[ItemKey, Item] = {}
        self._lock = threading.Lock()

    def get(self, pk: str, sk: str, now: int) -> Item | None:
        """A copy of the item."""
        with self._lock:
            item = self._items.get((pk, sk))
            return dict(item) if item is not None and is_alive(item, now) else None

    def get_many(self, keys: Iterable[ItemKey], now: int) -> dict[ItemKey, Item]:
        """Copies."""
        found = ((key, self.get(*key, now)) for key in dict.fromkeys(keys))
        return {key: item for key, item in found if item is not None}

    def query(self, pk: str, prefix: str, now: int, *, limit: int | None = None, newest: bool = False) -> list[Item]:
        """By sort key."""
        rows = [item for (own, sk), item in self._sorted("SK") if own == pk and sk.startswith(prefix)]
        alive = [dict(item) for item in (reversed(rows) if newest else rows) if is_alive(item, now)]
        return alive[:limit]

    def index(self, pk: str, now: int, *, limit: int | None = None) -> list[Item]:
        """By the index's sort key."""
        rows = [item for _, item in self._sorted("GSI1SK") if item.get("GSI1PK") == pk and is_alive(item, now)]
        return [dict(item) for item in rows][:limit]

    def write(self, writes: Sequence[Write]) -> bool:
        """All or nothing."""
        with self._lock:
            if not all(self._holds(write) for write in writes):
                return False
            for write in writes:
                self._apply(write)
            return True

    def _sorted(self, attribute: str) -> Iterator[tuple[ItemKey, Item]]:
        with self._lock:
            rows = sorted(self._items.items(), key=lambda row: str(row[1].get(attribute, "")))
        yield from rows

    def _holds(self, write: Write) -> bool:
        key = (write.item["PK"], write.item["SK"]) if isinstance(write, Put) else (write.pk, write.sk)
        item, condition = self._items.get(key), write.condition
        if condition is None:
            return True
        if isinstance(condition, Absent):
            return item is None
        if isinstance(condition, Lacks):
            return item is None or condition.name not in item
        if isinstance(condition, Free):
            latest = float("inf") if condition.latest is None else condition.latest
            return item is None or (TTL in item and not condition.now <= item[TTL] <= latest)
        return item is not None and item.get(condition.name) == condition.value

    def _apply(self, write: Write) -> None:
        if isinstance(write, Put):
            self._items[(write.item["PK"], write.item["SK"])] = dict(write.item)
        elif isinstance(write, Delete):
            self._items.pop((write.pk, write.sk), None)
        else:
            item = dict(self._items.get((write.pk, write.sk), {"PK": write.pk, "SK": write.sk}))
            item.update(write.values)
            for name, value in write.add.items():
                before = item.get(name, set() if isinstance(value, set) else 0)
                item[name] = before | value if isinstance(value, set) else before + value
            for name, members in write.remove_members.items():
                item[name] = item.get(name, set()) - members
                if not item[name]:
                    del item[name]  # DynamoDB has no empty sets
            self._items[(write.pk, write.sk)] = item
