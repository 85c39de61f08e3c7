"""Archives that lie, break or attack: each is refused in words that name file and window, and nothing gets out."""

from __future__ import annotations

import gzip
import io
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lockstep.vaultsim.model import ArchiveFault, VaultConfig, VaultState
from lockstep.vaultsim.site import VaultSite
from lockstep.windows.archive import BadArchive, CheckedArchive, Limits, read_archive
from lockstep.windows.model import FileType, Window, WindowKind

STOP = datetime(2026, 1, 1, 0, 15, tzinfo=UTC)
WINDOW = Window("v1", STOP - timedelta(minutes=15), STOP)
SMALL = Limits(members=200, total_bytes=64 * 1024**2, small=1024**2)
MANIFEST = b"extract,extract_label,type,records,file\n"


def _simulated(folder: Path, fault: ArchiveFault | None = None) -> bytes:
    site = VaultSite(folder / "site")
    site.add(VaultConfig(id="v1", rows=8, objects=("study__v", "picklist__sys")).model_dump(mode="json"))
    state: VaultState = site.control("v1", "publish", {"windows": 1})
    if fault is not None:
        state = site.control("v1", "fault", {"stop": "202601010015", "kind": fault.value})
    content = site.part(state, "v1-20260101-0015-N.001")
    site.close()
    return content


def _tar(files: dict[str, bytes], *infos: tarfile.TarInfo) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in infos:
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return target.getvalue()


def _read(
    folder: Path, content: bytes, *, pieces: int = 1, limits: Limits = SMALL, window: Window = WINDOW
) -> CheckedArchive:
    size = max(1, -(-len(content) // pieces))
    parts = []
    for number in range(pieces):
        parts.append(folder / f"part{number}")
        parts[-1].write_bytes(content[number * size : (number + 1) * size])
    inside = folder / "inside"
    inside.mkdir()
    return read_archive(window, parts, inside, limits)


def _one(csv: bytes, records: int, *, extract: str = "Object.study__v", kind: str = "updates") -> bytes:
    row = f"{extract},Study,{kind},{records},Object/a.csv\n".encode()
    return _tar({"manifest.csv": MANIFEST + row, "Object/a.csv": csv})


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_sound_archive_is_read_whole_also_from_many_parts(tmp_path: Path, pieces: int):
    archive = _read(tmp_path, _simulated(tmp_path), pieces=pieces)
    found = {(one.object, one.type): one for one in archive.files}
    study = found["study__v", FileType.UPSERT]
    assert study.rows == 8
    assert study.columns[:2] == ("id", "modified_date__v")
    assert study.extract == "Object.study__v"
    assert archive.schema is not None
    assert archive.schema.type is FileType.SCHEMA
    assert archive.unlisted == ()


_WORDS = {
    ArchiveFault.TRAVERSAL: "outside.csv",
    ArchiveFault.ABSOLUTE_PATH: "outside.csv",
    ArchiveFault.SYMLINK: "link.csv",
    ArchiveFault.HARDLINK: "hard.csv",
    ArchiveFault.DEVICE: "device.csv",
    ArchiveFault.BOMB: "bomb",
    ArchiveFault.MANY_MEMBERS: "too many",
    ArchiveFault.DUPLICATE_MEMBER: "metadata_full.csv is in it twice",
    ArchiveFault.TRUNCATED: "truncated",
    ArchiveFault.NOT_GZIP: "not sound gzip",
    ArchiveFault.MISSING_FILE: "Object/study__v.csv: the manifest names it",
    ArchiveFault.NO_MANIFEST: "manifest.csv",
    ArchiveFault.LYING_MANIFEST: "Object/study__v.csv: the manifest says 9 records, the file has 8",
    ArchiveFault.BINARY_CSV: "Object/study__v.csv: it holds NUL bytes",
    ArchiveFault.WIDE: "Object/study__v.csv: 5001 columns",
    ArchiveFault.RAGGED: "Object/study__v.csv: record 1 has 3 values",
}


@pytest.mark.parametrize("fault", list(_WORDS))
def test_a_hostile_archive_is_refused_by_name_and_leaves_its_folder_never(tmp_path: Path, fault: ArchiveFault):
    """Guards the disk and the warehouse from whoever can write to the vendor's storage."""
    folder = tmp_path / "deep" / "er" / "work"
    folder.mkdir(parents=True)
    content = _simulated(tmp_path, fault)
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(folder)}
    with pytest.raises(BadArchive) as refusal:
        _read(folder, content)
    assert _WORDS[fault] in str(refusal.value)
    assert "v1 window 202601010015" in str(refusal.value)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(folder)} == before
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.parametrize("fault", [ArchiveFault.WRAPPED, ArchiveFault.NO_TYPE_COLUMN])
def test_an_archive_that_is_only_unusual_is_read(tmp_path: Path, fault: ArchiveFault):
    archive = _read(tmp_path, _simulated(tmp_path, fault))
    upserts = [one for one in archive.files if one.type is FileType.UPSERT]
    assert {one.object for one in upserts} == {"study__v", "picklist__sys"}


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_the_checksum_at_the_very_end_of_the_archive_counts(tmp_path: Path, damage: str):
    """Guards the last bytes: the tar inside is complete before them, so nothing else would notice."""
    padded = gzip.decompress(_one(b"id,text\nV1,x\n", 1)) + bytes(3 * 1024**2)  # nobody reads beyond a tar's end
    sound = gzip.compress(padded)
    _read(tmp_path, sound, limits=Limits())
    (tmp_path / "inside").rename(tmp_path / "before")
    broken = sound[:-6] if damage == "cut" else sound[:-8] + bytes([sound[-8] ^ 1]) + sound[-7:]
    with pytest.raises(BadArchive, match="gzip"):
        _read(tmp_path, broken, limits=Limits())


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE])
def test_what_is_not_a_plain_file_is_refused_also_when_it_points_inside(tmp_path: Path, kind: bytes):
    info = tarfile.TarInfo("Object/odd.csv")
    info.type, info.linkname = kind, "manifest.csv"
    with pytest.raises(BadArchive, match=r"Object/odd\.csv|not a sound tar"):
        _read(tmp_path, _tar({"manifest.csv": MANIFEST}, info))


