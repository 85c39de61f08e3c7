"""The original design's failure table, row by row, and the parts of the platform going down under a finalize."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.kernel.crash import CrashInjected, armed, declared_points
from lockstep.kernel.errors import Transient
from lockstep.kernel.settings import PROJECT_ROOT
from lockstep.ticks import bronze
from lockstep.ticks.errors import Undelivered
from lockstep.ticks.model import TickState
from tests.faults.modes import FAILS, HANGS, meet
from tests.ticks_fixtures import new_tick_id, people
from tests.ticks_replica import Gate, Replica, replica
from tests.ticks_world import Sender, World, open_world, serving

pytestmark = pytest.mark.stack

COMMIT_POINTS = [
    "ticks.commit.begun",
    "ticks.commit.table_written",
    "ticks.commit.before_transaction",
    "ticks.commit.before_transaction_end",
    "ticks.commit.after_transaction",
    "ticks.finalize.before_answer",
]
PART_POINTS = ["ticks.part.stored", "ticks.part.before_record"]


@pytest.fixture(scope="module")
def world(stack: Any) -> Iterator[World]:
    with open_world(stack) as made, serving(made) as url:
        made.url = url
        yield made


@pytest.fixture
def sender(world: World) -> Sender:
    return world.sender()


@pytest.fixture
def gates(stack: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Gate]:
    """Clients made from now on reach S3, SQS and DynamoDB through gates."""
    environment = stack.site().environment
    made = {part: Gate(environment[f"AWS_ENDPOINT_URL_{part.upper()}"]) for part in ("s3", "sqs", "dynamodb")}
    for part, gate in made.items():
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{part.upper()}", gate.address)
    return made


def _rows(spark: Any, world: World, sender: Sender) -> int:
    path = bronze.table_path(world.settings.lake_bucket, sender.secret.project_id, "people")
    return int(spark.read.format("delta").load(path).count())


def _assert_once(world: World, sender: Sender, spark: Any, tick_id: str, rows: int) -> None:
    """Acknowledged, and once: in the state, in bronze, in the ledger, in the queue."""
    tick = sender.tick(tick_id)
    assert (tick.state, tick.sequence) == (TickState.COMMITTED, 1)
    assert bronze.read_tick(spark, world.settings.lake_bucket, tick, "people").count() == rows
    assert _rows(spark, world, sender) == rows
    audit = world.audit_row(tick_id)
    assert audit is not None
    assert audit["bronze_db_etag"] == tick.commits[-1].etag
    sent = world.sent(tick_id)
    assert all(left for *_, left in sent)
    assert [place.partition(":")[0] for place, *_ in sent].count("sqs") == 1, "more than one would only be tolerated"


def test_every_crash_point_of_ticks_is_tried_here():
    declared = {*declared_points(PROJECT_ROOT / "lockstep"), *declared_points(PROJECT_ROOT / "services")}
    front = ("ticks.part.", "ticks.commit.", "ticks.finalize.")
    assert {name for name in declared if name.startswith(front)} == {*COMMIT_POINTS, *PART_POINTS}


@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_a_finalize_that_dies_anywhere_is_finished_by_the_next_one(
    world: World, sender: Sender, spark: Any, point: str
):
    """Rows `server crashes after commit` and `upload fails after commit`, at every step in between."""
    draft = sender.put_all(sender.draft(people(7)))
    with world.committer(spark) as committer:
        with armed(point, "raise") as charge, pytest.raises(CrashInjected):
            committer.finalize(sender.project, draft.tick_id, draft.manifest)
        assert charge.fired
        assert sender.tick(draft.tick_id).sequence in (None, 1)
    answer = sender.finalize(draft)
    assert answer.status_code == 200, answer.text
    assert answer.json()["rows_inserted"] == 7
    _assert_once(world, sender, spark, draft.tick_id, 7)


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@pytest.mark.parametrize(
    "point",
    [
        "ticks.commit.table_written",
        *(pytest.param(point, marks=pytest.mark.long) for point in COMMIT_POINTS if "table_written" not in point),
    ],
)
def test_a_finalize_that_fails_or_sleeps_through_its_lease_and_the_one_that_overtakes_it_are_one(
    world: World, sender: Sender, spark: Any, point: str, mode: str
):
    draft = sender.put_all(sender.draft(people(7)))

    def overtake() -> None:
        for _ in range(100):
            _let_the_lane_expire(world, sender)
            if sender.finalize(draft).status_code == 200:
                return
        raise AssertionError("the lane is never free")

    with world.committer(spark) as committer:
        meet(point, mode, lambda: committer.finalize(sender.project, draft.tick_id, draft.manifest), overtake)
    answer = sender.finalize(draft)
    assert answer.status_code == 200, answer.text
    assert answer.json()["rows_inserted"] == 7
    _assert_once(world, sender, spark, draft.tick_id, 7)


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@pytest.mark.parametrize("point", PART_POINTS)
def test_a_put_that_fails_or_hangs_while_it_is_repeated_stores_one_part(
    world: World, sender: Sender, point: str, mode: str
):
    tick, body = new_tick_id(), people(3)
    answers: list[int] = []

    def put() -> None:
        answers.append(sender.put(tick, 0, body).status_code)

    meet(point, mode, put, put)
    assert sorted(answers) in ([503], [200, 202], [202, 202])
    assert sender.get(tick).status_code == (404 if mode == FAILS else 200)
    assert sender.put(tick, 0, body).status_code == (202 if mode == FAILS else 200)
    assert list(sender.get(tick).json()["parts_received"]) == ["0"]


@pytest.mark.parametrize("point", PART_POINTS)
def test_a_put_that_dies_leaves_no_part_and_can_be_repeated(world: World, sender: Sender, tmp_path: Path, point: str):
    """Row `server crashes mid-PUT`: bytes without a row are nothing, and they are swept."""
    tick, body = new_tick_id(), people(3)
    with replica(world, tmp_path / "log", LOCKSTEP_CRASH=f"{point}=kill") as victim:
        with pytest.raises(httpx.HTTPError):
            sender.at(victim.url).put(tick, 0, body)
        assert victim.ended() == -signal.SIGKILL
    assert sender.get(tick).status_code == 404
    assert sender.put(tick, 0, body).status_code == 202
    assert sender.put(tick, 0, body).status_code == 200


def test_an_agent_that_dies_in_the_middle_of_a_part_starts_it_again(world: World, sender: Sender):
    """Row `agent crashes mid-PUT`."""
    draft = sender.draft(people(2), people(3))

    def half() -> Iterator[bytes]:
        yield draft.parts[1][:50]
        raise OSError("power cut")

    assert sender.put(draft.tick_id, 0, draft.parts[0]).status_code == 202
    headers = sender.headers | {"X-Sha256": "0" * 64, "Content-Length": str(len(draft.parts[1]))}
    with pytest.raises(OSError, match="power cut"):
        sender.http.put(sender.path(draft.tick_id, "parts", 1), content=half(), headers=headers)
    assert list(sender.get(draft.tick_id).json()["parts_received"]) == ["0"]
    again = [sender.put(draft.tick_id, number, body).status_code for number, body in draft.parts.items()]
    assert again == [200, 202]
    assert sender.finalize(draft).status_code == 200


def test_an_agent_that_dies_before_its_finalize_puts_again_and_finalizes(sender: Sender):
    """Row `agent crashes between final PUT and finalize`."""
    draft = sender.put_all(sender.draft(people(2), people(3)))
    assert [sender.put(draft.tick_id, number, body).status_code for number, body in draft.parts.items()] == [200, 200]
    assert sender.finalize(draft).status_code == 200


def test_a_part_with_other_bytes_than_declared_is_deleted_put_and_finalized(sender: Sender):
    """Row `part sha doesn't match what manifest declared`."""
    draft = sender.draft(people(2), people(3))
    sender.put(draft.tick_id, 0, draft.parts[0])
    sender.put(draft.tick_id, 1, people(9))
    refused = sender.finalize(draft)
    assert (refused.status_code, refused.json()["mismatched_sha"]) == (409, [1])
    assert sender.put(draft.tick_id, 1, draft.parts[1]).status_code == 409
    assert sender.http.delete(sender.path(draft.tick_id, "parts", 1), headers=sender.headers).status_code == 200
    assert sender.put(draft.tick_id, 1, draft.parts[1]).status_code == 202
    assert sender.finalize(draft).status_code == 200


@pytest.mark.parametrize("part", ["sqs", "dynamodb"])
def test_a_tick_whose_messages_cannot_leave_is_not_acknowledged_and_not_lost(
    world: World, sender: Sender, spark: Any, gates: dict[str, Gate], part: str
):
    """Row `SendMessage fails`: committed, not answered, and the same finalize answers once the part is back."""
    draft = sender.put_all(sender.draft(people(4)))
    with world.committer(spark) as committer:
        gates[part].shut()
        for _ in range(2):
            with pytest.raises(Undelivered):
                committer.finalize(sender.project, draft.tick_id, draft.manifest)
        assert sender.tick(draft.tick_id).state is TickState.COMMITTED
        assert False in [left for *_, left in world.sent(draft.tick_id)]
        gates[part].open()
        done = committer.finalize(sender.project, draft.tick_id, draft.manifest)
    assert done.replayed
    assert sender.finalize(draft).json() == dict(done.result)
    _assert_once(world, sender, spark, draft.tick_id, 4)


def test_a_tick_written_again_before_its_message_left_is_answered_after_it(
    world: World, sender: Sender, spark: Any, gates: dict[str, Gate]
):
    """Guards the 200 after a re-ingest: the message of the first commit is still the tick's own."""
    draft = sender.put_all(sender.draft(people(4)))
    with world.committer(spark) as committer:
        gates["sqs"].shut()
        with pytest.raises(Undelivered):
            committer.finalize(sender.project, draft.tick_id, draft.manifest)
        with pytest.raises(Undelivered):
            committer.reingest(sender.secret.project_id, draft.tick_id)
        with pytest.raises(Undelivered):
            committer.finalize(sender.project, draft.tick_id, draft.manifest)
        gates["sqs"].open()
        assert committer.finalize(sender.project, draft.tick_id, draft.manifest).replayed
    sent = world.sent(draft.tick_id)
    assert [(place.partition(":")[0], left) for place, _, left in sent] == [
        ("dynamodb", True),
        ("sqs", True),
        ("dynamodb", True),
    ]


