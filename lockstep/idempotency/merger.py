"""Merger: apply changes by key so that repeats and late, older changes cannot do harm.

What belongs here: the merge contract, its checks and its SQL for PostgreSQL, Redshift and Delta. What does not: putting
a table back before a replay (stateful.py). Statements are built from validated names; rows never enter the text.
"""

# ruff: noqa: S608  # names are quoted by one helper per dialect; values are never part of a statement

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from psycopg import sql

from lockstep.idempotency import delta
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.postgres import Connection, identifier, transaction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PROBLEMS = ("null_keys", "null_orders", "null_flags", "repeated_keys", "ambiguous_keys")
_WORDS = {
    "null_keys": "rows have no key; NULL matches nothing, so every replay would insert them again",
    "null_orders": "rows have no order; nothing could tell whether they are newer",
    "null_flags": "rows are neither deleted nor alive (NULL flag)",
    "repeated_keys": "keys occur more than once",
    "ambiguous_keys": "keys have several different rows and no order that says which one is last",
}


class Deletes(StrEnum):
    """What a deleted row leaves behind: nothing (its tombstone is kept elsewhere), or itself with the flag set."""

    HARD = "hard"
    SOFT = "soft"


class NullFlag(StrEnum):
    """What a NULL in the delete flag means. No default is right for everyone, so refusing is."""

    REFUSE = "refuse"
    ALIVE = "alive"
    DELETED = "deleted"


class Duplicates(StrEnum):
    """What to do with several rows of one key in the source: take the last by order, or refuse."""

    LATEST = "latest"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Contract:
    """How rows are matched, which one is newer, and what deletes.

    Attributes:
        keys: Columns that identify a row, in source and target.
        values: The other columns.
        order: Column that grows with every change of a key (sequence, change time); kept in the target. None switches
            the guard off: then a replayed older increment overwrites newer values.
        flag: Boolean column of the source that marks deletes; None if the source never deletes.
        deletes: Hard deletes need a tombstone table when there is an order; soft ones keep `flag` in the target.
        null_flag: Meaning of a NULL flag.
        duplicates: What several rows of one key mean.
    """

    keys: tuple[str, ...]
    values: tuple[str, ...] = ()
    order: str | None = None
    flag: str | None = None
    deletes: Deletes = Deletes.HARD
    null_flag: NullFlag = NullFlag.REFUSE
    duplicates: Duplicates = Duplicates.LATEST

    def __post_init__(self) -> None:
        names = [*self.keys, *self.values, *filter(None, (self.order, self.flag))]
        problems = [] if self.keys else ["no key column is named"]
        problems += [f"column {name!r} has two roles" for name in sorted({n for n in names if names.count(n) > 1})]
        if self.deletes is Deletes.SOFT and self.flag is None:
            problems.append("soft deletes need a flag column")
        if problems:
            raise InvalidInput("the merge contract contradicts itself.", problems=problems)

    @property
    def needs_tombstones(self) -> bool:
        """Whether a hard delete must be remembered, so that a late, older insert does not bring the row back."""
        return self.order is not None and self.flag is not None and self.deletes is Deletes.HARD

    @property
    def target_columns(self) -> tuple[str, ...]:
        """The columns that the target must have."""
        kept = (self.flag,) if self.deletes is Deletes.SOFT else ()
        return (*self.keys, *self.values, *filter(None, (self.order, *kept)))

    @property
    def source_columns(self) -> tuple[str, ...]:
        """The columns that the source must have."""
        return (*self.keys, *self.values, *filter(None, (self.order, self.flag)))

    def refuse(self, counts: dict[str, int], unit: str) -> None:
        """Raise `InvalidInput` for everything in the source that would silently lose, double or guess rows."""
        ignored = set() if self.duplicates is Duplicates.REFUSE else {"repeated_keys"}
        problems = [f"{counts[name]} {_WORDS[name]}" for name in PROBLEMS if counts.get(name) and name not in ignored]
        if problems:
            raise InvalidInput(
                "the increment cannot be merged; nothing was changed.",
                unit=unit,
                next_step="correct the increment, or say in the contract what the rows mean.",
                problems=problems,
            )


