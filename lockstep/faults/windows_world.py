"""The window pipeline in a simulated world: the real worker, rules, queue and ledger on parts in memory.

What belongs here: a warehouse in memory that keeps the promises of `Sink`, a vendor, and who does what when. What does
not: faults (schedule.py) and judgement (checker.py). Staging is a copy: reading archives has its own tests.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.faults.checker import Effect, Stores, Unit
from lockstep.faults.history import History, Outcome, Verb
from lockstep.faults.parts import MemoryBucket, MemoryDynamo, aws_unreachable
from lockstep.faults.schedule import Actor, Bound, SimulatedTime, World, unreachable
from lockstep.kernel.errors import LockstepError, LostClaim, Terminal, Transient
from lockstep.kernel.ids import SeededIds
from lockstep.kernel.lease import Lease
from lockstep.kernel.retry import RetryPolicy
from lockstep.windows import operations
from lockstep.windows.ledger import WindowLedger
from lockstep.windows.listing import find_gaps, read_listing
from lockstep.windows.model import QUEUE_TABLE, QueueRow, Window, WindowStatus
from lockstep.windows.queue import WindowQueue
from lockstep.windows.store import Applied, Claim, Lane, Staged
from lockstep.windows.worker import DrainPolicy, WindowWorker

VAULT = "1001"
START = datetime(2026, 1, 1, tzinfo=UTC)
QUARTER = timedelta(minutes=15)
LANE_SECONDS = 60.0
# One batch and no flush between: with a second thread at work the order of calls would not be the seed's alone.
_POLICY = DrainPolicy(
    ttl=LANE_SECONDS,
    first_batch=1000,
    batch=1000,
    mirror_seconds=3600.0,
    retry=RetryPolicy(max_attempts=3, base_seconds=1, cap_seconds=4, budget_seconds=60, jitter="none"),
)

Rows = dict[str, int | None]
"""What a window does: a value for each key, None deletes it."""


@dataclass
class _LaneRow:
    watermark: datetime
    epoch: int = 1
    fence: int = 0
    owner: str | None = None
    lease_until: float = 0.0


@dataclass
class MemorySink:
    """A warehouse in memory: lanes with fences, one transaction per window, the ledger in the data's own store."""

    time: SimulatedTime
    lanes: dict[str, _LaneRow] = field(default_factory=dict)
    content: Rows = field(default_factory=dict)
    ledger: list[Applied] = field(default_factory=list)
    stages: dict[int, tuple[int, Rows]] = field(default_factory=dict)
    writes: list[tuple[str, int]] = field(default_factory=list)

    def lane(self, vault: str) -> Lane | None:
        """The lane as it stands."""
        row = self.lanes.get(vault)
        if row is None:
            return None
        held = row.owner is not None and row.lease_until > self.time.monotonic()
        return Lane(vault, row.epoch, row.watermark, row.fence, row.owner, None, "simulation", held)

    def claim(self, vault: str, owner: str, ttl: float) -> Claim | None:
        """Take it if it is free or its lease ran out."""
        row = self.lanes[vault]
        if row.owner is not None and row.lease_until > self.time.monotonic():
            return None
        row.owner, row.fence, row.lease_until = owner, row.fence + 1, self.time.monotonic() + ttl
        until = self.time.now() + timedelta(seconds=ttl)
        return Claim(Lease(vault, owner, row.fence, ttl, until), row.epoch, row.watermark, vault, row.fence)

    def renew(self, lease: Lease) -> Lease:
        """Extend it, or say that it is lost."""
        row = self._mine(lease)
        row.lease_until = self.time.monotonic() + lease.ttl
        return lease

    def release(self, lease: Lease) -> None:
        """Give it back, if it is still ours."""
        with suppress(LostClaim):
            self._mine(lease).owner = None

    def apply(self, claim: Claim, staged: Staged, schema: str) -> Applied:
        """Data, ledger row and watermark in one step, or nothing."""
        row = self._mine(claim.lease)
        if row.epoch != claim.epoch or row.watermark != staged.window.start or staged.load not in self.stages:
            raise LostClaim("the lane has moved on.", unit=str(staged.window))
        rows = self.stages[staged.load][1]
        replay(self.content, rows)
        row.watermark = staged.window.stop
        window, load_id = staged.window, staged.load_id(claim.fence)
        applied = Applied(
            claim.vault, row.epoch, window.kind.value, window.start, window.stop, load_id, claim.fence, len(rows),
            {}, staged.sha256, self.time.now(),
        )  # fmt: skip
        self.ledger.append(applied)
        self.writes.append((f"windows/{claim.vault}", claim.fence))
        return applied

    def find(self, vault: str, load_id: str) -> Applied | None:
        """The ledger row of one attempt."""
        return next((one for one in self.ledger if (one.vault, one.load_id) == (vault, load_id)), None)

    def history(self, vault: str, **bounds: Any) -> list[Applied]:
        """Applied windows between two stops."""
        after, until = bounds.get("after") or datetime.min.replace(tzinfo=UTC), bounds.get("until")
        kinds: Sequence[str] = bounds.get("kinds", ("incremental", "gap"))
        return [
            one
            for one in self.ledger
            if one.vault == vault and one.kind in kinds and one.stop > after and (until is None or one.stop <= until)
        ]

    def audit(self, action: str, vault: str, **words: Any) -> None:
        """Nobody reads it here."""

    def stage(self, claim: Claim, rows: Rows) -> int:
        """Room for one window's rows."""
        load = max(self.stages, default=0) + 1
        self.stages[load] = (claim.fence, rows)
        return load

    def drop_stages(self, fence: int, loads: Collection[int] | None) -> None:
        """Forget staged rows: these, or all up to a fence."""
        for load in [one for one, (by, _) in self.stages.items() if (by <= fence if loads is None else one in loads)]:
            del self.stages[load]

    def _mine(self, lease: Lease) -> _LaneRow:
        row = self.lanes[lease.lane]
        if (row.owner, row.fence) != (lease.owner, lease.fence):
            raise LostClaim(f"fence {lease.fence} is no longer the newest.", unit=lease.lane)
        return row


