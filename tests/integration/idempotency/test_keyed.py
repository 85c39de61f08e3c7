"""Keys, sessions and keyed objects on the real stores."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from lockstep.idempotency import keyed
from lockstep.idempotency.keyed import Digest, Event, KeyOf, KeyTaken, Kind, Session
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import InvalidInput, LostClaim

pytestmark = pytest.mark.stack

KEY = KeyOf("probe's \\ {key}", tuple((f"c {kind.name.lower()}", kind) for kind in Kind))
SCHEMA = ", ".join(f"`c {kind.name.lower()}` {kind.value}" for kind in Kind)
START = datetime(2024, 11, 20, 10, tzinfo=UTC)
GAP = timedelta(minutes=10)

TEXTS = [
    None,
    "",
    "n;",
    "s1:x;",
    "naïve",
    "日本",
    "😀",
    "a\x00b",
    "'\"\\",
    " trailing ",
    "é",
    "\N{LATIN SMALL LETTER E}́",
]
INTEGERS = [None, 0, -1, 2**63 - 1, -(2**63)]
DATES = [None, date(1970, 1, 1), date(1, 1, 1), date(1582, 10, 15), date(9999, 12, 31)]
INSTANTS = [
    None,
    START,
    datetime(1582, 1, 1, 3, 4, 5, 6, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC),
]
BYTES = [None, b"", b"\x00\xff", "é".encode()]


def nasty_rows() -> list[dict[str, Any]]:
    chance = random.Random(7)
    columns = [TEXTS, INTEGERS, [None, True, False], DATES, INSTANTS, BYTES]
    names = [name for name, _ in KEY.columns]
    return [dict(zip(names, (chance.choice(column) for column in columns), strict=True)) for _ in range(80)]


def test_spark_and_python_give_the_same_keys_for_every_split_and_time_zone(spark: Any):
    """One differing byte, and a row written by Spark is a stranger to a worker in Python."""
    rows = nasty_rows()
    short = dataclasses.replace(KEY, digest=Digest.XXHASH64)
    frame = spark.createDataFrame([tuple(row.values()) for row in rows], SCHEMA)
    wanted = sorted((keyed.stable_key(KEY, row), keyed.stable_key(short, row)) for row in rows)
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        for zone, partitions in (("UTC", 1), ("Asia/Kathmandu", 3)):
            spark.conf.set("spark.sql.session.timeZone", zone)
            both = keyed.with_key(keyed.with_key(frame.repartition(partitions), KEY), short, column="short")
            assert sorted(map(tuple, both.select("key", "short").collect())) == wanted
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_a_column_of_another_type_is_refused_by_spark_as_by_python(spark: Any):
    """Spark would cast 7 to '7' in silence and give it a key that nobody else computes."""
    frame = spark.createDataFrame([(7, 1.5)], "a int, b double")
    key = KeyOf("k", (("a", Kind.TEXT), ("b", Kind.INTEGER), ("c", Kind.DATE)))
    with pytest.raises(InvalidInput) as refused:
        keyed.with_key(frame, key)
    assert refused.value.problems == ("a is int, not string", "b is double, not bigint", "c is missing, not date")


def test_sessions_of_any_split_with_crashes_equal_those_of_one_batch(spark: Any, lake: str):
    """Guards keys and contents: the book's job gives other sessions for other micro-batches, and orphans on replay."""
    chance = random.Random(3)
    log = [Event(chance.choice("ab"), START + timedelta(minutes=chance.randrange(120)), n, f"e{n}") for n in range(24)]
    arrival = chance.sample(log, len(log))
    batches = [arrival[:13], [*arrival[13:], log[0], log[1]._replace(position=99)]]
    where = {"events": f"{lake}/events", "sessions": f"{lake}/sessions"}
    keyed.create_session_tables(spark, **where)

    def fold(batch: list[Event]) -> int:
        frame = spark.createDataFrame(batch, "user string, at timestamp, position bigint, id string")
        return keyed.fold_sessions(spark, frame, **where, gap=GAP)

    fold(batches[0])
    for point in ("idempotency.keyed.after_events", "idempotency.keyed.after_sessions"):
        with armed(point, "raise") as charge, pytest.raises(CrashInjected):
            fold(batches[1])
        assert charge.fired
    assert fold(batches[1]) == 0  # replayed: nothing left to change
    stored = spark.read.format("delta").load(where["sessions"])
    found = stored.selectExpr("key", "user", "unix_micros(first) f", "unix_micros(last) l", "events").collect()
    assert sorted(map(tuple, found)) == sorted(_plain(session) for session in keyed.sessions(log, GAP))


