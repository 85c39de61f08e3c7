"""Ticks by rule: ids, manifests, parts, chains, types. No stack."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import rules, types
from lockstep.ticks.model import Column, Footer, Limits, Mode, Part, TickMessage, TickState
from lockstep.ticks.rules import Append, InvalidManifest, Refused, TooEarly
from tests.ticks_fixtures import manifest, people, table

PROJECT = "0192f0c4-7f3a-7c11-9d6e-0d5b8a3f4e21"
TICK = "20260507T120000__abc"
NOW = datetime(2026, 5, 7, tzinfo=UTC)
BODY = people(3)


def _body(**more: Any) -> dict[str, Any]:
    return manifest("acme", PROJECT, TICK, [table("people", {0: BODY})], **more)


def _parse(body: Any, limits: Limits | None = None) -> Any:
    return rules.parse_manifest(body, org_id="acme", project_id=PROJECT, tick_id=TICK, limits=limits or Limits())


def _part(body: dict[str, Any], columns: tuple[Column, ...], number: int = 0, **more: Any) -> Part:
    one = next(one for one in body["tables"][0]["parquets"] if one["file_seq"] == number)
    footer = Footer(one["rows"], 100, 1, columns)
    fields: dict[str, Any] = {"sha256": one["sha256"], "bytes": one["bytes"], "footer": footer, "problem": None} | more
    return Part(file_seq=number, object_key="k", received_at=NOW, **fields)


def test_a_good_manifest_is_read_whole():
    found = _parse(_body(prev_tick_id="before", mode="full"))
    assert (found.mode, found.dt, found.prev_tick_id) == (Mode.FULL, "20260507", "before")
    assert found.tables[0].columns == (Column("id", "bigint"), Column("name", "string"))
    assert (found.rows, [part.file_seq for part in found.parts]) == (3, [0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": "2.0"}, "schema_version"),
        ({"org_id": "other"}, "org_id"),
        ({"project_id": "0192f0c4-7f3a-7c11-9d6e-0d5b8a3f4e22"}, "project_id"),
        ({"tick_id": "other"}, "tick_id"),
        ({"prev_tick_id": TICK}, "prev_tick_id"),
        ({"prev_tick_id": "../x"}, "prev_tick_id"),
        ({"mode": "append"}, "mode"),
        ({"mode": {}}, "mode"),
        ({"dt": "20260231"}, "dt"),
        ({"dt": 20260507}, "dt"),
        ({"tables": []}, "tables"),
        ({"tables": "people"}, "tables"),
        ({"tables": [None]}, "tables[0]"),
    ],
)
def test_a_bad_head_is_refused_by_name(change: dict[str, Any], words: str):
    with pytest.raises(InvalidManifest) as caught:
        _parse({**_body(), **change})
    assert words in str(caught.value)


@pytest.mark.parametrize("note", ["a\x00b", "\ud800", float("inf"), {"deep": [{"\udfff": 1}]}, [[["\x00"]]]])
def test_a_manifest_that_cannot_be_kept_is_refused(note: Any):
    """Guards the answer: fields that nobody knows are kept too, and PostgreSQL refuses these after all other checks."""
    with pytest.raises(InvalidManifest, match="NUL") as caught:
        _parse({**_body(), "note": note})
    assert caught.value.error_class == "InvalidManifest"


def test_a_manifest_may_hold_more_than_is_asked_for():
    assert _parse({**_body(), "note": ["\\u0000", "\U0001f600", 1.5, None, True, {"x": 10**300}]}).rows == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), "peo`ple"),
        (("name",), "../people"),
        (("name",), "1people"),
        (("primary_key",), []),
        (("primary_key",), ["nope"]),
        (("primary_key",), ["id", "id"]),
        (("columns",), []),
        (("columns", 0, "name"), "id; DROP TABLE x"),
        (("columns", 0, "name"), "_tick_id"),
        (("columns", 0, "type"), "array<int>"),
        (("columns", 0, "type"), None),
        (("columns", 1, "name"), "ID"),
        (("deleted_column",), "nope"),
        (("deleted_column",), "name"),
        (("deleted_column",), ["id"]),
        (("deleted_column",), False),
        (("parquets",), []),
        (("parquets", 0, "file_seq"), -1),
        (("parquets", 0, "file_seq"), True),
        (("parquets", 0, "sha256"), "ABC"),
        (("parquets", 0, "bytes"), "5"),
        (("parquets", 0, "rows"), 1.5),
    ],
)
def test_a_bad_table_is_refused(path: tuple[Any, ...], value: Any):
    body = copy.deepcopy(_body())
    place: Any = body["tables"][0]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(InvalidManifest) as caught:
        _parse(body)
    assert caught.value.error_class == "InvalidManifest"


def test_the_column_of_deletes_is_a_boolean_outside_the_key():
    columns = [{"name": "id", "type": "bigint"}, {"name": "gone", "type": "bool"}]
    good = table("people", {0: BODY}, columns=columns) | {"deleted_column": "gone"}
    (found,) = _parse(manifest("acme", PROJECT, TICK, [good])).tables
    assert found.deleted_column == "gone"
    for wrong in ({"primary_key": ["id", "gone"]}, {"primary_key": 5}, {"deleted_column": "Gone"}):
        with pytest.raises(InvalidManifest):
            _parse(manifest("acme", PROJECT, TICK, [good | wrong]))


def test_names_and_numbers_are_unique_in_a_tick():
    twice = table("people", {0: BODY})
    with pytest.raises(InvalidManifest, match="refused") as caught:
        _parse(manifest("acme", PROJECT, TICK, [twice, {**twice, "name": "People"}]))
    assert {"table people: is used twice", "file_seq 0: is used twice"} <= set(caught.value.problems)


def test_ten_thousand_parts_are_refused_without_being_looked_at():
    body = _body()
    body["tables"][0]["parquets"] = [None] * 10_000
    with pytest.raises(InvalidManifest) as caught:
        _parse(body)
    assert caught.value.error_class == "TooManyParts"


def test_a_tick_above_the_size_limit_is_refused():
    with pytest.raises(InvalidManifest) as caught:
        _parse(_body(), Limits(max_tick_rows=2))
    assert caught.value.error_class == "TooLarge"


def test_the_hash_does_not_depend_on_the_order_of_keys():
    body = _body()
    assert rules.manifest_hash(body) == rules.manifest_hash(dict(reversed(body.items())))
    assert rules.manifest_hash(body) != rules.manifest_hash({**body, "dt": "20260508"})


def test_missing_and_other_bytes_are_told_apart():
    body = manifest("acme", PROJECT, TICK, [table("people", {0: people(1), 1: people(2), 2: people(3)})])
    columns = (Column("id", "bigint"), Column("name", "string"))
    parts = {0: _part(body, columns), 2: _part(body, columns, 2, sha256="f" * 64)}
    found = rules.compare_parts(_parse(body), parts)
    assert (found.missing, found.mismatched_sha) == ((1,), (2,))
    assert rules.compare_declared(body, parts) == found
    assert rules.compare_declared(None, parts).is_complete


@pytest.mark.parametrize(
    ("columns", "more", "error_class"),
    [
        ((Column("id", "string"), Column("name", "string")), {}, "SchemaMismatch"),
        ((Column("id", "bigint"),), {}, "SchemaMismatch"),
        ((Column("id", "bigint"), Column("name", "string"), Column("x", "int")), {}, "SchemaMismatch"),
        ((Column("id", "bigint"), Column("name", "string"), Column("id", "bigint")), {}, "SchemaMismatch"),
        ((Column("id", "bigint"), Column("name", "string")), {"bytes": 1}, "SchemaMismatch"),
        ((), {"footer": None, "problem": "it is no Parquet file"}, "UnreadablePart"),
    ],
)
def test_parts_that_differ_from_the_manifest_are_refused(columns: Any, more: dict[str, Any], error_class: str):
    body = _body()
    with pytest.raises(InvalidManifest) as caught:
        rules.check_contents(_parse(body), {0: _part(body, columns, **more)}, Limits())
    assert caught.value.error_class == error_class


def test_a_part_that_unpacks_too_far_is_refused():
    body = _body()
    part = _part(body, (Column("id", "int"), Column("name", "string")))
    rules.check_contents(_parse(body), {0: part}, Limits())
    with pytest.raises(InvalidManifest) as caught:
        rules.check_contents(_parse(body), {0: part}, Limits(max_uncompressed_bytes=99))
    assert caught.value.error_class == "TooLarge"


def test_columns_may_be_added_and_never_changed():
    spec = _parse(_body()).tables[0]
    known = (Column("ID", "bigint"), Column("old", "date"))
    assert rules.evolve(known, spec) == (*known, Column("name", "string"))
    with pytest.raises(InvalidManifest) as caught:
        rules.evolve((Column("id", "int"),), spec)
    assert caught.value.error_class == "SchemaConflict"


def test_only_allowed_tables_are_taken():
    found = _parse(_body())
    rules.check_tables(found, None)
    rules.check_tables(found, ("people", "orders"))
    with pytest.raises(InvalidManifest):
        rules.check_tables(found, ("orders",))


@pytest.mark.parametrize(
    ("wanted", "state", "expected"),
    [
        (None, None, Append(4, "c")),
        ("c", TickState.COMMITTED, Append(4, "c")),
        ("b", TickState.COMMITTED, Refused),
        ("d", TickState.UPLOADING, TooEarly("d")),
        ("d", None, TooEarly("d")),
    ],
)
def test_a_tick_goes_where_its_chain_says(wanted: str | None, state: TickState | None, expected: Any):
    found = rules.next_in_chain(3, "c", wanted, state)
    assert isinstance(found, expected) if isinstance(expected, type) else found == expected


def test_the_first_tick_needs_no_predecessor():
    assert rules.next_in_chain(0, None, None, None) == Append(1, None)
    assert rules.next_in_chain(0, None, "gone", None) == TooEarly("gone")


@pytest.mark.parametrize(
    "bad", ["", "..", "../etc/passwd", "a/b", "a\\b", "a b", "\x00", "ä", ".hidden", "-x", "x" * 128, "a\n", None, 5]
)
def test_no_id_leaves_its_folder(bad: object):
    for kind in ("tick_id", "project_id", "org_id", "table", "column", "file_seq", "sha256"):
        assert not rules.is_id(kind, bad)
        with pytest.raises(InvalidInput):
            rules.check_id(kind, bad)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("INT64", "bigint"),
        ("varchar(20)", "string"),
        ("DECIMAL(10, 2)", "decimal(10,2)"),
        ("decimal(39,0)", None),
        ("timestamp[us, tz=UTC]", "timestamp"),
        ("timestamp[ns]", None),
        ("struct<a int>", None),
        ("double precision", "double"),
    ],
)
def test_types_have_one_spelling(name: str, expected: str | None):
    assert types.canonical(name) == expected


@pytest.mark.parametrize(
    ("stored", "wanted", "good"),
    [
        ("int", "bigint", True),
        ("bigint", "int", False),
        ("float", "double", True),
        ("double", "decimal(10,2)", False),
        ("decimal(10,2)", "decimal(12,2)", True),
        ("decimal(10,2)", "decimal(10,4)", False),
        ("timestamp_ntz", "timestamp", True),
        ("null", "decimal(3,1)", True),
        ("string", "binary", False),
    ],
)
def test_a_value_is_widened_and_never_cut(stored: str, wanted: str, good: bool):
    assert types.fits(stored, wanted) is good


def test_a_message_has_every_field_of_the_schema_and_reads_back():
    message = TickMessage("acme", PROJECT, TICK, Mode.DELTA, "20260507", "bronze/p/t/_delta_log/0.json", "e", NOW)
    body = message.render()
    assert set(body) == {
        "schema_version",
        "org_id",
        "project_id",
        "tick_id",
        "mode",
        "dt",
        "bronze_db_key",
        "bronze_db_etag",
        "emitted_at",
    }
    assert body["schema_version"] == "1.0"
    assert TickMessage.parse({**body, "later": "field"}) == message


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"schema_version": "1.0"}'])
def test_a_bad_message_lists_its_problems(body: str):
    with pytest.raises(InvalidInput) as caught:
        TickMessage.parse(body)
    assert caught.value.problems
