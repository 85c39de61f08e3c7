"""The checker finds every kind of violation, and nothing in a sound history.

Silent failure guarded: a checker that overlooks something makes every fault run a success.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.faults.checker import Effect, Limit, Promise, Stores, Unit, by_promise, check
from lockstep.faults.history import History, Outcome, Verb
from lockstep.kernel.errors import InvalidInput


def _sound() -> tuple[History, Stores]:
    """Two jobs, one of them asked for twice; one lane of three units under rising fences."""
    history = History()
    for key, unit in (("k1", "J1"), ("k2", "J2")):
        first = history.invoke("client", Verb.WRITE, key)
        history.end(first, Outcome.INFO)
        again = history.invoke("client", Verb.WRITE, key)
        history.end(again, Outcome.OK, unit=unit)
    read = history.invoke("client", Verb.READ, "J1")
    history.end(read, Outcome.OK, state="COMPLETED", terminal=True)
    refused = history.invoke("client", Verb.WRITE, "k3")
    history.end(refused, Outcome.FAIL)
    stores = Stores(
        units=[
            Unit("J1", "COMPLETED", True, key="k1", promised="aa", found="aa"),
            Unit("J2", "FAILED", True, key="k2"),
            *(Unit(name, "APPLIED", True) for name in ("w1", "w2", "w3")),
        ],
        chains={"lane": ["w1", "w2", "w3"]},
        effects=[Effect("lane", "w1", 1), Effect("lane", "w2", 1), Effect("lane", "w3", 2)],
        writes=[("lane", 1), ("lane", 1), ("lane", 2)],
        limits=[Limit("J1", "retries", 3, 3)],
    )
    return history, stores


def _found(history: History, stores: Stores) -> set[Promise]:
    return {one.promise for one in check(history, stores)}


def test_a_sound_history_has_no_violation():
    assert check(*_sound()) == []


def test_an_applied_unit_after_a_hole_breaks_the_prefix():
    history, stores = _sound()
    del stores.effects[1]
    assert _found(history, stores) == {Promise.PREFIX}


def test_two_units_in_the_wrong_order_break_the_prefix():
    history, stores = _sound()
    stores.effects[0], stores.effects[1] = stores.effects[1], stores.effects[0]
    assert _found(history, stores) == {Promise.PREFIX}


def test_an_effect_of_a_unit_that_no_source_has_breaks_the_prefix():
    history, stores = _sound()
    stores.effects.append(Effect("lane", "w9", 2))
    assert _found(history, stores) == {Promise.PREFIX}


def test_a_second_effect_is_found():
    history, stores = _sound()
    stores.effects.append(Effect("lane", "w3", 3))
    assert _found(history, stores) == {Promise.ONCE}


def test_an_acknowledged_unit_that_no_store_knows_is_found():
    history, stores = _sound()
    del stores.units[1]
    assert _found(history, stores) == {Promise.ACKNOWLEDGED}


def test_a_unit_of_a_refused_request_is_found():
    history, stores = _sound()
    stores.units.append(Unit("J3", "COMPLETED", True, key="k3"))
    assert _found(history, stores) == {Promise.REFUSED}


def test_a_unit_of_a_request_whose_outcome_is_unknown_is_no_violation():
    history, stores = _sound()
    begun = history.invoke("client", Verb.WRITE, "k4")
    history.end(begun, Outcome.INFO)
    history.invoke("client", Verb.WRITE, "k5")  # never ended
    stores.units += [Unit("J4", "COMPLETED", True, key="k4"), Unit("J5", "COMPLETED", True, key="k5")]
    assert check(history, stores) == []


def test_a_terminal_state_that_changes_between_two_reads_is_found():
    history, stores = _sound()
    read = history.invoke("client", Verb.READ, "J1")
    history.end(read, Outcome.OK, state="IN_PROGRESS")
    assert _found(history, stores) == {Promise.STABLE}


def test_a_terminal_state_that_the_store_contradicts_is_found():
    history, stores = _sound()
    stores.units[0] = replace(stores.units[0], state="FAILED")
    assert _found(history, stores) == {Promise.STABLE}


def test_a_read_that_began_before_the_end_may_return_what_was_before_it():
    history, stores = _sound()
    late = History(history.events[:4], _last=99)
    slow = late.invoke("other", Verb.READ, "J1")
    quick = late.invoke("client", Verb.READ, "J1")
    late.end(quick, Outcome.OK, state="COMPLETED", terminal=True)
    late.end(slow, Outcome.OK, state="IN_PROGRESS")
    late.end(late.invoke("client", Verb.WRITE, "k2"), Outcome.OK, unit="J2")
    assert check(late, stores) == []


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.INFO])
def test_a_retry_by_a_person_may_reopen_a_unit(outcome: Outcome):
    history, stores = _sound()
    retry = history.invoke("operator", Verb.RETRY, "J1")
    history.end(retry, outcome)
    for state in ("IN_PROGRESS", "FAILED"):
        history.end(history.invoke("client", Verb.READ, "J1"), Outcome.OK, state=state, terminal=state == "FAILED")
    stores.units[0] = replace(stores.units[0], state="FAILED")
    assert check(history, stores) == []


def test_a_state_that_changes_again_after_a_retry_that_ended_is_found():
    history, stores = _sound()
    history.end(history.invoke("operator", Verb.RETRY, "J1"), Outcome.OK)
    for state in ("FAILED", "IN_PROGRESS"):
        history.end(history.invoke("client", Verb.READ, "J1"), Outcome.OK, state=state, terminal=state == "FAILED")
    stores.units[0] = replace(stores.units[0], state="FAILED")
    assert _found(history, stores) == {Promise.STABLE}


@pytest.mark.parametrize("found", ["bb", None])
def test_other_bytes_or_none_are_found(found: str | None):
    history, stores = _sound()
    stores.units[0] = replace(stores.units[0], found=found)
    assert _found(history, stores) == {Promise.BYTES}


def test_a_write_under_a_stale_fence_is_found():
    history, stores = _sound()
    stores.writes.append(("lane", 1))
    assert _found(history, stores) == {Promise.FENCE}


def test_a_unit_that_is_not_terminal_in_the_end_is_found():
    history, stores = _sound()
    stores.units[1] = replace(stores.units[1], state="IN_PROGRESS", terminal=False)
    assert _found(history, stores) == {Promise.TERMINAL}


def test_one_key_that_became_two_units_is_found():
    history, stores = _sound()
    stores.units.append(Unit("J9", "COMPLETED", True, key="k1"))
    assert _found(history, stores) == {Promise.ONE_UNIT}


def test_a_limit_that_is_exceeded_is_found():
    history, stores = _sound()
    stores.limits[0] = replace(stores.limits[0], found=4)
    assert _found(history, stores) == {Promise.LIMITS}


def test_every_promise_has_a_test_here_and_a_line_in_the_summary():
    assert set(by_promise([])) == {promise.value for promise in Promise}
    assert len(Promise) == 10


def test_stores_of_several_pipelines_are_judged_together():
    _, stores = _sound()
    both = Stores()
    both.add(stores)
    both.add(Stores(limits=[Limit("J2", "retries", 1, 0)], effects=[Effect("other", "w1"), Effect("other", "w1")]))
    assert _found(History(), both) == {Promise.LIMITS, Promise.ONCE}


def test_a_history_survives_being_written_and_read():
    history, stores = _sound()
    again = History.read(list(history.lines()))
    assert again.events == history.events
    assert check(again, stores) == []
    assert again.invoke("client", Verb.READ, "J2").op == history.events[-1].op + 1


def test_a_history_counts_operations_that_never_ended():
    history = History()
    history.invoke("client", Verb.WRITE, "k")
    assert history.counts() == {"write": {"invoke": 1, "open": 1}}


def test_a_line_that_is_no_event_is_refused():
    with pytest.raises(InvalidInput, match="line 1"):
        History.read(["{}"])
