"""The raw windows that the benchmark applies: what a producer would have left in the bucket.

What belongs here: file contents and manifests, the same for the same stop time. What does not: queue rows and timing.
"""

from __future__ import annotations

import hashlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from lockstep.windows.model import FileType, RawFile, RawManifest, Window, file_key

OBJECTS = 8
ROWS = 100
COLUMNS = ("id", "modified_date__v", "name__v", "amount__c", "status__v")
STEP = timedelta(minutes=15)
_IDS = 5000
_THREADS = 4
_LINES_AT_ONCE = 20_000


class Published(NamedTuple):
    """A window whose files are in the bucket, and the checksum for its queue row."""

    window: Window
    checksum: str


class Files:
    """Writes the next windows of one vault."""

    def __init__(self, s3: Any, bucket: str, vault: str, start: datetime) -> None:
        self._s3 = s3
        self._bucket = bucket
        self._vault = vault
        self._next = start

    def publish(self, count: int) -> list[Published]:
        """The next windows, each with a file per object."""
        windows = [self._window() for _ in range(count)]
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._write, windows))

    def publish_large(self, rows: int) -> list[Published]:
        """One window with one file of that many rows, all new."""
        window, name = self._window(), "object_0__v"
        digest, size, key = hashlib.sha256(), 0, ""
        key = file_key(window, name, FileType.UPSERT)
        with tempfile.NamedTemporaryFile() as disk:
            for start in range(-1, rows, _LINES_AT_ONCE):
                lines = _lines(window, range(start, min(start + _LINES_AT_ONCE, rows)), prefix="L")
                digest.update(lines)
                size += len(lines)
                disk.write(lines)
            disk.flush()
            self._s3.upload_file(disk.name, self._bucket, key)
        file = RawFile(name, FileType.UPSERT, key, digest.hexdigest(), size, rows, COLUMNS, f"Object.{name}")
        return [self._finish(window, (file,))]

    def _window(self) -> Window:
        window = Window(self._vault, self._next, self._next + STEP)
        self._next = window.stop
        return window

    def _write(self, window: Window) -> Published:
        return self._finish(window, tuple(self._file(window, number) for number in range(OBJECTS)))

    def _finish(self, window: Window, files: tuple[RawFile, ...]) -> Published:
        manifest = RawManifest(window, files, (), (), sum(file.rows for file in files), window.stop)
        self._s3.put_object(Bucket=self._bucket, Key=window.manifest_key, Body=manifest.to_json())
        return Published(window, manifest.checksum)

    def _file(self, window: Window, number: int) -> RawFile:
        name = f"object_{number}__v"
        salt = int(hashlib.sha256(f"{window.stoptime}/{number}".encode()).hexdigest()[:6], 16)
        body = _lines(window, range(-1, ROWS), salt=salt)
        key = file_key(window, name, FileType.UPSERT)
        self._s3.put_object(Bucket=self._bucket, Key=key, Body=body)
        digest = hashlib.sha256(body).hexdigest()
        return RawFile(name, FileType.UPSERT, key, digest, len(body), ROWS, COLUMNS, f"Object.{name}")


def _lines(window: Window, places: range, *, prefix: str = "V", salt: int | None = None) -> bytes:
    """Rows of a file; place -1 is the header. With a salt, ids come again and again, as changes of rows do."""
    moment = window.stop.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    lines = []
    for place in places:
        if place < 0:
            lines.append(",".join(COLUMNS))
            continue
        number = place if salt is None else (salt + place * 7) % _IDS
        lines.append(f"{prefix}{number:08},{moment},Name {place} of {window.stoptime},{place}.25,active__v")
    return ("\n".join(lines) + "\n").encode() if lines else b""
