"""Stateful merger: put a table back to just before a run, then merge, so that a replay walks through real states only.

What belongs here: the order of the steps, and the two stores (Delta: the identity is inside the commit; PostgreSQL:
history and images beside the table, one transaction). What does not: the decision (stateful_rules.py), the MERGE itself
(merger.py).
"""

# ruff: noqa: S608  # names are quoted by one helper per dialect; values are bound, or predicates of the caller

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import psycopg
from psycopg import sql

from lockstep.idempotency import delta, merger
from lockstep.idempotency.merger import Contract
from lockstep.idempotency.stateful_rules import (
    Action,
    Commit,
    Decision,
    Done,
    History,
    Mark,
    Proceed,
    Reason,
    Refuse,
    Restore,
    Run,
    decide,
    once,
    owed_erasures,
)
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LostClaim, Terminal
from lockstep.kernel.postgres import Connection, identifier, refuse_long_name, transaction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATTERN = "stateful-merger"
# Operations of Delta that rewrite files and change no row. What is not listed is taken for somebody's work.
HARMLESS = frozenset({"OPTIMIZE", "REORG", "VACUUM START", "VACUUM END"})
# Told by the text: the first is a condition of Delta, the second, of RESTORE after VACUUM, is words only.
_GONE = re.compile(r"RETENTION|Not all files from version", re.IGNORECASE)


class Refused(Terminal):
    """The run may not touch the table now; nothing was changed. `reason` says why."""

    def __init__(self, refusal: Refuse, *, unit: str) -> None:
        super().__init__(refusal.what, unit=unit, next_step=refusal.next_step)
        self.reason = refusal.reason


class MarkMissing(Terminal):
    """The merge left no commit: this Spark drops marks, or Delta took the commit for one that it has seen before."""


class Outcome(NamedTuple):
    """What was done, and the version that now holds the run."""

    decision: Proceed | Restore | Done
    version: int


class VersionedTable(Protocol):
    """What the steps need of a store. Each method is atomic; a death between two of them is mended by the retry."""

    def history(self, run: Run) -> History:
        """The commits as they are now, those of the run's pipeline recognised."""

    def restore(self, version: int, run: Run) -> None:
        """Put the table back, in a commit that says it is ours."""

    def erase(self) -> None:
        """Delete again what somebody else had deleted and a restore brought back, also one of a run that then died."""

    def merge(self, run: Run, *, first: bool) -> int:
        """Merge the increment in one commit that carries its mark, even if no row changes; return its version."""


def run_merge(table: VersionedTable, run: Run) -> Outcome:
    """Decide, restore if need be, merge. May be repeated after a death anywhere.

    Raises:
        Refused: The decision was no; nothing was changed.
    """
    return _carry_out(table, run, allowed(decide(table.history(run), run), run))


def _carry_out(table: VersionedTable, run: Run, decision: Proceed | Restore | Done) -> Outcome:
    if isinstance(decision, Done):
        return Outcome(decision, decision.version)
    if isinstance(decision, Restore):
        crash_point("idempotency.stateful.before_restore")
        table.restore(decision.version, run)
        crash_point("idempotency.stateful.after_restore")
    if isinstance(decision, Restore) or decision.restored:
        table.erase()
        crash_point("idempotency.stateful.after_erase")
    version = table.merge(run, first=decision.first)
    crash_point("idempotency.stateful.after_merge")
    return Outcome(decision, version)


def run_forward(table: VersionedTable, run: Run) -> Outcome:
    """Merge the next run of a lane that only moves forward, without looking at the whole history.

    For a caller that holds the lane and whose own ledger says that `run.previous` is the newest run in the table. The
    table may show its latest commits only, so the cost does not grow with the history. The commit carries the same mark
    as one of `run_merge`: a later replay finds its way back over it.

    Raises:
        Refused: A replay died after its restore and still has rows to erase; nothing was changed.
    """
    commits = table.history(run).commits
    for place, commit in enumerate(commits):
        ours = commit.mark is not None and (commit.mark.execution, commit.mark.request) == (run.execution, run.request)
        if ours and not _undone(commit, commits[place + 1 :]):
            return Outcome(Done(commit.version), commit.version)
    if owed := owed_erasures(commits):
        refusal = Refuse(
            Reason.UNFINISHED,
            f"a replay put the table back and died before it erased what must stay deleted: {'; '.join(owed)}.",
            "run the replay again: it erases the rows although it is not told to.",
        )
        raise Refused(refusal, unit=f"{run.pipeline} {run.execution}")
    first = run.previous is None
    return Outcome(Proceed(first), table.merge(run, first=first))


