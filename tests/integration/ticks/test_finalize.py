"""From parts to a committed tick on the real parts: every answer of the contract, and what is left behind it."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from lockstep.kernel.clock import SystemClock
from lockstep.kernel.errors import Terminal
from lockstep.kernel.ids import SystemIds
from lockstep.ticks import bronze, rules
from lockstep.ticks.model import Limits, TickState, spell
from lockstep.ticks.parts import PartObjects, folder
from lockstep.ticks.silver.retention import _forget_parts
from tests.ticks_fixtures import new_tick_id, parquet, people, sha256, table
from tests.ticks_world import Sender, World

pytestmark = pytest.mark.stack


def _rows(spark: Any, world: World, sender: Sender, name: str = "people") -> Any:
    path = bronze.table_path(world.settings.lake_bucket, sender.secret.project_id, name)
    return spark.read.format("delta").load(path)


def test_a_tick_is_committed_announced_and_answered_for_ever(world: World, sender: Sender, spark: Any):
    draft = sender.put_all(sender.draft(people(10), people(5, 10)))
    answer = sender.finalize(draft)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert set(body) == {"tick_id", "status", "rows_inserted", "rows_replaced", "committed_at"}
    assert (body["tick_id"], body["status"]) == (draft.tick_id, "committed")
    assert (body["rows_inserted"], body["rows_replaced"]) == (15, 0)
    again = sender.finalize(draft, dict(reversed(draft.manifest.items())))
    assert (again.status_code, again.content) == (200, answer.content)
    assert again.headers["idempotent-replayed"] == "true"

    tick = sender.tick(draft.tick_id)
    (commit,) = tick.commits
    assert (tick.state, tick.sequence, tick.prev_tick_id) == (TickState.COMMITTED, 1, None)
    bronze.assert_commit(world.s3, world.settings.lake_bucket, commit)
    rows = bronze.read_tick(spark, world.settings.lake_bucket, tick, "people").orderBy("id").collect()
    assert [(row["id"], row["_file_seq"], row["_row"]) for row in rows] == [
        (number, number // 10, number % 10) for number in range(15)
    ]
    assert {(row["_tick_id"], row["_dt"]) for row in rows} == {(draft.tick_id, "20260507")}

    audit = world.audit_row(draft.tick_id)
    assert audit is not None
    assert (audit["bronze_db_etag"], audit["rows_inserted"], audit["org_id"]) == (
        commit.etag,
        "15",
        sender.secret.org_id,
    )
    (row, row_payload, row_left), (queue, message, message_left) = world.sent(draft.tick_id)
    assert (row, queue) == ("dynamodb:bronze_committed", "sqs:bronze-completed")
    assert row_left and message_left, "both leave before the 200"
    assert int(row_payload["attributes"]["expires_at"]) > 0
    assert message == {
        "schema_version": "1.0",
        "org_id": sender.secret.org_id,
        "project_id": sender.secret.project_id,
        "tick_id": draft.tick_id,
        "mode": "delta",
        "dt": "20260507",
        "bronze_db_key": commit.key,
        "bronze_db_etag": commit.etag,
        "emitted_at": body["committed_at"],
    }


class _Wrong(SystemClock):
    """The clock of a machine that is hours off."""

    def __init__(self, by: timedelta) -> None:
        self._by = by

    def now(self) -> datetime:
        return super().now() + self._by


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_replica_whose_clock_is_wrong_dates_nothing(world: World, sender: Sender, spark: Any, hours: int):
    """Guards the order of commits and silver's lag: the answer, the row, the message and the ledger have one time."""
    draft = sender.put_all(sender.draft(people(2)))
    before = world.store.now()
    with world.committer(spark, clock=_Wrong(timedelta(hours=hours))) as committer:
        result = committer.finalize(sender.project, draft.tick_id, draft.manifest).result
        again = committer.reingest(sender.secret.project_id, draft.tick_id)
    after = world.store.now()
    tick = sender.tick(draft.tick_id)
    assert tick.committed_at is not None
    assert before <= tick.committed_at <= again.updated_at <= after
    (_, row, _), (_, message, _), *_ = world.sent(draft.tick_id)
    assert result["committed_at"] == row["attributes"]["committed_at"] == message["emitted_at"]
    assert result["committed_at"] == spell(tick.committed_at)
    kept = timedelta(seconds=row["attributes"]["expires_at"] - tick.committed_at.timestamp())
    assert timedelta(days=30, seconds=-2) < kept <= timedelta(days=30)