def test_s3_going_away_under_a_finalize_is_a_retry_and_doubles_nothing(
    world: World, sender: Sender, spark: Any, gates: dict[str, Gate]
):
    """Row `S3 upload fails after commit`: Spark has written, the commit cannot be read back, nobody is told."""
    draft = sender.put_all(sender.draft(people(4)))
    with world.committer(spark) as committer:
        gates["s3"].shut()
        with pytest.raises(Transient):
            committer.finalize(sender.project, draft.tick_id, draft.manifest)
        assert world.sent(draft.tick_id) == []
        assert world.audit_row(draft.tick_id) is None
        assert sender.tick(draft.tick_id).state is TickState.UPLOADING
        gates["s3"].open()
        assert committer.finalize(sender.project, draft.tick_id, draft.manifest).result["rows_inserted"] == 4
    _assert_once(world, sender, spark, draft.tick_id, 4)


def test_a_part_that_s3_does_not_take_is_503_and_not_recorded(world: World, sender: Sender, gates: dict[str, Gate]):
    with serving(world) as url:
        far = sender.at(url)
        gates["s3"].shut()
        tick, body = new_tick_id(), people(2)
        answer = far.put(tick, 0, body)
        assert answer.status_code == 503
        assert answer.json()["retryable"]
        assert sender.get(tick).status_code == 404
        gates["s3"].open()
        assert far.put(tick, 0, body).status_code == 202


