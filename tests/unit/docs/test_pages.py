"""The documentation keeps its word: links lead somewhere, and every command that it names exists with its options."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest
import typer

from lockstep import cli
from lockstep.kernel.settings import PROJECT_ROOT
from tests.unit.docs.pages import PAGES, anchors, commands, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    for link in links(page):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.is_relative_to(PROJECT_ROOT), link
        assert target.exists(), f"{link}: no such file"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.fixture(scope="module")
def program() -> click.Command:
    """The whole command line, as `lockstep` has it."""
    from stack import cli as stack_cli

    fresh = typer.Typer()
    kept, cli.app = cli.app, fresh
    try:
        stack_cli.register(fresh)
        cli._register_rooms()
    finally:
        cli.app = kept
    return typer.main.get_command(fresh)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_option_exists(page: Path, program: click.Command):
    """Guards a runbook whose command was renamed: it is read for the first time when something is on fire."""
    wrong = [line for line in commands(page) if not _exists(program, line)]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_lacks_an_option_that_it_needs(page: Path, program: click.Command):
    """Guards a line that is copied and refused. A command without a further word is only named."""
    wrong = [line for line in commands(page) if _lacks(program, line)]
    assert wrong == []


def _lacks(command: click.Command, line: str) -> set[str]:
    words = _words(line)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    given = {word.split("=")[0] for word in words}
    needed = [one for one in command.params if one.required and not one.envvar and one.param_type_name == "option"]
    return {one.opts[-1] for one in needed if not given.intersection(one.opts)} if words else set()


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line.replace("…", "x"), posix=True)[1:]
    except ValueError:  # prose with an apostrophe
        return line.split()[1:]


def _exists(command: click.Command, line: str) -> bool:
    words = _words(line)
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name = words.pop(0).rstrip(",.:")
        choices = name.split("|")
        if not all(choice in command.commands for choice in choices):
            return name.isupper() or name in ("x", "[part]")
        command = command.commands[choices[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    given = {word.strip("[],.").split("=")[0] for word in words if word.strip("[").startswith("-")}
    return given <= known


def test_every_page_can_be_reached_from_the_readme():
    """Guards a page that nobody finds, and an index that forgot one."""
    reached: set[Path] = set()
    left = [PROJECT_ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        left += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if not link.startswith("#")]
    assert [name_of(page) for page in PAGES if page not in reached] == []
