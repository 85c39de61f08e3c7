"""Windows: two vaults publish a backlog, one window comes late, one is poison, and an operator puts both right.

What belongs here: the plot and what is claimed of it. What does not: what a vault publishes (lockstep/vaultsim) and
what the warehouse must hold (oracle.py).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from lockstep.faults import oracle
from lockstep.kernel.errors import InvalidInput, LockstepError
from lockstep.vaultsim.model import VaultState
from lockstep.vaultsim.packing import world_of
from lockstep.warehouse.model import vault_schema
from stack.demo.pictures import take_failed_partition, take_lineage
from stack.demo.stage import Stage

SCENE = "windows"
_MINUTES = "%Y-%m-%d %H:%M"
_WARNING_SECONDS = 180.0

_STATUSES = """
query Statuses($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) { ... on AssetNode { assetPartitionStatuses {
    ... on TimePartitionStatuses { ranges { startKey endKey status } } } } }
}"""
_LANE = "SELECT epoch, watermark FROM windows.apply_control WHERE vault = %s"
_CHAIN = """
SELECT start, stop, applied_at FROM windows.applied_window
 WHERE vault = %s AND epoch = %s AND kind IN ('incremental', 'gap') AND start >= %s ORDER BY applied_at, stop"""


class Backlog(NamedTuple):
    """The windows that one vault publishes in this performance, by number; `trouble` is the late or poison one."""

    vault: str
    first: int
    trouble: int
    last: int
    state: VaultState

    @property
    def group(self) -> str:
        """The group of the vault's assets in Dagster."""
        return f"vault_{self.vault.replace('-', '_')}"

    @property
    def count(self) -> int:
        """How many windows."""
        return self.last - self.first + 1

    def start(self, index: int) -> datetime:
        """When a window starts."""
        return self.state.config.start_of(index)

    def stop(self, index: int) -> datetime:
        """When a window stops."""
        return self.state.config.stop_of(index)

    def partition(self, index: int) -> str:
        """The name of a window's partition in Dagster."""
        return f"{self.start(index):{_MINUTES}}"

    def minute(self, index: int) -> str:
        """A window's stop as commands take it."""
        return f"{self.stop(index):%Y%m%d%H%M}"


def play(stage: Stage) -> None:
    """The scene."""
    late, poison = plan(stage)
    _link(stage, poison)
    try:
        for backlog in (late, poison):
            unblock(stage, backlog)
        _publish(stage, late, poison)
        _watch_them_stop(stage, late, poison)
        _call_of_the_operator(stage)
        _release(stage, late)
        _heal(stage, poison)
        for backlog in (late, poison):
            _wait_for(stage, backlog, backlog.last + 1)
    finally:
        _tidy(stage, late, poison)
    for backlog in (late, poison):
        _examine(stage, backlog)


def plan(stage: Stage) -> tuple[Backlog, Backlog]:
    """The first two vaults that the simulator feeds go on where they stand."""
    fed = [vault for vault in stage.stack.settings.vault_ids if _is_fed(stage, vault)]
    if len(fed) < 2:
        raise InvalidInput(
            "the demo needs two vaults whose windows all came from the simulator.",
            next_step="name further ones in LOCKSTEP_VAULTS, or begin anew with `lockstep reset --yes`.",
        )
    return _backlog(stage, fed[0], 0), _backlog(stage, fed[1], 1)


def _is_fed(stage: Stage, vault: str) -> bool:
    """Whether the lane is the simulator's: one that is further than the simulator was filled by somebody else."""
    state = VaultState.model_validate(stage.get("vault", f"/_control/vaults/{vault}"))
    mark = _watermark(stage, vault)
    return mark is None or mark <= state.config.stop_of(state.published - 1)


