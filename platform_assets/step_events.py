"""An event of the running step as a row of Dagster's event log, so that many are stored in a few calls.

What belongs here: what every such row has in common. What does not: which events a pipeline reports, and when.
`context.log_event` costs two connections an event, a minute for a thousand partitions.
"""

from __future__ import annotations

import os
import time
from typing import Any

import dagster as dg
from dagster._core.events import DagsterEvent
from dagster._core.events.log import EventLogEntry


def step_entry(context: dg.AssetExecutionContext, **what: Any) -> EventLogEntry:
    """One event of this step; `what` are the fields of `DagsterEvent` that say what happened."""
    # The step's context is Dagster's own, so a test holds this against the version in use.
    step = context.get_step_execution_context()
    event = DagsterEvent(
        job_name=step.job_name,
        step_handle=step.step.handle,
        node_handle=step.step.node_handle,
        step_kind_value=step.step.kind.value,
        logging_tags=step.event_tags,
        pid=os.getpid(),
        **what,
    )
    return EventLogEntry(
        error_info=None,
        level=20,
        user_message="",
        run_id=context.run.run_id,
        timestamp=time.time(),
        step_key=step.step.key,
        job_name=step.job_name,
        dagster_event=event,
    )
