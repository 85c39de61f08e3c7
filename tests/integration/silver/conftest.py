"""Fixtures of this package."""

from tests.silver_fixtures import deployed, world

__all__ = ["deployed", "world"]
