"""Words of the readiness plane: executions, runs, traits, events into the reducer and effects out of it.

What belongs here: immutable values and the tables of legal moves. What does not: decisions (rules.py), wall-clock
arithmetic (timing.py), storage (store.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple

from lockstep.kernel.errors import InvalidInput, Terminal

DEFAULT_SCHEDULE: Final = "daily"
PIPELINE_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,253}[a-z0-9])?", re.ASCII)
SCHEDULE_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?", re.ASCII)


class IllegalTransition(Terminal):
    """The request does not fit the state that the execution is in; nothing was changed."""


# --- where an execution and its runs can be --------------------------------------------------------------------------


class RunStatus(StrEnum):
    """The state of one run, and of the execution that it belongs to."""

    PENDING = "PENDING"
    TRIGGERING = "TRIGGERING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    COMPLETED_MONITORING = "COMPLETED_MONITORING"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more happens by itself."""
        return self in _TERMINAL

    @property
    def is_live(self) -> bool:
        """Whether a job may be running somewhere."""
        return self in _LIVE

    @property
    def is_success(self) -> bool:
        """Whether the job did its work."""
        return self in _SUCCESS


_TERMINAL: Final = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED})
_LIVE: Final = frozenset({RunStatus.TRIGGERING, RunStatus.RUNNING})
_SUCCESS: Final = frozenset({RunStatus.COMPLETED, RunStatus.COMPLETED_MONITORING})

# A run: a synchronous trigger passes through RUNNING, so TRIGGERING never jumps to COMPLETED.
RUN_MOVES: Final[Mapping[RunStatus, frozenset[RunStatus]]] = {
    RunStatus.PENDING: frozenset({RunStatus.TRIGGERING, RunStatus.CANCELLED}),
    RunStatus.TRIGGERING: frozenset({RunStatus.RUNNING, RunStatus.FAILED, RunStatus.CANCELLED}),
    RunStatus.RUNNING: frozenset(
        {RunStatus.COMPLETED, RunStatus.COMPLETED_MONITORING, RunStatus.FAILED, RunStatus.CANCELLED}
    ),
    RunStatus.COMPLETED_MONITORING: frozenset({RunStatus.COMPLETED, RunStatus.FAILED}),
    RunStatus.COMPLETED: frozenset(),
    RunStatus.FAILED: frozenset(),
    RunStatus.CANCELLED: frozenset(),
}

# An execution outlives its runs. Besides what its run does it may wait again for the next try or rerun (PENDING), and
# fail before any run exists (validation timeout). One step may take several hops; this table has the ends of a step.
EXECUTION_MOVES: Final[Mapping[RunStatus, frozenset[RunStatus]]] = {
    RunStatus.PENDING: frozenset(
        {
            RunStatus.PENDING,
            RunStatus.TRIGGERING,
            RunStatus.CANCELLED,
            RunStatus.FAILED,
            RunStatus.COMPLETED,  # dry run: decided, recorded, nothing started
            RunStatus.COMPLETED_MONITORING,
        }
    ),
    RunStatus.TRIGGERING: frozenset(RunStatus),
    RunStatus.RUNNING: frozenset(RunStatus) - {RunStatus.TRIGGERING},
    RunStatus.COMPLETED_MONITORING: frozenset({RunStatus.COMPLETED_MONITORING, RunStatus.COMPLETED, RunStatus.PENDING}),
    RunStatus.COMPLETED: frozenset({RunStatus.COMPLETED, RunStatus.PENDING}),
    RunStatus.FAILED: frozenset({RunStatus.FAILED, RunStatus.PENDING}),
    RunStatus.CANCELLED: frozenset({RunStatus.CANCELLED, RunStatus.PENDING}),
}


class Category(StrEnum):
    """Why something failed, so that machines can decide whether to try again."""

    TRANSIENT = "TRANSIENT"
    PERMANENT = "PERMANENT"
    TIMEOUT = "TIMEOUT"
    EVALUATOR_CRASH = "EVALUATOR_CRASH"


class TraitStatus(StrEnum):
    """What is known about a trait. FAIL is an honest "not yet"; ERROR means that nobody could say."""

    PASS = "PASS"  # noqa: S105  # a verdict
    FAIL = "FAIL"
    STALE = "STALE"
    ERROR = "ERROR"


class ReadinessStatus(StrEnum):
    """What the traits add up to. ERROR: not ready, and at least one required trait could not be evaluated."""

    READY = "READY"
    NOT_READY = "NOT_READY"
    ERROR = "ERROR"


