"""Any order of runs, crashes, zombies and replays of file units leaves what a clean run leaves. On real S3."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.idempotency.overwrite import FileUnits
from lockstep.kernel.clock import FakeClock
from lockstep.kernel.crash import CrashInjected, armed
from lockstep.kernel.errors import LostClaim
from lockstep.kernel.ids import SystemIds

pytestmark = pytest.mark.stack


class Run(NamedTuple):
    """One execution: its unit, its rows, where it dies first, and whether a zombie of it comes back."""

    unit: str
    rows: tuple[int, ...]
    crash: str | None
    zombie: bool


RUNS = st.lists(
    st.builds(
        Run,
        unit=st.sampled_from(["a", "a/b", "c"]),
        rows=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        crash=st.sampled_from([None, "overwrite.files.before_publish", "overwrite.files.after_publish"]),
        zombie=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


class World:
    """File units, and what a run does with them."""

    def __init__(self, s3: Any, bucket: str) -> None:
        self.s3, self.bucket, self.clock = s3, bucket, FakeClock()
        self.units = FileUnits(s3, bucket, f"p-{secrets.token_hex(4)}", ids=SystemIds(), clock=self.clock)

    def attempt(self, run: Run) -> None:
        staged = self.units.stage(run.unit, run="r")
        for index, row in enumerate(run.rows):
            self.s3.put_object(Bucket=self.bucket, Key=f"{staged.folder}{index}", Body=str(row).encode())
        self.clock.advance(1)
        self.units.publish(staged)

    def execute(self, run: Run) -> None:
        zombie = self.units.stage(run.unit, run="zombie") if run.zombie else None
        if run.crash:
            with pytest.raises(CrashInjected), armed(run.crash, "raise"):
                self.attempt(run)
        self.attempt(run)
        if zombie:
            with pytest.raises(LostClaim):
                self.units.publish(zombie)
        self.units.sweep(run.unit, superseded_before=self.clock.now() + timedelta(days=1))

    def rows(self, unit: str) -> list[int] | None:
        manifest = self.units.read(unit)
        if manifest is None:
            return None
        get = self.s3.get_object
        return [int(get(Bucket=self.bucket, Key=file.key)["Body"].read()) for file in manifest.files]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=RUNS, replay_from=st.integers(0, 4))
def test_any_history_of_file_units_ends_as_a_clean_run(s3: Any, bucket: str, runs: list[Run], replay_from: int):
    world = World(s3, bucket)
    for run in [*runs, *runs[replay_from:]]:
        world.execute(run)
    clean = {run.unit: list(run.rows) for run in runs}
    assert {unit: world.rows(unit) for unit in ("a", "a/b", "c")} == {u: clean.get(u) for u in ("a", "a/b", "c")}
