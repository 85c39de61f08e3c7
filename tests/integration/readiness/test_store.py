"""The ledger's promises, held by DynamoDB Local and by the in-memory table alike."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import LostClaim
from lockstep.readiness import rules
from lockstep.readiness.model import (
    FACTS,
    Alert,
    Emit,
    Execution,
    IllegalTransition,
    Key,
    Level,
    MarkDownstream,
    Plan,
    Polled,
    PollOutcome,
    Readiness,
    ReadinessStatus,
    Reason,
    RerunRequested,
    RunMoved,
    RunStatus,
    Started,
    TraitResult,
    TraitStatus,
)
from lockstep.readiness.store import Marker, Store
from lockstep.readiness.table import Absent, DynamoTable, Equals, Lacks, MemoryTable, Merge, Put, Table
from tests.integration.readiness.tables import table_named
from tests.unit.readiness.builders import DAY, NOW, evaluated, plan

pytestmark = pytest.mark.stack


@pytest.fixture(params=["dynamodb", "memory"])
def table(request: pytest.FixtureRequest, stack: Any, dynamodb: Any) -> Iterator[Table]:
    """A table of its own: what these tests promise is about every item that is in it."""
    if request.param == "memory":
        yield MemoryTable()
        return
    name = f"readiness-{secrets.token_hex(4)}"
    with table_named(stack, name):
        yield DynamoTable(dynamodb, name)


@pytest.fixture
def store(table: Table) -> Store:
    return Store(table)


def _step(store: Store, state: Execution, event: Any, now=NOW) -> Execution:
    after, effects = rules.step(state, event, now)
    return store.commit(state, after, [effect for effect in effects if isinstance(effect, FACTS)], now)


def _open(store: Store, the_plan: Plan | None = None, key: Key | None = None) -> Execution:
    state, effects = rules.open_execution(the_plan or plan(), key or Key("sales", DAY, "daily"), NOW)
    return store.commit(None, state, effects, NOW)


def _triggering(store: Store, the_plan: Plan | None = None) -> Execution:
    state = _open(store, the_plan)
    return _step(store, state, evaluated(state, n=0))


def test_an_execution_reads_back_as_it_was_written(store: Store):
    state = _triggering(store)
    assert store.load(state.key, state.plan, NOW) == state
    assert store.load_many({state.key: state.plan, Key("no", DAY): plan()}, NOW) == {state.key: state}
    assert store.status(state.key, NOW) is RunStatus.TRIGGERING
    assert store.load(Key("sales", DAY, "other"), plan(), NOW) is None


def test_ten_writers_of_one_version_have_one_winner(store: Store):
    """Guards the compare-and-set that everything rests on."""
    state = _open(store)
    after, effects = rules.step(state, evaluated(state), NOW)
    facts = [effect for effect in effects if isinstance(effect, FACTS)]

    def write(_: int) -> bool:
        try:
            store.commit(state, after, facts, NOW)
        except LostClaim:
            return False
        return True

    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(write, range(10))) == 1
    assert len(store.runs("sales", NOW)) == 1


def test_an_execution_is_opened_once(store: Store):
    _open(store)
    with pytest.raises(LostClaim):
        _open(store)


def test_a_lost_write_leaves_nothing_behind(store: Store):
    """Guards trap 18: no event, no run and no marker without the state that they belong to."""
    state = _open(store)
    _step(store, state, evaluated(state))
    before = store.events("sales", NOW)
    after, effects = rules.step(state, evaluated(state, "FAIL"), NOW)
    with pytest.raises(LostClaim):
        facts = [*(effect for effect in effects if isinstance(effect, FACTS)), MarkDownstream("gold")]
        store.commit(state, after, facts, NOW)
    assert store.events("sales", NOW) == before
    assert store.markers("gold", NOW).markers == []


def test_runs_move_only_where_they_may_and_from_where_they_are(store: Store):
    state = _triggering(store)
    run = store.run(state.run_id, NOW)
    assert (run["status"], run["version"]) == ("TRIGGERING", 2)
    skip = RunMoved(state.run_id, (RunStatus.TRIGGERING, RunStatus.COMPLETED), 1, 0)
    with pytest.raises(IllegalTransition):
        store.commit(state, state, [skip], NOW)
    elsewhere = RunMoved(state.run_id, (RunStatus.RUNNING, RunStatus.FAILED), 1, 0)
    with pytest.raises(LostClaim):
        store.commit(state, state, [elsewhere], NOW)
    running = _step(store, state, Started(state.run_id, {"id": "j"}))
    _step(store, running, Polled(state.run_id, PollOutcome.SUCCEEDED))
    run = store.run(state.run_id, NOW)
    assert (run["status"], run["version"], run["metadata"]) == ("COMPLETED", 4, {"id": "j"})


def test_truth_is_written_before_its_copies_and_lists_show_the_truth(store: Store, table: Table):
    """Guards trap 24: a copy that lags, or says something old, is never believed."""
    state = _triggering(store)
    with armed("readiness.commit.before_copies", "raise"), pytest.raises(CrashInjected):
        _step(store, state, Started(state.run_id, {}))
    copy = table.get("PIPELINE#sales", f"RUN#{state.run_id}", 0)
    assert copy is not None
    assert copy["status"] == "TRIGGERING"
    assert [run["status"] for run in store.runs("sales", NOW)] == ["RUNNING"]


def test_the_table_has_exactly_the_keys_of_the_document(store: Store, table: Table):
    """Guards the key schema that other tools of the same design read."""
    state = _triggering(store, plan(downstream=("gold",)))
    store.register("sales", {"name": "sales"}, origin="file")
    state = _step(store, _step(store, state, Started(state.run_id, {})), Polled(state.run_id, PollOutcome.SUCCEEDED))
    _step(store, state, RerunRequested("r1", Reason.MANUAL))
    store.put_traits("sales", state.key, [TraitResult("fresh", TraitStatus.PASS)], NOW)
    store.put_readiness(state.key, Readiness(ReadinessStatus.READY), NOW)
    store.acquire("eval:sales:daily", "me", timedelta(minutes=5), NOW)
    day = DAY.isoformat()
    expected = {
        ("PIPELINE#sales", "CONFIG"): ("PIPELINES", "sales"),
        ("PIPELINE#sales", "TRAIT#fresh"): None,
        (f"RUN#{state.run_id}", "STATE"): None,
        ("PIPELINE#sales", f"RUN#{state.run_id}"): None,
        ("PIPELINE#sales", f"RUNLOG#{day}#daily"): None,
        ("LOCK#eval:sales:daily", "LOCK"): None,
        ("RERUN#r1", "STATE"): ("RERUNS", "r1"),
        ("PIPELINE#sales", "RERUN#r1"): None,
        ("PIPELINE#sales", "READINESS"): None,
        ("MARKER#gold", f"{day}#daily"): None,
    }
    for (pk, sk), index in expected.items():
        item = table.get(pk, sk, 0)
        assert item is not None, (pk, sk)
        assert (index is not None) == ("GSI1PK" in item), (pk, sk)
        assert index is None or (item["GSI1PK"], item["GSI1SK"]) == index
    (event, *_) = table.query("PIPELINE#sales", "EVENT#", 0, limit=1)
    assert len(event["SK"].split("#")) == 3


def test_events_are_in_order_and_only_appended(store: Store):
    state = _triggering(store)
    _step(store, state, Started(state.run_id, {}))
    kinds = [event["kind"] for event in store.events("sales", NOW, newest=False)]
    assert kinds == ["EXECUTION_OPENED", "READINESS_CHECKED", "TRIGGER_FIRED"]
    assert [event["kind"] for event in store.events("sales", NOW, limit=1)] == ["TRIGGER_FIRED"]
    store.append(Key("sales", DAY, "other"), Emit("NOTE"), NOW)
    assert len(store.events("sales", NOW, key=state.key)) == 3


def test_results_beyond_one_page_are_not_cut(store: Store):
    """Guards paging: DynamoDB answers at most 1 MB at a time."""
    for number in range(30):
        store.append(Key("sales", DAY), Emit("NOTE", "x" * 60_000, details={"number": number}), NOW)
    found = store.events("sales", NOW, limit=500, newest=False)
    assert [event["details"]["number"] for event in found] == list(range(30))


def test_a_lock_has_one_owner_until_its_time_is_over(store: Store):
    ttl = timedelta(minutes=5)
    assert store.acquire("eval:a:daily", "one", ttl, NOW)
    assert not store.acquire("eval:a:daily", "two", ttl, NOW)
    assert not store.release("eval:a:daily", "two")
    assert store.renew("eval:a:daily", "one", ttl, NOW + timedelta(minutes=4))
    later = NOW + timedelta(minutes=6)
    assert not store.acquire("eval:a:daily", "two", ttl, later), "renewed"
    later = NOW + timedelta(minutes=10)
    assert store.acquire("eval:a:daily", "two", ttl, later)
    assert not store.renew("eval:a:daily", "one", ttl, later), "somebody else has it now"
    assert not store.release("eval:a:daily", "one")
    assert store.holder("eval:a:daily", later) == "two"
    assert store.release("eval:a:daily", "two")
    assert store.acquire("eval:a:daily", "three", ttl, later)


def test_a_lock_of_a_clock_that_runs_ahead_holds_nobody_for_hours(store: Store):
    ttl = timedelta(seconds=40)
    assert store.acquire("eval:a:daily", "ahead", ttl, NOW + timedelta(hours=2))
    assert store.acquire("eval:a:daily", "right", ttl, NOW)
    assert not store.acquire("eval:a:daily", "other", ttl, NOW - timedelta(minutes=2)), "clocks may differ a little"


def test_what_has_expired_is_not_read_although_it_is_still_there(store: Store):
    """Guards TTL-on-read: the table deletes expired items hours late."""
    key = Key("sales", DAY, "daily")
    soon = NOW + timedelta(seconds=60)
    store.put_traits("sales", key, [TraitResult("fresh", TraitStatus.PASS, expires_at=soon)], NOW)
    store.put_readiness(key, Readiness(ReadinessStatus.READY), NOW)
    store.beat("driver", NOW, timedelta(minutes=1))
    assert store.traits("sales", key, ["fresh"], NOW)["fresh"].status is TraitStatus.PASS
    assert store.readiness("sales", NOW) is not None
    much_later = NOW + timedelta(minutes=10)
    assert store.traits("sales", key, ["fresh"], much_later) == {}
    assert store.readiness("sales", much_later) is None
    assert store.last_beat("driver", NOW) == NOW
    assert store.last_beat("driver", much_later) is None


def test_a_finished_execution_never_expires(store: Store, table: Table):
    """Guards trap 11: a row that vanished would let its date run again."""
    state = _triggering(store)
    state = _step(store, _step(store, state, Started(state.run_id, {})), Polled(state.run_id, PollOutcome.SUCCEEDED))
    assert store.status(state.key, NOW + timedelta(days=4000)) is RunStatus.COMPLETED
    row = table.get("PIPELINE#sales", f"RUNLOG#{DAY.isoformat()}#daily", 0)
    assert row is not None
    assert "ttl" not in row


def test_answers_of_two_executions_do_not_overwrite_each_other(store: Store):
    """Guards trap 19: one trait item is shared by every hour of a pipeline."""
    six, seven = Key("sales", DAY, "h06"), Key("sales", DAY, "h07")
    store.put_traits("sales", six, [TraitResult("fresh", TraitStatus.PASS, "six")], NOW)
    store.put_traits("sales", seven, [TraitResult("fresh", TraitStatus.FAIL, "seven")], NOW)
    assert store.traits("sales", six, ["fresh"], NOW)["fresh"].reason == "six"
    store.put_traits("sales", None, [TraitResult("room", TraitStatus.PASS, pushed=True)], NOW)
    assert store.traits("sales", seven, ["fresh", "room"], NOW)["room"].pushed
    assert len(store.all_traits("sales", NOW)) == 3


def test_old_answers_are_pruned_and_new_ones_kept(store: Store):
    for hour in range(70):
        key = Key("sales", DAY + timedelta(days=hour), "daily")
        store.put_traits("sales", key, [TraitResult("fresh", TraitStatus.PASS)], NOW)
    assert store.prune_traits("sales", NOW) == 6
    assert store.traits("sales", Key("sales", DAY + timedelta(days=69), "daily"), ["fresh"], NOW)


def test_open_executions_are_listed_with_their_pipeline_and_closed_ones_are_not(store: Store):
    store.register("sales", {"name": "sales"}, origin="file")
    state = _triggering(store)
    (found,) = store.registered(NOW)
    assert (found.pipeline, found.open) == ("sales", {f"{DAY.isoformat()}#daily"})
    state = _step(store, _step(store, state, Started(state.run_id, {})), Polled(state.run_id, PollOutcome.SUCCEEDED))
    store.register("sales", {"name": "sales", "tier": 1}, origin="file")
    (found,) = store.registered(NOW)
    assert (found.open, found.data["tier"]) == (frozenset(), 1)
    assert store.registration("sales", NOW) == found
    assert store.unregister("sales")
    assert store.registered(NOW) == [] and store.registration("sales", NOW) is None


def test_a_pipeline_with_an_open_execution_cannot_be_removed_by_whoever_did_not_see_it_open(store: Store):
    """Guards the execution: with its pipeline gone nobody would drive it to its end."""
    store.register("sales", {"name": "sales"}, origin="api")
    state = _triggering(store)
    assert not store.unregister("sales")
    _step(store, _step(store, state, Started(state.run_id, {})), Polled(state.run_id, PollOutcome.SUCCEEDED))
    assert store.unregister("sales")


def test_a_marker_that_is_written_anew_is_not_dropped_with_the_old_one(store: Store):
    key = Key("gold", DAY, "h06")
    store.put_marker(Marker(key, "cascade:silver", NOW, NOW + timedelta(seconds=2)))
    (seen,) = store.markers("gold", NOW).markers
    assert (seen.key, seen.not_before) == (key, NOW + timedelta(seconds=2))
    store.put_marker(Marker(key, "late-data", NOW + timedelta(seconds=5)))
    assert not store.drop_marker(seen)
    (newer,) = store.markers("gold", NOW).markers
    assert store.drop_marker(newer)
    assert store.markers("gold", NOW).markers == []


def test_reruns_are_listed_for_a_pipeline_and_for_all(store: Store):
    state = _triggering(store)
    state = _step(store, _step(store, state, Started(state.run_id, {})), Polled(state.run_id, PollOutcome.SUCCEEDED))
    state = _step(store, state, RerunRequested("r1", Reason.REPLAY, "late file"))
    assert store.rerun("r1", NOW)["status"] == "PENDING"
    assert [rerun["rerunId"] for rerun in store.reruns(NOW)] == ["r1"]
    assert [rerun["reason"] for rerun in store.reruns(NOW, "sales")] == ["replay"]


def test_an_alert_without_an_execution_is_raised_once(store: Store):
    alert = Alert(Key("sales", DAY, "daily"), "schedule_missed", Level.ERROR, "missed", NOW)
    assert store.raise_alert(alert, "a", NOW)
    assert not store.raise_alert(alert, "b", NOW + timedelta(hours=1))
    assert [event["kind"] for event in store.events("sales", NOW)] == ["ALERT"]
    assert [entry.undelivered for entry in store.registered(NOW)] == [(alert,)], "until some sink has taken it"
    store.alert_delivered(alert)
    assert [entry.undelivered for entry in store.registered(NOW)] == [()]


def test_a_pipeline_remembers_from_when_on_each_schedule_counts(store: Store):
    store.register("sales", {"name": "sales"}, origin="file", since={"h06": NOW, "h07": NOW + timedelta(hours=1)})
    _triggering(store)
    (found,) = store.registered(NOW)
    assert (found.since, found.origin) == ({"h06": NOW, "h07": NOW + timedelta(hours=1)}, "file")


def test_a_marker_made_by_hand_is_read_and_dropped_and_an_unreadable_one_is_answered(store: Store, table: Table):
    table.write([Put({"PK": "MARKER#gold", "SK": "2019-02-28#h06", "requestedAt": "2026-03-10T07:00:00Z"})])
    table.write([Put({"PK": "MARKER#gold", "SK": "2019-03-01#h06"})])
    table.write([Put({"PK": "MARKER#gold", "SK": "soon"})])
    found = store.markers("gold", NOW)
    assert [marker.key.date.isoformat() for marker in found.markers] == ["2019-02-28", "2019-03-01"]
    assert all(store.drop_marker(marker) for marker in found.markers)
    ((sort_key, words),) = found.unreadable.items()
    store.refuse_marker("gold", sort_key, words, NOW)
    assert store.markers("gold", NOW) == ([], {})
    assert [event["details"]["sortKey"] for event in store.events("gold", NOW)] == ["soon"]


def test_a_push_goes_before_an_answer_and_one_for_the_execution_before_one_for_all(store: Store):
    key, later = Key("sales", DAY, "daily"), NOW + timedelta(hours=1)

    def put(reason: str, slot: Key | None, *, pushed: bool) -> str:
        result = TraitResult("fresh", TraitStatus.PASS, reason, expires_at=later, pushed=pushed)
        store.put_traits("sales", slot, [result], NOW)
        return store.traits("sales", key, ["fresh"], NOW)["fresh"].reason

    assert put("evaluated", key, pushed=False) == "evaluated"
    assert put("pushed for all", None, pushed=True) == "pushed for all"
    assert put("pushed for this", key, pushed=True) == "pushed for this"
    assert store.traits("sales", key, ["fresh"], later) == {}


def test_conditions_mean_the_same_everywhere(table: Table):
    assert table.write([Put({"PK": "a", "SK": "b", "n": 1}, Absent())])
    assert not table.write([Put({"PK": "a", "SK": "b", "n": 2}, Absent())])
    assert not table.write([Put({"PK": "x", "SK": "y"}), Merge("a", "b", {"n": 5}, condition=Equals("n", 4))])
    assert table.get("x", "y", 0) is None, "all or nothing"
    assert table.write([Merge("a", "b", {"s": "v"}, {"n": 2, "set": {"p", "q"}}, condition=Equals("n", 1))])
    assert table.write([Merge("a", "b", remove_members={"set": {"p"}})])
    assert table.get("a", "b", 0) == {"PK": "a", "SK": "b", "n": 3, "s": "v", "set": {"q"}}
    assert not table.write([Merge("a", "b", {"n": 4}, condition=Lacks("set"))])
    assert table.write([Merge("a", "b", remove_members={"set": {"q"}})])
    assert table.write([Put({"PK": "x", "SK": "y"}, Lacks("set")), Merge("a", "b", {"n": 4}, condition=Lacks("set"))])
    assert "set" not in (table.get("a", "b", 0) or {})
    assert not table.write([Merge("none", "none", {"n": 1}, condition=Equals("n", 0))])
