"""The agent's walk: which tick goes next, what of it the service lacks, and what each answer means for it.

What belongs here: order, retries and their outcome in the agent's memory. What does not: HTTP (client.py), SQL
(state.py), files (pages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, NamedTuple

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import LockstepError, Terminal, Transient
from lockstep.kernel.logs import get_logger
from lockstep.kernel.retry import RetryPolicy
from lockstep.ticks.agent.client import IngestClient, PartRefused, TickFinalizeError
from lockstep.ticks.agent.pages import Pager, sha256_of
from lockstep.ticks.agent.state import AgentStore, AgentTick, LocalPart, LocalState

_ROUNDS = 5  # how often the service may ask for parts before a person should look

_log = get_logger(__name__)

Progress = Callable[[str, int, int], None]
"""Told as bytes arrive: tick, bytes at the service, bytes in all."""


class Patience(NamedTuple):
    """How often and how long apart a part and a whole tick are tried."""

    part: RetryPolicy = RetryPolicy(max_attempts=8, base_seconds=0.5, cap_seconds=30.0, budget_seconds=180.0)
    tick: RetryPolicy = RetryPolicy(max_attempts=10, base_seconds=1.0, cap_seconds=60.0, budget_seconds=600.0)


class Next(NamedTuple):
    """This tick goes now."""

    tick: AgentTick


class Blocked(NamedTuple):
    """This tick waits for a person, and everything after it waits for this tick."""

    tick: AgentTick


class Idle(NamedTuple):
    """Nothing is left to send."""


def next_tick(ticks: Iterable[AgentTick]) -> Next | Blocked | Idle:
    """Which tick goes next. One that failed for good stops the ones after it: a delta that is left out is lost."""
    for tick in ticks:
        if tick.state is LocalState.FAILED_MANUAL:
            return Blocked(tick)
        if not tick.state.is_past:
            return Next(tick)
    return Idle()


class PageLost(Terminal):
    """A page of the tick cannot be read from this disk any more; a retry makes it anew from the tick's folder."""


