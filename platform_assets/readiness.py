"""Every pipeline of the readiness plane as an asset, its traits as asset checks: doors into lockstep/readiness.

What belongs here: assets, checks, partitions. What does not: rules, stores, when something runs (sensors/readiness.py).
No `from __future__ import annotations`: Dagster reads annotations as real types.
"""

from collections.abc import Iterator
from datetime import date
from typing import Any

import dagster as dg

from lockstep.kernel.settings import settings
from lockstep.readiness import config
from lockstep.readiness.control import NotReady
from lockstep.readiness.model import Execution, Key, Plan, Readiness, RunStatus, TraitStatus
from resources.readiness_plane import ReadinessResource

GROUP = "readiness"
FIRST_DATE = "2026-01-01"
EXECUTION_CHECK = "execution_check"


def asset_name(pipeline: str) -> str:
    """The asset of a pipeline; hyphens and dots are no names there."""
    return f"readiness_{pipeline.replace('-', '_').replace('.', '_')}"


def check_name(trait: str) -> str:
    """The check of a trait."""
    return f"{trait.replace('-', '_').replace('.', '_')}_check"


def partitions_of(plan: Plan) -> dg.PartitionsDefinition:
    """Execution dates; together with the schedules if there are several."""
    daily = dg.DailyPartitionsDefinition(start_date=FIRST_DATE, timezone=plan.schedules[0].timezone, end_offset=1)
    if len(plan.schedules) == 1:
        return daily
    names = dg.StaticPartitionsDefinition([schedule.name for schedule in plan.schedules])
    return dg.MultiPartitionsDefinition({"date": daily, "schedule": names})


def partition_of(plan: Plan, key: Key) -> str:
    """The partition of an execution."""
    day = key.date.isoformat()
    if len(plan.schedules) == 1:
        return day
    return str(dg.MultiPartitionKey({"date": day, "schedule": key.schedule}))


def key_of(plan: Plan, partition: str) -> Key:
    """The execution of a partition."""
    if len(plan.schedules) == 1:
        return Key(plan.pipeline, date.fromisoformat(partition), plan.schedules[0].name)
    day, schedule = partition.split("|")
    return Key(plan.pipeline, date.fromisoformat(day), schedule)


def describe(state: Execution) -> dict[str, Any]:
    """What an execution's page in the UI shows."""
    readiness = state.readiness
    deadlines = {
        f"sla_{name}": dg.MetadataValue.timestamp(moment)
        for name, moment in (("evaluation", state.deadlines.evaluation), ("completion", state.deadlines.completion))
        if moment is not None
    }
    return {
        "status": state.status.value,
        "run_id": state.run_id,
        "attempt": state.attempt,
        "generation": state.generation,
        "blocking": dg.MetadataValue.json(list(readiness.blocking) if readiness else []),
        "failure": state.failure.message if state.failure else "",
        **deadlines,
    }


def check_results(plan: Plan, readiness: Readiness) -> Iterator[dg.AssetCheckResult]:
    """Each trait as a check. An answer that nobody could give fails louder than an honest "not yet"."""
    for result in readiness.traits:
        severe = result.status in (TraitStatus.ERROR, TraitStatus.STALE)
        yield dg.AssetCheckResult(
            asset_key=asset_name(plan.pipeline),
            check_name=check_name(result.trait),
            passed=result.status is TraitStatus.PASS,
            severity=dg.AssetCheckSeverity.ERROR if severe else dg.AssetCheckSeverity.WARN,
            metadata={"status": result.status.value, "reason": result.reason, "category": str(result.category or "")},
        )


def outcome_result(plan: Plan, state: Execution | None) -> dg.AssetCheckResult:
    """How an execution ended, as a check: a failed one is red in the UI, with its reason, and not only noted."""
    bad = state is not None and state.status in (RunStatus.FAILED, RunStatus.CANCELLED)
    words = f"{state.key} {state.status.value.lower()}" if state is not None else "never opened"
    return dg.AssetCheckResult(
        asset_key=asset_name(plan.pipeline),
        check_name=EXECUTION_CHECK,
        passed=not bad,
        severity=dg.AssetCheckSeverity.ERROR,
        description=words,
        metadata=describe(state) if state is not None else {},
    )


def _asset(plan: Plan) -> dg.AssetsDefinition:
    upstream = sorted(
        {str(trait.config["upstreamPipeline"]) for trait in plan.traits if "upstreamPipeline" in trait.config}
    )

    @dg.asset(
        name=asset_name(plan.pipeline),
        group_name=GROUP,
        kinds={"dynamodb"},
        owners=[plan.owner or "team:lockstep"],
        description=(
            f"Executions of {plan.pipeline}, one partition per date and schedule. Green when one has completed. "
            "Materializing asks it to run now; a pipeline that is not ready fails here and says what it waits for."
        ),
        metadata={
            "archetype": plan.archetype,
            "tier": plan.tier,
            "trigger": plan.trigger.type if plan.trigger else "none",
            "sla": f"evaluation {plan.sla.evaluation or '-'}, completion {plan.sla.completion or '-'}",
        },
        partitions_def=partitions_of(plan),
        deps=[asset_name(name) for name in upstream],
        output_required=False,
    )
    def pipeline(context: dg.AssetExecutionContext, readiness: ReadinessResource) -> Iterator[dg.MaterializeResult]:
        """Ask for the execution. Only a completed one is a materialization; the sensor reports those that end later."""
        key = key_of(plan, context.partition_key)
        try:
            state = readiness.deployment().control.run(key)
        except NotReady as waiting:
            raise dg.Failure(str(waiting), metadata=describe(waiting.state), allow_retries=False) from waiting
        context.log.info("%s is %s", key, state.status)
        if state.status.is_success:
            yield dg.MaterializeResult(metadata=describe(state))

    return pipeline


def _checks(plan: Plan) -> dg.AssetChecksDefinition:
    specs = [
        dg.AssetCheckSpec(
            check_name(trait.type),
            asset=asset_name(plan.pipeline),
            description=trait.description or f"The trait {trait.type} of {plan.pipeline}.",
        )
        for trait in plan.traits
    ]
    words = f"The execution of {plan.pipeline} that ended last did not fail."
    specs.append(dg.AssetCheckSpec(EXECUTION_CHECK, asset=asset_name(plan.pipeline), description=words))

    @dg.multi_asset_check(specs=specs, name=f"{asset_name(plan.pipeline)}_traits_check", can_subset=False)
    def traits(context: dg.AssetCheckExecutionContext, readiness: ReadinessResource) -> Iterator[dg.AssetCheckResult]:
        """Ask every evaluator now, for the execution that is due."""
        control = readiness.deployment().control
        key = control.key(plan.pipeline, None, None)
        yield from check_results(plan, control.evaluate(key))
        yield outcome_result(plan, control.execution(key))

    return traits


def _plans() -> list[Plan]:
    own = settings().readiness_config
    registry = config.load([config.shipped_folder(), *([own] if own else [])])
    return [plan for _, plan in sorted(registry.plans.items())]


plans = _plans()
assets = [_asset(plan) for plan in plans]
checks = [_checks(plan) for plan in plans]
