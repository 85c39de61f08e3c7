"""Fixtures of the window tests; each package's conftest imports what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest

from lockstep.kernel.migrate import migrate
from tests.databases import fresh_database
from tests.windows_lane import LaneUnderTest, new_vault
from tests.windows_world import World


@pytest.fixture(scope="session")
def warehouse(stack: Any) -> Iterator[str]:
    """A warehouse of this test process alone, with the control tables."""
    with fresh_database(stack, "test_windows") as dsn:
        migrate(dsn, "lockstep.windows")
        yield dsn


@pytest.fixture
def new_lane(warehouse: str, stack: Any) -> Iterator[Callable[..., LaneUnderTest]]:
    """Makes lanes of fresh vaults on the stack's real parts."""
    s3, dynamodb = boto3.client("s3"), boto3.client("dynamodb")
    made: list[LaneUnderTest] = []

    def make(**options: Any) -> LaneUnderTest:
        begun = options.pop("begun", True)
        lane_type, dsn = options.pop("lane_type", LaneUnderTest), options.pop("dsn", warehouse)
        world = World(s3, "raw-ddapi", dynamodb, options.pop("table", "ddapi_queue"), vault=new_vault(), **options)
        made.append(lane_type(dsn, world))
        if begun:
            made[-1].open()
        return made[-1]

    yield make
    for store in (store for lane in made for store in lane.stores):
        store.close()


@pytest.fixture
def lane(new_lane: Callable[..., LaneUnderTest]) -> LaneUnderTest:
    """One fresh lane."""
    return new_lane()
