"""Silver tables in Delta: typed, one row per key, merged or overwritten, every commit fenced by the lane's lease.

What belongs here: Spark's part of applying one table of one tick, built from the idempotency blocks. What does not:
which tick is next (rules.py), the ledger (store.py), attempts (worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.idempotency import delta, merger, stateful
from lockstep.idempotency.merger import Contract, NullFlag
from lockstep.idempotency.overwrite import write_unit
from lockstep.idempotency.stateful_rules import Commit, Run
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import Terminal
from lockstep.ticks import bronze
from lockstep.ticks.model import ANY_SIZE, FILE_COLUMN, ROW_COLUMN, Manifest, Mode, TableSpec, Tick
from lockstep.ticks.rules import parse_manifest
from lockstep.ticks.silver import rules
from lockstep.ticks.silver.log import DeltaLog
from lockstep.ticks.silver.model import ORDER, PROJECT, SILVER_PREFIX, TICK, Lane, TableState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RECENT_COMMITS = 10
_SCHEMA = "silver-schema"
_PUT_BACK = "silver-put-back"
_PROPERTIES = {
    # A replay goes back by RESTORE: files and log must still be there.
    "delta.deletedFileRetentionDuration": "interval 30 days",
    "delta.logRetentionDuration": "interval 60 days",
    "delta.checkpointInterval": "10",
}


@dataclass(frozen=True)
class Step:
    """One table of one tick, and all that the ledger says about it.

    Attributes:
        tick: The tick.
        spec: The table as the tick's manifest declares it.
        lane: The lane, with its generation.
        before: The table before this tick, None if it had no rows of ours.
        must_go_back: Whether the table holds this tick or later ones of an earlier generation.
        fence: Of the lane's lease.
        check: Raises `LostClaim` when the lease is gone.
    """

    tick: Tick
    spec: TableSpec
    lane: Lane
    before: TableState | None
    must_go_back: bool
    fence: int
    check: Callable[[], None]

    @property
    def unit(self) -> str:
        """How errors name it."""
        return f"{self.spec.name} of tick {self.tick.tick_id}"


class SilverTables:
    """Applies tables of ticks. One session does one table at a time: commit identities are settings of the session."""

    def __init__(self, spark: SparkSession, s3: Any, lake: str) -> None:
        self._spark = spark
        self._s3 = s3
        self._lake = lake
        self._commits: dict[str, int] = {}

    def path(self, project_id: str, table: str) -> str:
        """The address of a silver table."""
        return table_path(self._lake, project_id, table)

    def apply(self, step: Step) -> TableState:
        """Bring one table up to its tick. The same call again, after a death anywhere, ends in the same table.

        Raises:
            BronzeMoved: The commit of bronze is not the one that was acknowledged.
            LostClaim: Somebody else has the lane; nothing of this tick was written by us after that.
            InvalidInput: The rows cannot be merged, for example without a key. Nothing was changed.
        """
        step.check()
        _refuse_new_key(step)
        bronze.assert_commit(self._s3, self._lake, step.tick.commit_of(step.spec.name))
        target = self.path(step.tick.project_id, step.spec.name)
        contract = contract_of(step.spec)
        source = self._source(step)
        kept = [field for field in source.schema.fields if field.name != step.spec.deleted_column]
        columns = {field.name: field.dataType.simpleString() for field in kept}
        if step.before is None:
            self._create(target, columns)
            crash_point("silver.table.created")
        self._add_columns(target, columns)
        increment = merger.checked_delta(contract, source, unit=step.unit)
        step.check()
        crash_point("silver.table.before_commit")
        apply = self._overwrite if step.tick.mode is Mode.FULL else self._merge
        version = apply(step, target, contract, increment, columns)
        crash_point("silver.table.after_commit")
        sequence = int(step.tick.sequence or 0)
        epoch = rules.epoch_after(Mode(step.tick.mode or ""), sequence, step.lane.generation, step.before)
        rows = step.tick.commit_of(step.spec.name).rows
        return TableState(step.spec.name, sequence, epoch, step.spec.primary_key, version, rows)

    def put_back(self, step: Step) -> None:
        """Bring one table back to where it was before its tick, whatever attempts at it have left there.

        Tables of one tick commit one by one: a tick that cannot be applied may have left rows in some of them.
        """
        step.check()
        target = self.path(step.tick.project_id, step.spec.name)
        if step.before is None and not delta.exists(self._spark, target):
            return
        version = step.before.version if step.before is not None else 0  # the table was created empty
        since = [one for one in self.newest(step) if one.version > version and changes_rows(one)]
        if not since or (since[-1].operation == "RESTORE" and since[-1].parameters.get("version") == str(version)):
            return
        step.check()
        stamp = delta.stamp(_PUT_BACK, run=rules.request(step.tick.tick_id, step.lane.generation))
        with delta.commit_as(self._spark, stamp), delta.contested(target):
            self._spark.sql(f"RESTORE TABLE {delta.quoted(target)} TO VERSION AS OF {version}").collect()
        crash_point("silver.table.put_back")

    def _source(self, step: Step) -> DataFrame:
        """The tick's rows with silver's own columns. `_order` sorts like (tick, file, row), as text."""
        from pyspark.sql import functions as f  # pyspark is heavy, imported when used

        frame = bronze.read_tick(self._spark, self._lake, step.tick, step.spec.name)
        place = f.format_string("%s.%06d.%012d", _sequence(step), f.col(FILE_COLUMN), f.col(ROW_COLUMN))
        return frame.select(
            *(f.col(delta.column(column.name)) for column in step.spec.columns),
            f.lit(step.tick.project_id).alias(PROJECT),
            f.lit(step.tick.tick_id).alias(TICK),
            place.alias(ORDER),
        )

    def _merge(
        self, step: Step, target: str, contract: Contract, increment: DataFrame, columns: Mapping[str, str]
    ) -> int:
        """Delta mode: merged by key. A replay first puts the table back to just before the tick."""
        table = FencedTable(self, step, target, contract, increment, columns)
        run = Run(
            pipeline=_pipeline(step),
            execution=rules.execution(int(step.tick.sequence or 0)),
            previous=rules.previous_merge(step.before),
            request=rules.request(step.tick.tick_id, step.lane.generation),
            undo=self._own_versions(target) if step.must_go_back else frozenset(),
        )
        outcome = stateful.run_merge(table, run) if step.must_go_back else stateful.run_forward(table, run)
        return outcome.version

    def _overwrite(
        self, step: Step, target: str, contract: Contract, increment: DataFrame, columns: Mapping[str, str]
    ) -> int:
        """Full mode: the table becomes the tick's rows, the last of each key, without those that are deleted."""
        name = rules.request(step.tick.tick_id, step.lane.generation)
        if (found := self._find(step, name)) is not None:
            return found  # the answer of the first try was lost
        resolved = self._spark.sql(merger.resolved_sql(contract, "{increment}", delta.column), increment=increment)
        if contract.flag is not None:
            resolved = resolved.where(f"NOT {delta.column(contract.flag)}").drop(contract.flag)
        app, version = self.next_fence(step, target)
        write_unit(
            self._spark,
            target,
            self._widened(resolved, target),
            {PROJECT: step.tick.project_id},
            run=name,
            options={"txnAppId": app, "txnVersion": str(version)},
        )
        if (found := self._find(step, name)) is not None:
            return found
        if not resolved.isEmpty():
            raise rules.overtaken(step.tick.tick_id)  # Delta dropped it in silence: a newer fence has written
        return self.newest(step)[-1].version  # nothing replaced by nothing leaves no commit

    def _find(self, step: Step, run: str) -> int | None:
        """The version in which this request overwrote the table."""
        return next((one.version for one in self.newest(step) if (one.stamp or {}).get("run") == run), None)

    def newest(self, step: Step) -> list[delta.Commit]:
        """The table's commits since the one before this tick, oldest first; never empty."""
        known = step.before.version if step.before is not None else 0
        log = DeltaLog(self._s3, self._lake, _key(step.tick.project_id, step.spec.name))
        found = log.since(known)
        if found is None:  # the log was cleaned: Spark knows where it begins
            target = self.path(step.tick.project_id, step.spec.name)
            found = delta.history(self._spark, target, limit=_RECENT_COMMITS)[::-1]
        return found

    def _widened(self, frame: DataFrame, target: str) -> DataFrame:
        """The frame with every column of the table, in its order: what the tick does not have is NULL."""
        from pyspark.sql import functions as f

        return frame.select(
            *(
                f.col(delta.column(field.name))
                if field.name in frame.columns
                else f.lit(None).cast(field.dataType).alias(field.name)
                for field in delta.read(self._spark, target).schema.fields
            )
        )

    def next_fence(self, step: Step, target: str) -> tuple[str, int]:
        """The application id and version of the next commit: Delta drops one that is not above all before it."""
        number = self._commits[target] = self._commits.get(target, 0) + 1
        return f"silver:{step.tick.project_id}:{step.spec.name}", rules.delta_fence(step.fence, number)

    def add_columns(self, target: str, columns: Mapping[str, str]) -> None:
        """Give the table the columns that it lacks; also after it went back to a version without them."""
        self._add_columns(target, columns)

    def _create(self, target: str, columns: Mapping[str, str]) -> None:
        """Make the empty table unless it is there.

        Not by CREATE TABLE: that refuses a folder that is not empty, and a creator that died, or that is still at
        work for a worker which lost its lane, has left `_delta_log` behind before any commit.
        """
        schema = ", ".join(f"{delta.column(name)} {kind}" for name, kind in columns.items())
        writer = self._spark.createDataFrame([], schema).write.format("delta").mode("ignore")
        try:
            writer.options(userMetadata=delta.stamp(_SCHEMA), **_PROPERTIES).save(target)
        except Exception:
            if not delta.exists(self._spark, target):
                raise  # else somebody else created it at the same time, with the same columns

    def _add_columns(self, target: str, columns: Mapping[str, str]) -> None:
        present = {name.lower() for name in delta.read(self._spark, target).columns}
        missing = [f"{delta.column(name)} {kind}" for name, kind in columns.items() if name.lower() not in present]
        if missing:
            with delta.commit_as(self._spark, delta.stamp(_SCHEMA)):
                self._spark.sql(f"ALTER TABLE {delta.quoted(target)} ADD COLUMNS ({', '.join(missing)})").collect()
            crash_point("silver.table.columns_added")

    def _own_versions(self, target: str) -> frozenset[int]:
        """Versions that silver wrote. A replay may go back over them: the lane applies what they held once more."""
        return frozenset(one.version for one in delta.history(self._spark, target) if one.stamp is not None)


