"""Ticks for tests: Parquet parts in memory and the manifests that describe them. Needs no stack."""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = [{"name": "id", "type": "bigint"}, {"name": "name", "type": "string"}]


def parquet(table: Mapping[str, Any] | pa.Table, **options: Any) -> bytes:
    """A Parquet file of these columns."""
    target = io.BytesIO()
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(dict(table)), target, **options)
    return target.getvalue()


def people(rows: int = 10, start: int = 0, word: str = "n") -> bytes:
    """A part with `id` and `name`."""
    ids = range(start, start + rows)
    return parquet({"id": pa.array(ids, pa.int64()), "name": [f"{word}{one}" for one in ids]})


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def new_tick_id() -> str:
    return f"20260507T120000__{secrets.token_hex(6)}"


@dataclass(frozen=True)
class Draft:
    """A tick before it is sent: its parts by number, and its manifest."""

    tick_id: str
    parts: Mapping[int, bytes]
    manifest: dict[str, Any]


def spec(number: int, body: bytes) -> dict[str, Any]:
    """A part as a manifest declares it."""
    try:
        rows = pq.read_metadata(io.BytesIO(body)).num_rows
    except (pa.ArrowException, OSError):
        rows = 0
    return {"file_seq": number, "sha256": sha256(body), "bytes": len(body), "rows": rows}


def table(
    name: str,
    parts: Mapping[int, bytes],
    *,
    columns: Sequence[Mapping[str, str]] = COLUMNS,
    key: Sequence[str] = ("id",),
) -> dict[str, Any]:
    """A table as a manifest declares it."""
    return {
        "name": name,
        "primary_key": list(key),
        "columns": [dict(column) for column in columns],
        "parquets": [spec(number, body) for number, body in parts.items()],
    }


def manifest(
    org_id: str, project_id: str, tick_id: str, tables: Sequence[Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    """A whole manifest."""
    return {
        "schema_version": "1.0",
        "org_id": org_id,
        "project_id": project_id,
        "tick_id": tick_id,
        "mode": "delta",
        "dt": "20260507",
        "tables": [dict(one) for one in tables],
        **more,
    }
