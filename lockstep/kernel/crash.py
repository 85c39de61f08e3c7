"""Named places where a fault test may make the process die, fail or hang.

What belongs here: arming, firing and listing crash points. What does not: the tests' schedules of faults. In
production nothing is armed and a point costs one comparison.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from lockstep.kernel.errors import InvalidInput, Transient

VARIABLE = "LOCKSTEP_CRASH"

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
_MODE = re.compile(r"(?P<mode>kill|exit|raise|error|hang)(:(?P<seconds>\d+(\.\d+)?))?")
_SPEC = re.compile(r"(?P<name>[^=@;\s]+)=(?P<mode>[^=@;\s]+)(@(?P<nth>[1-9]\d*))?")
_LONGEST_HANG = 3600.0


class CrashInjected(BaseException):
    """Stands for sudden death inside one process. Not an `Exception`, so that no handler survives it."""


@dataclass
class Charge:
    """One armed point. `hits` and `fired` let a test insist that its fault really happened."""

    name: str
    mode: str
    nth: int = 1
    seconds: float = _LONGEST_HANG
    hits: int = 0
    fired: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def hit(self) -> None:
        """Count a pass; at the nth, and only then, do the damage."""
        with self._lock:
            self.hits += 1
            if self.hits != self.nth:
                return
            self.fired = True
        self._fire()

    def _fire(self) -> None:
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.mode == "exit":
            os._exit(137)
        elif self.mode == "raise":
            raise CrashInjected(self.name)
        elif self.mode == "error":
            raise Transient("a fault was injected here.", unit=self.name)
        else:
            _hang(self.seconds)


class _Unread:
    """Marks that the environment was not read yet."""


# None is the state of production: decided at the first call, then one comparison per point.
_charges: dict[str, list[Charge]] | _Unread | None = _Unread()
_arming = threading.Lock()
_sleep_instead: Callable[[float], None] | None = None


def crash_point(name: str) -> None:
    """A place worth dying at. `name` is a literal, `part.step.moment`, unique in the source."""
    if _charges is None:
        return
    _pass(name)


@contextmanager
def armed(name: str, mode: str, *, nth: int = 1) -> Iterator[Charge]:
    """Arm one point inside this process for the block. The charge tells whether it fired."""
    charge = _charge(name, mode, nth)
    _replace(lambda charges: charges.setdefault(name, []).append(charge))
    try:
        yield charge
    finally:
        _replace(lambda charges: charges[name].remove(charge))


def declared_points(root: Path) -> dict[str, tuple[str, ...]]:
    """Every crash point in the Python files under `root`, each name with the places that declare it.

    Raises:
        InvalidInput: A name is not a literal, or `crash_point` is imported under another name; a suite that
        insists
            on coverage could not see such a point.
    """
    found: dict[str, list[str]] = {}
    problems: list[str] = []
    texts = {path: path.read_text("utf-8") for path in sorted(root.rglob("*.py"))}
    for path, text in texts.items():
        if "crash_point" not in text:
            continue  # parsing is the expensive part
        for node in ast.walk(ast.parse(text, str(path))):
            place = f"{path.relative_to(root).as_posix()}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom):
                problems += [f"{place}: crash_point renamed" for a in node.names if _renames(a)]
            elif isinstance(node, ast.Call) and _calls_crash_point(node):
                name = _literal_name(node)
                if name is None:
                    problems.append(f"{place}: the name must be one literal such as part.step.moment")
                else:
                    found.setdefault(name, []).append(place)
    if problems:
        raise InvalidInput("some crash points cannot be listed.", problems=problems)
    return {name: tuple(places) for name, places in sorted(found.items())}


def _pass(name: str) -> None:
    global _charges  # noqa: PLW0603  # one comparison per point needs a module global
    if isinstance(_charges, _Unread):
        with _arming:
            if isinstance(_charges, _Unread):
                _charges = _from_environment(os.environ.get(VARIABLE, "")) or None
    for charge in list(_charges.get(name, ())) if _charges else ():
        charge.hit()


def _replace(change: Callable[[dict[str, list[Charge]]], None]) -> None:
    """Swap in a changed copy, so that a point never sees a half-made table."""
    global _charges  # noqa: PLW0603
    with _arming:
        if isinstance(_charges, _Unread):
            _charges = _from_environment(os.environ.get(VARIABLE, ""))
        charges = {name: list(group) for name, group in (_charges or {}).items()}
        change(charges)
        _charges = {name: group for name, group in charges.items() if group} or None


def _from_environment(text: str) -> dict[str, list[Charge]]:
    charges: dict[str, list[Charge]] = {}
    for spec in filter(None, (part.strip() for part in text.split(";"))):
        match = _SPEC.fullmatch(spec)
        if match is None:
            _refuse(spec)
        charge = _charge(match["name"], match["mode"], int(match["nth"] or 1))
        charges.setdefault(charge.name, []).append(charge)
    return charges


def _charge(name: str, mode: str, nth: int) -> Charge:
    match = _MODE.fullmatch(mode)
    if match is None or _NAME.fullmatch(name) is None or nth < 1 or (match["seconds"] and match["mode"] != "hang"):
        _refuse(f"{name}={mode}@{nth}")
    return Charge(name, match["mode"], nth, float(match["seconds"] or _LONGEST_HANG))


def _refuse(spec: str) -> NoReturn:
    raise InvalidInput(
        f"{spec!r} does not arm a crash point.",
        unit=VARIABLE,
        next_step="write name=mode[@nth] with mode kill, exit, raise, error, hang or hang:seconds.",
    )


@contextmanager
def hanging_by(sleep: Callable[[float], None]) -> Iterator[None]:
    """Let points that hang inside this block do so in a time of its own, such as a simulation's."""
    global _sleep_instead  # noqa: PLW0603  # like the charges: one state for the process
    before, _sleep_instead = _sleep_instead, sleep
    try:
        yield
    finally:
        _sleep_instead = before


def _hang(seconds: float) -> None:
    if _sleep_instead is not None:
        _sleep_instead(seconds)
        return
    # Monotonic, in short steps: a SIGSTOP or a wall clock jump must not shorten or stretch the pause.
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))


def _renames(alias: ast.alias) -> bool:
    return alias.name == "crash_point" and alias.asname not in (None, "crash_point")


def _calls_crash_point(node: ast.Call) -> bool:
    if isinstance(node.func, ast.Name):
        return node.func.id == "crash_point"
    return isinstance(node.func, ast.Attribute) and node.func.attr == "crash_point"


def _literal_name(node: ast.Call) -> str | None:
    if len(node.args) != 1 or node.keywords or not isinstance(node.args[0], ast.Constant):
        return None
    value = node.args[0].value
    return value if isinstance(value, str) and _NAME.fullmatch(value) else None
