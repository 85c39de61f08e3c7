"""The small parts of the ingest service that need no stack: limits, turns, digests."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.fernet import Fernet
from fastapi_problem.error import Problem
from pydantic import SecretStr

from lockstep.kernel.errors import InvalidInput, Terminal
from lockstep.ticks.errors import InFlight
from lockstep.ticks.model import Part, Tick, TickState
from lockstep.ticks.projects import Keyring
from services.ingest.body import announced_sha256
from services.ingest.routes import _tick_view, matched
from services.ingest.turns import Turns

DIGEST = hashlib.sha256(b"x").digest()
STRUCTURED = f"sha-256=:{base64.b64encode(DIGEST).decode()}:"


@pytest.mark.parametrize(
    ("x_sha256", "content_digest"),
    [
        (DIGEST.hex(), None),
        (DIGEST.hex().upper(), None),
        (None, STRUCTURED),
        (DIGEST.hex(), STRUCTURED),
        (None, f"sha-512=:AAAA:, {STRUCTURED}"),
    ],
)
def test_either_header_names_the_digest(x_sha256: str | None, content_digest: str | None):
    assert announced_sha256(x_sha256, content_digest) == DIGEST.hex()


@pytest.mark.parametrize(
    ("x_sha256", "content_digest"),
    [
        (None, None),
        ("", None),
        ("zz", None),
        ("f" * 64, STRUCTURED),
        (None, "sha-256=abc"),
        (None, "sha-256=:!:"),
        (None, "sha-256=:AAAA:"),
        (None, "sha-512=:AAAA:"),
    ],
)
def test_a_digest_that_cannot_be_used_is_refused(x_sha256: str | None, content_digest: str | None):
    with pytest.raises(Problem) as caught:
        announced_sha256(x_sha256, content_digest)
    assert caught.value.status == 400


def test_finalizes_of_one_organisation_take_turns_and_of_two_do_not():
    order: list[str] = []

    async def one(turns: Turns, org: str, tick: str, gate: asyncio.Event) -> None:
        async with turns.turn(org, "p", tick):
            order.append(f"{tick} in")
            await gate.wait()
            order.append(f"{tick} out")

    async def scenario() -> None:
        turns, gate, other = Turns(5), asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(one(turns, "a", tick, gate)) for tick in ("1", "2")]
        tasks.append(asyncio.create_task(one(turns, "b", "3", other)))
        await asyncio.sleep(0.01)
        assert order == ["1 in", "3 in"]
        with pytest.raises(InFlight):
            async with turns.turn("a", "p", "2"):
                pass
        gate.set()
        other.set()
        await asyncio.gather(*tasks)
        assert (turns._locks, turns._busy) == ({}, set())

    asyncio.run(scenario())
    assert order.index("1 out") < order.index("2 in")


def test_a_turn_that_does_not_come_is_an_answer():
    async def scenario() -> None:
        turns = Turns(0.01)
        async with turns.turn("a", "p", "1"):
            with pytest.raises(InFlight):
                async with turns.turn("a", "p", "2"):
                    pass
        async with turns.turn("a", "p", "2"):
            pass

    asyncio.run(scenario())


def test_secrets_open_with_an_older_key_and_not_with_a_stranger():
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    sealed = Keyring(SecretStr(old)).seal("s")
    assert sealed != b"s"
    assert Keyring(SecretStr(f"{new},{old}")).open(sealed) == "s"
    with pytest.raises(Terminal):
        Keyring(SecretStr(new)).open(sealed)


@pytest.mark.parametrize("keys", [None, "", "short", "a,b"])
def test_a_keyring_needs_keys(keys: str | None):
    with pytest.raises(InvalidInput):
        Keyring(SecretStr(keys) if keys is not None else None)


@pytest.mark.parametrize(
    ("if_match", "wanted"),
    [
        (None, None),
        ("*", "a" * 64),
        (f'"{"a" * 64}"', "a" * 64),
        ("A" * 64, "a" * 64),
        (f'"v1", "{"a" * 64}"', "a" * 64),
        (f'"{"b" * 64}"', "b" * 64),
        ('"v1"', "v1"),
        (f'W/"{"a" * 64}"', f'w/"{"a" * 64}'),
        ("", ""),
    ],
)
def test_if_match_names_what_must_be_stored(if_match: str | None, wanted: str | None):
    """Guards against a tag that is not understood: only a request without the header may be without a condition."""
    part = Part(0, "a" * 64, 1, "k", None, None, datetime(2026, 5, 7, tzinfo=UTC))
    assert matched(if_match, part) == wanted
    assert (matched(if_match, None) is None) == (if_match is None)


def test_a_committed_tick_lacks_nothing_when_its_parts_are_forgotten():
    """Guards agents that ask what is missing: parts of a tick that is committed cannot be put any more."""
    now = datetime(2026, 5, 7, tzinfo=UTC)
    declared = {"tables": [{"parquets": [{"file_seq": 0, "sha256": "a" * 64}]}]}
    missing = {
        state: _tick_view(Tick("p", "t", "o", state, 1, 1, now, now, manifest=declared), {}, timedelta(days=7)).missing
        for state in (TickState.UPLOADING, TickState.COMMITTED)
    }
    assert missing == {TickState.UPLOADING: [0], TickState.COMMITTED: []}
