"""The transactional writer on real Postgres, Spark and Delta: receipted rows only, once, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from psycopg import sql

from lockstep.idempotency import delta, redshift, transactional
from lockstep.idempotency.overwrite import OutsideUnit
from lockstep.idempotency.transactional import (
    ContentChanged,
    Key,
    RestoredAway,
    append,
    publish,
    replace_unit,
    sweep,
    write,
    write_delta,
)
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import InvalidInput, LostClaim, Transient
from lockstep.kernel.ids import SeededIds, SystemIds
from lockstep.kernel.postgres import Connection, connect
from tests.faults.modes import HANGS, meet
from tests.integration.idempotency.staging import stage

pytestmark = pytest.mark.stack

TARGET = ("public", "visits")
KEY = Key("visits", "d1")


@pytest.fixture(autouse=True)
def target(connection: Connection) -> None:
    connection.execute("CREATE TABLE visits (id int PRIMARY KEY, unit text NOT NULL)")


def rows(connection: Connection) -> list[tuple[int, str]]:
    return connection.execute("SELECT id, unit FROM visits ORDER BY id").fetchall()


def left_behind(connection: Connection) -> int:
    count = "SELECT count(*) FROM pg_tables WHERE schemaname = 'idempotency' AND tablename LIKE 'stage\\_%'"
    found = connection.execute(count).fetchone()
    assert found is not None
    return int(found[0])


def test_only_receipted_rows_are_applied(connection: Connection, dsn: str, monkeypatch: Any):
    """Guards the retried task: without the receipts its first, dead attempt is applied too."""
    doubled = stage(connection, dsn, TARGET, [[(1, "d1")], [(2, "d1")]], failures=[0, 1, 1])
    outcome = publish(connection, doubled, KEY, run="r", how=append())
    assert (outcome.rows, outcome.already, rows(connection)) == (2, False, [(1, "d1"), (2, "d1")])
    assert left_behind(connection) == 0
    everything = sql.SQL("(SELECT s.* FROM {} s WHERE %s::int[] IS NOT NULL AND %s::bigint[] IS NOT NULL) AS staged")
    connection.execute("ALTER TABLE visits DROP CONSTRAINT visits_pkey")
    again = stage(connection, dsn, TARGET, [[(7, "d2")]], failures=[0])
    with monkeypatch.context() as without:
        without.setattr(
            transactional,
            "receipted_rows",
            lambda staging: everything.format(sql.Identifier("idempotency", staging.name)),
        )
        without.setattr(transactional, "_check_staged", lambda *_: None)
        publish(connection, again, Key("visits", "d2"), run="r", how=append())
    assert rows(connection).count((7, "d2")) == 2


@pytest.mark.parametrize(
    "point",
    ["transactional.publish.before", "transactional.publish.before_commit", "transactional.publish.after_commit"],
)
def test_a_crash_at_any_point_of_the_publication_is_followed_by_one_application(
    connection: Connection, dsn: str, point: str
):
    """Guards the lost answer: the second attempt of a commit that had succeeded changes nothing."""
    with connect(dsn, application_name="dying") as dying, pytest.raises(CrashInjected), armed(point, "raise"):
        publish(dying, stage(dying, dsn, TARGET, [[(1, "d1")]]), KEY, run="r", how=append())
    split = stage(connection, dsn, TARGET, [[], [(1, "d1")]])  # the retry splits its rows otherwise
    outcome = publish(connection, split, KEY, run="r", how=append())
    assert outcome.already == (point == "transactional.publish.after_commit")
    assert rows(connection) == [(1, "d1")]
    sweep(connection, created_before=datetime.now(UTC) + timedelta(hours=1))  # what the dead driver left
    assert left_behind(connection) == 0


def test_without_the_ledger_a_lost_answer_applies_twice(connection: Connection, dsn: str, monkeypatch: Any):
    """Guards the ledger row itself: this is the doubling that it prevents."""
    connection.execute("ALTER TABLE visits DROP CONSTRAINT visits_pkey")
    monkeypatch.setattr(
        transactional, "_claim", lambda _c, staging, _k, _r: transactional.Outcome(staging.rows, "", already=False)
    )
    for _ in range(2):
        publish(connection, stage(connection, dsn, TARGET, [[(1, "d1")]]), KEY, run="r", how=append())
    assert rows(connection) == [(1, "d1"), (1, "d1")]


def test_other_rows_need_the_next_generation_and_replace_the_unit(connection: Connection, dsn: str):
    """Guards backfills: the same key with other rows is refused, a raised generation replaces, an old one is late."""

    def go(generation: int, *ids: int) -> Any:
        staging = stage(connection, dsn, TARGET, [[(one, "d1") for one in ids]])
        return publish(connection, staging, KEY._replace(generation=generation), run="r", how=replace_unit("unit"))

    go(1, 1, 2)
    with pytest.raises(ContentChanged, match="raise the generation"):
        go(1, 1, 2, 3)
    go(2, 5)
    assert rows(connection) == [(5, "d1")]
    with pytest.raises(LostClaim, match="generation 2"):
        go(1, 1, 2)
    assert go(3).rows == 0  # an empty replay clears
    assert rows(connection) == []
    with pytest.raises(InvalidInput, match="another unit"):
        publish(
            connection,
            stage(connection, dsn, TARGET, [[(9, "d9")]]),
            KEY._replace(generation=4),
            run="r",
            how=replace_unit("unit"),
        )
    with pytest.raises(InvalidInput, match="cannot append"):
        publish(connection, stage(connection, dsn, TARGET, [[(9, "d1")]]), Key("v", "d1", 2), run="r", how=append())
    assert rows(connection) == []


def test_two_drivers_at_once_apply_once(dsn: str, connection: Connection):
    """Guards the unit's lock: both see an empty ledger, one applies."""

    def drive(number: int) -> bool:
        with connect(dsn, application_name=f"driver-{number}") as mine:
            staging = stage(mine, dsn, TARGET, [[(1, "d1"), (2, "d1")]])
            return publish(mine, staging, KEY, run=f"r{number}", how=append()).already

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(drive, range(4))) == [False, True, True, True]
    assert rows(connection) == [(1, "d1"), (2, "d1")]


