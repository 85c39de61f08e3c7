"""The producer: everything that a vault lists goes to S3 and into the queue, once, whole, in order.

What belongs here: the order of I/O from the listing to the queue row. What does not: rules of a listing (listing.py),
of an archive (archive.py), of keys (model.py). Apply is not known here, so nothing that happens there can block it.
Any number of producers may run at once, and any of them may die anywhere: what exists is found again and kept.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LockstepError, Transient
from lockstep.kernel.logs import get_logger
from lockstep.windows.archive import CheckedArchive, CheckedFile, Limits, read_archive
from lockstep.windows.client import BurstSpent, VaultClient
from lockstep.windows.listing import Listing, Published, contiguous_until, find_gaps, read_listing
from lockstep.windows.model import (
    FIRST_EPOCH,
    SOURCE_MANIFEST_NAME,
    Gap,
    QueueRow,
    RawFile,
    RawManifest,
    SourcePart,
    Window,
    WindowKind,
    WindowStatus,
    file_key,
    format_instant,
    stoptime,
)
from lockstep.windows.queue import WindowQueue
from lockstep.windows.raw import RawStore, storage_errors

LOOKBACK = timedelta(days=11)
"""How far back a chain is looked at when no watermark is given. The vendor keeps incrementals for ten days."""
MARGIN = timedelta(hours=1)
"""How much earlier than needed a listing is asked for: whether its boundaries are inclusive is not documented."""
WORKERS = 4
VAULT_TAG = "lockstep/vault"
"""Run tag that says whose producer a run is."""
_STALE_SECONDS = 24 * 3600.0

_log = get_logger("lockstep.windows.producer")


@dataclass
class ProducerReport:
    """What one pass over one vault did. `problems` are words for people; gaps are what is still missing."""

    vault: str
    listed: int = 0
    produced: list[Window] = field(default_factory=list)
    replaced: list[Window] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    contiguous_until: datetime | None = None
    halted: bool = False

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing and nothing went wrong."""
        return not self.gaps and not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and for metadata."""
        until = self.contiguous_until
        return {
            "vault": self.vault,
            "listed": self.listed,
            "produced": [one.sort_key for one in self.produced],
            "replaced": [one.sort_key for one in self.replaced],
            "contiguous_until": stoptime(until) if until else None,
            "gaps": [
                {
                    "start": stoptime(gap.start) if gap.start else None,
                    "stop": stoptime(gap.stop),
                    "reason": gap.reason,
                    "next_retry": format_instant(gap.next_retry) if gap.next_retry else None,
                }
                for gap in self.gaps
            ],
            "problems": self.problems,
            "healthy": self.healthy,
        }


class VaultHalted(Transient):
    """The vault, not one window, is in the way. The pass ends early and the next one goes on from here."""


class Producer:
    """Fetches what one vault publishes. Clients, clock and work folder are given by the caller."""

    def __init__(
        self,
        client: VaultClient,
        raw: RawStore,
        queue: WindowQueue,
        *,
        folder: Path,
        clock: Clock | None = None,
        limits: Limits | None = None,
        workers: int = WORKERS,
    ) -> None:
        self._client = client
        self._raw = raw
        self._queue = queue
        self._folder = folder
        self._clock = clock or SystemClock()
        self._limits = limits
        self._workers = workers
        self.vault = client.vault

    def run(self, *, watermark: datetime | None = None, epoch: int = FIRST_EPOCH) -> ProducerReport:
        """One pass: everything listed since the watermark, logs, and the first full archive if none was fetched yet.

        Args:
            watermark: How far the warehouse is. None: the chain of the queue's own rows decides.
            epoch: The vault's current epoch, written into new rows.

        Raises:
            LockstepError: The vault or the queue could not be asked at all; nothing was changed then.
        """
        report = ProducerReport(self.vault)
        self._sweep_leftovers()
        with storage_errors(f"queue of {self.vault}"):
            anchor, rows = self._chain(watermark)
            listing = self._list(anchor, rows, epoch)
            crash_point("windows.produce.listed")
            report.listed = len(listing.published) + len(listing.missing)
            self._produce_chain(report, anchor, rows, listing)
            self._close_gaps(report, rows, watermark)
            self._replace_failed(report, rows, listing)
            self._produce_daily(report, epoch)
        return report

    def produce_full(self, *, stop: datetime | None = None, epoch: int = FIRST_EPOCH) -> Window:
        """Fetch the newest full archive, or the one that stops at `stop`, unless it is there. Returns its window."""
        listing = self._read(WindowKind.FULL, epoch)
        wanted = [one for one in listing.published if stop is None or one.window.stop == stop]
        if not wanted:
            raise InvalidInput(
                f"the vault offers no full archive{f' that stops at {stoptime(stop)}' if stop else ''}.",
                unit=f"vault {self.vault}",
                next_step="the vendor keeps full archives for two days; wait for the next one.",
            )
        with storage_errors(f"queue of {self.vault}"):
            window = wanted[-1].window
            if self._queue.get(window) is None:
                self._queue.add_ready(window, self._prepare(wanted[-1]))
            return window

    def refetch(self, row: QueueRow) -> bool:
        """Fetch a window again if the vendor has published it anew. Whether its row points at other raw files now.

        For a window that failed and is about to be tried once more, whatever state it is in by then; a row that is
        APPLIED is left alone.

        Raises:
            LockstepError: The vault could not be asked, or what it offers cannot be trusted; the row is as it was.
        """
        start = None if row.window.kind is WindowKind.FULL else row.window.start - MARGIN
        offered = {one.window.stop: one for one in self._read(row.window.kind, row.window.epoch, start=start).published}
        published = offered.get(row.window.stop)
        with storage_errors(f"queue of {self.vault}"):
            return published is not None and self._replaced(row, published)

    def list_incrementals(self) -> list[Any]:
        """What the vault lists right now, as it sent it. Nothing is fetched."""
        return self._client.list_files(WindowKind.INCREMENTAL)

    # --- the chain ---------------------------------------------------------------------------------------------

    def _chain(self, watermark: datetime | None) -> tuple[datetime | None, list[QueueRow]]:
        """Where the chain must start, and the rows from there on."""
        if watermark is not None:
            return watermark, list(self._queue.rows(self.vault, after=watermark))
        last = self._queue.last(self.vault)
        if last is None:
            return None, []
        rows = list(self._queue.rows(self.vault, after=last.window.stop - LOOKBACK))
        return rows[0].window.start, rows

    def _list(self, anchor: datetime | None, rows: Sequence[QueueRow], epoch: int) -> Listing:
        """List from where the chain ends or a row has failed, whichever is earlier."""
        reached = contiguous_until([row.window for row in rows], anchor)
        points = [] if reached is None else [reached]
        points += [row.window.start for row in rows if row.status is WindowStatus.FAILED]
        return self._read(WindowKind.INCREMENTAL, epoch, start=min(points) - MARGIN if points else None)

    def _read(self, kind: WindowKind, epoch: int, *, start: datetime | None = None) -> Listing:
        listing = read_listing(self.vault, self._client.list_files(kind, start=start), epoch=epoch)
        return Listing(
            tuple(one for one in listing.published if one.window.kind is kind),
            tuple(one for one in listing.missing if one.kind is kind),
        )

    def _produce_chain(
        self, report: ProducerReport, anchor: datetime | None, rows: Sequence[QueueRow], listing: Listing
    ) -> None:
        have = {row.window.stop for row in rows}
        fresh = [one for one in listing.published if _is_new(one.window.stop, have, anchor)]
        missing = [one for one in listing.missing if _is_new(one.stop, have, anchor)]
        known = [*(row.window for row in rows), *(one.window for one in fresh)]
        open_gaps = {gap.sort_key: gap for gap in find_gaps(self.vault, anchor, known, missing)}
        # Before any row behind them: a death from here on leaves no row whose predecessor is missing in silence.
        for gap in open_gaps.values():
            self._queue.record_gap(gap, now=self._clock.now())
            crash_point("windows.produce.gap_recorded")
        done = [row.window for row in rows]
        try:
            for published, outcome in self._prepare_all(fresh):
                if isinstance(outcome, LockstepError):
                    gap = Gap(self.vault, published.window.stop, str(outcome), start=published.window.start)
                    open_gaps[gap.sort_key] = gap
                    self._queue.record_gap(gap, now=self._clock.now())
                    report.problems.append(str(outcome))
                    continue
                self._enqueue(report, published.window, outcome)
                done.append(published.window)
        except VaultHalted as halted:
            report.halted = True
            report.problems.append(str(halted))
        report.gaps = sorted(open_gaps.values(), key=lambda gap: gap.stop)
        report.contiguous_until = contiguous_until(done, anchor)

    def _enqueue(self, report: ProducerReport, window: Window, checksum: str) -> None:
        crash_point("windows.produce.before_row")
        if self._queue.add_ready(window, checksum):
            report.produced.append(window)
        crash_point("windows.produce.row_written")

    def _close_gaps(self, report: ProducerReport, rows: Sequence[QueueRow], watermark: datetime | None) -> None:
        """Forget gaps that are filled, or that lie behind the watermark. What was not looked at stays."""
        still_open = {gap.sort_key for gap in report.gaps}
        filled = {row.window.stop for row in rows} | {window.stop for window in report.produced}
        first = rows[0].window.start if rows else None
        for gap in self._queue.gaps(self.vault):
            behind = watermark is not None and gap.stop <= watermark
            seen = not report.halted and (first is None or gap.stop > first) and gap.sort_key not in still_open
            if behind or seen or gap.stop in filled:
                self._queue.close_gap(gap)

    # --- failed rows, full archives and logs -------------------------------------------------------------------

    def _replace_failed(self, report: ProducerReport, rows: Iterable[QueueRow], listing: Listing) -> None:
        """Fetch FAILED windows again that the vendor has published anew; their state stays FAILED until a retry."""
        offered = {one.window.stop: one for one in listing.published}
        for row in rows:
            published = offered.get(row.window.stop)
            if row.status is not WindowStatus.FAILED or published is None:
                continue
            try:
                if self._replaced(row, published):
                    report.replaced.append(row.window)
            except LockstepError as error:
                report.problems.append(str(error))

    def _replaced(self, row: QueueRow, published: Published) -> bool:
        checksum = self._refetched(row, replace(published, window=row.window))
        return checksum is not None and self._queue.replace(row, checksum)

    def _refetched(self, row: QueueRow, published: Published) -> str | None:
        """The checksum of the raw files that a row should point at, if it is not the row's own."""
        manifest = self._raw.read_manifest(row.window)
        if manifest is not None and _same_source(manifest, published) and self._raw.is_intact(manifest):
            return None if manifest.checksum == row.checksum else manifest.checksum
        made = self._fetch(published, replace_manifest=True, unless=manifest)
        return None if made == row.checksum else made

    def _produce_daily(self, report: ProducerReport, epoch: int) -> None:
        """Logs that have no row yet, and the first full archive. Their failure is a problem, never a gap."""
        try:
            have = {row.window.stop for row in self._queue.rows(self.vault, kind=WindowKind.LOG)}
            fresh = [one for one in self._read(WindowKind.LOG, epoch).published if one.window.stop not in have]
            if next(self._queue.rows(self.vault, kind=WindowKind.FULL), None) is None:
                fresh += self._read(WindowKind.FULL, epoch).published[-1:]
            for published, outcome in self._prepare_all(fresh):
                if isinstance(outcome, LockstepError):
                    report.problems.append(str(outcome))
                else:
                    self._enqueue(report, published.window, outcome)
        except LockstepError as error:
            report.problems.append(str(error))

    # --- one window --------------------------------------------------------------------------------------------

    def _prepare_all(self, fresh: Sequence[Published]) -> Iterator[tuple[Published, str | LockstepError]]:
        """Bring windows to S3, several at a time; outcomes come in the order of the windows.

        A failure that concerns the vault and not one window raises `VaultHalted`: what follows is for the next pass.
        """
        halted: list[LockstepError] = []

        def attempt(published: Published) -> str | LockstepError | None:
            if halted:
                return None
            try:
                return self._prepare(published)
            except (BurstSpent, InvalidInput) as error:
                halted.append(error)
                return None
            except LockstepError as error:
                return error

        with ThreadPoolExecutor(self._workers, thread_name_prefix=f"produce-{self.vault}") as pool:
            for published, outcome in zip(fresh, pool.map(attempt, fresh), strict=True):
                if outcome is None:
                    raise VaultHalted(str(halted[0]))
                yield published, outcome

    def _prepare(self, published: Published) -> str:
        """Make the window whole in S3 and return its checksum. What an earlier pass finished is kept."""
        try:
            manifest = self._raw.read_manifest(published.window)
        except InvalidInput:  # someone else's object under our name: the window is made anew
            return self._fetch(published, replace_manifest=True)
        if manifest is not None and self._raw.is_intact(manifest):
            return manifest.checksum
        return self._fetch(published, replace_manifest=manifest is not None)

    def _fetch(self, published: Published, *, replace_manifest: bool, unless: RawManifest | None = None) -> str:
        with self._work_folder(published.window) as folder:
            parts = self._download(published, folder)
            crash_point("windows.produce.downloaded")
            inside = folder / "inside"
            inside.mkdir()
            paths = [folder / f"part-{one.number:05d}" for one in published.parts]
            archive = read_archive(published.window, paths, inside, self._limits)
            crash_point("windows.produce.unpacked")
            if archive.unlisted:
                _log.warning(
                    "files that the manifest does not list", window=str(published.window), files=archive.unlisted
                )
            manifest = self._manifest(published, archive, parts)
            if unless is not None and _content(manifest) == _content(unless) and self._raw.is_intact(unless):
                return unless.checksum
            return self._keep(manifest, archive, replace_manifest=replace_manifest)

    def _download(self, published: Published, folder: Path) -> list[SourcePart]:
        done = []
        for part in published.parts:
            try:
                done.append(self._client.download(part, folder / f"part-{part.number:05d}"))
            except LockstepError as error:
                error.unit = str(published.window)
                raise
            crash_point("windows.produce.part_downloaded")
        return done

    def _keep(self, manifest: RawManifest, archive: CheckedArchive, *, replace_manifest: bool) -> str:
        """Write the files, then the manifest. If another producer's manifest is there first, theirs counts."""
        window = manifest.window
        self._raw.put_file(window.prefix + SOURCE_MANIFEST_NAME, archive.manifest)
        for file in (*archive.files, *([archive.schema] if archive.schema else [])):
            self._raw.put_file(file_key(window, file.object, file.type), file.path)
            crash_point("windows.produce.object_written")
        crash_point("windows.produce.before_manifest")
        written = self._raw.put_manifest(manifest, replace=replace_manifest)
        crash_point("windows.produce.manifest_written")
        if written:
            return manifest.checksum
        theirs = self._raw.read_manifest(window)
        if theirs is None or _content(theirs) != _content(manifest):
            raise Transient("two producers fetched different content.", unit=str(window))
        return theirs.checksum

    def _manifest(self, published: Published, archive: CheckedArchive, parts: list[SourcePart]) -> RawManifest:
        return RawManifest(
            window=published.window,
            files=tuple(_raw_file(published.window, one) for one in archive.files),
            source_parts=tuple(parts),
            source_manifest=archive.source_rows,
            record_count=published.record_count,
            produced_at=self._clock.now(),
            schema=_raw_file(published.window, archive.schema) if archive.schema else None,
        )

    @contextmanager
    def _work_folder(self, window: Window) -> Iterator[Path]:
        """A folder of this attempt alone. A full disk is not the window's fault: it is tried again."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=f"{self.vault}@{window.stoptime}-") as name:
                yield Path(name)
        except OSError as error:
            raise Transient(f"the work folder cannot be used: {error}", unit=str(window)) from error

    def _sweep_leftovers(self) -> None:
        """Delete what killed producers left on disk. A day old, so that no living one is meant."""
        oldest = self._clock.now().timestamp() - _STALE_SECONDS
        for leftover in self._folder.glob(f"{self.vault}@*"):
            if leftover.stat().st_mtime < oldest:
                shutil.rmtree(leftover, ignore_errors=True)


def _is_new(stop: datetime, have: set[datetime], anchor: datetime | None) -> bool:
    return stop not in have and (anchor is None or stop > anchor)


def _raw_file(window: Window, file: CheckedFile) -> RawFile:
    return RawFile(
        object=file.object,
        type=file.type,
        key=file_key(window, file.object, file.type),
        sha256=file.sha256,
        bytes=file.bytes,
        rows=file.rows,
        columns=file.columns,
        extract=file.extract,
    )


def _same_source(manifest: RawManifest, published: Published) -> bool:
    """Whether the listing still offers what was fetched. Without an MD5 in the listing nobody can say."""
    listed = [(part.name, part.size, part.md5) for part in published.parts]
    return listed == [(part.name, part.size, part.md5) for part in manifest.source_parts]


def _content(manifest: RawManifest) -> RawManifest:
    """A manifest without what differs between two fetches of the same archive."""
    files = tuple(sorted(manifest.files, key=lambda one: one.key))
    return replace(manifest, produced_at=manifest.window.stop, files=files)