class Reason(StrEnum):
    """Why an execution, or a further generation of it, came to be. Each kind of rerun has its own budget."""

    SCHEDULE = "schedule"
    MARKER = "marker"
    MANUAL = "manual"
    REPLAY = "replay"
    BACKFILL = "backfill"
    DRIFT = "drift"
    LATE_DATA = "late-data"


class PollOutcome(StrEnum):
    """What the place that runs the job says. UNKNOWN is not FAILED: the job may well be running."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class Level(StrEnum):
    """How loud an alert is."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


# --- what is evaluated -----------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """One execution: a pipeline, the date it is for, and the schedule. Never "today"."""

    pipeline: str
    date: date
    schedule: str = DEFAULT_SCHEDULE

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.date.isoformat()}/{self.schedule}"


def parse_key(pipeline: str, day: str, schedule: str) -> Key:
    """A key from text, or `InvalidInput` that lists every problem."""
    problems: list[str] = []
    if not PIPELINE_NAME.fullmatch(pipeline):
        problems.append("pipeline: lower-case letters, digits, dots, hyphens and underscores")
    if not SCHEDULE_NAME.fullmatch(schedule):
        problems.append("schedule: lower-case letters, digits, hyphens and underscores")
    parsed = _parse_date(day)
    if parsed is None:
        problems.append("date: must be YYYY-MM-DD")
    if problems or parsed is None:
        raise InvalidInput("the execution is not named properly.", unit=pipeline[:80], problems=problems)
    return Key(pipeline, parsed, schedule)


def _parse_date(text: str) -> date | None:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


class TraitResult(NamedTuple):
    """One answer about one trait, for one execution. `expires_at` None: valid for as long as the execution is."""

    trait: str
    status: TraitStatus
    reason: str = ""
    value: Mapping[str, Any] = {}
    category: Category | None = None
    evaluated_at: datetime | None = None
    expires_at: datetime | None = None
    pushed: bool = False


class TraitPlan(NamedTuple):
    """A trait of one pipeline after its archetype's defaults were merged in."""

    type: str
    required: bool = True
    evaluator: str | None = None
    config: Mapping[str, Any] = {}
    ttl: int = 0
    timeout: int = 30
    description: str = ""


class Readiness(NamedTuple):
    """What the traits of an execution add up to at one moment."""

    status: ReadinessStatus
    blocking: tuple[str, ...] = ()
    traits: tuple[TraitResult, ...] = ()
    evaluated_at: datetime | None = None

    @property
    def signature(self) -> tuple[ReadinessStatus, tuple[str, ...]]:
        """What must change before anybody needs to be told again."""
        return self.status, self.blocking


# --- the plan of a pipeline ------------------------------------------------------------------------------------------


class RetryPlan(NamedTuple):
    """When a failed try is followed by another."""

    max_attempts: int = 3
    backoff_seconds: float = 30.0
    multiplier: float = 2.0
    categories: frozenset[Category] = frozenset({Category.TRANSIENT, Category.TIMEOUT})
    cap_seconds: float = 3600.0

    def backoff(self, attempt: int) -> timedelta:
        """The wait after try number `attempt` failed."""
        return timedelta(seconds=min(self.cap_seconds, self.backoff_seconds * self.multiplier ** min(attempt - 1, 64)))


class DriftRule(NamedTuple):
    """A field of a trait's value that must stay where it was at completion."""

    trait: str
    field: str
    threshold: float = 0.0


class MonitorPlan(NamedTuple):
    """Watching after success. Without rules nothing can drift; only late data is then noticed."""

    enabled: bool = False
    duration: timedelta = timedelta(hours=2)
    rules: tuple[DriftRule, ...] = ()


class Budgets(NamedTuple):
    """How many further generations one execution may have, by reason; drift cannot eat a person's budget."""

    manual: int = 5
    replay: int = 5
    backfill: int = 1
    drift: int = 1
    late_data: int = 1

    def allowed(self, reason: Reason) -> int:
        """The budget of one reason."""
        return int(getattr(self, reason.value.replace("-", "_"), 0))


class SchedulePlan(NamedTuple):
    """When an execution of each date becomes active, HH:MM or HH:MM+N days later. Times are local to `timezone`."""

    name: str = DEFAULT_SCHEDULE
    after: str = "00:00"
    deadline: str | None = None
    timezone: str = "UTC"


class SlaPlan(NamedTuple):
    """Deadlines as written: HH:MM on the execution date, HH:MM+N for N days later, or a duration from activation."""

    evaluation: str | None = None
    completion: str | None = None
    timezone: str = "UTC"
    validation_timeout: timedelta | None = None
    at_risk_lead: timedelta | None = None


class ExclusionPlan(NamedTuple):
    """Dates on which the pipeline does not run; the named calendar is already merged in."""

    days: frozenset[int] = frozenset()
    dates: frozenset[date] = frozenset()
    calendar: str | None = None

    def excludes(self, day: date) -> bool:
        """Whether the execution date, not today, is excluded."""
        return day.weekday() in self.days or day in self.dates


