"""Rules of ticks: which ids, manifests and parts are allowed, what is missing, and what may follow what.

Pure and total: no clock, no client, no database. Callers carry the decisions out.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import types
from lockstep.ticks.model import (
    OWN_COLUMNS,
    SCHEMA_VERSION,
    SILVER_COLUMNS,
    Column,
    Limits,
    Manifest,
    Mode,
    Part,
    PartSpec,
    TableSpec,
    TickState,
)

ORG_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
PROJECT_PATTERN = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
TICK_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
SEQ_PATTERN = r"[0-9]{1,6}"
SHA256_PATTERN = r"[0-9a-f]{64}"
TABLE_PATTERN = r"[A-Za-z][A-Za-z0-9_]{0,62}"
COLUMN_PATTERN = r"[A-Za-z_][A-Za-z0-9_]{0,126}"
_MOST_PROBLEMS = 20
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")

_IDS = {
    "org_id": (re.compile(ORG_PATTERN, re.ASCII), "1 to 64 letters, digits, _ or -, starting with a letter or digit"),
    "project_id": (re.compile(PROJECT_PATTERN, re.ASCII), "a UUID in lower case with hyphens"),
    "tick_id": (
        re.compile(TICK_PATTERN, re.ASCII),
        "1 to 100 letters, digits, _ . or -, starting with one of the first",
    ),
    "file_seq": (re.compile(SEQ_PATTERN, re.ASCII), "a whole number of at most six digits"),
    "sha256": (re.compile(SHA256_PATTERN, re.ASCII), "64 lower-case hex digits"),
    "table": (re.compile(TABLE_PATTERN, re.ASCII), "1 to 63 letters, digits or _, starting with a letter"),
    "column": (re.compile(COLUMN_PATTERN, re.ASCII), "1 to 127 letters, digits or _, not starting with a digit"),
}


class InvalidManifest(InvalidInput):
    """The tick cannot be committed as it is described. `error_class` is for programs, the words are for people."""

    def __init__(self, error_class: str, what: str, *, unit: str | None = None, problems: Sequence[str] = ()) -> None:
        shown = [*problems[:_MOST_PROBLEMS], *(["and more"] if len(problems) > _MOST_PROBLEMS else [])]
        super().__init__(what, unit=unit, problems=shown, next_step="correct the tick, then finalize it again.")
        self.error_class = error_class


class PartsDiffer(NamedTuple):
    """What an agent must put again: files that are not there, and files with other bytes than declared."""

    missing: tuple[int, ...]
    mismatched_sha: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to put."""
        return not self.missing and not self.mismatched_sha


class Append(NamedTuple):
    """The tick is next: it becomes `sequence`, after `prev_tick_id`."""

    sequence: int
    prev_tick_id: str | None


class TooEarly(NamedTuple):
    """The tick that it follows is not committed yet: the same call may succeed later."""

    waits_for: str


class Refused(NamedTuple):
    """The tick can never follow what it names."""

    reason: str


Place = Append | TooEarly | Refused


def is_id(kind: str, value: object) -> bool:
    """Whether a value may be an id of this kind (see the patterns above)."""
    pattern, _ = _IDS[kind]
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def check_id(kind: str, value: object) -> str:
    """The id itself, or `InvalidInput` with the words of its kind."""
    if not is_id(kind, value):
        raise InvalidInput(f"{kind} is refused.", problems=[f"{kind}: must be {_IDS[kind][1]}"])
    return str(value)


def next_in_chain(sequence: int, head: str | None, wanted_prev: str | None, prev_state: TickState | None) -> Place:
    """Where a tick goes in its project's chain.

    Args:
        sequence: Number of the last committed tick, 0 before the first.
        head: The last committed tick.
        wanted_prev: What the manifest says it follows; None takes whatever is last.
        prev_state: What is known of `wanted_prev`, None if nothing is.
    """
    if wanted_prev is None or wanted_prev == head:
        return Append(sequence + 1, head)
    if prev_state is TickState.COMMITTED:
        return Refused(f"{wanted_prev} is already followed by another tick; the last one is {head}")
    return TooEarly(wanted_prev)


