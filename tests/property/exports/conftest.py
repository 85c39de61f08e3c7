"""Properties that need a database use the same worlds as the integration tests."""

from __future__ import annotations

from tests.integration.exports.conftest import module_ground, module_world

__all__ = ["module_ground", "module_world"]