def test_an_older_generation_that_is_about_to_commit_does_not_mix_with_a_newer_one(dsn: str, connection: Connection):
    """Guards the unit's lock: the older one has passed its check, and only then the newer one replaces the unit."""

    def drive(generation: int) -> None:
        with connect(dsn, application_name=f"generation-{generation}") as mine:
            staging = stage(mine, dsn, TARGET, [[(generation, "d1")]])
            publish(mine, staging, KEY._replace(generation=generation), run="r", how=replace_unit("unit"))

    meet("transactional.publish.before_commit", HANGS, lambda: drive(1), lambda: drive(2))
    assert rows(connection) == [(2, "d1")]


def test_staged_rows_that_vanished_are_noticed(connection: Connection, dsn: str):
    """Guards unlogged staging: after a crash of the server it is empty, and empty must not be published."""
    staging = stage(connection, dsn, TARGET, [[(1, "d1")]])
    connection.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier("idempotency", staging.name)))
    with pytest.raises(Transient, match="0 of 1"):
        publish(connection, staging, KEY, run="r", how=append())
    assert transactional.applied(connection, KEY) is None


def test_sweeping_drops_old_staging_and_a_zombie_task_then_fails(connection: Connection, dsn: str):
    old = stage(connection, dsn, TARGET, [[(1, "d1")]])
    assert sweep(connection, created_before=datetime(2000, 1, 1, tzinfo=UTC)) == 0
    assert sweep(connection, created_before=datetime.now(UTC) + timedelta(hours=1)) == 1
    with pytest.raises(Exception, match=old.name):
        publish(connection, old, KEY, run="r", how=append())
    assert rows(connection) == []


