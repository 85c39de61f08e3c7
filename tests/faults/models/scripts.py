"""The fault scripts: the same for every design, so that the table compares designs and not luck.

What belongs here: what goes wrong, when the source publishes, and how long the world goes on afterwards. What does not:
any design. A sweep plays one fault at the first call of a run, then at the second, until a run has fewer calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lockstep.faults.schedule import PAUSE_SECONDS, Actor, Fault, Never, World

UNITS = 3
AFTERWARDS = 6
TICKS_IN_ALL = UNITS + AFTERWARDS
"""Schedule ticks after the last unit of interest: the source goes on publishing, people and schedules go on working."""

Act = tuple[str, Callable[[Actor], object]]
RIVAL_SECONDS = 350.0
"""When others come while somebody is paused: after every lease ran out, before the one who is paused wakes up."""


@dataclass(frozen=True)
class Scenario:
    """One row of the table.

    Attributes:
        name: In words.
        sweep: The fault that is played at every call in turn; None for a scenario without one.
        late: This unit (for readiness: its input) is published two ticks late, later ones in time.
        poison: This unit is damaged until a person puts it right.
        lose_state: The control plane loses its oldest row after the second tick.
        repeat: Messages are delivered twice.
        reorder: Messages are delivered last first.
        lose_message: One message is lost.
        copies: Triggers that fire at the same time.
    """

    name: str
    sweep: Fault | None = None
    late: int | None = None
    poison: int | None = None
    lose_state: bool = False
    repeat: bool = False
    reorder: bool = False
    lose_message: bool = False
    copies: int = 1

    @property
    def overlaps(self) -> bool:
        """Whether others must come while one is paused: alone, a pause is only a delay."""
        return self.sweep is Fault.PAUSE

    def ticks(self, world: World) -> Iterator[int]:
        """The schedule. Faults strike while the units of interest are under way; later ones prove nothing more."""
        for tick in range(TICKS_IN_ALL):
            if tick == UNITS + 1:
                world.plan = Never()
            yield tick

    def together(self, world: World, tick: int, acts: list[Act], *, rivals: bool = True) -> None:
        """These act at the same time; afterwards time passes, longer than any lease or pause."""
        for number, (name, act) in enumerate(acts):
            world.start(f"{name}.{tick}.{number}", act)
            if self.overlaps and rivals and tick <= UNITS:
                rival = world.start(f"{name}.{tick}.rival", act)
                rival.asleep_until = world.time.monotonic() + RIVAL_SECONDS + number
        world.run()
        world.time.pass_by(PAUSE_SECONDS)

    def disturb(self, tick: int, lose_row: Callable[[], None]) -> None:
        if self.lose_state and tick == 1:
            lose_row()


@dataclass
class Source:
    """Units that appear one per tick. Names sort in the source's order."""

    scenario: Scenario
    published: list[str] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.expected = [name(number) for number in range(UNITS)]
        if self.scenario.poison is not None:
            self.damaged.add(name(self.scenario.poison))

    def advance(self, tick: int) -> bool:
        """One tick of the schedule; whether something new was published."""
        late = self.scenario.late
        before = len(self.published)
        if late is not None and tick == late + 2:
            self.published.append(name(late))
        if tick != late:
            self.published.append(name(tick))
        return len(self.published) > before

    def asked(self, tick: int) -> list[str]:
        """One tick; the units that are asked for: the one whose time it is, and the one whose input has just come."""
        before = list(self.published)
        self.advance(tick)
        asked = {name(tick), *self.published} - {*before}
        return [unit for unit in self.expected if unit in asked]

    def offered(self) -> list[str]:
        """What the source lists, sorted."""
        return sorted(self.published)


def name(number: int) -> str:
    return f"u{number:02}"


SWEEPS = [
    Scenario("crash before a call", sweep=Fault.CRASH_BEFORE),
    Scenario("crash after a call", sweep=Fault.CRASH_AFTER),
    Scenario("request lost", sweep=Fault.LOST_REQUEST),
    Scenario("answer lost after commit", sweep=Fault.LOST_ANSWER),
    Scenario("pause beyond the lease", sweep=Fault.PAUSE),
]
CALM = Scenario("nothing goes wrong")
TWO = Scenario("two triggers at once", copies=2)
WINDOWS = [
    CALM,
    *SWEEPS,
    Scenario("a window is late", late=1),
    Scenario("a window is poisoned, then put right", poison=1),
    Scenario("a queue row is lost", lose_state=True),
    TWO,
]
EXPORTS = [
    CALM,
    *SWEEPS,
    Scenario("messages repeated", repeat=True),
    Scenario("a message is lost", lose_message=True),
    TWO,
]
TICKS = [
    CALM,
    *SWEEPS,
    Scenario("messages repeated", repeat=True),
    Scenario("messages reordered", reorder=True),
    Scenario("a message is lost", lose_message=True),
    Scenario("a tick fails in silver, then works", poison=1),
    TWO,
]
READINESS = [
    CALM,
    *SWEEPS,
    Scenario("markers repeated", repeat=True),
    Scenario("a job fails, then works", poison=1),
    Scenario("an input is late", late=1),
    TWO,
]
