"""Configuration: everything wrong is said at load, with file, line and repair; nothing fails open."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.readiness import config
from lockstep.readiness.model import Category, Plan

ARCHETYPE = """
name: load
requiredTraits:
  - {type: fresh, defaultConfig: {maxLagSeconds: 300, unit: s}, defaultTtl: 300, defaultTimeout: 20}
  - {type: room}
optionalTraits:
  - {type: schema}
readinessRule: {type: all-required-pass}
"""
CALENDAR = "name: holidays\ndays: [Sunday]\ndates: ['2026-12-25']\n"
PIPELINE = """
name: sales
archetype: load
traits:
  fresh: {evaluator: "https://checks.example.com/fresh", config: {maxLagSeconds: 60}, ttl: 120}
  room: {}
trigger: {type: http, url: "https://jobs.example.com/run", headers: {X-Key: "secret:jobs"}}
"""


def _load(tmp_path: Path, pipeline: str = PIPELINE, *, archetype: str = ARCHETYPE, calendar: str = CALENDAR) -> Plan:
    for kind, text in (("archetypes", archetype), ("calendars", calendar), ("pipelines", pipeline)):
        (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / kind / "it.yaml").write_text(text)
    return config.load([tmp_path]).plan("sales")


def _problems(tmp_path: Path, pipeline: str, **more: str) -> list[str]:
    with pytest.raises(InvalidInput) as refused:
        _load(tmp_path, pipeline, **more)
    return list(refused.value.problems)


def test_defaults_are_merged_key_by_key_and_overridden_when_above_zero(tmp_path: Path):
    fresh, room = _load(tmp_path).traits
    assert fresh.config == {"maxLagSeconds": 60, "unit": "s"}
    assert (fresh.ttl, fresh.timeout) == (120, 20)
    assert (room.evaluator, room.timeout, room.required) == (None, 30, True)


def test_an_optional_trait_is_in_only_if_the_pipeline_names_it(tmp_path: Path):
    plan = _load(tmp_path, PIPELINE.replace("  room: {}", "  room: {}\n  schema: {}"))
    assert [(trait.type, trait.required) for trait in plan.traits][-1] == ("schema", False)


def test_a_named_calendar_is_really_used(tmp_path: Path):
    """Guards trap 14: parsed, validated, and then ignored."""
    plan = _load(tmp_path, PIPELINE + "exclusions: {calendar: holidays, days: [saturday]}\n")
    assert plan.exclusions.excludes(date(2026, 12, 25))
    assert [plan.exclusions.excludes(date(2026, 3, day)) for day in (13, 14, 15)] == [False, True, True]


def test_every_field_of_the_reference_is_understood(tmp_path: Path):
    plan = _load(
        tmp_path,
        PIPELINE
        + """
tier: 1
retry: {maxAttempts: 4, backoffSeconds: 10, backoffMultiplier: 3, retryableFailures: [TIMEOUT]}
sla: {evaluationDeadline: "09:00", completionDeadline: 6h, timezone: America/New_York,
      validationTimeout: 45m, atRiskLeadTime: 5m}
watch: {enabled: true, interval: 1m, pollInterval: 15s, runTimeout: 1h30m,
        monitoring: {enabled: true, duration: 2h, drift: [{trait: fresh, field: rows, threshold: 5}]}}
schedules:
  - {name: morning, after: "06:00", deadline: "09:00", timezone: America/New_York}
