"""Stateful merger, the decision: may this run merge as things are, must the table go back first, or is it refused?

What belongs here: the pure rule over a table's own history, and its words. What does not: reading that history,
restoring and merging (stateful.py). The rule sees no separate state table, so state and data cannot part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from lockstep.kernel.errors import InvalidInput


class Mark(NamedTuple):
    """What a merge commit of ours carries inside itself."""

    execution: str
    base_version: int
    request: str
    first: bool


class Action(StrEnum):
    """What a commit means to the rule."""

    MERGE = "merge"  # ours, carries a mark
    RESTORE = "restore"  # of anybody: the state becomes that of an earlier version
    HARMLESS = "harmless"  # rewrites files, changes no row: OPTIMIZE, VACUUM
    FOREIGN = "foreign"  # everything else, also what is unknown: undoing it would undo somebody's work


class Commit(NamedTuple):
    """One version of the table. `ours` tells our restores from other people's; `erase` is what such a one owes."""

    version: int
    action: Action
    what: str = ""
    mark: Mark | None = None
    restored_to: int | None = None
    ours: bool = False
    erase: tuple[str, ...] = ()


@dataclass(frozen=True)
class History:
    """The commits, oldest first, as far back as they are kept.

    Attributes:
        commits: At least one.
        complete: Whether the first one is the table's creation; if not, earlier runs may have been forgotten.
        restorable_from: The oldest version that the store can still bring back.
    """

    commits: tuple[Commit, ...]
    complete: bool = True
    restorable_from: int = 0


@dataclass(frozen=True)
class Run:
    """What is asked for.

    Attributes:
        pipeline: Whose runs these are; commits of another pipeline are foreign.
        execution: Which unit: sortable text of one width, such as 2024-10-07 or 2024-10-07T08:00Z.
        previous: The unit before it in the schedule; None if this is the very first.
        request: Id of the wish. A retry carries the same one, a deliberate replay a new one.
        undo: Foreign versions that may be undone; whoever names them brings their effect back afterwards.
    """

    pipeline: str
    execution: str
    previous: str | None
    request: str
    undo: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        problems = [f"{name} is empty" for name in ("pipeline", "execution", "request") if not getattr(self, name)]
        if self.previous is not None and len(self.previous) != len(self.execution):
            problems.append(f"{self.previous} and {self.execution} have different widths, so text does not sort them")
        elif self.previous is not None and self.previous >= self.execution:
            problems.append(f"{self.previous} is not before {self.execution}")
        if problems:
            raise InvalidInput("the run cannot be placed.", unit=self.execution or None, problems=problems)


class Reason(StrEnum):
    """Why a run is refused."""

    PREDECESSOR = "predecessor"
    NOT_FIRST = "not_first"
    STALE = "stale"
    DISORDER = "disorder"
    FOREIGN = "foreign"
    RETENTION = "retention"
    UNREADABLE = "unreadable"
    UNFINISHED = "unfinished"


class Proceed(NamedTuple):
    """Merge onto the table as it is. `restored`: an earlier try of ours put the table back and then died."""

    first: bool
    restored: bool = False


class Restore(NamedTuple):
    """Put the table back to `version`, which undoes the runs `undone`; then merge."""

    version: int
    undone: tuple[str, ...]
    first: bool


class Done(NamedTuple):
    """This very request was merged already, as `version`; its answer was lost."""

    version: int


class Refuse(NamedTuple):
    """Nothing may be done. Never a reason to empty the table."""

    reason: Reason
    what: str
    next_step: str


Decision = Proceed | Restore | Done | Refuse


class _Live(NamedTuple):
    """A run whose effect is in the table. A merge that was made twice keeps the base of its first commit."""

    base: int
    version: int
    request: str


@dataclass(frozen=True)
class _State:
    live: Mapping[str, _Live] = field(default_factory=dict)
    foreign: frozenset[int] = frozenset()
    known: bool = True


def decide(history: History, run: Run) -> Decision:
    """What this run must do, from the table's own history alone."""
    states = _states(history)
    latest = history.commits[-1].version
    now = states[latest]
    if not now.known:
        return Refuse(
            Reason.UNREADABLE,
            "a restore in the history does not say to which known version, so nobody can tell what the table holds.",
            "restore the table by version number to a version that is still in the history.",
        )
    own = now.live.get(run.execution)
    if own is not None and own.request == run.request:
        return Done(own.version)
    return _refusal(history, now, run) or _step(history, states, now, run)


def owed_erasures(commits: Sequence[Commit]) -> tuple[str, ...]:
    """What restores of ours promised to delete again, and no merge of ours has come since to say that it was done."""
    owed: tuple[str, ...] = ()
    for commit in commits:
        if commit.ours:
            owed = once((*owed, *commit.erase)) if commit.action is Action.RESTORE else ()
    return owed


