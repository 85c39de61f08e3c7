"""The Redshift statements, read by a parser: what Redshift forbids inside a transaction must not be in one."""

from __future__ import annotations

import json
import re

import pytest
import sqlglot
from sqlglot import exp

from lockstep.kernel.errors import InvalidInput
from lockstep.warehouse.dialect import Change
from lockstep.warehouse.model import Column, ColumnType, Table
from lockstep.warehouse.redshift import RedshiftDialect, Sources, copy_manifest

TABLE = Table(
    "study__v",
    (
        Column("id", ColumnType.TEXT, 20),
        Column("modified_date__v", ColumnType.TIMESTAMP),
        Column("n__c", ColumnType.NUMBER),
    ),
)
CHANGE = Change(TABLE, ("id", "modified_date__v", "n__c"), upserts=3, deletes=1)
SOURCES = {"study__v": Sources("s3://b/u.manifest", "s3://b/d.manifest")}
STEPS = RedshiftDialect().window("vault_1", [CHANGE], SOURCES, {})
# TRUNCATE and VACUUM commit; APPEND and a change of type refuse a transaction; the rest loses rows.
FORBIDDEN = re.compile(r"\b(TRUNCATE|VACUUM|APPEND|ALTER|ANALYZE|TRUNCATECOLUMNS|ACCEPTINVCHARS|FILLRECORD|MAXERROR)\b")


def _texts() -> list[str]:
    return [step.sql for step in STEPS]


def test_a_window_is_one_transaction_and_takes_its_lock_before_it_reads():
    """Guards the snapshot: it is taken at the first read, so a lock that comes later proves nothing."""
    texts = _texts()
    assert (texts[0], texts[-1]) == ("BEGIN", "COMMIT")
    assert texts[1].startswith("LOCK TABLE windows.apply_control")
    assert not {"BEGIN", "COMMIT"} & set(texts[1:-1])


@pytest.mark.parametrize("text", _texts())
def test_no_statement_of_a_window_is_forbidden_in_a_transaction(text: str):
    bare = re.sub(r'"[^"]*"', "", text)
    assert FORBIDDEN.search(bare.upper()) is None


@pytest.mark.parametrize("text", [text for text in _texts() if not text.startswith(("COPY", "LOCK"))])
def test_every_statement_is_redshift_to_a_parser(text: str):
    (parsed,) = sqlglot.parse(re.sub(r"%\(\w+\)s", "'x'", text), read="redshift")
    assert not isinstance(parsed, exp.Command), "the parser gave up"


def test_a_merge_has_one_branch_of_each_kind_and_a_plain_table_as_its_source():
    (merge,) = (sqlglot.parse_one(text, read="redshift") for text in _texts() if text.startswith("MERGE"))
    assert isinstance(merge, exp.Merge)
    whens = list(merge.find_all(exp.When))
    assert [bool(when.args["matched"]) for when in whens] == [True, False]
    assert not any(when.args.get("condition") for when in whens)
    assert isinstance(merge.args["using"], exp.Table)


def test_tables_that_are_created_or_dropped_are_temporary_ones():
    """Guards readers: DDL on a live table would block them until the commit."""
    made = {text.split('"')[1] for text in _texts() if text.startswith("CREATE TEMP TABLE")}
    dropped = {text.split('"')[1] for text in _texts() if text.startswith("DROP TABLE")}
    assert made == dropped
    assert not any(text.startswith("CREATE TABLE") for text in _texts())


def test_every_copy_names_a_manifest_whose_files_are_mandatory():
    """Guards against a COPY by prefix, which also loads x.csv.bak, and against a file that is silently absent."""
    copies = [text for text in _texts() if text.startswith("COPY")]
    assert len(copies) == 2
    assert all(" MANIFEST " in text for text in copies)
    assert json.loads(copy_manifest(["s3://b/a.csv"])) == {"entries": [{"url": "s3://b/a.csv", "mandatory": True}]}


def test_the_watermark_moves_last_under_fence_and_epoch():
    advance = STEPS[-2]
    assert advance.expect == 1
    assert all(word in advance.sql for word in ("watermark = %(start)s", "fence = %(fence)s", "epoch = %(epoch)s"))


def test_text_is_counted_in_bytes_and_numbers_keep_their_fraction():
    dialect = RedshiftDialect()
    assert dialect.sql_type(Column("a", ColumnType.TEXT, 128)) == "VARCHAR(512)"
    assert dialect.sql_type(Column("a", ColumnType.TEXT, 64000)) == "VARCHAR(65535)"
    assert dialect.sql_type(Column("a", ColumnType.NUMBER)) == "NUMERIC(38,10)"


def test_text_is_widened_and_never_narrowed():
    dialect = RedshiftDialect()
    assert dialect.widen("s", "t", Column("a", ColumnType.TEXT, 100), 200) == (
        'ALTER TABLE "s"."t" ALTER COLUMN "a" TYPE VARCHAR(400)'
    )
    assert dialect.widen("s", "t", Column("a", ColumnType.TEXT, 10), 200) is None


def test_an_address_that_closes_its_quotes_is_refused():
    with pytest.raises(InvalidInput):
        RedshiftDialect().copy("t", ["id"], "s3://b/' x")
