"""The oracles of the demo: each finds what it is there to find. An oracle that cannot fail proves nothing."""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from lockstep.faults import oracle
from lockstep.faults.clients import people
from lockstep.faults.oracle import Order
from lockstep.vaultsim.model import VaultConfig
from lockstep.vaultsim.rows import World

START = datetime(2026, 1, 1, tzinfo=UTC)
STEP = timedelta(minutes=15)
KEY = ("id",)
ROWS = {("a",): {"id": "a", "amount": "1.50"}, ("b",): {"id": "b", "amount": None}}


def _found(**changes: Any) -> list[dict[str, Any]]:
    rows = {"a": {"id": "a", "amount": Decimal("1.5")}, "b": {"id": "b", "amount": None}}
    return [row for row in (rows | changes).values() if row]


def test_equal_tables_have_no_difference():
    assert str(oracle.compare_table(KEY, ROWS, _found())) == "2 rows, all equal"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"b": None}, "1 missing"),
        ({"c": {"id": "c", "amount": None}}, "1 too many"),
        ({"c": {"id": "a", "amount": Decimal("1.5")}}, "1 too many"),
        ({"a": {"id": "a", "amount": Decimal(2)}}, "1 different"),
        ({"b": {"id": "b", "amount": Decimal(0)}}, "1 different"),
    ],
    ids=["lost", "strange", "doubled", "changed", "zero for nothing"],
)
def test_every_kind_of_difference_is_found(changes: dict[str, Any], words: str):
    assert words in str(oracle.compare_table(KEY, ROWS, _found(**changes)))


@pytest.mark.parametrize(
    ("text", "value", "equal"),
    [
        ("true", True, True),
        ("false", True, False),
        ("2026-01-01T00:00:00.250Z", datetime(2026, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC), True),
        ("1950-01-01", date(1950, 1, 1), True),
        ("0042", "0042", True),
        ("0042", "42", False),
        ("", "", True),
        ("", None, False),
        (None, "", False),
        (None, None, True),
    ],
)
def test_a_value_is_the_same_in_its_type_or_not_at_all(text: str | None, value: Any, equal: bool):
    assert oracle.same(text, value) is equal


def test_the_expected_tables_are_the_simulators_own_rows():
    world = World(VaultConfig(id="7", rows=4, base_rows=2, objects=("study__v",)))
    ((key, rows),) = oracle.expected_tables(world, 3).values()
    assert key == ("id",)
    assert rows.keys() == world.state_after(3)["study__v"].keys()
    assert all(row["id"] == place[0] for place, row in rows.items())


def test_the_activity_counts_windows_and_changes_by_day_and_object():
    config = VaultConfig(
        id="7", rows=4, base_rows=2, objects=("study__v",), origin=START + timedelta(hours=23, minutes=30)
    )
    found = oracle.expected_activity(World(config), 0, 2, config.stop_of)
    days = [(day, counts[0]) for (day, _), counts in found.items()]
    assert days == [(date(2026, 1, 1), 1), (date(2026, 1, 2), 2)], "23:45, then 00:00 and 00:15"
    assert sum(counts[1] for counts in found.values()) == 12


def _chain(*numbers: int) -> list[tuple[datetime, datetime, datetime]]:
    return [(START + STEP * one, START + STEP * (one + 1), START) for one in numbers]


@pytest.mark.parametrize(
    ("numbers", "wrong"), [((0, 1, 2), False), ((0, 2, 1), True), ((0, 2), True), ((1, 2, 3), True), ((0, 1, 1), True)]
)
def test_a_ledger_that_is_not_a_chain_is_found_out(numbers: tuple[int, ...], wrong: bool):
    assert bool(oracle.chain_problems(_chain(*numbers), START, 3)) is wrong


def test_colours_are_counted_in_their_order():
    """Guards the claim about the red partition: the same colours in another order are another picture."""
    assert oracle.in_a_row(["green", "green", "red", "green"]) == "2 green, 1 red, 1 green"


def test_the_file_of_a_key_follows_the_dialect_to_the_byte():
    lines = list(oracle.source_lines("K0001", date(2000, 1, 2)))
    assert len(lines) == 2000 + 7919 % 3000 + 1
    assert lines[0] == '1,AC007920,K0001-32,646,548.5864,2000-01-02 00:00:01,""\n'
    assert lines[4].endswith(",\n"), "nothing between the commas is NULL"
    whole = oracle.HEADER + "".join(lines)
    assert oracle.source_sha256("K0001", date(2000, 1, 2)) == hashlib.sha256(whole.encode()).hexdigest()


def test_a_key_may_have_another_number_of_rows_a_day():
    """Guards the lab's files: its keys are not numbers, and its days are short."""
    lines = list(oracle.source_lines("ABC", date(2000, 1, 2), 40))
    assert len(lines) == 41
    assert lines[0].startswith("1,AC007920,ABC-32,")


def test_ticks_of_the_lab_overlap_so_that_their_order_shows_in_silver():
    """Guards the lab's oracle: with rows of their own in every tick, silver would look the same in any order."""
    first, second = people(3), people(4)
    forward, backward = oracle.silver_rows([first, second]), oracle.silver_rows([second, first])
    assert str(oracle.compare_silver(forward, list(forward.values()))) == f"{len(forward)} rows, all equal"
    assert "different" in str(oracle.compare_silver(forward, list(backward.values())))
    assert "missing" in str(oracle.compare_silver(forward, list(oracle.silver_rows([second]).values())))


def test_without_the_full_archive_only_what_windows_touched_is_expected():
    """Guards the lab's lanes, which begin with a window: rows that only the full archive has must not be asked for."""
    world = World(VaultConfig(id="1001"))
    with_full, without = oracle.expected_tables(world, 2), oracle.expected_tables(world, 2, full=False)
    assert with_full.keys() == without.keys()
    for name, (_, rows) in without.items():
        assert rows.items() <= with_full[name][1].items()
    assert sum(len(rows) for _, rows in without.values()) < sum(len(rows) for _, rows in with_full.values())


def test_silver_is_the_last_row_of_every_key():
    sent = [oracle.tick_rows(0, tick, 20) for tick in range(3)]
    held = oracle.silver_rows(sent)
    assert len(held) == 20 + 2 * 10
    assert held[2] == next(row for row in sent[2] if row.id == 2)
    assert str(oracle.compare_silver(held, list(held.values()))) == "40 rows, all equal"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([Order(1, "a", 1)], "1 missing"),
        ([Order(1, "a", 1), Order(2, "b", 2), Order(2, "b", 2)], "1 too many"),
        ([Order(1, "a", 1), Order(2, "b", 3)], "1 different"),
        ([Order(1, "a", 1), Order(2, "b", 2), Order(3, "c", 3)], "1 too many"),
    ],
)
def test_a_silver_table_that_differs_is_found_out(found: list[Order], words: str):
    expected = {1: Order(1, "a", 1), 2: Order(2, "b", 2)}
    assert words in str(oracle.compare_silver(expected, found))
