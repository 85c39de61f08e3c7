"""Fixtures of ticks on the shared stack: one deployment per module with a replica; each test has its own projects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ticks_world import Sender, World, open_world, serving


@pytest.fixture(scope="module")
def world(stack: Any) -> Iterator[World]:
    """A deployment that the tests of one module share."""
    with open_world(stack) as made, serving(made) as url:
        made.url = url
        yield made


@pytest.fixture
def sender(world: World) -> Sender:
    """A project of its own organisation."""
    return world.sender()
