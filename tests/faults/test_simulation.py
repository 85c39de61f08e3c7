"""The domain code of the four pipelines under random faults, by seed: no promise may break, whatever the seed.

A failure names its seed; `lockstep faults replay SEED` shows every call of that run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from lockstep.faults import exports_world, readiness_world, ticks_world, windows_world
from lockstep.faults.checker import Promise
from lockstep.faults.schedule import Fault
from lockstep.faults.simulation import Result, simulate
from lockstep.readiness import rules as readiness_rules
from lockstep.readiness.model import RerunRequested
from lockstep.readiness.store import Store
from lockstep.windows import rules as window_rules

SEEDS = 200
MANY_SEEDS = 4000


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Thousands of injected faults are no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _broken(seeds: range) -> tuple[list[str], Counter[str]]:
    broken, faults = [], Counter[str]()
    for seed in seeds:
        result = simulate(seed)
        faults += result.faults
        broken += [f"seed {seed}: {one}" for one in result.violations]
    return broken, faults


def test_no_seed_breaks_a_promise():
    broken, faults = _broken(range(SEEDS))
    assert broken == []
    kinds = {*(fault.value for fault in Fault), "message lost", "message repeated and reordered", "state row lost"}
    assert kinds <= set(faults), "every kind of fault must have happened"
    assert min(faults[kind] for kind in kinds) >= 50


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_no_seed_of_thousands_breaks_a_promise(part: int):
    first = SEEDS + part * MANY_SEEDS // 4
    broken, _ = _broken(range(first, first + MANY_SEEDS // 4))
    assert broken == []


def test_a_seed_reproduces_its_run_to_the_last_call():
    """Guards replay: a run that depends on threads or real time could not be looked at again."""
    first, again = simulate(11), simulate(11)
    assert first.trace == again.trace
    assert list(first.history.lines()) == list(again.history.lines())
    assert first.stores == again.stores


def test_faults_interrupt_every_kind_of_actor():
    kinds = {"producer", "worker", "client0", "relay", "sensor", "sweep"}  # windows, exports, ticks
    kinds |= {"driver", "client", "job", "watchdog"}  # readiness
    kinds |= {"rival", "heir", "operator", "reader"}
    struck: set[str] = set()
    for seed in range(40):
        struck |= {line.partition(".")[0] for line in simulate(seed).trace if " ! " in line}
        if kinds <= struck:
            break
    assert kinds <= struck


# --- the simulation notices a guard that is gone ------------------------------------------------------------------


def _promises(pipeline: str, first: int = 0) -> set[Promise]:
    """What breaks in the first of 200 runs in which something does. A `first` near it only saves time."""
    for seed in range(first, first + 200):
        found: Result = simulate(seed, only=pipeline)
        if found.violations:
            return {one.promise for one in found.violations}
    return set()


def test_a_sink_without_its_fence_and_watermark_is_caught(monkeypatch: pytest.MonkeyPatch):
    def careless(self, claim, staged, schema):
        row = self.lanes[claim.vault]
        row.watermark = staged.window.start
        row.owner, row.fence = claim.lease.owner, claim.fence
        self.stages.setdefault(staged.load, (claim.fence, {}))
        return real(self, claim, staged, schema)

    real = windows_world.MemorySink.apply
    monkeypatch.setattr(windows_world.MemorySink, "apply", careless)
    assert _promises("windows") & {Promise.ONCE, Promise.FENCE, Promise.PREFIX}


def test_a_drain_that_jumps_over_a_gap_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The sink alone would stop it, so both guards go: each is enough by itself."""

    def over_gaps(watermark, rows, limit):
        return [row for row in window_rules._pending(watermark, rows) if row.status != "FAILED"][:limit]

    def without_chain(self, claim, staged, schema):
        self.lanes[claim.vault].watermark = staged.window.start
        return real(self, claim, staged, schema)

    real = windows_world.MemorySink.apply
    monkeypatch.setattr(window_rules, "consecutive", over_gaps)
    monkeypatch.setattr(windows_world.MemorySink, "apply", without_chain)
    assert Promise.PREFIX in _promises("windows")


def test_a_chunk_published_without_its_fence_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        exports_world.MemoryTables, "_mine", lambda self, claim: self.chunks[claim.job_id, claim.chunk_key]
    )
    assert _promises("exports")


def test_a_silver_ledger_without_its_lease_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ticks_world.MemorySilver, "_guard", lambda self, lease, lane, tick: None)
    assert Promise.FENCE in _promises("ticks")


def test_an_execution_that_is_not_written_by_version_is_caught(monkeypatch: pytest.MonkeyPatch):
    real = Store._runlog
    careless = lambda self, *states: real(self, *states)._replace(condition=None)  # noqa: E731
    monkeypatch.setattr(Store, "_runlog", careless)
    assert _promises("readiness") & {Promise.FENCE, Promise.ONCE}


def test_a_trigger_that_knows_no_token_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readiness_world.MemoryJobs, "_knows", lambda self, token: False)
    assert Promise.ONCE in _promises("readiness")


def test_a_second_job_beside_the_first_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The simulation found this one: a repeated start was refused, and the refusal believed."""

    def believe(state, event, now, out):
        return readiness_rules._fail(state, readiness_rules.Failure(event.category, event.message), now, out)

    monkeypatch.setattr(readiness_rules, "_refused_in_doubt", believe)
    assert Promise.LIMITS in _promises("readiness", first=40)


def test_reruns_beyond_their_budget_are_caught(monkeypatch: pytest.MonkeyPatch):
    real = readiness_rules._HANDLERS[RerunRequested]
    spent_nothing = lambda state, *rest: real(state.changed(reruns={}), *rest)  # noqa: E731
    monkeypatch.setitem(readiness_rules._HANDLERS, RerunRequested, spent_nothing)
    assert Promise.LIMITS in _promises("readiness", first=40)


def test_a_wait_written_by_a_wrong_clock_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readiness_rules, "_in_our_time", lambda state, now, out: state)
    assert Promise.TERMINAL in _promises("readiness")