def _backlog(stage: Stage, vault: str, place: int) -> Backlog:
    state = VaultState.model_validate(stage.get("vault", f"/_control/vaults/{vault}"))
    first, count = state.published, stage.sizes.windows
    trouble = first + (count // 3 if place == 0 else count // 2)
    return Backlog(vault, first, trouble, first + count - 1, state)


def _link(stage: Stage, poison: Backlog) -> None:
    base = stage.url("dagster")
    stage.links["lineage of all assets"] = f"{base}/asset-groups"
    stage.links["partitions of the windows"] = f"{base}/assets/{poison.group}/applied_windows?view=partitions"


def unblock(stage: Stage, backlog: Backlog) -> None:
    """A window that failed in an earlier performance is tried again: what was wrong with it is mended by now."""
    mark = _watermark(stage, backlog.vault)
    if mark is None or mark >= backlog.start(backlog.first):
        return
    lane = stage.command(SCENE, "windows", "list", "--vault", backlog.vault)
    for stop in (row["stop"] for row in lane["windows"] if row["status"] == "FAILED"):
        stage.command(SCENE, "windows", "retry", "--vault", backlog.vault, "--stop", stop, "--reason", "demo")


def _publish(stage: Stage, late: Backlog, poison: Backlog) -> None:
    vendor(stage, late, "withhold", stop=late.minute(late.trouble))
    vendor(stage, poison, "poison", stop=poison.minute(poison.trouble))
    for one in (late, poison):
        vendor(stage, one, "publish", windows=one.count)
    reports = stage.command(SCENE, "windows", "produce", "--reason", "demo")
    gaps = [gap for report in reports if report["vault"] == late.vault for gap in report["gaps"]]
    stage.claim(SCENE, "the producer records the withheld window as a gap and fetches those behind it", 1, len(gaps))
    stage.backlog.tell({one.vault: one.stop(one.last) for one in (late, poison)})


def vendor(stage: Stage, backlog: Backlog, deed: str, **how: Any) -> None:
    """What `lockstep vault DEED` does, by the same call of the simulator's controls."""
    words = " ".join(f"--{name} {value}" for name, value in how.items())
    stage.say(SCENE, f"the vendor: lockstep vault {deed} --vault {backlog.vault} {words}")
    stage.post("vault", f"/_control/vaults/{backlog.vault}/{deed}", how)


def _watch_them_stop(stage: Stage, late: Backlog, poison: Backlog) -> None:
    """The lane with the gap stops before it; the lane with the poison stops at it, red; neither skips."""
    stage.say(SCENE, f"vault {late.vault} drains up to the gap, vault {poison.vault} up to the poison window")
    _wait_for(stage, late, late.trouble)
    red = poison.partition(poison.trouble)
    stage.wait(lambda: colours(stage, poison).get(red) == "FAILED", f"the red partition {red} of {poison.vault}")
    before, behind = poison.trouble - poison.first, poison.last - poison.trouble
    stage.claim(
        SCENE,
        "a poison window is the only red partition; those before it are green, those behind it wait",
        f"{before} MATERIALIZED, 1 FAILED, {behind} MISSING",
        oracle.in_a_row(colours(stage, poison).values()),
    )
    stage.claim(SCENE, "nothing steps over the gap", late.stop(late.trouble - 1), _watermark(stage, late.vault))
    if stage.pictures is not None:
        stage.say(SCENE, f"taking pictures into {stage.pictures}")
        take_failed_partition(stage, poison.group, red, stage.pictures)
        take_lineage(stage, poison.group, stage.pictures)


def _call_of_the_operator(stage: Stage) -> None:
    """An operator comes when the warning of the mart that waits is out; without it, after a while."""
    stage.say(SCENE, "both lanes stand; the operator comes when the SLA of the mart is at risk")
    try:
        stage.wait(lambda: stage.warned.settled, "the warning", _WARNING_SECONDS)
    except LockstepError:
        stage.check()  # the readiness scene says itself what it missed; here the operator comes all the same


def _release(stage: Stage, late: Backlog) -> None:
    vendor(stage, late, "release", stop=late.minute(late.trouble))
    stage.command(SCENE, "windows", "produce", "--vault", late.vault, "--reason", "demo: the late window is out")


def _heal(stage: Stage, poison: Backlog) -> None:
    """The vendor mends the window; one press of Materialize fetches it anew, and the backlog drains behind it."""
    vendor(stage, poison, "heal", stop=poison.minute(poison.trouble))
    stage.say(SCENE, f"materialize the red partition {poison.partition(poison.trouble)} of vault {poison.vault}")
    run = stage.materialize((poison.group, "applied_windows"), poison.partition(poison.trouble))
    stage.links["the run that healed the lane"] = f"{stage.url('dagster')}/runs/{run}"
    stage.finished(run, "the run of the healed window")


def _tidy(stage: Stage, late: Backlog, poison: Backlog) -> None:
    """Whatever happened: the vendor's faults go, so that the next performance meets sound windows."""
    for backlog, deed in ((late, "release"), (poison, "heal")):
        body = {"stop": backlog.minute(backlog.trouble)}
        stage.post_quietly("vault", f"/_control/vaults/{backlog.vault}/{deed}", body)


# --- looking ---------------------------------------------------------------------------------------------------------


def _watermark(stage: Stage, vault: str) -> datetime | None:
    with stage.reading("LOCKSTEP_WAREHOUSE_DSN") as connection:
        row = connection.execute(_LANE, (vault,)).fetchone()
    return row[1] if row else None


def _wait_for(stage: Stage, backlog: Backlog, count: int) -> None:
    """Wait until every window before number `count` is applied."""
    goal = backlog.stop(count - 1)
    stage.say(SCENE, f"waiting for the daemon: vault {backlog.vault} up to {goal:{_MINUTES}}")

    def there() -> bool:
        mark = _watermark(stage, backlog.vault)
        return mark is not None and mark >= goal

    stage.wait(there, f"the watermark {goal:{_MINUTES}} of vault {backlog.vault}")


def colours(stage: Stage, backlog: Backlog) -> dict[str, str]:
    """What the Dagster UI shows for each window of the backlog."""
    data = stage.graph.ask(_STATUSES, key={"path": [backlog.group, "applied_windows"]})
    ranges = data["assetNodeOrError"]["assetPartitionStatuses"]["ranges"]
    names = [backlog.partition(index) for index in range(backlog.first, backlog.last + 1)]
    return {
        name: next((one["status"] for one in ranges if one["startKey"] <= name <= one["endKey"]), "MISSING")
        for name in names
    }


# --- claims ----------------------------------------------------------------------------------------------------------


def _examine(stage: Stage, backlog: Backlog) -> None:
    stage.say(SCENE, f"comparing the warehouse of vault {backlog.vault} with the simulator's own data")
    names = [backlog.partition(index) for index in range(backlog.first, backlog.last + 1)]
    green = {name: "MATERIALIZED" for name in names}
    try:
        stage.wait(lambda: colours(stage, backlog) == green, "green partitions", 60.0)
    except LockstepError:
        stage.check()  # the claim below says which are not
    shown = sum(colour == "MATERIALIZED" for colour in colours(stage, backlog).values())
    stage.claim(SCENE, f"vault {backlog.vault}: every partition of the backlog is green", backlog.count, shown)
    with stage.reading("LOCKSTEP_WAREHOUSE_DSN") as connection:
        epoch = connection.execute(_LANE, (backlog.vault,)).fetchone()[0]  # type: ignore[index]  # it was waited for
        chain = connection.execute(_CHAIN, (backlog.vault, epoch, backlog.start(backlog.first))).fetchall()
        problems = oracle.chain_problems(chain, backlog.start(backlog.first), backlog.count)
        words = f"vault {backlog.vault}: the ledger has every window once, in order, without a gap"
        expected = f"{backlog.count} in order"
        stage.claim(SCENE, words, expected, "; ".join(problems[:3]) or f"{len(chain)} in order")
        tables = oracle.expected_tables(world_of(backlog.state), backlog.last)
        differences = oracle.compare_warehouse(connection, vault_schema(backlog.vault), tables)
    wrong = {name: str(one) for name, one in differences.items() if one.missing or one.extra or one.other}
    rows = sum(one.rows for one in differences.values())
    found = f"{rows} rows in {len(differences)} tables, all equal" if not wrong else str(wrong)
    words = f"vault {backlog.vault}: every warehouse row is the simulator's"
    wanted = sum(len(held) for _, held in tables.values())
    stage.claim_that(SCENE, words, f"{wanted} rows, all equal", found, not wrong)