@dataclass
class MemoryPreparer:
    """Stands where archives are read: proves the raw object by the queue row's checksum, and copies it to staging."""

    sink: Any
    bucket: Any

    def prepare(
        self, claim: Claim, rows: Sequence[QueueRow], *, schema: str | None = None
    ) -> list[Staged | LockstepError]:
        """Stage these windows in order; the answer may end early, after an error."""
        found: list[Staged | LockstepError] = []
        for row in rows:
            try:
                found.append(self._one(claim, row))
            except LockstepError as error:
                return [*found, error]
        return found

    def drop_stages(self, claim: Claim, staged: Iterable[Staged] | None = None) -> None:
        """Forget what was staged."""
        self.sink.drop_stages(claim.fence, None if staged is None else {one.load for one in staged})

    def _one(self, claim: Claim, row: QueueRow) -> Staged:
        unit = str(row.window)
        try:
            body = self.bucket.get_object(Bucket="raw", Key=row.window.manifest_key)["Body"].read()
        except ClientError as error:
            raise Terminal("the raw files are missing.", unit=unit) from error
        except BotoCoreError as error:
            raise Transient("the raw files could not be read.", unit=unit) from error
        if hashlib.sha256(body).hexdigest() != row.checksum:
            raise Terminal("the raw files are not those of the queue row.", unit=unit)
        load = self.sink.stage(claim, json.loads(body))
        return Staged(row.window, load, row.checksum, (), f"stage:{claim.fence}")