def _undone(commit: Commit, later: Sequence[Commit]) -> bool:
    """Whether a restore has taken the commit back; one that does not say to where counts."""
    back = [one.restored_to for one in later if one.action is Action.RESTORE]
    return any(to is None or to < commit.version for to in back)


def allowed(decision: Decision, run: Run) -> Proceed | Restore | Done:
    """The decision, unless it is a refusal, which is raised."""
    if isinstance(decision, Refuse):
        raise Refused(decision, unit=f"{run.pipeline} {run.execution}")
    return decision


def merge_delta(
    spark: SparkSession,
    contract: Contract,
    run: Run,
    *,
    target: str,
    source: DataFrame,
    erase: str | None = None,
) -> Outcome:
    """One run of the pipeline on the Delta table at `target`. One run at a time for a table; the caller holds the lane.

    Args:
        spark: The session; its commit settings are used for the duration of the call.
        contract: How rows match. Soft deletes, or none: a separate tombstone table would not go back with the table.
        run: Which unit, after which, by which request.
        target: Address of the table, which exists.
        source: The increment.
        erase: Predicate of rows that must stay deleted although the table goes back. They are deleted after the
            restore and kept out of the increment. Needed when `run.undo` names a delete. The restore carries it, so
            that whichever run comes after a death there erases them too, told to or not.

    Raises:
        Refused: Nothing was changed.
        LostClaim: Another run of the pipeline committed at the same time.
        InvalidInput: The contract or the increment cannot be used; nothing was changed.
    """
    _refuse_tombstones(contract, target)
    table = DeltaTable(spark, contract, target, source, erase)
    decision = allowed(decide(table.history(run), run), run)
    if not isinstance(decision, Done):
        table.check()  # before the table goes back: a bad increment must not leave it there
    return _carry_out(table, run, decision)