def _plain(session: Session) -> tuple[Any, ...]:
    first, last = (int(moment.timestamp() * 1_000_000) for moment in (session.first, session.last))
    return session.key, session.user, first, last, session.events


def test_a_keyed_object_is_written_once_and_recognised_afterwards(s3: Any, bucket: str):
    put = keyed.put_keyed(s3, bucket=bucket, key="day=2024-11-20.csv", body=b"a,b\n")
    again = keyed.put_keyed(s3, bucket=bucket, key="day=2024-11-20.csv", body=b"a,b\n")
    assert (put.written, again.written, put.sha256) == (True, False, again.sha256)


@pytest.mark.parametrize("point", ["idempotency.keyed.before_put", "idempotency.keyed.after_put"])
def test_a_crash_around_the_put_leaves_the_whole_object_or_none_and_the_retry_finds_out(
    s3: Any, bucket: str, point: str
):
    """Guards the lost answer: the second PUT is refused by its condition, and that refusal is our own success."""
    with armed(point, "raise") as charge, pytest.raises(CrashInjected):
        keyed.put_keyed(s3, bucket=bucket, key="k", body=b"whole")
    assert charge.fired
    assert [o["Size"] for o in s3.list_objects_v2(Bucket=bucket).get("Contents", [])] == (
        [5] if "after" in point else []
    )
    assert keyed.put_keyed(s3, bucket=bucket, key="k", body=b"whole").written is ("before" in point)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"whole"


def test_other_bytes_under_the_same_key_are_refused_unless_the_replay_is_meant(s3: Any, bucket: str):
    """Guards against two different results that both claim to be the result of one unit."""
    keyed.put_keyed(s3, bucket=bucket, key="k", body=b"one")
    with pytest.raises(KeyTaken):
        keyed.put_keyed(s3, bucket=bucket, key="k", body=b"two")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"one"
    assert keyed.put_keyed(s3, bucket=bucket, key="k", body=b"two", replace=True).written
    assert len(s3.list_objects_v2(Bucket=bucket)["Contents"]) == 1


def test_of_racing_writers_one_wins_and_the_others_change_nothing(s3: Any, bucket: str):
    def write(body: bytes) -> str:
        try:
            return "won" if keyed.put_keyed(s3, bucket=bucket, key="k", body=body).written else "same"
        except KeyTaken:
            return "taken"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(write, [b"x"] * 4 + [b"y"] * 4))
    assert outcomes.count("won") == 1
    assert (outcomes.count("same"), outcomes.count("taken")) == (3, 4)


def test_a_replacement_that_lost_a_race_writes_nothing(s3: Any, bucket: str):
    keyed.put_keyed(s3, bucket=bucket, key="k", body=b"one")

    class Overtaken:
        """The real client; another writer is quicker between our reading and our writing."""

        def get_object(self, **request: Any) -> Any:
            answer = s3.get_object(**request)
            s3.put_object(Bucket=bucket, Key="k", Body=b"theirs")
            return answer

        def put_object(self, **request: Any) -> Any:
            return s3.put_object(**request)

    with pytest.raises(LostClaim):
        keyed.put_keyed(Overtaken(), bucket=bucket, key="k", body=b"two", replace=True)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"theirs"
