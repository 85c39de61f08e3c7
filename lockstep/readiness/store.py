"""The ledger of the readiness plane on one table: what each item is called, and what must change together.

What belongs here: keys, transactions, expiry. What does not: how a table does it (table.py), what happens next
(rules.py). Truth is written first and by condition; list copies follow and are only ever used to find the truth.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple

from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LostClaim
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.readiness import codec
from lockstep.readiness.model import (
    DEFAULT_SCHEDULE,
    Alert,
    Emit,
    Execution,
    Fact,
    IllegalTransition,
    Key,
    Plan,
    Readiness,
    RerunRecorded,
    RunMoved,
    RunStatus,
    TraitResult,
    parse_key,
)
from lockstep.readiness.rules import CLOCK_TOLERANCE, is_legal_path
from lockstep.readiness.table import Absent, Delete, Equals, Free, Item, ItemKey, Lacks, Merge, Put, Table, Write

PIPELINES = "PIPELINES"
RERUNS = "RERUNS"
STATE = "STATE"
CONFIG = "CONFIG"
LOCK = "LOCK"
READINESS = "READINESS"

EVENT_RETENTION = timedelta(days=90)
RUN_RETENTION = timedelta(days=90)
MARKER_RETENTION = timedelta(days=30)
READINESS_RETENTION = timedelta(minutes=5)
UNDATED = "*"
_MOST_DATED_RESULTS = 64
_RESULT = "result#"


class Marker(NamedTuple):
    """A wish to look at an execution. `stamp` is its time as it is written, whoever wrote it."""

    key: Key
    source: str
    at: datetime | None = None
    not_before: datetime | None = None
    stamp: str | None = None


class Swept(NamedTuple):
    """The markers of a pipeline, and those that nobody can read: sort key and what is wrong."""

    markers: list[Marker]
    unreadable: dict[str, str]


class Registered(NamedTuple):
    """A pipeline in the table: its configuration as written, open executions, alerts that no sink has taken yet.

    `since` says for each schedule from when on its executions count.
    """

    pipeline: str
    data: Mapping[str, Any]
    open: frozenset[str]
    since: Mapping[str, datetime] = {}
    undelivered: tuple[Alert, ...] = ()
    origin: str = ""


def seconds(now: datetime) -> int:
    """An instant as the table's TTL counts it."""
    return int(now.timestamp())


def runlog_key(key: Key) -> ItemKey:
    """Where an execution lives."""
    return f"PIPELINE#{key.pipeline}", f"RUNLOG#{_slot(key)}"


def _slot(key: Key) -> str:
    return f"{key.date.isoformat()}#{key.schedule}"


def slot_key(pipeline: str, slot: str) -> Key:
    """A key from `{date}#{schedule}`."""
    day, _, schedule = slot.partition("#")
    return Key(pipeline, date.fromisoformat(day), schedule)