def merge_postgres(
    connection: Connection, contract: Contract, *, target: str, source: str, tombstones: str | None = None
) -> int:
    """Merge table `source` into table `target` in one transaction; return how many rows changed.

    Runs inside the caller's transaction if one is open, so a ledger row can commit with it. Other writers of the target
    wait, readers do not. Names may be qualified: `schema.table`.

    Raises:
        InvalidInput: The increment is refused; nothing was changed.
    """
    _want_tombstones(contract, tombstones, target)
    with transaction(connection, what=f"merging into {target}") as work:
        check_postgres(work, contract, target=target, source=source)
        crash_point("idempotency.merger.before_apply")
        if tombstones is not None and contract.needs_tombstones:
            work.execute(_sql(postgres_tombstones(contract, source, tombstones)))
            crash_point("idempotency.merger.after_tombstones")
        changed = work.execute(_sql(postgres_merge(contract, target, source, tombstones))).rowcount
        crash_point("idempotency.merger.before_commit")
    crash_point("idempotency.merger.after_commit")
    return changed


def check_postgres(work: Connection, contract: Contract, *, target: str, source: str) -> None:
    """Let other writers of the target wait, and refuse an increment that cannot be merged. Raises `InvalidInput`."""
    work.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(_table(target)))
    contract.refuse(_counts(work, contract, source), unit=target)


def create_tombstones(connection: Connection, contract: Contract, *, target: str, tombstones: str) -> None:
    """Create the table that remembers hard deletes, with the column types of the target, if it is absent."""
    columns = sql.SQL(", ").join(map(identifier, (*contract.keys, contract.order or "")))
    with transaction(connection, what=f"creating {tombstones}") as work:
        if work.execute("SELECT to_regclass(%s)", (_name(tombstones),)).fetchone() != (None,):
            return
        statement = "CREATE TABLE {} AS SELECT {} FROM {} WITH NO DATA"
        work.execute(sql.SQL(statement).format(_table(tombstones), columns, _table(target)))
        keys = sql.SQL(", ").join(map(identifier, contract.keys))
        work.execute(sql.SQL("ALTER TABLE {} ADD PRIMARY KEY ({})").format(_table(tombstones), keys))


def stage(connection: Connection, contract: Contract, *, target: str, rows: Iterable[Sequence[Any]]) -> str:
    """Copy rows (in the order of `source_columns`) into a temporary table that ends with the caller's transaction.

    Raises:
        InvalidInput: No transaction is open: the table would vanish before it can be merged.
    """
    if connection.info.transaction_status.name == "IDLE":
        raise InvalidInput("staging needs an open transaction.", next_step="call it inside `transaction(...)`.")
    name = "lockstep_increment"
    kept = [column for column in contract.source_columns if column in contract.target_columns]
    connection.execute(sql.SQL("DROP TABLE IF EXISTS pg_temp.{}").format(identifier(name)))
    like = "CREATE TEMPORARY TABLE {} ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA"
    columns = sql.SQL(", ").join(map(identifier, kept))
    connection.execute(sql.SQL(like).format(identifier(name), columns, _table(target)))
    if contract.flag is not None and contract.flag not in kept:
        add = sql.SQL("ALTER TABLE {} ADD COLUMN {} boolean")
        connection.execute(add.format(identifier(name), identifier(contract.flag)))
    listed = sql.SQL(", ").join(map(identifier, contract.source_columns))
    with connection.cursor().copy(sql.SQL("COPY {} ({}) FROM STDIN").format(identifier(name), listed)) as copy:
        for row in rows:
            copy.write_row(row)
    return f"pg_temp.{name}"


def merge_delta(
    spark: SparkSession, contract: Contract, *, target: str, source: DataFrame, tombstones: str | None = None
) -> int:
    """Merge a frame into the Delta table at `target` in one commit; return how many rows changed.

    The frame is computed once; the checks and the merge see the same rows. Hard deletes are remembered in the Delta
    table `tombstones` by a commit of its own, made first: a crash between the two is mended by the same increment.

    Raises:
        InvalidInput: The increment is refused; nothing was changed.
    """
    _want_tombstones(contract, tombstones, target)
    return apply_delta(
        spark, contract, target=target, increment=checked_delta(contract, source, unit=target), tombstones=tombstones
    )


