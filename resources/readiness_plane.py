"""The readiness plane as a Dagster resource. What stands behind it: readiness.py.

What belongs here: handing the plane to assets and sensors. What does not: wiring it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import dagster as dg

from lockstep.kernel.settings import Settings, load_settings
from resources import clients
from resources.readiness import Plane, build_plane


class ReadinessResource(dg.ConfigurableResource):
    """The plane of this process, built at first use."""

    table: str = "readiness"

    def plane(self) -> Plane:
        """Store, driver, control and watchdog."""
        return _plane(load_settings(), self.table)

    def streams(self) -> Any:
        """A client of the table's stream."""
        return clients.aws_client("dynamodbstreams", region=load_settings().aws_region)


@lru_cache(maxsize=4)
def _plane(settings: Settings, table: str) -> Plane:
    # Shared by the ticks of a process: its breakers and pauses are worth keeping, and clients cost 50 ms each.
    return build_plane(settings, table=table)
