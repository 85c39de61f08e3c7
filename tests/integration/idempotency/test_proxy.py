"""The proxy on real Postgres and S3: sealed versions, a name that moves forward, and the way back."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from psycopg import errors, sql

from lockstep.idempotency import pointer, proxy
from lockstep.idempotency.proxy import Decision, Proxy, Refused, Version, add_version, collect, moves, point, roll_back
from lockstep.idempotency.proxy_s3 import ObjectProxy
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import InvalidInput, LostClaim, Terminal
from lockstep.kernel.postgres import Connection, connect
from tests.faults.modes import HANGS, meet

pytestmark = pytest.mark.stack

DEVICES = Proxy("public", "devices")
FUTURE = datetime.now(UTC) + timedelta(days=1)


def table_of(*values: str, columns: str = "SELECT unnest(%s::text[]) AS id") -> Any:
    def build(connection: Connection, table: sql.Identifier) -> None:
        connection.execute(sql.SQL("CREATE TABLE {} AS " + columns).format(table), (list(values),))

    return build


def go(connection: Connection, day: int, *values: str, run: str, **build: Any) -> Version:
    version = add_version(connection, DEVICES, date(2026, 3, day), table_of(*values, **build), run=run)
    point(connection, DEVICES, version, reason=run)
    return version


def shown(connection: Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT id FROM devices ORDER BY 1").fetchall()]


@pytest.mark.parametrize(
    "point_of_death",
    [
        "proxy.version.built",
        "proxy.version.before_commit",
        "proxy.version.after_commit",
        "proxy.point.before_commit",
        "proxy.point.after_commit",
    ],
)
def test_a_run_that_dies_anywhere_is_finished_by_its_retry(connection: Connection, dsn: str, point_of_death: str):
    """Guards names computed twice: the chapter's retry points to a table that does not exist, or collides with one."""
    go(connection, 1, "a", run="r1")
    with connect(dsn, application_name="dying") as dying, pytest.raises(CrashInjected), armed(point_of_death, "raise"):
        go(dying, 2, "b", run="r2")
    version = go(connection, 2, "b", run="r2")
    assert (version.name, shown(connection)) == ("devices_20260302_000000_1", ["b"])
    found = connection.execute("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'devices\\_%'").fetchone()
    assert found == (2,)


def test_two_logical_dates_of_one_second_are_two_versions(connection: Connection):
    """Guards names from the second: the later version would collide with the first, in every retry."""
    moment = datetime(2026, 3, 1, 10, 0, 0, tzinfo=UTC)
    names = []
    for run, micros in (("r1", 1), ("r2", 999_999)):
        version = add_version(connection, DEVICES, moment.replace(microsecond=micros), table_of(run), run=run)
        point(connection, DEVICES, version, reason=run)
        names.append(version.name)
    assert names == ["devices_20260301_100000_1", "devices_20260301_100000_2"]
    assert shown(connection) == ["r2"]


def test_versions_are_sealed_even_against_their_owner(connection: Connection, monkeypatch: Any):
    """Guards immutability where a superuser writes: REVOKE does not bind one, the trigger does."""
    version = go(connection, 1, "a", run="r1")
    for statement in ("INSERT INTO {} VALUES ('x')", "UPDATE {} SET id = 'x'", "DELETE FROM {}", "TRUNCATE {}"):
        with pytest.raises(errors.InsufficientPrivilege, match="sealed"):
            connection.execute(sql.SQL(statement).format(sql.Identifier(version.name)))
    with pytest.raises(errors.InsufficientPrivilege):
        connection.execute("DELETE FROM devices")  # through the view, too
    with monkeypatch.context() as without:
        without.setattr(proxy, "_seal", lambda *_: None)
        open_version = go(connection, 2, "b", run="r2")
    connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(open_version.name)))
    assert shown(connection) == []


def test_an_old_logical_date_is_not_published_over_a_newer_one_unless_told(connection: Connection):
    go(connection, 5, "new", run="r5")
    old = add_version(connection, DEVICES, date(2026, 3, 1), table_of("old"), run="r1")
    with pytest.raises(Refused, match="older than the version shown"):
        point(connection, DEVICES, old, reason="backfill")
    assert shown(connection) == ["new"]
    assert point(connection, DEVICES, old, reason="on purpose", told=True) is Decision.MOVE
    assert shown(connection) == ["old"]


