"""Parts of a simulated world: DynamoDB, SQS and S3 in memory, as far as the domain code asks of them.

What belongs here: what these services do to one call, whole or not at all. What does not: faults (schedule.py) and the
stores of one pipeline (worlds). The real adapters run on these clients, with their own expressions and conditions.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError, ConnectionClosedError

from lockstep.faults.schedule import SimulatedTime

Item = dict[str, Any]
_TOKEN = re.compile(r"\s*(<>|<=|>=|[()=<>,+]|[#:]?[A-Za-z_][A-Za-z0-9_]*)")
_CLAUSE = re.compile(r"\b(SET|REMOVE|ADD|DELETE)\b")


def aws_unreachable(step: str) -> ConnectionClosedError:
    """What boto3 raises when the connection closes before a whole answer came."""
    return ConnectionClosedError(endpoint_url=step)


class _Refusal(ClientError):
    """An error answer with a code."""

    code = ""

    def __init__(self, code: str | None = None, **more: Any) -> None:
        answer: Any = {"Error": {"Code": code or self.code, "Message": "simulated"}, **more}
        super().__init__(answer, "simulated")


class ConditionalCheckFailedException(_Refusal):
    """The condition did not hold; nothing was changed."""

    code = "ConditionalCheckFailedException"


class TransactionCanceledException(_Refusal):
    """One condition of a transaction did not hold; nothing was changed."""

    code = "TransactionCanceledException"


class _Exceptions:
    """`client.exceptions`, as boto3 offers it."""

    ConditionalCheckFailedException = ConditionalCheckFailedException
    TransactionCanceledException = TransactionCanceledException


class MemoryDynamo:
    """Tables of items. Reads are consistent, as the adapters ask for."""

    exceptions = _Exceptions

    def __init__(
        self,
        keys: Mapping[str, tuple[str, ...]],
        observe: Callable[[str, Item], None] | None = None,
        indexes: Mapping[str, str] | None = None,
    ) -> None:
        """What its tables are.

        Args:
            keys: The key attributes of each table.
            observe: Told of every item after a change.
            indexes: The sort key of each index.
        """
        self._keys = keys
        self._observe = observe or (lambda table, item: None)
        self._indexes = indexes or {}
        self.tables: dict[str, dict[tuple[str, ...], Item]] = {name: {} for name in keys}

    def get_item(self, *, TableName: str, Key: Item, **_: Any) -> dict[str, Any]:  # boto3's names
        """One item, or an answer without one."""
        found = self.tables[TableName].get(self._key(TableName, Key))
        return {} if found is None else {"Item": dict(found)}

    def batch_get_item(self, *, RequestItems: dict[str, Any]) -> dict[str, Any]:
        """Several items of several tables."""
        found = {
            table: [dict(one) for key in asked["Keys"] if (one := self.tables[table].get(self._key(table, key)))]
            for table, asked in RequestItems.items()
        }
        return {"Responses": found, "UnprocessedKeys": {}}

    def put_item(self, *, TableName: str, Item: Item, ConditionExpression: str = "", **more: Any) -> dict[str, Any]:
        """Write an item, if the condition holds."""
        key = self._key(TableName, Item)
        _require(ConditionExpression, self.tables[TableName].get(key, {}), more)
        self._store(TableName, key, dict(Item))
        return {}

    def update_item(self, *, TableName: str, Key: Item, **more: Any) -> dict[str, Any]:
        """Change an item, if the condition holds."""
        key, before = self._key(TableName, Key), self.tables[TableName].get(self._key(TableName, Key), {})
        _require(more.get("ConditionExpression", ""), before, more)
        after = _updated({**before, **Key}, more)
        self._store(TableName, key, after)
        return {"Attributes": dict(after)}

    def transact_write_items(self, *, TransactItems: list[dict[str, Any]]) -> dict[str, Any]:
        """All of the writes, or none."""
        writes = [next(iter(one.items())) for one in TransactItems]
        reasons = []
        for _, one in writes:
            key = self._key(one["TableName"], one.get("Key") or one["Item"])
            holds = _holds(one.get("ConditionExpression", ""), self.tables[one["TableName"]].get(key, {}), one)
            reasons.append({"Code": "None" if holds else "ConditionalCheckFailed"})
        if any(one["Code"] != "None" for one in reasons):
            raise TransactionCanceledException(CancellationReasons=reasons)
        do: dict[str, Callable[..., Any]] = {
            "Put": self.put_item,
            "Update": self.update_item,
            "Delete": self.delete_item,
        }
        for kind, one in writes:
            do[kind](**one)
        return {}

    def delete_item(self, *, TableName: str, Key: Item, ConditionExpression: str = "", **more: Any) -> dict[str, Any]:
        """Forget an item, if the condition holds."""
        key = self._key(TableName, Key)
        _require(ConditionExpression, self.tables[TableName].get(key, {}), more)
        self.tables[TableName].pop(key, None)
        return {}

    def query(self, *, TableName: str, KeyConditionExpression: str, **more: Any) -> dict[str, Any]:
        """Items of one partition, of the table or of an index, in the order of the sort key."""
        order = self._indexes[more["IndexName"]] if "IndexName" in more else self._keys[TableName][-1]
        partition, _, rest = KeyConditionExpression.partition(" AND ")
        name, _, value = partition.split()
        wanted = more["ExpressionAttributeValues"][value]
        rows = [item for item in self.tables[TableName].values() if item.get(name) == wanted]
        found = [dict(item) for item in rows if _holds(rest, item, more)]
        found.sort(key=lambda item: str(_plain(item.get(order))), reverse=not more.get("ScanIndexForward", True))
        return {"Items": found[: more.get("Limit", len(found))]}

    def get_paginator(self, operation: str) -> MemoryDynamo:
        """Everything is one page."""
        assert operation == "query"  # noqa: S101
        return self

    def paginate(self, **query: Any) -> Iterator[dict[str, Any]]:
        """The page."""
        yield self.query(**query)

    def _key(self, table: str, item: Item) -> tuple[str, ...]:
        return tuple(str(next(iter(item[name].values()))) for name in self._keys[table])

    def _store(self, table: str, key: tuple[str, ...], item: Item) -> None:
        self.tables[table][key] = item
        self._observe(table, item)


class MemoryQueue:
    """One SQS queue: messages are hidden while they are worked on, and come back; after so many receives they die."""

    def __init__(self, time: SimulatedTime, *, max_receives: int = 5) -> None:
        self._time = time
        self._max_receives = max_receives
        self._made = 0
        self.messages: dict[str, dict[str, Any]] = {}
        self.dead: list[dict[str, Any]] = []

    def get_queue_url(self, *, QueueName: str) -> dict[str, str]:
        """Its address."""
        return {"QueueUrl": f"memory:{QueueName}"}

    def send_message_batch(self, *, Entries: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        """Take messages."""
        for entry in Entries:
            self._made += 1
            name = f"m{self._made:05}"
            self.messages[name] = {
                "name": name,
                "body": entry["MessageBody"],
                "visible": 0.0,
                "receives": 0,
                "handle": "",
            }
        return {"Failed": []}

    def receive_message(self, *, MaxNumberOfMessages: int, VisibilityTimeout: int, **_: Any) -> dict[str, Any]:
        """Up to so many visible messages, hidden from now on."""
        now, found = self._time.monotonic(), []
        for one in [one for one in self.messages.values() if one["visible"] <= now][:MaxNumberOfMessages]:
            if one["receives"] >= self._max_receives:
                self.dead.append(self.messages.pop(one["name"]))
                continue
            one["receives"] += 1
            one["visible"], one["handle"] = now + VisibilityTimeout, f"{one['name']}/{one['receives']}"
            attributes = {"ApproximateReceiveCount": str(one["receives"]), "SentTimestamp": "0"}
            found.append(
                {
                    "MessageId": one["name"],
                    "ReceiptHandle": one["handle"],
                    "Body": one["body"],
                    "Attributes": attributes,
                }
            )
        return {"Messages": found}

    def delete_message_batch(self, *, Entries: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        """Forget messages."""
        for entry in Entries:
            self.messages.pop(entry["ReceiptHandle"].partition("/")[0], None)
        return {"Failed": []}

    def change_message_visibility_batch(self, *, Entries: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        """Hide for longer, or no longer."""
        failed = []
        for entry in Entries:
            one = self.messages.get(entry["ReceiptHandle"].partition("/")[0])
            if one is None or one["handle"] != entry["ReceiptHandle"]:
                failed.append({"Id": entry["Id"]})
            else:
                one["visible"] = self._time.monotonic() + entry["VisibilityTimeout"]
        return {"Failed": failed}

    def repeat(self, choose: Callable[[list[str]], str]) -> None:
        """Deliver one message twice, the copy out of order: what a standard queue may do."""
        if self.messages:
            name = choose(sorted(self.messages))
            self._made += 1
            copy = {**self.messages[name], "name": f"m{self._made:05}", "visible": 0.0, "receives": 0}
            self.messages = {copy["name"]: copy, **self.messages}

    def lose(self, choose: Callable[[list[str]], str]) -> None:
        """Lose one message: a purge, an expired retention."""
        if self.messages:
            del self.messages[choose(sorted(self.messages))]


class MemoryBucket:
    """One S3 bucket: whole objects, conditional puts, strong reads."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts: list[str] = []

    def put_object(self, *, Key: str, Body: bytes, **more: Any) -> dict[str, Any]:
        """Put an object under its name, if the condition holds and the bytes are those of the checksum."""
        there = self.objects.get(Key)
        if more.get("IfNoneMatch") == "*" and there is not None:
            raise _Refusal("PreconditionFailed")
        if "IfMatch" in more and (there is None or more["IfMatch"] != etag(there)):
            raise _Refusal("PreconditionFailed")
        if "ChecksumSHA256" in more and base64.b64decode(more["ChecksumSHA256"]) != hashlib.sha256(Body).digest():
            raise _Refusal("BadDigest")
        self.objects[Key] = Body
        self.puts.append(Key)
        return {"ETag": etag(Body)}

    def head_object(self, *, Key: str, **_: Any) -> dict[str, Any]:
        """What the name holds."""
        if Key not in self.objects:
            raise _Refusal("404")
        return {"ETag": etag(self.objects[Key]), "ContentLength": len(self.objects[Key])}

    def get_object(self, *, Key: str, **_: Any) -> dict[str, Any]:
        """The bytes."""
        if Key not in self.objects:
            raise _Refusal("NoSuchKey")
        return {"Body": io.BytesIO(self.objects[Key]), "ETag": etag(self.objects[Key])}


