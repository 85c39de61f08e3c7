"""Every alert that the code or a Prometheus rule can raise has a page, and every page an alert."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from lockstep.kernel.settings import PROJECT_ROOT
from tests.unit.docs.pages import DOCS

ALERTS = DOCS / "alerts"
PAGES = sorted(page for page in ALERTS.glob("*.md") if page.name != "README.md")
ROOMS = ("lockstep", "platform_assets", "sensors", "jobs", "resources", "services")

# Who raises an alert, and at which place of the call its kind stands.
RAISERS = {"_alert": 1, "_raise": 1, "Alert": 1, "raise_now": 0}


def _kinds(tree: ast.Module) -> Iterator[str]:
    """Every kind that a module raises; what is only known at run time is a `*`."""
    constants = dict(_assigned(tree.body))
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        passed = {argument.arg for argument in function.args.args}
        local = list(_assigned(list(ast.walk(function))))
        for call in ast.walk(function):
            name = getattr(getattr(call, "func", None), "attr", None) or getattr(
                getattr(call, "func", None), "id", None
            )
            if isinstance(call, ast.Call) and name in RAISERS and len(call.args) > RAISERS[name]:
                kind = call.args[RAISERS[name]]
                if isinstance(kind, ast.Name) and kind.id in passed:
                    continue  # hands on what it was given: its callers are looked at
                sources = [value for one, value in local if isinstance(kind, ast.Name) and one == kind.id] or [kind]
                yield from (_text(source, constants) for source in sources)


def _assigned(nodes: list[ast.AST] | list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
                yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id in constants:
        return _text(constants[node.value.id], constants)
    return "*"


def raised_by_code() -> set[str]:
    """The kinds in the source, as patterns. Decoders, which only repeat what is stored, have no literal."""
    found: set[str] = set()
    for room in ROOMS:
        for module in (PROJECT_ROOT / room).rglob("*.py"):
            text = module.read_text()
            if any(f"{name}(" in text for name in RAISERS):
                found |= set(_kinds(ast.parse(text)))
    return found - {"*"}


def raised_by_rules() -> set[str]:
    """The names of the Prometheus rules."""
    groups = [group for file in ALERTS.glob("*.rules.yml") for group in yaml.safe_load(file.read_text())["groups"]]
    return {rule["alert"] for group in groups for rule in group["rules"]}


def told_by(page: Path) -> list[str]:
    """The kinds that a page says it is about."""
    sentence = re.search(r"^Raised as (.*?), level ", page.read_text(), re.MULTILINE | re.DOTALL)
    assert sentence, f"{page.name} does not say what it is raised as"
    return re.findall(r"`([^`]+)`", sentence[1])


TOLD = {kind: page for page in PAGES for kind in told_by(page)}
BY_CODE = raised_by_code()
RAISED = BY_CODE | raised_by_rules()


def test_the_search_finds_the_alerts_that_are_known_to_exist():
    """Guards the guard: a renamed `raise_now` would let this whole module pass over nothing."""
    known = {"WINDOW_FAILED-*", "exports.chunks_failed", "ticks.silver_parked", "*_sla_breach", "driver_silent"}
    assert known <= BY_CODE
    assert {"machine_error", "rerun_cap_reached_*", "SilverParked"} <= RAISED


@pytest.mark.parametrize("kind", sorted(RAISED))
def test_every_alert_has_a_page(kind: str):
    assert any(fnmatch(told, kind) for told in TOLD), f"{kind} has no page in docs/alerts"


@pytest.mark.parametrize("kind", sorted(TOLD))
def test_every_page_is_about_an_alert_that_can_be_raised(kind: str):
    assert any(fnmatch(kind, raised) for raised in RAISED), f"nothing raises {kind} any more"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_says_meaning_look_do_and_proof(page: Path):
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    sections = dict(re.findall(r"^## (\w+)\n+(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == ["Meaning", "Look", "Do", "Proof"]
    assert all(words.strip() for words in sections.values())
    assert f"({page.name})" in (ALERTS / "README.md").read_text()
