"""The catalogue: which pipelines there are now, from files and from the table, as plans.

What belongs here: joining both and keeping the table's copy of the files. What does not: reading YAML (config.py). A
pipeline in a file goes before one of the same name that came through the API.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from lockstep.kernel.clock import Clock
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.logs import get_logger
from lockstep.readiness import codec, config, timing
from lockstep.readiness.config import Registry
from lockstep.readiness.model import IllegalTransition, Plan
from lockstep.readiness.store import Registered, Store

API = "api"
FILE = "file"
_REFRESH = timedelta(seconds=5)
_SYNC = timedelta(minutes=1)

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
        self._synced_at: float | None = None

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
            if entry.pipeline not in plans and (plan := self._parsed(entry)):
                plans[entry.pipeline] = plan
        return config.connect(plans)

    def plan(self, pipeline: str) -> Plan | None:
        """One pipeline, as of the last write: another replica may just have taken, changed or removed it."""
        if pipeline in self.registry.plans:
            return self.plans()[pipeline]
        entry = self._store.registration(pipeline, self._clock.now())
        return self._parsed(entry) if entry else None  # only a pipeline in a file can have a downstream

    def _parsed(self, entry: Registered) -> Plan | None:
        """What came through the API. What a file brought and no file has any more is gone; its history stays."""
        if entry.origin != API:
            return None
        try:
            return config.parse_pipeline(entry.data, self.registry)
        except InvalidInput as error:
            _log.error("registered pipeline cannot be used", pipeline=entry.pipeline, error=str(error))
            return None

    def sync(self, until: float | None = None) -> list[str]:
        """Bring the table's copy of the files up to date; returns what was changed.

        Done again once a minute, so that a table that was made anew fills itself. `until` is an instant of the
        monotonic clock: what is not done by then is done next time.
        """
        if self._synced_at is not None and self._clock.monotonic() - self._synced_at < _SYNC.total_seconds():
            return []
        now = self._clock.now()
        known = {entry.pipeline: entry for entry in self._store.registered(now)}
        changed: list[str] = []
        for name, fields in self.registry.pipelines.items():
            if until is not None and self._clock.monotonic() >= until:
                return changed
            data, entry = fields.model_dump(mode="json", by_alias=True), known.get(name)
            since = self._since(self.registry.plans[name], entry, now)
            same = entry is not None and codec.dumps(entry.data) == codec.dumps(data) and entry.origin == FILE
            if entry is None or not same or since != entry.since:
                self._store.register(name, data, origin=FILE, since=since)
                changed.append(name)
        self._synced_at = self._clock.monotonic()
        return changed

    def _since(self, plan: Plan, entry: Registered | None, now: datetime) -> dict[str, datetime]:
        """A schedule keeps its beginning; one that is new begins now."""
        begun = entry.since if entry is not None else {}
        return {name: begun.get(name, moment) for name, moment in timing.first_starts(plan, now).items()}

    def register(self, data: Mapping[str, Any]) -> Plan:
        """Take a pipeline that came through the API. Raises `InvalidInput` with every problem."""
        plan = config.parse_pipeline(dict(data), self.registry)
        self._only_through_the_api(plan.pipeline)
        now = self._clock.now()
        since = self._since(plan, self._store.registration(plan.pipeline, now), now)
        self._store.register(plan.pipeline, data, origin=API, since=since)
        self._forget()
        return plan

    def unregister(self, pipeline: str) -> None:
        """Remove a pipeline that came through the API and has nothing open."""
        self._only_through_the_api(pipeline)
        if not self._store.unregister(pipeline):
            raise IllegalTransition("it has open executions.", unit=pipeline, next_step="cancel them first.")
        self._forget()

    def _only_through_the_api(self, pipeline: str) -> None:
        if pipeline in self.registry.plans:
            raise IllegalTransition("it is configured in a file.", unit=pipeline, next_step="change the file.")

    def _forget(self) -> None:
        with self._lock:
            self._read_at = None
