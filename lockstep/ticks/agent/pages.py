"""From a folder of Parquet files to the parts of a tick: pages of bounded size, with a manifest that describes them.

What belongs here: reading the exporter's files, writing pages. What does not: sending them (sender.py). Pages are
written aside and the tick is recorded when all of them are there: a crash before that starts over.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lockstep.kernel.clock import Clock, SystemClock
from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import types
from lockstep.ticks.agent.state import AgentStore, AgentTick, LocalPart
from lockstep.ticks.model import SCHEMA_VERSION, Mode
from lockstep.ticks.rules import check_id

MARKER = "tick.json"
"""Written last by whoever exports: a folder without it is not complete."""

WORK = ".agent"
PART_BYTES = 5 * 1024 * 1024
_ROWS_AT_ONCE = 8192


class Described(NamedTuple):
    """What to send as one tick: the files by table, their keys, and how they are meant.

    `deleted`, by table: the boolean column that marks rows whose key is gone.
    """

    tick_id: str
    mode: Mode
    dt: str
    files: Mapping[str, Path]
    keys: Mapping[str, Sequence[str]]
    deleted: Mapping[str, str] = MappingProxyType({})


class Pager:
    """Cuts files into pages named `<stem>_seq=NNN.parquet`, where NNN counts through the whole tick."""

    def __init__(
        self,
        store: AgentStore,
        work: Path,
        *,
        org_id: str,
        project_id: str,
        part_bytes: int = PART_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self._store, self._work, self._part_bytes = store, work, part_bytes
        self._org_id, self._project_id, self._clock = org_id, project_id, clock or SystemClock()

    def collect(self, folder: Path) -> list[str]:
        """Page every complete tick folder that is not known yet, in the order of their names."""
        known = {tick.tick_id for tick in self._store.ticks()}
        marked = sorted(
            marker.parent for marker in folder.glob(f"*/{MARKER}") if not marker.parent.name.startswith(".")
        )
        found = []
        for place in marked:
            described = self.describe(place)
            if described.tick_id not in known:
                self.stage(described)
                found.append(described.tick_id)
        return found

    def describe(self, folder: Path) -> Described:
        """Read the marker of a tick folder.

        It is `{"mode", "dt", "primary_key": {table: [column]}, "deleted_column": {table: column}}`; only the keys are
        needed.
        """
        try:
            marker = json.loads((folder / MARKER).read_text("utf-8"))
            keys = {str(name): [str(one) for one in key] for name, key in marker["primary_key"].items()}
            deleted = {str(name): str(column) for name, column in (marker.get("deleted_column") or {}).items()}
            mode, dt = Mode(marker.get("mode", Mode.DELTA)), str(marker.get("dt") or self._today())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"{MARKER} cannot be used: {type(error).__name__}: {error}.",
                unit=str(folder),
                next_step='write {"mode": "delta", "dt": "20260507", "primary_key": {"orders": ["id"]}}.',
            ) from error
        files = {path.stem: path for path in sorted(folder.glob("*.parquet"))}
        return Described(str(marker.get("tick_id") or folder.name), mode, dt, files, keys, deleted)

    def mend(self, folder: Path, tick_id: str) -> bool:
        """Page the folder of a failed or skipped tick once more, as it is now; False if it has none here."""
        for marker in sorted(folder.glob(f"*/{MARKER}")):
            try:
                described = self.describe(marker.parent)
            except InvalidInput:
                if marker.parent.name == tick_id:
                    raise
                continue  # another tick's
            if described.tick_id == tick_id:
                self.stage(described)
                return True
        return False

    def stage(self, tick: Described) -> None:
        """Write the pages of a tick and remember it. Raises `InvalidInput`; nothing is remembered then.

        A tick that failed or was skipped is mended: it goes again with these files. Any other tick that is known must
        have the same ones: they would not be sent, and whoever staged them would believe that they were.
        """
        check_id("tick_id", tick.tick_id)
        if not tick.files or set(tick.files) != set(tick.keys):
            raise InvalidInput(
                "the files and the primary keys do not name the same tables.",
                unit=tick.tick_id,
                problems=[f"files: {sorted(tick.files)}", f"primary_key: {sorted(tick.keys)}"],
            )
        if unknown := sorted(set(tick.deleted) - set(tick.files)):
            raise InvalidInput(
                "deleted_column names tables that the tick does not have.", unit=tick.tick_id, problems=unknown
            )
        known = self._store.get(tick.tick_id)
        mends = known is not None and known.state.may_be_mended
        aside = known is not None and not mends  # its pages may be on their way
        target = self._work / "pages" / (f".{tick.tick_id}" if aside else tick.tick_id)
        shutil.rmtree(target, ignore_errors=True)  # of an attempt that died before the tick was remembered
        target.mkdir(parents=True)
        parts: list[LocalPart] = []
        tables = []
        for name, path in tick.files.items():
            columns, pages = self._page(check_id("table", name), path, target, first=len(parts))
            table = {"name": name, "primary_key": list(tick.keys[name]), "columns": columns, "parquets": pages}
            tables.append(table | ({"deleted_column": tick.deleted[name]} if name in tick.deleted else {}))
            parts += [
                LocalPart(one["file_seq"], target / _name(name, one["file_seq"]), one["sha256"], one["bytes"], 0, False)
                for one in pages
            ]
        manifest = self._manifest(tick, tables)
        if known is None:
            self._store.add(tick.tick_id, manifest, parts)
        elif mends:
            self._store.mend(tick.tick_id, manifest, parts)
        else:
            shutil.rmtree(target, ignore_errors=True)
            _refuse_others(known, manifest)

    def discard(self, tick_id: str) -> None:
        """Remove the pages of a tick that is committed."""
        shutil.rmtree(self._work / "pages" / tick_id, ignore_errors=True)

    def _manifest(self, tick: Described, tables: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "org_id": self._org_id,
            "project_id": self._project_id,
            "tick_id": tick.tick_id,
            "mode": tick.mode.value,
            "dt": tick.dt,
            "tables": tables,
        }

    def _page(
        self, table: str, path: Path, target: Path, *, first: int
    ) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
        import pyarrow as pa  # heavy, and only paging needs it
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as source:
                schema = _microseconds(source.schema_arrow)
                pages = list(self._write_pages(source, schema, table, target, first))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InvalidInput(f"the file cannot be paged: {error}", unit=str(path)) from error
        columns = [
            {"name": field.name, "type": types.from_arrow(str(field.type)) or str(field.type)} for field in schema
        ]
        return columns, pages

    def _write_pages(self, source: Any, schema: Any, table: str, target: Path, first: int) -> Iterator[dict[str, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        room = self._rows_of_a_page(source.metadata)
        number, waiting, rows = first, [], 0
        for batch in source.iter_batches(batch_size=min(room, _ROWS_AT_ONCE)):
            waiting.append(batch)
            rows += batch.num_rows
            if rows >= room:
                yield self._write(
                    pq, pa.Table.from_batches(waiting).select(schema.names).cast(schema), table, target, number
                )
                number, waiting, rows = number + 1, [], 0
        if waiting or number == first:  # a table without rows is one empty page
            last = pa.Table.from_batches(waiting, source.schema_arrow).select(schema.names).cast(schema)
            yield self._write(pq, last, table, target, number)

    def _rows_of_a_page(self, metadata: Any) -> int:
        size = sum(
            metadata.row_group(group).column(one).total_compressed_size
            for group in range(metadata.num_row_groups)
            for one in range(metadata.num_columns)
        )
        return max(1, int(self._part_bytes * metadata.num_rows / size)) if size else _ROWS_AT_ONCE

    def _write(self, pq: Any, rows: Any, table: str, target: Path, number: int) -> dict[str, Any]:
        path = target / _name(table, number)
        pq.write_table(rows, path, compression="zstd", store_schema=False)
        return {"file_seq": number, "sha256": sha256_of(path), "bytes": path.stat().st_size, "rows": rows.num_rows}

    def _today(self) -> str:
        now: datetime = self._clock.now()
        return f"{now:%Y%m%d}"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_others(known: AgentTick, manifest: Mapping[str, Any]) -> None:
    if any(known.manifest.get(name) != manifest[name] for name in ("mode", "tables")):
        raise InvalidInput(
            f"the tick is {known.state.value} with other files; these were not sent.",
            unit=f"tick {known.tick_id}",
            next_step="send them as another tick.",
        )


def _name(table: str, number: int) -> str:
    return f"{table}_seq={number:03}.parquet"


def _microseconds(schema: Any) -> Any:
    """The same columns as bronze takes them: nanoseconds become microseconds, categories become their values.

    A column of which not even the type is known is left out: bronze has NULL there anyway, and a guessed type would
    refuse the first tick that brings values.
    """
    import pyarrow as pa

    fields = []
    for field in schema:
        kind = field.type
        if pa.types.is_null(kind):
            continue
        if pa.types.is_timestamp(kind) and kind.unit == "ns":
            kind = pa.timestamp("us", tz=kind.tz)
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        fields.append(pa.field(field.name, kind, field.nullable))
    return pa.schema(fields)