def checked_delta(contract: Contract, source: DataFrame, *, unit: str) -> DataFrame:
    """The increment, computed once and found fit to be merged. Raises `InvalidInput`."""
    increment = delta.computed(source.select(*map(delta.column, contract.source_columns)))
    text = check_sql(contract, "{increment}", delta.column)
    contract.refuse(source.sparkSession.sql(text, increment=increment).collect()[0].asDict(), unit=unit)
    return increment


def apply_delta(
    spark: SparkSession, contract: Contract, *, target: str, increment: DataFrame, tombstones: str | None = None
) -> int:
    """Merge what `checked_delta` returned; return how many rows changed."""
    crash_point("idempotency.merger.before_apply_delta")
    resolved = f"({resolved_sql(contract, '{increment}', delta.column)})"
    if tombstones is not None and contract.needs_tombstones:
        # Collected: Spark Connect runs DML when the answer is read.
        with delta.contested(tombstones):
            spark.sql(delta_tombstones(contract, resolved, tombstones), increment=increment).collect()
        crash_point("idempotency.merger.after_tombstones_delta")
    with delta.contested(target):
        done = spark.sql(delta_merge(contract, target, resolved, tombstones), increment=increment).collect()
    crash_point("idempotency.merger.after_commit_delta")
    # No row at all: Delta has seen a newer `txnVersion` of this application and dropped the merge without an error.
    return int(done[0]["num_affected_rows"]) if done else 0


def create_tombstones_delta(spark: SparkSession, contract: Contract, *, target: str, tombstones: str) -> None:
    """Create the Delta table that remembers hard deletes, with the column types of the target, if it is absent."""
    columns = map(delta.column, (*contract.keys, contract.order or ""))
    empty = delta.read(spark, target).select(*columns).limit(0)
    empty.write.format("delta").mode("ignore").save(tombstones)


def redshift_statements(contract: Contract, *, target: str, source: str, tombstones: str | None = None) -> list[str]:
    """The merge as statements for one Redshift transaction, after the caller has run `check_sql` and `refuse`.

    Redshift's MERGE has no conditions and one matched branch, so this is DELETE USING and INSERT over a resolved copy.
    No TRUNCATE: it would commit the transaction. The statements are plain enough to run on PostgreSQL too.
    """
    _want_tombstones(contract, tombstones, target)
    work, into = '"lockstep_resolved"', _name(target)
    same = _on(contract.keys, f"{into}.", f"{work}.", _quote)
    statements = [f"CREATE TEMPORARY TABLE {work} AS {resolved_sql(contract, _name(source), _quote)}"]
    if contract.order is not None:
        order = _quote(contract.order)
        older = f"{work}.{order} <= {into}.{order}"
        statements.append(f"DELETE FROM {work} USING {into} WHERE {same} AND {older}")
        if tombstones is not None and contract.needs_tombstones:
            statements += _redshift_tombstones(contract, work, _name(tombstones))
    columns = ", ".join(map(_quote, contract.target_columns))
    kept = (
        ""
        if contract.deletes is Deletes.SOFT or contract.flag is None
        else f" WHERE NOT {work}.{_quote(contract.flag)}"
    )
    statements.append(f"DELETE FROM {into} USING {work} WHERE {same}")
    statements.append(f"INSERT INTO {into} ({columns}) SELECT {columns} FROM {work}{kept}")
    return [*statements, f"DROP TABLE {work}"]


