"""The readiness design as its document describes it, read in its favour wherever it is silent.

Restated from requirements/readiness.md, by section:
- stream-router: the stream record of a marker starts an execution whose name follows from pipeline, date and schedule,
  and a name is given once. In its favour: no record is ever lost, and a router that fails gets its records again.
- Main Flow: exclusion, lock, run log, configuration, traits, readiness, trigger, poll every 30 s, run log, release. In
  its favour: Step Functions itself never dies. Deadlines only alert, no date is excluded, and nothing drifts.
- Error Handling: a Lambda is tried again after 2, 4 and 8 s; then Catch, AlertError, End, and the lock is left to its
  TTL. In its favour: whatever a Lambda died of is retried, none is stopped by its time limit, and a person reacts to
  every alert and starts the execution again by hand, under a new name, until it ends well. What follows when the lock
  is held, or the job has failed, is not said: both are errors here, so that the person hears of them.
- Design Decisions: a swap by version, a lock by conditional put. Its TTL is not given; it is 5 minutes here.
- trigger: PENDING to TRIGGERING, start, TRIGGERING to RUNNING or FAILED. In its favour: a repeated Lambda does not make
  its run anew, and goes on if it finds it RUNNING. If it finds it TRIGGERING, it cannot know whether a job was started,
  nor can the person: no row names it. There is no token either, so that every start is a job, as in Glue.
- run-checker: in its favour, a status that cannot be read is an error, and not a failed job.

One thing is no silence. Events replace "the local watcher loop", and the only Wait is that of the poll: so what is not
ready ends, which is the normal case and no alert; and the marker that comes with the input finds its name taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.faults.schedule import Actor, World, unreachable
from lockstep.kernel.crash import CrashInjected
from lockstep.kernel.errors import LockstepError, Transient
from tests.faults.models.oracle import Facts
from tests.faults.models.scripts import Act, Scenario, Source

LOCK_SECONDS = 300.0
POLL_SECONDS = 30.0
JOB_SECONDS = 45.0
RETRY_WAITS = (2.0, 4.0, 8.0)


@dataclass
class Job:
    """What the place of the jobs runs."""

    unit: str
    ends_at: float
    failed: bool


@dataclass
class Run:
    """A run's truth item. Its list copy decides nothing."""

    status: str = "PENDING"
    version: int = 1
    job: Job | None = None


