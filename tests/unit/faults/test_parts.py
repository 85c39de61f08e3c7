"""The parts in memory do what the adapters rely on: conditions, counters, hidden messages, conditional puts.

Silent failure guarded: a part that accepts everything would let the simulation pass with every guard removed.
"""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from lockstep.faults.parts import MemoryBucket, MemoryDynamo, MemoryQueue, etag
from lockstep.faults.schedule import SimulatedTime


def _table(**attributes: dict[str, str]) -> MemoryDynamo:
    client = MemoryDynamo({"t": ("id",)})
    client.put_item(TableName="t", Item={"id": {"S": "a"}, **attributes})
    return client


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("attribute_exists(id) AND (attribute_not_exists(fence) OR fence <= :n)", True),
        ("attribute_exists(id) AND fence < :n", False),
        ("#s <> :x AND n = :n", True),
        ("#s = :x OR n >= :n", True),
        ("#s = :x OR n > :n", False),
        ("attribute_not_exists(id) OR missing <= :n", False),
        ("begins_with(#s, :x)", False),
        ("begins_with(id, :a) AND n BETWEEN :n AND :n", True),
    ],
)
def test_a_condition_decides_as_dynamodb_does(condition: str, holds: bool):
    client = _table(n={"N": "10"}, status={"S": "READY"})
    request = {
        "TableName": "t",
        "Key": {"id": {"S": "a"}},
        "UpdateExpression": "SET seen = :n",
        "ConditionExpression": condition,
        "ExpressionAttributeNames": {"#s": "status"},
        "ExpressionAttributeValues": {":n": {"N": "10"}, ":x": {"S": "other"}, ":a": {"S": "a"}},
    }
    if holds:
        assert client.update_item(**request)["Attributes"]["seen"] == {"N": "10"}
    else:
        with pytest.raises(client.exceptions.ConditionalCheckFailedException):
            client.update_item(**request)
        assert "seen" not in client.tables["t"]["a",]


def test_an_update_sets_counts_and_removes():
    client = _table(n={"N": "2"}, old={"S": "x"}, kept={"S": "first"})
    after = client.update_item(
        TableName="t",
        Key={"id": {"S": "a"}},
        UpdateExpression="SET n = n + :one, kept = if_not_exists(kept, :x), new = :x REMOVE old ADD hits :one",
        ExpressionAttributeValues={":one": {"N": "1"}, ":x": {"S": "y"}},
    )["Attributes"]
    assert after == {"id": {"S": "a"}, "n": {"N": "3"}, "kept": {"S": "first"}, "new": {"S": "y"}, "hits": {"N": "1"}}


def test_a_transaction_changes_all_or_nothing():
    client = _table(n={"N": "1"})
    good = {"TableName": "t", "Key": {"id": {"S": "a"}}, "UpdateExpression": "SET n = :n"}
    good |= {"ExpressionAttributeValues": {":n": {"N": "5"}}}
    bad = {**good, "Key": {"id": {"S": "b"}}, "ConditionExpression": "attribute_exists(id)"}
    with pytest.raises(client.exceptions.TransactionCanceledException):
        client.transact_write_items(TransactItems=[{"Update": good}, {"Update": bad}])
    assert client.tables["t"]["a",]["n"] == {"N": "1"}


def test_a_transaction_puts_changes_and_deletes_and_says_which_condition_failed():
    client = _table(n={"N": "1"})
    put = {"Put": {"TableName": "t", "Item": {"id": {"S": "b"}}, "ConditionExpression": "attribute_not_exists(id)"}}
    delete = {"Delete": {"TableName": "t", "Key": {"id": {"S": "a"}}}}
    client.transact_write_items(TransactItems=[put, delete])
    assert set(client.tables["t"]) == {("b",)}
    with pytest.raises(client.exceptions.TransactionCanceledException) as refused:
        client.transact_write_items(TransactItems=[put, delete])
    assert [one["Code"] for one in refused.value.response["CancellationReasons"]] == ["ConditionalCheckFailed", "None"]


def test_a_set_grows_shrinks_and_is_gone_with_its_last_member():
    client = _table()
    for change, expected in (("ADD", {"SS": ["x", "y"]}), ("DELETE", None)):
        after = client.update_item(
            TableName="t",
            Key={"id": {"S": "a"}},
            UpdateExpression=f"{change} members :m",
            ExpressionAttributeValues={":m": {"SS": ["y", "x"]}},
        )["Attributes"]
        assert after.get("members") == expected


def test_a_query_finds_one_partition_of_a_table_or_an_index_in_order():
    client = MemoryDynamo({"t": ("pk", "sk")}, indexes={"GSI": "gsk"})
    for sk, gsk in (("b1", "2"), ("a1", "1"), ("b2", "3")):
        item = {"pk": {"S": "p"}, "sk": {"S": sk}, "gpk": {"S": "g"}, "gsk": {"S": gsk}}
        client.put_item(TableName="t", Item=item)
    client.put_item(TableName="t", Item={"pk": {"S": "q"}, "sk": {"S": "b3"}})
    values = {":p": {"S": "p"}, ":b": {"S": "b"}}
    found = client.query(
        TableName="t",
        KeyConditionExpression="pk = :p AND begins_with(sk, :b)",
        ExpressionAttributeValues=values,
        ScanIndexForward=False,
    )
    assert [item["sk"]["S"] for item in found["Items"]] == ["b2", "b1"]
    indexed = client.query(
        TableName="t",
        KeyConditionExpression="gpk = :g",
        ExpressionAttributeValues={":g": {"S": "g"}},
        IndexName="GSI",
        Limit=2,
    )
    assert [item["sk"]["S"] for item in indexed["Items"]] == ["a1", "b1"]


def test_a_message_is_hidden_comes_back_and_dies_after_its_last_receive():
    time = SimulatedTime()
    queue = MemoryQueue(time, max_receives=2)
    queue.send_message_batch(Entries=[{"Id": "0", "MessageBody": "x"}])
    for _ in range(2):
        assert len(queue.receive_message(MaxNumberOfMessages=10, VisibilityTimeout=30)["Messages"]) == 1
        assert queue.receive_message(MaxNumberOfMessages=10, VisibilityTimeout=30)["Messages"] == []
        time.pass_by(31)
    assert queue.receive_message(MaxNumberOfMessages=10, VisibilityTimeout=30)["Messages"] == []
    assert len(queue.dead) == 1


def test_a_conditional_put_refuses_what_it_did_not_see():
    bucket = MemoryBucket()
    bucket.put_object(Key="k", Body=b"1", IfNoneMatch="*")
    for condition in ({"IfNoneMatch": "*"}, {"IfMatch": etag(b"other")}):
        with pytest.raises(ClientError, match="PreconditionFailed"):
            bucket.put_object(Key="k", Body=b"2", **condition)
    bucket.put_object(Key="k", Body=b"2", IfMatch=etag(b"1"))
    assert bucket.get_object(Key="k")["Body"].read() == b"2"
