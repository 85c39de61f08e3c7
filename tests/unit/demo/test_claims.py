"""Claims: what counts as held, what a broken scene says, and the shape of the JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from lockstep.kernel.errors import Transient
from stack.demo.claims import Board, Claim, all_hold, broken, document, judge, table
from stack.demo.play import Outcome

GOOD = judge("windows", "rows are equal", 12, 12)
BAD = judge("exports", "hashes are equal", 200, 199)


def test_a_claim_holds_only_if_both_sides_are_equal():
    assert (GOOD.ok, BAD.ok) == (True, False)
    assert (BAD.expected, BAD.found) == ("200", "199")


def test_a_demo_that_claims_nothing_has_shown_nothing():
    """Guards the exit code: a demo whose scenes all vanish must not look like a success."""
    assert not all_hold([])
    assert all_hold([GOOD])
    assert not all_hold([GOOD, BAD])


def test_a_broken_scene_says_why_and_what_to_do_next():
    told = broken("ticks", Transient("the service is away.", unit="agent 1", next_step="start it."))
    assert (told.ok, told.found) == (False, "agent 1: the service is away. Next: start it.")
    assert "Next: " in broken("ticks", ValueError("odd")).found
    assert broken("ticks", KeyError()).found.startswith("KeyError")


def test_the_json_has_claims_seconds_and_links(tmp_path: Path):
    path = tmp_path / "deep" / "demo.json"
    outcome = Outcome([GOOD, BAD], 123.456, {"all runs": "http://127.0.0.1:1/runs"})
    outcome.write(path)
    assert json.loads(path.read_text()) == {
        "claims": [
            {"scene": "windows", "claim": "rows are equal", "expected": "12", "found": "12", "ok": True},
            {"scene": "exports", "claim": "hashes are equal", "expected": "200", "found": "199", "ok": False},
        ],
        "seconds": 123.5,
        "links": {"all runs": "http://127.0.0.1:1/runs"},
    }
    assert not outcome.holds
    assert document([], 0.0, {}) == {"claims": [], "seconds": 0.0, "links": {}}


def test_the_summary_shows_every_claim_and_takes_no_word_for_markup():
    console = Console(record=True, width=120)
    console.print(table([GOOD, Claim("ticks", "a [red]word[/]", "[1]", "[2]", False)]))
    shown = console.export_text()
    assert "rows are equal" in shown
    assert "a [red]word[/]" in shown
    assert "FAILED" in shown


def test_the_board_keeps_the_claims_of_each_scene_apart():
    board = Board()
    for claim in (GOOD, BAD):
        board.add(claim)
    assert board.claims("exports") == [BAD]
    assert board.claims() == [GOOD, BAD]
