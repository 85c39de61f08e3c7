"""YAML with line numbers: plain data, where each value stands in its file, and nothing that can run code.

What belongs here: reading one file. What does not: what the values mean (config.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MAX_BYTES = 1024 * 1024

Location = tuple[str | int, ...]


class Document(NamedTuple):
    """The content of a file. `lines` maps the path of a value to its line, counted from one."""

    path: Path
    data: Any
    lines: dict[Location, int]
    problems: tuple[str, ...] = ()

    def line_of(self, location: Sequence[str | int]) -> int:
        """The line of a value, or of the nearest thing around it."""
        place = tuple(location)
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)

    def problem(self, location: Sequence[str | int], words: str) -> str:
        """One problem with its file and line."""
        where = ".".join(str(part) for part in location)
        return f"{self.path.name}:{self.line_of(location)}: {where + ': ' if where else ''}{words}"


def read(path: Path) -> Document:
    """Read a file; what is wrong with it as YAML is in `problems`, and `data` is then None."""
    try:
        text = path.read_bytes()[: MAX_BYTES + 1]
    except OSError as error:
        return Document(path, None, {}, (f"{path.name}:1: cannot be read: {error.strerror}",))
    if len(text) > MAX_BYTES:
        return Document(path, None, {}, (f"{path.name}:1: is larger than {MAX_BYTES} bytes",))
    return parse(text.decode("utf-8", "replace"), path)


def parse(text: str, path: Path) -> Document:
    """The same for text that is not in a file."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return Document(path, None, {}, (f"{path.name}:1: is empty",))
        lines: dict[Location, int] = {}
        problems: list[str] = []
        data = _build(node, (), lines, problems, path.name)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return Document(path, None, {}, (f"{path.name}:{line}: is not YAML: {error.problem}",))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return Document(path, None, {}, (f"{path.name}:1: is not YAML: {error}",))
    return Document(path, None if problems else data, lines, tuple(problems))


def _build(node: yaml.Node, place: Location, lines: dict[Location, int], problems: list[str], name: str) -> Any:
    lines[place] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, place, lines, problems, name)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*place, index), lines, problems, name) for index, item in enumerate(node.value)]
    # Dates stay text: each field says itself what it accepts.
    if node.tag == "tag:yaml.org,2002:timestamp":
        return node.value
    return yaml.SafeLoader("").construct_object(node)


def _mapping(
    node: yaml.MappingNode, place: Location, lines: dict[Location, int], problems: list[str], name: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key_node.tag == "tag:yaml.org,2002:merge":
            problems.append(f"{name}:{line}: merge keys (<<) are not supported; write the fields out")
            continue
        if key in found:
            problems.append(f"{name}:{line}: {key} is given twice; remove one")
        found[key] = _build(value_node, (*place, key), lines, problems, name)
        lines[(*place, key)] = line
    return found
