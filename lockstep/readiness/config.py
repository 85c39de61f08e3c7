"""Configuration: archetypes, calendars and pipelines from YAML, validated whole and resolved into plans.

What belongs here: the fields, their checks and the merge of defaults. What does not: reading YAML (yamlfile.py), what a
plan means (rules.py). Everything is refused loudly at load: no field fails open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from lockstep.kernel.errors import InvalidInput, LockstepError
from lockstep.readiness import timing, yamlfile
from lockstep.readiness.model import (
    DEFAULT_SCHEDULE,
    PIPELINE_NAME,
    SCHEDULE_NAME,
    Budgets,
    Category,
    DriftRule,
    ExclusionPlan,
    MonitorPlan,
    Plan,
    ReadinessRule,
    RetryPlan,
    SchedulePlan,
    SlaPlan,
    TraitPlan,
    TriggerPlan,
)
from lockstep.readiness.safety import check_address, check_argv, check_templates
from lockstep.readiness.verdict import MAJORITY

DEFAULT_TIMEOUT_SECONDS = 30
MAX_TIMEOUT_SECONDS = 300
LONGEST_CATCH_UP = timedelta(days=31)
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def _name(text: str) -> str:
    if not PIPELINE_NAME.fullmatch(text):
        raise ValueError("use lower-case letters, digits, dots, hyphens and underscores")
    return text


def _schedule_name(text: str) -> str:
    if not SCHEDULE_NAME.fullmatch(text):
        raise ValueError("use lower-case letters, digits, hyphens and underscores")
    return text


def _zone(text: str) -> str:
    try:
        timing.zone(text)
    except InvalidInput:
        raise ValueError(f"{text} is not a time zone; use a name such as Europe/Zurich") from None
    return text


def _clock(text: str) -> str:
    if timing.parse_clock(text) is None:
        raise ValueError('must be a time such as "06:00", or "00:20+1" for the next day, in quotes')
    return text


def _deadline(text: str) -> str:
    if timing.parse_clock(text) is None and timing.parse_duration(text) is None:
        raise ValueError('must be a time such as "09:00" or "02:00+1", in quotes, or a duration such as 45m')
    return text


def _duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    length = timing.parse_duration(value) if isinstance(value, str) else None
    if length is None:
        raise ValueError("must be a duration such as 30s, 45m, 2h or 1h30m")
    return length


def _catch_up(value: Any) -> Any:
    length = timedelta(0) if value == "0s" else _duration(value)
    if length > LONGEST_CATCH_UP:
        raise ValueError(f"at most {LONGEST_CATCH_UP.days}d; open older dates with `lockstep readiness backfill`")
    return length


def _weekday(text: str) -> str:
    if text.lower() not in WEEKDAYS:
        raise ValueError(f"{text} is not a weekday")
    return text.lower()


def _day(value: Any) -> date:
    try:
        return date.fromisoformat(value)
    except (ValueError, TypeError):
        raise ValueError("must be a date such as 2026-12-25") from None


PipelineName = Annotated[str, AfterValidator(_name)]
Zone = Annotated[str, AfterValidator(_zone)]
DeadlineText = Annotated[str, AfterValidator(_deadline)]
Duration = Annotated[timedelta, BeforeValidator(_duration)]
Weekday = Annotated[str, AfterValidator(_weekday)]
Day = Annotated[date, BeforeValidator(_day)]
Seconds = Annotated[int, Field(ge=0, le=30 * 24 * 3600)]
Timeout = Annotated[int, Field(ge=0, le=MAX_TIMEOUT_SECONDS)]
Count = Annotated[int, Field(ge=0, le=100)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True, strict=True)


class TraitTemplate(_Fields):
    """A trait as an archetype asks for it."""

    type: PipelineName
    description: str = ""
    default_config: dict[str, Any] = {}
    default_ttl: Seconds = 0
    default_timeout: Timeout = 0


class RuleFields(_Fields):
    """How the required traits combine."""

    class Parameters(_Fields):
        """Of majority-pass only."""

        threshold: Annotated[int, Field(ge=1)] | None = None

    type: Literal["all-required-pass", "majority-pass"] = "all-required-pass"
    parameters: Parameters = Parameters()


class ArchetypeFields(_Fields):
    """A template: which traits a kind of pipeline must have."""

    name: PipelineName
    description: str = ""
    required_traits: Annotated[list[TraitTemplate], Field(min_length=1)]
    optional_traits: list[TraitTemplate] = []
    readiness_rule: RuleFields = RuleFields()

    @model_validator(mode="after")
    def _consistent(self) -> ArchetypeFields:
        types = [trait.type for trait in (*self.required_traits, *self.optional_traits)]
        doubled = sorted({one for one in types if types.count(one) > 1})
        if doubled:
            raise ValueError(f"trait {doubled[0]} is given twice; keep one of them")
        threshold = self.readiness_rule.parameters.threshold
        if threshold is not None and self.readiness_rule.type != MAJORITY:
            raise ValueError("readinessRule.parameters.threshold belongs to majority-pass; remove it")
        if threshold is not None and threshold > len(self.required_traits):
            raise ValueError("readinessRule.parameters.threshold is larger than the number of required traits")
        return self


class CalendarFields(_Fields):
    """Days and dates on which nothing runs, shared by name."""

    name: PipelineName
    description: str = ""
    days: list[Weekday] = []
    dates: list[Day] = []


class TraitFields(_Fields):
    """A pipeline's own say about a trait. `ttl` and `timeout` override the defaults when above zero."""

    evaluator: str | None = None
    config: dict[str, Any] = {}
    ttl: Seconds = 0
    timeout: Timeout = 0