def etag(body: bytes) -> str:
    """The tag of an object."""
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


# --- DynamoDB's expressions ---------------------------------------------------------------------------------------


def _require(condition: str, item: Item, request: Mapping[str, Any]) -> None:
    if not _holds(condition, item, request):
        raise ConditionalCheckFailedException


def _holds(condition: str, item: Item, request: Mapping[str, Any]) -> bool:
    return not condition or _Condition(condition, item, request).holds()


class _Condition:
    """A condition, read by descent: OR of ANDs of comparisons, functions and brackets."""

    def __init__(self, text: str, item: Item, request: Mapping[str, Any]) -> None:
        self._tokens = _TOKEN.findall(text)
        self._item = item
        self._names = request.get("ExpressionAttributeNames") or {}
        self._values = request.get("ExpressionAttributeValues") or {}

    def holds(self) -> bool:
        """Whether it does."""
        found = self._and()
        while self._tokens and self._tokens[0] == "OR":
            self._tokens.pop(0)
            found = self._and() or found
        return found

    def _and(self) -> bool:
        found = self._one()
        while self._tokens and self._tokens[0] == "AND":
            self._tokens.pop(0)
            found = self._one() and found
        return found

    def _one(self) -> bool:
        token = self._tokens.pop(0)
        if token == "(":  # noqa: S105  # no secret
            found = self.holds()
            self._tokens.pop(0)
            return found
        if token in ("attribute_exists", "attribute_not_exists"):
            _, name, _ = self._tokens.pop(0), self._tokens.pop(0), self._tokens.pop(0)
            return (self._name(name) in self._item) is (token == "attribute_exists")  # noqa: S105
        if token == "begins_with":  # noqa: S105
            _, name, _, prefix, _ = (self._tokens.pop(0) for _ in range(5))
            return str(self._value(name)).startswith(self._value(prefix))
        operator, right = self._tokens.pop(0), self._tokens.pop(0)
        if operator == "BETWEEN":
            _, last = self._tokens.pop(0), self._tokens.pop(0)
            return bool(self._value(right) <= self._value(token) <= self._value(last))
        return _compare(operator, self._value(token), self._value(right))

    def _name(self, token: str) -> str:
        return str(self._names.get(token, token))

    def _value(self, token: str) -> Any:
        return _plain(self._values[token] if token.startswith(":") else self._item.get(self._name(token)))