def test_several_tables_are_one_tick(world: World, sender: Sender, spark: Any):
    parts = {
        0: people(3),
        1: people(4),
        7: parquet({"id": pa.array([1], pa.int32()), "at": pa.array([0], pa.date32())}),
    }
    columns = [{"name": "id", "type": "bigint"}, {"name": "at", "type": "timestamp"}]
    tables = [table("a", {0: parts[0]}), table("b", {1: parts[1]}), table("c", {7: parts[7]}, columns=columns)]
    draft = sender.put_all(sender.draft_of(tables, parts, mode="full"))
    assert sender.finalize(draft).json()["rows_inserted"] == 8
    tick = sender.tick(draft.tick_id)
    assert [commit.table for commit in tick.commits] == ["a", "b", "c"]
    (row,) = bronze.read_tick(spark, world.settings.lake_bucket, tick, "c").collect()
    assert (row["id"], row["at"].year) == (1, 1970)
    assert world.sent(draft.tick_id)[1][1]["bronze_db_key"] == tick.commits[-1].key


def test_columns_are_added_and_a_changed_type_is_refused(world: World, sender: Sender, spark: Any):
    first = sender.send(people(2))
    wider = parquet({"id": pa.array([9], pa.int32()), "name": ["n"], "age": pa.array([5], pa.int16())})
    columns = [{"name": "id", "type": "int"}, {"name": "name", "type": "text"}, {"name": "age", "type": "smallint"}]
    second = sender.send(wider, columns=columns)
    third = sender.send(people(1, 20))
    rows = {row["id"]: row["age"] for row in _rows(spark, world, sender).collect()}
    assert rows == {0: None, 1: None, 9: 5, 20: None}
    tick = sender.tick(first.tick_id)
    assert "age" not in bronze.read_tick(spark, world.settings.lake_bucket, tick, "people").columns
    changed = parquet({"id": ["x"], "name": ["n"]})
    columns = [{"name": "id", "type": "string"}, {"name": "name", "type": "string"}]
    refused = sender.finalize(sender.put_all(sender.draft(changed, columns=columns)))
    assert (refused.status_code, refused.json()["error_class"]) == (422, "SchemaConflict")
    assert [sender.tick(one.tick_id).sequence for one in (first, second, third)] == [1, 2, 3]


def test_what_is_missing_is_named_and_the_rest_is_kept(sender: Sender):
    draft = sender.draft(people(1), people(2), people(3))
    nothing = sender.finalize(draft)
    assert (nothing.status_code, nothing.json()["missing"]) == (409, [0, 1, 2])
    sender.put(draft.tick_id, 0, draft.parts[0])
    sender.put(draft.tick_id, 2, people(30))
    refused = sender.finalize(draft)
    body = refused.json()
    assert (refused.status_code, body["missing"], body["mismatched_sha"]) == (409, [1], [2])
    assert refused.headers["content-type"] == "application/problem+json"
    seen = sender.get(draft.tick_id).json()
    assert (seen["state"], seen["missing"], seen["mismatched_sha"]) == ("uploading", [1], [2])
    sender.put(draft.tick_id, 1, draft.parts[1])
    assert sender.put(draft.tick_id, 2, draft.parts[2], If_Match=f'"{sha256(people(30))}"').status_code == 202
    assert sender.finalize(draft).status_code == 200


