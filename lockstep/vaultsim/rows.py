"""The data of a simulated vault: which rows a window creates, changes and deletes. Pure, and random access.

What belongs here: values from a seed. What does not: CSV and archives (packing.py). Window n costs the same whether it
is the first or the ten-thousandth: a row's fate is a function of its birth, so nothing before it is replayed. Only a
full archive, and the oracle `state_after`, walk through all windows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from hashlib import blake2b
from typing import NamedTuple

from lockstep.vaultsim.catalogue import Column, Thing, things
from lockstep.vaultsim.model import STEP, Change, Twist, VaultConfig

Value = str | None
Row = list[Value]
Key = tuple[Value, ...]

_LONGEST_LIFE = 8  # a row that is deleted at all is deleted this many windows after its birth, or sooner
_MEMORY = 16  # a window changes rows that are at most this many windows old
_PICKLIST_ROWS = 2
_AWKWARD: tuple[Value, ...] = (
    None,
    "",
    "NA",
    "null",
    "None",
    "0042",
    'said "yes", twice',
    "two\nlines",
    "caf\u00e9 \U0001f9ea",
    " leading and trailing ",
    "back\\slash",
    "1e5",
)
_FIRST_DAY = date(1950, 1, 1).toordinal()
_STATES = ("active__v", "inactive__v", "in_review__c")


class Birth(NamedTuple):
    """When a row came into being (0: before the first window; n + 1: in window n) and its number there."""

    batch: int
    number: int


class WindowRows(NamedTuple):
    """What one window does to one object: whole rows, and the keys it removes."""

    upserts: list[Row]
    deletes: list[Key]


class World:
    """The data of one vault. Two worlds with the same configuration are the same, byte for byte."""

    def __init__(
        self, config: VaultConfig, changes: tuple[Change, ...] = (), twists: dict[int, Twist] | None = None
    ) -> None:
        self._config = config
        self._changes = changes
        self._twists = twists or {}

    def things(self, index: int) -> list[Thing]:
        """The schema at window `index`; -1 is the initial full archive."""
        return things(self._config.objects, self._changes, index)

    def window(self, thing: Thing, index: int) -> WindowRows:
        """What window `index` does to `thing`, whose columns are those of that window."""
        return WindowRows(list(self.upserts(thing, index)), list(self.deletes(thing, index)))

    def upserts(self, thing: Thing, index: int) -> Iterator[Row]:
        """The rows that window `index` creates and changes, one at a time."""
        fillers = [_filler(column) for column in thing.columns]
        first: Row | None = None
        for birth in self._changed(thing, index + 1):
            row = self._row(thing, fillers, birth, index)
            first = first or row
            yield row
        if first and self._twists.get(index) is Twist.DUPLICATE_ID:
            again = list(first)
            again[_place(thing, "modified_date__v")] = _datetime(self._config.stop_of(index))
            yield again

    def deletes(self, thing: Thing, index: int) -> Iterator[Key]:
        """The keys that window `index` deletes, one at a time."""
        yield from (self._key(thing, one) for one in self._deaths(thing, index + 1))
        if self._twists.get(index) is Twist.BOTH_FILES and self._births(thing, index + 1):
            yield self._key(thing, Birth(index + 1, 0))

    def state_after(self, index: int, *, full: bool = True) -> dict[str, dict[Key, Row]]:
        """The oracle: every object's rows after window `index`, deletes before upserts, the last row of a key wins.

        Rows have the columns of the schema at `index`; a column that came later than a row's last change is empty.
        Without `full` it is what the windows alone leave, where no full archive was loaded before them.
        """
        final = {one.name: [column.name for column in one.columns] for one in self.things(index)}
        state: dict[str, dict[Key, Row]] = {name: {} for name in final}
        for moment in range(-1 if full else 0, index + 1):
            for then in self.things(moment):
                self._fold(then, moment, final[then.name], state[then.name])
        return state

    def log_rows(self, thing: Thing, index: int) -> Iterator[Row]:
        """The audit rows of the day that ends with window `index`."""
        stop = self._config.stop_of(index)
        for number in range(max(1, self._config.rows)):
            digest = self._digest(thing, Birth(index, number), index)
            at = stop - timedelta(seconds=int.from_bytes(digest[:4], "big") % 86_400)
            person = f"user{digest[4] % 20}@example.com"
            action = ("create", "edit", "delete", "login")[digest[5] % 4]
            yield [f"{stop:%Y%m%d%H%M}-{number:08d}", _datetime(at), person, action, _string(digest, 400)]

    def _fold(self, then: Thing, moment: int, names: list[str], rows: dict[Key, Row]) -> None:
        change = self.window(then, moment)
        for key in change.deletes:
            rows.pop(key, None)
        places = {column.name: place for place, column in enumerate(then.columns)}
        for row in change.upserts:
            key = tuple(row[places[part]] for part in then.key)
            rows[key] = [row[places[one]] if one in places else None for one in names]

    # --- which rows --------------------------------------------------------------------------------------------

    def _births(self, thing: Thing, batch: int) -> int:
        """How many rows of `thing` are born in a batch."""
        if batch < 0 or batch - 1 < thing.since:
            return 0
        if thing.component == "Picklist":
            return 0 if self._is_empty(batch - 1) else _PICKLIST_ROWS
        if batch == 0:
            return self._config.base_rows
        return 0 if self._is_empty(batch - 1) else self._config.rows - self._config.rows // 4

    def _is_empty(self, index: int) -> bool:
        every = self._config.empty_every
        return index >= 0 and every > 0 and index % every == every - 1

    def _changed(self, thing: Thing, batch: int) -> Iterator[Birth]:
        births = self._births(thing, batch)
        yield from (Birth(batch, number) for number in range(births))
        wanted = self._config.rows // 4 if births and batch and thing.component != "Picklist" else 0
        seen: set[Birth] = set()
        for attempt in range(wanted * 4):
            if len(seen) == wanted:
                return
            draw = self._crc(thing, "change", batch, attempt)
            origin = max(0, batch - 1 - draw % _MEMORY)
            size = self._births(thing, origin)
            birth = Birth(origin, (draw >> 5) % size) if size else None
            if birth is not None and birth not in seen and not self._dead(thing, birth, batch):
                seen.add(birth)
                yield birth

    def _deaths(self, thing: Thing, batch: int) -> Iterator[Birth]:
        if self._is_empty(batch - 1):
            return
        for life in range(1, _LONGEST_LIFE + 1):
            for number in range(life - 1, self._births(thing, batch - life), _LONGEST_LIFE):
                if self._mortal(thing, Birth(batch - life, number)):
                    yield Birth(batch - life, number)

    def _dead(self, thing: Thing, birth: Birth, batch: int) -> bool:
        return birth.batch + birth.number % _LONGEST_LIFE + 1 <= batch and self._mortal(thing, birth)

    def _mortal(self, thing: Thing, birth: Birth) -> bool:
        dies_in = birth.batch + birth.number % _LONGEST_LIFE + 1
        if self._is_empty(dies_in - 1):  # an empty window deletes nothing, so this row lives on
            return False
        return self._crc(thing, "death", birth.batch, birth.number) % 100 < self._config.delete_percent

    # --- what is in them ---------------------------------------------------------------------------------------

    def _row(self, thing: Thing, fillers: list[Filler], birth: Birth, index: int) -> Row:
        digest = self._digest(thing, birth, index)
        context = _Context(digest, self._key(thing, birth), self._config.stop_of(index))
        return [fill(context) for fill in fillers]

    def _key(self, thing: Thing, birth: Birth) -> Key:
        if thing.component == "Picklist":
            # Joined without a separator, different keys of these are the same text: field_1 + 12_0, field_11 + 2_0.
            return ("study__v", f"field_{birth.batch % 12}", f"{birth.batch // 12}_{birth.number}")
        if thing.name == "document_version__sys":
            return (f"{birth.batch * 100_000 + birth.number}_{birth.number % 3}_1",)
        return (f"V{thing.number:02d}{birth.batch:07d}{birth.number:07d}",)

    def _digest(self, thing: Thing, birth: Birth, index: int) -> bytes:
        text = f"{self._config.seed}|{self._config.id}|{thing.name}|{birth.batch}|{birth.number}|{index}"
        return blake2b(text.encode(), digest_size=32).digest()

    def _crc(self, thing: Thing, word: str, batch: int, number: int) -> int:
        return zlib.crc32(f"{self._config.seed}|{self._config.id}|{thing.name}|{word}|{batch}|{number}".encode())


class _Context(NamedTuple):
    digest: bytes
    key: Key
    stop: datetime


Filler = Callable[[_Context], Value]


def _filler(column: Column) -> Filler:
    """The function that makes a column's values. Each column reads other bytes of the row's digest."""
    at = zlib.crc32(column.name.encode()) % 24
    if column.name in _KEYS:
        place = _KEYS[column.name]
        return lambda context: context.key[place]
    if column.fill:
        return _special(column, at)
    length = column.length or 100
    by_type: dict[str, Filler] = {
        "Number": lambda context: _decimal(context.digest[at:]),
        "Boolean": lambda context: _one_of(context.digest[at], ("true", "false", None)),
        "Date": lambda context: _date(context.digest[at:]),
        "DateTime": lambda context: _moment(context, at),
        "Picklist": lambda context: _STATES[context.digest[at] % 3],
        "MultiPicklist": lambda context: _one_of(context.digest[at], ("de__c,fr__c", "us__c", None)),
        "Relationship": lambda context: f"V0Z{context.digest[at]:012d}",
        "LongText": lambda context: _string(context.digest[at:] + context.digest[:at], min(length, 600)),
    }
    return by_type.get(column.type, lambda context: _string(context.digest[at:] + context.digest[:at], length))


_KEYS = {"id": 0, "object": 0, "object_field": 1, "picklist_value_name": 2}


def _special(column: Column, at: int) -> Filler:
    fills: dict[str, Filler] = {
        "big": lambda context: f"{int.from_bytes(context.digest[at : at + 8], 'big')}{context.digest[at]:03d}.5",
        "icon": lambda context: "http://vault.example.com/icons/" + context.digest.hex(),
        "long": lambda context: "policy " * (1 + context.digest[at] % 30),
        "document_number": lambda context: f"VV-{context.digest[at]:05d}",
        "small": lambda context: str(context.digest[at] % 9),
        "full_length": lambda context: "w" * column.length,
    }
    return fills[column.fill]


def _string(digest: bytes, length: int) -> Value:
    awkward = digest[0]
    if awkward < len(_AWKWARD):
        return _AWKWARD[awkward]
    return digest[1:13].hex()[:length]


def _decimal(digest: bytes) -> Value:
    whole = int.from_bytes(digest[:4], "big")
    if whole % 11 == 0:
        return None
    sign = "-" if whole % 7 == 0 else ""
    return f"{sign}{whole % 10_000_000}.{whole % 10_000:04d}"


def _date(digest: bytes) -> Value:
    days = int.from_bytes(digest[:2], "big")
    return None if days % 13 == 0 else date.fromordinal(_FIRST_DAY + days).isoformat()


def _moment(context: _Context, at: int) -> Value:
    back = int.from_bytes(context.digest[at : at + 3], "big") % int(STEP.total_seconds() * 1000)
    return _datetime(context.stop - timedelta(milliseconds=back))


def _datetime(instant: datetime) -> str:
    return instant.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"  # four times as fast as strftime


def _one_of(byte: int, values: tuple[Value, ...]) -> Value:
    return values[byte % len(values)]


def _place(thing: Thing, name: str) -> int:
    return next(place for place, column in enumerate(thing.columns) if column.name == name)
