"""The catalogue: which pipelines there are now, from files and from the table, as plans.

What belongs here: joining both and keeping the table's copy of the files. What does not: reading YAML (config.py). A
pipeline in a file goes before one of the same name that came through the API.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lockstep.kernel.clock import Clock
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.logs import get_logger
from lockstep.readiness import codec, config
from lockstep.readiness.config import Registry
from lockstep.readiness.model import IllegalTransition, Plan
from lockstep.readiness.store import Store

API = "api"
FILE = "file"
_REFRESH = timedelta(seconds=5)

_log = get_logger(__name__)


class Catalogue:
    """Plans by name, read again from the table every few seconds. Thread-safe."""

    def __init__(self, registry: Registry, store: Store, clock: Clock) -> None:
        self.registry = registry
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._plans: Mapping[str, Plan] = registry.plans
        self._read_at: float | None = None

    def plans(self) -> Mapping[str, Plan]:
        """Every pipeline. One in the table that cannot be read is told in the log and left out; files are whole."""
        with self._lock:
            now = self._clock.monotonic()
            if self._read_at is None or now - self._read_at >= _REFRESH.total_seconds():
                self._plans, self._read_at = self._read(), now
            return self._plans

    def _read(self) -> Mapping[str, Plan]:
        plans = dict(self.registry.plans)
        for entry in self._store.registered(self._clock.now()):
            if entry.pipeline in plans or not entry.data:
                continue
            try:
                plans[entry.pipeline] = config.parse_pipeline(entry.data, self.registry)
            except InvalidInput as error:
                _log.error("registered pipeline cannot be used", pipeline=entry.pipeline, error=str(error))
        return config.connect(plans)

    def sync(self) -> list[str]:
        """Bring the table's copy of the files up to date; returns what was changed."""
        known = {entry.pipeline: entry.data for entry in self._store.registered(self._clock.now())}
        changed = []
        for name, fields in self.registry.pipelines.items():
            data = fields.model_dump(mode="json", by_alias=True)
            if known.get(name) is None or codec.dumps(known[name]) != codec.dumps(data):
                self._store.register(name, data, origin=FILE)
                changed.append(name)
        return changed

    def register(self, data: Mapping[str, Any]) -> Plan:
        """Take a pipeline that came through the API. Raises `InvalidInput` with every problem."""
        plan = config.parse_pipeline(dict(data), self.registry)
        self._only_through_the_api(plan.pipeline)
        self._store.register(plan.pipeline, data, origin=API)
        self._forget()
        return plan

    def unregister(self, pipeline: str) -> None:
        """Remove a pipeline that came through the API and has nothing open."""
        self._only_through_the_api(pipeline)
        for entry in self._store.registered(self._clock.now()):
            if entry.pipeline == pipeline and entry.open:
                raise IllegalTransition(
                    f"{len(entry.open)} executions are open.", unit=pipeline, next_step="cancel them first."
                )
        self._store.unregister(pipeline)
        self._forget()

    def _only_through_the_api(self, pipeline: str) -> None:
        if pipeline in self.registry.plans:
            raise IllegalTransition("it is configured in a file.", unit=pipeline, next_step="change the file.")

    def _forget(self) -> None:
        with self._lock:
            self._read_at = None