class DeltaTable:
    """A Delta table as the steps see it. The increment is one that was checked, or `check` is called before a step."""

    def __init__(
        self, spark: SparkSession, contract: Contract, target: str, increment: DataFrame, erase: str | None = None
    ) -> None:
        self._spark = spark
        self._contract = contract
        self._target = target
        self._increment = increment
        self._erase: tuple[str, ...] = () if erase is None else (erase,)
        self._seen = -1

    def check(self) -> None:
        """Compute the increment once, without rows to erase, and see that it can be merged. Raises `InvalidInput`."""
        wanted = self._increment
        for predicate in self._erase:
            wanted = wanted.where(f"NOT coalesce({predicate}, false)")
        self._increment = merger.checked_delta(self._contract, wanted, unit=self._target)

    def history(self, run: Run) -> History:
        """The commits that the log still keeps. What a run that died had to erase is from now on to be erased."""
        commits = self._commits(run)
        self._seen = commits[-1].version
        self._erase = once((*owed_erasures(commits), *self._erase))
        oldest = commits[0].version
        return History(commits, complete=oldest == 0, restorable_from=oldest)

    def restore(self, version: int, run: Run) -> None:
        """RESTORE, marked as ours, with what is to be erased after it.

        Delta refuses what retention or VACUUM has let go, before anything changes.
        """
        from pyspark.errors import PySparkException

        statement = f"RESTORE TABLE {delta.quoted(self._target)} TO VERSION AS OF {int(version)}"
        fields = {"pipeline": run.pipeline, "execution": run.execution, "request": run.request}
        stamp = delta.stamp(PATTERN, kind=Action.RESTORE.value, erase=list(self._erase), **fields)
        with delta.commit_as(self._spark, stamp), delta.contested(self._target):
            try:
                self._spark.sql(statement).collect()
            except PySparkException as error:
                if not _GONE.search(delta.condition_of(error) + str(error)):
                    raise
                raise Refused(
                    Refuse(
                        Reason.RETENTION,
                        f"Delta no longer restores version {version}: it is older than the table's retention.",
                        "replay from a later execution, or rebuild the table from the source.",
                    ),
                    unit=f"{run.pipeline} {run.execution}",
                ) from error
        self._seen = delta.history(self._spark, self._target, limit=1)[0].version

    def erase(self) -> None:
        """A plain DELETE, not marked as ours: a later restore must refuse to undo it as well."""
        for predicate in self._erase:
            with delta.contested(self._target):
                self._spark.sql(f"DELETE FROM {delta.quoted(self._target)} WHERE {predicate}").collect()

    def merge(self, run: Run, *, first: bool) -> int:
        """MERGE with its mark inside the commit; recorded even if it changes nothing."""
        commits = self._commits(run)
        self._refuse_overtaken(commits, self._seen, commits[-1].version + 1, run)
        mark = Mark(run.execution, commits[-1].version, run.request, first)
        text = delta.stamp(PATTERN, kind=Action.MERGE.value, pipeline=run.pipeline, **mark._asdict())
        with delta.commit_as(self._spark, text), delta.settings(self._spark, delta.RECORD_EMPTY):
            merger.apply_delta(self._spark, self._contract, target=self._target, increment=self._increment)
        return self._find(mark, run)

    def _find(self, mark: Mark, run: Run) -> int:
        """The version that carries the mark."""
        commits = self._commits(run)
        version = next((commit.version for commit in reversed(commits) if commit.mark == mark), None)
        if version is None:
            raise MarkMissing(
                "the merge left no commit with its mark.",
                unit=f"{run.pipeline} {run.execution}",
                next_step="see that this Spark keeps userMetadata and records empty commits; then run it again.",
            )
        self._refuse_overtaken(commits, mark.base_version, version, run)
        return version

    def _refuse_overtaken(self, commits: Sequence[Commit], after: int, before: int, run: Run) -> None:
        """What else of ours came in between means that two runs went at once, and the decision is out of date."""
        between = [commit.version for commit in commits if commit.ours and after < commit.version < before]
        if between:
            raise LostClaim(
                f"version {between[0]} of the same pipeline was committed while this run was at work.",
                unit=f"{run.pipeline} {run.execution}",
                next_step="hold the lane, one run at a time; then run it again with the same request.",
            )

    def _commits(self, run: Run) -> tuple[Commit, ...]:
        return tuple(delta_commit(one, run.pipeline) for one in reversed(delta.history(self._spark, self._target)))


def delta_commit(found: delta.Commit, pipeline: str) -> Commit:
    """A commit of the log as the rule sees it. A stamp counts only on the operation that it was made for."""
    stamp = found.stamp or {}
    ours = stamp.get(delta.STAMP_KEY) == PATTERN and stamp.get("pipeline") == pipeline
    if found.operation == "RESTORE":
        to = found.parameters.get("version", "")
        ours = ours and stamp.get("kind") == Action.RESTORE
        erase = tuple(stamp.get("erase", ())) if ours else ()
        return Commit(found.version, Action.RESTORE, "RESTORE", None, int(to) if to.isdigit() else None, ours, erase)
    if ours and found.operation == "MERGE" and stamp.get("kind") == Action.MERGE:
        mark = Mark(stamp["execution"], int(stamp["base_version"]), stamp["request"], bool(stamp["first"]))
        return Commit(found.version, Action.MERGE, "MERGE", mark, ours=True)
    action = Action.HARMLESS if found.operation in HARMLESS else Action.FOREIGN
    return Commit(found.version, action, found.operation)


