"""The words both sides of the window pipeline share: keys, prefixes, and a manifest whose bytes can be trusted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.windows.model import (
    FileType,
    Gap,
    QueueRow,
    RawFile,
    RawManifest,
    SourcePart,
    SourceRow,
    Window,
    WindowKind,
    WindowStatus,
    file_key,
    is_object_name,
    parse_stoptime,
)
from lockstep.windows.queue import from_item, to_item

START = datetime(2026, 3, 1, 23, 45, tzinfo=UTC)
STOP = START + timedelta(minutes=15)
WINDOW = Window("1000020", START, STOP, epoch=3)


def _manifest() -> RawManifest:
    file = RawFile(
        "study__v", FileType.UPSERT, WINDOW.prefix + "study__v_upsert.csv", "ab" * 32, 10, 1, ("id", "n\u00e9")
    )
    return RawManifest(
        window=WINDOW,
        files=(file,),
        source_parts=(SourcePart("1000020-20260302-0000-N.001", 99, "cd" * 16),),
        source_manifest=(SourceRow("Object.study__v", "Study", "updates", 1, "Object/study__v.csv"),),
        record_count=1,
        produced_at=STOP,
        schema=RawFile("metadata", FileType.SCHEMA, WINDOW.prefix + "metadata.csv", "ef" * 32, 5, 0, ("extract",)),
    )


def test_a_manifest_survives_its_text_and_always_has_the_same_bytes():
    """Guards the checksum of the queue row: it is worthless if two writers spell one manifest differently."""
    manifest = _manifest()
    again = RawManifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.to_json() == manifest.to_json()
    assert again.checksum == manifest.checksum


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version":2}', "\x00", '{"version":1,"vault":"x"}'])
def test_a_text_that_is_no_manifest_is_refused(text: str):
    with pytest.raises(InvalidInput, match="raw manifest"):
        RawManifest.from_json(text)


def test_a_window_at_midnight_belongs_to_the_day_it_stops_in():
    assert WINDOW.prefix == "vault=1000020/stoptime=202603020000/"
    assert file_key(WINDOW, "study__v", FileType.DELETE) == WINDOW.prefix + "study__v_delete.csv"


def test_a_local_time_is_written_as_utc():
    local = datetime(2026, 3, 2, 1, 0, tzinfo=timezone(timedelta(hours=1)))
    assert Window("v", START, local).stoptime == "202603020000"


def test_full_and_log_archives_and_gaps_sort_behind_every_window():
    """Guards the query for the next window, which must never see them."""
    keys = [Window("v", START, STOP, kind=kind).sort_key for kind in (WindowKind.FULL, WindowKind.LOG)]
    assert all(key > "999999999999" for key in [*keys, Gap("v", STOP, "late").sort_key])
    assert Window("v", START, STOP, kind=WindowKind.FULL).prefix == "vault=v/full=202603020000/"


@pytest.mark.parametrize("vault", ["", "../x", "a/b", "a" * 65, "v=1", "é"])
def test_a_vault_id_that_could_leave_its_prefix_is_refused(vault: str):
    with pytest.raises(InvalidInput):
        Window(vault, START, STOP)


@pytest.mark.parametrize(("start", "stop"), [(STOP, START), (START, START), (START.replace(tzinfo=None), STOP)])
def test_a_window_that_does_not_move_forward_is_refused(start: datetime, stop: datetime):
    with pytest.raises(InvalidInput):
        Window("v", start, stop)


@pytest.mark.parametrize("text", ["", "20260302", "202613020000", "2026030200000", "\uff12\uff10260302000"])
def test_a_text_that_is_no_stop_time_is_refused(text: str):
    with pytest.raises(InvalidInput):
        parse_stoptime(text)


@pytest.mark.parametrize("name", ["", "a b", "x;drop", "../x", "a.b", "é"])
def test_an_object_name_that_could_be_more_than_a_name_is_refused(name: str):
    assert not is_object_name(name)


def test_a_queue_row_survives_dynamodb():
    row = QueueRow(WINDOW, WindowStatus.PROCESSING, WINDOW.prefix, "aa", 2, "why", 7, STOP, "worker-1")
    assert from_item(to_item(row)) == row
    full = QueueRow(Window("v", START, STOP, kind=WindowKind.FULL), WindowStatus.READY, "p", "c")
    assert from_item(to_item(full)) == full