@dataclass
class Vendor:
    """A vault that publishes windows: in order, late, damaged."""

    chain: list[Window]
    rows: dict[datetime, Rows]
    published: set[datetime] = field(default_factory=set)
    damaged: set[datetime] = field(default_factory=set)

    def listing(self) -> list[dict[str, Any]]:
        """What its listing shows: a window that is late is announced as an error while later ones are offered."""
        last = max(self.published, default=START)
        return [self._entry(window) for window in self.chain if window.stop <= last]

    def archive(self, window: Window) -> bytes:
        """The archive's rows."""
        return json.dumps(self.rows[window.stop], sort_keys=True).encode()

    def _entry(self, window: Window) -> dict[str, Any]:
        name = f"{window.vault}-{window.stop:%Y%m%d-%H%M}-N"
        if window.stop not in self.published:
            return {"name": name, "error": {"message": "late"}}
        spelled = "%Y-%m-%dT%H:%MZ"
        part = {"name": f"{name}.001", "filepart": 1, "size": 1}
        return {
            "name": name,
            "start_time": f"{window.start:{spelled}}",
            "stop_time": f"{window.stop:{spelled}}",
            "record_count": 1,
            "fileparts": 1,
            "filepart_details": [part],
        }


def replay(content: Rows, rows: Rows) -> None:
    """Deletes and upserts of one window; an addition besides, so that a second application shows."""
    for key, value in rows.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    content["applications"] = (content.get("applications") or 0) + 1


