"""The Redshift dialect: one window as the list of statements of one transaction.

What belongs here: SQL text that keeps to what Redshift allows in a transaction: no TRUNCATE (it commits), no ALTER
TYPE, TEMP staging, COPY from a manifest whose files are mandatory. What does not:
a connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.kernel.errors import InvalidInput
from lockstep.warehouse.dialect import DELETED, MODIFIED, ROW, Change, Step, name_list, quoted, same_key
from lockstep.warehouse.model import Column, ColumnType, Table, short_name

MAX_BYTES = 65_535
BYTES_PER_CHARACTER = 4  # VARCHAR counts bytes, the vendor counts characters
PRECISION, SCALE = 38, 10
NULL_MARK = r"\N"

_TYPES = {
    # A bare NUMERIC is (18,0) in Redshift, and COPY cuts fractions in silence.
    ColumnType.NUMBER: f"NUMERIC({PRECISION},{SCALE})",
    ColumnType.DATE: "DATE",
    ColumnType.TIMESTAMP: "TIMESTAMPTZ",
    ColumnType.BOOLEAN: "BOOLEAN",
}
_LEDGER = (
    "INSERT INTO windows.applied_window "
    '(vault, epoch, kind, start, "stop", load_id, fence, "rows", counts, sha256, applied_at) '
    "VALUES (%(vault)s, %(epoch)s, %(kind)s, %(start)s, %(stop)s, %(load_id)s, %(fence)s, %(rows)s, "
    "%(counts)s, %(sha256)s, %(applied_at)s)"
)
# Keys are not enforced in Redshift and snapshot isolation allows write skew: the row itself must change.
_GUARD = (
    "UPDATE windows.apply_control SET updated_at = %(applied_at)s "
    "WHERE vault = %(vault)s AND fence = %(fence)s AND epoch = %(epoch)s"
)
_ADVANCE = (
    "UPDATE windows.apply_control SET watermark = %(stop)s WHERE vault = %(vault)s AND watermark = %(start)s "
    "AND fence = %(fence)s AND epoch = %(epoch)s"
)

CLAIM = "watermark, fence and epoch"
"""What a step is called whose failure means that the lane is no longer ours."""

LOCKED = (Step("BEGIN"), Step("LOCK TABLE windows.apply_control"))
"""How every writing transaction begins: the lock comes before the snapshot is taken."""


def guarded(values: dict[str, Any]) -> Step:
    """Proof that the lane is ours, before anything is loaded."""
    return Step(_GUARD, values, 1, CLAIM)


def recorded(values: dict[str, Any]) -> Step:
    """The ledger row. Its values include `kind` and `applied_at`: Redshift has no clock for a DEFAULT to trust."""
    return Step(_LEDGER, values, 1, "ledger row")


@dataclass(frozen=True)
class Sources:
    """Where the staged files of one table are: the addresses of their COPY manifests, None if there is no file."""

    upserts: str | None = None
    deletes: str | None = None


class RedshiftDialect:
    """Statements for Redshift, provisioned or serverless."""

    name = "redshift"
    identifier_limit = 127

    def __init__(self, iam_role: str = "default", region: str = "us-east-1") -> None:
        self._access = "IAM_ROLE default" if iam_role == "default" else f"IAM_ROLE {_literal(iam_role)}"
        self._region = _literal(region)

    def sql_type(self, column: Column) -> str:
        """Text gets its length in bytes; numbers keep 28 digits before the point and 10 after."""
        if column.type is not ColumnType.TEXT:
            return _TYPES[column.type]
        return f"VARCHAR({_bytes(column)})"

    def relation(self, schema: str, table: str) -> str:
        """The quoted name of a table."""
        return quoted(schema, short_name(table, self.identifier_limit))

    def create_table(self, schema: str, table: Table) -> str:
        """The key is informational in Redshift; it is declared for the planner."""
        columns = ", ".join(f"{quoted(column.name)} {self.sql_type(column)}" for column in table.columns)
        return f"CREATE TABLE {self.relation(schema, table.name)} ({columns}, PRIMARY KEY ({name_list(table.key)}))"

    def add_column(self, schema: str, table: str, column: Column) -> str:
        """One column per statement is all that Redshift takes."""
        return f"ALTER TABLE {self.relation(schema, table)} ADD COLUMN {quoted(column.name)} {self.sql_type(column)}"

    def widen(self, schema: str, table: str, column: Column, present: int | None) -> str | None:
        """VARCHAR may grow, outside a transaction only. `present` is in bytes, as Redshift reports it."""
        wanted = _bytes(column)
        if present is None or present >= wanted:
            return None
        return f"ALTER TABLE {self.relation(schema, table)} ALTER COLUMN {quoted(column.name)} TYPE VARCHAR({wanted})"

    def window(
        self, schema: str, changes: Sequence[Change], sources: Mapping[str, Sources], ledger: Mapping[str, Any]
    ) -> list[Step]:
        """All statements of one window, BEGIN to COMMIT."""
        values = dict(ledger)
        moved = self.moves(schema, changes, sources)
        return [*LOCKED, guarded(values), *moved, recorded(values), Step(_ADVANCE, values, 1, CLAIM), Step("COMMIT")]

    def moves(self, schema: str, changes: Sequence[Change], sources: Mapping[str, Sources]) -> list[Step]:
        """Staging, counting, deletes and merges, table by table in one fixed order."""
        ordered = sorted((one for one in changes if one.upserts or one.deletes), key=lambda one: one.table.name)
        staged = [step for change in ordered for step in self._staged(change, sources[change.table.name])]
        return staged + [step for change in ordered for step in self._applied(schema, change)]

    def copy(self, target: str, columns: Sequence[str], manifest: str) -> str:
        """COPY from a manifest; nothing that cuts, replaces or skips is switched on."""
        return (
            f"COPY {target} ({name_list(columns)}) FROM {_literal(manifest)} {self._access} REGION {self._region} "
            f"FORMAT AS CSV MANIFEST NULL AS '{NULL_MARK}' DATEFORMAT 'auto' TIMEFORMAT 'auto'"
        )

    def _staged(self, change: Change, source: Sources) -> list[Step]:
        steps = []
        if source.upserts is not None:
            target, columns = _temporary("u", change), (*change.columns, ROW)
            typed = [change.table.by_name[name] for name in change.columns]
            steps += self._load(target, typed, columns, source.upserts, change.upserts)
        if source.deletes is not None:
            target, columns = _temporary("d", change), (*change.key, DELETED, ROW)
            typed = [*(change.table.by_name[name] for name in change.key), Column(DELETED, ColumnType.TIMESTAMP)]
            steps += self._load(target, typed, columns, source.deletes, change.deletes)
        return steps

    def _load(
        self, target: str, typed: Sequence[Column], columns: Sequence[str], manifest: str, rows: int
    ) -> list[Step]:
        declared = ", ".join(f"{quoted(column.name)} {self.sql_type(column)}" for column in typed)
        return [
            Step(f"CREATE TEMP TABLE {target} ({declared}, {quoted(ROW)} BIGINT)"),
            Step(self.copy(target, columns, manifest), what=f"copy into {target}"),
            Step(f"SELECT count(*) FROM {target}", expect=rows, what=f"rows in {target}"),  # noqa: S608
        ]

    def _applied(self, schema: str, change: Change) -> list[Step]:
        relation, upserts, deletes = (
            self.relation(schema, change.table.name),
            _temporary("u", change),
            _temporary("d", change),
        )
        steps = []
        if change.deletes:
            steps.append(
                Step(f"DELETE FROM {relation} USING {deletes} WHERE {same_key(change.key, relation, deletes)}")  # noqa: S608
            )
        if change.upserts:
            steps += [Step(_keep_last(upserts, change))]
            if change.may_conflict:
                steps.append(Step(_keep_deleted(upserts, deletes, change)))
            steps.append(Step(_merge(relation, upserts, change), what=f"{change.table.name}: merge"))
        drops = [name for name, used in ((upserts, change.upserts), (deletes, change.deletes)) if used]
        return [*steps, *(Step(f"DROP TABLE {name}") for name in drops)]


def copy_manifest(addresses: Sequence[str]) -> bytes:
    """A COPY manifest: every file must be there, and no file that merely shares a prefix is loaded."""
    return json.dumps({"entries": [{"url": address, "mandatory": True} for address in addresses]}).encode()


def _keep_last(staging: str, change: Change) -> str:
    # MERGE refuses a target row that matches two source rows, and inserts both if it matches none.
    key = name_list(change.key)
    return (
        f"DELETE FROM {staging} USING (SELECT {key}, max({quoted(ROW)}) AS last_row FROM {staging} GROUP BY {key}) "  # noqa: S608
        f"AS kept WHERE {same_key(change.key, staging, 'kept')} AND {staging}.{quoted(ROW)} < kept.last_row"
    )


def _keep_deleted(upserts: str, deletes: str, change: Change) -> str:
    return (
        f"DELETE FROM {upserts} USING {deletes} WHERE {same_key(change.key, upserts, deletes)} "  # noqa: S608
        f"AND {deletes}.{quoted(DELETED)} > {upserts}.{quoted(MODIFIED)}"
    )


def _merge(relation: str, staging: str, change: Change) -> str:
    values = name_list(change.columns, staging)
    sets = (
        ", ".join(f"{quoted(name)} = {staging}.{quoted(name)}" for name in change.columns if name not in change.key)
        or f"{quoted(change.key[0])} = {staging}.{quoted(change.key[0])}"
    )
    return (
        f"MERGE INTO {relation} USING {staging} ON {_merge_key(relation, staging, change.key)} "  # noqa: S608
        f"WHEN MATCHED THEN UPDATE SET {sets} "
        f"WHEN NOT MATCHED THEN INSERT ({name_list(change.columns)}) VALUES ({values})"
    )


def _merge_key(relation: str, staging: str, key: Sequence[str]) -> str:
    table = relation.rpartition(".")[2]
    return same_key(key, table, staging)


def _temporary(kind: str, change: Change) -> str:
    return quoted(short_name(f"stage_{kind}_{change.table.name}", 63))


def _bytes(column: Column) -> int:
    return MAX_BYTES if column.length is None else min(MAX_BYTES, max(1, column.length) * BYTES_PER_CHARACTER)


def _literal(text: str) -> str:
    if "'" in text or "\\" in text or "\x00" in text:
        raise InvalidInput(f"{text!r} cannot stand in a statement.")
    return f"'{text}'"