@pytest.mark.parametrize(
    ("change", "error_class"),
    [
        ({"mode": "append"}, "InvalidManifest"),
        ({"org_id": "somebody"}, "InvalidManifest"),
        ({"tick_id": "other"}, "InvalidManifest"),
        ({"tables": []}, "InvalidManifest"),
    ],
)
def test_a_bad_manifest_is_422_and_the_tick_can_be_mended(sender: Sender, change: dict[str, Any], error_class: str):
    draft = sender.put_all(sender.draft())
    refused = sender.finalize(draft, {**draft.manifest, **change})
    assert (refused.status_code, refused.json()["error_class"]) == (422, error_class)
    assert refused.json()["message"]
    assert sender.get(draft.tick_id).json()["state"] == "failed"
    assert sender.get(draft.tick_id).json()["error"]["error_class"] == error_class


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nonsense", b"\xff", b'{"a": NaN}', b"[" * 50_000])
def test_what_is_no_manifest_is_422(sender: Sender, body: bytes):
    answer = sender.http.post(sender.path("t", "finalize"), content=body, headers=sender.headers)
    assert (answer.status_code, answer.json()["error_class"]) == (422, "InvalidManifest")


@pytest.mark.parametrize("note", ['"\\u0000"', '"\\ud800"', "1e999"])
def test_a_manifest_that_the_database_cannot_keep_is_422_and_not_a_retry(sender: Sender, note: str):
    draft = sender.put_all(sender.draft(people(1)))
    body = json.dumps(draft.manifest).removesuffix("}") + f', "note": {note}}}'
    answer = sender.http.post(sender.path(draft.tick_id, "finalize"), content=body, headers=sender.headers)
    assert (answer.status_code, answer.json()["error_class"]) == (422, "InvalidManifest")


def test_a_part_whose_column_cannot_be_named_is_stored_and_refused_by_its_finalize(sender: Sender):
    draft = sender.put_all(sender.draft(parquet({"a\x00b": [1]})))
    answer = sender.finalize(draft)
    assert (answer.status_code, answer.json()["error_class"]) == (422, "UnreadablePart")


def test_a_manifest_in_which_a_name_stands_twice_is_422_and_says_which(sender: Sender):
    """Guards against two readers of one manifest: whoever checked the first `mode` must not commit under the second."""
    draft = sender.draft(people(1))
    assert sender.put(draft.tick_id, 0, draft.parts[0]).status_code == 202
    doubled = json.dumps(draft.manifest).removesuffix("}") + ', "mode": "delta"}'
    answer = sender.http.post(sender.path(draft.tick_id, "finalize"), content=doubled, headers=sender.headers)
    assert (answer.status_code, answer.json()["error_class"]) == (422, "InvalidManifest")
    assert "'mode' more than once" in answer.json()["message"]


def test_lower_limits_take_no_answer_back(world: World, sender: Sender, spark: Any):
    """Guards the 200: an agent that asks once more after a new deployment must not be told that its tick is refused."""
    draft = sender.put_all(sender.draft(people(1), people(2)))
    first = sender.finalize(draft).json()
    with world.committer(spark) as committer:
        committer._plant = replace(committer._plant, limits=Limits(max_parts=1, max_tick_bytes=1))
        assert committer.finalize(sender.project, draft.tick_id, draft.manifest).result == first
        assert committer.reingest(sender.secret.project_id, draft.tick_id).generation == 2
        late = sender.put_all(sender.draft(people(1), people(2)))
        with pytest.raises(rules.InvalidManifest, match="at most"):
            committer.finalize(sender.project, late.tick_id, late.manifest)


def test_another_manifest_for_a_committed_tick_is_422_and_changes_nothing(world: World, sender: Sender):
    """Guards against a restored machine that sends other data under a used id."""
    draft = sender.send(people(2))
    before = sender.tick(draft.tick_id)
    other = copy.deepcopy(draft.manifest)
    other["dt"] = "20260508"
    answer = sender.finalize(draft, other)
    assert (answer.status_code, answer.json()["error_class"]) == (422, "ManifestConflict")
    assert sender.tick(draft.tick_id) == before


def test_a_tick_id_belongs_to_the_project_that_committed_it(world: World, sender: Sender):
    draft = sender.send()
    other = world.sender()
    answer = other.finalize(other.put_all(other.draft(tick_id=draft.tick_id)))
    assert (answer.status_code, answer.json()["error_class"]) == (422, "TickIdTaken")


def test_a_tick_waits_for_the_one_before_it(world: World, sender: Sender):
    first, second = sender.draft(people(1)), None
    second = sender.put_all(sender.draft(people(2), prev_tick_id=first.tick_id))
    early = sender.finalize(second)
    assert (early.status_code, early.json()["waits_for"]) == (425, first.tick_id)
    assert int(early.headers["retry-after"]) > 0
    sender.put_all(first)
    assert sender.finalize(second).status_code == 425, "uploaded is not committed"
    assert sender.finalize(first).status_code == 200
    assert sender.finalize(second).status_code == 200
    assert sender.tick(second.tick_id).prev_tick_id == first.tick_id
    fork = sender.finalize(sender.put_all(sender.draft(prev_tick_id=first.tick_id)))
    assert (fork.status_code, fork.json()["error_class"]) == (422, "BrokenChain")
    chain = world.store.chain(sender.secret.project_id)
    assert [(tick.sequence, tick.tick_id) for tick in chain] == [(1, first.tick_id), (2, second.tick_id)]


def test_fifty_of_the_same_finalize_commit_once(world: World, sender: Sender):
    draft = sender.put_all(sender.draft(people(3)))
    with ThreadPoolExecutor(10) as executor:
        answers = list(executor.map(lambda _: sender.finalize(draft), range(50)))
    assert {answer.status_code for answer in answers} <= {200, 425}
    good = {answer.content for answer in answers if answer.status_code == 200}
    assert len(good) == 1
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers if answer.status_code == 425)
    assert len(world.sent(draft.tick_id)) == 2
    assert sender.tick(draft.tick_id).sequence == 1