def test_of_two_runs_at_once_the_newer_date_is_shown(dsn: str, connection: Connection):
    """Guards the lock of the name: the older one would decide by the moves before the newer one's."""
    go(connection, 1, "first", run="r1")
    newer, older = (
        add_version(connection, DEVICES, date(2026, 3, day), table_of(str(day)), run=f"r{day}") for day in (3, 2)
    )

    def drive(version: Version) -> None:
        with connect(dsn, application_name=version.name) as mine:
            point(mine, DEVICES, version, reason="run")

    met = meet("proxy.point.before_commit", HANGS, lambda: drive(newer), lambda: drive(older), blocked_after=1.0)
    assert isinstance(met.rival, Refused)
    assert shown(connection) == ["3"]


def test_a_roll_back_is_not_undone_by_a_late_retry(connection: Connection):
    go(connection, 1, "good", run="r1")
    bad = go(connection, 2, "bad", run="r2")
    assert roll_back(connection, DEVICES, reason="bad rows").name == "devices_20260301_000000_1"
    assert point(connection, DEVICES, bad, reason="retry of r2") is Decision.SUPERSEDED
    assert shown(connection) == ["good"]
    go(connection, 2, "better", run="r2-corrected")
    assert shown(connection) == ["better"]
    assert roll_back(connection, DEVICES, reason="once more").name == "devices_20260301_000000_1"


def test_a_version_that_a_corrected_one_has_replaced_is_not_shown_by_its_late_retry(connection: Connection):
    """Guards corrected data: the first run died before it was shown, and its retry comes after the correction."""
    with pytest.raises(CrashInjected), armed("proxy.version.after_commit", "raise"):
        go(connection, 1, "wrong", run="r1")
    go(connection, 1, "corrected", run="r1-corrected")
    wrong = go(connection, 1, "wrong", run="r1")
    assert shown(connection) == ["corrected"]
    assert point(connection, DEVICES, wrong, reason="on purpose", told=True) is Decision.MOVE


def test_a_second_roll_back_goes_one_version_further(connection: Connection):
    for day, value in enumerate(("oldest", "old", "bad"), start=1):
        go(connection, day, value, run=value)
    roll_back(connection, DEVICES, reason="bad")
    roll_back(connection, DEVICES, reason="old was bad too")
    assert shown(connection) == ["oldest"]
    with pytest.raises(Refused, match="no earlier version"):
        roll_back(connection, DEVICES, reason="nothing is left")


def test_columns_may_change_as_long_as_nobody_stands_on_the_name(connection: Connection):
    """Guards what CREATE OR REPLACE VIEW refuses: a dropped, renamed or retyped column. Grants survive."""
    go(connection, 1, "a", run="r1")
    connection.execute("CREATE ROLE reader_of_devices")
    try:
        connection.execute("GRANT SELECT ON devices TO reader_of_devices")
        connection.execute("GRANT UPDATE (id) ON devices TO reader_of_devices")
        renamed = "SELECT 1 AS number, unnest(%s::text[]) AS id"
        go(connection, 2, "b", run="r2", columns=renamed)
        assert shown(connection) == ["b"]
        granted = connection.execute("SELECT has_table_privilege('reader_of_devices', 'devices', 'SELECT')").fetchone()
        assert granted == (True,)
        by_column = "SELECT has_column_privilege('reader_of_devices', 'devices', %s, 'UPDATE')"
        assert [connection.execute(by_column, (name,)).fetchone() for name in ("id", "number")] == [(True,), (False,)]
        connection.execute("CREATE VIEW consumers AS SELECT number FROM devices")
        with pytest.raises(Terminal, match="consumers"):
            go(connection, 3, "c", run="r3")
        assert shown(connection) == ["b"]
    finally:
        connection.execute("DROP OWNED BY reader_of_devices; DROP ROLE reader_of_devices")


def test_old_versions_are_collected_but_never_the_way_back(connection: Connection):
    for day in range(1, 6):
        go(connection, day, str(day), run=f"r{day}")
    never_shown = add_version(connection, DEVICES, date(2026, 2, 1), table_of("x"), run="r0")
    assert collect(connection, DEVICES, keep=2, sealed_before=datetime(2020, 1, 1, tzinfo=UTC)) == []
    with pytest.raises(CrashInjected), armed("proxy.collect.before_commit", "raise"):
        collect(connection, DEVICES, keep=2, sealed_before=FUTURE)
    gone = collect(connection, DEVICES, keep=2, sealed_before=FUTURE)
    assert gone == [never_shown.name, "devices_20260301_000000_1", "devices_20260302_000000_1"]
    assert roll_back(connection, DEVICES, reason="x").name == "devices_20260304_000000_1"
    with pytest.raises(Refused, match="does not exist"):
        point(connection, DEVICES, never_shown, reason="x", told=True)
    assert [version.dropped for version in moves(connection, DEVICES)][-2:] == [True, True]