class Agent:
    """Sends ticks in order, each until it is committed or a person must look."""

    def __init__(
        self,
        store: AgentStore,
        pager: Pager,
        client: IngestClient,
        *,
        parallel: int = 4,
        chain: bool = True,
        clock: Clock | None = None,
        patience: Patience | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Nothing is opened here.

        Args:
            store: The agent's memory.
            pager: Knows where the pages are.
            client: Speaks to the service.
            parallel: Parts of one tick that are sent at the same time.
            chain: Whether each tick names the one before it, so that the service keeps their order too.
            clock: Where time comes from.
            patience: Retries.
            progress: Told as bytes arrive.
        """
        self._store, self._pager, self._client = store, pager, client
        self._parallel, self._chain, self._clock = parallel, chain, clock or SystemClock()
        self._patience = patience or Patience()
        self._progress = progress or (lambda *_: None)

    def send_all(self) -> Blocked | Idle:
        """Send what is there, in order; return when nothing is left or a tick needs a person.

        Raises:
            Transient: The service stayed away for longer than the policy allows; call again later.
            Terminal: The service refuses the agent itself, not a tick.
        """
        while True:
            step = next_tick(self._store.ticks())
            if not isinstance(step, Next):
                return step
            self.send(step.tick.tick_id)

    def send(self, tick_id: str) -> LocalState:
        """Bring one tick to an end: committed, or failed_manual with the service's words."""
        try:
            self._patience.tick.call(lambda: self._attempt(tick_id), clock=self._clock)
        except TickFinalizeError as error:
            self._fail(tick_id, error)
        except (PartRefused, PageLost) as error:
            self._fail(tick_id, error)
        except Transient as error:
            self._store.note(tick_id, str(error))
            raise
        tick = self._store.get(tick_id)
        return tick.state if tick else LocalState.SKIPPED

    def _fail(self, tick_id: str, error: LockstepError) -> None:
        self._store.mark_tick_failed_manual(tick_id, error.what)
        _log.error("tick needs a person", tick=tick_id, error=error.what)

    def _attempt(self, tick_id: str) -> None:
        self._store.begin(tick_id)
        parts = {part.file_seq: part for part in self._store.parts(tick_id)}
        known = self._client.tick(tick_id)
        have = {int(number): one["sha256"] for number, one in ((known or {}).get("parts_received") or {}).items()}
        if (known or {}).get("state") == "committed" and self._is_same(tick_id, have, parts):
            self._end(tick_id, (known or {}).get("result") or {})
            return
        if (known or {}).get("state") != "committed":
            self._put(tick_id, [part for part in parts.values() if have.get(part.file_seq) != part.sha256], have, parts)
        manifest = self._chained(tick_id)
        for _ in range(_ROUNDS):
            try:
                result = self._client.finalize_tick(tick_id, manifest)
            except TickFinalizeError as error:
                if not error.wants_parts:
                    raise
                self._mend(tick_id, error, parts)
                continue
            self._end(tick_id, result)
            return
        raise Transient("the service keeps asking for parts that were put.", unit=f"tick {tick_id}")

    def _is_same(self, tick_id: str, have: dict[int, str], parts: dict[int, LocalPart]) -> bool:
        """Whether the service has committed these very files while this agent never posted their manifest.

        So it is when the agent lost its memory: it no longer knows what the tick followed, and any other manifest for a
        committed tick is refused.
        """
        tick = self._store.get(tick_id)
        mine = {number: part.sha256 for number, part in parts.items()}
        return tick is not None and not tick.chained and have == mine

    def _end(self, tick_id: str, result: Mapping[str, Any]) -> None:
        self._store.commit(tick_id, result)
        self._pager.discard(tick_id)

    def _mend(self, tick_id: str, error: TickFinalizeError, parts: dict[int, LocalPart]) -> None:
        """Put just the parts that the service named, those with other bytes in the place of what is there."""
        wanted = sorted({*error.missing, *error.mismatched_sha} & parts.keys())
        if not wanted:
            raise Terminal("the service asks for parts that this tick does not have.", unit=f"tick {tick_id}")
        have: dict[int, str] = {}
        if error.mismatched_sha:
            received = (self._client.tick(tick_id) or {}).get("parts_received") or {}
            have = {int(number): one["sha256"] for number, one in received.items()}
        self._put(tick_id, [parts[number] for number in wanted], have, parts)

    def _put(
        self, tick_id: str, wanted: Sequence[LocalPart], have: dict[int, str], parts: dict[int, LocalPart]
    ) -> None:
        total = sum(part.bytes for part in parts.values())
        there = total - sum(part.bytes for part in wanted)
        self._progress(tick_id, there, total)
        with ThreadPoolExecutor(self._parallel, thread_name_prefix="part") as executor:
            waiting = [
                (part, executor.submit(self._put_one, tick_id, part, have.get(part.file_seq))) for part in wanted
            ]
            try:
                for part, one in waiting:
                    one.result()
                    there += part.bytes
                    self._progress(tick_id, there, total)
            except BaseException:
                for _, one in waiting:
                    one.cancel()  # what has not begun does not begin
                raise

    def _put_one(self, tick_id: str, part: LocalPart, replaces: str | None) -> None:
        def once() -> dict[str, Any]:
            self._store.sending(tick_id, part.file_seq)
            return self._client.put_tick_part(tick_id, part.file_seq, part.path, part.sha256, replaces=replaces)

        try:
            self._patience.part.call(once, clock=self._clock)
        except PartRefused as error:
            # The service got it in an earlier try whose answer was lost: what is there is what was sent.
            if error.status_code == HTTPStatus.PRECONDITION_FAILED:
                raise Transient("the part changed at the service meanwhile.", unit=error.unit) from error
            if error.is_damaged and sha256_of(part.path) == part.sha256:
                raise Transient("other bytes arrived than were sent.", unit=error.unit) from error
            raise
        except OSError as error:
            raise PageLost(f"a page cannot be read: {error}", unit=f"part {part.file_seq} of tick {tick_id}") from error
        self._store.sent(tick_id, part.file_seq)

    def _chained(self, tick_id: str) -> dict[str, Any]:
        """The manifest as it was first posted; before that, with the tick that it follows."""
        tick = self._store.get(tick_id)
        if tick is None:
            raise Terminal("the tick is not known.", unit=f"tick {tick_id}")
        if tick.chained or not self._chain:
            return tick.manifest
        manifest = {**tick.manifest, "prev_tick_id": self._previous(tick)}
        self._store.chain(tick_id, manifest)
        return manifest

    def _previous(self, tick: AgentTick) -> str | None:
        before = [one for one in self._store.ticks() if one.position < tick.position]
        committed = [one.tick_id for one in before if one.state is LocalState.COMMITTED]
        if committed:
            return committed[-1]
        found: str | None = self._client.status().get("head_tick_id")  # a new folder for a project that has ticks
        return found