@pytest.mark.parametrize("damage", ["text", "pages", "truncated"])
def test_a_part_that_cannot_be_read_is_422_and_not_a_retry(sender: Sender, damage: str):
    """Guards the lane: an agent that is told to try again would come back with the same bytes for ever."""
    good = parquet({"id": pa.array(range(2000), pa.int64()), "name": ["x" * 20] * 2000}, compression="snappy")
    body = {
        "text": b"id,name\n1,a\n",
        "pages": good[:4] + bytes(255 - one for one in good[4:400]) + good[400:],
        "truncated": good[:-20],
    }[damage]
    draft = sender.draft(body)
    draft.manifest["tables"][0]["parquets"][0]["rows"] = 2000
    answer = sender.finalize(sender.put_all(draft))
    assert (answer.status_code, answer.json()["error_class"]) == (422, "UnreadablePart"), answer.text
    assert sender.send(people(1)), "the lane is free"


def test_a_lying_manifest_is_refused_before_spark_reads_anything(sender: Sender):
    draft = sender.put_all(sender.draft(people(3)))
    for name, value in (("rows", 4), ("bytes", 1)):
        body = copy.deepcopy(draft.manifest)
        body["tables"][0]["parquets"][0][name] = value
        answer = sender.finalize(draft, body)
        assert (answer.status_code, answer.json()["error_class"]) == (422, "SchemaMismatch")
    wrong = sender.finalize(sender.put_all(sender.draft(people(1), columns=[{"name": "id", "type": "bigint"}])))
    assert (wrong.status_code, wrong.json()["error_class"]) == (422, "SchemaMismatch")


def test_a_part_that_has_a_column_twice_is_422_and_not_a_retry(sender: Sender):
    """Guards the lane: Spark refuses such a file in words that say nothing of the tick, at every attempt."""
    twice = pa.Table.from_arrays([pa.array([1]), pa.array(["n"]), pa.array([2])], names=["id", "name", "id"])
    answer = sender.finalize(sender.put_all(sender.draft(parquet(twice))))
    assert (answer.status_code, answer.json()["error_class"]) == (422, "SchemaMismatch")
    assert "id 2 times" in answer.json()["message"]


def test_ten_thousand_parts_are_refused(sender: Sender):
    draft = sender.draft(people(1))
    one = draft.manifest["tables"][0]["parquets"][0]
    draft.manifest["tables"][0]["parquets"] = [{**one, "file_seq": number} for number in range(10_000)]
    answer = sender.finalize(draft)
    assert (answer.status_code, answer.json()["error_class"]) == (422, "TooManyParts")


def test_only_the_tables_of_the_project_are_taken(world: World):
    sender = world.sender(tables=("orders",))
    answer = sender.finalize(sender.put_all(sender.draft()))
    assert (answer.status_code, answer.json()["error_class"]) == (422, "TableNotAllowed")
    assert sender.finalize(sender.put_all(sender.draft(name="orders"))).status_code == 200