@dataclass
class OriginalReadiness:
    """One table, its stream, Step Functions, four Lambdas, and a place where jobs run."""

    world: World
    source: Source
    answered: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    begun: list[str] = field(default_factory=list)
    locked_until: float = 0.0
    traits: dict[str, bool] = field(default_factory=dict)
    run_log: dict[str, str] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)

    # --- who acts -------------------------------------------------------------------------------------------------

    def mark(self, actor: Actor, unit: str) -> None:
        """A system writes a marker until it is answered."""
        for _ in range(3):
            try:
                self._call(actor, "table.put_marker", lambda: self._tell(unit))
            except LockstepError:
                continue
            self.answered.append(unit)
            return

    def route(self, actor: Actor) -> None:
        """The stream-router: what it has not done when it fails, the stream brings again."""
        for unit in list(self.records):
            self._call(actor, "states.start_execution", lambda unit=unit: self._start_execution(unit))
            if unit in self.records:
                self.records.remove(unit)

    def executions(self) -> list[Act]:
        """Those that were started, each once."""
        begun, self.begun = self.begun, []
        return [("execution", partial(self.execute, unit=unit)) for unit in begun]

    def execute(self, actor: Actor, unit: str) -> None:
        """The state machine, from its first state to End."""
        try:
            self._main_flow(actor, unit)
        except LockstepError:
            self._task(actor, self._alert_error, unit)

    def operate(self) -> None:
        """The person; the names are new, so that nothing refuses them."""
        self.begun += dict.fromkeys(self.alerts)
        self.alerts.clear()

    def repeat(self) -> None:
        """The stream brings its first record once more."""
        self.records += self.told[:1]

    def facts(self) -> Facts:
        """A job that failed has no effect: the one after it is no second one."""
        wanted = [unit for unit in self.source.expected if unit in self.answered]
        effects = [job.unit for job in self.jobs if job.unit in wanted and not job.failed]
        finished = {unit for unit, status in self.run_log.items() if status == "COMPLETED"}
        return Facts(wanted, effects, finished, ordered=False)

    # --- the state machine ----------------------------------------------------------------------------------------

    def _main_flow(self, actor: Actor, unit: str) -> None:
        task = partial(self._task, actor)
        task(self._read_config)  # CheckExclusion: no date is excluded
        task(self._acquire_lock, unit)
        result = "skipped"
        if not task(self._is_completed, unit):
            task(self._read_config)  # ResolvePipeline
            task(self._evaluate, unit)
            if task(self._is_ready, unit):
                result = self._run_job(task, unit)
                task(self._log_result, unit, "COMPLETED" if result == "succeeded" else "FAILED")
        task(self._release_lock)
        if result == "failed":
            raise Transient("the job failed.", unit=unit)

    def _run_job(self, task: Callable[..., Any], unit: str) -> str:
        """TriggerPipeline and PollRunStatus."""
        run, result = Run(), "running"
        task(self._trigger, unit, run)
        while result == "running":
            self.world.hang(POLL_SECONDS)
            result = task(self._check_run, run)
        return result

    def _task(self, actor: Actor, invoke: Callable[..., Any], *arguments: Any) -> Any:
        """A Task state with its Retry; the error that is left is for its Catch."""
        for wait in (*RETRY_WAITS, None):
            try:
                return invoke(actor, *arguments)
            except (LockstepError, CrashInjected) as error:
                actor.dead = False  # only the Lambda's process died: Step Functions goes on, and starts another one
                if wait is None:
                    raise Transient("every try of a task failed.", unit=actor.name) from error
                self.world.hang(wait)

    # --- the Lambdas ----------------------------------------------------------------------------------------------

    def _read_config(self, actor: Actor) -> None:
        self._call(actor, "table.get_config", lambda: None)

    def _acquire_lock(self, actor: Actor, unit: str) -> None:
        """Nothing says whose a lock is: who took it and did not hear so finds it held."""
        if not self._call(actor, "table.put_lock", self._lock):
            raise Transient("the lock is held.", unit=unit)

    def _is_completed(self, actor: Actor, unit: str) -> bool:
        return self._call(actor, "table.get_run_log", lambda: self.run_log.get(unit)) == "COMPLETED"

    def _evaluate(self, actor: Actor, unit: str) -> None:
        passed = self._call(actor, "evaluator.ask", lambda: unit in self.source.published)
        self._call(actor, "table.put_trait", lambda: self.traits.update({unit: passed}))

    def _is_ready(self, actor: Actor, unit: str) -> bool:
        return self._call(actor, "table.get_traits", lambda: self.traits[unit])

    def _trigger(self, actor: Actor, unit: str, run: Run) -> None:
        self._call(actor, "table.put_run", lambda: None)  # PENDING, if it is not there
        if not self._call(actor, "table.cas_run", lambda: self._swap(run, 1, "TRIGGERING")):
            if run.status == "RUNNING":
                return  # an earlier try of this Lambda did it, and died afterwards
            raise Transient(f"the run is {run.status}; nobody knows whether its job was started.", unit=unit)
        try:
            job = self._call(actor, "jobs.start", lambda: self._start_job(unit))
        except LockstepError:
            self._call(actor, "table.cas_run", lambda: self._swap(run, 2, "FAILED"))
            raise
        self._call(actor, "table.cas_run", lambda: self._swap(run, 2, "RUNNING", job))

    def _check_run(self, actor: Actor, run: Run) -> str:
        job = self._call(actor, "table.get_run", lambda: run.job)
        return self._call(actor, "jobs.status", lambda: self._status(job))

    def _log_result(self, actor: Actor, unit: str, status: str) -> None:
        self._call(actor, "table.put_run_log", lambda: self.run_log.update({unit: status}))

    def _release_lock(self, actor: Actor) -> None:
        self._call(actor, "table.delete_lock", lambda: setattr(self, "locked_until", 0.0))

    def _alert_error(self, actor: Actor, unit: str) -> None:
        self._call(actor, "alerts.publish", lambda: self.alerts.append(unit))

    # --- the parts ------------------------------------------------------------------------------------------------

    def _tell(self, unit: str) -> None:
        self.told.append(unit)
        self.records.append(unit)

    def _start_execution(self, unit: str) -> None:
        if unit not in self.names:  # else it exists already, which is what the name is for
            self.names.add(unit)
            self.begun.append(unit)

    def _lock(self) -> bool:
        """One lock for all dates of the pipeline's schedule."""
        now = self.world.time.monotonic()
        if now < self.locked_until:
            return False
        self.locked_until = now + LOCK_SECONDS
        return True

    def _swap(self, run: Run, version: int, status: str, job: Job | None = None) -> bool:
        if run.version != version:
            return False
        run.status, run.version, run.job = status, version + 1, job
        return True

    def _start_job(self, unit: str) -> Job:
        """Every start is a job. One that is damaged fails, and works the next time."""
        job = Job(unit, self.world.time.monotonic() + JOB_SECONDS, unit in self.source.damaged)
        self.source.damaged.discard(unit)
        self.jobs.append(job)
        return job

    def _status(self, job: Job) -> str:
        if job.ends_at > self.world.time.monotonic():
            return "running"
        return "failed" if job.failed else "succeeded"

    def _call(self, actor, step, action):
        return self.world.call(actor, step, action, unreachable)


def run(world: World, scenario: Scenario) -> Facts:
    """Play the scenario: a date per tick, then as many ticks as it takes."""
    source = Source(scenario)
    this = OriginalReadiness(world, source)
    for tick in scenario.ticks(world):
        for unit in source.asked(tick):
            world.start(f"client.{tick}", partial(this.mark, unit=unit))
            world.run()
        if scenario.repeat:
            this.repeat()
        scenario.together(world, tick, [("router", this.route)] * scenario.copies)
        scenario.together(world, tick, this.executions(), rivals=False)
        this.operate()
    return this.facts()
