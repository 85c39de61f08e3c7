"""The SQL for Redshift, which cannot run here: read by a parser for what Redshift refuses or commits by itself."""

from __future__ import annotations

from typing import Any

import pytest
import sqlglot
from sqlglot import exp

from lockstep.idempotency import redshift
from lockstep.idempotency.overwrite import File
from lockstep.idempotency.transactional import Key
from lockstep.kernel.errors import InvalidInput

ROLE = "arn:aws:iam::123456789012:role/loader"


def make(**changes: Any) -> redshift.Plan:
    wanted: dict[str, Any] = {
        "target": ("public", "visits"),
        "columns": ("id", "day"),
        "key": Key("visits", "2026-03-01"),
        "run": "r1",
        "load": redshift.Load(2, "2:ff", "s3://bucket/stage/manifest"),
        "unit_column": "day",
        "iam_role": ROLE,
    }
    wanted |= changes
    return redshift.plan(wanted.pop("target"), wanted.pop("columns"), wanted.pop("key"), **wanted)


def problems(statements: list[str]) -> list[str]:
    """What commits the surrounding transaction, cannot run in one, or is not Redshift."""
    found = []
    for text in statements:
        tree = sqlglot.parse_one(text.replace("%s", "'x'"), dialect="redshift")
        words = text.upper().split()
        if isinstance(tree, exp.TruncateTable) or words[0] in {"TRUNCATE", "VACUUM"}:
            found.append(f"commits or refuses a transaction: {text}")
        if words[:2] == ["ALTER", "TABLE"] and "APPEND" in words:
            found.append(f"commits the transaction: {text}")
        if tree.find(exp.OnConflict) or tree.find(exp.Merge):
            found.append(f"not known to Redshift in this form: {text}")
    return found


def test_nothing_between_begin_and_commit_ends_the_transaction_early():
    """Guards one transaction for data and ledger: Redshift's TRUNCATE would publish the delete alone."""
    texts = [statement.text for statement in make().all()]
    assert (texts[0], texts[-1]) == ("BEGIN", "COMMIT")
    assert texts.count("COMMIT") == 1
    assert problems(texts[1:-1]) == []


@pytest.mark.parametrize(
    "text",
    [
        "TRUNCATE TABLE visits",
        "VACUUM visits",
        "ALTER TABLE visits APPEND FROM stage",
        "INSERT INTO ledger VALUES (1) ON CONFLICT DO NOTHING",
    ],
)
def test_the_linter_itself_finds_what_redshift_forbids(text: str):
    assert problems([text])


def test_the_ledger_is_locked_before_it_is_read_and_written_after_the_rows():
    """Guards against two drivers at once: Redshift enforces no primary key that would stop the second."""
    texts = [statement.text for statement in make().all()]
    places = [next(i for i, t in enumerate(texts) if t.startswith(start)) for start in ("LOCK", "SELECT", "INSERT")]
    assert places == sorted(places)
    assert "idempotency.ledger" in texts[-2]


def test_the_ledger_of_redshift_has_the_columns_that_the_plan_uses():
    tree = sqlglot.parse_one(redshift.CREATE_LEDGER, dialect="redshift")
    columns = {column.name for column in tree.find_all(exp.ColumnDef)}
    assert columns == {"pipeline", "unit", "generation", "run", "content", "row_count", "applied_at"}
    assert problems([redshift.CREATE_LEDGER]) == []


def test_a_manifest_names_every_file_with_its_size():
    """Guards half a load: without `mandatory` COPY passes over a missing file."""
    assert redshift.manifest("b", [File("k/1", 10, "e")]) == {
        "entries": [{"url": "s3://b/k/1", "mandatory": True, "meta": {"content_length": 10}}]
    }


def test_a_unit_without_rows_is_cleared_without_copy():
    texts = [statement.text for statement in make(load=redshift.Load(0, "0:0", None)).all()]
    assert not [text for text in texts if text.startswith("COPY")]
    assert [text for text in texts if text.startswith("DELETE")]


@pytest.mark.parametrize("start", ["LOCK", "SELECT generation", "COPY", "INSERT"])
def test_a_statement_that_fails_leaves_no_transaction_open(start: str):
    """Guards the next try on the same connection: Redshift refuses everything in a transaction that failed."""
    asked: list[str] = []

    def ask(statement: redshift.Statement) -> Any:
        asked.append(statement.text)
        if statement.text.startswith(start):
            raise ConnectionError("the statement failed")
        return (2, 2) if statement.text.startswith("SELECT COUNT") else None

    with pytest.raises(ConnectionError, match="the statement failed"):
        redshift.execute(ask, make())
    assert asked[-1] == "ROLLBACK"
    assert "COMMIT" not in asked


@pytest.mark.parametrize(
    "changes",
    [
        {"target": ('public"; DROP TABLE x; --', "visits")},
        {"columns": ("Id",)},
        {"unit_column": "a b"},
        {"load": redshift.Load(1, "1:1", "s3://bucket/x' IAM_ROLE")},
        {"iam_role": "role'"},
    ],
)
def test_what_could_leave_its_quotes_is_refused(changes: dict[str, Any]):
    with pytest.raises(InvalidInput):
        make(**changes)
