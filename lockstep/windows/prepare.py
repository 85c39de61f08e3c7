"""Preparing windows: manifests, missing tables and columns, staging schemas, and the call that stages.

What belongs here: everything between a queue row and a staged window. What does not: the tasks themselves (staging.py)
and the transaction that applies them (store.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LockstepError, Terminal, Transient
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.warehouse.catalog import read_metadata, wanted_table
from lockstep.warehouse.dialect import Change
from lockstep.warehouse.model import Table, short_name, vault_schema
from lockstep.windows.model import FileType, QueueRow, RawFile, RawManifest
from lockstep.windows.places import Place
from lockstep.windows.store import Claim, Staged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lockstep.windows.staging import StageJob, StageResult

_READERS = 4
SCHEMA_CHANGES = "metadata"
"""The object whose rows say that the vendor changed a schema."""


class Preparer:
    """Makes windows ready to be applied. Called from one thread at a time."""

    def __init__(
        self,
        place: Place,
        spark: Callable[[], SparkSession] | None,
        *,
        open_s3: Callable[[], Any],
        bucket: str,
        ids: IdSource | None = None,
    ) -> None:
        """`open_s3` and the place's writers also travel to Spark's workers. Without `spark` this process stages."""
        self._place = place
        self._s3 = open_s3()
        self._spark = spark
        self._open_s3 = open_s3
        self._bucket = bucket
        self._ids = ids or SystemIds()

    def prepare(
        self, claim: Claim, rows: Sequence[QueueRow], *, schema: str | None = None
    ) -> list[Staged | LockstepError]:
        """Stage these windows. The answer is in order; it may end early, after an error."""
        try:
            return self._prepare(claim, rows, schema or vault_schema(claim.vault))
        except LockstepError as error:
            return [error]

    def drop_stages(self, claim: Claim, staged: Iterable[Staged] | None = None) -> None:
        """Drop the staging of these windows; by default all of this vault up to this fence, a dead worker's too."""
        self._place.drop_stages(claim, None if staged is None else {one.schema for one in staged})

    def read_manifest(self, row: QueueRow) -> RawManifest:
        """The window's own manifest, proven by the queue row's checksum."""
        unit = str(row.window)
        body = self._get(row.s3_prefix + row.window.manifest_key.rpartition("/")[2], unit)
        if hashlib.sha256(body).hexdigest() != row.checksum:
            raise Terminal("the raw manifest is not the one that the queue row names.", unit=unit)
        try:
            manifest = RawManifest.from_json(body)
        except InvalidInput as error:
            raise Terminal(error.what, unit=unit, next_step=error.next_step) from error
        # The epoch may differ: a window is applied again in a later one.
        if replace(manifest.window, epoch=row.window.epoch) != row.window:
            raise Terminal(f"the raw manifest is for {manifest.window}.", unit=unit)
        return manifest

    def _prepare(self, claim: Claim, rows: Sequence[QueueRow], schema: str) -> list[Staged | LockstepError]:
        manifests, refused = self._manifests(rows)
        if not manifests:
            return [refused] if refused else []
        manifests, present, late = self._evolve(schema, manifests)
        refused = late or refused
        names = sorted({file.object for manifest in manifests for file in manifest.files})
        tables = {name: replace(self._table(present, name), name=name) for name in names}
        stage = self._place.open_stage(claim, self._ids.new_id()[-12:], tables)
        crash_point("windows.stage.before_copy")
        results = self._stage(stage, tables, manifests)
        crash_point("windows.stage.after_copy")
        staged = [
            one.error or self._staged(manifest, one, tables, stage)
            for manifest, one in zip(manifests, results, strict=True)
        ]
        return [*staged, refused] if refused else staged

    def _manifests(self, rows: Sequence[QueueRow]) -> tuple[list[RawManifest], LockstepError | None]:
        with ThreadPoolExecutor(_READERS) as pool:
            futures = [pool.submit(self.read_manifest, row) for row in rows]
        found: list[RawManifest] = []
        for future in futures:
            error = future.exception()
            if isinstance(error, LockstepError):
                return found, error
            found.append(future.result())
        return found, None

    def _evolve(
        self, schema: str, manifests: Sequence[RawManifest]
    ) -> tuple[list[RawManifest], dict[str, Table], LockstepError | None]:
        """Add tables and columns that these windows bring, before any of their transactions. Returns the tables too."""
        present = self._place.tables(schema)
        good: list[RawManifest] = []
        for manifest in manifests:
            try:
                wanted = self._unknown(manifest, present)
                if wanted:
                    self._place.evolve(schema, wanted)
                    present = self._place.tables(schema)
                    crash_point("windows.evolve.after_ddl")
            except Terminal as error:
                return good, present, error
            good.append(manifest)
        return good, present, None

    def _unknown(self, manifest: RawManifest, present: dict[str, Table]) -> list[Table]:
        headers: dict[str, list[Sequence[str]]] = {}
        for file in manifest.files:
            headers.setdefault(file.object, [])
            if file.type is FileType.UPSERT:
                headers[file.object].append(file.columns)
        unit, fresh = str(manifest.window), []
        told = any(file.object == SCHEMA_CHANGES and file.rows for file in manifest.files)  # a text may have grown
        for name, files in headers.items():
            known = present.get(short_name(name, self._place.identifier_limit))
            if told or known is None or any(set(columns) - set(known.by_name) for columns in files):
                fresh.append((name, files))
        if not fresh:
            return []
        declared: dict[str, Table] = {}
        if manifest.schema is not None:
            text = self._get(manifest.schema.key, unit)
            if hashlib.sha256(text).hexdigest() != manifest.schema.sha256:
                raise Terminal("metadata.csv is not what the manifest says: its sha256 differs.", unit=unit)
            declared = read_metadata(text.decode("utf-8-sig"), unit=unit)
        return [wanted_table(name, files, declared, unit=unit) for name, files in fresh]

    def _stage(self, stage: str, tables: dict[str, Table], manifests: Sequence[RawManifest]) -> list[StageResult]:
        from lockstep.windows import staging  # imports pyarrow, which sensors never need

        jobs = [
            staging.StageJob(number, str(manifest.window), _worth_reading(manifest.files))
            for number, manifest in enumerate(manifests)
        ]
        target = staging.StageTarget(self._bucket, tables, self._open_s3, self._place.writer(stage))
        done = self._run(staging, target, [job for job in jobs if job.files])
        return [done.get(job.number) or staging.StageResult(job.number, 0, None, frozenset()) for job in jobs]

    def _run(self, staging: Any, target: Any, jobs: Sequence[StageJob]) -> dict[int, StageResult]:
        if not jobs:
            return {}
        if self._spark is None:
            results = list(staging.stage_share(target, jobs))
        else:
            results = staging.stage(self._spark(), target, jobs)
        return {one.number: one for one in results}

    def _staged(self, manifest: RawManifest, result: StageResult, tables: dict[str, Table], stage: str) -> Staged:
        changes: dict[str, Change] = {}
        for file in manifest.files:
            change = changes.get(file.object) or Change(tables[file.object], dedupe=file.object in result.doubled)
            if file.type is FileType.UPSERT:
                change = replace(change, columns=file.columns, upserts=file.rows)
            else:
                change = replace(change, deletes=file.rows)
            changes[file.object] = change
        return Staged(manifest.window, result.load, manifest.checksum, tuple(changes.values()), stage)

    def _table(self, present: dict[str, Table], name: str) -> Table:
        return present[short_name(name, self._place.identifier_limit)]

    def _get(self, key: str, unit: str) -> bytes:
        try:
            body: bytes = self._s3.get_whole(self._bucket, key)
        except ClientError as error:
            if str(error.response.get("Error", {}).get("Code")) in ("NoSuchKey", "404"):
                raise Terminal(f"{key} is missing in the bucket.", unit=unit, next_step="produce it again.") from None
            raise Transient(f"{key} could not be read: {error}", unit=unit) from error
        except BotoCoreError as error:
            raise Transient(f"{key} could not be read: {error}", unit=unit) from error
        return body


def _worth_reading(files: Iterable[RawFile]) -> tuple[RawFile, ...]:
    """Files with rows: an empty one has nothing to load, and its count of zero is in the manifest already."""
    return tuple(file for file in files if file.rows)
