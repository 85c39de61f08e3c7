"""What a vault's listing says: which archives can be fetched, which are announced but missing, where the chain breaks.

Pure and total: no clock, no client. The vendor documents neither order nor boundaries of a listing and does not forbid
duplicates, so everything is sorted and merged here. Windows are never computed from the time of day.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lockstep.kernel.errors import InvalidInput
from lockstep.windows.model import FIRST_EPOCH, Gap, Window, WindowKind, parse_stoptime

EXTRACT_TYPES = {
    WindowKind.INCREMENTAL: "incremental_directdata",
    WindowKind.FULL: "full_directdata",
    WindowKind.LOG: "log_directdata",
}
_LETTERS = {"N": WindowKind.INCREMENTAL, "F": WindowKind.FULL, "L": WindowKind.LOG}
_NAME = re.compile(r"(?P<vault>.+)-(?P<date>\d{8})-(?P<time>\d{4})-(?P<letter>[NFL])", re.ASCII)
_PART_NAME = re.compile(r"[A-Za-z0-9_-]+(\.tar\.gz)?\.\d{3,}", re.ASCII)


@dataclass(frozen=True)
class ListedPart:
    """One part of an archive as the listing promises it."""

    name: str
    number: int
    size: int
    md5: str | None


@dataclass(frozen=True)
class Published:
    """An archive that can be fetched."""

    name: str
    window: Window
    record_count: int
    parts: tuple[ListedPart, ...]


@dataclass(frozen=True)
class Missing:
    """A window that the vendor announces but does not offer yet, or offers in words that cannot be read."""

    name: str
    kind: WindowKind
    stop: datetime
    reason: str
    next_retry: datetime | None = None


@dataclass(frozen=True)
class Listing:
    """A listing in order, without duplicates. No stop time is in both lists: what can be fetched is not missing."""

    published: tuple[Published, ...]
    missing: tuple[Missing, ...]


def read_listing(vault: str, entries: Iterable[Any], *, epoch: int = FIRST_EPOCH) -> Listing:
    """Understand the `data` of a listing. An entry that cannot be read is a missing window, never a skipped one.

    Raises:
        InvalidInput: An entry does not even have a name with a stop time, so nothing can say what is missing.
    """
    published: dict[tuple[WindowKind, datetime], Published] = {}
    missing: dict[tuple[WindowKind, datetime], Missing] = {}
    for entry in entries:
        found = _read_entry(vault, entry, epoch)
        if isinstance(found, Published):
            published.setdefault((found.window.kind, found.window.stop), found)
        else:
            missing[(found.kind, found.stop)] = found
    return Listing(
        tuple(published[key] for key in sorted(published)),
        tuple(missing[key] for key in sorted(missing) if key not in published),
    )


def find_gaps(vault: str, anchor: datetime | None, known: Iterable[Window], missing: Iterable[Missing]) -> list[Gap]:
    """Where the chain of incrementals is broken: announced windows, and stretches that nobody announces.

    Args:
        vault: The vault.
        anchor: Where the chain must start; None if it starts with the first window there is.
        known: Windows that have a queue row or can be fetched.
        missing: Windows that are announced only.
    """
    links: list[tuple[datetime, datetime | None, Missing | None]] = [(one.stop, one.start, None) for one in known]
    links += [(one.stop, None, one) for one in missing]
    links.sort(key=lambda link: (link[0], link[2] is not None))
    gaps: list[Gap] = []
    reached = anchor
    for stop, start, announced in links:
        if reached is not None and stop <= reached:
            continue
        if announced is not None:
            gaps.append(Gap(vault, stop, announced.reason, start=reached, next_retry=announced.next_retry))
        elif reached is not None and start is not None and start > reached:
            gaps.append(Gap(vault, start, "the vendor does not list this stretch", start=reached))
        reached = stop
    return gaps


def contiguous_until(windows: Sequence[Window], anchor: datetime | None = None) -> datetime | None:
    """The stop of the last window that is reached from `anchor`, or from the first window, without a hole."""
    reached = anchor
    for window in sorted(windows, key=lambda one: one.stop):
        if reached is not None and window.start > reached:
            break
        reached = window.stop if reached is None else max(reached, window.stop)
    return reached


def parse_vendor_time(text: Any) -> datetime:
    """A time of the vendor, with or without seconds. Raises `ValueError`."""
    instant = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    if instant.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return instant.astimezone(UTC)


def _read_entry(vault: str, entry: Any, epoch: int) -> Published | Missing:
    name = str(entry.get("name", "")) if isinstance(entry, Mapping) else ""
    match = _NAME.fullmatch(name)
    if match is None or match["vault"] != vault:
        raise InvalidInput(
            f"the listing holds an entry that names no archive of this vault: {name[:100]!r}",
            unit=f"vault {vault}",
            next_step="look at the vendor's listing; nothing was fetched.",
        )
    kind, stop = _LETTERS[match["letter"]], parse_stoptime(match["date"] + match["time"])
    if "error" in entry:
        return _failed(name, kind, stop, entry["error"])
    try:
        return _published(vault, name, kind, entry, epoch)
    except (KeyError, TypeError, ValueError, InvalidInput) as error:
        return Missing(name, kind, stop, f"the listing of {name} cannot be read: {type(error).__name__} {error}")


def _failed(name: str, kind: WindowKind, stop: datetime, error: Any) -> Missing:
    fields = error if isinstance(error, Mapping) else {}
    try:
        retry = parse_vendor_time(fields["next_retry"])
    except (KeyError, ValueError):
        retry = None
    words = str(fields.get("message") or "no reason given")
    return Missing(name, kind, stop, f"not published by the vendor: {words}", retry)


def _published(vault: str, name: str, kind: WindowKind, entry: Mapping[str, Any], epoch: int) -> Published:
    start, stop = parse_vendor_time(entry["start_time"]), parse_vendor_time(entry["stop_time"])
    parts = sorted((_part(one) for one in entry["filepart_details"]), key=lambda one: one.number)
    if [one.number for one in parts] != list(range(1, int(entry["fileparts"]) + 1)):
        raise ValueError(f"{entry['fileparts']} parts are announced, parts {[one.number for one in parts]} are listed")
    window = Window(vault, start, stop, epoch, kind)
    return Published(name, window, int(entry["record_count"]), tuple(parts))


def _part(fields: Mapping[str, Any]) -> ListedPart:
    name, size = str(fields["name"]), int(fields["size"])
    if _PART_NAME.fullmatch(name) is None or size < 0:
        raise ValueError(f"part {name[:100]!r} of {size} bytes")
    md5 = fields.get("md5checksum")
    return ListedPart(name, int(fields["filepart"]), size, str(md5).lower() if md5 else None)
