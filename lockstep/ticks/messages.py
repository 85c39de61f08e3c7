"""What leaves when a tick is committed: the audit row and the message, in this order, in a lane of the tick's own.

What belongs here: their contents. What does not: sending them (kernel/relay.py). Each tick has its own lane, because
silver orders by the chain and not by arrival: one message that cannot leave holds up no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from lockstep.kernel.outbox import Message
from lockstep.ticks.model import (
    BRONZE_COMMITTED,
    LEDGER_DAYS,
    QUEUE,
    Manifest,
    TableCommit,
    TickMessage,
    spell,
)


def outbox_lane(project_id: str, tick_id: str) -> str:
    """The lane of one tick's messages."""
    return f"ticks/{project_id}/{tick_id}"


def audit_row(
    manifest: Manifest,
    commit: TableCommit,
    result: Mapping[str, Any],
    *,
    sequence: int,
    generation: int,
    now: datetime,
) -> Message:
    """The row of `bronze_committed`. A later generation replaces an earlier one, never the other way round."""
    attributes = {
        "org_id": manifest.org_id,
        "project_id": manifest.project_id,
        "mode": manifest.mode.value,
        "dt": manifest.dt,
        "sequence": sequence,
        "generation": generation,
        "committed_at": result["committed_at"],
        "rows_inserted": result["rows_inserted"],
        "rows_replaced": result["rows_replaced"],
        "bronze_db_key": commit.key,
        "bronze_db_etag": commit.etag,
        "expires_at": int((now + timedelta(days=LEDGER_DAYS)).timestamp()),
    }
    payload = {"key": {"tick_id": manifest.tick_id}, "attributes": attributes, "mode": "latest"}
    return Message(outbox_lane(manifest.project_id, manifest.tick_id), f"dynamodb:{BRONZE_COMMITTED}", payload)


def completed(manifest: Manifest, commit: TableCommit, *, now: datetime) -> Message:
    """The message of `bronze-completed`, schema 1.0."""
    message = TickMessage(
        org_id=manifest.org_id,
        project_id=manifest.project_id,
        tick_id=manifest.tick_id,
        mode=manifest.mode,
        dt=manifest.dt,
        bronze_db_key=commit.key,
        bronze_db_etag=commit.etag,
        emitted_at=now,
    )
    return Message(outbox_lane(manifest.project_id, manifest.tick_id), f"sqs:{QUEUE}", message.render())


def answer(manifest: Manifest, *, rows: int, replaced: int, now: datetime) -> dict[str, Any]:
    """The body of the 200, cached with the tick and repeated for ever."""
    return {
        "tick_id": manifest.tick_id,
        "status": "committed",
        "rows_inserted": rows,
        "rows_replaced": replaced,
        "committed_at": spell(now),
    }