class WindowsWorld:
    """One vault, its queue, its lane, and everybody who touches them."""

    def __init__(self, world: World, history: History, *, windows: int) -> None:
        self.world = world
        self.history = history
        self.sink = MemorySink(world.time)
        self.sink.lanes[VAULT] = _LaneRow(START)
        self.bucket = MemoryBucket()
        self.writes: list[tuple[str, int]] = []
        self.dynamo = MemoryDynamo({QUEUE_TABLE: ("vault_id", "stoptime")}, self._seen)
        self.ids = SeededIds(world.seed)
        self._lost: Counter[str] = Counter()
        chain = [Window(VAULT, START + n * QUARTER, START + (n + 1) * QUARTER) for n in range(windows)]
        self.vendor = Vendor(chain, {one.stop: self._rows(n) for n, one in enumerate(chain)})

    def publish(self, window: Window) -> None:
        """The vendor offers a window."""
        key = f"windows/{VAULT}/{window.stoptime}"
        begun = self.history.invoke("vendor", Verb.WRITE, key, at=self.world.time.monotonic())
        self.vendor.published.add(window.stop)
        self.history.end(begun, Outcome.OK, unit=key)

    def worker(self, actor: Actor) -> WindowWorker:
        """The real worker, on parts as this actor reaches them."""
        sink = self._bound(actor, "sink", self.sink, unreachable)
        preparer = MemoryPreparer(sink, self._bound(actor, "s3", self.bucket, aws_unreachable))
        ledger = WindowLedger(self._bound(actor, "dynamodb", self.dynamo, aws_unreachable))
        return WindowWorker(
            cast("Any", sink), ledger, cast("Any", preparer), clock=actor.clock, ids=self.ids, policy=_POLICY
        )

    def produce(self, actor: Actor) -> None:
        """Fetch what is listed and has no row yet, raw files first, then the row."""
        bucket = self._bound(actor, "s3", self.bucket, aws_unreachable)
        queue = WindowQueue(self._bound(actor, "dynamodb", self.dynamo, aws_unreachable))
        listing = read_listing(VAULT, self.vendor.listing())
        with suppress(BotoCoreError, ClientError):
            known = {row.window.stop for row in queue.rows(VAULT)}
            for one in listing.published:
                if one.window.stop not in known:
                    body = self.vendor.archive(one.window)
                    kept = b"damaged" if one.window.stop in self.vendor.damaged else body
                    bucket.put_object(Bucket="raw", Key=one.window.manifest_key, Body=kept)
                    queue.add_ready(one.window, hashlib.sha256(body).hexdigest())
            windows = [one.window for one in listing.published]
            for gap in find_gaps(VAULT, START, windows, listing.missing):
                queue.record_gap(gap, now=actor.clock.now())

    def drain(self, actor: Actor) -> None:
        """One run of the worker."""
        with suppress(LockstepError, BotoCoreError, ClientError):
            self.worker(actor).drain(VAULT)

    def operate(self, actor: Actor) -> None:
        """A person looks at what failed, puts the raw files right and retries it."""
        worker = self.worker(actor)
        with suppress(LockstepError, BotoCoreError, ClientError):
            for row in worker.ledger.pending(VAULT, None):
                if row.status is WindowStatus.FAILED:
                    self.vendor.damaged.discard(row.window.stop)
                    self.bucket.objects[row.window.manifest_key] = self.vendor.archive(row.window)
                    operations.retry(worker, row.window, operations.Doer("operator", "the source was put right"))

    def look(self, actor: Actor) -> None:
        """Somebody reads which windows are in."""
        sink = self._bound(actor, "sink", self.sink, unreachable)
        for window in self.vendor.chain:
            key = f"windows/{VAULT}/{window.stoptime}"
            begun = self.history.invoke(actor.name, Verb.READ, key, at=self.world.time.monotonic())
            try:
                found = sink.history(VAULT, after=window.start, until=window.stop)
            except LockstepError:
                self.history.end(begun, Outcome.INFO)
                continue
            state = "APPLIED" if found else "PENDING"
            self.history.end(begun, Outcome.OK, unit=key, state=state, terminal=bool(found))

    def lose_row(self) -> None:
        """The control plane loses a row of the queue."""
        rows = self.dynamo.tables[QUEUE_TABLE]
        if rows:
            lost = self.world.random.choice(sorted(rows))
            del rows[lost]
            self._lost[lost[1]] += 1
            self.world.faults["state row lost"] += 1

    def meddle(self) -> None:
        """A person sets a row APPLIED by hand that is not."""
        waiting = [one for one in self.dynamo.tables[QUEUE_TABLE].values() if one.get("status") == {"S": "READY"}]
        if waiting:
            waiting[-1]["status"] = {"S": "APPLIED"}
            self.world.faults["row changed by hand"] += 1

    def is_settled(self) -> bool:
        """Whether the sink has everything and the queue says so."""
        rows = self.dynamo.tables[QUEUE_TABLE]
        applied = {key for key, one in rows.items() if one.get("status") == {"S": "APPLIED"}}
        return all((VAULT, one.sort_key) in applied for one in self.vendor.chain) and len(self.sink.ledger) >= len(
            self.vendor.chain
        )

    def stores(self) -> Stores:
        """What is there in the end, as the checker reads it."""
        lane = f"windows/{VAULT}"
        chain = [f"{lane}/{one.stoptime}" for one in self.vendor.chain]
        rows = self.dynamo.tables[QUEUE_TABLE]
        units = []
        for window in self.vendor.chain:
            state = rows.get((VAULT, window.sort_key), {}).get("status", {}).get("S", "UNKNOWN")
            applied = any(one.stop == window.stop for one in self.sink.ledger)
            terminal = applied and state == WindowStatus.APPLIED
            units.append(Unit(f"{lane}/{window.stoptime}", "APPLIED" if applied else state, terminal))
        expected: Rows = {}
        for window in self.vendor.chain[: len({one.stop for one in self.sink.ledger})]:
            replay(expected, self.vendor.rows[window.stop])
        units.append(Unit(f"{lane}/content", "there", True, promised=_text(expected), found=_text(self.sink.content)))
        effects = [Effect(lane, f"{lane}/{_stoptime(one)}", one.fence) for one in self.sink.ledger]
        return Stores(units, {lane: chain}, effects, self.sink.writes + self.writes)

    def _rows(self, number: int) -> Rows:
        chance = self.world.random
        return {f"k{chance.randrange(6)}": chance.choice((None, number, number * 10)) for _ in range(3)}

    def _seen(self, table: str, item: dict[str, Any]) -> None:
        if "fence" in item:
            stop = item["stoptime"]["S"]  # a row that was lost and made anew has a new life, and new fences
            self.writes.append((f"{table}/{stop}/{self._lost[stop]}", int(item["fence"]["N"])))

    def _bound(self, actor: Actor, name: str, part: Any, lost: Any) -> Any:
        return Bound(self.world, actor, name, part, lost=lost, plain=("paginate", "exceptions"))


def _stoptime(applied: Applied) -> str:
    return Window(applied.vault, applied.start, applied.stop).stoptime


def _text(rows: Rows) -> str:
    return json.dumps(rows, sort_keys=True)