def check_sql(contract: Contract, source: str, quote: Callable[[str], str] | None = None) -> str:
    """One row of counts named as in `PROBLEMS`, in one pass; give it to `Contract.refuse`. Fit for every dialect."""
    name = quote or _quote
    keys = ", ".join(name(key) for key in contract.keys)
    columns = ", ".join(name(column) for column in contract.source_columns)
    order = name(contract.order) if contract.order else "1"
    strict = contract.flag is not None and contract.null_flag is NullFlag.REFUSE
    no_key = " OR ".join(f"{name(key)} IS NULL" for key in contract.keys)
    no_flag = f"{name(contract.flag or '')} IS NULL" if strict else "1 = 0"
    distinct = f"SELECT {columns}, COUNT(*) AS lockstep_same FROM {source} GROUP BY {columns}"
    last = f"SELECT d.*, MAX({order}) OVER (PARTITION BY {keys}) AS lockstep_last FROM ({distinct}) d"
    by_key = (
        f"SELECT SUM(lockstep_same) AS n, SUM(CASE WHEN {order} = lockstep_last THEN 1 ELSE 0 END) AS finals, "
        f"SUM(CASE WHEN {no_key} THEN lockstep_same ELSE 0 END) AS no_key, "
        f"SUM(CASE WHEN {order} IS NULL THEN lockstep_same ELSE 0 END) AS no_order, "
        f"SUM(CASE WHEN {no_flag} THEN lockstep_same ELSE 0 END) AS no_flag FROM ({last}) l GROUP BY {keys}"
    )
    return (
        "SELECT COALESCE(SUM(no_key), 0) AS null_keys, COALESCE(SUM(no_order), 0) AS null_orders, "
        "COALESCE(SUM(no_flag), 0) AS null_flags, COUNT(CASE WHEN n > 1 THEN 1 END) AS repeated_keys, "
        f"COUNT(CASE WHEN finals > 1 THEN 1 END) AS ambiguous_keys FROM ({by_key}) g"
    )


def resolved_sql(contract: Contract, source: str, quote: Callable[[str], str]) -> str:
    """The source with one row for each key, the last by order, and a flag that is never NULL."""
    keys = ", ".join(map(quote, contract.keys))
    order = quote(contract.order) if contract.order else quote(contract.keys[0])
    missing = "TRUE" if contract.null_flag is NullFlag.DELETED else "FALSE"
    plain = [quote(column) for column in contract.source_columns if column != contract.flag]
    flag = [f"COALESCE({quote(contract.flag)}, {missing}) AS {quote(contract.flag)}"] if contract.flag else []
    numbered = (
        f"SELECT s.*, ROW_NUMBER() OVER (PARTITION BY {keys} ORDER BY {order} DESC) AS lockstep_nth FROM {source} s"
    )
    return f"SELECT {', '.join([*plain, *flag])} FROM ({numbered}) n WHERE lockstep_nth = 1"


def postgres_merge(contract: Contract, target: str, source: str, tombstones: str | None) -> str:
    """MERGE for PostgreSQL 15 and later."""
    resolved = f"({resolved_sql(contract, _name(source), _quote)})"
    return _merge(contract, _name(target), resolved, _name(tombstones) if tombstones else None, _quote)


def postgres_tombstones(contract: Contract, source: str, tombstones: str) -> str:
    """Remember the deletes of the increment; an older delete never replaces a newer one."""
    keys, order, flag = ", ".join(map(_quote, contract.keys)), _quote(contract.order or ""), _quote(contract.flag or "")
    resolved = resolved_sql(contract, _name(source), _quote)
    return (
        f"INSERT INTO {_name(tombstones)} AS d ({keys}, {order}) SELECT {keys}, {order} FROM ({resolved}) s "
        f"WHERE {flag} ON CONFLICT ({keys}) DO UPDATE SET {order} = EXCLUDED.{order} WHERE d.{order} < EXCLUDED.{order}"
    )


def delta_merge(contract: Contract, target: str, resolved: str, tombstones: str | None) -> str:
    """MERGE for Delta on Spark; `resolved` is a subquery."""
    return _merge(
        contract, delta.quoted(target), resolved, delta.quoted(tombstones) if tombstones else None, delta.column
    )


def delta_tombstones(contract: Contract, resolved: str, tombstones: str) -> str:
    """Remember the deletes of the increment in a Delta table."""
    quote = delta.column
    keys, order, flag = [quote(key) for key in contract.keys], quote(contract.order or ""), quote(contract.flag or "")
    columns = ", ".join([*keys, order])
    values = ", ".join(f"s.{column}" for column in [*keys, order])
    return (
        f"MERGE INTO {delta.quoted(tombstones)} AS d USING (SELECT {columns} FROM {resolved} r WHERE {flag}) AS s "
        f"ON {_on(contract.keys, 'd.', 's.', quote)} "
        f"WHEN MATCHED AND s.{order} > d.{order} THEN UPDATE SET d.{order} = s.{order} "
        f"WHEN NOT MATCHED THEN INSERT ({columns}) VALUES ({values})"
    )