def test_spark_rows_of_every_type_arrive_exactly(spark: Any, connection: Connection, dsn: str):
    """Guards the text form between Arrow and COPY: NULL, empty string, quotes, time zones, decimals."""
    connection.execute(
        "CREATE TABLE kinds (n bigint, t text, d date, at timestamptz, yes boolean, price numeric(9,2), x float8)"
    )
    instant = datetime(2026, 3, 1, 12, 30, 0, 123456, tzinfo=UTC)
    data = [
        (1, 'a "q",\n\\', instant.date(), instant, True, Decimal("-1.50"), 0.1),
        (2, "", None, None, False, None, float("nan")),
        (None, None, None, None, None, None, None),
    ]
    schema = "n BIGINT, t STRING, d DATE, at TIMESTAMP, yes BOOLEAN, price DECIMAL(9,2), x DOUBLE"
    frame = spark.createDataFrame(data, schema).repartition(2)
    key = Key("kinds", "all")
    for point in ("transactional.stage.created", "transactional.driver.staged"):
        with pytest.raises(CrashInjected), armed(point, "raise"):
            write(frame, dsn, ("public", "kinds"), key, run="r1", how=append(), ids=SystemIds())
    assert sweep(connection, created_before=datetime.now(UTC) + timedelta(hours=1)) == 2
    first = write(frame, dsn, ("public", "kinds"), key, run="r1", how=append(), ids=SystemIds())
    assert (first.rows, first.already) == (3, False)
    found = connection.execute("SELECT * FROM kinds ORDER BY n NULLS LAST").fetchall()
    in_utc = [tuple(v.astimezone(UTC) if isinstance(v, datetime) else v for v in row) for row in found]
    assert str(in_utc) == str(data)  # as text, because NaN does not equal itself
    # Another run with the same rows, split otherwise, is recognised; the same run does not even stage.
    again = write(frame.coalesce(1), dsn, ("public", "kinds"), key, run="r2", how=append(), ids=SystemIds())
    assert again == first._replace(already=True)
    with pytest.raises(InvalidInput, match="no exact text form"):
        write(spark.sql("SELECT array(1) AS a"), dsn, TARGET, KEY, run="r", how=append(), ids=SystemIds())
    assert left_behind(connection) == 0


def test_rows_that_differ_only_in_where_their_null_is_are_other_rows(spark: Any, connection: Connection, dsn: str):
    """Guards the content: xxhash64 passes over NULL, so the corrected rows would pass for those applied before."""
    connection.execute("CREATE TABLE pairs (x text, y text)")

    def go(*row: str | None) -> Any:
        frame = spark.createDataFrame([row], "x STRING, y STRING")
        return write(frame, dsn, ("public", "pairs"), Key("pairs", "all"), run=str(row), how=append(), ids=SystemIds())

    go("a", None)
    with pytest.raises(ContentChanged):
        go(None, "a")


