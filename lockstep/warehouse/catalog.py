"""From the vendor's metadata.csv to tables: types, known lies, tolerant reading by header name. Pure.

What belongs here: what the metadata says and where it is known to be wrong. What does not: what the warehouse already
has (evolve.py) and SQL types (the dialects).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from lockstep.kernel.errors import Terminal
from lockstep.warehouse.model import MAX_COLUMNS, Column, ColumnType, Table, check_name, key_of

_TYPES: Mapping[str, ColumnType] = {
    "number": ColumnType.NUMBER,
    "date": ColumnType.DATE,
    "datetime": ColumnType.TIMESTAMP,
    "boolean": ColumnType.BOOLEAN,
}
"""All other vendor types (String, LongText, Picklist, Relationship, Multi*) are text."""

# Where the metadata is known to be wrong; the vendor's own loader carries the same corrections.
_LIES: Mapping[tuple[str, str], Column] = {
    ("document_version__sys", "document_number__v"): Column("document_number__v", ColumnType.TEXT, 255),
    ("security_policy__sys", "description__sys"): Column("description__sys", ColumnType.TEXT, 255),
}
_ICON_LENGTH = 3968
_UNBOUNDED = frozenset({"longtext", "multirelationship", "multipicklist"})


def read_metadata(text: str, *, unit: str | None = None) -> dict[str, Table]:
    """The tables that a metadata.csv describes, by object name. Columns are found by header, extras ignored."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = {"extract", "column_name", "type"} - set(reader.fieldnames or ())
    if missing:
        raise Terminal(f"metadata.csv has no column {', '.join(sorted(missing))}.", unit=unit)
    found: dict[str, dict[str, Column]] = {}
    for row in reader:
        name = object_name(row["extract"] or "")
        column = declared_column(name, row["column_name"] or "", row["type"] or "", row.get("length"), unit=unit)
        found.setdefault(name, {})[column.name] = column
    return {name: Table(name, tuple(columns.values()), key_of(name)) for name, columns in found.items()}


def object_name(extract: str) -> str:
    """`Object.study__v` and `Object.study__v_deletes` are both `study__v`."""
    return extract.rpartition(".")[2].removesuffix("_deletes")


def declared_column(
    table: str, name: str, vendor_type: str, length: str | None = None, *, unit: str | None = None
) -> Column:
    """One declared column, corrected where the declaration is known to be wrong."""
    check_name(name, what="column", unit=unit)
    lie = _LIES.get((table, name))
    if lie is not None:
        return lie
    if name == "id":  # always text: a numeric id would lose leading zeros and its vault prefix
        return Column(name, ColumnType.TEXT, _length(length))
    kind = _TYPES.get(vendor_type.strip().lower(), ColumnType.TEXT)
    if kind is not ColumnType.TEXT:
        return Column(name, kind)
    if vendor_type.strip().lower() in _UNBOUNDED:
        return Column(name, kind, None)
    declared = _length(length)
    if declared is not None and "icon" in name:  # formula icons say 1 and hold markup
        declared = max(declared, _ICON_LENGTH)
    return Column(name, kind, declared)


def wanted_table(
    name: str,
    headers: Iterable[Sequence[str]],
    declared: Mapping[str, Table],
    *,
    unit: str | None = None,
) -> Table:
    """The table that these files need: every header column, typed by the metadata where that knows it.

    A column that the metadata does not mention becomes text: nothing is lost, and nothing is guessed.
    """
    check_name(name, what="table", unit=unit)
    known = declared[name].by_name if name in declared else {}
    columns: dict[str, Column] = {}
    for header in headers:
        for column in header:
            check_name(column, what="column", unit=unit)
            columns[column] = known.get(column, Column(column))
    for column in key_of(name):
        columns.setdefault(column, known.get(column, Column(column)))
    if len(columns) > MAX_COLUMNS:
        raise Terminal(
            f"{name} has {len(columns)} columns, more than the {MAX_COLUMNS} that a table can hold.", unit=unit
        )
    return Table(name, tuple(columns.values()), key_of(name))


def _length(text: str | None) -> int | None:
    try:
        value = int(text or "")
    except ValueError:
        return None
    return value if value > 0 else None
