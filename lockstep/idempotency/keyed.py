"""Keyed idempotency: the same facts give the same key, so writing them again writes the same place.

What belongs here: keys from named columns, in Python and in Spark; sessions whose keys and contents depend on the
events alone; objects on S3 named by a key. What does not: merging rows by key (merger.py).
"""

# ruff: noqa: S608  # names are quoted by delta.py; values are never part of a statement

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.idempotency import delta, merger
from lockstep.idempotency.merger import Contract
from lockstep.idempotency.xxhash64 import xxhash64
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LostClaim, Terminal, Transient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LONGEST = 2**63


class Kind(StrEnum):
    """Types whose equality is beyond doubt. Floats, decimals and local times are not among them: cast them first."""

    TEXT = "string"
    INTEGER = "bigint"
    BOOLEAN = "boolean"
    DATE = "date"
    TIMESTAMP = "timestamp"
    BINARY = "binary"


class Digest(StrEnum):
    """How long a key is. Two of a million 64-bit keys collide once in 37 million, two of five billion every other time.

    So XXHASH64 is for sinks that take no longer key and compare the columns as well; everything else takes SHA2.
    """

    SHA2 = "sha2"
    XXHASH64 = "xxhash64"


@dataclass(frozen=True)
class KeyOf:
    """A family of keys: its name, and the columns in order. Two families never share a key.

    Column names are no part of the key, so that a renamed column keeps the keys of its rows.
    """

    name: str
    columns: tuple[tuple[str, Kind], ...]
    digest: Digest = Digest.SHA2

    def __post_init__(self) -> None:
        names = [name for name, _ in self.columns]
        if not self.name or not names or len(set(names)) != len(names):
            raise InvalidInput("a key needs a name and different columns.", unit=self.name or None)


def stable_key(key: KeyOf, row: Mapping[str, object]) -> str:
    """The digest of a canonical encoding of the named columns, in hex. Never Python's `hash`, which is salted.

    Raises:
        InvalidInput: A column is missing, or its value is not of the declared kind.
    """
    missing = [name for name, _ in key.columns if name not in row]
    if missing:
        raise InvalidInput(f"the row has no column {', '.join(missing)}.", unit=key.name)
    encoded = _text(key.name) + b"".join(_encode(key, name, kind, row[name]) for name, kind in key.columns)
    return hashlib.sha256(encoded).hexdigest() if key.digest is Digest.SHA2 else f"{xxhash64(encoded):016x}"


def key_sql(key: KeyOf) -> str:
    """The same key as an expression of Spark SQL, over columns of exactly the declared types (see `with_key`)."""
    parts = [delta.literal(_text(key.name).decode())]
    for name, kind in key.columns:
        column = delta.column(name)
        parts.append(f"COALESCE({_ENCODED_SQL[kind].format(c=column)}, 'n;')")
    encoded = f"concat({', '.join(parts)})"
    return f"sha2({encoded}, 256)" if key.digest is Digest.SHA2 else f"lower(lpad(hex(xxhash64({encoded})), 16, '0'))"


def with_key(frame: DataFrame, key: KeyOf, *, column: str = "key") -> DataFrame:
    """The frame with its key in `column`. Raises `InvalidInput` if a column has another type than declared.

    Checked, because Spark would silently turn a number into text and give it another key than Python does.
    """
    types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    problems = [
        f"{name} is {types.get(name, 'missing')}, not {kind}"
        for name, kind in key.columns
        if types.get(name) not in _ACCEPTED[kind]
    ]
    if problems:
        raise InvalidInput("the columns of the key have other types.", unit=key.name, problems=problems)
    return frame.selectExpr("*", f"{key_sql(key)} AS {delta.column(column)}")


# Every part ends itself (`;`, or a length in front): ("ab", "c") and ("a", "bc") differ, and NULL differs from "".
_ENCODED_SQL = {
    Kind.TEXT: "concat('s', CAST(octet_length({c}) AS STRING), ':', {c}, ';')",
    Kind.INTEGER: "concat('i', CAST({c} AS STRING), ';')",
    Kind.BOOLEAN: "CASE WHEN {c} THEN 'b1;' WHEN NOT {c} THEN 'b0;' END",
    Kind.DATE: "concat('d', CAST(unix_date({c}) AS STRING), ';')",
    Kind.TIMESTAMP: "concat('t', CAST(unix_micros({c}) AS STRING), ';')",
    Kind.BINARY: "concat('x', lower(hex({c})), ';')",
}
_ACCEPTED = {kind: {kind.value} for kind in Kind} | {Kind.INTEGER: {"tinyint", "smallint", "int", "bigint"}}