def manifest_hash(body: Any) -> str:
    """One hash for one manifest, whatever its spacing and the order of its keys."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_storable(body: Any) -> bool:
    """Whether PostgreSQL's jsonb takes this JSON. It knows no NUL and no half of a pair; an endless number is none."""
    waiting = [body]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str):
            if "\x00" in one or _HALF_OF_A_PAIR.search(one):
                return False
        elif isinstance(one, float) and not math.isfinite(one):
            return False
    return True


def parse_manifest(body: Any, *, org_id: str, project_id: str, tick_id: str, limits: Limits) -> Manifest:
    """Read a manifest that was posted for a tick. Raises `InvalidManifest` that lists what is wrong with it."""
    unit = f"tick {tick_id}"
    if not isinstance(body, dict):
        raise InvalidManifest("InvalidManifest", "the manifest is not a JSON object.", unit=unit)
    if not is_storable(body):
        raise InvalidManifest(
            "InvalidManifest",
            "the manifest holds a NUL, half a surrogate pair, or a number that is too large.",
            unit=unit,
        )
    problems = _header_problems(body, org_id=org_id, project_id=project_id, tick_id=tick_id)
    tables = body.get("tables")
    if not isinstance(tables, list) or not tables:
        problems.append("tables: must be a list of one table or more")
        tables = []
    _refuse_too_many(tables, limits, unit)
    parsed = [_table(one, f"tables[{number}]", problems, limits) for number, one in enumerate(tables)]
    problems += _duplicates("table", (one.name.lower() for one in parsed if one))
    problems += _duplicates("file_seq", (part.file_seq for one in parsed if one for part in one.parts))
    if problems:
        raise InvalidManifest("InvalidManifest", "the manifest is refused.", unit=unit, problems=problems)
    manifest = Manifest(
        org_id=org_id,
        project_id=project_id,
        tick_id=tick_id,
        mode=Mode(body["mode"]),
        dt=body["dt"],
        tables=tuple(one for one in parsed if one),
        prev_tick_id=body.get("prev_tick_id"),
        sha256=manifest_hash(body),
        body=body,
    )
    _refuse_too_large(manifest, limits, unit)
    return manifest


def check_tables(manifest: Manifest, allowed: Sequence[str] | None) -> None:
    """Refuse tables that the project may not have. None allows every name."""
    unknown = [] if allowed is None else [table.name for table in manifest.tables if table.name not in allowed]
    if unknown:
        raise InvalidManifest(
            "TableNotAllowed",
            "the project may not have these tables.",
            unit=f"tick {manifest.tick_id}",
            problems=unknown,
        )


def compare_parts(manifest: Manifest, parts: Mapping[int, Part]) -> PartsDiffer:
    """What is missing or has other bytes than the manifest declares. Files that it does not name are ignored."""
    missing = [one.file_seq for one in manifest.parts if one.file_seq not in parts]
    differing = [
        one.file_seq for one in manifest.parts if one.file_seq in parts and parts[one.file_seq].sha256 != one.sha256
    ]
    return PartsDiffer(tuple(sorted(missing)), tuple(sorted(differing)))


def compare_declared(body: Mapping[str, Any] | None, parts: Mapping[int, Part]) -> PartsDiffer:
    """The same for a manifest that was remembered as it was posted; without one nothing is missing yet."""
    declared = {
        one["file_seq"]: one["sha256"] for table in (body or {}).get("tables", ()) for one in table.get("parquets", ())
    }
    missing = sorted(number for number in declared if number not in parts)
    differing = sorted(number for number, sha in declared.items() if number in parts and parts[number].sha256 != sha)
    return PartsDiffer(tuple(missing), tuple(differing))