_HISTORY_TABLE = """
CREATE TABLE IF NOT EXISTS {runs} (
    version      bigint      PRIMARY KEY,
    action       text        NOT NULL,
    pipeline     text,
    execution    text,
    base_version bigint,
    request      text,
    first        boolean,
    restored_to  bigint,
    forgotten    boolean     NOT NULL DEFAULT false,
    at           timestamptz NOT NULL DEFAULT clock_timestamp()
)"""
_IMAGES_TABLE = """
CREATE TABLE IF NOT EXISTS {images} (
    version bigint NOT NULL,
    key     jsonb  NOT NULL,
    before  jsonb,
    after   uuid
)"""
# No unique key: MERGE touches a row once, and an index over the keys would cost as much as the images.
_IMAGES_INDEX = "CREATE INDEX IF NOT EXISTS {images_index} ON {images} (version)"
_BEGIN_HISTORY = "INSERT INTO {runs} (version, action) VALUES (0, 'harmless') ON CONFLICT DO NOTHING"
_READ_HISTORY = """
SELECT version, action, pipeline, execution, base_version, request, first, restored_to, forgotten
FROM {runs} ORDER BY version"""
_APPEND = """
INSERT INTO {runs} (version, action, pipeline, execution, base_version, request, first, restored_to)
SELECT max(version) + 1, %s, %s, %s, %s, %s, %s, %s FROM {runs} RETURNING version"""
_FORGET = "UPDATE {runs} SET forgotten = true WHERE version <= %s AND version < (SELECT max(version) FROM {runs})"
_FORGET_IMAGES = "DELETE FROM {images} i USING {runs} r WHERE r.version = i.version AND r.forgotten"

# Of the row after a change a digest is enough: it is only compared.
_DIGEST = "md5({row}::text)::uuid"
# Every key that the runs to be undone have touched: its row before the first of them, and after the last.
_TOUCHED = """
(SELECT key, (array_agg(before ORDER BY version))[1] AS before, (array_agg(after ORDER BY version DESC))[1] AS after
 FROM {images} WHERE version > %(version)s GROUP BY key)"""
_DRIFT = (
    f"SELECT i.key::text FROM {_TOUCHED} i LEFT JOIN {{target}} t ON {{key_of_t}} = i.key "
    f"WHERE {_DIGEST.format(row='to_jsonb(t)')} IS DISTINCT FROM i.after ORDER BY 1 LIMIT 5"
)
_TAKE_OUT = "DELETE FROM {target} t USING " + _TOUCHED + " i WHERE {key_of_t} = i.key"
_PUT_BACK = (
    "INSERT INTO {target} SELECT (jsonb_populate_record(NULL::{target}, i.before)).* FROM "
    + _TOUCHED
    + " i WHERE i.before IS NOT NULL"
)
_DROP_IMAGES = "DELETE FROM {images} WHERE version > %(version)s"
# Rows go back by being taken out and put in again: keys that do something on DELETE would do it to rows that stay.
_DEPENDENTS = """
SELECT conrelid::regclass::text FROM pg_constraint
WHERE confrelid = %s::regclass AND contype = 'f' AND confdeltype IN ('c', 'n', 'd') ORDER BY 1"""
# The merge and its images in one pass. A row that it left as it was needs none.
_MERGE = f"""
WITH change AS ({{merge}} RETURNING {{key}} AS key, to_jsonb(old) AS before, to_jsonb(new) AS after)
INSERT INTO {{images}} (version, key, before, after)
SELECT {{version}}, key, before, {_DIGEST.format(row="after")} FROM change WHERE before IS DISTINCT FROM after"""
# Settings that change how a value becomes text: two sessions must spell a row alike, or it looks changed by somebody.
_SPELLING = {"TimeZone": "UTC", "IntervalStyle": "iso_8601", "bytea_output": "hex", "extra_float_digits": "1"}
_NEEDED_VERSION = 18_00_00  # MERGE returns the row before and after since