class RetryFields(_Fields):
    """When a failed try is followed by another."""

    max_attempts: Annotated[int, Field(ge=1, le=20)] = 3
    backoff_seconds: Annotated[float, Field(ge=0, le=3600, strict=False)] = 30.0
    backoff_multiplier: Annotated[float, Field(ge=1, le=10, strict=False)] = 2.0
    retryable_failures: list[Literal["TRANSIENT", "TIMEOUT", "EVALUATOR_CRASH"]] = ["TRANSIENT", "TIMEOUT"]


class SlaFields(_Fields):
    """Promises about time."""

    evaluation_deadline: DeadlineText | None = None
    completion_deadline: DeadlineText | None = None
    timezone: Zone = "UTC"
    validation_timeout: Duration | None = None
    at_risk_lead_time: Duration | None = None


class DriftFields(_Fields):
    """A field of a trait's value that must stay within `threshold` of what it was at completion."""

    trait: PipelineName
    field: Annotated[str, Field(min_length=1)]
    threshold: Annotated[float, Field(ge=0, strict=False)] = 0.0


class MonitoringFields(_Fields):
    """Watching after success."""

    enabled: bool = False
    duration: Duration = timedelta(hours=2)
    drift: list[DriftFields] = []


class WatchFields(_Fields):
    """How often the pipeline is looked at; `catchUp`: how far back its executions begin when it is first deployed.

    Absent: with the execution whose time it is. 0s: with the next one.
    """

    enabled: bool = True
    catch_up: Annotated[timedelta, BeforeValidator(_catch_up)] | None = None
    interval: Duration = timedelta(seconds=30)
    poll_interval: Duration = timedelta(seconds=30)
    run_timeout: Duration = timedelta(hours=4)
    monitoring: MonitoringFields = MonitoringFields()


class ScheduleFields(_Fields):
    """One time of day; or, with `every: hour`, the 24 schedules h00 to h23 at `minute`."""

    name: Annotated[str, AfterValidator(_schedule_name)] | None = None
    every: Literal["hour"] | None = None
    minute: Annotated[int, Field(ge=0, le=59)] = 0
    after: Annotated[str, AfterValidator(_clock)] = "00:00"
    deadline: DeadlineText | None = None
    timezone: Zone = "UTC"

    @model_validator(mode="after")
    def _one_form(self) -> ScheduleFields:
        if self.every is None and self.name is None:
            raise ValueError("give the schedule a name, or every: hour")
        if self.every is not None and (self.name is not None or self.after != "00:00"):
            raise ValueError("every: hour makes its own names and times; remove name and after, use minute")
        if self.every is not None and self.deadline is not None and timing.parse_duration(self.deadline) is None:
            raise ValueError("the deadline of hourly schedules is a duration such as 50m")
        return self

    def plans(self) -> list[SchedulePlan]:
        """The schedules it stands for."""
        if self.every is None:
            return [SchedulePlan(self.name or DEFAULT_SCHEDULE, self.after, self.deadline, self.timezone)]
        return [
            SchedulePlan(f"h{hour:02}", f"{hour:02}:{self.minute:02}", self.deadline, self.timezone)
            for hour in range(24)
        ]