def _merge(contract: Contract, target: str, resolved: str, tombstones: str | None, quote: Callable[[str], str]) -> str:
    """The one MERGE of both dialects. Every branch that changes a row asks whether the source is newer."""
    # A row from before the order column has none: it is older than everything, or no change would ever reach it.
    order = quote(contract.order) if contract.order else ""
    newer = f" AND (t.{order} IS NULL OR s.{order} > t.{order})" if order else ""
    hard = contract.flag is not None and contract.deletes is Deletes.HARD
    gone, alive = (
        (f" AND s.{quote(contract.flag or '')}", f" AND NOT s.{quote(contract.flag or '')}") if hard else ("", "")
    )
    buried = ""
    using = f"{resolved} AS s"
    if tombstones and contract.needs_tombstones:
        using = (
            f"(SELECT r.*, d.{quote(contract.order or '')} AS lockstep_dead FROM {resolved} AS r "
            f"LEFT JOIN {tombstones} AS d ON {_on(contract.keys, 'r.', 'd.', quote)}) AS s"
        )
        buried = f" AND (s.lockstep_dead IS NULL OR s.{quote(contract.order or '')} > s.lockstep_dead)"
    columns = [quote(column) for column in contract.target_columns]
    changed = [quote(column) for column in contract.target_columns if column not in contract.keys]
    branches = [f"WHEN MATCHED{gone}{newer} THEN DELETE"] if hard else []
    if changed:
        branches.append(f"WHEN MATCHED{newer} THEN UPDATE SET {', '.join(f'{c} = s.{c}' for c in changed)}")
    values = ", ".join(f"s.{column}" for column in columns)
    branches.append(f"WHEN NOT MATCHED{alive}{buried} THEN INSERT ({', '.join(columns)}) VALUES ({values})")
    return f"MERGE INTO {target} AS t USING {using} ON {_on(contract.keys, 't.', 's.', quote)} {' '.join(branches)}"


def _redshift_tombstones(contract: Contract, work: str, tombstones: str) -> list[str]:
    keys, order, flag = ", ".join(map(_quote, contract.keys)), _quote(contract.order or ""), _quote(contract.flag or "")
    same = _on(contract.keys, f"{tombstones}.", f"{work}.", _quote)
    return [
        f"DELETE FROM {work} USING {tombstones} WHERE {same} AND {work}.{order} <= {tombstones}.{order}",
        f"DELETE FROM {tombstones} USING {work} WHERE {same} AND {work}.{flag}",
        f"INSERT INTO {tombstones} ({keys}, {order}) SELECT {keys}, {order} FROM {work} WHERE {flag}",
    ]


def _want_tombstones(contract: Contract, tombstones: str | None, unit: str) -> None:
    if contract.needs_tombstones and tombstones is None:
        raise InvalidInput(
            "hard deletes with an order need a tombstone table, or a late insert brings deleted rows back.",
            unit=unit,
            next_step="create one (create_tombstones) and name it, or use soft deletes.",
        )


def _counts(connection: Connection, contract: Contract, source: str) -> dict[str, int]:
    row = connection.execute(_sql(check_sql(contract, _name(source)))).fetchone()
    return dict(zip(PROBLEMS, row or (), strict=True))


def _on(keys: Sequence[str], left: str, right: str, quote: Callable[[str], str]) -> str:
    return " AND ".join(f"{left}{quote(key)} = {right}{quote(key)}" for key in keys)


def _quote(name: str) -> str:
    """A name in double quotes, as PostgreSQL and Redshift read it."""
    return identifier(name).as_string(None)


def _table(name: str) -> sql.Identifier:
    return identifier(*name.split("."))


def _name(name: str) -> str:
    return _table(name).as_string(None)


def _sql(text: str) -> bytes:
    """Bytes: the text is no template, a percent sign in a name stays one."""
    return text.encode()
