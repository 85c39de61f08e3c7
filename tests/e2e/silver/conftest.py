"""Fixtures of this package."""

from tests.silver_fixtures import world

__all__ = ["world"]