class ExclusionFields(_Fields):
    """Dates of execution without an execution."""

    calendar: PipelineName | None = None
    days: list[Weekday] = []
    dates: list[Day] = []


class RerunFields(_Fields):
    """Budgets of further generations, per execution and reason."""

    manual: Count = 5
    replay: Count = 5
    backfill: Count = 1
    drift: Count = 1
    late_data: Count = 1


class CascadeFields(_Fields):
    """How downstream pipelines are woken."""

    delay_between: Duration | None = None


# --- triggers: the fields of each type -------------------------------------------------------------------------------


class _Trigger(_Fields):
    timeout: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_SECONDS)] = DEFAULT_TIMEOUT_SECONDS


class GateTrigger(_Trigger):
    """Nothing is started: being ready in time is the result."""

    type: Literal["gate"]


class DagsterTrigger(_Trigger):
    """A Dagster job, or assets of one; `partition` may use the template variables."""

    type: Literal["dagster"]
    job: str | None = None
    assets: list[str] = []
    partition: str | None = None
    run_config: dict[str, Any] = {}
    tags: dict[str, str] = {}
    location: str = "lockstep"
    repository: str = "__repository__"

    @model_validator(mode="after")
    def _something_to_run(self) -> DagsterTrigger:
        if self.job is None and not self.assets:
            raise ValueError("name a job or assets")
        return self


class HttpTrigger(_Trigger):
    """A request. `completion: callback` leaves the run RUNNING until it reports."""

    type: Literal["http"]
    method: Literal["POST", "PUT"] = "POST"
    url: Annotated[str, AfterValidator(check_address)]
    headers: dict[str, str] = {}
    body: str | dict[str, Any] = ""
    completion: Literal["response", "callback"] = "response"


class CommandTrigger(_Trigger):
    """A program on this machine, as a list of arguments; never a shell. Off unless the deployment allows commands."""

    type: Literal["command"]
    command: Annotated[list[str], AfterValidator(check_argv)]


class AirflowTrigger(_Trigger):
    """A DAG run of Airflow's REST API."""

    type: Literal["airflow"]
    url: Annotated[str, AfterValidator(check_address)]
    dag_id: Annotated[str, Field(alias="dagID", min_length=1)]
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    api: Literal["v1", "v2"] = "v1"


class GlueTrigger(_Trigger):
    """A Glue job run."""

    type: Literal["glue"]
    job_name: str
    arguments: dict[str, str] = {}


class EmrTrigger(_Trigger):
    """A step on a running EMR cluster."""

    type: Literal["emr"]
    cluster_id: str
    job_name: str
    command: str
    arguments: list[str] = []


class EmrServerlessTrigger(_Trigger):
    """A job run of an EMR Serverless application."""

    type: Literal["emr-serverless"]
    application_id: str
    job_name: str
    execution_role_arn: str
    entry_point: str
    arguments: list[str] = []


class StepFunctionTrigger(_Trigger):
    """An execution of a Step Functions state machine."""

    type: Literal["step-function"]
    state_machine_arn: str
    arguments: dict[str, Any] = {}


class DatabricksTrigger(_Trigger):
    """A run of a Databricks job (Jobs API 2.1)."""

    type: Literal["databricks"]
    workspace_url: Annotated[str, AfterValidator(check_address)]
    job_id: int
    headers: dict[str, str] = {}
    arguments: dict[str, str] = {}


class LambdaTrigger(_Trigger):
    """A function, called and awaited."""

    type: Literal["lambda"]
    function_name: str
    payload: dict[str, Any] = {}


TriggerFields = Annotated[
    GateTrigger
    | DagsterTrigger
    | HttpTrigger
    | CommandTrigger
    | AirflowTrigger
    | GlueTrigger
    | EmrTrigger
    | EmrServerlessTrigger
    | StepFunctionTrigger
    | DatabricksTrigger
    | LambdaTrigger,
    Field(discriminator="type"),
]

# Repeating the start of these after a lost answer could run the job twice: nothing there knows our token.
NOT_RESUMABLE = frozenset({"command", "lambda"})