class ReadinessRule(NamedTuple):
    """How required traits combine. `threshold` is used by majority-pass; None means more than half."""

    type: str = "all-required-pass"
    threshold: int | None = None


class TriggerPlan(NamedTuple):
    """How the job is started; `options` are the fields of its type."""

    type: str
    options: Mapping[str, Any] = {}
    timeout: int = 30
    resumable: bool = True


class Plan(NamedTuple):
    """Everything the reducer must know about a pipeline, resolved and validated."""

    pipeline: str
    traits: tuple[TraitPlan, ...] = ()
    trigger: TriggerPlan | None = None
    rule: ReadinessRule = ReadinessRule()
    retry: RetryPlan = RetryPlan()
    sla: SlaPlan = SlaPlan()
    schedules: tuple[SchedulePlan, ...] = (SchedulePlan(),)
    exclusions: ExclusionPlan = ExclusionPlan()
    monitor: MonitorPlan = MonitorPlan()
    budgets: Budgets = Budgets()
    interval: timedelta = timedelta(seconds=30)
    poll_interval: timedelta = timedelta(seconds=30)
    run_timeout: timedelta = timedelta(hours=4)
    watched: bool = True
    catch_up: timedelta | None = None
    dry_run: bool = False
    tier: int = 3
    archetype: str = ""
    owner: str = ""
    downstream: tuple[str, ...] = ()
    cascade_delay: timedelta = timedelta(0)

    def schedule(self, name: str) -> SchedulePlan | None:
        """The schedule of that name, or None."""
        return next((schedule for schedule in self.schedules if schedule.name == name), None)

    @property
    def start_lease(self) -> timedelta:
        """How long one starter may take before another repeats the start with the same token."""
        return timedelta(seconds=(self.trigger.timeout if self.trigger else 30) + 30)


# --- the state of an execution ---------------------------------------------------------------------------------------


class Deadlines(NamedTuple):
    """The instants of one execution's SLA. None: not promised."""

    evaluation: datetime | None = None
    evaluation_risk: datetime | None = None
    completion: datetime | None = None
    completion_risk: datetime | None = None


NO_DEADLINES: Final = Deadlines()


class Failure(NamedTuple):
    """Why a try ended badly."""

    category: Category
    message: str


class Try(NamedTuple):
    """A try that has ended: one line of the execution's history."""

    generation: int
    attempt: int
    run_id: str
    status: RunStatus
    reason: Reason
    started_at: datetime
    ended_at: datetime
    failure: Failure | None = None


class Cancel(NamedTuple):
    """A wish to stop the running job. It is fulfilled when the job is known to have stopped."""

    why: str
    by_timeout: bool = False
    tries: int = 0


class Alert(NamedTuple):
    """Something a person should know. Its identity is the execution and the kind, so it is raised once."""

    key: Key
    kind: str
    level: Level
    message: str
    at: datetime
    details: Mapping[str, Any] = {}

    @property
    def id(self) -> str:
        """The same alert has the same id, whoever raises it and however often it is delivered."""
        return f"{self.key.pipeline}:{self.key.schedule}:{self.key.date.isoformat()}:{self.kind}"


class Execution(NamedTuple):
    """All that is known about one (pipeline, date, schedule). `plan` is joined when it is loaded, never stored.

    `in_doubt`: its start was sent more than once, or its answer was lost, so a refusal does not say that nothing runs.
    """

    plan: Plan
    key: Key
    opened_at: datetime
    started_at: datetime
    run_id: str
    status: RunStatus = RunStatus.PENDING
    reason: Reason = Reason.SCHEDULE
    generation: int = 0
    attempt: int = 1
    next_at: datetime | None = None
    triggered_at: datetime | None = None
    lease_until: datetime | None = None
    in_doubt: bool = False
    handle: Mapping[str, Any] = {}
    polls: int = 0
    unknown_polls: int = 0
    known_at: datetime | None = None
    cancel: Cancel | None = None
    readiness: Readiness | None = None
    evaluator_errors: int = 0
    baseline: Mapping[str, Any] | None = None
    monitor_until: datetime | None = None
    late_data: bool = False
    late_seen: datetime | None = None
    reruns: Mapping[str, int] = {}
    rerun_id: str | None = None
    alerted: frozenset[str] = frozenset()
    outbox: tuple[Alert, ...] = ()
    history: tuple[Try, ...] = ()
    failure: Failure | None = None
    dry_run: bool = False
    deadlines: Deadlines = NO_DEADLINES
    updated_at: datetime | None = None
    version: int = 0

    @property
    def is_open(self) -> bool:
        """Whether time or an answer may still change it by itself."""
        return not self.status.is_terminal or bool(self.outbox)

    def changed(self, **changes: Any) -> Execution:
        """A copy with some fields replaced. Four times as fast as `_replace`, which asks for every field by name."""
        values = list(self)
        for name, value in changes.items():
            values[_PLACE[name]] = value
        return tuple.__new__(Execution, values)