@pytest.fixture
def objects(s3: Any, bucket: str) -> ObjectProxy:
    return ObjectProxy(s3, bucket, "published", "devices")


def publish(objects: ObjectProxy, day: int, body: bytes, *, run: str) -> Version:
    version = objects.version(date(2026, 3, day), run=run)
    objects.put_once(version, "part-0", body)
    objects.point(version, reason=run)
    return version


def test_objects_are_written_once(objects: ObjectProxy):
    """Guards what Object Lock does not: a second PUT on a locked key succeeds and becomes current."""
    version = publish(objects, 1, b"a", run="r1")
    publish(objects, 1, b"a", run="r1")
    with pytest.raises(LostClaim, match="other bytes"):
        objects.put_once(version, "part-0", b"b")


@pytest.mark.parametrize("point_of_death", ["proxy.object.before_move", "proxy.object.after_move"])
def test_a_pointer_moves_once_whenever_its_run_dies(objects: ObjectProxy, point_of_death: str):
    first = publish(objects, 1, b"a", run="r1")
    with pytest.raises(CrashInjected), armed(point_of_death, "raise"):
        publish(objects, 2, b"b", run="r2")
    assert publish(objects, 2, b"b", run="r2") == objects.current()
    with pytest.raises(Refused, match="older"):
        publish(objects, 1, b"late", run="r1-late")
    assert objects.roll_back(reason="bad") == first
    assert objects.point(objects.version(date(2026, 3, 2), run="r2"), reason="retry") is Decision.SUPERSEDED
    assert objects.current() == first


def test_two_publishers_at_one_moment_have_one_winner(objects: ObjectProxy, monkeypatch: Any):
    """Guards the condition of the put: the loser decided on a pointer that has moved since."""
    publish(objects, 1, b"a", run="r1")
    stale = objects._seen()
    publish(objects, 3, b"c", run="r3")
    slow = objects.version(date(2026, 3, 2), run="r2")
    objects.put_once(slow, "part-0", b"b")
    with monkeypatch.context() as frozen:
        frozen.setattr(objects, "_seen", lambda: stale)
        with pytest.raises(LostClaim):
            objects.point(slow, reason="r2")
    current = objects.current()
    assert current is not None
    assert current.name == "r3"

    def unconditional(s3: Any, bucket: str, key: str, content: Any, *, seen: Any) -> None:
        import json

        s3.put_object(Bucket=bucket, Key=key, Body=json.dumps(content).encode())

    with monkeypatch.context() as without:
        without.setattr(objects, "_seen", lambda: stale)
        without.setattr(pointer, "move", unconditional)
        objects.point(slow, reason="r2")
    regressed = objects.current()
    assert regressed is not None
    assert regressed.name == "r2"


def test_a_roll_back_that_meets_a_publication_moves_nothing(objects: ObjectProxy, s3: Any, bucket: str):
    """Guards the one reading that a roll back decides by: it would go back from a version that nobody looked at."""
    for day in (1, 2):
        publish(objects, day, b"x", run=f"r{day}")

    class Slow(ObjectProxy):
        """Between its reading and its writing somebody publishes."""

        def _seen(self) -> pointer.Seen | None:
            seen = super()._seen()
            publish(objects, 3, b"x", run="r3")
            return seen

    with pytest.raises(LostClaim):
        Slow(s3, bucket, "published", "devices").roll_back(reason="r2 was bad")
    current = objects.current()
    assert current is not None
    assert current.name == "r3"


def test_old_folders_are_collected_but_never_the_way_back(objects: ObjectProxy):
    for day in range(1, 5):
        publish(objects, day, b"x", run=f"r{day}")
    assert objects.collect(keep=1, written_before=datetime(2020, 1, 1, tzinfo=UTC)) == []
    assert objects.collect(keep=1, written_before=FUTURE) == ["r1", "r2"]
    assert objects.roll_back(reason="x").name == "r3"
    with pytest.raises(Refused, match="no objects"):
        objects.point(objects.version(date(2026, 3, 1), run="r1x"), reason="x", told=True)
    with pytest.raises(InvalidInput):
        objects.version(date(2026, 3, 1), run="../up")