def create_history(connection: Connection, target: str) -> None:
    """Create `<target>_runs` and `<target>_images` beside a PostgreSQL table, if they are absent.

    Raises:
        InvalidInput: The server is older than PostgreSQL 18, or the name leaves no room for those of the history.
    """
    if connection.info.server_version < _NEEDED_VERSION:
        raise InvalidInput(
            f"PostgreSQL {connection.info.server_version // 10000} is too old.",
            unit=target,
            next_step="use PostgreSQL 18 or later: its MERGE returns the row before and after.",
        )
    refuse_long_name(target.rpartition(".")[2], longest_suffix=len("_images_version"))
    names = _names(target)
    with transaction(connection, what=f"creating the history of {target}") as work:
        for statement in (_HISTORY_TABLE, _IMAGES_TABLE, _IMAGES_INDEX, _BEGIN_HISTORY):
            work.execute(sql.SQL(statement).format(**names))


def merge_postgres(
    connection: Connection,
    contract: Contract,
    run: Run,
    *,
    target: str,
    source: str,
    accept_drift: bool = False,
) -> Outcome:
    """One run of the pipeline on a PostgreSQL table: decision, restore, merge and history row in one transaction.

    Only rows that the undone runs changed go back; rows that nobody of ours touched stay as they are. A row that
    somebody else changed or deleted since is recognised by its image, and the run is refused.

    Args:
        connection: Any; joins the caller's transaction if one is open.
        contract: How rows match. Soft deletes, or none.
        run: Which unit, after which, by which request.
        target: The table, with its history made by `create_history`.
        source: The increment, a table with key columns of the same types.
        accept_drift: Restore even rows that somebody else changed since; their change is lost.

    Raises:
        Refused: Nothing was changed.
    """
    _refuse_tombstones(contract, target)
    with transaction(connection, what=f"running {run.pipeline} {run.execution}") as work:
        work.execute(sql.SQL("LOCK TABLE {target} IN SHARE ROW EXCLUSIVE MODE").format(**_names(target)))
        with _spelling(work):
            outcome = run_merge(_PostgresTable(work, contract, target, source, accept_drift=accept_drift), run)
        crash_point("idempotency.stateful.before_commit")
    crash_point("idempotency.stateful.after_commit")
    return outcome


def forget_postgres(connection: Connection, target: str, *, version: int) -> None:
    """Drop the images up to `version`: no restore goes below it any more. The newest run can always be replayed."""
    names = _names(target)
    with transaction(connection, what=f"forgetting images of {target}") as work:
        work.execute(sql.SQL(_FORGET).format(**names), (version,))
        work.execute(sql.SQL(_FORGET_IMAGES).format(**names))