def _compare(operator: str, left: Any, right: Any) -> bool:
    if operator in ("=", "<>"):
        return bool(left == right) is (operator == "=")
    if left is None or right is None:
        return False
    return bool({"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[operator])


def _plain(value: Item | None) -> Any:
    if value is None or "NULL" in value:
        return None
    return int(value["N"]) if "N" in value else value.get("S")


def _updated(item: Item, request: Mapping[str, Any]) -> Item:
    names = request.get("ExpressionAttributeNames") or {}
    values = request.get("ExpressionAttributeValues") or {}
    pieces = _CLAUSE.split(request["UpdateExpression"])[1:]
    before = dict(item)
    for clause, text in zip(pieces[::2], pieces[1::2], strict=True):
        for part in re.split(r",(?![^(]*\))", text):
            words = part.split()
            name = str(names.get(words[0], words[0]))
            if clause == "REMOVE":
                item.pop(name, None)
            elif clause == "DELETE":
                _put_members(item, name, _members(before, name) - set(values[words[1]]["SS"]))
            elif clause == "ADD" and "SS" in values[words[1]]:
                _put_members(item, name, _members(before, name) | set(values[words[1]]["SS"]))
            elif clause == "ADD":
                item[name] = {"N": str((_plain(before.get(name)) or 0) + _plain(values[words[1]]))}
            else:
                item[name] = _set(part.partition("=")[2].strip(), before, names, values)
    return item


def _members(item: Item, name: str) -> set[str]:
    return set(item.get(name, {}).get("SS", ()))


def _put_members(item: Item, name: str, members: set[str]) -> None:
    """A set that lost its last member is gone: DynamoDB keeps no empty ones."""
    item.pop(name, None)
    if members:
        item[name] = {"SS": sorted(members)}


def _set(text: str, before: Item, names: Mapping[str, str], values: Item) -> Item:
    if text.startswith("if_not_exists("):
        name, value = (one.strip() for one in text[len("if_not_exists(") : -1].split(","))
        found: Item = before.get(names.get(name, name)) or values[value]
        return found
    if "+" in text:
        name, value = (one.strip() for one in text.split("+"))
        return {"N": str((_plain(before.get(names.get(name, name))) or 0) + _plain(values[value]))}
    result: Item = values[text]
    return result
