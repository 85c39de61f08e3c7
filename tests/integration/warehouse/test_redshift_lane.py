"""Windows applied to Redshift by the production code, on PostgreSQL with COPY alone replaced."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lockstep.kernel.errors import LostClaim, Terminal, Transient
from lockstep.warehouse.dialect import Step
from lockstep.windows import mart, operations
from lockstep.windows.model import WindowKind
from lockstep.windows.operations import Doer
from lockstep.windows.worker import WindowFailed
from tests.databases import fresh_database
from tests.producer_world import Place as Bucket
from tests.producer_world import producing
from tests.redshift_lane import RedshiftLane
from tests.simulator import running_simulator
from tests.windows_lane import LaneUnderTest
from tests.windows_world import Files, World, as_csv

pytestmark = pytest.mark.stack

DOER = Doer("test", "because")


@pytest.fixture(scope="module")
def empty_warehouse(stack: Any) -> Iterator[str]:
    """A database without our migrations: the sink makes its control tables itself."""
    with fresh_database(stack, "test_redshift") as dsn:
        yield dsn


@pytest.fixture
def redshift_lane(empty_warehouse: str, new_lane: Callable[..., LaneUnderTest]) -> Callable[..., LaneUnderTest]:
    def make(**options: Any) -> LaneUnderTest:
        return new_lane(lane_type=RedshiftLane, dsn=empty_warehouse, fraction=10, **options)

    return make


@pytest.fixture
def lane(redshift_lane: Callable[..., LaneUnderTest]) -> LaneUnderTest:
    return redshift_lane()


def test_a_backlog_reaches_redshift_in_order_with_new_columns_and_objects(lane: LaneUnderTest, spark: Any):
    """Guards the production path from Spark's staging to the ledger: only COPY is not Redshift's own here."""
    lane.world.publish(5)
    assert lane.worker(spark=lambda: spark).drain(lane.vault).applied == 5
    lane.world.columns["study__v"]["phase__c"] = ("String", 40)
    lane.world.columns["country__v"] = {
        "id": ("String", 20),
        "modified_date__v": ("DateTime", 0),
        "iso__c": ("String", 60),
    }
    lane.world.publish(4)
    lane.worker().drain(lane.vault)
    applied = lane.history()
    assert [one.stop for one in applied] == [one.stop for one in lane.world.windows]
    assert all(one.rows == sum(sum(table.values()) for table in one.counts.values()) for one in applied)
    for row in lane.world.oracle["study__v"].values():
        row.setdefault("phase__c", None)
    lane.assert_equals_oracle()
    assert lane.world.s3.list_objects_v2(Bucket="raw-ddapi", Prefix=f"staging/vault={lane.vault}/")["KeyCount"] == 0


def test_a_poison_window_fails_alone_on_redshift_and_goes_on_after_its_repair(lane: LaneUnderTest):
    lane.world.publish(2)
    poison = lane.world.row("study__v", 1, budget__c="1." + "1" * 11)
    window = lane.world.add(Files({"study__v": [poison]}))
    lane.world.publish(1)
    assert lane.worker().drain(lane.vault).applied == 2
    with pytest.raises(WindowFailed, match=r"study__v, column budget__c: .*more digits"):
        lane.worker().drain(lane.vault)
    assert lane.world.statuses() == ["APPLIED", "APPLIED", "FAILED", "READY"]
    healed = {**poison, "budget__c": "1.5"}
    lane.world.rewrite(window, "study__v", as_csv(list(lane.world.columns["study__v"]), [healed]))
    held = lane.world.oracle["study__v"].get("ST0001", {})
    if held.get("budget__c") == poison["budget__c"]:
        held["budget__c"] = "1.5"
    operations.retry(lane.worker(), window, DOER)
    assert lane.worker().drain(lane.vault).applied == 2
    lane.assert_equals_oracle()


def test_a_text_that_grew_at_the_vendor_gets_room_in_redshift_before_its_window(
    empty_warehouse: str, tmp_path: Path, stack: Any
):
    """Guards COPY, which refuses a value that is longer than its column; the vendor says so in the window itself."""
    place, vault = Bucket().create(), f"w{secrets.token_hex(4)}"
    with running_simulator(tmp_path / "vault") as simulator:
        simulator.add(vault, rows=3, base_rows=2, objects=["study__v"])
        with producing(place, vault, simulator.address(vault), tmp_path / "work") as producer:
            simulator.do(vault, "publish", windows=1)
            simulator.do(vault, "evolve", kind="widen", object="study__v", column="name__v", length=900)
            simulator.do(vault, "publish", windows=1)
            producer.run()
    world = World(
        place.s3, place.bucket, place.dynamodb, place.table, vault=vault, start=datetime(2026, 1, 1, tzinfo=UTC)
    )
    lane = RedshiftLane(empty_warehouse, world).open()
    assert lane.worker().drain(vault).applied == 2
    found = lane.store().tables(f"vault_{vault}")["study__v"].by_name["name__v"]
    assert found.length == 4 * 900
    for store in lane.stores:
        store.close()


def test_two_claims_on_redshift_never_hold_the_same_fence_and_the_older_one_writes_nothing(lane: LaneUnderTest):
    lane.world.publish(1)
    old_store, new_worker = lane.store(), lane.worker()
    old = old_store.claim(lane.vault, "old", 0.01)
    assert old is not None
    (staged,) = new_worker.preparer.prepare(old, lane.worker().ledger.pending(lane.vault, None))
    assert new_worker.drain(lane.vault).applied == 1
    assert lane.history()[0].fence == old.fence + 1
    with pytest.raises(LostClaim):
        old_store.apply(old, staged, f"vault_{lane.vault}")  # type: ignore[arg-type]
    with pytest.raises(LostClaim):
        old_store.skip(old, old.watermark, old.watermark + timedelta(minutes=15))
    lane.assert_equals_oracle()


def test_a_lane_of_redshift_is_held_by_one_worker_at_a_time(lane: LaneUnderTest):
    lane.world.publish(1)
    with lane.worker().held(lane.vault) as held:
        assert held is not None
        known = lane.store().lane(lane.vault)
        assert known is not None
        assert known.is_held
        assert lane.worker().drain(lane.vault).reason == "a live worker holds the lane"
    assert lane.worker().drain(lane.vault).applied == 1


def test_a_full_load_is_swapped_into_redshift_and_every_operation_works_there(
    redshift_lane: Callable[..., LaneUnderTest],
):
    lane = redshift_lane(begun=False)
    rows = [lane.world.row("study__v", number) for number in range(4)]
    lane.world.add(Files({"study__v": rows}), kind=WindowKind.FULL)
    lane.world.add(Files({"site__v": [lane.world.row("site__v", 1)]}), kind=WindowKind.LOG)
    lane.world.publish(3)
    assert lane.worker().drain(lane.vault).applied == 3
    lane.assert_equals_oracle()
    assert lane.store().history(lane.vault, kinds=("log",))
    assert operations.verify(lane.worker(), lane.vault) == []
    assert operations.replay(lane.worker(), lane.vault, lane.world.windows[1].start, DOER) == 2
    assert lane.worker().drain(lane.vault).applied == 2
    lane.world.publish(1, enqueue=False)
    hole = lane.world.windows[-1]
    lane.world.publish(1)
    operations.skip(lane.worker(), lane.vault, hole.stop, DOER, accept_gap=True)
    assert lane.worker().drain(lane.vault).applied == 1
    store = lane.store()
    assert [one.kind for one in store.history(lane.vault, epoch=2)] == ["incremental"] * 2 + ["gap", "incremental"]
    assert [audit[2] for audit in store.audits(lane.vault)] == ["skip", "replay"]
    lines = mart.rebuild(store, lane.vault)
    assert {line.object for line in lines} <= {"study__v", "site__v"}
    assert [one.rows for one in mart.facts(store, f"vault_{lane.vault}")]


def test_a_commit_on_redshift_whose_answer_was_lost_is_found_in_the_ledger(
    lane: LaneUnderTest, monkeypatch: pytest.MonkeyPatch
):
    lane.world.publish(2)
    worker = lane.worker()
    apply = worker.store.apply
    lost = iter([True])

    def losing(*arguments: Any) -> Any:
        done = apply(*arguments)
        if next(lost, False):
            raise Transient("the answer was lost")
        return done

    monkeypatch.setattr(worker.store, "apply", losing)
    assert worker.drain(lane.vault).applied == 2
    lane.assert_equals_oracle()


def test_a_session_undoes_everything_when_a_step_changes_another_number_of_rows(lane: LaneUnderTest):
    store = lane.store()
    insert = Step(
        "INSERT INTO windows.audit VALUES ('x', now(), 'a', 'b', %(vault)s, NULL, 'r', '{}')", {"vault": lane.vault}, 2
    )
    with pytest.raises(Terminal, match="1 instead of 2"):
        store.transact([insert], unit="x")
    assert store.audits(lane.vault) == []
    with suppress(Terminal):
        store.transact([Step("SELECT 1 / 0")], unit="x")
    assert store.audits(lane.vault) == []