class Store:
    """The ledger. Safe to share between threads if its table is."""

    def __init__(self, table: Table, ids: IdSource | None = None) -> None:
        self._table = table
        self._ids = ids or SystemIds()

    # --- executions --------------------------------------------------------------------------------------------

    def load(self, key: Key, plan: Plan, now: datetime) -> Execution | None:
        """The execution as of its last write."""
        item = self._table.get(*runlog_key(key), seconds(now))
        return None if item is None else _execution(item, plan)

    def status(self, key: Key, now: datetime) -> RunStatus | None:
        """Where an execution is, without the rest."""
        item = self._table.get(*runlog_key(key), seconds(now))
        return None if item is None else RunStatus(item["status"])

    def load_many(self, plans: Mapping[Key, Plan], now: datetime) -> dict[Key, Execution]:
        """Many executions in few calls; those that do not exist are left out."""
        places = {runlog_key(key): key for key in plans}
        found = self._table.get_many(places, seconds(now))
        return {places[place]: _execution(item, plans[places[place]]) for place, item in found.items()}

    def commit(self, before: Execution | None, after: Execution, facts: Sequence[Fact], now: datetime) -> Execution:
        """Write the state and its facts, all or nothing, if the execution is still what `before` was.

        Raises:
            LostClaim: Somebody else moved it; nothing was written.
            IllegalTransition: A run would take a hop that does not exist; nothing was written.
        """
        version = (before.version if before is not None else 0) + 1
        writes: list[Write] = [self._runlog(before, after, version)]
        copies: list[Write] = []
        for fact in facts:  # events of one instant are kept in order by their ids, which rise
            self._add(fact, after, now, writes, copies)
        if (before is not None and before.is_open) != after.is_open:
            writes.append(_mark_open(after))
        crash_point("readiness.commit.before")
        if not self._table.write(writes):
            raise LostClaim("it was moved by another driver.", unit=str(after.key), next_step="load it again.")
        crash_point("readiness.commit.before_copies")
        for copy in copies:
            self._table.write([copy])
        return after.changed(version=version)

    def _runlog(self, before: Execution | None, after: Execution, version: int) -> Write:
        pk, sk = runlog_key(after.key)
        item = {
            "PK": pk,
            "SK": sk,
            "version": version,
            "status": after.status.value,
            "runId": after.run_id,
            "data": codec.dumps(codec.encode_execution(after)),
        }
        # No TTL: a row that expired would let its date run again.
        return Put(item, Absent() if before is None else Equals("version", before.version))

    def _add(self, fact: Fact, state: Execution, at: datetime, writes: list[Write], copies: list[Write]) -> None:
        if isinstance(fact, Emit):
            writes.append(self._event(state.key, fact, at))
        elif isinstance(fact, RunMoved):
            self._add_run(fact, state, at, writes, copies)
        elif isinstance(fact, RerunRecorded):
            self._add_rerun(fact, state.key, at, writes, copies)
        else:
            writes.append(
                _marker(Marker(state.key._replace(pipeline=fact.pipeline), _cascade(state), at, fact.not_before))
            )

    def _event(self, key: Key, fact: Emit, at: datetime) -> Write:
        moment = codec.instant(at)
        data = {
            "kind": fact.kind,
            "pipelineId": key.pipeline,
            "date": key.date.isoformat(),
            "scheduleId": key.schedule,
            "runId": fact.run_id,
            "message": fact.message,
            "details": dict(fact.details),
            "timestamp": moment,
        }
        sk = f"EVENT#{moment}#{self._ids.new_id()}"
        item = {"PK": f"PIPELINE#{key.pipeline}", "SK": sk, "data": codec.dumps(data)}
        return Put({**item, "ttl": seconds(at + EVENT_RETENTION)}, Absent())

    def _add_run(
        self, fact: RunMoved, state: Execution, at: datetime, writes: list[Write], copies: list[Write]
    ) -> None:
        if not is_legal_path(fact.path):
            words = " to ".join(status.value for status in fact.path)
            raise IllegalTransition(f"a run cannot go from {words}.", unit=fact.run_id)
        end = fact.path[-1]
        data = codec.dumps(
            {
                "runId": fact.run_id,
                "pipelineId": state.key.pipeline,
                "date": state.key.date.isoformat(),
                "scheduleId": state.key.schedule,
                "attempt": fact.attempt,
                "generation": fact.generation,
                "status": end.value,
                "metadata": dict(fact.handle),
                "failure": codec.encode_failure(fact.failure),
                "updatedAt": codec.instant(at),
            }
        )
        values: dict[str, Any] = {"status": end.value, "data": data}
        if end.is_terminal:
            values["ttl"] = seconds(at + RUN_RETENTION)
        condition = Absent() if fact.created else Equals("status", fact.path[0].value)
        steps = len(fact.path) if fact.created else len(fact.path) - 1
        writes.append(Merge(f"RUN#{fact.run_id}", STATE, values, {"version": steps}, condition=condition))
        copies.append(Merge(f"PIPELINE#{state.key.pipeline}", f"RUN#{fact.run_id}", values, {"version": steps}))

    def _add_rerun(self, fact: RerunRecorded, key: Key, at: datetime, writes: list[Write], copies: list[Write]) -> None:
        values: dict[str, Any] = {
            "GSI1PK": RERUNS,
            "GSI1SK": fact.rerun_id,
            "rerunId": fact.rerun_id,
            "pipelineId": key.pipeline,
            "originalDate": key.date.isoformat(),
            "scheduleId": key.schedule,
            "reason": fact.reason.value,
            "status": fact.status,
            "runId": fact.run_id or "",
            "updatedAt": codec.instant(at),
        }
        if fact.why:
            values["description"] = fact.why
        if fact.status == "PENDING":
            values["requestedAt"] = codec.instant(at)
        condition = Absent() if fact.status == "PENDING" else None
        writes.append(Merge(f"RERUN#{fact.rerun_id}", STATE, values, condition=condition))
        plain = {name: value for name, value in values.items() if not name.startswith("GSI1")}
        copies.append(Merge(f"PIPELINE#{key.pipeline}", f"RERUN#{fact.rerun_id}", plain))

    def executions(self, pipeline: str, now: datetime, *, limit: int = 50) -> list[dict[str, Any]]:
        """Run log rows of a pipeline, latest date first, as stored."""
        rows = self._table.query(f"PIPELINE#{pipeline}", "RUNLOG#", seconds(now), limit=limit, newest=True)
        return [{**json.loads(row["data"]), "version": row["version"]} for row in rows]

    # --- runs and reruns ----------------------------------------------------------------------------------------

    def run(self, run_id: str, now: datetime) -> dict[str, Any] | None:
        """A run's truth."""
        item = self._table.get(f"RUN#{run_id}", STATE, seconds(now))
        return None if item is None else _run(item)

    def runs(self, pipeline: str, now: datetime, *, limit: int = 50) -> list[dict[str, Any]]:
        """Runs of a pipeline: found by their copies, shown by their truth, newest change first."""
        moment = seconds(now)
        copies = self._table.query(f"PIPELINE#{pipeline}", "RUN#", moment)
        found = self._table.get_many(((copy["SK"], STATE) for copy in copies), moment)
        return sorted((_run(item) for item in found.values()), key=lambda run: str(run["updatedAt"]), reverse=True)[
            :limit
        ]

    def rerun(self, rerun_id: str, now: datetime) -> dict[str, Any] | None:
        """A rerun's truth."""
        item = self._table.get(f"RERUN#{rerun_id}", STATE, seconds(now))
        return None if item is None else _shown(item)

    def reruns(self, now: datetime, pipeline: str | None = None, *, limit: int = 200) -> list[dict[str, Any]]:
        """Reruns of one pipeline, or of all."""
        moment = seconds(now)
        if pipeline is None:
            return [_shown(item) for item in self._table.index(RERUNS, moment, limit=limit)]
        copies = self._table.query(f"PIPELINE#{pipeline}", "RERUN#", moment, limit=limit)
        found = self._table.get_many(((copy["SK"], STATE) for copy in copies), moment)
        return [_shown(item) for item in found.values()]

    # --- events and alerts --------------------------------------------------------------------------------------

    def events(
        self, pipeline: str, now: datetime, *, limit: int = 100, newest: bool = True, key: Key | None = None
    ) -> list[dict[str, Any]]:
        """The event log of a pipeline, newest first unless asked otherwise; of one execution if a key is given."""
        wanted = None if key is not None else limit
        rows = self._table.query(f"PIPELINE#{pipeline}", "EVENT#", seconds(now), limit=wanted, newest=newest)
        found = [json.loads(row["data"]) for row in rows]
        if key is not None:
            slot = (key.date.isoformat(), key.schedule)
            found = [event for event in found if (event["date"], event["scheduleId"]) == slot]
        return found[:limit]

    def append(self, key: Key, fact: Emit, now: datetime) -> None:
        """An event that belongs to no step."""
        self._table.write([self._event(key, fact, now)])

    def raise_alert(self, alert: Alert, owner: str, now: datetime) -> bool:
        """Record an alert that no execution carries, with its event. False if it was raised before: stay silent."""
        details = {"kind": alert.kind, "level": alert.level.value, "alertId": alert.id}
        lock = {"PK": f"LOCK#alert:{alert.id}", "SK": LOCK, "token": owner, "ttl": seconds(now + EVENT_RETENTION)}
        event = self._event(alert.key, Emit("ALERT", alert.message, None, details), now)
        pipeline, waiting = alert.key.pipeline, {"undelivered": {_told(alert)}}
        names = {"GSI1PK": PIPELINES, "GSI1SK": pipeline}
        kept = Merge(f"PIPELINE#{pipeline}", CONFIG, names, waiting)
        return self._table.write([Put(lock, Free(seconds(now))), event, kept])

    def alert_delivered(self, alert: Alert) -> None:
        """Some sink took the alert."""
        told = {"undelivered": {_told(alert)}}
        self._table.write([Merge(f"PIPELINE#{alert.key.pipeline}", CONFIG, remove_members=told)])

    # --- locks --------------------------------------------------------------------------------------------------

    def acquire(self, name: str, owner: str, ttl: timedelta, now: datetime) -> bool:
        """Take a lock that is free or whose time is over. `owner` must be new for every try.

        One that ends much later than this one would was written by a clock that runs ahead: it would hold for hours.
        """
        item = {"PK": f"LOCK#{name}", "SK": LOCK, "token": owner, "ttl": seconds(now + ttl)}
        return self._table.write([Put(item, Free(seconds(now), seconds(now + ttl + CLOCK_TOLERANCE)))])

    def renew(self, name: str, owner: str, ttl: timedelta, now: datetime) -> bool:
        """Keep a lock that is still mine; False if it is not."""
        values = {"ttl": seconds(now + ttl)}
        return self._table.write([Merge(f"LOCK#{name}", LOCK, values, condition=Equals("token", owner))])

    def release(self, name: str, owner: str) -> bool:
        """Give a lock back; False, and nothing changes, if it is not mine."""
        return self._table.write([Delete(f"LOCK#{name}", LOCK, Equals("token", owner))])

    def holder(self, name: str, now: datetime) -> str | None:
        """Who has the lock."""
        item = self._table.get(f"LOCK#{name}", LOCK, seconds(now))
        return None if item is None else str(item["token"])

    def beat(self, name: str, now: datetime, ttl: timedelta, note: str = "") -> None:
        """Say that a process is alive: a lock item that only its owner writes."""
        item = {"PK": f"LOCK#heartbeat:{name}", "SK": LOCK, "token": note or name, "at": codec.instant(now)}
        self._table.write([Put({**item, "ttl": seconds(now + ttl)})])

    def last_beat(self, name: str, now: datetime) -> datetime | None:
        """When a process was last alive; None if its sign has expired."""
        item = self._table.get(f"LOCK#heartbeat:{name}", LOCK, seconds(now))
        return None if item is None else codec.parse_instant(item["at"])

    # --- traits and readiness -----------------------------------------------------------------------------------

    def put_traits(self, pipeline: str, slot: Key | None, results: Iterable[TraitResult], now: datetime) -> None:
        """Keep answers, each under its trait and for its execution; `None` is for every execution until it expires.

        All executions of a pipeline share one item per trait, so a write touches only its own execution's attribute.
        """
        name = _RESULT + (UNDATED if slot is None else _slot(slot))
        for result in results:
            values: dict[str, Any] = {name: codec.dumps(codec.encode_result(result)), "latest": codec.instant(now)}
            self._table.write([Merge(f"PIPELINE#{pipeline}", f"TRAIT#{result.trait}", values)])

    def traits(self, pipeline: str, slot: Key, types: Iterable[str], now: datetime) -> dict[str, TraitResult]:
        """The stored answers for one execution; a push, also one for all executions, goes before an evaluator's."""
        return self.traits_many({slot: types}, now)[slot]

    def traits_many(self, wanted: Mapping[Key, Iterable[str]], now: datetime) -> dict[Key, dict[str, TraitResult]]:
        """The same for many executions in few calls."""
        places = {(f"PIPELINE#{key.pipeline}", f"TRAIT#{trait}") for key, traits in wanted.items() for trait in traits}
        items = self._table.get_many(places, seconds(now))
        found: dict[Key, dict[str, TraitResult]] = {}
        for key, traits in wanted.items():
            pk = f"PIPELINE#{key.pipeline}"
            answers = ((trait, _answer(items.get((pk, f"TRAIT#{trait}")), key, now)) for trait in traits)
            found[key] = {trait: answer for trait, answer in answers if answer is not None}
        return found

    def all_traits(self, pipeline: str, now: datetime) -> list[dict[str, Any]]:
        """Every stored answer that has not expired, for people."""
        rows = self._table.query(f"PIPELINE#{pipeline}", "TRAIT#", seconds(now))
        found = []
        for row in rows:
            for name, text in row.items():
                if name.startswith(_RESULT):
                    result = codec.decode_result(json.loads(text))
                    if result.expires_at is None or now < result.expires_at:
                        found.append({"for": name.removeprefix(_RESULT), **codec.encode_result(result)})
        return found

    def prune_traits(self, pipeline: str, now: datetime) -> int:
        """Drop dated answers beyond the newest 64 of each trait; an item may not grow for ever."""
        dropped = 0
        for row in self._table.query(f"PIPELINE#{pipeline}", "TRAIT#", seconds(now)):
            dated = sorted(name for name in row if name.startswith(_RESULT) and name != _RESULT + UNDATED)
            old = set(dated[:-_MOST_DATED_RESULTS]) if len(dated) > _MOST_DATED_RESULTS else set()
            kept = {name: value for name, value in row.items() if name not in old}
            # Written back only if nobody answered meanwhile; otherwise the next pruning does it.
            if old and self._table.write([Put(kept, Equals("latest", row["latest"]))]):
                dropped += len(old)
        return dropped

    def put_readiness(self, key: Key, readiness: Readiness, now: datetime) -> None:
        """Keep the last verdict for those who only look."""
        data = {"date": key.date.isoformat(), "scheduleId": key.schedule, **(codec.encode_readiness(readiness) or {})}
        item = {"PK": f"PIPELINE#{key.pipeline}", "SK": READINESS, "data": codec.dumps(data)}
        self._table.write([Put({**item, "ttl": seconds(now + READINESS_RETENTION)})])

    def readiness(self, pipeline: str, now: datetime) -> dict[str, Any] | None:
        """The last verdict, if it is recent."""
        item = self._table.get(f"PIPELINE#{pipeline}", READINESS, seconds(now))
        return None if item is None else dict(json.loads(item["data"]))

    # --- configuration and markers -------------------------------------------------------------------------------

    def register(
        self, pipeline: str, data: Mapping[str, Any], *, origin: str, since: Mapping[str, datetime] | None = None
    ) -> None:
        """Keep a pipeline's configuration; its open executions stay as they are."""
        begun = {schedule: codec.instant(moment) for schedule, moment in (since or {}).items()}
        names = {"GSI1PK": PIPELINES, "GSI1SK": pipeline, "origin": origin}
        values = {**names, "data": codec.dumps(dict(data)), "since": codec.dumps(begun)}
        self._table.write([Merge(f"PIPELINE#{pipeline}", CONFIG, values)])

    def unregister(self, pipeline: str) -> bool:
        """Remove a pipeline's configuration; its history stays. False if an execution is open: nothing changes then."""
        return self._table.write([Delete(f"PIPELINE#{pipeline}", CONFIG, Lacks("open"))])

    def registration(self, pipeline: str, now: datetime) -> Registered | None:
        """One pipeline, as of the last write."""
        row = self._table.get(f"PIPELINE#{pipeline}", CONFIG, seconds(now))
        return None if row is None else _registered(row)

    def registered(self, now: datetime) -> list[Registered]:
        """Every pipeline, from the index. May lag by a moment: a hint for where to look, never the truth."""
        return [_registered(row) for row in self._table.index(PIPELINES, seconds(now))]

    def put_marker(self, marker: Marker) -> None:
        """Ask for an execution to be looked at. Repeating it is harmless."""
        self._table.write([_marker(marker)])

    def markers(self, pipeline: str, now: datetime) -> Swept:
        """The markers of a pipeline that nobody has taken yet."""
        found = Swept([], {})
        for row in self._table.query(f"MARKER#{pipeline}", "", seconds(now)):
            try:
                found.markers.append(read_marker(row))
            except InvalidInput as error:
                found.unreadable[str(row["SK"])] = "; ".join(error.problems)
        return found

    def drop_marker(self, marker: Marker) -> bool:
        """Take a marker away, unless it was written anew meanwhile."""
        stamp = marker.stamp or codec.instant(marker.at)
        condition = Equals("requestedAt", stamp) if stamp else None
        return self._table.write([Delete(f"MARKER#{marker.key.pipeline}", _slot(marker.key), condition)])

    def refuse_marker(self, pipeline: str, sort_key: str, words: str, now: datetime) -> None:
        """Take a marker that cannot be read away, and say why in the pipeline's event log."""
        told = Emit("MARKER_REFUSED", words, None, {"marker": f"MARKER#{pipeline}", "sortKey": sort_key})
        event = self._event(Key(pipeline, now.date(), "marker"), told, now)
        self._table.write([Delete(f"MARKER#{pipeline}", sort_key), event])