def test_a_bomb_does_not_reach_the_disk(tmp_path: Path):
    """Guards against measuring a bomb by exploding it."""
    with pytest.raises(BadArchive, match=r"Object/bomb\.csv: it unpacks to more"):
        _read(tmp_path, _simulated(tmp_path, ArchiveFault.BOMB))
    assert sum(path.stat().st_size for path in (tmp_path / "inside").rglob("*")) < 8 * 1024**2


def test_a_header_of_megabytes_is_refused_before_it_is_in_memory(tmp_path: Path):
    """Guards memory: tarfile reads a long name or an attribute whole, whatever its size."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 8 * 1024**2
    target = io.BytesIO()
    with gzip.GzipFile(fileobj=target, mode="wb") as zipped:
        zipped.write(info.tobuf(tarfile.USTAR_FORMAT) + bytes(info.size) + bytes(1024))
    with pytest.raises(BadArchive, match="a header of 8388608 bytes"):
        _read(tmp_path, target.getvalue(), limits=Limits())


def test_records_with_line_breaks_and_quotes_are_counted_as_records(tmp_path: Path):
    """Guards the count that the manifest is compared with: lines are not records."""
    csv = b'id,text\nV1,"two\nlines"\nV2,"a ""quote"", a comma"\r\nV3,\n'
    assert _read(tmp_path, _one(csv, 3)).files[0].rows == 3


def test_a_missing_line_break_at_the_end_is_no_missing_record(tmp_path: Path):
    assert _read(tmp_path, _one(b"id,text\nV1,x", 1)).files[0].rows == 1


@pytest.mark.parametrize(
    ("csv", "words"),
    [
        (b"", "it is empty"),
        (b"id,id\nV1,V2\n", "names a column twice"),
        (b"id,\nV1,V2\n", "names a column twice, or not at all"),
        (b'id,text\nV1,"never closed\n', "is not a CSV in UTF-8"),
        (b"id,text\nV1,\xff\xfe\n", "is not a CSV in UTF-8"),
        (b"id,text\nV1,x\n\n", "record 2 has 0 values"),
    ],
)
def test_a_file_that_is_no_sound_csv_is_refused(tmp_path: Path, csv: bytes, words: str):
    with pytest.raises(BadArchive, match=r"Object/a\.csv") as refusal:
        _read(tmp_path, _one(csv, 1))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("extract", "words"),
    [("Object.study__v; DROP TABLE x", "not a name"), ("Object.../../x", "not a name"), ("study__v", "not a name")],
)
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, extract: str, words: str):
    """Guards keys and, later, SQL: names come from the file."""
    with pytest.raises(BadArchive, match=words):
        _read(tmp_path, _one(b"id\nV1\n", 1, extract=extract))


def test_a_file_that_two_rows_of_the_manifest_claim_for_one_object_is_refused(tmp_path: Path):
    rows = b"Object.a__v,A,updates,1,Object/1.csv\nDocument.a__v,A,updates,1,Object/2.csv\n"
    content = _tar({"manifest.csv": MANIFEST + rows, "Object/1.csv": b"id\nV1\n", "Object/2.csv": b"id\nV2\n"})
    with pytest.raises(BadArchive, match="two files"):
        _read(tmp_path, content)


@pytest.mark.parametrize(
    "row", [b"Object.a__v,A,updates,many,x.csv\n", b"Object.a__v,A,updates,3,\n", b"Object.a__v,A,moved,1,x.csv\n"]
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, row: bytes):
    with pytest.raises(BadArchive, match=r"manifest\.csv"):
        _read(tmp_path, _tar({"manifest.csv": MANIFEST + row}))


def test_the_type_decides_what_a_file_does_and_the_suffix_only_where_there_is_none(tmp_path: Path):
    rows = (
        b"Object.a__v,A,deletes,1,Object/deleted.csv\n"
        b"Object.b__v_deletes,B,updates,1,Object/b_deletes.csv\n"
        b"Object.c__v,C,updates,0,\n"
    )
    csv = b"id,deleted_date\nV1,2026-01-01T00:00:00.000Z\n"
    archive = _read(
        tmp_path, _tar({"manifest.csv": MANIFEST + rows, "object/Deleted.csv": csv, "Object/b_deletes.csv": csv})
    )
    assert {(one.object, one.type) for one in archive.files} == {("a__v", FileType.DELETE), ("b__v", FileType.DELETE)}
    assert len(archive.source_rows) == 3


def test_a_full_archive_has_its_schema_in_its_metadata(tmp_path: Path):
    rows = b"extract,extract_label,records,file\nMetadata.metadata,Metadata,1,Metadata/metadata.csv\n"
    content = _tar({"manifest.csv": rows, "Metadata/metadata.csv": b"extract,column_name\nObject.a__v,id\n"})
    full = Window("v1", datetime(2000, 1, 1, tzinfo=UTC), STOP, kind=WindowKind.FULL)
    schema = _read(tmp_path, content, window=full).schema
    assert schema is not None
    assert (schema.type, schema.rows) == (FileType.SCHEMA, 1)


def test_what_the_manifest_does_not_list_is_not_loaded_but_reported(tmp_path: Path):
    content = _tar({"manifest.csv": MANIFEST, "Object/stray.csv": b"id\nV1\n"})
    archive = _read(tmp_path, content)
    assert (archive.files, archive.unlisted) == ((), ("Object/stray.csv",))
