"""The chunk protocol on a real database against a plain model: any order of claims, deaths, cancels and retries."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lockstep.exports import rules
from lockstep.exports.model import Claim, Counts, JobStatus, Receipt
from lockstep.exports.store import WrongState
from lockstep.kernel.errors import LostClaim
from tests.integration.exports.conftest import World

pytestmark = pytest.mark.stack

RECEIPT = Receipt("exports/x.csv", 10, 100, "0" * 64, '"tag"', None, "v1", [{"name": "a", "type": "text"}])
KEYS = ("A", "B", "C")


class Protocol(RuleBasedStateMachine):
    """Workers, clients and death in any order; beside each call, what a plain model expects."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.world.ask("TRUNCATE exports.job CASCADE")
        self.world.ask("DELETE FROM exports.file_cache")
        self.claims = self.world.claims()
        self.jobs: dict[str, JobStatus] = {}
        self.held: list[Claim] = []  # claims that workers believe they hold, lost ones among them
        self.owner: dict[tuple[str, str], int] = {}  # the fence that really holds a chunk
        self.spent: dict[tuple[str, str], int] = {}

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    def submit(self, keys: list[str]) -> None:
        self.jobs[self.world.submit(*((key, "20250215") for key in keys), force=True)] = JobStatus.SUBMITTED

    @rule(count=st.integers(1, 3))
    def claim(self, count: int) -> None:
        batch = self.claims.reserve(count)
        if batch is None:
            return
        while (claim := self.claims.claim(batch.batch_id)) is not None:
            name = (claim.job_id, claim.chunk_key)
            assert name not in self.owner, "one holder at a time"
            assert claim.file_id not in {one.file_id for one in self.held if self._holds(one)}, "single flight"
            self.spent[name] = self.spent.get(name, 0) + 1
            assert self.spent[name] <= self.world.limits.max_attempts
            self.owner[name] = claim.fence
            self.held.append(claim)
        self.claims.release(batch.batch_id)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9), outcome=st.sampled_from(["publish", "transient", "terminal", "outage"]))
    def end(self, pick: int, outcome: str) -> None:
        claim = self.held.pop(pick % len(self.held))
        if not self._holds(claim):
            with pytest.raises(LostClaim):
                self._end(claim, outcome)
            return
        self._end(claim, outcome)
        name = (claim.job_id, claim.chunk_key)
        del self.owner[name]
        if outcome == "outage":
            self.spent[name] -= 1

    def _end(self, claim: Claim, outcome: str) -> None:
        if outcome == "publish":
            with self.claims.publishing(claim) as publication:
                publication.record(RECEIPT)
            return
        decision = rules.after_failure(
            attempts=claim.attempts,
            max_attempts=self.world.limits.max_attempts,
            terminal=outcome == "terminal",
            infrastructure=outcome == "outage",
        )
        self.claims.fail(claim, outcome, decision)

    @rule()
    def time_passes(self) -> None:
        self.world.ask("UPDATE exports.job_chunk SET run_at = now() WHERE status = 'PENDING'")

    @rule()
    def every_worker_dies(self) -> None:
        self.world.ask("UPDATE exports.job_chunk SET lease_until = now() WHERE status = 'RUNNING'")
        cancelled = {job for (job,) in self.world.ask("SELECT job_id FROM exports.job WHERE cancel_requested")}
        assert self.claims.reap() == len(self.owner)
        for name in self.owner:
            self.spent[name] -= name[0] in cancelled
        self.owner.clear()

    @precondition(lambda self: self.jobs)
    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        job_id = sorted(self.jobs)[pick % len(self.jobs)]
        before = self.world.job(job_id).status
        try:
            self.world.jobs.cancel(job_id)
        except WrongState:
            assert before in (JobStatus.COMPLETED, JobStatus.FAILED)

    @precondition(lambda self: self.jobs)
    @rule(pick=st.integers(0, 9))
    def retry(self, pick: int) -> None:
        job_id = sorted(self.jobs)[pick % len(self.jobs)]
        before = self.world.job(job_id)
        try:
            self.world.jobs.retry(job_id)
        except WrongState:
            assert before.status is not JobStatus.FAILED
            return
        assert before.status is JobStatus.FAILED
        self.jobs[job_id] = JobStatus.IN_PROGRESS
        failed = {one.chunk_key for one in self.world.jobs.chunks(job_id) if one.attempts == 0}
        for name in [name for name in self.spent if name[0] == job_id and name[1] in failed]:
            self.spent[name] = 0

    def _holds(self, claim: Claim) -> bool:
        return self.owner.get((claim.job_id, claim.chunk_key)) == claim.fence

    @invariant()
    def the_rows_agree(self) -> None:
        for job_id, last in self.jobs.items():
            job, chunks = self.world.job(job_id), self.world.jobs.chunks(job_id)
            by = {name: sum(one.status == name for one in chunks) for name in ("PENDING", "RUNNING", "DONE", "FAILED")}
            assert job.counts == Counts(len(chunks), by["PENDING"], by["RUNNING"], by["DONE"], by["FAILED"])
            assert job.reused == sum(one.reused for one in chunks)
            if last.is_terminal:
                assert job.status is last, "terminal never changes by itself"
            else:
                state = rules.job_status(
                    job.counts, cancel_requested=job.cancel_requested, started=job.started_at is not None
                )
                assert job.status is state
            self.jobs[job_id] = job.status


def test_no_order_of_events_breaks_the_protocol(module_world: World):
    """Guards counters, single flight, attempts, fences and terminal states all at once."""
    Protocol.world = module_world
    run_state_machine_as_test(
        Protocol,
        settings=settings(
            max_examples=15,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
