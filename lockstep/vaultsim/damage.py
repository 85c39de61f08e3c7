"""Archives that are wrong on purpose: hostile, broken or lying, one kind of damage per window.

What belongs here: how each `ArchiveFault` changes an archive's members or bytes. What does not: sound archives
(packing.py), and damage to the listing or the download (site.py).
"""

from __future__ import annotations

import io
import tarfile
from tempfile import TemporaryFile
from typing import IO

from lockstep.kernel.errors import InvalidInput
from lockstep.vaultsim.model import ArchiveFault
from lockstep.vaultsim.packing import Contents, Entry, Member, csv_stream, member

BOMB_BYTES = 128 * 1024 * 1024
MANY = 20_000
WIDE_COLUMNS = 5_000

_OUTSIDERS = {
    ArchiveFault.TRAVERSAL: ("Object/../../../outside.csv", tarfile.REGTYPE, ""),
    ArchiveFault.ABSOLUTE_PATH: ("/outside.csv", tarfile.REGTYPE, ""),
    ArchiveFault.SYMLINK: ("Object/link.csv", tarfile.SYMTYPE, "../../outside"),
    ArchiveFault.HARDLINK: ("Object/hard.csv", tarfile.LNKTYPE, "/outside"),
    ArchiveFault.DEVICE: ("Object/device.csv", tarfile.CHRTYPE, ""),
}


def damaged_members(contents: Contents, fault: ArchiveFault | None) -> list[Member]:
    """The members to pack, the manifest first, after the damage was done."""
    if fault in (ArchiveFault.LYING_MANIFEST, ArchiveFault.MISSING_FILE):
        _contradict(contents, fault)
    elif fault in (ArchiveFault.BINARY_CSV, ArchiveFault.RAGGED, ArchiveFault.WIDE):
        _spoil(contents, fault)
    members = [contents.manifest(), *contents.members]
    if fault is ArchiveFault.NO_MANIFEST:
        members.pop(0).content.close()
    if fault is ArchiveFault.WRAPPED:
        for one in members:
            one.name = f"archive/{one.name}"
    return members + _extra(fault)


def damaged_bytes(content: bytes, fault: ArchiveFault | None) -> bytes:
    """The packed bytes, after the damage was done."""
    if fault is ArchiveFault.TRUNCATED:
        return content[: len(content) * 2 // 3]
    if fault is ArchiveFault.NOT_GZIP:
        return b"<html>" + content
    return content


def _contradict(contents: Contents, fault: ArchiveFault) -> None:
    """Let the manifest promise what the archive does not hold."""
    entry = _first_file(contents)
    if fault is ArchiveFault.LYING_MANIFEST:
        entry.records += 1
    else:
        _take(contents, entry)


def _spoil(contents: Contents, fault: ArchiveFault) -> None:
    """Replace the first file by one of a single row that nobody can load."""
    entry = _first_file(contents)
    entry.records = 1
    if fault is ArchiveFault.WIDE:
        header = ["id", *(f"column_{number}__c" for number in range(WIDE_COLUMNS))]
        stream = csv_stream(header, [["V1", *([None] * WIDE_COLUMNS)]])[0]
    elif fault is ArchiveFault.BINARY_CSV:
        stream = io.BytesIO(b"id,name__v\n\x00\xff\xfe\x01,\x02\n")
    else:
        stream = io.BytesIO(b"id,name__v\nV1,one,too many\n")
    contents.members.insert(_take(contents, entry), member(entry.file, stream))


def _take(contents: Contents, entry: Entry) -> int:
    """Remove an entry's file, and say where it was."""
    place = next(place for place, one in enumerate(contents.members) if one.name == entry.file)
    contents.members.pop(place).content.close()
    return place


def _extra(fault: ArchiveFault | None) -> list[Member]:
    """Members that no honest archive has."""
    if fault is ArchiveFault.MANY_MEMBERS:
        return [Member(f"Object/empty_{number}.csv", io.BytesIO(), 0) for number in range(MANY)]
    if fault is ArchiveFault.DUPLICATE_MEMBER:
        return [member("metadata_full.csv", io.BytesIO(b"extract,column_name\n"))]
    if fault is ArchiveFault.BOMB:
        return [Member("Object/bomb.csv", _zeros(BOMB_BYTES), BOMB_BYTES)]
    if fault in _OUTSIDERS:
        name, kind, link = _OUTSIDERS[fault]
        return [Member(name, io.BytesIO(), 0, kind, link)]
    return []


def _zeros(size: int) -> IO[bytes]:
    """That many zero bytes in a file that takes no room."""
    stream = TemporaryFile()  # noqa: SIM115  # pack() closes it
    stream.truncate(size)
    return stream


def _first_file(contents: Contents) -> Entry:
    for one in contents.entries:
        if one.file:
            return one
    raise InvalidInput("this window has no file that could be damaged.", next_step="choose a window with records.")
