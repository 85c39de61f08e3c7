"""Why Spark could not write a tick: is it the tick, for ever, or the platform, for now.

What belongs here: the judgement of one failure. What does not: retries. Unknown means transient: an agent that asks
again loses nothing, an agent that is told `invalid` stops.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

from botocore.exceptions import BotoCoreError, ClientError

from lockstep.idempotency import delta
from lockstep.kernel.deliver import as_aws_error
from lockstep.kernel.errors import LockstepError, Transient
from lockstep.ticks.rules import InvalidManifest

_OTHER_TYPE = ("DELTA_FAILED_TO_MERGE_FIELDS", "DELTA_MERGE_INCOMPATIBLE", "DELTA_CHANGE_TABLE_COLUMN")
_BATCH_ROWS = 4096


def explain_failure(error: Exception, s3: Any, bucket: str, keys: Sequence[str], *, tick_id: str) -> LockstepError:
    """The error to raise instead: `InvalidManifest` when the tick itself is at fault, else `Transient`.

    Spark says much the same of a damaged page, of a store that is away and of a lost executor, each under several
    names, so the parts are read once more, here.
    """
    unit, condition = f"tick {tick_id}", delta.condition_of(error)
    if condition.startswith(_OTHER_TYPE):
        return InvalidManifest(
            "SchemaConflict", "a column would change its type.", unit=unit, problems=[first_line(error)]
        )
    try:
        problems = [f"{key.rpartition('/')[2]}: {why}" for key in keys if (why := unreadable(s3, bucket, key))]
    except LockstepError as away:
        return away
    if problems:
        return InvalidManifest("UnreadablePart", "some parts cannot be read.", unit=unit, problems=problems)
    return Transient(
        f"bronze could not be written: {condition or type(error).__name__}: {first_line(error)}", unit=unit
    )


def unreadable(s3: Any, bucket: str, key: str) -> str | None:
    """Decode a stored part from end to end, a little at a time; why it cannot be, or None. Raises `Transient`."""
    import pyarrow as pa  # heavy, and only failures need it
    import pyarrow.parquet as pq

    with tempfile.TemporaryFile() as copy:
        try:
            s3.download_fileobj(bucket, key, copy)
        except (ClientError, BotoCoreError) as error:
            raise as_aws_error(error, unit=key) from error
        copy.seek(0)
        try:
            for _ in pq.ParquetFile(cast("BinaryIO", copy)).iter_batches(batch_size=_BATCH_ROWS):
                pass
        except (pa.ArrowException, OSError, ValueError) as error:
            return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """What a person reads: the rest of an error of Spark is the stack of its JVM."""
    lines = str(error).replace("\x00", "").strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
