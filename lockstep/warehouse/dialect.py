"""What a dialect must be able to say, and the steps in which a window is said. No SQL text of its own.

What belongs here: the shape shared by postgres.py and redshift.py. What does not: executing anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.kernel.postgres import identifier
from lockstep.warehouse.model import RESERVED, Column, Table

LOAD, KIND, ROW, DELETED = (RESERVED + name for name in ("load", "kind", "row", "deleted"))
"""Tags of a staged row: which attempt staged it, upsert or delete, its place in the file, when it was deleted."""

UPSERT, DELETE = "u", "d"
MODIFIED = "modified_date__v"
DELETED_DATE = "deleted_date"


@dataclass(frozen=True)
class Step:
    """One statement. `expect` is the number that it must return or change; anything else undoes the window."""

    sql: str
    parameters: dict[str, Any] = field(default_factory=dict)
    expect: int | None = None
    what: str = ""


@dataclass(frozen=True)
class Change:
    """What a window does to one table: the files' headers say which columns, the manifest how many rows."""

    table: Table
    columns: tuple[str, ...] = ()
    upserts: int = 0
    deletes: int = 0
    dedupe: bool = True

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        return self.table.key

    @property
    def may_conflict(self) -> bool:
        """Whether a row can be deleted and updated by this window, with times to tell which came last."""
        return bool(self.upserts and self.deletes and MODIFIED in self.columns)


class Dialect(Protocol):
    """The additive half, which both dialects run outside a window's transaction."""

    name: str
    identifier_limit: int

    def sql_type(self, column: Column) -> str:
        """The column's type in this database; holds every value of the vendor's type without loss."""
        ...

    def create_table(self, schema: str, table: Table) -> str:
        """The statement that makes a table with its key."""
        ...

    def add_column(self, schema: str, table: str, column: Column) -> str:
        """The statement that adds one column."""
        ...

    def widen(self, schema: str, table: str, column: Column, present: int | None) -> str | None:
        """The statement that makes room for longer text than `present` characters, or None if there is room."""
        ...


def quoted(*parts: str) -> str:
    """A quoted name, qualified if several parts are given."""
    return identifier(*parts).as_string(None)


def name_list(names: Sequence[str], prefix: str = "") -> str:
    """Quoted names with commas, each with an alias in front if given."""
    lead = f"{prefix}." if prefix else ""
    return ", ".join(lead + quoted(name) for name in names)


def same_key(key: Sequence[str], left: str, right: str) -> str:
    """The condition that two rows have the same key, column by column: joined text would match falsely."""
    return " AND ".join(f"{left}.{quoted(name)} = {right}.{quoted(name)}" for name in key)