def check_contents(manifest: Manifest, parts: Mapping[int, Part], limits: Limits) -> None:
    """Compare the manifest with what the files say about themselves. Raises `InvalidManifest`; reads nothing."""
    unit = f"tick {manifest.tick_id}"
    unreadable = [
        f"part {one.file_seq}: {parts[one.file_seq].problem}"
        for one in manifest.parts
        if not parts[one.file_seq].footer
    ]
    if unreadable:
        raise InvalidManifest("UnreadablePart", "some parts are no usable Parquet.", unit=unit, problems=unreadable)
    total = sum(footer.uncompressed_bytes for one in manifest.parts if (footer := parts[one.file_seq].footer))
    if total > limits.max_uncompressed_bytes:
        raise InvalidManifest(
            "TooLarge", f"the tick unpacks to {total} bytes, above {limits.max_uncompressed_bytes}.", unit=unit
        )
    problems = [problem for table in manifest.tables for problem in _contents(table, parts)]
    if problems:
        raise InvalidManifest("SchemaMismatch", "parts differ from the manifest.", unit=unit, problems=problems)


def evolve(known: Sequence[Column], table: TableSpec, *, unit: str | None = None) -> tuple[Column, ...]:
    """The columns of a bronze table once this tick is in it: what it had, then what is new.

    Raises:
        InvalidManifest: A known column would change its type. A narrower type is taken and widened.
    """
    have = {column.name.lower(): column for column in known}
    problems = [
        f"{table.name}.{column.name}: is {have[column.name.lower()].type} and cannot become {column.type}"
        for column in table.columns
        if column.name.lower() in have and not types.fits(column.type, have[column.name.lower()].type)
    ]
    if problems:
        raise InvalidManifest("SchemaConflict", "columns may be added, not changed.", unit=unit, problems=problems)
    return (*known, *(column for column in table.columns if column.name.lower() not in have))


def _header_problems(body: Mapping[str, Any], **expected: str) -> list[str]:
    problems = [
        f"{name}: must be {value!r}, as in the address and the key"
        for name, value in expected.items()
        if body.get(name) != value
    ]
    if str(body.get("schema_version", "")) != SCHEMA_VERSION:
        problems.append(f"schema_version: must be {SCHEMA_VERSION!r}")
    previous = body.get("prev_tick_id")
    if previous is not None and (not is_id("tick_id", previous) or previous == expected["tick_id"]):
        problems.append("prev_tick_id: must be the id of another tick, or be left out")
    if body.get("mode") not in tuple(Mode):
        problems.append("mode: must be delta or full")
    if not _is_day(body.get("dt")):
        problems.append("dt: must be a day as YYYYMMDD")
    return problems


def _is_day(value: object) -> bool:
    if not isinstance(value, str) or re.fullmatch(r"[0-9]{8}", value) is None:
        return False
    try:
        datetime.strptime(value, "%Y%m%d")  # noqa: DTZ007  # a calendar day has no zone
    except ValueError:
        return False
    return True


def _refuse_too_many(tables: Sequence[Any], limits: Limits, unit: str) -> None:
    files = sum(
        len(one["parquets"]) for one in tables if isinstance(one, dict) and isinstance(one.get("parquets"), list)
    )
    if len(tables) > limits.max_tables or files > limits.max_parts:
        raise InvalidManifest(
            "TooManyParts",
            f"{len(tables)} tables and {files} parts; at most {limits.max_tables} and {limits.max_parts} are allowed.",
            unit=unit,
        )


def _refuse_too_large(manifest: Manifest, limits: Limits, unit: str) -> None:
    size = sum(part.bytes for part in manifest.parts)
    if size > limits.max_tick_bytes or manifest.rows > limits.max_tick_rows:
        raise InvalidManifest(
            "TooLarge",
            f"{size} bytes and {manifest.rows} rows; at most {limits.max_tick_bytes} and {limits.max_tick_rows}.",
            unit=unit,
        )


def _table(body: Any, where: str, problems: list[str], limits: Limits) -> TableSpec | None:
    if not isinstance(body, dict):
        problems.append(f"{where}: must be an object")
        return None
    before = len(problems)
    name = body.get("name")
    if not is_id("table", name):
        problems.append(f"{where}.name: must be {_IDS['table'][1]}")
    columns = _columns(body.get("columns"), where, problems, limits)
    key = body.get("primary_key")
    names = {column.name for column in columns}
    if not isinstance(key, list) or not key or not all(isinstance(one, str) and one in names for one in key):
        problems.append(f"{where}.primary_key: must name one or more of the table's columns")
    elif len(set(key)) != len(key):
        problems.append(f"{where}.primary_key: names a column twice")
    deleted = body.get("deleted_column")
    in_key = isinstance(key, list) and deleted in key
    if deleted is not None and (in_key or Column(deleted, "boolean") not in columns):
        problems.append(f"{where}.deleted_column: must name a boolean column outside the primary key, or be left out")
    parts = _parts(body.get("parquets"), where, problems)
    if len(problems) > before:
        return None
    return TableSpec(str(name), tuple(key or ()), tuple(columns), tuple(parts), deleted)