class FencedTable(stateful.DeltaTable):
    """A Delta table whose merges carry the lane's fence, and which is not touched without the lease."""

    def __init__(
        self,
        tables: SilverTables,
        step: Step,
        target: str,
        contract: Contract,
        increment: DataFrame,
        columns: Mapping[str, str],
    ) -> None:
        super().__init__(increment.sparkSession, contract, target, increment)
        self._tables = tables
        self._step = step
        self._columns = columns

    def _commits(self, run: Run) -> tuple[Commit, ...]:
        """All of them for a replay; for the forward step those since the tick before, without Spark."""
        if self._step.must_go_back:
            return super()._commits(run)
        return tuple(stateful.delta_commit(one, run.pipeline) for one in self._tables.newest(self._step))

    def restore(self, version: int, run: Run) -> None:
        """Go back, if the lane is still ours; then bring back the columns that the tick needs."""
        self._step.check()
        super().restore(version, run)
        self._tables.add_columns(self._target, self._columns)

    def merge(self, run: Run, *, first: bool) -> int:
        """MERGE under the lane's fence. Delta drops what a stale worker writes, which then misses its own mark."""
        self._step.check()
        app, version = self._tables.next_fence(self._step, self._target)
        with delta.commit_as(self._spark, app=app, app_version=version):
            try:
                return super().merge(run, first=first)
            except stateful.MarkMissing as dropped:
                raise rules.overtaken(self._step.tick.tick_id) from dropped