def read_marker(row: Mapping[str, Any]) -> Marker:
    """A marker from its item, also from one that was made by hand; `InvalidInput` if its key names no execution."""
    day, mark, schedule = str(row["SK"]).partition("#")
    key = parse_key(str(row["PK"]).removeprefix("MARKER#"), day, schedule if mark else DEFAULT_SCHEDULE)
    if not mark:
        words = f"its sort key must be {day}#{DEFAULT_SCHEDULE}, or the name of another schedule after the #"
        raise InvalidInput("the marker names no schedule.", unit=key.pipeline, problems=[words])
    stamp = row.get("requestedAt")
    at, not_before = codec.read_instant(stamp), codec.read_instant(row.get("notBefore"))
    return Marker(key, str(row.get("source", "marker")), at, not_before, stamp if isinstance(stamp, str) else None)


def _marker(marker: Marker) -> Write:
    item: Item = {"PK": f"MARKER#{marker.key.pipeline}", "SK": _slot(marker.key), "source": marker.source}
    if marker.at is not None:
        item |= {"requestedAt": codec.instant(marker.at), "ttl": seconds(marker.at + MARKER_RETENTION)}
    if marker.not_before is not None:
        item["notBefore"] = codec.instant(marker.not_before)
    return Put(item)


def _told(alert: Alert) -> str:
    return codec.dumps(codec.encode_alert(alert))