def test_a_tick_that_was_deleted_and_sent_anew_is_the_new_one(world: World, sender: Sender, spark: Any):
    """Guards against Delta's memory of an earlier attempt: the second life must not be taken for the first."""
    tick_id = new_tick_id()
    with world.plant(spark) as plant:
        from lockstep.kernel.crash import CrashInjected, armed
        from lockstep.ticks.worker import Committer

        first = sender.put_all(sender.draft(people(5), tick_id=tick_id))
        with armed("ticks.commit.before_transaction", "raise"), pytest.raises(CrashInjected):
            Committer(plant).finalize(sender.project, tick_id, first.manifest)
    assert sender.http.delete(sender.path(tick_id), headers=sender.headers).status_code == 200
    second = sender.put_all(sender.draft(people(2, word="new"), tick_id=tick_id))
    assert sender.finalize(second).json()["rows_inserted"] == 2
    rows = _rows(spark, world, sender).collect()
    assert [row["name"] for row in rows] == ["new0", "new1"]


def test_a_second_copy_by_an_overtaken_attempt_is_removed_by_the_next_commit(world: World, sender: Sender, spark: Any):
    """Guards bronze against a replica that was paused, lost its lane, woke up and wrote."""
    draft = sender.send(people(4))
    tick = sender.tick(draft.tick_id)
    with world.plant(spark) as plant:
        found = rules.parse_manifest(
            draft.manifest,
            org_id=sender.secret.org_id,
            project_id=sender.secret.project_id,
            tick_id=draft.tick_id,
            limits=Limits(),
        )
        part = plant.store.part(sender.secret.project_id, draft.tick_id, 0)
        assert part is not None
        assert part.footer is not None
        write = bronze.Write(found, found.tables[0], found.tables[0].columns, 999, fresh=True, merge_schema=False)
        source = {0: bronze.Source(plant.parts.address(part.object_key), part.footer)}
        bronze.write_table(spark, plant.lake, write, source)
    assert _rows(spark, world, sender).count() == 8
    assert bronze.read_tick(spark, world.settings.lake_bucket, tick, "people").count() == 4
    sender.send(people(1, 100))
    assert _rows(spark, world, sender).count() == 5
    healed = sender.tick(draft.tick_id)
    assert (healed.generation, healed.sequence, healed.result) == (2, tick.sequence, tick.result)


def test_a_committed_tick_is_written_again_from_its_parts(world: World, sender: Sender, spark: Any):
    draft = sender.send(people(6))
    sender.send(people(3, 50))
    before = sender.tick(draft.tick_id)
    with world.committer(spark) as committer:
        after = committer.reingest(sender.secret.project_id, draft.tick_id)
    assert (after.generation, after.sequence, after.result) == (2, before.sequence, before.result)
    assert after.commits[0].version > before.commits[0].version
    assert bronze.read_tick(spark, world.settings.lake_bucket, after, "people").count() == 6
    assert _rows(spark, world, sender).count() == 9
    audit = world.audit_row(draft.tick_id)
    assert audit is not None
    assert (audit["generation"], audit["bronze_db_etag"]) == ("2", after.commits[0].etag)
    assert sender.finalize(draft).json() == before.result


def test_the_parts_of_old_ticks_are_forgotten_and_their_answers_are_not(world: World, sender: Sender, spark: Any):
    """Guards the disk: parts are kept to write a tick again, not for ever. What is younger stays."""
    old, young = sender.send(people(2)), sender.send(people(3))
    answer = sender.finalize(old).json()
    world.ask(
        "UPDATE ticks.tick SET committed_at = committed_at - interval '400 days' WHERE tick_id = %s RETURNING 1",
        old.tick_id,
    )
    objects = PartObjects(world.s3, world.settings.ticks_bucket, ids=SystemIds())
    deployment: Any = SimpleNamespace(store=SimpleNamespace(ticks=world.store), clock=SystemClock())
    limit = datetime.now(UTC) - timedelta(days=365)
    assert (_forget_parts(deployment, objects, limit), _forget_parts(deployment, objects, limit)) == (1, 0)
    left = [len(world.objects(folder(sender.secret.project_id, one.tick_id))) for one in (old, young)]
    assert left == [0, 1]
    assert sender.finalize(old).json() == answer
    assert sender.put(old.tick_id, 0, old.parts[0]).status_code == 409
    with world.committer(spark) as committer, pytest.raises(Terminal, match="not complete"):
        committer.reingest(sender.secret.project_id, old.tick_id)
