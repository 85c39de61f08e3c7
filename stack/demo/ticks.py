"""Ticks: agents push their exports over a line that resets and cuts; silver and gold follow.

What belongs here: the plot and what is claimed of it. What does not: the bad line (lossy.py) and the rows that must
arrive (oracle.py).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.faults import oracle
from lockstep.kernel.errors import Transient
from stack.demo.lossy import LossyProxy, Weather
from stack.demo.stage import Stage
from stack.environment import LOOPBACK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCENE = "ticks"
TABLE = "orders"
_ROUNDS = 6  # how often an agent that gave up is started again
_PAGE_MIB = "0.01"
_APPLIED = "SELECT tick_id FROM silver.applied WHERE project_id = %s ORDER BY sequence"
_COMMITTED = """
SELECT tick_id, committed_at FROM ticks.tick
 WHERE project_id = %s AND state = 'committed' ORDER BY sequence"""


class Sender(NamedTuple):
    """One agent: its project, its folder, and what it sends, tick by tick."""

    number: int
    org: str
    project: str
    secret: str
    folder: Path
    sent: list[list[oracle.Order]]

    @property
    def tick_ids(self) -> list[str]:
        """The ticks in the order in which they go: the names of their folders."""
        return [f"{self.org}-{tick:03d}" for tick in range(len(self.sent))]


def play(stage: Stage) -> None:
    """The scene."""
    base = stage.url("dagster")
    stage.links["partitions of silver"] = f"{base}/assets/silver_ticks?view=partitions"
    with _folder() as folder:
        senders = [_sender(stage, folder, number) for number in range(stage.sizes.agents)]
        _send(stage, senders)
    _await_silver(stage, senders)
    days = _gold(stage, senders)
    with _spark(stage) as spark:
        _examine(stage, spark, senders, days)


@contextmanager
def _folder() -> Iterator[Path]:
    """Where the agents' exports lie, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sender(stage: Stage, folder: Path, number: int) -> Sender:
    org = f"demo-{stage.token}-{number + 1}"
    made = stage.command(SCENE, "ticks", "project", "add", "--org", org)
    sent = [oracle.tick_rows(number, tick, stage.sizes.rows) for tick in range(stage.sizes.ticks)]
    sender = Sender(number, org, made["project_id"], made["api_secret"], folder / org, sent)
    for tick_id, rows in zip(sender.tick_ids, sent, strict=True):
        _export(sender.folder / tick_id, rows, first=rows is sent[0])
    return sender


def _export(folder: Path, rows: list[oracle.Order], *, first: bool) -> None:
    """What a customer's exporter leaves: Parquet files and, last, the marker."""
    import pyarrow as pa  # heavy, and only this scene needs it
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    columns = {
        "id": pa.array([row.id for row in rows], pa.int64()),
        "customer": [row.customer for row in rows],
        "amount": pa.array([row.amount for row in rows], pa.int64()),
    }
    pq.write_table(pa.table(columns), folder / f"{TABLE}.parquet")
    marker = {"mode": "full" if first else "delta", "dt": f"{datetime.now(UTC):%Y%m%d}", "primary_key": {TABLE: ["id"]}}
    (folder / "tick.json").write_text(json.dumps(marker))


def _send(stage: Stage, senders: list[Sender]) -> None:
    """All agents at once, through one bad line."""
    target = (LOOPBACK, stage.port("ingest"))
    seed = int.from_bytes(stage.token.encode(), "big") % 2**32
    with LossyProxy(target, Weather(seed, stage.sizes.loss)) as line:
        with ThreadPoolExecutor(len(senders), thread_name_prefix="agent") as pool:
            waiting = [pool.submit(_agent, stage, sender, line.url) for sender in senders]
            for one in waiting:
                one.result()
        damage = line.damage
    told = ", ".join(f"{count} {fate.value}" for fate, count in damage.items()) or "none"
    stage.claim_that(SCENE, "the line was bad", "at least one connection harmed", told, bool(damage))