def _encode(key: KeyOf, name: str, kind: Kind, value: object) -> bytes:  # noqa: PLR0911  # one line for each kind
    match kind, value:
        case _, None:
            return b"n;"
        case Kind.TEXT, str():
            return _text(value)
        case Kind.BOOLEAN, bool():
            return b"b1;" if value else b"b0;"
        case Kind.INTEGER, int() if not isinstance(value, bool) and -_LONGEST <= value < _LONGEST:
            return b"i%d;" % value
        case Kind.TIMESTAMP, datetime() if value.tzinfo is not None:
            return b"t%d;" % ((value - _EPOCH) // _MICROSECOND)
        case Kind.DATE, date() if not isinstance(value, datetime):
            return b"d%d;" % (value - _EPOCH.date()).days
        case Kind.BINARY, bytes():
            return b"x" + value.hex().encode() + b";"
    raise InvalidInput(
        f"column {name} holds {type(value).__name__} {value!r}, not a {kind.name.lower()}.",
        unit=key.name,
        next_step="cast it to the declared kind; a datetime needs its time zone, an integer 64 bits.",
    )


def _text(value: str) -> bytes:
    try:
        body = value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{value!r} is not valid text.") from None
    return b"s%d:%s;" % (len(body), body)


class Event(NamedTuple):
    """Something that a user did. `position` is where the log keeps it: given once, never changed by late data."""

    user: str
    at: datetime
    position: int
    id: str


class Session(NamedTuple):
    """Events of one user with no gap between them. The key comes from the event that was appended first."""

    key: str
    user: str
    first: datetime
    last: datetime
    events: int


SESSION_KEY = KeyOf("session", (("user", Kind.TEXT), ("position", Kind.INTEGER), ("id", Kind.TEXT)))

# The whole event is its key, so a repeated one is ignored and a stored one is never rewritten.
_EVENTS = Contract(keys=("user", "at", "position", "id"))
_SESSIONS = Contract(keys=("key",), values=("user", "first", "last", "events"), flag="gone")


def sessions(events: Iterable[Event], gap: timedelta) -> list[Session]:
    """The sessions of these events, by user and time: a function of the set of events, whatever their order or repeats.

    An event sent twice counts once, at its earliest position. A pause longer than `gap` begins a new session.
    """
    firsts: dict[tuple[str, str], Event] = {}
    for event in sorted(set(events), key=_appended):
        firsts.setdefault((event.user, event.id), event)
    found = []
    for user, group in groupby(sorted(firsts.values(), key=lambda e: (e.user, e.at, e.id)), key=lambda e: e.user):
        for members in _split(list(group), gap):
            key = stable_key(SESSION_KEY, min(members, key=_appended)._asdict())
            found.append(Session(key, user, members[0].at, members[-1].at, len(members)))
    return found


def fold_sessions(spark: SparkSession, batch: DataFrame, *, events: str, sessions: str, gap: timedelta) -> int:
    """Add a batch (user, at, position, id) to the Delta table `events` and bring `sessions` up to date.

    Two commits: a crash between them is mended by the same batch. One fold at a time for a pair of tables; the caller
    holds the lane. Returns how many sessions changed.
    """
    if gap <= timedelta(0):
        raise InvalidInput(f"a gap of {gap} separates nothing.", unit=sessions)
    merger.merge_delta(spark, _EVENTS, target=events, source=batch)
    crash_point("idempotency.keyed.after_events")
    users = batch.select("user").distinct()
    known = delta.read(spark, events).join(users, "user", "left_semi")
    stored = delta.read(spark, sessions).join(users, "user", "left_semi")
    wanted = spark.sql(_sessions_sql(gap), known=known)
    changed = merger.merge_delta(
        spark, _SESSIONS, target=sessions, source=spark.sql(_CHANGES_SQL, wanted=wanted, stored=stored)
    )
    crash_point("idempotency.keyed.after_sessions")
    return changed


def create_session_tables(spark: SparkSession, *, events: str, sessions: str) -> None:
    """Create both Delta tables if they are absent."""
    for path, schema in (
        (events, "user string, at timestamp, position bigint, id string"),
        (sessions, "key string, user string, first timestamp, last timestamp, events bigint"),
    ):
        spark.createDataFrame([], schema).write.format("delta").mode("ignore").save(path)


_CHANGES_SQL = """
SELECT w.key, w.user, w.first, w.last, w.events, false AS gone
FROM (
    SELECT key, user, first, last, events FROM {wanted} EXCEPT SELECT key, user, first, last, events FROM {stored}
) w
UNION ALL
SELECT s.key, s.user, s.first, s.last, s.events, true AS gone
FROM {stored} s LEFT ANTI JOIN {wanted} w ON s.key = w.key
"""


def _sessions_sql(gap: timedelta) -> str:
    """The rule of `sessions` in Spark SQL, over a frame `known`."""
    pause = gap // _MICROSECOND
    return f"""
    WITH once AS (
        SELECT user, at, position, id FROM (
            SELECT k.*, ROW_NUMBER() OVER (PARTITION BY user, id ORDER BY position, at) AS nth FROM {{known}} k
        ) n WHERE nth = 1
    ), marked AS (
        SELECT o.*, COALESCE(unix_micros(at) - LAG(unix_micros(at)) OVER by_time > {pause}, true) AS starts
        FROM once o WINDOW by_time AS (PARTITION BY user ORDER BY at, id)
    ), numbered AS (
        SELECT m.*, SUM(CASE WHEN starts THEN 1 ELSE 0 END) OVER (PARTITION BY user ORDER BY at, id) AS session
        FROM marked m
    ), grouped AS (
        SELECT user, MIN(struct(position, at, user, id)) AS head, MIN(at) AS first, MAX(at) AS last, COUNT(*) AS events
        FROM numbered GROUP BY user, session
    ), named AS (SELECT user, head.position AS position, head.id AS id, first, last, events FROM grouped)
    SELECT {key_sql(SESSION_KEY)} AS key, user, first, last, events FROM named"""


def _appended(event: Event) -> tuple[int, datetime, str, str]:
    return event.position, event.at, event.user, event.id


def _split(events: list[Event], gap: timedelta) -> list[list[Event]]:
    found = [events[:1]]
    for before, event in pairwise(events):
        if event.at - before.at > gap:
            found.append([])
        found[-1].append(event)
    return found


class Put(NamedTuple):
    """An object under its key. `written` is False when the same bytes were there already."""

    key: str
    sha256: str
    written: bool


class KeyTaken(Terminal):
    """Other bytes live under this key."""


def put_keyed(s3: Any, *, bucket: str, key: str, body: bytes, replace: bool = False) -> Put:
    """Write an object whole or not at all, once: the same bytes again change nothing, whoever was first.

    Args:
        s3: A client of S3.
        bucket: Where.
        key: Named from the unit (partition, execution), never from the time of the run.
        body: Everything; a PUT appears as a whole.
        replace: A deliberate replay: other bytes take the place of exactly those that were read just now.

    Raises:
        KeyTaken: Other bytes are there and `replace` is False.
        LostClaim: Someone else replaced them at the same time.
        Transient: S3 did not answer. Nothing is known; the same call again finds out.
    """
    digest = hashlib.sha256(body).hexdigest()
    unit = f"s3://{bucket}/{key}"
    if _put(s3, bucket, key, body, digest, IfNoneMatch="*"):
        return Put(key, digest, True)
    found = _answered(lambda: s3.get_object(Bucket=bucket, Key=key), unit)
    if _answered(lambda: hashlib.sha256(found["Body"].read()).hexdigest(), unit) == digest:
        return Put(key, digest, False)
    if not replace:
        raise KeyTaken(
            "the key holds other bytes; nothing was written.",
            unit=unit,
            next_step="find out which run wrote them; a deliberate replay passes replace=True.",
        )
    if not _put(s3, bucket, key, body, digest, IfMatch=found["ETag"]):
        raise LostClaim(
            "someone else replaced the object at the same time; nothing was written.",
            unit=unit,
            next_step="look at what is there now; replace it only if your bytes are the newer ones.",
        )
    return Put(key, digest, True)


def _put(s3: Any, bucket: str, key: str, body: bytes, digest: str, **condition: str) -> bool:
    """Whether the conditional PUT took place; False means that its condition did not hold."""
    from botocore.exceptions import ClientError

    crash_point("idempotency.keyed.before_put")
    try:
        _answered(
            lambda: s3.put_object(Bucket=bucket, Key=key, Body=body, Metadata={"sha256": digest}, **condition),
            f"s3://{bucket}/{key}",
        )
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == 412:
            return False
        raise
    crash_point("idempotency.keyed.after_put")
    return True


def _answered(call: Any, unit: str) -> Any:
    """The answer of S3; a broken connection, a 409 race or a 5xx is `Transient`."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except BotoCoreError as error:
        raise Transient(f"S3 did not answer: {error}", unit=unit, next_step="repeat the call.") from error
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status in (404, 409, 429) or status >= 500:
            raise Transient(f"S3 could not do it now: {error}", unit=unit, next_step="repeat the call.") from error
        raise