class PipelineFields(_Fields):
    """A pipeline as it is written."""

    name: PipelineName
    archetype: PipelineName
    description: str = ""
    owner: str = ""
    tier: Annotated[int, Field(ge=1, le=3)] = 3
    traits: dict[PipelineName, TraitFields] = {}
    trigger: TriggerFields
    retry: RetryFields = RetryFields()
    sla: SlaFields = SlaFields()
    watch: WatchFields = WatchFields()
    schedules: list[ScheduleFields] = []
    exclusions: ExclusionFields = ExclusionFields()
    reruns: RerunFields = RerunFields()
    cascade: CascadeFields = CascadeFields()
    dry_run: bool = False

    @model_validator(mode="after")
    def _unique_schedules(self) -> PipelineFields:
        names = [plan.name for schedule in self.schedules for plan in schedule.plans()]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"schedule {doubled[0]} is given twice; keep one of them")
        check_templates(self.trigger.model_dump(), "trigger")
        check_templates({name: trait.config for name, trait in self.traits.items()}, "traits")
        return self


# --- loading ---------------------------------------------------------------------------------------------------------


class Registry(NamedTuple):
    """Everything that was loaded: plans by name, and what they were made of."""

    plans: Mapping[str, Plan]
    archetypes: Mapping[str, ArchetypeFields]
    calendars: Mapping[str, CalendarFields]
    pipelines: Mapping[str, PipelineFields]

    def plan(self, name: str) -> Plan:
        """The plan, or `InvalidInput`."""
        if name not in self.plans:
            raise InvalidInput(f"there is no pipeline {name}.", next_step="see `lockstep readiness status` for names.")
        return self.plans[name]


def shipped_folder() -> Path:
    """The configuration that comes with Lockstep."""
    return Path(str(resources.files("lockstep.readiness") / "config"))


def load(folders: Sequence[Path]) -> Registry:
    """Load `archetypes/`, `calendars/` and `pipelines/` of each folder, or raise with every problem found.

    Raises:
        InvalidInput: One line per problem: file, line, field, and how to repair it.
    """
    problems: list[str] = []
    archetypes = _gather(folders, "archetypes", ArchetypeFields, problems)
    calendars = _gather(folders, "calendars", CalendarFields, problems)
    pipelines = _gather(folders, "pipelines", PipelineFields, problems)
    found = {name: fields for name, (_, fields) in archetypes.items()}
    days = {name: fields for name, (_, fields) in calendars.items()}
    plans: dict[str, Plan] = {}
    for name, (document, fields) in pipelines.items():
        wrong = list(_cross_check(fields, found, days, pipelines))
        problems += [document.problem(place, words) for place, words in wrong]
        if not wrong:
            plans[name] = resolve(fields, found[fields.archetype], days)
    if problems:
        raise InvalidInput("the configuration is refused.", next_step="correct the lines below.", problems=problems)
    own = {name: fields for name, (_, fields) in pipelines.items()}
    return Registry(connect(plans), found, days, own)


def parse_pipeline(data: Any, registry: Registry, *, trusted: bool = False) -> Plan:
    """A pipeline that comes through the API. It may not run programs of this machine."""
    document = yamlfile.Document(Path("body"), data, {})
    problems: list[str] = []
    fields = _validate(document, PipelineFields, problems)
    if isinstance(fields, PipelineFields):
        known = {**registry.pipelines, fields.name: fields}
        wrong = _cross_check(fields, registry.archetypes, registry.calendars, known)
        problems += [document.problem(place, words) for place, words in wrong]
        if not trusted:
            problems += _programs(fields)
    if problems or not isinstance(fields, PipelineFields):
        raise InvalidInput("the pipeline is refused.", next_step="correct what is listed.", problems=problems)
    return resolve(fields, registry.archetypes[fields.archetype], registry.calendars)


def _programs(fields: PipelineFields) -> Iterable[str]:
    if fields.trigger.type == "command":
        yield "trigger.type: a command can only be configured in a file; use another type"
    for name, trait in fields.traits.items():
        if trait.evaluator and not trait.evaluator.startswith(("http://", "https://", "builtin:")):
            yield f"traits.{name}.evaluator: programs and functions are for files only; use http or builtin"


