"""The merge contract and its SQL text, without a database."""

from __future__ import annotations

import pytest
import sqlglot
from sqlglot import exp

from lockstep.idempotency import merger
from lockstep.idempotency.merger import Contract, Deletes, Duplicates
from lockstep.kernel.errors import InvalidInput

HARD = Contract(keys=("id",), values=("v",), order="seq", flag="gone")
SOFT = Contract(keys=("id", "kind"), values=("v",), order="seq", flag="gone", deletes=Deletes.SOFT)
PLAIN = Contract(keys=("id",), values=("v",))


def redshift(contract: Contract) -> list[str]:
    tombstones = "dw.graves" if contract.needs_tombstones else None
    return merger.redshift_statements(contract, target="dw.devices", source="staged", tombstones=tombstones)


@pytest.mark.parametrize("contract", [HARD, SOFT, PLAIN])
def test_the_redshift_text_is_redshift_and_never_truncates_or_merges(contract: Contract):
    """TRUNCATE commits on Redshift, and its MERGE takes no conditions: both would break the guard silently."""
    allowed = (exp.Create, exp.Delete, exp.Insert, exp.Drop)
    for statement in redshift(contract):
        parsed = sqlglot.parse_one(statement, read="redshift")
        assert isinstance(parsed, allowed), statement
        assert not list(parsed.find_all(exp.TruncateTable, exp.Merge, exp.OnConflict))
    assert isinstance(sqlglot.parse_one(merger.check_sql(contract, "staged"), read="redshift"), exp.Select)


@pytest.mark.parametrize("contract", [HARD, SOFT, PLAIN])
def test_the_delta_and_postgres_merges_parse_in_their_dialects(contract: Contract):
    tombstones = "graves" if contract.needs_tombstones else None
    assert sqlglot.parse_one(merger.postgres_merge(contract, "t", "s", tombstones), read="postgres").find(exp.Merge)
    assert sqlglot.parse_one(merger.delta_merge(contract, "s3a://b/t", "(SELECT 1)", tombstones), read="spark")


@pytest.mark.parametrize("contract", [HARD, SOFT])
def test_every_change_of_a_present_row_asks_whether_it_is_newer_and_takes_no_order_for_older(contract: Contract):
    """Guards both directions: an old change does nothing, and a row without an order is not closed for ever."""
    tombstones = "graves" if contract.needs_tombstones else None
    for text, order in (
        (merger.postgres_merge(contract, "t", "s", tombstones), '"seq"'),
        (merger.delta_merge(contract, "s3a://b/t", "(SELECT 1)", tombstones), "`seq`"),
    ):
        asked = f" AND (t.{order} IS NULL OR s.{order} > t.{order}) THEN"
        assert text.count("WHEN MATCHED") == text.count(asked)


def test_a_hostile_name_stays_a_name():
    contract = Contract(keys=('id"; DROP TABLE x; --',), values=("a`b",))
    for statement in redshift(contract):
        assert len(sqlglot.parse(statement, read="redshift")) == 1
    assert "`a``b`" in merger.delta_merge(contract, "t", "(SELECT 1)", None)


def test_hard_deletes_with_an_order_insist_on_tombstones():
    """Without them a late, older insert brings a deleted row back."""
    with pytest.raises(InvalidInput, match="tombstone"):
        merger.redshift_statements(HARD, target="t", source="s")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keys": ()}, "no key column"),
        ({"keys": ("id",), "values": ("id",)}, "'id' has two roles"),
        ({"keys": ("id",), "order": "seq", "flag": "seq"}, "'seq' has two roles"),
        ({"keys": ("id",), "deletes": Deletes.SOFT}, "need a flag"),
    ],
)
def test_a_contract_that_contradicts_itself_is_refused(fields: dict[str, object], words: str):
    with pytest.raises(InvalidInput, match=words):
        Contract(**fields)  # type: ignore[arg-type]


def test_a_refusal_lists_every_problem_at_once():
    counts = dict.fromkeys(merger.PROBLEMS, 2)
    with pytest.raises(InvalidInput) as refused:
        HARD.refuse(counts, unit="devices")
    assert len(refused.value.problems) == 4  # repeats are resolved by order here
    strict = Contract(keys=("id",), duplicates=Duplicates.REFUSE)
    with pytest.raises(InvalidInput, match="more than once"):
        strict.refuse({"repeated_keys": 1}, unit="devices")
    HARD.refuse({"repeated_keys": 9}, unit="devices")
