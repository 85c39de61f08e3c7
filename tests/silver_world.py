"""What silver's tests share: projects of their own with committed ticks in real bronze tables, and a plain oracle.

Many ticks are written in one Delta commit, because writing is slow and silver does not care: it reads a tick by its id
at the version that the ledger names.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.lease import LeaseStore
from lockstep.kernel.postgres import Pool, on_connect
from lockstep.ticks import bronze
from lockstep.ticks.model import DAY_COLUMN, FILE_COLUMN, ROW_COLUMN, TICK_COLUMN, Tick, TickMessage
from lockstep.ticks.silver.dispatch import DispatchTable
from lockstep.ticks.silver.intake import Intake
from lockstep.ticks.silver.model import SILVER_PREFIX
from lockstep.ticks.silver.queue import TickQueue, message_of
from lockstep.ticks.silver.store import SilverStore
from lockstep.ticks.silver.tables import SilverTables
from lockstep.ticks.silver.worker import SilverWorker

COLUMNS = {"id": "bigint", "name": "string", "amount": "double"}
Rows = Sequence[Mapping[str, Any]]


@dataclass
class Project:
    """One project: what was committed, and what silver must hold after it."""

    project_id: str
    org_id: str
    ticks: list[str] = field(default_factory=list)
    history: list[Planned] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    oracle: dict[str, dict[Any, dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A tick to be committed: rows by table; `columns` beyond the usual ones."""

    tables: Mapping[str, Rows]
    mode: str = "delta"
    columns: Mapping[str, str] = field(default_factory=dict)
    key: tuple[str, ...] = ("id",)
    deleted: str | None = None


def row(number: int | None, name: str = "x", amount: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"id": number, "name": name, "amount": amount, **more}