# --- replicas ---------------------------------------------------------------------------------------------------


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, float]]:
    """Who wrote to bronze from when to when."""
    seen: list[tuple[str, float, float]] = []
    real = bronze.write_table

    def write(spark: Any, lake: str, write: bronze.Write, sources: Any) -> None:
        begun = time.monotonic()
        real(spark, lake, write, sources)
        seen.append((write.manifest.org_id, begun, time.monotonic()))

    monkeypatch.setattr(bronze, "write_table", write)
    return seen


def _together(seen: list[tuple[str, float, float]]) -> int:
    """The most writes that ran at one moment."""
    return max(sum(other[1] <= one[1] < other[2] for other in seen) for one in seen)


def test_ten_finalizes_of_one_organisation_are_serialized_across_replicas(
    world: World, monkeypatch: pytest.MonkeyPatch, spark: Any
):
    seen = _watched(monkeypatch)
    org = world.sender().secret.org_id
    projects = [world.sender(org) for _ in range(5)]
    with serving(world) as second:
        urls = [world.url, second]
        work = [(one.at(urls[n % 2]), one.put_all(one.draft(people(n + 1)))) for n, one in enumerate(projects * 2)]
        with ThreadPoolExecutor(10) as executor:
            answers = list(executor.map(lambda pair: pair[0].finalize(pair[1]), work))
    assert [answer.status_code for answer in answers] == [200] * 10
    assert _together(seen) == 1
    assert len(seen) == 10
    assert sorted(one.project.sequence for one in projects) == [2] * 5


