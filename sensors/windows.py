"""The window sensor: DynamoDB Streams wake it, a sweep keeps it honest, the sink and the rules decide.

What belongs here: reading hints, reading the ledgers, requesting runs. What does not: the decision itself
(lockstep/windows/rules.py). It writes nothing: a lost or repeated tick costs time only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from botocore.exceptions import BotoCoreError, ClientError

from jobs.lanes import LANE_TAG
from jobs.windows import jobs as window_jobs
from lockstep.kernel import trace
from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import LockstepError
from lockstep.kernel.settings import settings
from lockstep.windows import rules
from lockstep.windows.model import QUEUE_TABLE, QueueRow, WindowKind
from lockstep.windows.sink import Sink
from platform_assets.window_events import partition_of, window_partitions
from platform_assets.windows import ATTEMPT_TAG, VaultNames
from resources.aws import DynamoDBResource
from resources.windows import WindowsResource
from sensors import EVERY_LOOP_SECONDS, IN_FLIGHT

UNIT_TAG = "lockstep/unit"
DEADLINE_SECONDS = 40
SWEEP_SECONDS = 30.0
MAX_RECORDS = 1000
BACKOFF_SECONDS = 10.0
BACKOFF_CAP_SECONDS = 600.0


@dataclass
class Cursor:
    """Where the stream was read to. Only a hint: a cursor that cannot be read starts anew, with a sweep."""

    shards: dict[str, str] = field(default_factory=dict)
    swept_at: float = 0.0

    @classmethod
    def parse(cls, text: str | None) -> Cursor:
        """Read a cursor, or begin."""
        try:
            fields = json.loads(text or "{}")
            return cls({str(k): str(v) for k, v in fields.get("shards", {}).items()}, float(fields.get("swept_at", 0)))
        except (ValueError, TypeError, AttributeError):
            return cls()

    def __str__(self) -> str:
        return json.dumps({"shards": self.shards, "swept_at": self.swept_at})


@dg.sensor(
    name="windows_sensor",
    jobs=window_jobs,
    minimum_interval_seconds=EVERY_LOOP_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Asks for a run when a vault's next window may be applied. Streams wake it; a sweep misses nothing.",
)
def windows_sensor(
    context: dg.SensorEvaluationContext, windows: WindowsResource, dynamodb: DynamoDBResource
) -> dg.SensorResult:
    """One bounded pass: the vaults that the stream names, or all of them when a sweep is due."""
    clock = SystemClock()
    deadline, now = clock.monotonic() + DEADLINE_SECONDS, clock.now()
    cursor = Cursor.parse(context.cursor)
    vaults = _woken(context, dynamodb, cursor, settings().vault_ids, now)
    requests: list[dg.RunRequest] = []
    reasons: list[str] = []
    errors: list[Exception] = []
    with windows.store() as store:
        for vault in vaults:
            if clock.monotonic() > deadline:
                cursor.swept_at = 0.0  # what was not looked at is looked at in the next tick
                break
            try:
                answer = look(context.instance, store, windows.ledger(), vault, clock)
            except (LockstepError, BotoCoreError, ClientError) as error:  # one vault must not stop the others
                context.log.error("vault %s: %s", vault, error)
                errors.append(error)
                continue
            requests += [answer] if isinstance(answer, dg.RunRequest) else []
            reasons += [f"{vault}: {answer}"] if isinstance(answer, str) else []
    if errors and len(errors) == len(vaults):
        raise errors[0]
    skip = None if requests else "; ".join(reasons) or "no vault was woken"
    return dg.SensorResult(run_requests=requests, cursor=str(cursor), skip_reason=skip)


def look(instance: dg.DagsterInstance, store: Sink, ledger: Any, vault: str, clock: Clock) -> dg.RunRequest | str:
    """The run that a vault needs now, or why it needs none."""
    names, now = VaultNames(vault), clock.now()
    if instance.get_runs(dg.RunsFilter(tags={LANE_TAG: names.group}, statuses=IN_FLIGHT), limit=1):
        return "a run is under way"
    lane = store.lane(vault)
    if lane is not None and lane.has_begun:
        lease = lane.lease_until if lane.is_held else None
        rows = ledger.pending(vault, lane.watermark)
        decision = rules.next_step(lane.watermark, rows, now, lease_until=lease)
    else:
        decision = rules.baseline(ledger.pending(vault, None, kind=WindowKind.FULL), ledger.pending(vault, None))
    if not isinstance(decision, rules.Apply):
        return str(decision) if isinstance(decision, rules.Blocked) else "nothing new"
    return _request(instance, names, decision.row, now)


def _request(instance: dg.DagsterInstance, names: VaultNames, row: QueueRow, now: datetime) -> dg.RunRequest | str:
    """A run of its own key for every try. A run that died before it could count its attempt is repeated later."""
    unit, attempt = f"{names.vault}:{row.window.stoptime}", row.attempt_count + 1
    partition = partition_of(row.window.start)
    if not window_partitions(settings().windows_start).has_partition_key(partition):
        return f"{row.window} is outside the partitions; set LOCKSTEP_WINDOWS_START"
    tags = {UNIT_TAG: unit, ATTEMPT_TAG: str(attempt)}
    died = instance.get_run_records(dg.RunsFilter(tags=tags), limit=20)
    if died:
        wait = min(BACKOFF_CAP_SECONDS, BACKOFF_SECONDS * 2.0 ** len(died))
        since = now - died[0].update_timestamp.astimezone(UTC)
        if since.total_seconds() < wait:
            return f"{row.window}: {len(died)} runs ended without an attempt, next in {wait:.0f} s"
    return dg.RunRequest(
        run_key=f"{unit}:{attempt}:{len(died)}",
        job_name=names.job,
        partition_key=partition,
        tags={**tags, LANE_TAG: names.group, trace.RUN_TAG: trace.new_trace()},
    )


def _woken(
    context: dg.SensorEvaluationContext,
    dynamodb: DynamoDBResource,
    cursor: Cursor,
    known: Iterable[str],
    now: datetime,
) -> list[str]:
    """Vaults to look at: all when a sweep is due or the stream cannot be read, else those with new records."""
    every = list(known)
    try:
        named = read_hints(dynamodb.get_client(), dynamodb.get_streams_client(), cursor)
    except (BotoCoreError, ClientError) as error:
        context.log.warning("stream not read, sweeping instead: %s", error)
        cursor.shards.clear()
        named = set(every)
    if now.timestamp() - cursor.swept_at >= SWEEP_SECONDS:
        cursor.swept_at = now.timestamp()
        return every
    return [vault for vault in every if vault in named]


def read_hints(client: Any, streams: Any, cursor: Cursor, table: str = QUEUE_TABLE) -> set[str]:
    """Vaults with changed queue rows since the cursor. A shard seen for the first time is read from its beginning."""
    arn = client.describe_table(TableName=table)["Table"].get("LatestStreamArn")
    if arn is None:
        return set()
    found: set[str] = set()
    shards = streams.describe_stream(StreamArn=arn)["StreamDescription"]["Shards"]
    open_shards = [one["ShardId"] for one in shards if "EndingSequenceNumber" not in one["SequenceNumberRange"]]
    cursor.shards = {shard: cursor.shards.get(shard, "") for shard in open_shards}
    for shard in open_shards:
        found |= _read_shard(streams, arn, shard, cursor)
    return found


def _read_shard(streams: Any, arn: str, shard: str, cursor: Cursor) -> set[str]:
    after = cursor.shards[shard]
    place = (
        {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": after}
        if after
        else {"ShardIteratorType": "TRIM_HORIZON"}
    )
    iterator = streams.get_shard_iterator(StreamArn=arn, ShardId=shard, **place)["ShardIterator"]
    records = streams.get_records(ShardIterator=iterator, Limit=MAX_RECORDS)["Records"]
    if records:
        cursor.shards[shard] = records[-1]["dynamodb"]["SequenceNumber"]
    return {str(record["dynamodb"]["Keys"]["vault_id"]["S"]) for record in records}


sensors = [windows_sensor]
