"""Data overwrite: replace one unit of a dataset whole, so that a replay leaves the state of one run.

What belongs here: Delta partitions by checked predicate, and files on S3 behind a manifest. What does not: which unit
to write and when; whoever calls this decides. Merging rows into a unit is merger.py's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.idempotency import delta, pointer
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LostClaim

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from types_boto3_s3 import S3Client

    from lockstep.kernel.clock import Clock
    from lockstep.kernel.ids import IdSource

# Two session settings would turn the check off or change what is replaced; the block does not inherit them.
_DATA_COLUMNS = "spark.databricks.delta.replaceWhere.dataColumns.enabled"
_SAFE_SETTINGS = {
    "spark.databricks.delta.replaceWhere.constraintCheck.enabled": "true",
    _DATA_COLUMNS: "true",
}
_RECENT_COMMITS = 20
_NOTE = ".base.json"


class OutsideUnit(InvalidInput):
    """The new data holds rows that do not belong to the unit; nothing was written."""


class Overwritten(NamedTuple):
    """What a write left. `version` is the table's version in which the unit has these rows."""

    version: int
    rows: int
    changed: bool


def overwrite_delta(
    spark: SparkSession,
    path: str,
    frame: DataFrame,
    unit: Mapping[str, object] | str,
    *,
    run: str,
    partition_by: Sequence[str] = (),
) -> Overwritten:
    """Replace the rows of one unit by `frame` in one commit; an empty frame clears the unit.

    Readers see the old rows until the commit and the new ones after it. A write that fails leaves the old rows.

    Args:
        spark: The session.
        path: The table; it is made by the first write.
        frame: All rows of the unit. Every row must satisfy the predicate, NULL counts as no.
        unit: Column values, or a predicate in Spark SQL that the caller vouches for.
        run: Who writes, kept inside the commit.
        partition_by: Partition columns when the table is made; a unit aligned with them is replaced without a scan.

    Raises:
        OutsideUnit: A row of `frame` belongs to another unit.
    """
    predicate = write_unit(spark, path, frame, unit, run=run, partition_by=partition_by)
    return _outcome(spark, path, run, predicate)


def write_unit(
    spark: SparkSession,
    path: str,
    frame: DataFrame,
    unit: Mapping[str, object] | str,
    *,
    run: str,
    partition_by: Sequence[str] = (),
    aligned: bool = False,
    options: Mapping[str, str] | None = None,
) -> str:
    """The write of `overwrite_delta` alone, for a caller that finds its commit in the log itself.

    Args:
        spark: The session.
        path: The table.
        frame: All rows of the unit.
        unit: Column values or a predicate.
        run: Who writes; the caller recognises its commit by it.
        partition_by: Partition columns when the table is made.
        aligned: The predicate names partition columns only. Whole files are then replaced without a scan; Delta
            refuses a predicate on other columns.
        options: Further options of Delta's writer, such as `mergeSchema` or `txnAppId`.

    Returns:
        The predicate under which the unit was replaced, as the commit carries it.
    """
    predicate = unit if isinstance(unit, str) else delta.equality(unit)
    refuse_blank(predicate, path)
    crash_point("overwrite.delta.before_write")
    writer = (
        frame.write.format("delta")
        .mode("overwrite")
        .options(**(options or {}))
        .option("replaceWhere", predicate)
        .option("userMetadata", delta.stamp("overwrite", run=run, unit=predicate))
        .partitionBy(*partition_by)
    )
    with checked(spark, path, predicate, aligned=aligned):
        writer.save(path)
    crash_point("overwrite.delta.after_commit")
    return predicate


def refuse_blank(predicate: str, path: str) -> None:
    """Raise `InvalidInput` for a predicate of nothing, which must not come to mean the whole table."""
    if not predicate.strip():
        raise InvalidInput("a unit needs a predicate.", unit=path, next_step="name the columns and values to replace.")


@contextmanager
def checked(spark: SparkSession, path: str, predicate: str, *, aligned: bool = False) -> Iterator[None]:
    """A `replaceWhere` in the block is held to its predicate, whatever the session's settings. Raises `OutsideUnit`."""
    wanted = {**_SAFE_SETTINGS, _DATA_COLUMNS: str(not aligned).lower()}
    with delta.settings(spark, wanted), _outside_unit(path, predicate), delta.contested(path):
        yield


