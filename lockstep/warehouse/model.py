"""Words of the warehouse: columns, tables, their keys and their names. Pure values.

What belongs here: what a table is, independent of a dialect. What does not: SQL (postgres.py, redshift.py), reading the
vendor's metadata (catalog.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lockstep.kernel.errors import InvalidInput, Terminal

MAX_COLUMNS = 1500
"""PostgreSQL holds 1,600 columns and Redshift 1,598; the rest is room for the tags of a staging table."""

RESERVED = "_lockstep_"
"""Names that begin so are the platform's own tags in staging tables."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_$]{0,126}", re.ASCII)


class ColumnType(StrEnum):
    """What a column holds. Text has a length in characters; None means without a limit."""

    TEXT = "text"
    NUMBER = "number"
    DATE = "date"
    TIMESTAMP = "timestamp"
    BOOLEAN = "boolean"


@dataclass(frozen=True)
class Column:
    """One column as the warehouse keeps it."""

    name: str
    type: ColumnType = ColumnType.TEXT
    length: int | None = None


@dataclass(frozen=True)
class Table:
    """One object of a vault: its columns by name, and the columns that identify a row."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ("id",)

    @property
    def by_name(self) -> dict[str, Column]:
        """The columns, found by name."""
        return {column.name: column for column in self.columns}


# Keys other than `id`; the vendor documents them by name.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "picklist__sys": ("object", "object_field", "picklist_value_name"),
    "metadata": ("extract", "column_name"),
}


def key_of(object_name: str) -> tuple[str, ...]:
    """The columns that identify a row of an object."""
    return _KEYS.get(object_name, ("id",))


def check_name(name: str, *, what: str, unit: str | None = None) -> str:
    """The name itself if it may become an identifier, else `Terminal`: names come from archives."""
    if _NAME.fullmatch(name) is None or name.lower().startswith(RESERVED):
        raise Terminal(
            f"{name[:80]!r} cannot be the name of a {what}.",
            unit=unit,
            next_step="look at the file's header; letters, digits and underscores are accepted.",
        )
    return name


def short_name(name: str, limit: int) -> str:
    """The name, or where it is longer than the database keeps, a cut one with a digest.

    Databases cut silently, and two long names would then become one table.
    """
    if len(name.encode()) <= limit:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: limit - 9]}_{digest}"


def vault_schema(vault: str) -> str:
    """The schema that holds a vault's tables."""
    name = f"vault_{vault}"
    if len(name) > 40:
        raise InvalidInput(f"{vault!r} is too long for a schema's name.", next_step="use at most 34 characters.")
    return name
