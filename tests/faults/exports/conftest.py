"""Exports under faults use the same worlds as the integration tests."""

from __future__ import annotations

from tests.integration.exports.conftest import module_world, world

__all__ = ["module_world", "world"]