def _agent(stage: Stage, sender: Sender, url: str) -> None:
    """`lockstep agent run DIR --once`; if the line is so bad that it gives up, once more, as its service would."""
    environment = {
        "AGENT_URL": url,
        "AGENT_ORG": sender.org,
        "AGENT_PROJECT": sender.project,
        "AGENT_SECRET": sender.secret,
    }
    words = ("agent", "run", str(sender.folder), "--once", "--parallel", "2", "--part-size", _PAGE_MIB)
    for _ in range(_ROUNDS):
        ticks = stage.command(SCENE, *words, environment=environment, codes=(0, 1)) or []
        if ticks and all(one["state"] == "committed" for one in ticks):
            return
    states = {one["tick_id"]: one["error"] or one["state"] for one in ticks}
    raise Transient(f"its ticks were not committed: {states}", unit=f"agent {sender.org}")


def _await_silver(stage: Stage, senders: list[Sender]) -> None:
    def waiting() -> int:
        with stage.reading("LOCKSTEP_POSTGRES_DSN") as connection:
            done = [len(connection.execute(_APPLIED, (one.project,)).fetchall()) for one in senders]
        stage.say(SCENE, f"silver follows: {sum(done)} of {sum(len(one.sent) for one in senders)} ticks applied")
        return sum(len(one.sent) for one in senders) - sum(done)

    stage.wait(lambda: waiting() == 0, "every committed tick in silver")


def _gold(stage: Stage, senders: list[Sender]) -> dict[str, dict[date, int]]:
    """Make gold of the days on which bronze committed, now instead of at the full hour. Returns ticks by day."""
    days: dict[str, dict[date, int]] = {}
    with stage.reading("LOCKSTEP_POSTGRES_DSN") as connection:
        for one in senders:
            counts = days.setdefault(one.project, {})
            for _, at in connection.execute(_COMMITTED, (one.project,)).fetchall():
                counts[at.date()] = counts.get(at.date(), 0) + 1
    for day in sorted({day for counts in days.values() for day in counts}):
        stage.say(SCENE, f"materialize gold of {day}")
        run = stage.materialize(("ticks_daily",), day.isoformat())
        stage.finished(run, f"gold of {day}")
    return days


@contextmanager
def _spark(stage: Stage) -> Iterator[SparkSession]:
    """A session of its own: the oracle's look at the tables does not go through the platform's code."""
    from pyspark.sql import SparkSession  # heavy

    session = SparkSession.builder.remote(stage.setting("LOCKSTEP_SPARK_REMOTE")).create()
    try:
        yield session
    finally:
        session.stop()


def _examine(stage: Stage, spark: SparkSession, senders: list[Sender], days: Mapping[str, Mapping[date, int]]) -> None:
    stage.say(SCENE, "comparing silver and gold with the rows that the agents sent")
    lake = f"s3a://{stage.stack.settings.lake_bucket}"
    for one in senders:
        expected = oracle.silver_rows(one.sent)
        read = spark.read.format("delta").load(f"{lake}/silver/{one.project}/{TABLE}").select(*oracle.Order._fields)
        found = oracle.compare_silver(expected, [oracle.Order(*row) for row in read.collect()])
        words = f"agent {one.number + 1}: silver holds the last row of every key that was sent, once"
        stage.claim(SCENE, words, f"{len(expected)} rows, all equal", str(found))
        with stage.reading("LOCKSTEP_POSTGRES_DSN") as connection:
            applied = [row[0] for row in connection.execute(_APPLIED, (one.project,)).fetchall()]
        words = f"agent {one.number + 1}: every tick is applied once, in the order in which it was sent"
        stage.claim(SCENE, words, [tick[-3:] for tick in one.tick_ids], [tick[-3:] for tick in applied])
    _examine_gold(stage, spark, lake, senders, days)


def _examine_gold(
    stage: Stage, spark: SparkSession, lake: str, senders: list[Sender], days: Mapping[str, Mapping[date, int]]
) -> None:
    daily = spark.read.format("delta").load(f"{lake}/gold/ticks_daily")
    projects = [one.project for one in senders]
    rows: list[Any] = (
        daily.where(daily.project_id.isin(projects)).select("project_id", "day", "ticks", "rows").collect()
    )
    found = {(row["project_id"], row["day"]): row["ticks"] for row in rows}
    expected = {(project, day): count for project, counts in days.items() for day, count in counts.items()}
    words = "gold counts every tick of every agent on its day, once"
    stage.claim_that(SCENE, words, f"{sum(expected.values())} ticks", f"{sum(found.values())} ticks", found == expected)
    sent = sum(len(rows) for one in senders for rows in one.sent)
    stage.claim(SCENE, "gold counts every row that was sent", sent, sum(row["rows"] for row in rows))