def test_organisations_do_not_wait_for_each_other(world: World, monkeypatch: pytest.MonkeyPatch):
    seen = _watched(monkeypatch)
    senders = [world.sender() for _ in range(10)]
    drafts = [one.put_all(one.draft(people(3))) for one in senders]
    with ThreadPoolExecutor(10) as executor:
        answers = list(executor.map(lambda pair: pair[0].finalize(pair[1]), zip(senders, drafts, strict=True)))
    assert [answer.status_code for answer in answers] == [200] * 10
    assert _together(seen) > 1


def test_any_replica_takes_any_request(world: World, sender: Sender):
    """Parts here, finalize there, the answer again from the first."""
    with serving(world) as second:
        there = sender.at(second)
        draft = sender.draft(people(1), people(2), people(3), people(4))
        for number, body in draft.parts.items():
            assert (there if number % 2 else sender).put(draft.tick_id, number, body).status_code == 202
        done = there.finalize(draft)
        assert done.status_code == 200
        assert sender.finalize(draft).content == done.content


def _let_the_lane_expire(world: World, sender: Sender) -> None:
    """As after the lease's own time, without waiting for it."""
    world.ask("UPDATE kernel.lease SET lease_until = now() WHERE lane = %s", f"ticks/{sender.secret.org_id}")


@pytest.mark.parametrize("point", ["ticks.commit.table_written", "ticks.commit.after_transaction"])
def test_a_replica_killed_in_the_middle_of_a_finalize_loses_and_doubles_nothing(
    world: World, sender: Sender, spark: Any, tmp_path: Path, point: str
):
    draft = sender.put_all(sender.draft(people(6)))
    with replica(world, tmp_path / "log", LOCKSTEP_CRASH=f"{point}=kill") as victim:
        with pytest.raises(httpx.HTTPError):
            sender.at(victim.url).finalize(draft)
        assert victim.ended() == -signal.SIGKILL
    seen = sender.get(draft.tick_id).json()["state"]
    assert seen == ("committed" if point.endswith("after_transaction") else "finalizing")
    _let_the_lane_expire(world, sender)
    if seen == "finalizing":
        assert sender.put(draft.tick_id, 0, draft.parts[0]).status_code == 200, "a dead finalize holds nothing"
    assert sender.finalize(draft).status_code == 200
    _assert_once(world, sender, spark, draft.tick_id, 6)


def test_a_stopping_replica_finishes_what_it_began_and_its_log_holds_no_secret(
    world: World, sender: Sender, spark: Any, tmp_path: Path
):
    log = tmp_path / "log"
    running, waiting = (sender.put_all(sender.draft(people(n))) for n in (3, 4))
    wrong = f"lts_{'0' * 12}_{'planted-by-a-stranger'.ljust(43, 'x')}"
    made = Replica(world, log, LOCKSTEP_CRASH="ticks.commit.begun=hang:2", LOCKSTEP_LOG_LEVEL="DEBUG")
    try:
        far = sender.at(made.ready().url)
        headers = {"X-Api-Key": sender.secret.org_id, "X-Api-Secret": wrong}
        assert sender.http.get(far.path("t"), headers=headers).status_code == 401
        far.put("bad", 0, b"no parquet")
        far.finalize(far.draft(b"no parquet", tick_id="bad"))
        with ThreadPoolExecutor(2) as executor:
            first = executor.submit(far.finalize, running)
            _until(lambda: sender.get(running.tick_id).json()["state"] == "finalizing")
            second = executor.submit(far.finalize, waiting)
            time.sleep(0.3)
            made.stop()
            assert first.result().status_code == 200
            refused = second.result()
            assert (refused.status_code, refused.json()["retryable"]) == (503, True)
        assert made.ended() == 0
    finally:
        made.kill()
    assert sender.finalize(waiting).status_code == 200
    said = log.read_text()
    assert "request" in said
    settings = world.settings
    planted = [sender.secret.api_secret, wrong, settings.ticks_keys.get_secret_value()]  # type: ignore[union-attr]
    planted.append(str(settings.postgres_dsn.get_secret_value().split(":")[2].split("@")[0]))  # type: ignore[union-attr]
    assert [secret for secret in planted if secret in said] == []


def _until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