def _columns(body: Any, where: str, problems: list[str], limits: Limits) -> list[Column]:
    if not isinstance(body, list) or not 1 <= len(body) <= limits.max_columns:
        problems.append(f"{where}.columns: must be a list of 1 to {limits.max_columns} columns")
        return []
    found: list[Column] = []
    for number, one in enumerate(body):
        name, kind = (one.get("name"), one.get("type")) if isinstance(one, dict) else (None, None)
        spelled = types.canonical(kind) if isinstance(kind, str) and len(kind) <= 100 else None
        if not is_id("column", name):
            problems.append(f"{where}.columns[{number}].name: must be {_IDS['column'][1]}")
        elif str(name).lower() in (*OWN_COLUMNS, *SILVER_COLUMNS):
            problems.append(f"{where}.columns[{number}].name: {name} is a column of the platform itself")
        elif spelled is None:
            problems.append(f"{where}.columns[{number}].type: {str(kind)[:40]!r} is not a type that bronze takes")
        else:
            found.append(Column(str(name), spelled))
    problems += [f"{where}.{problem}" for problem in _duplicates("column", (one.name.lower() for one in found))]
    return found


def _parts(body: Any, where: str, problems: list[str]) -> list[PartSpec]:
    if not isinstance(body, list) or not body:
        problems.append(f"{where}.parquets: must be a list of one part or more; send an empty file for no rows")
        return []
    found: list[PartSpec] = []
    for number, one in enumerate(body):
        place = f"{where}.parquets[{number}]"
        if not isinstance(one, dict):
            problems.append(f"{place}: must be an object")
            continue
        wrong = [name for name, good in _PART_FIELDS.items() if not good(one.get(name))]
        problems += [f"{place}.{name}: is missing or cannot be used" for name in wrong]
        if not wrong:
            found.append(PartSpec(one["file_seq"], one["sha256"], one["bytes"], one["rows"]))
    return found


def _count(most: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


_PART_FIELDS: Mapping[str, Callable[[object], bool]] = {
    "file_seq": _count(999_999),
    "sha256": lambda value: is_id("sha256", value),
    "bytes": _count(2**53),
    "rows": _count(2**53),
}


def _duplicates(kind: str, values: Iterable[object]) -> list[str]:
    seen: set[object] = set()
    twice = {value for value in values if value in seen or seen.add(value)}  # type: ignore[func-returns-value]
    return [f"{kind} {value}: is used twice" for value in sorted(twice, key=str)]


def _contents(table: TableSpec, parts: Mapping[int, Part]) -> list[str]:
    declared = {column.name: column.type for column in table.columns}
    problems = []
    for spec in table.parts:
        part = parts[spec.file_seq]
        footer = part.footer
        if footer is None:
            continue
        where = f"part {spec.file_seq} of {table.name}"
        if part.bytes != spec.bytes:
            problems.append(f"{where}: has {part.bytes} bytes, not {spec.bytes}")
        if footer.rows != spec.rows:
            problems.append(f"{where}: has {footer.rows} rows, not {spec.rows}")
        stored = {column.name: column.type for column in footer.columns}
        often = Counter(column.name for column in footer.columns)
        problems += [f"{where}: has column {name} {often[name]} times" for name in declared if often[name] > 1]
        problems += [f"{where}: lacks column {name}" for name in declared if name not in stored]
        problems += [
            f"{where}: has a column {name[:80]!r} that is not declared" for name in stored if name not in declared
        ]
        problems += [
            f"{where}: column {name} holds {stored[name]}, not {kind}"
            for name, kind in declared.items()
            if name in stored and not types.fits(stored[name], kind)
        ]
    return problems