def _gather(
    folders: Sequence[Path], kind: str, model: type[_Fields], problems: list[str]
) -> dict[str, tuple[yamlfile.Document, Any]]:
    found: dict[str, tuple[yamlfile.Document, Any]] = {}
    for folder in folders:
        for path in sorted([*(folder / kind).glob("*.yaml"), *(folder / kind).glob("*.yml")]):
            document = yamlfile.read(path)
            problems += document.problems
            fields = None if document.problems else _validate(document, model, problems)
            if fields is None:
                continue
            name = fields.name  # type: ignore[attr-defined]  # all three have one
            if name in found:
                problems.append(
                    document.problem(("name",), f"{name} is also in {found[name][0].path.name}; rename one")
                )
            found[name] = document, fields
    return found


def _validate(document: yamlfile.Document, model: type[_Fields], problems: list[str]) -> _Fields | None:
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        problems += [_words(document, problem) for problem in error.errors()]
    except LockstepError as error:
        problems.append(document.problem((), str(error)))
    return None


def _words(document: yamlfile.Document, problem: Any) -> str:
    # The discriminated union puts the trigger's type into the path, where the file has no such level.
    place = [part for part in problem["loc"] if (part != "function-after[...]")]
    if len(place) > 1 and place[0] == "trigger" and place[1] not in document.lines:
        place = [part for index, part in enumerate(place) if index != 1 or ("trigger", part) in document.lines]
    if problem["type"] == "extra_forbidden":
        return document.problem(place, "is not a known field; remove it or correct its spelling")
    if problem["type"] == "missing":
        return document.problem(place[:-1], f"{place[-1]} is missing; add it")
    return document.problem(place, str(problem["msg"]).removeprefix("Value error, "))


def _cross_check(
    fields: PipelineFields,
    archetypes: Mapping[str, ArchetypeFields],
    calendars: Mapping[str, CalendarFields],
    pipelines: Mapping[str, Any],
) -> Iterable[tuple[yamlfile.Location, str]]:
    """What one file cannot know about itself."""
    archetype = archetypes.get(fields.archetype)
    if archetype is None:
        yield ("archetype",), f"there is no archetype {fields.archetype}; known: {', '.join(sorted(archetypes))}"
        return
    if fields.exclusions.calendar is not None and fields.exclusions.calendar not in calendars:
        names = ", ".join(sorted(calendars)) or "none"
        yield ("exclusions", "calendar"), f"there is no calendar {fields.exclusions.calendar}; known: {names}"
    yield from _cross_check_traits(fields, archetype, pipelines)
    watched = set(fields.traits)
    for index, rule in enumerate(fields.watch.monitoring.drift):
        if rule.trait not in watched:
            place = ("watch", "monitoring", "drift", index, "trait")
            yield place, f"{rule.trait} is not a trait of this pipeline"


def _cross_check_traits(
    fields: PipelineFields, archetype: ArchetypeFields, pipelines: Mapping[str, Any]
) -> Iterable[tuple[yamlfile.Location, str]]:
    known = {trait.type for trait in (*archetype.required_traits, *archetype.optional_traits)}
    for name, trait in fields.traits.items():
        if name not in known:
            yield ("traits", name), f"archetype {archetype.name} has no such trait; known: {', '.join(sorted(known))}"
        if trait.evaluator is not None and (words := _bad_evaluator(trait.evaluator)):
            yield ("traits", name, "evaluator"), words
        upstream = trait.config.get("upstreamPipeline")
        if upstream is not None and upstream not in pipelines:
            yield ("traits", name, "config", "upstreamPipeline"), f"there is no pipeline {upstream}"
    for template in archetype.required_traits:
        if template.type not in fields.traits:
            yield ("traits",), f"the required trait {template.type} is missing; add it, with an evaluator or for pushes"


def _bad_evaluator(text: str) -> str | None:
    if text.startswith(("http://", "https://")):
        try:
            check_address(text)
        except ValueError as error:
            return str(error)
        return None
    if text.startswith("builtin:"):
        from lockstep.readiness.evaluators.builtin import NAMES  # the table of builtins reads plans

        name = text.removeprefix("builtin:")
        return None if name in NAMES else f"there is no builtin {name}; known: {', '.join(sorted(NAMES))}"
    if text.startswith("python:"):
        return None if re.fullmatch(r"python:[\w.]+:\w+", text) else "write python:package.module:function"
    if text.startswith("./") and ".." not in Path(text).parts:
        return None
    return "write http(s)://…, builtin:<name>, python:<module>:<function> or ./program in the evaluators folder"