class Redshift:
    """Runs plans where PostgreSQL speaks the same SQL; only COPY is replaced, by the rows that it is to bring."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.dies_at = ""

    def go(self, key: Key, *ids: int, unit: str = "d1", announced: int | None = None) -> transactional.Outcome:
        load = redshift.Load(len(ids) if announced is None else announced, f"{ids}", "s3://bucket/manifest")
        role = "arn:aws:iam::123456789012:role/loader"
        plan = redshift.plan(TARGET, ("id", "unit"), key, run="r", load=load, unit_column="unit", iam_role=role)

        def ask(statement: redshift.Statement) -> Any:
            if statement.text.startswith("COPY"):
                for one in ids:
                    self.connection.execute("INSERT INTO stage_visits VALUES (%s, %s)", (one, unit))
                return None
            done = self.connection.execute(statement.text.encode(), statement.parameters or None)
            if statement.text == self.dies_at:
                raise ConnectionError("the answer was lost")
            return done.fetchone() if done.description else None

        return redshift.execute(ask, plan)


def test_the_redshift_plan_applies_once_and_a_lost_answer_is_recognised(connection: Connection):
    """Guards order and conditions of the emitted transaction, and the ledger row that a retry finds."""
    warehouse = Redshift(connection)
    warehouse.dies_at = "COMMIT"
    with pytest.raises(ConnectionError):
        warehouse.go(KEY, 1, 2)
    assert warehouse.go(KEY, 1, 2) == (2, "(1, 2)", True)
    with pytest.raises(ContentChanged, match="raise the generation"):
        warehouse.go(KEY, 1, 2, 3)
    warehouse.dies_at = ""
    assert not warehouse.go(KEY._replace(generation=2), 5).already
    with pytest.raises(LostClaim, match="generation 2"):
        warehouse.go(KEY, 1, 2)
    assert rows(connection) == [(5, "d1")]


def test_the_redshift_plan_counts_what_copy_brought(connection: Connection):
    """Guards half a load and rows of another unit: the transaction is rolled back before it touches the target."""
    warehouse = Redshift(connection)
    warehouse.go(KEY, 1)
    again = KEY._replace(generation=2)
    with pytest.raises(Transient, match="2 of 3 rows"):
        warehouse.go(again, 7, 8, announced=3)
    with pytest.raises(InvalidInput, match="1 rows belong to another unit"):
        warehouse.go(again, 7, unit="d9")
    assert rows(connection) == [(1, "d1")]
    assert transactional.applied(connection, again) is None


@contextlib.contextmanager
def dies_at(point: str | None) -> Iterator[None]:
    if point is None:
        yield
        return
    with pytest.raises(CrashInjected), armed(point, "raise"):
        yield


def test_delta_applies_a_key_once_and_never_ignores_a_replay_in_silence(spark: Any, lake: str):
    """Guards restore and replay: Delta's own txnVersion drops the replayed rows without an error."""
    path, ids = f"{lake}/visits", SeededIds(3)

    def go(generation: int, rows: int, content: str) -> Any:
        frame = spark.range(rows).selectExpr("id", "'d1' AS unit")
        key = KEY._replace(generation=generation)
        return write_delta(spark, path, frame, key, run="r", content=content, ids=ids, replace="unit = 'd1'")

    for point in ("transactional.delta.before_write", "transactional.delta.after_commit"):
        with dies_at(point):
            go(1, 3, "a")
    assert go(1, 3, "a") == transactional.Outcome(3, "a", already=True)
    assert not go(2, 4, "b").already
    spark.sql(f"RESTORE TABLE {delta.quoted(path)} TO VERSION AS OF 0").collect()
    with pytest.raises(RestoredAway, match="raise the generation"):
        go(2, 4, "b")
    assert delta.read(spark, path).count() == 3
    assert not go(3, 4, "b").already
    assert delta.read(spark, path).count() == 4
    with pytest.raises(LostClaim):
        go(2, 9, "c")


def test_a_unit_on_delta_that_is_empty_is_applied_and_rows_of_another_unit_are_refused(spark: Any, lake: str):
    """Guards the unit and its neighbours, also where the session has switched Delta's own check off."""
    path, ids, check = f"{lake}/visits", SeededIds(4), "spark.databricks.delta.replaceWhere.constraintCheck.enabled"

    def go(generation: int, rows: int, unit: str = "d1") -> Any:
        frame = spark.range(rows).selectExpr("id", f"'{unit}' AS unit")
        key = KEY._replace(generation=generation)
        return write_delta(spark, path, frame, key, run="r", content=f"{rows}", ids=ids, replace="unit = 'd1'")

    assert go(1, 0) == transactional.Outcome(0, "0", already=False)
    assert go(2, 0) == transactional.Outcome(0, "0", already=False), "nothing replaced nothing, and the key says so"
    assert go(2, 0).already
    spark.conf.set(check, "false")
    try:
        with pytest.raises(OutsideUnit, match="nothing was written"):
            go(3, 1, unit="d9")
    finally:
        spark.conf.unset(check)
    assert delta.read(spark, path).count() == 0


def test_one_bad_file_of_several_leaves_nothing_and_the_corrected_one_leaves_all(connection: Connection, dsn: str):
    """The chapter's example: two files in one transaction, a value of the second too long for its column."""
    connection.execute("ALTER TABLE visits ALTER COLUMN unit TYPE varchar(4)")
    with pytest.raises(Exception, match="too long"):
        stage(connection, dsn, TARGET, [[(1, "d1")], [(2, "much too long")]])
    assert rows(connection) == []
    publish(connection, stage(connection, dsn, TARGET, [[(1, "d1")], [(2, "d1")]]), KEY, run="r", how=append())
    assert rows(connection) == [(1, "d1"), (2, "d1")]
