"""Where windows are staged for Redshift: files and COPY manifests in the bucket, which the warehouse itself reads.

What belongs here: keys, writing, and what a value must be like so that COPY loses nothing of it. What does not: reading
and checking the vendor's files (staging.py), the COPY statement (lockstep/warehouse/redshift.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.kernel.errors import Terminal
from lockstep.warehouse.dialect import DELETED, ROW, UPSERT
from lockstep.warehouse.evolve import evolve, read_tables
from lockstep.warehouse.model import ColumnType, Table
from lockstep.warehouse.redshift import NULL_MARK, PRECISION, SCALE, RedshiftDialect, Sources, copy_manifest
from lockstep.warehouse.session import Session
from lockstep.windows.raw import storage_errors
from lockstep.windows.store import Claim, Staged

if TYPE_CHECKING:
    from lockstep.windows.staging import Piece, Writer

_NUMBER = rf"^[+-]?[0-9]{{1,{PRECISION - SCALE}}}(\.[0-9]{{0,{SCALE}}}0*)?$"
_DELETE_AT_ONCE = 1000


def sources(bucket: str, staged: Staged) -> dict[str, Sources]:
    """Where the staged files of a window are, by table."""
    folder = f"s3://{bucket}/{staged.schema}{staged.load:x}"
    return {
        one.table.name: Sources(
            upserts=f"{folder}/{one.table.name}_u.manifest" if one.upserts else None,
            deletes=f"{folder}/{one.table.name}_d.manifest" if one.deletes else None,
        )
        for one in staged.changes
    }


@dataclass(frozen=True)
class RedshiftPlace:
    """Staging in the bucket; tables in the warehouse."""

    connect: Callable[[], Session]
    open_s3: Callable[[], Any]
    bucket: str
    dialect: RedshiftDialect
    identifier_limit: int = RedshiftDialect.identifier_limit

    def tables(self, schema: str) -> dict[str, Table]:
        """The tables of a schema as they are now, by name."""
        with closing(self.connect()) as session:
            return read_tables(session, schema)

    def evolve(self, schema: str, wanted: Iterable[Table]) -> None:
        """Add what is missing, each statement on its own, outside any transaction."""
        with closing(self.connect()) as session:
            evolve(session, self.dialect, schema, wanted)

    def open_stage(self, claim: Claim, name: str, tables: Mapping[str, Table]) -> str:
        """A folder needs no making; its name carries vault and fence."""
        return f"staging/vault={claim.vault}/fence={claim.fence}/{name}/"

    def drop_stages(self, claim: Claim, stages: Collection[str] | None = None) -> None:
        """Delete these folders, or what the vault has up to this fence."""
        client = self.open_s3()
        for prefix in [f"staging/vault={claim.vault}/"] if stages is None else sorted(stages):
            with storage_errors(prefix):
                doomed = [key for key in _keys(client, self.bucket, prefix) if stages or _fence(key) <= claim.fence]
                for start in range(0, len(doomed), _DELETE_AT_ONCE):
                    objects = [{"Key": key} for key in doomed[start : start + _DELETE_AT_ONCE]]
                    client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})

    def writer(self, stage: str) -> Callable[[], Writer]:
        """Files and manifests."""
        return FileFactory(self.open_s3, self.bucket, stage)


@dataclass(frozen=True)
class FileFactory:
    """Opens a `FileWriter`; travels to Spark's workers."""

    open_s3: Callable[[], Any]
    bucket: str
    stage: str

    def __call__(self) -> FileWriter:
        """Open it."""
        from lockstep.windows.staging import cached  # imports pyarrow

        return FileWriter(cached(self.open_s3), self.bucket, self.stage)


class FileWriter:
    """Writes each piece as one file. A manifest that names all files of a table comes last."""

    def __init__(self, client: Any, bucket: str, stage: str) -> None:
        self._client = client
        self._bucket = bucket
        self._stage = stage
        self._files: dict[int, dict[tuple[str, str], list[str]]] = {}

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write the pieces. A file that no manifest names is never loaded, so half a call does no harm."""
        bodies = [_encoded(piece) for piece in pieces]  # all are checked before one is written
        written: dict[int, dict[tuple[str, str], list[str]]] = {}
        for piece, body in zip(pieces, bodies, strict=True):
            known = self._files.get(piece.load, {}).get((piece.object, piece.kind), [])
            fresh = written.setdefault(piece.load, {}).setdefault((piece.object, piece.kind), [])
            key = f"{self._stage}{piece.load:x}/{piece.object}_{piece.kind}_{len(known) + len(fresh):05}.csv"
            self._put(key, body)
            fresh.append(f"s3://{self._bucket}/{key}")
        for load, tables in written.items():
            for table, files in tables.items():
                self._files.setdefault(load, {}).setdefault(table, []).extend(files)

    def finish(self, load: int) -> None:
        """Write the COPY manifests of a load."""
        for (table, kind), files in self._files.pop(load, {}).items():
            self._put(f"{self._stage}{load:x}/{table}_{kind}.manifest", copy_manifest(files))

    def close(self) -> None:
        """Nothing is open."""

    def _put(self, key: str, body: Any) -> None:
        with storage_errors(key):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body)


def _encoded(piece: Piece) -> bytes:
    """CSV in the order of COPY's columns: every value in quotes, a bare mark for NULL.

    COPY cannot tell a quoted nothing from a bare one, and Arrow's own writer would quote the mark too.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    _check(piece)
    tags = (ROW,) if piece.kind == UPSERT else (DELETED, ROW)
    cells = []
    for name in (*piece.columns, *tags):
        text = pc.replace_substring(piece.rows.column(name).cast(pa.string()), '"', '""')
        cells.append(pc.binary_join_element_wise('"', text, '"', "").fill_null(NULL_MARK))
    lines = pc.binary_join_element_wise(*cells, ",")
    return ("\n".join(lines.to_pylist()) + "\n").encode()


def _check(piece: Piece) -> None:
    """COPY rounds what does not fit a NUMERIC, in silence; and a text that is the mark for NULL would become NULL."""
    import pyarrow.compute as pc

    for name in piece.columns:
        values = piece.rows.column(name)
        if pc.any(pc.equal(values, NULL_MARK)).as_py():
            raise Terminal(f"{piece.object}, column {name}: a value is the mark that stands for NULL.")
        if piece.types.get(name) is ColumnType.NUMBER:
            fits = pc.match_substring_regex(values, _NUMBER)
            if pc.all(fits, min_count=0).as_py() is False:
                raise Terminal(f"{piece.object}, column {name}: no number, or more digits than NUMERIC(38,10) holds.")


def _keys(client: Any, bucket: str, prefix: str) -> Iterator[str]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        yield from (str(one["Key"]) for one in page.get("Contents", ()))


def _fence(key: str) -> int:
    return int(key.split("/fence=", 1)[1].split("/", 1)[0])
