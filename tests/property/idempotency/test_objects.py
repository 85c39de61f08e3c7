"""Proxy and keyed objects on real S3: any order of runs, crashes, late retries, roll backs and replays.

The oracles are plain Python: what the name showed, and which bytes each key holds.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.idempotency.keyed import KeyTaken, put_keyed
from lockstep.idempotency.proxy import Refused
from lockstep.idempotency.proxy_s3 import ObjectProxy
from lockstep.kernel.crash import CrashInjected, armed
from tests.property.idempotency.test_proxy_postgres import Oracle

pytestmark = pytest.mark.stack

MOVES = [None, "proxy.object.before_move", "proxy.object.after_move"]
PUTS = [None, "idempotency.keyed.before_put", "idempotency.keyed.after_put"]
FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Move(NamedTuple):
    """A run of a day that dies somewhere and is retried; then maybe a person's roll back, and a collection."""

    day: int
    crash: str | None
    roll_back: bool
    collect: bool


class Put(NamedTuple):
    """An object of a unit, written by a run or by a deliberate replay, dying somewhere on its way."""

    key: str
    body: bytes
    replace: bool
    crash: str | None


def publish(objects: ObjectProxy, day: int, run: str, crash: str | None) -> None:
    def attempt() -> None:
        version = objects.version(date(2026, 3, day), run=run)
        objects.put_once(version, "part-0", run.encode())
        objects.point(version, reason="run")

    if crash:
        with armed(crash, "raise"), suppress(CrashInjected, Refused):
            attempt()
    with suppress(Refused):
        attempt()


@FEW
@given(
    moves=st.lists(
        st.builds(Move, st.integers(1, 4), st.sampled_from(MOVES), st.booleans(), st.booleans()), min_size=1, max_size=5
    ),
    late=st.integers(0, 4),
)
def test_any_history_of_a_pointer_shows_what_the_rule_says(s3: Any, bucket: str, moves: list[Move], late: int):
    """A late retry of a suffix shows a version only if the rule says so; a collection never takes what is shown."""
    oracle, objects = Oracle(knows_builds=False), ObjectProxy(s3, bucket, secrets.token_hex(4), "devices")
    future = datetime.now(UTC) + timedelta(days=1)
    walk = [*enumerate(moves), *enumerate(moves[late:], start=late)]
    for number, move in walk:
        publish(objects, move.day, f"r{number}", move.crash)
        oracle.run(move.day, f"r{number}")
        if move.roll_back:
            with suppress(Refused):
                objects.roll_back(reason="bad")
            oracle.roll_back()
        if move.collect:
            objects.collect(keep=len(moves), written_before=future)
        current = objects.current()
        assert current is not None
        assert current.name == oracle.way[-1][1]
        body = s3.get_object(Bucket=bucket, Key=f"{objects.folder(current)}part-0")["Body"].read()
        assert body == current.name.encode()


@FEW
@given(
    st.lists(
        st.builds(Put, st.sampled_from("ab"), st.sampled_from([b"x", b"y", b""]), st.booleans(), st.sampled_from(PUTS)),
        max_size=10,
    )
)
def test_a_key_holds_its_first_bytes_or_those_of_the_last_replay(s3: Any, bucket: str, puts: list[Put]):
    prefix, held = secrets.token_hex(4), dict[str, bytes]()
    for key, body, replace, crash in puts:

        def write(key: str = key, body: bytes = body, replace: bool = replace) -> bool:
            return put_keyed(s3, bucket=bucket, key=f"{prefix}/{key}", body=body, replace=replace).written

        taken = key in held and held[key] != body and not replace
        if crash:
            with armed(crash, "raise"), suppress(CrashInjected, KeyTaken):
                write()
        if taken:
            with pytest.raises(KeyTaken):
                write()
        else:
            write()
            held[key] = body
            assert not write(), "a retry too many writes nothing"
        found = s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
        stored = {item["Key"]: s3.get_object(Bucket=bucket, Key=item["Key"])["Body"].read() for item in found}
        assert stored == {f"{prefix}/{key}": body for key, body in held.items()}
