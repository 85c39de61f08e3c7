"""The readiness plane and its door for alerts as Dagster resources. What stands behind them: readiness.py.

What belongs here: handing both to assets and sensors. What does not: wiring it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import dagster as dg

from lockstep.kernel.settings import Settings, load_settings
from lockstep.readiness.alerts import AlertDoor
from resources import clients
from resources.readiness import SHORT_CALLS, TABLE, Deployment, build_alerts, build_deployment


class ReadinessResource(dg.ConfigurableResource):
    """The plane of this process, built at first use."""

    table: str = TABLE

    def deployment(self) -> Deployment:
        """Store, driver, control and watchdog."""
        return _deployment(load_settings(), self.table)

    def streams(self) -> Any:
        """A client of the table's stream."""
        return clients.aws_client("dynamodbstreams", region=load_settings().aws_region, **SHORT_CALLS)


class AlertsResource(dg.ConfigurableResource):
    """The door for alerts, for assets and sensors of every pipeline: `alerts.door().raise_now(…)`. Never raises."""

    table: str = TABLE

    def door(self) -> AlertDoor:
        """The door of this process."""
        return alert_door(load_settings(), self.table)


@lru_cache(maxsize=4)
def alert_door(settings: Settings, table: str = TABLE) -> AlertDoor:
    """The same for code that has settings instead of resources; one per process, as its sinks remember their pauses."""
    return build_alerts(settings, table=table)


@lru_cache(maxsize=4)
def _deployment(settings: Settings, table: str) -> Deployment:
    # Shared by the ticks of a process: its breakers and pauses are worth keeping, and clients cost 50 ms each.
    return build_deployment(settings, table=table)
