"""What a simulated vault contains: components, objects, columns, and how its schema changes over time.

What belongs here: the schema at a window, as a pure function. What does not: values (rows.py).
The vendor's known untruths are kept: `document_number__v` is declared Number and holds text, icon formulas are declared
one character long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.vaultsim.model import Change, ChangeKind

STANDARD = ("id", "modified_date__v", "name__v", "status__v", "object", "object_field", "picklist_value_name")


@dataclass(frozen=True)
class Column:
    """One column as metadata.csv declares it. `since` is the first window that has it."""

    name: str
    type: str
    length: int = 0
    related: str = ""
    since: int = -1
    until: int | None = None
    changed: int = -1
    fill: str = ""
    """What rows.py puts in, where that is not what the type promises."""

    @property
    def label(self) -> str:
        """The words people see."""
        return self.name.rpartition("__")[0].replace("_", " ").title() or self.name


@dataclass(frozen=True)
class Thing:
    """An object, document, picklist or workflow extract."""

    component: str
    name: str
    number: int
    columns: tuple[Column, ...]
    since: int = -1
    key: tuple[str, ...] = ("id",)

    @property
    def extract(self) -> str:
        """The vendor's name of it."""
        return f"{self.component}.{self.name}"

    @property
    def label(self) -> str:
        """The words people see."""
        return self.name.rpartition("__")[0].replace("_", " ").title()


def _text(name: str, length: int) -> Column:
    return Column(name, "String", length)


_COMMON = (
    _text("id", 20),
    Column("modified_date__v", "DateTime"),
    _text("name__v", 128),
    Column("status__v", "Picklist", 46, "Picklist.picklist__sys"),
)
_TYPED = (
    Column("amount__c", "Number", 18),
    Column("big_number__c", "Number", 38, fill="big"),
    Column("is_active__c", "Boolean"),
    Column("start_date__v", "Date"),
    Column("approved_at__v", "DateTime"),
    Column("description__v", "LongText", 32000),
    Column("organization__v", "Relationship", 20, "Object.organization__v"),
    Column("countries__v", "MultiPicklist", 46, "Picklist.picklist__sys"),
)
_AUDIT = (
    _text("id", 40),
    Column("timestamp", "DateTime"),
    _text("user_name", 128),
    _text("action", 64),
    Column("item", "LongText", 4000),
)


def _objects() -> Iterable[Thing]:
    icon = Column("progress_icon__v", "String", 1, fill="icon")
    yield Thing("Object", "study__v", 17, (*_COMMON, *_TYPED, icon))
    yield Thing("Object", "site__v", 18, (*_COMMON, *_TYPED))
    yield Thing("Object", "product__v", 19, (*_COMMON, *_TYPED))
    yield Thing("Object", "user__sys", 20, (*_COMMON, _text("email__sys", 128), Column("is_active__sys", "Boolean")))
    declared_short = Column("description__sys", "String", 128, fill="long")
    yield Thing("Object", "security_policy__sys", 21, (*_COMMON, declared_short))
    untrue = Column("document_number__v", "Number", 18, fill="document_number")
    version = (Column("major_version_number__v", "Number", 9, fill="small"), untrue, _text("title__v", 255))
    yield Thing("Document", "document_version__sys", 30, (*_COMMON, *version))
    ends = (_text("source_doc_id__v", 20), _text("target_doc_id__v", 20))
    yield Thing("Document", "document_relationships__sys", 31, (*_COMMON[:2], *ends))
    picklist = (
        Column("modified_date__v", "DateTime"),
        _text("object", 64),
        _text("object_field", 64),
        _text("picklist_value_name", 64),
        _text("picklist_value_label", 128),
        _text("status__v", 46),
    )
    key = ("object", "object_field", "picklist_value_name")
    yield Thing("Picklist", "picklist__sys", 40, picklist, key=key)
    for number, name in enumerate(("workflow__sys", "workflow_item__sys", "workflow_task__sys"), 50):
        yield Thing("Workflow", name, number, (*_COMMON, Column("workflow_id__sys", "Relationship", 20)))
    yield Thing("Workflow", "workflow_task_item__sys", 53, (*_COMMON, Column("verdict__sys", "String", 40)))


CATALOGUE = tuple(_objects())
LOGS = tuple(
    Thing("Log", f"{name}_audit_trail__sys", number, _AUDIT)
    for number, name in enumerate(("system", "document", "object", "login"), 70)
)
_EXTRA_FIRST_NUMBER = 100


def things(names: Sequence[str], changes: Iterable[Change], index: int) -> list[Thing]:
    """Every object of a vault at window `index`; a full archive after window `index` has the same.

    Names that the catalogue lacks are custom objects with the usual columns.
    """
    known = {one.name: one for one in CATALOGUE}
    found = {name: known.get(name) or _custom(name, place) for place, name in enumerate(names)} if names else known
    for change in changes:
        if change.index <= index:
            _apply(found, change, len(found))
    return [replace(one, columns=_ordered(one.columns, index)) for one in found.values() if one.since <= index]


def changed_columns(all_things: Iterable[Thing], index: int) -> list[tuple[Thing, Column]]:
    """What the metadata delta of window `index` says: new and widened columns."""
    return [(thing, column) for thing in all_things for column in thing.columns if column.changed == index >= 0]


def dropped_columns(changes: Iterable[Change], index: int) -> list[Change]:
    """What metadata_deletes of window `index` says."""
    return [change for change in changes if change.kind is ChangeKind.DROP_COLUMN and change.index == index]


def _custom(name: str, place: int, since: int = -1) -> Thing:
    columns = tuple(replace(one, since=since, changed=since) for one in (*_COMMON, *_TYPED))
    return Thing("Object", name, _EXTRA_FIRST_NUMBER + place, columns, since=since)


def _apply(found: dict[str, Thing], change: Change, place: int) -> None:
    if change.kind is ChangeKind.OBJECT:
        found.setdefault(change.object, _custom(change.object, place, change.index))
        return
    thing = found.get(change.object)
    if thing is None:
        return
    if change.kind is ChangeKind.COLUMN:
        new = Column(change.column, change.type, change.length, since=change.index, changed=change.index)
        kept = tuple(one for one in thing.columns if one.name != change.column)
        found[change.object] = replace(thing, columns=(*kept, new))
        return
    columns = tuple(_changed(one, change) if one.name == change.column else one for one in thing.columns)
    found[change.object] = replace(thing, columns=columns)


def _changed(column: Column, change: Change) -> Column:
    if change.kind is ChangeKind.WIDEN:
        return replace(column, length=change.length, changed=change.index, fill="full_length")
    return replace(column, until=change.index)


def _ordered(columns: Iterable[Column], index: int) -> tuple[Column, ...]:
    """Standard columns first, the rest by alphabet: positions shift when a column comes or goes."""
    alive = [one for one in columns if one.since <= index and (one.until is None or index < one.until)]
    first = sorted((one for one in alive if one.name in STANDARD), key=lambda one: STANDARD.index(one.name))
    return (*first, *sorted((one for one in alive if one.name not in STANDARD), key=lambda one: one.name))
