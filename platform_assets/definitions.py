"""The one assembly point: everything Dagster loads, and nothing that computes.

What belongs here: gathering the lists that each pipeline's modules export. What does not: assets, rules,
clients. Tests call `build_definitions` with overrides instead of patching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import dagster as dg

import jobs.exports
import jobs.readiness
import jobs.selftest
import jobs.ticks
import jobs.windows
import jobs.windows_producer
import platform_assets.exports
import platform_assets.readiness
import platform_assets.selftest
import platform_assets.ticks
import platform_assets.windows
import sensors.exports
import sensors.readiness
import sensors.selftest
import sensors.ticks
import sensors.windows
import sensors.windows_source
from lockstep.kernel.settings import Settings
from lockstep.kernel.settings import settings as process_settings
from resources.assembly import build_resources

# One line per pipeline: each module exports the lists that it has, among those named in `_LISTS`.
MODULES: tuple[ModuleType, ...] = (
    platform_assets.selftest,
    jobs.selftest,
    sensors.selftest,
    platform_assets.windows,
    jobs.windows,
    jobs.windows_producer,
    sensors.windows,
    sensors.windows_source,
    platform_assets.exports,
    jobs.exports,
    sensors.exports,
    platform_assets.ticks,
    jobs.ticks,
    sensors.ticks,
    platform_assets.readiness,
    jobs.readiness,
    sensors.readiness,
)
_LISTS = ("assets", "checks", "jobs", "schedules", "sensors")


def build_definitions(
    *,
    settings: Settings | None = None,
    resources: Mapping[str, Any] | None = None,
    modules: Sequence[ModuleType] = MODULES,
) -> dg.Definitions:
    """Gather everything. `resources` replaces resources by key; `modules` replaces the set of pipelines."""
    found = {name: [item for module in modules for item in getattr(module, name, ())] for name in _LISTS}
    return dg.Definitions(
        assets=found["assets"],
        asset_checks=found["checks"],
        jobs=found["jobs"],
        schedules=found["schedules"],
        sensors=found["sensors"],
        resources={**build_resources(settings or process_settings()), **(resources or {})},
        # A run is one process with one Spark session; the multiprocess executor would open one per step.
        executor=dg.in_process_executor,
    )


defs = build_definitions()