_PLACE: Final = {name: place for place, name in enumerate(Execution._fields)}


# --- events into the reducer -----------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """Time has passed."""


class Woken(NamedTuple):
    """A marker, or a person, asks to look now. Harmless when repeated."""

    source: str = "marker"
    not_before: datetime | None = None


class Evaluated(NamedTuple):
    """The traits were looked at, for one try of the execution."""

    run_id: str
    results: tuple[TraitResult, ...]


class Started(NamedTuple):
    """The job was accepted. `finished`: it has also ended well already (a synchronous trigger)."""

    run_id: str
    handle: Mapping[str, Any] = {}
    finished: bool = False


class StartFailed(NamedTuple):
    """The job was certainly not started."""

    run_id: str
    category: Category
    message: str


class StartUnknown(NamedTuple):
    """The start was sent and the answer lost. It is repeated with the same token, or left to a person."""

    run_id: str
    message: str


class Polled(NamedTuple):
    """What the job's place said when asked."""

    run_id: str
    outcome: PollOutcome
    category: Category | None = None
    message: str = ""


class Callback(NamedTuple):
    """The job itself reports its end."""

    run_id: str
    success: bool
    message: str = ""
    category: Category | None = None


class CancelRequested(NamedTuple):
    """A person wants the execution stopped."""

    why: str


class CancelAnswered(NamedTuple):
    """Whether the job is known to have stopped after a cancel."""

    run_id: str
    stopped: bool


class RerunRequested(NamedTuple):
    """A further generation is wanted."""

    rerun_id: str
    reason: Reason
    why: str = ""


class LateData(NamedTuple):
    """Input arrived after the job had read it. `at` tells one arrival from the same one told again."""

    rerun_id: str
    why: str = ""
    at: datetime | None = None


class Delivered(NamedTuple):
    """These alerts have reached the sinks."""

    ids: frozenset[str]


Event = (
    Tick
    | Woken
    | Evaluated
    | Started
    | StartFailed
    | StartUnknown
    | Polled
    | Callback
    | CancelRequested
    | CancelAnswered
    | RerunRequested
    | LateData
    | Delivered
)


# --- effects out of the reducer --------------------------------------------------------------------------------------
# Facts are written in the same transaction as the state. Actions are done afterwards, by the writer whose transaction
# won, and their answers come back as events.


class Emit(NamedTuple):
    """A line of the append-only event log."""

    kind: str
    message: str = ""
    run_id: str | None = None
    details: Mapping[str, Any] = {}


class RunMoved(NamedTuple):
    """A run walked along `path`; every hop is legal by RUN_MOVES. `created`: its row does not exist before."""

    run_id: str
    path: tuple[RunStatus, ...]
    attempt: int
    generation: int
    created: bool = False
    handle: Mapping[str, Any] = {}
    failure: Failure | None = None


class RerunRecorded(NamedTuple):
    """The ledger line of a rerun, written when it is accepted and again when it ends."""

    rerun_id: str
    reason: Reason
    status: str
    why: str = ""
    run_id: str | None = None


class MarkDownstream(NamedTuple):
    """Wake a downstream pipeline for the same date and schedule."""

    pipeline: str
    not_before: datetime | None = None


class Evaluate(NamedTuple):
    """Look at the traits and come back with `Evaluated`."""

    run_id: str


class StartRun(NamedTuple):
    """Start the job under this token. `resume`: an earlier start with the same token may have succeeded."""

    run_id: str
    resume: bool = False


class PollRun(NamedTuple):
    """Ask how the job is doing."""

    run_id: str
    handle: Mapping[str, Any]


class CancelRun(NamedTuple):
    """Stop the job."""

    run_id: str
    handle: Mapping[str, Any]


class DeliverAlerts(NamedTuple):
    """Send what is in the outbox to the sinks."""

    alerts: tuple[Alert, ...]


Fact = Emit | RunMoved | RerunRecorded | MarkDownstream
Action = Evaluate | StartRun | PollRun | CancelRun | DeliverAlerts
Effect = Fact | Action

FACTS: Final = (Emit, RunMoved, RerunRecorded, MarkDownstream)


class Step(NamedTuple):
    """What the reducer returns."""

    state: Execution
    effects: tuple[Effect, ...]