def once(predicates: Iterable[str]) -> tuple[str, ...]:
    """Each of them once, in their order."""
    return tuple(dict.fromkeys(predicates))


def _step(history: History, states: Mapping[int, _State], now: _State, run: Run) -> Decision:
    first = not any(execution < run.execution for execution in now.live)
    later = {execution: row for execution, row in now.live.items() if execution >= run.execution}
    if not later:
        return Proceed(first, restored=_ends_with_our_restore(history))
    target = min(row.base for row in later.values())
    return _unrestorable(history, states, now, run, target) or Restore(target, tuple(sorted(later)), first)


def _refusal(history: History, now: _State, run: Run) -> Refuse | None:
    """Whether the run's place in the schedule is wrong: widths, a stale retry, a missing predecessor."""
    marks = [commit.mark for commit in history.commits if commit.mark is not None]
    strange = sorted({mark.execution for mark in marks if len(mark.execution) != len(run.execution)})
    if strange:
        raise InvalidInput(
            f"{run.execution} and the recorded {strange[0]} have different widths, so text does not sort them.",
            unit=run.execution,
            next_step="write executions in one fixed form.",
        )
    if run.execution in now.live and any((m.execution, m.request) == (run.execution, run.request) for m in marks):
        return Refuse(
            Reason.STALE,
            f"request {run.request} for {run.execution} was replaced by {now.live[run.execution].request}.",
            "let it go; to replay on purpose, use a new request.",
        )
    return _missing_predecessor(history, now, run, marks)


def _missing_predecessor(history: History, now: _State, run: Run, marks: list[Mark]) -> Refuse | None:
    newest = max((execution for execution in now.live if execution < run.execution), default=None)
    if newest == run.previous:
        return None
    if run.previous is None:
        return Refuse(
            Reason.NOT_FIRST,
            f"{run.execution} claims to be the first, but {newest} is in the table.",
            f"name {newest} or its successor as the previous execution.",
        )
    if newest is None and (
        (not marks and history.complete) or any(mark.execution == run.execution and mark.first for mark in marks)
    ):
        return None
    found = f"the newest before it is {newest}" if newest else "none before it is in the history"
    return Refuse(
        Reason.PREDECESSOR,
        f"{run.execution} must follow {run.previous}, but {found}.",
        f"run {run.previous} first; if it ran and its commit has left the history, keep the log for longer "
        "(delta.logRetentionDuration), and pass previous=None only if this run really is the first."
        if newest is None or newest < run.previous
        else f"name {newest} as the previous execution.",
    )


def _unrestorable(history: History, states: Mapping[int, _State], now: _State, run: Run, target: int) -> Refuse | None:
    """Whether going back to `target` is impossible, or would undo what this run does not replace."""
    if target not in states or target < history.restorable_from:
        return Refuse(
            Reason.RETENTION,
            f"version {target}, from before {run.execution}, is no longer kept "
            f"(oldest: {max(history.restorable_from, history.commits[0].version)}).",
            "replay from a later execution, or rebuild the table from the source.",
        )
    undone = sorted(e for e, row in now.live.items() if e < run.execution and row.version > target)
    if undone:
        return Refuse(
            Reason.DISORDER,
            f"{undone[0]} was merged after a later execution; going back to version {target} would undo it.",
            f"replay {undone[0]} first.",
        )
    foreign = sorted(now.foreign - states[target].foreign - run.undo)
    if foreign:
        words = {commit.version: commit.what for commit in history.commits}
        listed = ", ".join(f"{version} ({words[version]})" for version in foreign)
        return Refuse(
            Reason.FOREIGN,
            f"going back to version {target} would undo changes of somebody else: version {listed}.",
            "find out whose they are; name the versions in `undo` and bring their effect back (erase=...) "
            "in the same run.",
        )
    return None


def _states(history: History) -> dict[int, _State]:
    """What the table held after each version: which runs of ours, which changes of others."""
    state = _State()
    states: dict[int, _State] = {}
    for commit in history.commits:
        state = _after(state, commit, states)
        states[commit.version] = state
    return states


def _after(state: _State, commit: Commit, states: Mapping[int, _State]) -> _State:
    if commit.action is Action.RESTORE:
        return states.get(-1 if commit.restored_to is None else commit.restored_to, _State(known=False))
    if commit.action is Action.FOREIGN:
        return _State(state.live, state.foreign | {commit.version}, state.known)
    if commit.action is Action.MERGE and commit.mark is not None:
        mark = commit.mark
        before = state.live.get(mark.execution)
        base = min(before.base, mark.base_version) if before else mark.base_version
        live = {**state.live, mark.execution: _Live(base, commit.version, mark.request)}
        return _State(live, state.foreign, state.known)
    return state


def _ends_with_our_restore(history: History) -> bool:
    own = [commit for commit in history.commits if commit.ours]
    return bool(own) and own[-1].action is Action.RESTORE
