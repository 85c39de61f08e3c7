"""The Redshift statements run on PostgreSQL, with COPY alone replaced by a loader of the same manifest."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from lockstep.warehouse.dialect import Change, Step
from lockstep.warehouse.evolve import evolve
from lockstep.warehouse.model import Column, ColumnType, Table
from lockstep.warehouse.redshift import NULL_MARK, RedshiftDialect, Sources, copy_manifest
from tests.windows_lane import LaneUnderTest, new_vault

pytestmark = pytest.mark.stack

START = datetime(2026, 3, 1, tzinfo=UTC)
STEP = timedelta(minutes=15)
TABLE = Table(
    "study__v",
    (
        Column("id", ColumnType.TEXT, 20),
        Column("modified_date__v", ColumnType.TIMESTAMP),
        Column("name__v", ColumnType.TEXT, 40),
        Column("n__c", ColumnType.NUMBER),
    ),
)
_COPY = re.compile(r"COPY (?P<table>\S+) \((?P<columns>[^)]*)\) FROM '(?P<manifest>[^']+)'")

Row = tuple[str | None, ...]


class Loader:
    """Runs steps as the worker of a Redshift warehouse would; knows files by address, as COPY does."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.files: dict[str, bytes] = {}

    def put(self, name: str, rows: list[Row]) -> str:
        text = io.StringIO()
        csv.writer(text).writerows([NULL_MARK if value is None else value for value in row] for row in rows)
        self.files[f"s3://b/{name}.csv"] = text.getvalue().encode()
        self.files[f"s3://b/{name}.manifest"] = copy_manifest([f"s3://b/{name}.csv"])
        return f"s3://b/{name}.manifest"

    def run(self, steps: list[Step]) -> None:
        try:
            for step in steps:
                self._one(step)
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise

    def _one(self, step: Step) -> None:
        if match := _COPY.match(step.sql):
            self._copy(match)
            return
        cursor = self.connection.execute(step.sql.encode(), step.parameters or None)
        found = cursor.fetchone()[0] if step.sql.startswith("SELECT") else cursor.rowcount
        assert step.expect is None or found == step.expect, f"{step.what}: {found}"

    def _copy(self, match: re.Match[str]) -> None:
        entries = json.loads(self.files[match["manifest"]])["entries"]
        statement = f"COPY {match['table']} ({match['columns']}) FROM STDIN (FORMAT csv, NULL '{NULL_MARK}')"
        with self.connection.cursor().copy(statement.encode()) as copy:
            for entry in entries:
                assert entry["mandatory"]
                copy.write(self.files[entry["url"]])


@pytest.fixture
def loader(warehouse: str) -> Any:
    with psycopg.connect(warehouse, autocommit=True, options="-c timezone=UTC") as connection:
        yield Loader(connection)


@pytest.fixture
def vault(loader: Loader, new_lane: Callable[..., LaneUnderTest]) -> str:
    vault = new_vault()
    new_lane().store().open_lane(vault, 1, START, "test")
    loader.connection.execute("UPDATE windows.apply_control SET fence = 7 WHERE vault = %s", (vault,))
    evolve(loader.connection, RedshiftDialect(), f"vault_{vault}", [TABLE])
    return vault


def _ledger(vault: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    start = START + number * STEP
    values = {"vault": vault, "epoch": 1, "start": start, "stop": start + STEP, "load_id": f"l{number}", "fence": 7}
    values |= {"kind": "incremental", "applied_at": start}
    return values | {"rows": 0, "counts": "{}", "sha256": "x"} | changes


def _steps(loader: Loader, vault: str, upserts: list[Row], deletes: list[Row], **ledger: Any) -> list[Step]:
    change = Change(TABLE, tuple(TABLE.by_name), upserts=len(upserts), deletes=len(deletes))
    ups = loader.put("u", [(*row, str(number)) for number, row in enumerate(upserts)])
    downs = loader.put("d", [(*row, str(number)) for number, row in enumerate(deletes)]) if deletes else None
    return RedshiftDialect().window(
        f"vault_{vault}", [change], {"study__v": Sources(ups, downs)}, _ledger(vault, **ledger)
    )


def _rows(loader: Loader, vault: str) -> dict[str, tuple[Any, ...]]:
    query = f'SELECT id, name__v, n__c::text FROM "vault_{vault}".study__v'  # noqa: S608
    return {row[0]: row[1:] for row in loader.connection.execute(query)}


T1, T2 = "2026-03-01T00:01:00.000Z", "2026-03-01T00:02:00.000Z"


def test_deletes_merge_ledger_and_watermark_commit_together(loader: Loader, vault: str):
    loader.run(_steps(loader, vault, [("a", T1, "first", "1.5"), ("b", T1, "", None), ("c", T1, None, "3")], []))
    steps = _steps(loader, vault, [("a", T2, "again", "2.0000000001"), ("d", T2, "x", "4")], [("b", T2)], number=1)
    loader.run(steps)
    rows = _rows(loader, vault)
    assert set(rows) == {"a", "c", "d"}
    assert rows["a"] == ("again", "2.0000000001")
    assert rows["c"][0] is None
    (mark,) = loader.connection.execute("SELECT watermark FROM windows.apply_control WHERE vault = %s", (vault,))
    assert mark == (START + 2 * STEP,)


def test_a_doubled_key_and_a_later_delete_follow_the_same_rules_as_on_postgres(loader: Loader, vault: str):
    """Guards MERGE, which refuses or doubles rows whose key comes twice."""
    upserts = [("a", T1, "first", None), ("a", T1, "last", None), ("b", T1, "gone", None), ("c", T2, "stays", None)]
    loader.run(_steps(loader, vault, upserts, [("b", T2), ("c", T1)]))
    assert {key: row[0] for key, row in _rows(loader, vault).items()} == {"a": "last", "c": "stays"}


@pytest.mark.parametrize("wrong", [{"fence": 6}, {"epoch": 2}, {"number": 1}])
def test_a_stale_fence_epoch_or_watermark_undoes_the_whole_window(loader: Loader, vault: str, wrong: dict[str, Any]):
    with pytest.raises(AssertionError, match="watermark, fence and epoch"):
        loader.run(_steps(loader, vault, [("a", T1, "x", None)], [], **wrong))
    assert _rows(loader, vault) == {}
    found = loader.connection.execute("SELECT 1 FROM windows.applied_window WHERE vault = %s", (vault,)).fetchall()
    assert found == []


def test_fewer_rows_than_the_manifest_says_undo_the_whole_window(loader: Loader, vault: str):
    steps = _steps(loader, vault, [("a", T1, "x", None), ("b", T1, "y", None)], [])
    loader.put("u", [("a", T1, "x", None, "0")])
    with pytest.raises(AssertionError, match="rows in"):
        loader.run(steps)
    assert _rows(loader, vault) == {}


def test_a_new_column_and_wider_text_come_before_the_window_and_keep_rows(loader: Loader, vault: str):
    loader.run(_steps(loader, vault, [("a", T1, "x", None)], []))
    wider = Table("study__v", (Column("id"), Column("name__v", ColumnType.TEXT, 400), Column("new__c")))
    done = evolve(loader.connection, RedshiftDialect(), f"vault_{vault}", [wider])
    assert [statement.split()[3] for statement in done] == ["ALTER", "ALTER", "ADD"]
    assert evolve(loader.connection, RedshiftDialect(), f"vault_{vault}", [wider]) == []
    assert set(_rows(loader, vault)) == {"a"}