def _cascade(state: Execution) -> str:
    return f"cascade:{state.key.pipeline}"


def _registered(row: Item) -> Registered:
    return Registered(
        row["PK"].removeprefix("PIPELINE#"),
        json.loads(row.get("data", "{}")),
        frozenset(row.get("open", ())),
        codec.decode_instants(json.loads(row.get("since", "{}"))),
        tuple(codec.decode_alert(json.loads(text)) for text in sorted(row.get("undelivered", ()))),
        str(row.get("origin", "")),
    )


def _mark_open(state: Execution) -> Write:
    pipeline, members = state.key.pipeline, {_slot(state.key)}
    names = {"GSI1PK": PIPELINES, "GSI1SK": pipeline}
    if state.is_open:
        return Merge(f"PIPELINE#{pipeline}", CONFIG, names, {"open": members})
    return Merge(f"PIPELINE#{pipeline}", CONFIG, names, remove_members={"open": members})


def _execution(item: Item, plan: Plan) -> Execution:
    return codec.decode_execution(json.loads(item["data"]), plan, int(item["version"]))


def _answer(item: Item | None, key: Key, now: datetime) -> TraitResult | None:
    """A push for this execution goes before one for all, and that before what an evaluator said."""
    if item is None:
        return None
    names = (name for name in (_RESULT + _slot(key), _RESULT + UNDATED) if name in item)
    results = (codec.decode_result(json.loads(item[name])) for name in names)
    valid = [result for result in results if result.expires_at is None or now < result.expires_at]
    return min(valid, key=lambda result: not result.pushed, default=None)


def _run(item: Item) -> dict[str, Any]:
    return {**json.loads(item["data"]), "version": int(item["version"])}


def _shown(item: Item) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("PK", "SK", "GSI1PK", "GSI1SK", "ttl")}