# --- resolving -------------------------------------------------------------------------------------------------------


def resolve(fields: PipelineFields, archetype: ArchetypeFields, calendars: Mapping[str, CalendarFields]) -> Plan:
    """Merge the archetype's defaults in: a required trait is always in, an optional one if the pipeline names it."""
    traits = [_trait(template, fields.traits.get(template.type), True) for template in archetype.required_traits]
    traits += [
        _trait(template, fields.traits[template.type], False)
        for template in archetype.optional_traits
        if template.type in fields.traits
    ]
    rule = archetype.readiness_rule
    schedules = [plan for schedule in fields.schedules for plan in schedule.plans()]
    return Plan(
        pipeline=fields.name,
        traits=tuple(traits),
        trigger=_trigger(fields),
        rule=ReadinessRule(rule.type, rule.parameters.threshold),
        retry=_retry(fields.retry),
        sla=_sla(fields.sla),
        schedules=tuple(schedules) or (SchedulePlan(timezone=fields.sla.timezone),),
        exclusions=_exclusions(fields.exclusions, calendars),
        monitor=_monitor(fields.watch.monitoring),
        budgets=Budgets(**fields.reruns.model_dump()),
        interval=fields.watch.interval,
        poll_interval=fields.watch.poll_interval,
        run_timeout=fields.watch.run_timeout,
        watched=fields.watch.enabled,
        catch_up=fields.watch.catch_up,
        dry_run=fields.dry_run,
        tier=fields.tier,
        archetype=archetype.name,
        owner=fields.owner,
        cascade_delay=fields.cascade.delay_between or timedelta(0),
    )


def _trait(template: TraitTemplate, own: TraitFields | None, required: bool) -> TraitPlan:
    own = own or TraitFields()
    return TraitPlan(
        type=template.type,
        required=required,
        evaluator=own.evaluator,
        config={**template.default_config, **own.config},
        ttl=own.ttl or template.default_ttl,
        timeout=own.timeout or template.default_timeout or DEFAULT_TIMEOUT_SECONDS,
        description=template.description,
    )


def _trigger(fields: PipelineFields) -> TriggerPlan:
    options = fields.trigger.model_dump(exclude={"type", "timeout"})
    return TriggerPlan(
        fields.trigger.type, options, fields.trigger.timeout, resumable=fields.trigger.type not in NOT_RESUMABLE
    )


def _retry(fields: RetryFields) -> RetryPlan:
    return RetryPlan(
        fields.max_attempts,
        fields.backoff_seconds,
        fields.backoff_multiplier,
        frozenset(Category(name) for name in fields.retryable_failures),
    )


def _sla(fields: SlaFields) -> SlaPlan:
    return SlaPlan(
        fields.evaluation_deadline,
        fields.completion_deadline,
        fields.timezone,
        fields.validation_timeout,
        fields.at_risk_lead_time,
    )


def _exclusions(fields: ExclusionFields, calendars: Mapping[str, CalendarFields]) -> ExclusionPlan:
    shared = calendars[fields.calendar] if fields.calendar else CalendarFields(name="none")
    return ExclusionPlan(
        frozenset(WEEKDAYS.index(day) for day in (*fields.days, *shared.days)),
        frozenset((*fields.dates, *shared.dates)),
        fields.calendar,
    )


def _monitor(fields: MonitoringFields) -> MonitorPlan:
    rules = tuple(DriftRule(rule.trait, rule.field, rule.threshold) for rule in fields.drift)
    return MonitorPlan(fields.enabled, fields.duration, rules)


def connect(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Tell every plan its downstream: pipelines with a trait on it that share a schedule."""
    below: dict[str, list[str]] = {name: [] for name in plans}
    for name, plan in plans.items():
        own = {schedule.name for schedule in plan.schedules}
        for upstream in sorted({str(trait.config.get("upstreamPipeline", "")) for trait in plan.traits}):
            if upstream in below and upstream != name and own & {one.name for one in plans[upstream].schedules}:
                below[upstream].append(name)
    return {name: plan._replace(downstream=tuple(below[name])) for name, plan in plans.items()}
