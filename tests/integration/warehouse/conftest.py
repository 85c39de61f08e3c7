"""Fixtures of this package."""

from tests.windows_fixtures import lane, new_lane, warehouse

__all__ = ["lane", "new_lane", "warehouse"]
