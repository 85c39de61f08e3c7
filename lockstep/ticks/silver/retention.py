"""What is forgotten: old days of bronze and gold, stored parts, and files that no table needs any more. All audited.

What belongs here: how long things are kept, and letting go of them by metadata. What does not: words for the terminal
(operations_cli.py). Silver's rows and the ledger of ticks are kept for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from lockstep.idempotency import delta
from lockstep.idempotency.cleaner_delta import clean_delta, forget_delta
from lockstep.kernel.crash import crash_point
from lockstep.kernel.errors import InvalidInput
from lockstep.ticks import bronze
from lockstep.ticks.model import DAY_COLUMN
from lockstep.ticks.parts import PartObjects
from lockstep.ticks.silver.gold import Gold
from lockstep.ticks.silver.operations import Parts
from lockstep.ticks.silver.store import Actor
from lockstep.ticks.silver.tables import table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RETENTION_DAYS = 365
FILES_DAYS = 30
"""Files that a table no longer needs are kept so long at least: a replay goes back by them."""


class Forgotten(NamedTuple):
    """What retention removed."""

    before: str
    bronze_files: int
    gold_rows: int
    ticks_without_parts: int
    tables: tuple[str, ...]


def retain(
    parts: Parts,
    spark: SparkSession,
    lake: str,
    objects: PartObjects,
    actor: Actor,
    *,
    days: int = RETENTION_DAYS,
    dry_run: bool = False,
) -> Forgotten:
    """Forget bronze and gold of days that ended longer ago than this, by metadata: whole partitions, no row deletes.

    The stored parts of ticks that were committed longer ago go too. Silver holds the newest state of each key and is
    not touched. The ledger of ticks is kept.
    """
    if days < 1:
        raise InvalidInput(f"{days} days keep nothing.", next_step="give --days 1 or more.")
    since = parts.store.ticks.now() - timedelta(days=days)  # a machine whose clock runs ahead would forget too much
    limit = since.date()
    before = f"{limit:%Y%m%d}"
    tables = parts.store.bronze_tables_before(before)
    files = rows = without = 0
    if not dry_run:
        run = f"retention:{before}"
        parts.store.audit(actor, "ticks-retention", before, {"days": days, "tables": len(tables)})
        for project_id, table in tables:
            files += forget_delta(spark, bronze.table_path(lake, project_id, table), DAY_COLUMN, before=before, run=run)
            crash_point("silver.retention.table_forgotten")
        gold = Gold(spark, lake)
        for day in gold.days_before(limit):
            rows += clean_delta(spark, gold.daily, day, run=run)
        without = _forget_parts(parts, objects, since)
    return Forgotten(before, files, rows, without, tuple(f"{project}/{table}" for project, table in tables))


class Vacuumed(NamedTuple):
    """Which tables were freed of files that nothing needs."""

    days: int
    tables: tuple[str, ...]


def vacuum_tables(
    parts: Parts,
    spark: SparkSession,
    lake: str,
    actor: Actor,
    *,
    days: int = FILES_DAYS,
    project_id: str | None = None,
    each: Callable[[list[str]], Iterable[str]] = iter,
) -> Vacuumed:
    """Delete files of bronze, silver and gold that no version of the last `days` needs. Rows and versions stay.

    Merges and forgotten days leave such files. A death in between is mended by calling it again; ticks may come and
    silver may work meanwhile. `each` is handed the tables and may show how far it is.

    Raises:
        InvalidInput: So few days would take from a replay what it goes back by. Nothing was changed.
    """
    if days < FILES_DAYS:
        raise InvalidInput(
            f"{days} days of files are too few for a replay.", next_step=f"give --days {FILES_DAYS} or more."
        )
    parts.store.audit(actor, "ticks-vacuum", project_id or "all projects", {"days": days})
    tables = list(_tables(parts, spark, lake, project_id))
    for path in each(tables):
        delta.vacuum(spark, path, keep=timedelta(days=days))
        crash_point("silver.vacuum.table_done")
    return Vacuumed(days, tuple(tables))


def _tables(parts: Parts, spark: SparkSession, lake: str, project_id: str | None) -> Iterator[str]:
    """Every table that is there; silver's may not be made yet."""
    for project, table in parts.store.tables_of_ticks(project_id):
        yield bronze.table_path(lake, project, table)
        if delta.exists(spark, silver := table_path(lake, project, table)):
            yield silver
    if project_id is None:
        yield from (path for path in Gold(spark, lake).paths if delta.exists(spark, path))


def _forget_parts(parts: Parts, objects: PartObjects, before: datetime) -> int:
    """Objects first: rows without objects are found again, objects without rows never."""
    gone = 0
    while ticks := parts.store.ticks.with_parts_before(before):
        for project_id, tick_id in ticks:
            objects.sweep(project_id, tick_id, keep=(), before=parts.clock.now())
            parts.store.ticks.forget_parts(project_id, tick_id)
        gone += len(ticks)
    return gone