class _PostgresTable:
    """A PostgreSQL table and its history, inside one transaction that holds the table's lock."""

    def __init__(self, work: Connection, contract: Contract, target: str, source: str, *, accept_drift: bool) -> None:
        self._work = work
        self._contract = contract
        self._target = target
        self._source = source
        self._accept_drift = accept_drift
        self._names = _names(target) | {
            "key_of_t": _key_of(contract, "t.{}"),
        }

    def history(self, run: Run) -> History:
        rows = self._execute(_READ_HISTORY).fetchall()
        if not rows:
            raise InvalidInput("the table has no history.", unit=self._target, next_step="call create_history once.")
        forgotten = max((row[0] for row in rows if row[-1]), default=0)
        return History(tuple(_postgres_commit(row, run.pipeline) for row in rows), restorable_from=forgotten)

    def restore(self, version: int, run: Run) -> None:
        self._refuse_dependents(run)
        bound = {"version": version}
        drift = [key for (key,) in self._execute(_DRIFT, bound)]
        if drift and not self._accept_drift:
            refusal = Refuse(
                Reason.FOREIGN,
                f"somebody else changed or deleted rows since: {', '.join(drift)}.",
                "find out who; bring the rows back to what the run left, or pass accept_drift=True.",
            )
            raise Refused(refusal, unit=f"{run.pipeline} {run.execution}")
        for statement in (_TAKE_OUT, _PUT_BACK, _DROP_IMAGES):
            self._execute(statement, bound)
        self._append(Action.RESTORE, run, None, version)

    def _refuse_dependents(self, run: Run) -> None:
        target = self._names["target"].as_string(self._work)
        dependents = [name for (name,) in self._work.execute(_DEPENDENTS, (target,))]
        if dependents:
            refusal = Refuse(
                Reason.FOREIGN,
                f"going back would delete or empty rows of {', '.join(dependents)}: foreign keys follow a DELETE.",
                "let those keys be NO ACTION DEFERRABLE INITIALLY DEFERRED: they then look at the end only.",
            )
            raise Refused(refusal, unit=f"{run.pipeline} {run.execution}")

    def erase(self) -> None:
        """Nothing: a deleted row of somebody else is drift, and refused."""

    def merge(self, run: Run, *, first: bool) -> int:
        base = self.history(run).commits[-1].version
        version = self._append(Action.MERGE, run, Mark(run.execution, base, run.request, first), None)
        merger.check_postgres(self._work, self._contract, target=self._target, source=self._source)
        merge = sql.SQL(merger.postgres_merge(self._contract, self._target, self._source, None))
        key = _key_of(self._contract, "COALESCE(old.{}, new.{})")
        named = self._names | {"merge": merge, "key": key, "version": sql.Literal(version)}
        self._work.execute(sql.SQL(_MERGE).format(**named))
        return version

    def _append(self, action: Action, run: Run, mark: Mark | None, restored_to: int | None) -> int:
        base, first = (mark.base_version, mark.first) if mark else (None, None)
        values = (action.value, run.pipeline, run.execution, base, run.request, first, restored_to)
        row = self._execute(_APPEND, values).fetchone()
        assert row is not None  # noqa: S101  # create_history wrote version 0, and history() read it
        return int(row[0])

    def _execute(self, statement: str, bound: Sequence[Any] | Mapping[str, Any] | None = None) -> psycopg.Cursor[Any]:
        return self._work.execute(sql.SQL(statement).format(**self._names), bound)


def _postgres_commit(row: tuple[Any, ...], pipeline: str) -> Commit:
    version, action, owner, execution, base, request, first, restored_to, _ = row
    if action == Action.RESTORE:
        return Commit(version, Action.RESTORE, "restore", None, restored_to, owner == pipeline)
    if action == Action.MERGE and owner == pipeline:
        return Commit(version, Action.MERGE, "merge", Mark(execution, base, request, first), ours=True)
    return Commit(version, Action.FOREIGN if action == Action.MERGE else Action.HARMLESS, f"{action} of {owner}")


def _names(target: str) -> dict[str, sql.Composable]:
    *schema, name = target.split(".")
    return {
        "target": identifier(*schema, name),
        "runs": identifier(*schema, f"{name}_runs"),
        "images": identifier(*schema, f"{name}_images"),
        "images_index": identifier(f"{name}_images_version"),
    }


def _key_of(contract: Contract, column: str) -> sql.Composable:
    """The key as JSON; `column` is how a key column is written, such as `t.{}`."""
    parts = [
        sql.SQL("{}, {}").format(sql.Literal(key), sql.SQL(column.replace("{}", "{key}")).format(key=identifier(key)))
        for key in contract.keys
    ]
    return sql.SQL("jsonb_build_object({})").format(sql.SQL(", ").join(parts))


@contextmanager
def _spelling(work: Connection) -> Iterator[None]:
    """One spelling of rows for the block. If it fails the transaction is lost, and the settings with it."""
    before = [(name, work.execute("SELECT current_setting(%s)", (name,)).fetchone()) for name in _SPELLING]
    for name, value in _SPELLING.items():
        work.execute("SELECT set_config(%s, %s, true)", (name, value))
    yield
    for name, row in before:
        work.execute("SELECT set_config(%s, %s, true)", (name, row and row[0]))


def _refuse_tombstones(contract: Contract, target: str) -> None:
    if contract.needs_tombstones:
        raise InvalidInput(
            "hard deletes keep their tombstones outside the table, where no restore reaches them.",
            unit=target,
            next_step="use Deletes.SOFT, or a contract without order.",
        )