@dataclass
class World:
    """Real parts: a database, a lake, a queue and DynamoDB."""

    dsn: str
    source: Pool
    lake: str
    s3: Any
    sqs: Any
    queue_name: str
    dead_name: str
    dynamodb: Any
    spark: Any
    clock: Clock = field(default_factory=SystemClock)

    # --- what silver is made of -----------------------------------------------------------------------------------

    @property
    def store(self) -> SilverStore:
        if not hasattr(self, "_store"):
            connect = on_connect(self.dsn, application_name="silver-test", statement_timeout=10)
            self._store = SilverStore(self.source, LeaseStore(connect))
        return self._store

    @property
    def dispatches(self) -> DispatchTable:
        return DispatchTable(self.dynamodb)

    @property
    def queue(self) -> TickQueue:
        return TickQueue(self.sqs, self.queue_name)

    @property
    def dead_letters(self) -> TickQueue:
        return TickQueue(self.sqs, self.dead_name)

    @property
    def intake(self) -> Intake:
        return Intake(self.store, self.dispatches, self.queue, clock=self.clock)

    def keeps_bronze_of(self, tick: Tick) -> bool:
        return bronze.is_kept(self.s3, self.lake, tick)

    @property
    def tables(self) -> SilverTables:
        return SilverTables(self.spark, self.s3, self.lake)

    def worker(self, *, lease_seconds: float = 30.0) -> SilverWorker:
        return SilverWorker(
            self.store, self.dispatches, self.queue, self.tables, clock=self.clock, lease_seconds=lease_seconds
        )

    def drain(self, project: Project, *wanted: str) -> Any:
        return self.worker().drain(project.project_id, set(wanted) or None, run_id=f"run-{secrets.token_hex(3)}")

    # --- bronze ---------------------------------------------------------------------------------------------------

    def project(self, org: str = "acme") -> Project:
        made = Project(str(uuid.uuid4()), org)
        self.ask("INSERT INTO ticks.project (project_id, org_id) VALUES (%s, %s)", made.project_id, org)
        return made

    def commit(self, project: Project, *planned: Planned, ago: timedelta = timedelta(minutes=5)) -> list[str]:
        """Commit ticks in this order: rows into bronze, then the ledger. Returns their ids."""
        begin = len(project.ticks)
        ids = [f"t{begin + n + 1:05d}-{secrets.token_hex(4)}" for n in range(len(planned))]
        places = self._write(project, dict(zip(ids, planned, strict=True)))
        for tick_id, one in zip(ids, planned, strict=True):
            self._record(project, tick_id, one, places, ago)
            self._expect(project, tick_id, one)
        return ids

    def _write(
        self, project: Project, ticks: Mapping[str, Planned], instead: Mapping[str, Planned] | None = None
    ) -> dict[str, tuple[int, str, str]]:
        by_table: dict[str, list[tuple[Any, ...]]] = {}
        columns: dict[str, dict[str, str]] = {}
        for tick_id, one in {**ticks, **(instead or {})}.items():
            for table, rows in one.tables.items():
                columns.setdefault(table, dict(COLUMNS)).update(one.columns)
                found = by_table.setdefault(table, [])
                found += [(tick_id, "20260507", 0, n, dict(values)) for n, values in enumerate(rows)]
        unit = " OR ".join(f"{TICK_COLUMN} = '{one}'" for one in instead or {})
        return {table: self._append(project, table, columns[table], rows, unit) for table, rows in by_table.items()}

    def _append(
        self, project: Project, table: str, columns: Mapping[str, str], rows: Sequence[tuple[Any, ...]], unit: str
    ) -> tuple[int, str, str]:
        schema = ", ".join([*(f"{name} {kind}" for name, kind in columns.items())])
        own = f"{TICK_COLUMN} string, {DAY_COLUMN} string, {FILE_COLUMN} int, {ROW_COLUMN} bigint"
        values = [(*(one[4].get(name) for name in columns), *one[:4]) for one in rows]
        frame = self.spark.createDataFrame(values, f"{schema}, {own}")
        path = bronze.table_path(self.lake, project.project_id, table)
        writer = frame.coalesce(1).write.format("delta").mode("overwrite" if unit else "append")
        writer = writer.option("replaceWhere", unit) if unit else writer.option("mergeSchema", "true")
        writer.partitionBy(DAY_COLUMN, TICK_COLUMN).save(path)
        log = f"{bronze.table_key(project.project_id, table)}/_delta_log/"
        keys = [one["Key"] for one in self.s3.list_objects_v2(Bucket=self.lake, Prefix=log)["Contents"]]
        key = max(one for one in keys if one.endswith(".json"))
        etag = bronze.etag_of(self.s3, self.lake, key)
        return int(key.rsplit("/", 1)[1].removesuffix(".json")), key, str(etag)

    def _record(
        self,
        project: Project,
        tick_id: str,
        one: Planned,
        places: Mapping[str, tuple[int, str, str]],
        ago: timedelta,
    ) -> None:
        manifest = _manifest(project, tick_id, one)
        commits = [
            {
                "table": name,
                "version": places[name][0],
                "key": places[name][1],
                "etag": places[name][2],
                "rows": len(rows),
            }
            for name, rows in one.tables.items()
        ]
        self.ask(
            "WITH next AS (UPDATE ticks.project SET sequence = sequence + 1, head_tick_id = %(tick)s"
            " WHERE project_id = %(project)s RETURNING sequence)"
            " INSERT INTO ticks.tick (project_id, tick_id, org_id, state, attempt, mode, dt, manifest, manifest_sha256,"
            " result, sequence, prev_tick_id, commits, bronze_key, bronze_etag, bronze_version, committed_at)"
            " SELECT %(project)s, %(tick)s, %(org)s, 'committed', 1, %(mode)s, '20260507', %(manifest)s, 'x', '{}',"
            " sequence, %(prev)s, %(commits)s, %(key)s, %(etag)s, %(version)s, %(at)s FROM next",
            project=project.project_id,
            tick=tick_id,
            org=project.org_id,
            mode=one.mode,
            manifest=json.dumps(manifest),
            prev=project.ticks[-1] if project.ticks else None,
            commits=json.dumps(commits),
            key=commits[-1]["key"],
            etag=commits[-1]["etag"],
            version=commits[-1]["version"],
            at=datetime.now(UTC) - ago,
        )
        project.ticks.append(tick_id)
        project.history.append(one)

    def _expect(self, project: Project, tick_id: str, one: Planned) -> None:
        for table, rows in one.tables.items():
            held = project.oracle.setdefault(table, {})
            if one.mode == "full":
                held.clear()
            for values in rows:
                key = tuple(values[name] for name in one.key)
                before = held.pop(key, {})
                if one.deleted is None or not values.get(one.deleted):
                    named = {name: None for name in (*COLUMNS, *one.columns)}
                    held[key] = {**before, **named, **values, "_tick": tick_id}
                    held[key].pop(one.deleted, None)

    def correct(self, project: Project, tick_id: str, one: Planned) -> None:
        """Give a committed tick other rows, as a re-ingest of mended parts would, and let the oracle know."""
        project.history[project.ticks.index(tick_id)] = one
        places = self._write(project, {}, {tick_id: one})
        commits = [
            {
                "table": name,
                "version": places[name][0],
                "key": places[name][1],
                "etag": places[name][2],
                "rows": len(rows),
            }
            for name, rows in one.tables.items()
        ]
        self.ask("UPDATE ticks.tick SET commits = %s WHERE tick_id = %s RETURNING 1", json.dumps(commits), tick_id)
        self._expect_all(project)

    def leave_out(self, project: Project, *tick_ids: str) -> None:
        """From now on the oracle knows nothing of these ticks."""
        project.left_out = set(tick_ids)
        self._expect_all(project)

    def _expect_all(self, project: Project) -> None:
        project.oracle.clear()
        for known, planned in zip(project.ticks, project.history, strict=True):
            if known not in project.left_out:
                self._expect(project, known, planned)

    # --- messages -------------------------------------------------------------------------------------------------

    def message(self, tick_id: str) -> TickMessage:
        tick = self.store.ticks.committed(tick_id)
        assert tick is not None
        return message_of(tick, datetime.now(UTC))

    def send(self, *tick_ids: str) -> None:
        self.queue.send([self.message(one) for one in tick_ids])

    # --- looking --------------------------------------------------------------------------------------------------

    def silver(self, project: Project, table: str) -> list[dict[str, Any]]:
        path = f"s3a://{self.lake}/{SILVER_PREFIX}/{project.project_id}/{table}"
        found = self.spark.read.format("delta").load(path).orderBy("id").collect()
        return [
            {name: value for name, value in one.asDict().items() if name not in ("_project", "_order")} for one in found
        ]

    def assert_equals_oracle(self, project: Project) -> None:
        """Silver holds exactly what a plain replay of the committed ticks leaves, and everything is said to be DONE."""
        for table, held in project.oracle.items():
            found = self.silver(project, table)
            wanted = [held[key] for key in sorted(held)]
            names = set(found[0]) if found else set()
            assert found == [{name: None for name in names} | one for one in wanted]
        lane = self.store.lane(project.project_id)
        assert lane.watermark == len(project.ticks)
        rows = self.dispatches.get_all(project.ticks, self.clock.now())
        assert {one.state.value for one in rows.values()} == {"DONE"}
        assert set(rows) == set(project.ticks)

    def states(self, project: Project) -> list[str]:
        rows = self.dispatches.get_all(project.ticks, self.clock.now())
        return [rows[one].state.value if one in rows else "-" for one in project.ticks]

    def ask(self, statement: str, *values: Any, **named: Any) -> list[Any]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), named or values)
            return cursor.fetchall() if cursor.description else []


def _manifest(project: Project, tick_id: str, one: Planned) -> dict[str, Any]:
    columns = {**COLUMNS, **one.columns}
    return {
        "schema_version": "1.0",
        "org_id": project.org_id,
        "project_id": project.project_id,
        "tick_id": tick_id,
        "mode": one.mode,
        "dt": "20260507",
        "tables": [
            {
                "name": name,
                "primary_key": list(one.key),
                **({"deleted_column": one.deleted} if one.deleted else {}),
                "columns": [{"name": column, "type": kind} for column, kind in columns.items()],
                "parquets": [
                    {"file_seq": n, "sha256": hashlib.sha256(name.encode()).hexdigest(), "bytes": 1, "rows": len(rows)}
                ],
            }
            for n, (name, rows) in enumerate(one.tables.items())
        ],
    }
