"""The Prometheus rules name metrics that the services really export."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import yaml
from prometheus_client.metrics_core import Metric

from lockstep.kernel.metrics import HttpMetrics, LedgerGauges, new_registry
from lockstep.kernel.settings import PROJECT_ROOT
from lockstep.ticks.silver.metrics import silver_readings
from lockstep.ticks.silver.queue import TickQueue
from services.ingest.metrics import IngestMetrics, ingest_readings

RULES = yaml.safe_load((PROJECT_ROOT / "docs" / "alerts" / "ticks.rules.yml").read_text())["groups"][0]["rules"]


def _exported() -> dict[str, set[str]]:
    """Every sample name that ingest and relay may export, with its labels."""
    registry = new_registry(with_process=False)
    HttpMetrics(registry).observe("PUT", "/v1/projects/{project_id}", 200, 0.1)
    ingest = IngestMetrics(registry)
    ingest.finalize("committed", 0.1)
    ingest.phase("lane", 0.1)
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    nobody = cast("Any", None)
    readings = [*ingest_readings(nobody), *silver_readings(nobody, TickQueue(nobody), TickQueue(nobody))]
    for described in LedgerGauges(readings).describe():
        assert isinstance(described, Metric)
    found |= {reading.name: set(reading.labels) for reading in readings}
    return found


EXPORTED = _exported()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_metric_and_label_of_a_rule_exists(rule: dict[str, Any]):
    """Guards an alert that can never fire because a metric was renamed."""
    names = re.findall(r"lockstep_[a-z_]+", rule["expr"])
    assert names
    for name in names:
        assert name in EXPORTED, name
    for name, labels in re.findall(r"(lockstep_[a-z_]+)\{([^}]*)\}", rule["expr"]):
        assert {one.split("=")[0].rstrip("!").strip() for one in labels.split(",")} <= EXPORTED[name]
    assert rule["annotations"].keys() == {"summary", "action"}
