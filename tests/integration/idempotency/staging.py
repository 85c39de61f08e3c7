"""Task attempts without Spark: the same COPY, the same receipts, and attempts that die after their commit."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from lockstep.idempotency.transactional import Receipt, StageTask, Staging, open_staging
from lockstep.kernel.ids import SystemIds
from lockstep.kernel.postgres import Connection

COLUMNS = ("id", "unit")
Row = tuple[int, str]


def stage(
    connection: Connection,
    dsn: str,
    target: Sequence[str],
    partitions: Sequence[Sequence[Row]],
    *,
    failures: Sequence[int] = (),
    run: str = "r",
) -> Staging:
    """Stage each partition; those listed in `failures` have an earlier attempt that committed and then died."""
    task = StageTask(dsn, open_staging(connection, target, COLUMNS, run=run, ids=SystemIds()), COLUMNS)
    receipts: list[Receipt] = []
    attempt = 0
    for number, rows in enumerate(partitions):
        for lives in [False] * failures.count(number) + [True]:
            attempt += 1
            receipt = task.copy([_batch(rows)], number, attempt)
            receipts += [receipt] if lives else []
    return Staging(task.table, tuple(target), COLUMNS, tuple(receipts))


def _batch(rows: Sequence[Row]) -> Any:
    hashes = [int.from_bytes(blake2b(repr(row).encode(), digest_size=8).digest(), "big", signed=True) for row in rows]
    columns = [pa.array([row[0] for row in rows], pa.int32()), pa.array([row[1] for row in rows], pa.string())]
    return pa.RecordBatch.from_arrays([*columns, pa.array(hashes, pa.int64())], names=[*COLUMNS, "_hash"])