def changes_rows(commit: delta.Commit) -> bool:
    """Whether a commit of a silver table may have changed rows: all do but new columns and upkeep."""
    return commit.operation not in stateful.HARMLESS and (commit.stamp or {}).get(delta.STAMP_KEY) != _SCHEMA


def contract_of(spec: TableSpec) -> Contract:
    """How the rows of a table are matched: by its key, newer beats older.

    A row whose `deleted_column` is true, which NULL is not, takes its key out. No tombstone is kept: nothing older can
    come later, because a lane applies its ticks in order, and a replay goes back before the tick that deleted.
    """
    values = [column.name for column in spec.columns if column.name not in (*spec.primary_key, spec.deleted_column)]
    return Contract(
        keys=spec.primary_key,
        values=(*values, PROJECT, TICK),
        order=ORDER,
        flag=spec.deleted_column,
        null_flag=NullFlag.ALIVE,
    )


def manifest_of(tick: Tick) -> Manifest:
    """The tick's manifest as bronze accepted it."""
    return parse_manifest(
        dict(tick.manifest or {}),
        org_id=tick.org_id,
        project_id=tick.project_id,
        tick_id=tick.tick_id,
        limits=ANY_SIZE,
    )


def table_path(lake: str, project_id: str, table: str) -> str:
    """The address of a silver table."""
    return f"s3a://{lake}/{_key(project_id, table)}"


def _key(project_id: str, table: str) -> str:
    """The folder of a silver table inside the lake's bucket."""
    return f"{SILVER_PREFIX}/{project_id}/{table}"


def _pipeline(step: Step) -> str:
    epoch = step.before.epoch if step.before is not None else "begin"
    return f"silver/{step.tick.project_id}/{step.spec.name}/{epoch}"


def _sequence(step: Step) -> Any:
    from pyspark.sql import functions as f

    return f.lit(rules.execution(int(step.tick.sequence or 0)))


def _refuse_new_key(step: Step) -> None:
    if step.tick.mode is Mode.DELTA and step.before is not None and step.before.key != step.spec.primary_key:
        raise Terminal(
            f"its key is {', '.join(step.spec.primary_key)}, but silver's is {', '.join(step.before.key)}.",
            unit=step.unit,
            next_step="send a full tick of the table: it makes the table anew under the new key.",
        )
