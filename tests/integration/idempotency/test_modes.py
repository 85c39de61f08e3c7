"""Two attempts of one run at the same time, one of them failing or asleep at any step, give what one attempt gives.

What belongs here: for every crash point of the blocks that one is asked to fail and to hang at, a run that passes it
and the state of a clean run. What does not: deaths and what each block refuses, which the blocks' own tests show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from lockstep.idempotency import delta, keyed, merger, stateful, transactional
from lockstep.idempotency.calendar import ISO_WEEK, MONTH
from lockstep.idempotency.cleaner import create, freeze
from lockstep.idempotency.cleaner_delta import DeltaDataset, clean_delta, freeze_delta, load_delta
from lockstep.idempotency.keyed import Event
from lockstep.idempotency.overwrite import FileUnits, overwrite_delta
from lockstep.idempotency.proxy_s3 import ObjectProxy
from lockstep.kernel.clock import SystemClock
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.postgres import connect
from tests.faults.modes import FAILS, HANGS, meet
from tests.integration.idempotency import test_cleaner as cleaning
from tests.integration.idempotency import test_merger as merging
from tests.integration.idempotency import test_proxy as pointing
from tests.integration.idempotency import test_stateful as replaying
from tests.integration.idempotency import test_transactional as publishing
from tests.integration.idempotency.staging import stage

pytestmark = pytest.mark.stack

MONDAY, WEEK = cleaning.MONDAY, timedelta(weeks=1)
FUTURE = datetime.now(UTC) + timedelta(days=1)


@dataclass(frozen=True)
class Hands:
    """What one attempt works with: nothing of it is shared with another attempt, but the places are."""

    dsn: str = ""
    database: Any = None
    s3: Any = None
    bucket: str = ""
    spark: Any = None


@dataclass(frozen=True)
class Scenario:
    """A run, the points that it passes, and what is there when it was done once."""

    points: tuple[str, ...]
    attempt: Callable[[Hands], object]
    seen: Callable[[Hands], object]
    clean: object
    begin: Callable[[Hands], object] = lambda hands: None

    def play(self, point: str, mode: str, victim: Hands, rival: Hands, *, blocked_after: float = 2.0) -> None:
        """Begin, meet, try once more as a retry would, look."""
        self.begin(rival)
        meet(point, mode, lambda: self.attempt(victim), lambda: self.attempt(rival), blocked_after=blocked_after)
        self.attempt(rival)
        assert self.seen(rival) == self.clean


def _each(scenarios: list[Scenario]) -> Any:
    pairs = [pytest.param(one, point, id=point) for one in scenarios for point in one.points]
    return pytest.mark.parametrize(("scenario", "point"), pairs)


# --- Postgres -----------------------------------------------------------------------------------------------------


def _begin_cleaner(hands: Hands) -> None:
    hands.database.execute(cleaning.SHAPE)
    create(hands.database, cleaning.VISITS)
    cleaning.go(hands.database, MONDAY, 5, run="old")
    cleaning.go(hands.database, MONDAY + WEEK, 4, run="old")


def _units(hands: Hands) -> list[tuple[str, bool]]:
    return [(unit.name, unit.frozen) for unit in cleaning.units(hands.database, cleaning.VISITS)]


def _begin_versions(hands: Hands) -> None:
    for day in range(1, 5):
        pointing.go(hands.database, day, str(day), run=f"r{day}")


def _versions(hands: Hands) -> tuple[list[str], int]:
    count = "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'devices\\_%'"
    return pointing.shown(hands.database), hands.database.execute(count).fetchone()[0]


def _publish(hands: Hands) -> None:
    staged = stage(hands.database, hands.dsn, publishing.TARGET, [[(1, "d1")]])
    transactional.publish(hands.database, staged, publishing.KEY, run="r", how=transactional.append())


def _begin_merger(hands: Hands) -> None:
    work = hands.database
    work.execute("CREATE TABLE devices (id text PRIMARY KEY, v text, seq bigint)")
    work.execute("CREATE TABLE incoming (id text, v text, seq bigint, gone boolean)")
    merger.create_tombstones(work, merging.CONTRACT, target="devices", tombstones="graves")
    for hour in ("07:00", "08:00"):
        merging.merge(work, merging.TABLE_4_1[hour][0])
    for row in merging.TABLE_4_1["09:00"][0]:
        work.execute("INSERT INTO incoming VALUES (%s, %s, %s, %s)", row)


def _merge(hands: Hands) -> None:
    names = {"target": "devices", "source": "incoming", "tombstones": "graves"}
    merger.merge_postgres(hands.database, merging.CONTRACT, **names)


def _begin_stateful(hands: Hands) -> None:
    work = hands.database
    work.execute("CREATE TABLE devices (id text PRIMARY KEY, v text)")
    work.execute("CREATE TABLE incoming AS SELECT 'A' AS id, 'A-fixed' AS v, false AS gone")
    stateful.create_history(work, "devices")
    for hour in replaying.HOURS[1:]:
        replaying.TestPostgres().execute(work, replaying.run(hour))


def _replay(hands: Hands) -> None:
    again = replaying.run("08:00", "again")
    stateful.merge_postgres(hands.database, replaying.CONTRACT, again, target="devices", source="incoming")


IN_POSTGRES = [
    Scenario(
        ("cleaner.load.filled_aside", "cleaner.load.before_commit", "cleaner.load.after_commit"),
        lambda hands: cleaning.go(hands.database, MONDAY, 9, run="new"),
        lambda hands: cleaning.counts(hands.database),
        {MONDAY: 9, MONDAY + WEEK: 4},
        _begin_cleaner,
    ),
    Scenario(
        ("cleaner.freeze.before_commit", "cleaner.freeze.after_commit"),
        lambda hands: freeze(hands.database, cleaning.VISITS, before=MONDAY + 2 * WEEK, into=MONTH),
        lambda hands: (cleaning.counts(hands.database), _units(hands)),
        ({MONDAY: 5, MONDAY + WEEK: 4}, [("visits_20231106", True)]),
        _begin_cleaner,
    ),
    Scenario(
        (
            "proxy.version.built",
            "proxy.version.before_commit",
            "proxy.version.after_commit",
            "proxy.point.before_commit",
            "proxy.point.after_commit",
        ),
        lambda hands: pointing.go(hands.database, 5, "new", run="r5"),
        _versions,
        (["new"], 5),
        _begin_versions,
    ),
    Scenario(
        ("proxy.collect.before_commit",),
        lambda hands: pointing.collect(hands.database, pointing.DEVICES, keep=2, sealed_before=FUTURE),
        _versions,
        (["4"], 3),  # the one shown and two ways back
        _begin_versions,
    ),
    Scenario(
        ("transactional.publish.before", "transactional.publish.before_commit", "transactional.publish.after_commit"),
        _publish,
        lambda hands: publishing.rows(hands.database),
        [(1, "d1")],
        lambda hands: hands.database.execute("CREATE TABLE visits (id int PRIMARY KEY, unit text NOT NULL)"),
    ),
    Scenario(
        tuple(
            f"idempotency.merger.{moment}"
            for moment in ("before_apply", "after_tombstones", "before_commit", "after_commit")
        ),
        _merge,
        lambda hands: merging.seen(hands.database),
        merging.TABLE_4_1["09:00"][1],
        _begin_merger,
    ),
    Scenario(
        tuple(
            f"idempotency.stateful.{moment}"
            for moment in (
                "before_restore",
                "after_restore",
                "after_erase",
                "after_merge",
                "before_commit",
                "after_commit",
            )
        ),
        _replay,
        lambda hands: replaying.TestPostgres().seen(hands.database),
        "A-fixed",
        _begin_stateful,
    ),
]


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@_each(IN_POSTGRES)
def test_in_postgres(dsn: str, scenario: Scenario, point: str, mode: str):
    with connect(dsn, application_name="victim") as mine, connect(dsn, application_name="rival") as other:
        # Most points lie inside the victim's transaction: the rival is at its lock long before that.
        scenario.play(point, mode, Hands(dsn, mine), Hands(dsn, other), blocked_after=0.4)


# --- S3 -----------------------------------------------------------------------------------------------------------


def _file_units(hands: Hands) -> FileUnits:
    return FileUnits(hands.s3, hands.bucket, "visits", ids=SystemIds(), clock=SystemClock())


def _publish_files(hands: Hands) -> None:
    units = _file_units(hands)
    staged = units.stage("d=1", run="r")
    hands.s3.put_object(Bucket=hands.bucket, Key=f"{staged.folder}part-0", Body=b"new")
    units.publish(staged)


def _files(hands: Hands) -> list[bytes]:
    manifest = _file_units(hands).read("d=1")
    files = manifest.files if manifest else ()
    return [hands.s3.get_object(Bucket=hands.bucket, Key=file.key)["Body"].read() for file in files]


def _pointed(hands: Hands) -> ObjectProxy:
    return ObjectProxy(hands.s3, hands.bucket, "published", "devices")


ON_S3 = [
    Scenario(("overwrite.files.before_publish", "overwrite.files.after_publish"), _publish_files, _files, [b"new"]),
    Scenario(
        ("proxy.object.before_move", "proxy.object.after_move"),
        lambda hands: pointing.publish(_pointed(hands), 2, b"b", run="r2"),
        lambda hands: _pointed(hands).current() == _pointed(hands).version(date(2026, 3, 2), run="r2"),
        True,
        lambda hands: pointing.publish(_pointed(hands), 1, b"a", run="r1"),
    ),
    Scenario(
        ("idempotency.keyed.before_put", "idempotency.keyed.after_put"),
        lambda hands: keyed.put_keyed(hands.s3, bucket=hands.bucket, key="k", body=b"whole"),
        lambda hands: hands.s3.get_object(Bucket=hands.bucket, Key="k")["Body"].read(),
        b"whole",
    ),
]


@pytest.mark.parametrize("mode", [FAILS, HANGS])
@_each(ON_S3)
def test_on_s3(s3: Any, bucket: str, scenario: Scenario, point: str, mode: str):
    hands = Hands(s3=s3, bucket=bucket)
    scenario.play(point, mode, hands, hands)


# --- Spark and Delta: each attempt with a session of its own --------------------------------------------------------


@pytest.fixture(scope="module")
def second_session(stack: Any) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote(stack.site().environment["LOCKSTEP_SPARK_REMOTE"]).create()
    yield session
    session.stop()


def _table(hands: Hands, name: str = "t") -> str:
    return f"s3a://{hands.bucket}/{name}"


def _visits(hands: Hands) -> DeltaDataset:
    return DeltaDataset(_table(hands), "day", ISO_WEEK, quota=9)


def _load(hands: Hands, day: date, count: int) -> None:
    frame = hands.spark.range(count).selectExpr("id", f"DATE '{day}' AS day")
    load_delta(hands.spark, _visits(hands), day, frame, run="r")


def _days(hands: Hands) -> dict[date, int]:
    return {row["day"]: row["count"] for row in delta.read(hands.spark, _table(hands)).groupBy("day").count().collect()}


def _overwrite(hands: Hands, *ids: int, run: str = "again") -> None:
    frame = hands.spark.createDataFrame([(one, "d1") for one in ids], "id INT, unit STRING")
    overwrite_delta(hands.spark, _table(hands), frame, {"unit": "d1"}, run=run, partition_by=["unit"])


def _ids(hands: Hands) -> list[int]:
    return sorted(row.id for row in delta.read(hands.spark, _table(hands)).collect())


def _write(hands: Hands) -> None:
    frame = hands.spark.range(3).selectExpr("id", "'d1' AS unit")
    path, key = _table(hands), publishing.KEY
    transactional.write_delta(
        hands.spark, path, frame, key, run="r", content="a", ids=SystemIds(), replace="unit = 'd1'"
    )


def _fold(hands: Hands, events: list[Event]) -> None:
    frame = hands.spark.createDataFrame(events, "user string, at timestamp, position bigint, id string")
    where = {"events": _table(hands, "events"), "sessions": _table(hands, "sessions")}
    keyed.fold_sessions(hands.spark, frame, **where, gap=timedelta(minutes=30))


def _event(minute: int) -> Event:
    return Event("ann", datetime(2026, 3, 1, 12, minute, tzinfo=UTC), minute, f"e{minute}")


def _begin_sessions(hands: Hands) -> None:
    keyed.create_session_tables(hands.spark, events=_table(hands, "events"), sessions=_table(hands, "sessions"))
    _fold(hands, [_event(0), _event(45)])


def _sessions(hands: Hands) -> list[int]:
    return sorted(row["events"] for row in delta.read(hands.spark, _table(hands, "sessions")).collect())


def _begin_merger_delta(hands: Hands) -> None:
    empty = hands.spark.createDataFrame([], "id string, v string, seq bigint")
    empty.write.format("delta").save(_table(hands))
    merger.create_tombstones_delta(
        hands.spark, merging.CONTRACT, target=_table(hands), tombstones=_table(hands, "graves")
    )
    _merge_delta(hands, "08:00")


def _merge_delta(hands: Hands, hour: str) -> None:
    merging.TestDelta().merge(hands.spark, (_table(hands), _table(hands, "graves")), merging.TABLE_4_1[hour][0])


def _write_to_postgres(hands: Hands) -> None:
    frame = hands.spark.range(4).selectExpr("CAST(id AS INT) AS id", "'d1' AS unit")
    key, how = publishing.KEY, transactional.append()
    transactional.write(frame, hands.dsn, publishing.TARGET, key, run="r", how=how, ids=SystemIds())


ON_SPARK = [
    Scenario(
        ("cleaner.delta.before_write", "cleaner.delta.after_commit"),
        lambda hands: _load(hands, MONDAY + timedelta(days=1), 3),
        _days,
        {MONDAY: 5, MONDAY + timedelta(days=1): 3},
        lambda hands: _load(hands, MONDAY, 5),
    ),
    Scenario(
        ("cleaner.delta.marked_frozen",),
        lambda hands: freeze_delta(hands.spark, _visits(hands), before=MONDAY + WEEK, into=MONTH, run="f"),
        _days,
        {MONDAY: 5},
        lambda hands: _load(hands, MONDAY, 5),
    ),
    Scenario(
        ("cleaner.delta.before_clean",),
        lambda hands: clean_delta(hands.spark, _visits(hands), MONDAY, run="c"),
        _days,
        {},
        lambda hands: _load(hands, MONDAY, 5),
    ),
    Scenario(
        ("overwrite.delta.before_write", "overwrite.delta.after_commit"),
        lambda hands: _overwrite(hands, 7, 8),
        _ids,
        [7, 8],
        lambda hands: _overwrite(hands, 1, run="first"),
    ),
    Scenario(("transactional.delta.before_write", "transactional.delta.after_commit"), _write, _ids, [0, 1, 2]),
    Scenario(
        ("transactional.stage.created", "transactional.driver.staged"),
        _write_to_postgres,
        lambda hands: publishing.rows(hands.database),
        [(number, "d1") for number in range(4)],
        lambda hands: hands.database.execute("CREATE TABLE visits (id int PRIMARY KEY, unit text NOT NULL)"),
    ),
    Scenario(
        ("idempotency.keyed.after_events", "idempotency.keyed.after_sessions"),
        lambda hands: _fold(hands, [_event(20)]),
        _sessions,
        [3],
        _begin_sessions,
    ),
    Scenario(
        tuple(
            f"idempotency.merger.{moment}"
            for moment in ("before_apply_delta", "after_tombstones_delta", "after_commit_delta")
        ),
        lambda hands: _merge_delta(hands, "09:00"),
        lambda hands: merging.TestDelta().seen(hands.spark, (_table(hands), "")),
        merging.TABLE_4_1["09:00"][1],
        _begin_merger_delta,
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("mode", [FAILS, HANGS])
@_each(ON_SPARK)
def test_on_spark(spark: Any, second_session: Any, dsn: str, bucket: str, scenario: Scenario, point: str, mode: str):
    with connect(dsn, application_name="rival") as other:
        victim = Hands(dsn, bucket=bucket, spark=spark)
        scenario.play(point, mode, victim, Hands(dsn, other, bucket=bucket, spark=second_session))
