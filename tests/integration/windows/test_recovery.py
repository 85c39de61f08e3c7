"""After the vendor has healed a window: each of the three doors fetches it again and drains the backlog at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lockstep.kernel.errors import LockstepError, Transient
from lockstep.windows import operations
from lockstep.windows.model import QueueRow, Window, parse_stoptime
from lockstep.windows.operations import Doer
from lockstep.windows.producer import Producer
from lockstep.windows.worker import Outside, WindowFailed, WindowWorker
from tests.producer_world import Place, producing
from tests.simulator import Simulator, running_simulator
from tests.windows_lane import LaneUnderTest
from tests.windows_world import World

pytestmark = pytest.mark.stack

START = datetime(2026, 1, 1, tzinfo=UTC)
POISONED = "202601010030"


class Healing:
    """A vault whose second window of four is poisoned, a producer of it, and a lane that stopped there."""

    def __init__(self, dsn: str, place: Place, simulator: Simulator, producer: Producer) -> None:
        self.simulator, self.producer, self.place = simulator, producer, place
        world = World(place.s3, place.bucket, place.dynamodb, place.table, vault=producer.vault, start=START)
        self.lane = LaneUnderTest(dsn, world).open()
        self.told: list[tuple[Window, int, LockstepError]] = []

    def worker(self, refetch: Callable[[QueueRow], bool] | None = None) -> WindowWorker:
        outside = Outside(refetch or self.producer.refetch, lambda *words: self.told.append(words))
        return self.lane.worker(outside=outside)

    def stop_at_the_poison(self) -> Window:
        """Drain until the poisoned window has failed alone."""
        self.simulator.do(self.lane.vault, "publish", windows=4)
        self.simulator.do(self.lane.vault, "poison", stop=POISONED)
        self.producer.run()
        assert self.worker().drain(self.lane.vault).applied == 1
        with pytest.raises(WindowFailed):
            self.worker().drain(self.lane.vault)
        return Window(self.lane.vault, parse_stoptime("202601010015"), parse_stoptime(POISONED))

    def heal(self) -> None:
        self.simulator.do(self.lane.vault, "heal", stop=POISONED)

    def statuses(self) -> list[str]:
        return [str(row.status) for row in self.place.queue.rows(self.lane.vault)]


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with running_simulator(tmp_path_factory.mktemp("vault")) as running:
        yield running


@pytest.fixture
def place(stack: Any) -> Place:
    return Place().create()


@pytest.fixture
def healing(warehouse: str, place: Place, simulator: Simulator, tmp_path: Path) -> Iterator[Healing]:
    vault = f"h{secrets.token_hex(4)}"
    simulator.add(vault, rows=3, base_rows=2, objects=["study__v"])
    with producing(place, vault, simulator.address(vault), tmp_path / "work") as producer:
        found = Healing(warehouse, place, simulator, producer)
        yield found
        for store in found.lane.stores:
            store.close()


def _materialize_again(healing: Healing, window: Window) -> None:
    """What the red partition's button does: a run without an attempt tag, for that window."""
    healing.worker().drain(window.vault, own=window.stop, by_hand=True)


def _retry(healing: Healing, window: Window) -> None:
    operations.retry(healing.worker(), window, Doer("test", "healed"))
    healing.worker().drain(window.vault)


def _plain_update(healing: Healing, window: Window) -> None:
    healing.place.dynamodb.update_item(
        TableName=healing.place.table,
        Key={"vault_id": {"S": window.vault}, "stoptime": {"S": window.sort_key}},
        UpdateExpression="SET #s = :ready",
        ExpressionAttributeNames={"#s": "status"},
        ExpressionAttributeValues={":ready": {"S": "READY"}},
    )
    healing.worker().drain(window.vault)


@pytest.mark.parametrize("door", [_materialize_again, _retry, _plain_update])
def test_a_healed_window_is_fetched_again_by_every_door_and_the_backlog_drains(
    healing: Healing, door: Callable[[Healing, Window], None]
):
    """Guards the minutes of a person at 3 a.m.: without it the door would apply the old archive and fail again."""
    window = healing.stop_at_the_poison()
    assert healing.statuses() == ["APPLIED", "FAILED", "READY", "READY"]
    healing.heal()
    door(healing, window)
    assert healing.statuses() == ["APPLIED"] * 4
    healing.lane.assert_prefix()
    assert operations.verify(healing.worker(), window.vault) == []


def test_a_window_that_is_not_healed_fails_again_and_both_failures_are_told(healing: Healing):
    window = healing.stop_at_the_poison()
    with pytest.raises(WindowFailed):
        _materialize_again(healing, window)
    assert [one.stoptime for one, _, _ in healing.told] == [POISONED, POISONED]
    assert len({fence for _, fence, _ in healing.told}) == 2
    assert healing.statuses() == ["APPLIED", "FAILED", "READY", "READY"]


def test_a_source_that_cannot_be_asked_does_not_stand_in_the_way_of_a_retry(healing: Healing):
    """Guards recovery from a cause on our side: the vendor may be down while a person repairs the warehouse."""
    window = healing.stop_at_the_poison()
    healing.heal()
    assert healing.producer.run().replaced == [window]

    def unreachable(row: QueueRow) -> bool:
        raise Transient("the vault does not answer")

    worker = healing.worker(unreachable)
    assert worker.drain(window.vault, own=window.stop, by_hand=True).applied == 3
    assert healing.statuses() == ["APPLIED"] * 4


def test_an_alert_that_cannot_be_sent_does_not_hide_the_failure(healing: Healing):
    healing.simulator.do(healing.lane.vault, "publish", windows=2)
    healing.simulator.do(healing.lane.vault, "poison", stop="202601010015")
    healing.producer.run()

    def broken(*_: object) -> None:
        raise OSError("no network")

    with pytest.raises(WindowFailed):
        healing.lane.worker(outside=Outside(alarm=broken)).drain(healing.lane.vault)
    assert healing.statuses() == ["FAILED", "READY"]