@contextmanager
def _outside_unit(path: str, predicate: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if delta.condition_of(error) != "DELTA_REPLACE_WHERE_MISMATCH":
            raise
        raise OutsideUnit(
            f"the new data holds rows outside {predicate}; nothing was written.",
            unit=path,
            next_step="filter the data to the unit, or write the unit that the rows belong to.",
        ) from error


def _outcome(spark: SparkSession, path: str, run: str, predicate: str) -> Overwritten:
    commits = delta.history(spark, path, limit=_RECENT_COMMITS)
    for commit in commits:
        if commit.stamp is not None and (commit.stamp.get("run"), commit.stamp.get("unit")) == (run, predicate):
            return Overwritten(commit.version, int(commit.metrics.get("numOutputRows", 0)), changed=True)
    # Nothing replaced by nothing leaves no commit: the unit was empty and still is.
    return Overwritten(commits[0].version, 0, changed=False)


class File(NamedTuple):
    """One published object; `etag` tells whether it still is the one that was published."""

    key: str
    size: int
    etag: str


class Manifest(NamedTuple):
    """The files that make up a unit, and the run that wrote them."""

    unit: str
    run: str
    folder: str
    files: tuple[File, ...]
    published_at: datetime


class Staged(NamedTuple):
    """A folder of one attempt's own, and the state of the unit that its publication replaces."""

    unit: str
    run: str
    folder: str
    base: pointer.Seen | None


class FileUnits:
    """A dataset of files on S3, one manifest for each unit. Files are written aside and never changed.

    S3 replaces single objects atomically and directories not at all, so what readers follow is one object: the
    manifest. It moves by compare-and-set, hence a worker that was overtaken publishes nothing.
    """

    def __init__(self, s3: S3Client, bucket: str, prefix: str, *, ids: IdSource, clock: Clock) -> None:
        self._s3, self._bucket, self._prefix = s3, bucket, prefix.strip("/")
        self._ids, self._clock = ids, clock

    def stage(self, unit: str, *, run: str) -> Staged:
        """Open a fresh folder for one attempt. Write files under `staged.folder` with any writer, then publish."""
        _check_unit(unit)
        base = pointer.read(self._s3, self._bucket, self._manifest_key(unit))
        folder = f"{self._staging(unit)}{self._ids.new_id()}/"
        pointer.move(self._s3, self._bucket, _note_key(folder), {"base": base.etag if base else None}, seen=None)
        return Staged(unit, run, folder, base)

    def publish(self, staged: Staged) -> Manifest:
        """Make the staged files the unit, all at once; no file at all clears it. Again changes nothing.

        Raises:
            LostClaim: The unit was published by somebody else after `stage`; readers keep seeing that.
        """
        crash_point("overwrite.files.before_publish")
        files = tuple(self._list(staged.folder))
        manifest = Manifest(staged.unit, staged.run, staged.folder, files, self._clock.now())
        key = self._manifest_key(staged.unit)
        try:
            pointer.move(self._s3, self._bucket, key, _document(manifest), seen=staged.base)
        except LostClaim:
            # The folder is this attempt's own: a manifest that names it is ours, and only its answer was lost.
            shown = self.read(staged.unit)
            if shown is None or shown.folder != staged.folder:
                raise
            return shown
        crash_point("overwrite.files.after_publish")
        return manifest

    def read(self, unit: str) -> Manifest | None:
        """What readers of the unit should read; None when it was never published."""
        _check_unit(unit)
        seen = pointer.read(self._s3, self._bucket, self._manifest_key(unit))
        return _manifest(seen.content) if seen else None

    def address(self, key_or_folder: str) -> str:
        """An object or folder as Spark spells it."""
        return f"s3a://{self._bucket}/{key_or_folder}"

    def sweep(self, unit: str, *, superseded_before: datetime) -> int:
        """Delete the folders that can never be published any more, and return how many objects went.

        A folder staged on another base than today's manifest has lost for good, so no attempt under way is hurt.

        Args:
            unit: The unit to sweep.
            superseded_before: Nothing is deleted while the current manifest is younger than this: readers may still
                follow the one before it.
        """
        # First the notes, then the manifest: a folder opened in between is not in the list, so it cannot be hurt.
        notes = list(self._notes(unit))
        seen = pointer.read(self._s3, self._bucket, self._manifest_key(unit))
        if seen is None or _manifest(seen.content).published_at >= superseded_before:
            return 0
        kept = (_note_key(seen.content["folder"]),)
        return sum(self._sweep_folder(note, seen.etag) for note in notes if note not in kept)

    def _sweep_folder(self, note: str, current: str) -> int:
        found = pointer.read(self._s3, self._bucket, note)
        if found is None or found.content["base"] == current:
            return 0
        doomed = [item["Key"] for item in self._objects(note.removesuffix(_NOTE) + "/")]
        for key in [*doomed, note]:
            self._s3.delete_object(Bucket=self._bucket, Key=key)
        return len(doomed)

    def _notes(self, unit: str) -> Iterator[str]:
        staging = self._staging(unit)
        for key in (item["Key"] for item in self._objects(staging)):
            # Deeper ones belong to another unit, whose name begins with ours.
            if key.endswith(_NOTE) and "/" not in key.removeprefix(staging):
                yield key

    def _staging(self, unit: str) -> str:
        _check_unit(unit)
        return f"{self._prefix}/_staged/{unit}/"

    def _manifest_key(self, unit: str) -> str:
        return f"{self._prefix}/{unit}/_manifest.json"

    def _list(self, folder: str) -> Iterator[File]:
        for item in self._objects(folder):
            name = item["Key"].removeprefix(folder)
            if not any(part.startswith(("_", ".")) for part in name.split("/")):  # _SUCCESS, _temporary, .crc
                yield File(item["Key"], item["Size"], item["ETag"])

    def _objects(self, prefix: str) -> Iterator[Any]:
        with pointer.answered(prefix):
            for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                yield from page.get("Contents", ())


def _note_key(folder: str) -> str:
    return folder.rstrip("/") + _NOTE


def _check_unit(unit: str) -> None:
    parts = unit.split("/")
    if any(not part or part in (".", "..") or part.startswith("_") for part in parts):
        raise InvalidInput(f"{unit!r} is not a unit.", next_step="write it like date=2026-03-01 or a/b.")


def _document(manifest: Manifest) -> dict[str, Any]:
    return {
        "unit": manifest.unit,
        "run": manifest.run,
        "folder": manifest.folder,
        "files": [file._asdict() for file in manifest.files],
        "published_at": manifest.published_at.isoformat(),
    }


def _manifest(content: dict[str, Any]) -> Manifest:
    return Manifest(
        content["unit"],
        content["run"],
        content["folder"],
        tuple(File(**file) for file in content["files"]),
        datetime.fromisoformat(content["published_at"]),
    )
