"""Preparing windows: manifests, missing tables and columns, staging schemas, and the call that stages.

What belongs here: everything between a queue row and a staged window. What does not: the tasks themselves (staging.py)
and the transaction that applies them (store.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput, LockstepError, Terminal, Transient
from lockstep.kernel.ids import IdSource, SystemIds
from lockstep.kernel.postgres import Connection, transaction, translated
from lockstep.warehouse.catalog import read_metadata, wanted_table
from lockstep.warehouse.dialect import Change, quoted
from lockstep.warehouse.evolve import evolve, read_tables
from lockstep.warehouse.model import Table, short_name, vault_schema
from lockstep.warehouse.postgres import PostgresDialect
from lockstep.windows.model import BUCKET, FileType, QueueRow, RawFile, RawManifest
from lockstep.windows.store import Claim, Staged

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lockstep.windows.staging import StageJob, StageResult

_READERS = 4
_STAGES = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)"


class Preparer:
    """Makes windows ready to be applied. Called from one thread at a time."""

    def __init__(
        self,
        s3: Any,
        spark: Callable[[], SparkSession] | None,
        *,
        connect: Callable[[], Connection],
        open_s3: Callable[[], Any],
        bucket: str = BUCKET,
        ids: IdSource | None = None,
    ) -> None:
        """`connect` and `open_s3` also travel to Spark's workers. Without `spark`, staging runs in this process."""
        self._s3 = s3
        self._spark = spark
        self._connect = connect
        self._open_s3 = open_s3
        self._bucket = bucket
        self._ids = ids or SystemIds()
        self._dialect = PostgresDialect()

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
        with closing(self._connect()) as connection, translated("dropping staging", unit=claim.vault):
            if staged is not None:
                names = {one.schema for one in staged}
            else:
                found = connection.execute(_STAGES, (f"stage:{claim.vault}:",)).fetchall()
                names = {name for (name,) in found if int(name.rsplit(":", 2)[1]) <= claim.fence}
            for name in sorted(names):
                connection.execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE".encode())

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
        with closing(self._connect()) as connection:
            manifests, late = self._evolve(connection, schema, manifests)
            refused = late or refused
            present = read_tables(connection, schema)
            stage = self._create_stage(connection, claim, present, manifests)
        crash_point("windows.stage.before_copy")
        results = self._stage(stage, present, manifests)
        crash_point("windows.stage.after_copy")
        staged = [
            one.error or self._staged(manifest, one, present, stage)
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
        self, connection: Connection, schema: str, manifests: Sequence[RawManifest]
    ) -> tuple[list[RawManifest], LockstepError | None]:
        """Add tables and columns that these windows bring, before any of their transactions."""
        present = read_tables(connection, schema)
        good: list[RawManifest] = []
        for manifest in manifests:
            try:
                wanted = self._unknown(manifest, present)
                if wanted:
                    evolve(connection, self._dialect, schema, wanted)
                    present = read_tables(connection, schema)
                    crash_point("windows.evolve.after_ddl")
            except Terminal as error:
                return good, error
            good.append(manifest)
        return good, None

    def _unknown(self, manifest: RawManifest, present: dict[str, Table]) -> list[Table]:
        headers: dict[str, list[Sequence[str]]] = {}
        for file in manifest.files:
            headers.setdefault(file.object, [])
            if file.type is FileType.UPSERT:
                headers[file.object].append(file.columns)
        unit, fresh = str(manifest.window), []
        for name, files in headers.items():
            known = present.get(short_name(name, self._dialect.identifier_limit))
            if known is None or any(set(columns) - set(known.by_name) for columns in files):
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

    def _create_stage(
        self, connection: Connection, claim: Claim, present: dict[str, Table], manifests: Sequence[RawManifest]
    ) -> str:
        stage = f"stage:{claim.vault}:{claim.fence}:{self._ids.new_id()[-12:]}"
        names = sorted({file.object for manifest in manifests for file in manifest.files})
        with transaction(connection, what="creating staging"):
            connection.execute(f"CREATE SCHEMA {quoted(stage)}".encode())
            for name in names:
                table = replace(_table(present, name), name=name)
                for statement in self._dialect.create_staging(stage, table):
                    connection.execute(statement.encode())
        return stage

    def _stage(self, stage: str, present: dict[str, Table], manifests: Sequence[RawManifest]) -> list[StageResult]:
        from lockstep.windows import staging  # noqa: PLC0415  # imports pyarrow, which sensors never need

        jobs = [
            staging.StageJob(number, str(manifest.window), _worth_reading(manifest.files))
            for number, manifest in enumerate(manifests)
        ]
        names = {file.object for job in jobs for file in job.files}
        tables = {name: _table(present, name) for name in names}
        target = staging.StageTarget(self._bucket, stage, tables, self._open_s3, self._connect)
        busy = [job for job in jobs if job.files]
        done = self._run(staging, target, busy)
        return [done.get(job.number) or staging.StageResult(job.number, 0, None, frozenset()) for job in jobs]

    def _run(self, staging: Any, target: Any, jobs: Sequence[StageJob]) -> dict[int, StageResult]:
        if not jobs:
            return {}
        if self._spark is None:
            results = list(staging.stage_share(target, jobs))
        else:
            results = staging.stage(self._spark(), target, jobs)
        return {one.number: one for one in results}

    def _staged(self, manifest: RawManifest, result: StageResult, present: dict[str, Table], stage: str) -> Staged:
        changes: dict[str, Change] = {}
        for file in manifest.files:
            table = replace(_table(present, file.object), name=file.object)
            change = changes.get(file.object) or Change(table, dedupe=file.object in result.doubled)
            if file.type is FileType.UPSERT:
                change = replace(change, columns=file.columns, upserts=file.rows)
            else:
                change = replace(change, deletes=file.rows)
            changes[file.object] = change
        return Staged(manifest.window, result.load, manifest.checksum, tuple(changes.values()), stage)

    def _get(self, key: str, unit: str) -> bytes:
        try:
            body: bytes = self._s3.get_object(Bucket=self._bucket, Key=key)["Body"].read()
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


def _table(present: dict[str, Table], name: str) -> Table:
    return present[short_name(name, PostgresDialect.identifier_limit)]