reruns: {manual: 2, drift: 0}
cascade: {delayBetween: 2s}
dryRun: true
""",
    )
    assert plan.retry.categories == {Category.TIMEOUT}
    assert plan.retry.backoff(3) == timedelta(seconds=90)
    assert plan.sla.validation_timeout == timedelta(minutes=45)
    assert (plan.schedules[0].name, plan.monitor.rules[0].field, plan.budgets.manual) == ("morning", "rows", 2)
    assert (plan.dry_run, plan.run_timeout, plan.cascade_delay) == (True, timedelta(minutes=90), timedelta(seconds=2))


def test_hourly_schedules_are_twenty_four(tmp_path: Path):
    plan = _load(tmp_path, PIPELINE + "schedules: [{every: hour, minute: 5, deadline: 50m}]\n")
    assert [plan.schedules[index].after for index in (0, 23)] == ["00:05", "23:05"]
    assert plan.schedules[7].name == "h07"


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("tier: 1", ""), None, None),
        (("archetype: load", "archetype: lode"), 3, "no archetype lode"),
        (("  room: {}", "  rom: {}"), 6, "no such trait"),
        (("  room: {}", "  room: {tt: 5}"), 6, "not a known field"),
        (("type: http", "type: htp"), 7, "htp"),
        (("https://jobs.example.com/run", "ftp://jobs"), 7, "http(s) address"),
        (("https://jobs.example.com/run", "https://u:p@jobs/run"), 7, "credentials"),
        (("secret:jobs", "Bearer ${AWS_SECRET_ACCESS_KEY}"), 2, "not a template variable"),
        (("secret:jobs", "$HOME"), 2, "not a template variable"),
        (('evaluator: "https://checks.example.com/fresh"', 'evaluator: "builtin:nope"'), 5, "no builtin nope"),
        (('evaluator: "https://checks.example.com/fresh"', "evaluator: ./../../bin/ls"), 5, "write http(s)"),
        (("maxLagSeconds: 60}", "upstreamPipeline: nobody}"), 5, "no pipeline nobody"),
        (("name: sales", "name: Sales!"), 2, "lower-case"),
    ],
)
def test_what_is_wrong_is_said_with_file_line_and_repair(tmp_path: Path, change, line, words):
    """Guards trap 13 and trap 23: nothing is skipped, guessed or read from the environment."""
    if line is None:
        _load(tmp_path, PIPELINE.replace(*change))
        return
    (problem, *_) = _problems(tmp_path, PIPELINE.replace(*change))
    assert problem.startswith(f"it.yaml:{line}:"), problem
    assert words in problem


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("schedules: [{name: a, after: 6:00}]", "valid string"),
        ("schedules: [{name: a, after: '25:00'}]", "a time such as"),
        ("schedules: [{name: a, timezone: Mars/Base}]", "not a time zone"),
        ("schedules: [{name: a}, {name: a}]", "twice"),
        ("exclusions: {calendar: nobody}", "no calendar nobody"),
        ("exclusions: {days: [caturday]}", "not a weekday"),
        ("exclusions: {dates: ['2026-02-30']}", "must be a date"),
        ("sla: {validationTimeout: soon}", "duration"),
        ("sla: {completionDeadline: 12}", "string"),
        ("retry: {maxAttempts: 0}", "greater than or equal to 1"),
        ("retry: {retryableFailures: [PERMANENT]}", "TRANSIENT"),
        ("watch: {monitoring: {drift: [{trait: gone, field: n}]}}", "not a trait"),
        ("colour: blue", "not a known field"),
        ("name: sales", "given twice"),
    ],
)
def test_no_field_fails_open(tmp_path: Path, extra: str, words: str):
    problems = _problems(tmp_path, PIPELINE + extra + "\n")
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize("argv", ["[sh, -c, 'rm -rf /']", "[/bin/bash, run.sh]", "[env, sh, -c, x]", "[]"])
def test_a_shell_is_never_a_command(tmp_path: Path, argv: str):
    """Guards trap 23: `sh -c` is code execution through configuration."""
    text = PIPELINE.partition("trigger:")[0] + f"trigger: {{type: command, command: {argv}}}\n"
    assert "trigger" in _problems(tmp_path, text)[0]


def test_a_missing_required_trait_and_a_bad_archetype_are_refused(tmp_path: Path):
    assert "room is missing" in _problems(tmp_path, PIPELINE.replace("  room: {}\n", ""))[0]
    broken = ARCHETYPE.replace("{type: schema}", "{type: room}")
    assert "twice" in _problems(tmp_path, PIPELINE, archetype=broken)[0]
    assert "known" not in _problems(tmp_path, PIPELINE, archetype=ARCHETYPE.replace("all-required-pass", "any"))[0][:3]


def test_all_problems_of_all_files_are_listed_at_once(tmp_path: Path):
    problems = _problems(tmp_path, PIPELINE + "colour: blue\ntaste: sweet\n", calendar="days: [x]\n")
    assert len(problems) >= 4


def test_a_file_that_is_not_yaml_names_its_line(tmp_path: Path):
    assert _problems(tmp_path, "name: [\n")[0].startswith("it.yaml:2: is not YAML")


def test_a_pipeline_from_the_api_may_not_run_programs(tmp_path: Path):
    _load(tmp_path)
    registry = config.load([tmp_path])
    body = {"name": "own", "archetype": "load", "traits": {"fresh": {"evaluator": "./x"}, "room": {}}}
    with pytest.raises(InvalidInput) as refused:
        config.parse_pipeline({**body, "trigger": {"type": "command", "command": ["ls"]}}, registry)
    assert len(refused.value.problems) == 2
    plan = config.parse_pipeline({**body, "traits": {"fresh": {}, "room": {}}, "trigger": {"type": "gate"}}, registry)
    assert plan.pipeline == "own"


def test_the_shipped_configuration_loads():
    registry = config.load([config.shipped_folder()])
    assert {"batch-ingestion", "ml-feature-pipeline", "streaming-enrichment"} <= set(registry.archetypes)
    assert {"windows-current", "exports-drained", "ticks-silvered"} <= set(registry.plans)


def test_downstream_pipelines_are_found_by_their_upstream_traits(tmp_path: Path):
    _load(tmp_path)
    (tmp_path / "pipelines" / "gold.yaml").write_text(
        PIPELINE.replace("name: sales", "name: gold").replace("maxLagSeconds: 60", "upstreamPipeline: sales")
    )
    assert config.load([tmp_path]).plan("sales").downstream == ("gold",)
