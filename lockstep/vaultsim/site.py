"""A host of simulated vaults: sessions, listings, downloads and the controls behind them. Knows no HTTP.

What belongs here: what the vendor answers, and how controls change it. What does not: status codes, headers and routes
(services/vault.py), rows and archives (rows.py, packing.py).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import InvalidInput
from lockstep.vaultsim import packing
from lockstep.vaultsim.damage import damaged_bytes, damaged_members
from lockstep.vaultsim.events import EventLog, Part, Summary, step
from lockstep.vaultsim.model import BEGINNING, STEP, ArchiveFault, ChangeKind, Event, Poison, VaultConfig, VaultState

KINDS = {"incremental_directdata": "N", "full_directdata": "F", "log_directdata": "L"}
_CACHED_BYTES = 64 * 1024 * 1024
_DAILY_RETENTION = timedelta(days=2)
_NAME = re.compile(r".+-(?P<date>\d{8})-(?P<time>\d{4})-(?P<letter>[NFL])", re.ASCII)
_MAKERS = {"N": packing.incremental, "F": packing.full, "L": packing.log}


class Refusal(Exception):
    """An answer with responseStatus FAILURE."""

    def __init__(self, type_: str, message: str) -> None:
        super().__init__(message)
        self.type = type_
        self.message = message


@dataclass(frozen=True)
class Listed:
    """One archive that a listing may name."""

    letter: str
    index: int
    start: datetime
    stop: datetime


@dataclass
class Session:
    """A login. `vault` is the one it really belongs to, which the trap makes another than asked for."""

    vault: str
    calls: int = 0


class VaultSite:
    """All simulated vaults of one process."""

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self._log = EventLog(folder / "vault.sqlite")
        self._vaults = self._log.replay()
        self._summaries = {vault: self._log.summaries(vault) for vault in self._vaults}
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._cache: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()
        self.sessions: dict[str, Session] = {}
        self._bursts: dict[str, tuple[float, int]] = {}
        self._spent: dict[tuple[str, str], int] = {}

    def close(self) -> None:
        """Close the memory on disk."""
        self._log.close()

    # --- controls ----------------------------------------------------------------------------------------------

    def add(self, fields: dict[str, Any]) -> VaultState:
        """Create a vault; the same configuration again is a no-op, another one is refused."""
        config = _validated(lambda: VaultConfig(**fields))
        with self._lock:
            known = self._vaults.get(config.id)
            if known is not None and known.config != config:
                raise InvalidInput(
                    f"vault {config.id} exists with another configuration.", next_step="remove it first."
                )
            if known is None:
                self._happen(Event(vault=config.id, kind="add", data=config.model_dump(mode="json")))
                self._summaries[config.id] = {}
            return self.state(config.id)

    def remove(self, vault: str) -> None:
        """Forget a vault."""
        with self._lock:
            self.state(vault)
            self._happen(Event(vault=vault, kind="remove"))

    def state(self, vault: str) -> VaultState:
        """One vault, or `InvalidInput`."""
        with self._lock:
            found = self._vaults.get(vault)
        if found is None:
            raise InvalidInput(f"there is no vault {vault}.", next_step="add it with `lockstep vault add`.")
        return found

    def states(self) -> list[VaultState]:
        """All vaults."""
        with self._lock:
            return [self._vaults[name] for name in sorted(self._vaults)]

    def control(self, vault: str, kind: str, data: dict[str, Any]) -> VaultState:
        """Do one thing to a vault and remember it for ever. Bad input changes nothing."""
        with self._lock:
            checked = self._check(self.state(vault), kind, data)
            self._happen(Event(vault=vault, kind=kind, data=checked))
            if kind == "knobs":
                self._spent = {key: value for key, value in self._spent.items() if key[0] != vault}
            self._summarize(vault)
            return self.state(vault)

    def _happen(self, event: Event) -> None:
        trial = {event.vault: self._vaults[event.vault].model_copy(deep=True)} if event.vault in self._vaults else {}
        _validated(lambda: step(trial, event))
        self._log.append(event)
        self._vaults.pop(event.vault, None)
        self._vaults.update(trial)

    def _check(self, state: VaultState, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Turn what a person says (stop times) into what an event says (window numbers)."""
        data = dict(data)
        if kind == "publish" and not 1 <= int(data.get("windows", 1)) <= 100_000:
            raise InvalidInput("publish 1 to 100000 windows at a time.", unit=state.config.id)
        if kind in ("withhold", "release", "poison", "heal", "fault", "twist", "lose", "full", "log"):
            data["index"] = self._index(state, data.pop("stop", None), needs_stop=kind not in ("full", "log"))
        if kind == "poison":
            data.setdefault("kind", Poison.NUMBER.value)
        if kind == "evolve":
            data["index"] = state.published
            self._check_change(state, data)
        return data

    def _index(self, state: VaultState, stop: str | None, *, needs_stop: bool) -> int:
        if stop is None:
            if needs_stop:
                raise InvalidInput("say which window: its stop time.", unit=state.config.id)
            return state.published - 1
        instant = parse_time(stop)
        index = state.config.index_of(instant)
        if index < -1 or state.config.stop_of(index) != instant or (needs_stop and index < 0):
            raise InvalidInput(
                f"no window of vault {state.config.id} stops at {stop}.",
                next_step=f"the first one stops at {state.config.stop_of(0):%Y-%m-%dT%H:%MZ}, then every 15 minutes.",
            )
        return index

    def _check_change(self, state: VaultState, data: dict[str, Any]) -> None:
        known = {one.name: one for one in packing.world_of(state).things(state.published)}
        kind, name = ChangeKind(data.get("kind", "")), str(data.get("object", ""))
        if kind is ChangeKind.OBJECT:
            if name in known:
                raise InvalidInput(f"object {name} exists.", unit=state.config.id)
            return
        if name not in known:
            raise InvalidInput(f"there is no object {name}.", unit=state.config.id)
        has = data.get("column") in {column.name for column in known[name].columns}
        if has == (kind is ChangeKind.COLUMN):
            raise InvalidInput(
                f"column {data.get('column')} of {name} {'exists' if has else 'does not exist'}.", unit=state.config.id
            )

    # --- what the vendor answers -------------------------------------------------------------------------------

    def login(self, vault: str, user: str, password: str) -> tuple[str, str]:
        """A new session and the vault it belongs to, which need not be the one that was asked for."""
        state = self._known(vault)
        if state.knobs.locked_out:
            raise Refusal("USER_LOCKED_OUT", "The user account is locked.")
        if not user or not password:
            raise Refusal("USERNAME_OR_PASSWORD_INCORRECT", "Authentication failed.")
        token = secrets.token_hex(32).upper()
        real = state.knobs.wrong_vault or vault
        with self._lock:
            self.sessions[token] = Session(real)
        return token, real

    def authorize(self, vault: str, token: str | None) -> VaultState:
        """Count one call of a session; a dead or foreign one is refused."""
        state = self._known(vault)
        with self._lock:
            session = self.sessions.get(token or "")
            limit = state.knobs.session_calls
            if session is None or (limit and session.calls >= limit):
                self.sessions.pop(token or "", None)
                raise Refusal("INVALID_SESSION_ID", "Invalid or expired session ID.")
            session.calls += 1
            if session.vault != vault and session.vault in self._vaults:
                return self._vaults[session.vault]
        return state

    def burst(self, vault: str) -> tuple[int, int]:
        """Count one call against the burst limit: the limit and what remains; below zero means refuse."""
        knobs = self._known(vault).knobs
        now = self._clock.monotonic()
        with self._lock:
            since, calls = self._bursts.get(vault, (now, 0))
            if now - since >= knobs.burst_seconds:
                since, calls = now, 0
            self._bursts[vault] = (since, calls + 1)
        return knobs.burst_limit, knobs.burst_limit - calls - 1

    def spend(self, vault: str, knob: str) -> bool:
        """Whether a counted fault strikes this call."""
        left = int(getattr(self._known(vault).knobs, knob))
        with self._lock:
            used = self._spent.get((vault, knob), 0)
            if used >= left:
                return False
            self._spent[(vault, knob)] = used + 1
            return True

    def listing(
        self, state: VaultState, extract_type: str | None, start: datetime | None, stop: datetime | None
    ) -> list[dict[str, Any]]:
        """The `data` of a listing. Boundaries are inclusive here; the vendor documents neither them nor an order."""
        if state.knobs.initial:
            raise Refusal("OPERATION_NOT_ALLOWED", "Initial file being generated. Please check again later.")
        letters = [KINDS[extract_type]] if extract_type else list(KINDS.values())
        found = [
            self._entry(state, one)
            for letter in letters
            for one in self._listed(state, letter)
            if (start is None or one.start >= start) and (stop is None or one.stop <= stop)
        ]
        if state.knobs.duplicates:
            found = [*found, *found]
        if state.knobs.shuffle:
            random.Random(state.config.seed).shuffle(found)  # noqa: S311  # reproducible on purpose
        return found

    def part(self, state: VaultState, part_name: str) -> bytes:
        """The bytes of one part, or a refusal: a download that fails answers with JSON."""
        name, _, number = part_name.rpartition(".")
        one = self._find(state, name)
        if one is None or not number.isdigit():
            raise Refusal("INVALID_DATA", f"File {part_name} is not available.")
        fault = _fault_of(state, one)
        if fault is ArchiveFault.JSON_BODY:
            raise Refusal("UNEXPECTED_ERROR", "The file could not be read.")
        summary, content = self._summary(state, one), self._content(state, one)
        if not 1 <= int(number) <= len(summary.parts):
            raise Refusal("INVALID_DATA", f"File {part_name} is not available.")
        size = state.knobs.part_size
        return content[(int(number) - 1) * size : int(number) * size]

    # --- archives ----------------------------------------------------------------------------------------------

    def _known(self, vault: str) -> VaultState:
        with self._lock:
            if vault not in self._vaults:
                raise Refusal("MALFORMED_URL", "The URL does not name a vault.")
            return self._vaults[vault]

    def _find(self, state: VaultState, name: str) -> Listed | None:
        """The archive behind a name, if a listing would offer it for download."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        index = state.config.index_of(parse_time(match["date"] + match["time"]))
        if match["letter"] == "N" and index in state.withheld:
            return None
        found = (one for one in self._listed(state, match["letter"], only=index) if _name(state, one) == name)
        return next(found, None)

    def _listed(self, state: VaultState, letter: str, only: int | None = None) -> Iterator[Listed]:
        config, now = state.config, state.now
        if letter == "N":
            keep = timedelta(days=state.knobs.retention_days)
            first = 0 if not keep else max(0, config.index_of(now - keep))
            lost, wanted = set(state.lost), range(first, state.published)
            for index in wanted if only is None else range(only, only + 1):
                if index in wanted and index not in lost:
                    yield Listed("N", index, config.start_of(index), config.stop_of(index))
            return
        for index in sorted(set(state.fulls if letter == "F" else state.logs)):
            stop = config.stop_of(index)
            if stop + STEP + _DAILY_RETENTION >= now or not state.knobs.retention_days:
                yield Listed(letter, index, BEGINNING if letter == "F" else stop - timedelta(days=1), stop)

    def _entry(self, state: VaultState, one: Listed) -> dict[str, Any]:
        name = _name(state, one)
        if one.letter == "N" and one.index in state.withheld:
            extract = "incremental_directdata"
            words = state.withheld[one.index] or f"Failed to publish {extract} file. No other action is needed."
            return {"name": name, "error": {"next_retry": _minute(state.now + 2 * STEP), "message": words}}
        summary, fault = self._summary(state, one), _fault_of(state, one)
        details = [self._part_entry(state, name, number, part, fault) for number, part in enumerate(summary.parts, 1)]
        return {
            "name": name,
            "filename": f"{name}.tar.gz",
            "extract_type": next(kind for kind, letter in KINDS.items() if letter == one.letter),
            "start_time": _minute(one.start),
            "stop_time": _minute(one.stop),
            "record_count": summary.records,
            "size": sum(part.size for part in summary.parts),
            "fileparts": len(details) + (fault is ArchiveFault.MISSING_PART),
            "filepart_details": details,
        }

    def _part_entry(
        self, state: VaultState, name: str, number: int, part: Part, fault: ArchiveFault | None
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "name": f"{name}.{number:03d}",
            "filename": f"{name}.tar.gz.{number:03d}",
            "filepart": number,
            "size": part.size + (fault is ArchiveFault.WRONG_SIZE),
            "url": f"/services/directdata/private/files/{name}.{number:03d}",
        }
        if state.knobs.md5:
            entry["md5checksum"] = "0" * 32 if fault is ArchiveFault.WRONG_MD5 else part.md5
        return entry

    def _summarize(self, vault: str) -> None:
        """Pack what the listing will name and is not known yet; the sizes are remembered, the bytes are not."""
        state = self._vaults[vault]
        known, new = self._summaries[vault], {}
        for letter in "NFL":
            for one in self._listed(state, letter):
                name, variant = _name(state, one), _variant(state, one)
                if name not in known or known[name].variant != variant:
                    new[name] = self._summary(state, one, remember=False)
        if new:
            self._log.remember(vault, new)

    def _summary(self, state: VaultState, one: Listed, *, remember: bool = True) -> Summary:
        vault, name, variant = state.config.id, _name(state, one), _variant(state, one)
        known = self._summaries[vault].get(name)
        if known is not None and known.variant == variant:
            return known
        content, records = self._make(state, one)
        size = state.knobs.part_size
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        parts = tuple(Part(len(piece), hashlib.md5(piece, usedforsecurity=False).hexdigest()) for piece in pieces)
        made = Summary(variant, records, parts)
        with self._lock:
            self._summaries[vault][name] = made
            self._keep((vault, name, variant), content)
        if remember:
            self._log.remember(vault, {name: made})
        return made

    def _content(self, state: VaultState, one: Listed) -> bytes:
        key = (state.config.id, _name(state, one), _variant(state, one))
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        content, _ = self._make(state, one)
        with self._lock:
            self._keep(key, content)
        return content

    def _make(self, state: VaultState, one: Listed) -> tuple[bytes, int]:
        fault = _fault_of(state, one)
        contents = _MAKERS[one.letter](state, one.index)
        records = contents.records
        target = BytesIO()
        packing.pack(damaged_members(contents, fault), target)
        return damaged_bytes(target.getvalue(), fault), records

    def _keep(self, key: tuple[str, str, str], content: bytes) -> None:
        self._cache[key] = content
        while len(self._cache) > 1 and sum(map(len, self._cache.values())) > _CACHED_BYTES:
            self._cache.popitem(last=False)


def parse_time(text: str) -> datetime:
    """A time as the vendor's API takes it, or YYYYMMDDHHMM as we write stop times."""
    for pattern in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M%z", "%Y%m%d%H%M%z"):
        try:
            return datetime.strptime(text.removesuffix("Z") + "+0000", pattern)  # noqa: DTZ007  # every pattern has %z
        except ValueError:
            continue
    raise InvalidInput(f"{text!r} is not a time.", next_step="write 2026-01-01T00:15Z or 202601010015.")


def _name(state: VaultState, one: Listed) -> str:
    return f"{state.config.id}-{one.stop:%Y%m%d}-{one.stop:%H%M}-{one.letter}"


def _fault_of(state: VaultState, one: Listed) -> ArchiveFault | None:
    return state.faults.get(one.index) if one.letter == "N" else None


def _variant(state: VaultState, one: Listed) -> str:
    """Everything that the bytes of an archive depend on."""
    changes = [change.model_dump(mode="json") for change in state.changes if change.index <= one.index]
    if one.letter == "N":
        touched: Any = [state.twists.get(one.index), state.poisoned.get(one.index), _fault_of(state, one)]
    else:
        touched = {index: twist for index, twist in state.twists.items() if index <= one.index}
    made_from = [state.config.model_dump(mode="json"), changes, touched, state.knobs.part_size]
    text = json.dumps(made_from, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _minute(instant: datetime) -> str:
    return f"{instant:%Y-%m-%dT%H:%MZ}"


def _validated(action: Any) -> Any:
    try:
        return action()
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise InvalidInput("the vault's settings cannot be used.", problems=problems) from None
    except (ValueError, KeyError) as error:
        raise InvalidInput(f"the request cannot be used: {error}") from None
